"""`export`: a folder that transformers opens by itself, equal to what it was made from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from diffurefill.cli import main
from diffurefill.config import DecodeConfig, UserError, load_preset
from diffurefill.data.tokens.tokenizer import train_tokenizer
from diffurefill.decode.canvas import continuation
from diffurefill.decode.generate import cut_at_eos
from diffurefill.fleet import exported as layout
from diffurefill.fleet.found import Found, find
from diffurefill.fleet.loading import load
from diffurefill.release.check import check_folder, write_reference
from diffurefill.release.export import export_folder
from diffurefill.release.files import plain_stages, without_local_paths
from diffurefill.train.checkpoint import load_weights, save_weights
from tests.tiny import tiny_config

USER = """
import json, sys
sys.modules["diffurefill"] = None  # whoever imports it fails
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer, pipeline
path, prompt = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=True)
model = AutoModelForMaskedLM.from_pretrained(path, trust_remote_code=True)
ids = model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=12, seed=3)
gap = tokenizer("the" + 4 * tokenizer.mask_token + " dog", return_tensors="pt")
fill = pipeline("fill-mask", model=model, tokenizer=tokenizer)
model.save_pretrained(path + "-saved")
again = AutoModelForMaskedLM.from_pretrained(path + "-saved", trust_remote_code=True)
print(json.dumps({
    "continued": ids[0].tolist(),
    "filled_gap": model.infill(**gap, seed=1)[0].tolist(),
    "filled": [answer["token_str"] for answer in fill(f"the quick {tokenizer.mask_token} fox")],
    "same": all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters())),
    "suppressed": len(again.generation_config.suppress_tokens),
}))
"""


def test_a_user_without_this_package_writes_and_fills_with_the_folder(
    exported: Path, tmp_path: Path
) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path / "modules")}
    done = subprocess.run(
        [sys.executable, "-c", USER, str(exported), "the quick"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    model = load(str(exported))
    prompt = model.tokenizer.encode("the quick")
    canvas = continuation([prompt], 12, model.specials, max_tokens=32)
    continued = cut_at_eos(model.fill(canvas, seed=3).ids[0].tolist(), model.tokenizer.eos_id)
    assert answer["continued"][: len(continued)] == continued
    gap = model.fill(model.gaps("the[MASK*4] dog"), seed=1, forbid_eos=True)
    assert answer["filled_gap"] == gap.ids[0].tolist()
    assert len(answer["filled"]) == 5
    assert answer["same"]
    assert answer["suppressed"] == 384 - 320 + 1, "unused rows, MASK, PAD and BOS"


def test_the_folder_is_the_run_s_newest_ema_with_its_tokenizer_and_probe(
    run: str, exported: Path
) -> None:
    ours, theirs = load(run), load(str(exported))
    for name, tensor in ours.denoiser.state_dict().items():
        assert torch.equal(tensor, theirs.denoiser.state_dict()[name])
    assert ours.tokenizer.vocabulary_digest == theirs.tokenizer.vocabulary_digest
    assert (ours.tokenizer.mask_id, ours.tokenizer.pad_id) == (320, 321)
    assert ours.probe.digest == theirs.probe.digest
    assert ours.config.decode == theirs.config.decode
    text = "Zürich 3 <s> [MASK] </s> the quick"
    assert ours.tokenizer.encode(text) == theirs.tokenizer.encode(text)
    record = json.loads((exported / layout.PROVENANCE).read_text())
    assert record["source"]["weights"] == "ema"
    assert record["source"]["generation"] == 4
    assert record["source"]["tokens"] == 4096
    others = {layout.PROVENANCE, "README.md"}
    assert set(record["files"]) | others == {p.name for p in exported.iterdir()}
    assert "transformers" in record["opened_with"]


def test_no_path_of_this_machine_is_published(exported: Path, tmp_path: Path) -> None:
    assert b"/corpus.jsonl" not in (exported / layout.RUN_CONFIG).read_bytes()
    assert b"corpus.jsonl" in (exported / layout.RUN_CONFIG).read_bytes()
    assert str(exported).encode() not in (exported / "README.md").read_bytes()
    public = without_local_paths(tiny_config(tmp_path / "secret" / "corpus.jsonl"))
    assert public.data.sources[0].paths == ("corpus.jsonl",)


def test_an_exported_folder_is_exported_again_byte_for_byte(
    exported: Path, tmp_path: Path, unopened: None
) -> None:
    assert main(["export", str(exported), "--to", str(tmp_path / "again")]) == 0
    for path in exported.iterdir():
        if path.name != layout.PROVENANCE:
            assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name


def test_a_card_and_results_that_a_person_wrote_stay(
    exported: Path, tmp_path: Path, unopened: None, capsys: pytest.CaptureFixture[str]
) -> None:
    dest = str(tmp_path / "again")
    assert main(["export", str(exported), "--to", dest]) == 0
    card, results = (tmp_path / "again" / name for name in ("README.md", ".eval_results/x.yaml"))
    results.parent.mkdir()
    for path in (card, results):
        path.write_text("mine")
    assert main(["export", str(exported), "--to", dest, "--replace"]) == 0
    assert [path.read_text() for path in (card, results)] == ["mine", "mine"]


# --- what stands there already -------------------------------------------------------------------


def test_an_earlier_export_is_replaced_only_when_asked(
    run: str,
    tmp_path: Path,
    unopened: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    to = tmp_path / "model"
    assert main(["export", run, "--to", str(to)]) == 0
    (to / "README.md").write_text("mine")
    before = (to / layout.WEIGHTS).read_bytes()
    assert main(["export", run, "--weights", "swa", "--to", str(to)]) == 2
    assert "add --replace" in capsys.readouterr().err
    assert (to / layout.WEIGHTS).read_bytes() == before
    assert main(["export", run, "--weights", "swa", "--to", str(to), "--replace"]) == 0
    assert (to / layout.WEIGHTS).read_bytes() != before
    assert (to / "README.md").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["model"], "nothing is left behind"


def test_a_link_stays_one_and_its_folder_is_replaced(
    run: str, tmp_path: Path, unopened: None
) -> None:
    (tmp_path / "models" / "1").mkdir(parents=True)
    (tmp_path / "link").symlink_to("models/1")
    for kind in ("ema", "swa"):  # into an empty folder, and over an export
        options = ["--weights", kind, "--to", str(tmp_path / "link"), "--replace"]
        assert main(["export", run, *options]) == 0
    assert (tmp_path / "link").is_symlink()
    record = json.loads((tmp_path / "models" / "1" / layout.PROVENANCE).read_text())
    assert record["source"]["weights"] == "swa"
    assert sorted(p.name for p in tmp_path.rglob("*") if p.is_dir()) == ["1", "link", "models"]


def test_a_folder_of_something_else_is_never_touched(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    assert main(["export", run, "--to", str(tmp_path), "--replace"]) == 2
    assert "something else than an export" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


# --- what cannot be exported ---------------------------------------------------------------------


@pytest.fixture
def found(run: str, tmp_path: Path) -> Found:
    return find(run, "global", tmp_path / "cache")


def export_of(found: Found, tmp_path: Path) -> Callable[[], None]:
    return lambda: export_folder(found, tmp_path / "model", lambda line: None)


def test_weights_that_are_no_numbers_are_refused(found: Found, tmp_path: Path) -> None:
    weights = load_weights(found.weights)
    weights["blocks.0.down.weight"][3, 5] = float("nan")
    save_weights(tmp_path / "nan.safetensors", weights)
    bad = replace(found, weights=tmp_path / "nan.safetensors")
    with pytest.raises(UserError, match=r"blocks\.0\.down\.weight holds nan"):
        export_of(bad, tmp_path)()
    assert not (tmp_path / "model").exists()
    assert not list(tmp_path.glob(".*")), "no half of it either"


def test_a_folder_that_differs_is_not_kept(
    found: Found, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process must notice: here the reference is of other weights."""
    other = {name: t + 0.01 for name, t in load_weights(found.weights).items()}
    save_weights(tmp_path / "other.safetensors", other)
    real = check_folder

    def of_others(folder: Path, reference: Path) -> dict[str, str]:
        write_reference(replace(found, weights=tmp_path / "other.safetensors"), reference)
        return real(folder, reference)

    monkeypatch.setattr("diffurefill.release.export.check_folder", of_others)
    with pytest.raises(UserError, match="logits by this package differ by up to"):
        export_of(found, tmp_path)()
    assert not (tmp_path / "model").exists()


