"""What every room shares about the machine."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from diffurefill import runtime
from diffurefill.config import UserError
from diffurefill.runtime import doctor, require_writable, set_threads

COUNT_PAGES = """
import resource
import sys
import torch
from diffurefill.runtime import set_threads

def pages():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

count, size = map(int, sys.argv[1:])
set_threads(1)
for _ in range(12):  # the first ones find the places that the next ones keep
    before = pages()
    held = [torch.ones(size << 20) for _ in range(count)]
    del held
    print(pages() - before)
"""


def glibc() -> tuple[int, ...]:
    """() where the C library is another."""
    name, version = platform.libc_ver()
    return tuple(map(int, version.split("."))) if name == "glibc" else ()


@pytest.mark.skipif(not glibc(), reason="its allocator is another")
@pytest.mark.parametrize(("count", "millions"), [(8, 4), (2, 16)])
def test_memory_that_is_freed_is_not_asked_for_again(count: int, millions: int):
    if millions > 8 and glibc() < (2, 35):
        pytest.skip("it keeps 32 MB at most")
    command = [sys.executable, "-c", COUNT_PAGES, str(count), str(millions)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    first, *_, last = map(int, done.stdout.split())
    of_a_round = count * 4 * (millions << 20) // 4096
    assert last < 0.01 * of_a_round < first


@pytest.mark.parametrize("num_threads", [0, -1])
def test_there_is_at_least_one_thread(num_threads: int):
    with pytest.raises(UserError, match="--threads must be at least 1"):
        set_threads(num_threads)


def test_doctor_tells_the_room_of_the_named_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DIFFUREFILL_CACHE", str(tmp_path))
    assert doctor()["temporary"].endswith(f"free in {tmp_path}")


def test_a_trial_of_a_file_leaves_it_and_a_link_as_they_were(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "named")
    (tmp_path / "full").write_text("kept")
    for name in ("link", "full", "new"):
        require_writable(tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "link"]
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "full").read_text() == "kept"


@pytest.mark.parametrize(
    ("cpuinfo", "has"),
    [("flags : fpu amx_bf16 avx", True), ("flags : fpu amx_bf16_new", False), (None, False)],
)
def test_matrix_units_are_what_the_cpu_s_flags_say(
    monkeypatch: pytest.MonkeyPatch, cpuinfo: str | None, has: bool
) -> None:
    monkeypatch.setattr(runtime, "_text", lambda path: cpuinfo)
    assert runtime.cpu_has_amx.__wrapped__() is has
