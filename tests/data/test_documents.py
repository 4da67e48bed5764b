import hashlib
import json
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffurefill.config import UserError
from diffurefill.data import documents
from diffurefill.data.documents import (
    Corpus,
    Cursor,
    held_out_documents,
    is_held_out,
    open_corpus,
    read_documents,
    training_texts,
)

MakeCorpus = Callable[[Sequence[int]], Corpus]
FRACTION = 0.2


def all_texts(corpus: Corpus) -> list[str]:
    return [text for unit in range(len(corpus.units)) for text in corpus.texts(unit)]


def read(
    corpus: Corpus, slot: int, num_slots: int, cursor: Cursor | None = None, seed: int = 0
) -> list[tuple[str, Cursor]]:
    """The slot's documents from `cursor` to the end of the second epoch."""
    found = []
    stream = read_documents(
        corpus,
        seed=seed,
        slot=slot,
        num_slots=num_slots,
        cursor=cursor or Cursor(),
        held_out_fraction=FRACTION,
    )
    for text, after in stream:
        if after.epoch == 2:
            break
        found.append((text, after))
    return found


def epoch_texts(found: list[tuple[str, Cursor]], epoch: int) -> list[str]:
    return [text for text, after in found if after.epoch == epoch]


# --- the split -----------------------------------------------------------------------------------


@given(st.text(st.characters(exclude_categories=["Cs"])), st.floats(0.001, 0.5))
def test_the_split_depends_on_the_text_alone(text: str, fraction: float) -> None:
    share = int(hashlib.sha256(text.encode()).hexdigest()[:16], 16) / 2**64
    assert is_held_out(text, fraction) == (share < fraction)


def test_about_the_asked_share_is_held_out() -> None:
    held_out = sum(is_held_out(f"document {n}", 0.1) for n in range(10_000))
    assert 900 < held_out < 1_100


def test_no_training_reader_ever_sees_a_held_out_document(make_corpus: MakeCorpus) -> None:
    corpus = make_corpus([30, 30])
    held_out = set(held_out_documents(corpus, FRACTION))
    assert held_out
    for slot in range(3):
        assert held_out.isdisjoint(text for text, _ in read(corpus, slot, 3))
    assert held_out.isdisjoint(training_texts(corpus, FRACTION, 10**6))


def test_held_out_and_training_documents_together_are_the_corpus(make_corpus: MakeCorpus) -> None:
    corpus = make_corpus([30, 30])
    both = [*held_out_documents(corpus, FRACTION), *training_texts(corpus, FRACTION, 10**6)]
    assert sorted(both) == sorted(all_texts(corpus))


def test_no_held_out_document_at_all_is_an_error(make_corpus: MakeCorpus) -> None:
    with pytest.raises(UserError, match=r"raise data\.held_out_fraction"):
        list(held_out_documents(make_corpus([3]), 1e-9))


def test_the_sample_takes_from_every_unit_and_stays_within_its_size(
    make_corpus: MakeCorpus,
) -> None:
    corpus = make_corpus([50] * 6)
    sample = list(training_texts(corpus, FRACTION, 6_000))
    assert 4_000 < sum(map(len, sample)) <= 6_000
    assert sample == list(training_texts(corpus, FRACTION, 6_000))
    units = [set(corpus.texts(unit)) for unit in range(6)]
    assert all(any(text in unit for text in sample) for unit in units)


# --- slots ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_slots", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("sizes", [[40], [25, 0, 15], [1] * 40, [7] * 8, [1, 30, 1, 2, 1, 5]])
def test_slots_are_disjoint_and_together_hold_all_training_documents(
    make_corpus: MakeCorpus, sizes: list[int], num_slots: int
) -> None:
    corpus = make_corpus(sizes)
    expected = sorted(text for text in all_texts(corpus) if not is_held_out(text, FRACTION))
    slots = [read(corpus, slot, num_slots) for slot in range(num_slots)]
    for epoch in (0, 1):
        assert sorted(text for found in slots for text in epoch_texts(found, epoch)) == expected