def test_a_causal_model_and_phrase_tokens_are_refused_with_a_way_out(
    found: Found, tmp_path: Path
) -> None:
    model = replace(found.config.model, causal=True)
    twin = replace(found, config=replace(found.config, model=model))
    with pytest.raises(UserError, match="--format pt"):
        export_of(twin, tmp_path)()
    phrases = replace(found, tokenizer=found.tokenizer.with_phrases(["quick brown"]))
    with pytest.raises(UserError, match=r"phrase tokens.*--format pt"):
        export_of(phrases, tmp_path)()


def test_a_decoder_that_the_file_does_not_know_is_named() -> None:
    stage = load_preset("decode-card").decode.stages[0]
    assert plain_stages(DecodeConfig(stages=(stage,)))[0]["order_noise"] == 2.5
    odd = replace(stage)
    object.__setattr__(odd, "order", "by the moon")
    decode = DecodeConfig()
    object.__setattr__(decode, "stages", (odd,))
    with pytest.raises(UserError, match=r"order = by the moon.*--decode"):
        plain_stages(decode)


def test_the_default_decoder_can_be_chosen(run: str, tmp_path: Path, unopened: None) -> None:
    to = tmp_path / "model"
    assert main(["export", run, "--to", str(to), "--decode", "decode-left-to-right"]) == 0
    record = json.loads((to / "generation_config.json").read_text())
    assert record["stages"][0]["order"] == "left_to_right"
    assert load(str(to)).config.decode == load_preset("decode-left-to-right").decode


def test_another_tokenizer_in_the_folder_is_noticed(exported: Path, tmp_path: Path) -> None:
    copy = tmp_path / "model"
    copy.mkdir()
    for path in exported.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    other = train_tokenizer(["the quick brown fox jumps over a lazy dog"] * 9, 300)
    (copy / "tokenizer.json").write_text(other.to_json())
    with pytest.raises(UserError, match="not the tokenizer this model was trained with"):
        load(str(copy))


@pytest.mark.parametrize("kind", ["ema", "last-3"])
def test_a_folder_has_nothing_to_choose(
    exported: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(exported), "--weights", kind, "--to", str(tmp_path / "x")]) == 2
    assert "holds one set of weights" in capsys.readouterr().err
