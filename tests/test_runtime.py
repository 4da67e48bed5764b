"""What every room shares about the machine."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

import diffurefill
from diffurefill.config import UserError
from diffurefill.runtime import (
    copies_place,
    doctor,
    local_copies,
    require_writable,
    set_threads,
)

COUNT_PAGES = """
import resource
import torch
from diffurefill.runtime import set_threads

def pages():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

set_threads(1)
for _ in range(5):
    before = pages()
    held = [torch.ones(4 << 20) for _ in range(8)]
    del held
    print(pages() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="its allocator is another")
def test_memory_that_is_freed_is_not_asked_for_again():
    command = [sys.executable, "-c", COUNT_PAGES]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    first, *_, last = map(int, done.stdout.split())
    of_a_round = 8 * 4 * (4 << 20) // 4096
    assert last < 0.01 * of_a_round < first


@pytest.mark.parametrize("num_threads", [0, -1])
def test_there_is_at_least_one_thread(num_threads: int):
    with pytest.raises(UserError, match="--threads must be at least 1"):
        set_threads(num_threads)


# --- local copies --------------------------------------------------------------------------------

HOLD_COPIES = """
from diffurefill.runtime import local_copies

with local_copies() as folder:
    (folder / "global.safetensors").write_bytes(bytes(1000))
    print(folder.parent, flush=True)
    input()
"""


def test_local_copies_go_to_the_named_folder_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    place = tmp_path / "not made yet" / "copies"
    monkeypatch.setenv("DIFFUREFILL_CACHE", str(place))
    with local_copies() as folder:
        assert folder.is_dir()
        assert folder.is_relative_to(place)
        (folder / "file").touch()
    assert not list(place.iterdir())


def test_a_place_that_is_empty_is_none_and_a_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("DIFFUREFILL_CACHE", "")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert copies_place() == tmp_path
    (tmp_path / "file").touch()
    for place in ("file", "file/below"):
        monkeypatch.setenv("DIFFUREFILL_CACHE", str(tmp_path / place))
        with pytest.raises(UserError, match="name another folder in DIFFUREFILL_CACHE"):
            copies_place()


def test_copies_of_a_killed_process_go_with_the_next_one_and_those_in_use_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("fcntl")
    monkeypatch.setenv("DIFFUREFILL_CACHE", str(tmp_path))
    foreign = tmp_path / "diffurefill-without-a-lock"
    foreign.mkdir()
    command, pipe = [sys.executable, "-c", HOLD_COPIES], subprocess.PIPE
    with (
        subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as killed,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as alive,
    ):
        assert killed.stdout is not None
        assert alive.stdout is not None
        left, used = (Path(p.stdout.readline().strip()) for p in (killed, alive))
        killed.kill()
        killed.wait()
        assert left.is_dir()
        with local_copies():
            assert not left.exists()
            assert (used / "copies" / "global.safetensors").exists()
        alive.communicate("\n")
    assert list(tmp_path.iterdir()) == [foreign]


def test_every_local_copy_lies_in_that_folder():
    """But for folders that hold no copies: the check of an export's, the simulator's, and the one
    in which doctor tests a disk."""
    source = Path(diffurefill.__file__).parent
    users = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*.py")
        if "TemporaryDirectory(" in path.read_text("utf-8")
    }
    own = {"release/check.py", "fleet/simulate/capacity.py", "fleet/simulate/chaos.py"}
    assert users - own == {"runtime.py", "commands/doctor.py"}


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
