"""Local copies go where they are sent, and those of killed processes do not stay."""

import subprocess
import sys
from pathlib import Path

import pytest

import diffurefill
from diffurefill.config import UserError
from diffurefill.copies import copies_place, local_copies

HOLD_COPIES = """
from diffurefill.copies import local_copies

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
    assert users - own == {"copies.py", "commands/doctor.py"}
