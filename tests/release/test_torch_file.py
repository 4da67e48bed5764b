"""torch.save files: read as data, refused when they hold more, the same weights back."""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from diffurefill.cli import main
from diffurefill.fleet.loading import load
from tests.release.runs import run_config
from tests.tiny import write_config


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err


@pytest.fixture(scope="session")
def torch_file(run: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pt") / "swa.pt"
    options = ["--weights", "swa", "--format", "pt"]
    assert main(["export", run, "--to", str(path), *options]) == 0
    return path


def test_our_own_file_comes_back_with_everything_but_the_probe(
    run: str, torch_file: Path, tmp_path: Path, unopened: None
) -> None:
    assert main(["import", str(torch_file), "--to", str(tmp_path / "model")]) == 0
    ours, back = load(run, "swa"), load(str(tmp_path / "model"))
    for name, tensor in ours.denoiser.state_dict().items():
        assert torch.equal(tensor, back.denoiser.state_dict()[name])
    assert ours.tokenizer.vocabulary_digest == back.tokenizer.vocabulary_digest
    assert ours.config.model == back.config.model
    again = str(tmp_path / "again.pt")
    assert main(["export", str(tmp_path / "model"), "--format", "pt", "--to", again]) == 0
    first, second = (torch.load(p, weights_only=True)["model"] for p in (torch_file, again))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    with pytest.raises(ValueError, match="without held-out text"):
        _ = back.probe


def test_a_file_of_others_is_imported_with_a_table_of_names(
    run: str, torch_file: Path, tmp_path: Path, unopened: None
) -> None:
    """As a compiled model saves it: wrapped names, split projections, a head tied to the input."""
    ours = torch.load(torch_file, weights_only=True)["model"]
    theirs = {"_orig_mod.tok.weight": ours["embedding.weight"].half()}
    theirs["head.weight"] = theirs["_orig_mod.tok.weight"]
    for name, tensor in ours.items():
        if name == "blocks.0.qkv.weight":
            for part, piece in zip("qkv", tensor.chunk(3), strict=True):
                theirs[f"layers.0._orig_mod.w{part}.weight"] = piece
        elif name != "embedding.weight":
            theirs[name] = tensor
    torch.save({"model": theirs, "step": 7}, tmp_path / "global_b.pt")
    (tmp_path / "names.json").write_text(
        '{"embedding.weight": "tok.weight", "blocks.{}.qkv.weight": '
        '["layers.{}.wq.weight", "layers.{}.wk.weight", "layers.{}.wv.weight"]}'
    )
    (tmp_path / "tokenizer.json").write_text(load(run).tokenizer.to_json())
    config = write_config(tmp_path, run_config(tmp_path))
    options = ["--to", str(tmp_path / "model"), "--config", str(config)]
    options += ["--tokenizer", str(tmp_path / "tokenizer.json")]
    options += ["--names", str(tmp_path / "names.json")]
    assert main(["import", str(tmp_path / "global_b.pt"), *options]) == 0
    found = load(str(tmp_path / "model")).denoiser.state_dict()
    assert torch.equal(found["blocks.0.qkv.weight"], ours["blocks.0.qkv.weight"])
    assert torch.equal(found["embedding.weight"], ours["embedding.weight"].half().float())


class Code:
    """What a hostile checkpoint does when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("new_format", [True, False])
def test_pickled_code_is_refused_and_never_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], new_format: bool
) -> None:
    record = {"model": {"a": torch.ones(1)}, "extra": Code(tmp_path / "ran")}
    path = tmp_path / "bad.pt"
    torch.save(record, path, _use_new_zipfile_serialization=new_format)
    assert main(["import", str(path), "--to", str(tmp_path / "model")]) == 2
    assert "holds pickled code or is damaged, and was not opened" in said(capsys)
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "model").exists()
    pickle.loads(pickle.dumps(Code(tmp_path / "ran")))
    assert (tmp_path / "ran").exists(), "it would have"


def test_files_that_are_no_checkpoints(
    run: str, torch_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(path: Path, *options: str) -> str:
        assert main(["import", str(path), "--to", str(tmp_path / "model"), *options]) == 2
        return said(capsys)

    assert "cannot read" in refused(tmp_path / "none.pt")
    (tmp_path / "text.pt").write_text("hello")
    assert "text.pt" in refused(tmp_path / "text.pt")
    (tmp_path / "cut.pt").write_bytes(torch_file.read_bytes()[:5000])
    assert "cut.pt" in refused(tmp_path / "cut.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    assert "holds a list" in refused(tmp_path / "list.pt")
    weights = torch.load(torch_file, weights_only=True)["model"]
    torch.save(weights, tmp_path / "bare.pt")
    assert "give --preset or --config, and --tokenizer" in refused(tmp_path / "bare.pt")
    (tmp_path / "tokenizer.json").write_text(load(run).tokenizer.to_json())
    config = str(write_config(tmp_path, run_config(tmp_path)))
    known = ("--config", config, "--tokenizer", str(tmp_path / "tokenizer.json"))
    torch.save({"model": weights | {"mystery": torch.ones(2)}}, tmp_path / "more.pt")
    assert "has mystery" in refused(tmp_path / "more.pt", *known)
    torch.save({"model": {"x": torch.ones(2)}}, tmp_path / "less.pt")
    assert "--names" in refused(tmp_path / "less.pt", *known)
    wide = weights | {"embedding.weight": torch.ones(400, 32)}
    torch.save(wide, tmp_path / "vocabulary.pt")
    assert "the configuration wants (384, 32)" in refused(tmp_path / "vocabulary.pt", *known)
    nan = weights | {"final_norm.weight": torch.full((32,), float("nan"))}
    torch.save(nan, tmp_path / "nan.pt")
    assert "final_norm.weight holds nan" in refused(tmp_path / "nan.pt", *known)


@pytest.fixture
def refused(run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What `import` says of a record, whose sizes and tokenizer are given."""
    (tmp_path / "tokenizer.json").write_text(load(run).tokenizer.to_json())
    config = str(write_config(tmp_path, run_config(tmp_path)))

    def what_is_said(record: Any, names: dict[str, Any] | None = None) -> str:
        path = tmp_path / "bad.pt"
        if isinstance(record, bytes):
            path.write_bytes(record)
        else:
            torch.save(record, path)
        (tmp_path / "names.json").write_text(json.dumps(names or {}))
        options = ["--config", config, "--tokenizer", str(tmp_path / "tokenizer.json")]
        options += ["--names", str(tmp_path / "names.json"), "--to", str(tmp_path / "model")]
        assert main(["import", str(path), *options]) == 2
        error = said(capsys).strip()
        assert error.count("\n") == 0, "a line"
        return error

    return what_is_said


@pytest.mark.parametrize("record", [{}, {0: torch.ones(1)}, {"model": {}}, {"model": {1: 2}}])
def test_what_is_no_state_dict(refused: Callable[..., str], record: dict[Any, Any]) -> None:
    assert "has no state dict" in refused(record)


@pytest.mark.parametrize("tensor", [torch.eye(2).to_sparse(), torch.ones(2, device="meta")])
def test_a_tensor_without_plain_numbers_is_named(
    refused: Callable[..., str], tensor: torch.Tensor
) -> None:
    assert "x is no plain tensor" in refused({"model": {"x": tensor}})


@pytest.mark.parametrize("wrong", [torch.ones(3, 5), torch.tensor(1.0)])
def test_parts_that_cannot_be_joined_are_named(
    refused: Callable[..., str], torch_file: Path, wrong: torch.Tensor
) -> None:
    weights = torch.load(torch_file, weights_only=True)["model"]
    record = {"model": weights | {"a": torch.ones(3, 32), "b": wrong}}
    shown = refused(record, {"blocks.{}.qkv.weight": ["a", "b"]})
    assert f"cannot join a (3, 32), b {tuple(wrong.shape)}" in shown


@pytest.mark.parametrize("names", [[], 5, [1]])
def test_a_table_of_names_that_holds_no_names(
    refused: Callable[..., str], torch_file: Path, names: Any
) -> None:
    record = torch.load(torch_file, weights_only=True)
    assert "--names: embedding.weight wants" in refused(record, {"embedding.weight": names})


@pytest.mark.parametrize("key", ["config", "tokenizer", "provenance"])
@pytest.mark.parametrize("value", [None, 5, "{bro"])
def test_a_file_of_ours_that_lost_what_we_wrote(
    refused: Callable[..., str], torch_file: Path, key: str, value: Any
) -> None:
    record = torch.load(torch_file, weights_only=True)
    assert refused(record | {"diffurefill": record["diffurefill"] | {key: value}})
    del record["diffurefill"][key]
    assert "is damaged" in refused(record)


@pytest.mark.parametrize("new_format", [True, False])
def test_a_damaged_file_is_refused_in_a_line(
    refused: Callable[..., str], torch_file: Path, new_format: bool
) -> None:
    buffer = io.BytesIO()
    record = torch.load(torch_file, weights_only=True)
    torch.save(record, buffer, _use_new_zipfile_serialization=new_format)
    whole, random = buffer.getvalue(), np.random.default_rng(0)
    for _ in range(30):
        damaged = bytearray(whole)
        for at in random.integers(0, 200, 4):
            damaged[at] = random.integers(256)
        refused(bytes(damaged[: random.integers(100, 3000)]))


def test_room_for_the_file_is_looked_for_before_the_weights_are_fetched(
    run: str, torch_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for to, said_of_it in ((tmp_path, "is a folder"), (torch_file, "add --replace")):
        options = ["--replace"] if to == tmp_path else []
        assert main(["export", run, "--format", "pt", "--to", str(to), *options]) == 2
        shown = capsys.readouterr()
        assert said_of_it in shown.err
        assert "exporting" not in shown.out


def test_a_link_stays_one_and_its_file_is_replaced(run: str, tmp_path: Path) -> None:
    link = tmp_path / "link.pt"
    link.symlink_to("model.pt")
    assert main(["export", run, "--format", "pt", "--to", str(link)]) == 0
    assert link.is_symlink()
    assert (tmp_path / "model.pt").is_file()


@pytest.mark.parametrize(
    "command",
    [
        ["probe", "RUN", "--follow", "--until", "0", "--log"],
        ["probe", "facts", "--from", "q.tsv", "--tokenizer", "RUN", "--to"],
    ],
)
def test_a_folder_in_a_probe_file_s_place_is_refused(
    run: str, tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [run if word == "RUN" else word for word in command]
    assert main([*words, str(tmp_path)]) == 2
    assert "is a folder: give the name of a file in it" in said(capsys)


def test_a_file_is_not_written_over_unasked(
    run: str, torch_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = torch_file.read_bytes()
    assert main(["export", run, "--format", "pt", "--to", str(torch_file)]) == 2
    assert "add --replace" in said(capsys)
    assert torch_file.read_bytes() == before
    assert main(["export", run, "--format", "pt", "--to", "hf://user/repo"]) == 2
    assert "give --to FILE.pt" in said(capsys)
    new = ["--to", str(torch_file.with_name("new.pt")), "--results", "probes.json"]
    assert main(["export", run, "--format", "pt", *new]) == 2
    assert "a file without a card: leave --results away" in said(capsys)
