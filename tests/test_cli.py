"""The command line: quick help without torch, clear one-line errors, honest exit codes."""

import ast
import dataclasses
import inspect
import itertools
import os
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from diffurefill import cli
from diffurefill.cli import COMMANDS, main
from diffurefill.commands import common
from diffurefill.commands.common import progress, say
from diffurefill.commands.facts import Factbook, Templates, Write
from diffurefill.commands.fleet import Status
from diffurefill.config import (
    DataConfig,
    DecodeConfig,
    FleetConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimConfig,
    ProbeConfig,
    RunConfig,
    Source,
    Stage,
    TrainConfig,
    UserError,
)
from diffurefill.store.base import Busy, Corrupt, StoreError
from tests.tiny import tiny_config, write_config, write_corpus

SETTINGS = (
    RunConfig,
    ModelConfig,
    DataConfig,
    Source,
    ObjectiveConfig,
    OptimConfig,
    TrainConfig,
    FleetConfig,
    ProbeConfig,
    DecodeConfig,
    Stage,
)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "diffurefill", *arguments], capture_output=True, text=True
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_help_imports_no_torch(command: str) -> None:
    code = (
        "import sys; from diffurefill.cli import main\n"
        f"try: main([*{command.split()!r}, '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'pyarrow', 'tokenizers', 'numpy', 'diffurefill.fleet.worker'}\n"
        "heavy &= set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"diffurefill {command}" in done.stdout


def undescribed(command: type[Any]) -> list[str]:
    """Fields of a dataclass, inherited ones too, that no text explains in `--help`."""
    missing = []
    for made_of in command.__mro__:
        if not dataclasses.is_dataclass(made_of):
            continue
        [tree] = ast.parse(textwrap.dedent(inspect.getsource(made_of))).body
        assert isinstance(tree, ast.ClassDef)
        for field, after in itertools.pairwise([*tree.body, ast.Pass()]):
            told = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if isinstance(field, ast.AnnAssign) and not told:
                missing.append(ast.unparse(field.target))
    sections = [f.name for f in dataclasses.fields(RunConfig) if f.name != "seed"]
    return [name for name in missing if name not in ("settings", "how", "arguments", *sections)]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_complete(command: str) -> None:
    title = (COMMANDS[command].__doc__ or "").splitlines()[0]
    assert title.endswith("."), "the list of commands shows this line alone"
    assert undescribed(COMMANDS[command]) == []


@pytest.mark.parametrize("settings", [*SETTINGS, Write, Templates, Factbook])
def test_every_setting_is_explained(settings: type[Any]) -> None:
    assert undescribed(settings) == []


def test_a_reader_that_goes_away_is_no_error() -> None:
    """As `diffurefill ... | head` does; the pipe is closed before anything is written."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as gone:
        command = [sys.executable, "-m", "diffurefill.cli", "--help"]
        done = subprocess.run(command, stdout=gone, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (141, "")


def test_the_package_itself_imports_no_torch_and_still_offers_its_names() -> None:
    code = (
        "import sys, diffurefill\n"
        "assert 'torch' not in sys.modules\n"
        "assert diffurefill.load_preset('demo')\n"
        "assert all(hasattr(diffurefill, n) for n in diffurefill.__all__)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_no_arguments_show_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    shown = capsys.readouterr().out
    assert all(name in shown for name in COMMANDS)


def test_a_misspelt_command_is_answered_with_the_near_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["wroker"]) == 2
    assert "did you mean `diffurefill worker`" in capsys.readouterr().err


def expect_mistake(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The single error line of a command that must exit with 2."""
    assert main(list(arguments)) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ")
    assert "\n" not in error
    return error


def test_a_store_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("worker", "merger", "status", "audit", "generate", "probe"):
        assert "diffurefill init" in expect_mistake(capsys, command, str(tmp_path / "none"))


def test_a_folder_of_something_else_is_named_as_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "books").mkdir()
    write_corpus(tmp_path / "books")
    for command in ("worker", "merger", "status", "audit", "generate", "probe"):
        said = expect_mistake(capsys, command, str(tmp_path / "books"))
        assert "which holds other files" in said
        assert f"init {tmp_path}" not in said


