"""No row of text is in the merged weights twice, and none is left out, whatever dies."""

import json
from pathlib import Path
from typing import Any

import pytest

from diffurefill.config import DataConfig, Source
from diffurefill.data.documents import Corpus, open_corpus
from diffurefill.data.tokens.tokenizer import Tokenizer, train_tokenizer
from diffurefill.fleet.simulate import lineage
from diffurefill.fleet.simulate.lineage import Lineage, LineageRun, ReadingLearner


@pytest.fixture(scope="module")
def reading(tmp_path_factory: pytest.TempPathFactory) -> tuple[Corpus, Tokenizer, DataConfig]:
    path = tmp_path_factory.mktemp("text") / "a.jsonl"
    texts = [f"Text {n}: " + "the owl ran over the hill " * (n % 7) for n in range(90)]
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    data = DataConfig(
        sources=(Source(paths=(str(path),)),), num_slots=3, row_length=32, span_rows=0.3
    )
    return open_corpus(data), train_tokenizer(texts, 320), data


def run(seed: int, folder: Path, reading: Any, rounds: int = 40) -> Lineage:
    return LineageRun(seed, folder, *reading).run(rounds)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_merged_lineage_holds_each_slot_s_rows_once(
    seed: int, tmp_path: Path, reading: Any
) -> None:
    found = run(seed, tmp_path, reading)
    assert (found.repeated, found.skipped, found.violations) == (0, 0, [])
    assert found.generations >= 40
    assert found.rows > 40 * 8
    assert found.launches > 10
    assert found.wasted > 0  # what was trained in vain is not in the weights


def test_a_worker_that_ignores_the_state_s_cursor_is_caught(
    tmp_path: Path, reading: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch that begins at the slot's start trains its text again."""
    real = ReadingLearner.adopt

    def forgetful(self: ReadingLearner, *arguments: Any) -> dict[str, Any]:
        facts = real(self, *arguments)
        assert self.open_loader is not None
        if self.num_intervals == 0:
            self.loader = self.open_loader(self.number, None)
        return facts

    monkeypatch.setattr(lineage.ReadingLearner, "adopt", forgetful)
    found = run(1, tmp_path, reading, rounds=15)
    assert found.repeated > 0
    assert found.skipped > 0
