import json
from collections.abc import Callable, Iterator
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffurefill.config import UserError
from diffurefill.data import slots
from diffurefill.data.cursors import SourceCursor
from diffurefill.data.documents import Corpus
from diffurefill.data.formats.marks import Mark
from diffurefill.data.slots import Slot, read_source
from tests.data.conftest import all_texts

MakeCorpus = Callable[..., Corpus]
Found = list[tuple[str, SourceCursor]]


def read(
    corpus: Corpus, number: int, num_slots: int, cursor: SourceCursor | None = None, seed: int = 0
) -> Found:
    """The slot's documents from `cursor` to the end of the second epoch."""
    found = []
    slot = Slot(number, num_slots, seed)
    stream = read_source(corpus.sources["text"], slot, cursor or SourceCursor(), corpus.is_held_out)
    for text, after in stream:
        if after.epoch == 2:
            break
        found.append((text, after))
    return found


def epoch_texts(found: Found, epoch: int) -> list[str]:
    return [text for text, after in found if after.epoch == epoch]


def training(corpus: Corpus) -> list[str]:
    return [text for text in all_texts(corpus) if not corpus.is_held_out(text)]


@pytest.mark.parametrize("num_slots", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("sizes", [[40], [25, 0, 15], [1] * 40, [7] * 8, [1, 30, 1, 2, 1, 5]])
def test_slots_are_disjoint_and_together_hold_all_training_documents(
    make_corpus: MakeCorpus, sizes: list[int], num_slots: int
) -> None:
    corpus = make_corpus(sizes, num_slots)
    expected = sorted(training(corpus))
    found = [read(corpus, number, num_slots) for number in range(num_slots)]
    for epoch in (0, 1):
        assert sorted(text for one in found for text in epoch_texts(one, epoch)) == expected


def test_a_slot_owns_the_same_documents_in_every_epoch_in_another_order(
    make_corpus: MakeCorpus,
) -> None:
    for sizes in ([40], [3] * 20):
        found = read(make_corpus(sizes), 1, 2)
        first, second = epoch_texts(found, 0), epoch_texts(found, 1)
        assert sorted(first) == sorted(second)
        assert first != second


def test_the_order_depends_on_the_seed(make_corpus: MakeCorpus) -> None:
    corpus = make_corpus([60], 1)
    assert read(corpus, 0, 1, seed=0) != read(corpus, 0, 1, seed=1)


@pytest.mark.parametrize("sizes", [[2], [1, 1]])
def test_fewer_documents_than_slots_is_an_error_and_no_endless_loop(
    make_corpus: MakeCorpus, sizes: list[int]
) -> None:
    corpus = make_corpus(sizes, 3)
    refused = []
    for number in range(3):
        try:
            read(corpus, number, 3)
        except UserError as error:
            refused.append(str(error))
    assert refused
    assert all("source 'text': lower data.num_slots or add text" in message for message in refused)


# --- cursors -------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[23, 0, 9], [3] * 20])
def test_reading_from_any_cursor_equals_the_unbroken_run(
    make_corpus: MakeCorpus, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "BLOCK_DOCUMENTS", 4)
    corpus = make_corpus(sizes, 3)
    unbroken = read(corpus, 1, 3)
    for done, (_, after) in enumerate(unbroken, start=1):
        assert read(corpus, 1, 3, after) == unbroken[done:]


def test_a_block_ends_when_its_documents_are_long(
    make_corpus: MakeCorpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "BLOCK_CHARS", 1)
    corpus = make_corpus([40], 1)
    assert epoch_texts(read(corpus, 0, 1), 0) == training(corpus)


def test_a_unit_is_not_read_beyond_the_block_that_is_wanted(
    make_corpus: MakeCorpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = make_corpus([5], 1)
    num_read = 0

    def counted(*_: object) -> Iterator[tuple[str, Mark]]:
        nonlocal num_read
        for number in range(5_000):
            num_read += 1
            yield f"document {number}", Mark(row=number + 1)

    monkeypatch.setattr(slots, "read_rows", counted)
    slot = Slot(0, 1, 0)
    stream = read_source(corpus.sources["text"], slot, SourceCursor(), corpus.is_held_out)
    list(islice(stream, 10))
    assert num_read < 1_500


@given(st.builds(SourceCursor, *[st.integers(0, 10**9)] * 4, st.builds(Mark)))
def test_a_cursor_survives_json(cursor: SourceCursor) -> None:
    assert SourceCursor.from_json(json.loads(json.dumps(cursor.to_json()))) == cursor