@pytest.mark.parametrize("command", ["worker", "status", "generate", "init"])
def test_an_address_that_lost_a_slash_is_no_folder(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for address in ("hf:/user/repo", "hf:user/repo"):
        said = expect_mistake(capsys, command, address)
        assert "did you mean hf://user/repo?" in said
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_not_looked_for_on_the_hub(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for place in ("./none", "../none"):
        for command in ("generate", "probe"):
            assert "no run at" in expect_mistake(capsys, command, place)


@pytest.mark.parametrize(
    ("error", "starts_again"), [(Busy("full of others", 1.0), True), (Corrupt("restore it"), False)]
)
def test_only_what_passes_is_answered_with_start_again(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: StoreError,
    starts_again: bool,
) -> None:
    def fail(self: Status) -> int:
        raise error

    monkeypatch.setattr(Status, "run", fail)
    assert main(["status", "x"]) == 1
    assert capsys.readouterr().err.strip().endswith("nothing is lost") is starts_again


def test_a_missing_corpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = str(tmp_path / "nothing" / "*.txt")
    assert "nothing" in expect_mistake(capsys, "init", str(tmp_path / "r"), "--data", data)
    assert not (tmp_path / "r").exists()


def test_an_empty_corpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.txt").write_text("")
    data = str(tmp_path / "empty.txt")
    assert "no text" in expect_mistake(capsys, "init", str(tmp_path / "r"), "--data", data)


def test_a_binary_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "photo.txt"
    data.write_bytes(b"\x89PNG\r\n\x1a\n\x00\x00" * 100)
    assert "photo.txt" in expect_mistake(capsys, "init", str(tmp_path / "r"), "--data", str(data))


def test_an_unknown_toml_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[train]\nbatch_row = 3\n")
    said = expect_mistake(capsys, "init", str(tmp_path / "r"), "--config", str(file))
    assert "train.batch_rows" in said


def test_an_unknown_preset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "demo" in expect_mistake(capsys, "init", str(tmp_path / "r"), "--preset", "dmeo")


def test_a_run_is_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(write_config(tmp_path, tiny_config(write_corpus(tmp_path))))
    assert main(["init", str(tmp_path / "r"), "--config", config]) == 0
    before = sorted(path for path in (tmp_path / "r").rglob("*.json"))
    capsys.readouterr()
    said = expect_mistake(capsys, "init", str(tmp_path / "r"), "--config", config)
    assert "there is a run at" in said
    assert sorted(path for path in (tmp_path / "r").rglob("*.json")) == before


def test_too_few_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(write_config(tmp_path, tiny_config(write_corpus(tmp_path, num_documents=2))))
    said = expect_mistake(capsys, "init", str(tmp_path / "r"), "--config", config)
    assert "lower data.num_slots" in said
    config = str(write_config(tmp_path, tiny_config(write_corpus(tmp_path))))
    rows = ("--probe.num-rows", "5000")
    said = expect_mistake(capsys, "init", str(tmp_path / "r"), "--config", config, *rows)
    assert "raise data.held_out_fraction" in said
    assert not (tmp_path / "r").exists(), "nothing is left behind"


def test_a_store_address_of_another_kind(capsys: pytest.CaptureFixture[str]) -> None:
    said = expect_mistake(capsys, "status", "ftp://host/run")
    assert "no store speaks ftp://" in said
    assert "hf://user/repo" in said


def test_a_demo_never_writes_into_a_folder_that_holds_something(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").write_text("keep")
    assert "not empty" in expect_mistake(capsys, "demo", "--folder", str(tmp_path))
    assert (tmp_path / "mine").read_text() == "keep"
    for place in ("mine", "mine/below"):
        shown = expect_mistake(capsys, "demo", "--folder", str(tmp_path / place))
        assert "give the demo a new folder" in shown


def test_a_full_disk_is_a_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    def full(self: cli.Doctor) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "x"))

    monkeypatch.setattr(cli.Doctor, "run", full)
    assert "free some space" in expect_mistake(capsys, "doctor")


def test_what_forbids_a_file_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno
    import os

    for number, way_out in ((errno.EACCES, "another place"), (errno.EFBIG, "ulimit")):

        def refused(self: cli.Doctor, number: int = number) -> int:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(cli.Doctor, "run", refused)
        assert way_out in expect_mistake(capsys, "doctor")


def test_a_command_without_a_preset_takes_its_own() -> None:
    from diffurefill.config import load_preset

    for name in ("bench speed", "train", "bench train"):
        words = [*name.split(), *(["folder"] if name == "train" else [])]
        command = cli.parse(words)
        assert command.settings == load_preset(command.preset)
    assert cli.parse(["bench", "speed"]).preset == "stand-38m"


def test_of_two_presets_the_last_counts() -> None:
    from diffurefill.config import load_preset

    command = cli.parse(["bench", "train", "--preset", "demo", "--preset=stand-micro"])
    assert command.preset == "stand-micro"
    assert command.settings == load_preset("stand-micro")


def test_a_terminal_that_lacks_a_character_shows_another() -> None:
    code = "from diffurefill import cli; cli.main = lambda: print('\\u2713 done'); cli.entry()"
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, check=False
    )
    assert done.stdout == b"? done\n"
    assert done.returncode == 0


