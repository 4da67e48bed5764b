"""What a worker measures around each merge: adoption, drift, and so the merge gain."""

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from diffurefill.data.documents import open_corpus
from diffurefill.evaluate.probe_sets import build_probe
from diffurefill.evaluate.probes import held_out_ce
from diffurefill.fleet.learner import TrainingLearner
from diffurefill.fleet.records import State
from diffurefill.store.base import sha256_file
from diffurefill.train.checkpoint import save_weights
from diffurefill.train.loop import Trainer, initial_weights, make_tokenizer
from tests.tiny import tiny_config, write_corpus


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    config = tiny_config(write_corpus(tmp_path))
    corpus = open_corpus(config.data)
    trainer = Trainer(config, corpus, make_tokenizer(config, corpus), slot=0, interval_steps=4)
    yield trainer
    trainer.close()


def test_adoption_and_drift_are_differences_on_one_probe(tmp_path: Path, trainer: Trainer) -> None:
    config, corpus = trainer.config, open_corpus(trainer.config.data)
    probe = build_probe(config, corpus, trainer.tokenizer)
    learner = TrainingLearner(trainer, probe)
    first, own = tmp_path / "first.safetensors", tmp_path / "own.safetensors"
    save_weights(first, initial_weights(config))

    def ce() -> float:
        mask_id = trainer.tokenizer.mask_id
        return held_out_ce(trainer.model, probe, mask_id=mask_id, device=trainer.device).mean

    def state(weights: Path, step: int) -> State:
        about = {"run_id": "r", "config_sha": "c", "schema_sha": "s", "corpus_sha": "t"}
        cursors = {"0": trainer.position.to_json()} if step else {}
        ref = sha256_file(weights)
        return State(global_weights=ref, gen=step // 4, step=step, cursors=cursors, **about)

    begun = learner.adopt(first, state(first, 0), 0)
    assert "adoption" not in begun  # nothing was trained before it
    assert begun["held_out_ce"] == ce()
    for step in range(4):
        learner.step(step)
    finished = learner.finish()
    trained = ce()
    assert finished["drift"] == trained - begun["held_out_ce"]
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # it counts in KiB
    assert 0.5 * used < 1e6 * finished["peak_mb"] <= used
    save_weights(own, trainer.weights())
    # The global is what this worker, alone, has trained: adopting it changes nothing.
    assert learner.adopt(own, state(own, 4), 0)["adoption"] == 0.0
    for step in range(4):
        learner.step(step)
    learner.finish()
    trained = ce()
    back = learner.adopt(first, state(first, 8), 0)
    assert back["adoption"] == begun["held_out_ce"] - trained