def test_a_slot_owns_the_same_documents_in_every_epoch_in_another_order(
    make_corpus: MakeCorpus,
) -> None:
    for sizes in ([40], [3] * 20):
        found = read(make_corpus(sizes), 1, 2)
        first, second = epoch_texts(found, 0), epoch_texts(found, 1)
        assert sorted(first) == sorted(second)
        assert first != second


def test_the_order_depends_on_the_seed(make_corpus: MakeCorpus) -> None:
    corpus = make_corpus([60])
    assert read(corpus, 0, 1, seed=0) != read(corpus, 0, 1, seed=1)


@pytest.mark.parametrize("sizes", [[2], [1, 1]])
def test_fewer_documents_than_slots_is_an_error_and_no_endless_loop(
    make_corpus: MakeCorpus, sizes: list[int]
) -> None:
    corpus = make_corpus(sizes)
    with pytest.raises(UserError, match=r"lower data\.num_slots or add text"):
        read(corpus, 2, 3)


@pytest.mark.parametrize("slot", [-1, 4])
def test_a_slot_out_of_range_is_refused(make_corpus: MakeCorpus, slot: int) -> None:
    with pytest.raises(UserError, match=r"data\.num_slots is 4"):
        read(make_corpus([9]), slot, 4)


# --- cursors -------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[23, 0, 9], [3] * 20])
def test_reading_from_any_cursor_equals_the_unbroken_run(
    make_corpus: MakeCorpus, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "_BLOCK_DOCUMENTS", 4)
    corpus = make_corpus(sizes)
    unbroken = read(corpus, 1, 3)
    for done, (_, after) in enumerate(unbroken, start=1):
        assert read(corpus, 1, 3, after) == unbroken[done:]


def test_a_block_ends_when_its_documents_are_long(
    make_corpus: MakeCorpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "_BLOCK_CHARS", 1)
    corpus = make_corpus([40])
    texts = epoch_texts(read(corpus, 0, 1), 0)
    assert texts == [text for text in all_texts(corpus) if not is_held_out(text, FRACTION)]


def test_a_unit_is_not_read_beyond_the_block_that_is_wanted(
    make_corpus: MakeCorpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = make_corpus([5_000])
    num_read = 0

    def counted(unit: object, text_column: str) -> object:
        nonlocal num_read
        for number in range(5_000):
            num_read += 1
            yield f"document {number}"

    monkeypatch.setattr(documents, "read_texts", counted)
    stream = read_documents(
        corpus, seed=0, slot=0, num_slots=1, cursor=Cursor(), held_out_fraction=FRACTION
    )
    list(islice(stream, 10))
    assert num_read < 1_500


@given(st.builds(Cursor, *[st.integers(0, 10**9)] * 4))
def test_a_cursor_survives_json(cursor: Cursor) -> None:
    assert Cursor.from_json(json.loads(json.dumps(cursor.to_json()))) == cursor


# --- the corpus ----------------------------------------------------------------------------------


def test_the_fingerprint_ignores_where_files_lie_and_sees_their_size(tmp_path: Path) -> None:
    prints = []
    for folder, text in [("here", "abc"), ("there", "abc"), ("other", "abcd")]:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text(text)
        prints.append(open_corpus([str(tmp_path / folder)], "text").fingerprint)
    assert prints[0] == prints[1] != prints[2]
    assert len(prints[0]) == 64


def test_a_file_named_by_two_sources_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("abc")
    assert len(open_corpus([str(path), str(tmp_path)], "text").units) == 1


@pytest.mark.parametrize("content", [None, "", " \n\n "])
def test_a_corpus_without_text_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "a.txt").write_text(content)
    with pytest.raises(UserError, match="no text in"):
        open_corpus([str(tmp_path)], "text")