def test_an_interrupt_has_its_own_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: cli.Doctor) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.Doctor, "run", interrupted)
    assert main(["doctor"]) == 130
    assert "start it again" in capsys.readouterr().err


def test_init_names_a_store_as_a_shell_takes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, tiny_config(write_corpus(tmp_path)))
    store = str(tmp_path / "my run")
    assert main(["init", store, "--config", str(config)]) == 0
    words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert words[:4] == ["next:", "diffurefill", "merger", store]
    assert words[-1] == store


def test_a_log_gets_a_plain_line_of_progress_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notebook is no terminal: a job of hours must not look dead, nor fill the page."""
    now = [0.0]
    monkeypatch.setattr(common.time, "monotonic", lambda: now[0])
    progress("")
    for second in range(0, 100, 4):
        now[0] = float(second)
        progress(f"item {second}")
    assert capsys.readouterr().err == "item 32\nitem 64\nitem 96\n"
    say("done")
    now[0] = 1000.0
    progress("the next job")
    assert capsys.readouterr().err == ""
    progress("")


def test_no_line_stands_behind_a_progress_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    cleared = "\r\033[K"
    progress("generation 3")
    say("audit: no violations")
    assert capsys.readouterr().err == f"{cleared}generation 3{cleared}"
    progress("generation 3")
    assert main(["status", str(tmp_path)]) == 2
    assert f"generation 3{cleared}error: no run" in capsys.readouterr().err


def test_doctor_names_the_machine_and_tests_a_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lanes").mkdir()
    (tmp_path / "blobs").mkdir()
    (tmp_path / "tmp").mkdir()
    assert main(["doctor", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "precision" in shown
    assert "conditional writes are honoured" in shown


def test_doctor_tests_a_folder_before_there_is_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "new" / "place", tmp_path, f"file://{tmp_path}/new"):
        assert main(["doctor", str(place)]) == 0
        assert f"{place}: conditional writes are honoured" in capsys.readouterr().out
    for place in ("file", "file/below"):
        expect_mistake(capsys, "doctor", str(tmp_path / place))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_judge_that_is_not_here_is_told_before_models_are_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    pair = tmp_path / "pair"
    said = expect_mistake(capsys, "bench", "pilot", str(pair), "--judge", str(tmp_path / "j.gguf"))
    assert "name an existing file" in said
    assert not pair.exists()


def test_an_export_without_its_run_is_told(tmp_path: Path) -> None:
    from diffurefill.fleet.exported import read_run_config

    with pytest.raises(UserError, match=r"lacks run\.toml, .*fetch the whole folder"):
        read_run_config(tmp_path)
