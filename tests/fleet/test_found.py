"""What may be named as a model: told apart, chosen among a run's weights, refused with words."""

from pathlib import Path

import pytest
import torch

from diffurefill.cli import main
from diffurefill.config import UserError
from diffurefill.fleet import found
from diffurefill.fleet.alone import train_alone
from diffurefill.fleet.loading import load
from diffurefill.fleet.probing import models_at
from diffurefill.fleet.run import Run, Snapshot
from diffurefill.fleet.weights import Weights
from diffurefill.store.base import MAIN
from diffurefill.store.folder import FolderStore
from diffurefill.train.checkpoint import load_weights
from tests.release.runs import publish_another, run_config, tiny_run


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("found")


@pytest.fixture(scope="module")
def run(work: Path) -> str:
    return tiny_run(work)


def published(work: Path, gen: int) -> dict[str, torch.Tensor]:
    return load_weights(work / "work" / f"global-{gen}.safetensors")


def assert_weights(where: str, kind: str | None, expected: dict[str, torch.Tensor]) -> None:
    loaded = load(where, kind).denoiser.state_dict()
    for name, tensor in expected.items():
        torch.testing.assert_close(loaded[name].cpu(), tensor, rtol=0, atol=1e-6)


def mean(work: Path, *gens: int) -> dict[str, torch.Tensor]:
    globals_ = [published(work, gen) for gen in gens]
    return {name: torch.stack([g[name] for g in globals_]).mean(0) for name in globals_[0]}


def test_the_kinds_of_weights_are_what_their_names_say(run: str, work: Path) -> None:
    assert_weights(run, "global", published(work, 4))
    assert_weights(run, "swa", mean(work, 3, 4))
    assert_weights(run, "last-3", mean(work, 2, 3, 4))
    ema = published(work, 1)
    for gen in (2, 3, 4):
        ema = {name: 0.5 * t + 0.5 * published(work, gen)[name] for name, t in ema.items()}
    assert_weights(run, "ema", ema)
    assert_weights(run, None, ema)
    assert load(run, "last-3").name == "last-3, generation 4 (globals 4, 3, 2)"


def test_compaction_leaves_snapshots_for_the_last_k(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    store = FolderStore(Path(run), create=False)
    store.grace_seconds = 0.0
    head = store.head(MAIN)
    assert head is not None
    store.compact(MAIN, head)
    assert load(run, "last-2").name.endswith("(globals 4, 2)")
    with pytest.raises(UserError, match=r"of its globals 2 are kept \(4, 2\), last-3 needs 3"):
        load(run, "last-3")


def test_weights_that_a_run_does_not_have(run: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no weights 'best-3': ask for ema, global, swa"):
        load(run, "best-3")
    with pytest.raises(UserError, match="last-9 needs 9"):
        load(run, "last-9")
    bare = tiny_run(tmp_path, averages=False)
    assert load(bare).name == "global, generation 4"
    with pytest.raises(UserError, match="no EMA has been published yet"):
        load(bare, "ema")
    with pytest.raises(UserError, match=r"no SWA is kept; fleet\.swa_from_step"):
        load(bare, "swa")
    assert [m.name.split(",")[0] for m in models_at(bare)] == ["global"]


def test_a_generation_that_is_published_meanwhile_is_not_mixed_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, fetch = tiny_run(tmp_path), found.weights_of

    def while_the_fleet_works(run: Run, now: Snapshot, kind: str | None) -> Weights:
        fetched = fetch(run, now, kind)
        if kind == "global":
            publish_another(tmp_path, now.state.gen + 1)
        return fetched

    monkeypatch.setattr(found, "weights_of", while_the_fleet_works)
    names = [model.name for model in models_at(where)]
    assert len(names) == 3
    assert all("generation 4" in name for name in names)
    assert load(where, "global").name == "global, generation 5"


def test_several_kinds_are_asked_for_by_the_names_that_one_is(run: str, work: Path) -> None:
    asked = ["last-2", "last-9", "swa", "last-3"]
    assert [m.name.split(",")[0] for m in models_at(run, asked)] == ["last-2", "swa", "last-3"]
    two = next(models_at(run, asked)).denoiser.state_dict()
    for name, tensor in mean(work, 3, 4).items():
        torch.testing.assert_close(two[name].cpu(), tensor, rtol=0, atol=1e-6)
    with pytest.raises(UserError, match="last-9 needs 9"):
        next(models_at(run, ["last-9"]))
    with pytest.raises(UserError, match="name the weights: ema"):
        next(models_at(run, []))
    for where in (run, str(work)):  # whatever is there
        with pytest.raises(UserError, match="no weights 'best': ask for ema"):
            next(models_at(where, ["swa", "best"]))


def test_only_what_is_published_can_be_followed(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = ["--follow", "--until", "1", "--log", str(tmp_path / "log.jsonl")]
    assert main(["probe", run, *log, "--weights", "ema", "last-2"]) == 2
    assert "nobody publishes last-2: follow global, ema, swa" in capsys.readouterr().err
    assert not (tmp_path / "log.jsonl").exists()


def test_a_train_folder_has_one_set_of_weights(tmp_path: Path) -> None:
    train_alone(tmp_path / "t", run_config(tmp_path), 4, lambda line: None)
    folder = str(tmp_path / "t")
    assert load(folder).name == folder
    assert len(list(models_at(folder))) == 1
    with pytest.raises(UserError, match="leave out --weights"):
        load(folder, "ema")


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(UserError, match="diffurefill init"):
        load(str(tmp_path))


def test_weights_of_another_vocabulary_are_refused(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    train_alone(tmp_path / "t", config, 4, lambda line: None)
    path = tmp_path / "t" / "config.toml"
    text = path.read_text()
    path.write_text(text.replace("vocab_size = 384", "vocab_size = 400"))
    with pytest.raises(UserError, match="another model than the configuration"):
        load(str(tmp_path / "t"))
    path.write_text(text.replace("vocab_size = 384", "vocab_size = 300"))
    with pytest.raises(UserError, match="is too small"):
        load(str(tmp_path / "t"))
