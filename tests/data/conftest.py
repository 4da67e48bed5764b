"""A tokenizer trained on a few sentences, and small corpora on disk."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from diffurefill.data.documents import Corpus, open_corpus
from diffurefill.data.tokenizer import Tokenizer, train_tokenizer

WORDS = ["fox", "ran", "over", "the", "hill", "while", "seven", "quiet", "owls", "looked", "on"]


def sentence(number: int) -> str:
    """A text that no other number gives; lengths vary from 1 to 45 words."""
    words = [WORDS[(number * 7 + place * 3) % len(WORDS)] for place in range(number * 11 % 45)]
    return " ".join([f"Text {number}:", *words])


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return train_tokenizer([sentence(number) for number in range(200)], 400)


@pytest.fixture
def make_corpus(tmp_path: Path) -> Callable[[Sequence[int]], Corpus]:
    """`make_corpus([3, 5])`: JSONL files of 3 and 5 documents, all different."""

    def make(num_documents: Sequence[int]) -> Corpus:
        start = 0
        for name, count in enumerate(num_documents):
            lines = [json.dumps({"text": sentence(start + n)}) for n in range(count)]
            (tmp_path / f"{name:03}.jsonl").write_text("\n".join(lines))
            start += count
        return open_corpus([str(tmp_path)], "text")

    return make
