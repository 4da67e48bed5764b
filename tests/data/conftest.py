"""A tokenizer trained on a few sentences, and small corpora on disk."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from diffurefill.config import DataConfig, Source
from diffurefill.data.documents import Corpus, open_corpus, texts_of
from diffurefill.data.tokens.tokenizer import Tokenizer, train_tokenizer

WORDS = ["fox", "ran", "over", "the", "hill", "while", "seven", "quiet", "owls", "looked", "on"]
HELD_OUT = 0.2


def sentence(number: int) -> str:
    """A text that no other number gives; lengths vary from 1 to 45 words."""
    words = [WORDS[(number * 7 + place * 3) % len(WORDS)] for place in range(number * 11 % 45)]
    return " ".join([f"Text {number}:", *words])


def data_config(*paths: Path | str, **changes: Any) -> DataConfig:
    """One source `text` of `paths`."""
    source = Source(paths=tuple(str(path) for path in paths))
    settings: dict[str, Any] = {"sources": (source,), "num_slots": 2, "row_length": 24}
    settings |= {"held_out_fraction": HELD_OUT, "open_rows": 3}
    return DataConfig(**(settings | changes))


def all_texts(corpus: Corpus) -> list[str]:
    return [text for source in corpus.sources.values() for text in texts_of(source)]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return train_tokenizer([sentence(number) for number in range(200)], 400)


@pytest.fixture
def make_corpus(tmp_path: Path) -> Callable[..., Corpus]:
    """`make_corpus([3, 5], num_slots=2)`: JSONL files of 3 and 5 documents, all different."""

    def make(num_documents: Sequence[int], num_slots: int = 2) -> Corpus:
        start = 0
        for name, count in enumerate(num_documents):
            lines = [json.dumps({"text": sentence(start + n)}) for n in range(count)]
            (tmp_path / f"{name:03}.jsonl").write_text("\n".join(lines))
            start += count
        return open_corpus(data_config(tmp_path, num_slots=num_slots))

    return make
