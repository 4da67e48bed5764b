import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diffurefill.config import DataConfig, UserError
from diffurefill.data import loader
from diffurefill.data.documents import Corpus, is_held_out, open_corpus
from diffurefill.data.loader import Loader
from diffurefill.data.packing import Position, Rows
from diffurefill.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer

MakeCorpus = Callable[[Sequence[int]], Corpus]
SHARED = Path(__file__).resolve().parents[2] / ".." / "shared" / "data"
DATA = DataConfig(row_length=24, num_slots=2, held_out_fraction=0.2, open_rows=3)


def open_loader(corpus: Corpus, tokenizer: Tokenizer, **changes: Any) -> Loader:
    settings: dict[str, Any] = {"data": DATA, "seed": 5, "slot": 1, "prefetch": 0}
    settings |= {"interval_rows": 6, "batch_rows": 2}
    return Loader(corpus, tokenizer, **(settings | changes))


def take(corpus: Corpus, tokenizer: Tokenizer, num_batches: int, **changes: Any) -> list[Rows]:
    with open_loader(corpus, tokenizer, **changes) as batches:
        return list(islice(batches, num_batches))


def assert_same(left: list[Rows], right: list[Rows]) -> None:
    assert [rows.position for rows in left] == [rows.position for rows in right]
    assert [rows.counts for rows in left] == [rows.counts for rows in right]
    for one, other in zip(left, right, strict=True):
        assert np.array_equal(one.ids, other.ids)
        assert np.array_equal(one.doc_ids, other.doc_ids)


@pytest.mark.parametrize("sizes", [[17, 8], [3] * 12])
def test_resuming_after_any_row_equals_the_unbroken_run(
    make_corpus: MakeCorpus, tokenizer: Tokenizer, sizes: list[int]
) -> None:
    corpus = make_corpus(sizes)
    unbroken = take(corpus, tokenizer, 40, batch_rows=1)
    assert unbroken[-1].position.cursor.epoch >= 1  # the run crosses an epoch
    for done in range(1, 40):
        position = Position.from_json(unbroken[done - 1].position.to_json())
        rest = take(corpus, tokenizer, 40 - done, batch_rows=1, position=position)
        assert_same(rest, unbroken[done:])


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_a_chain_of_resumes_equals_the_unbroken_run(
    make_corpus: MakeCorpus, tokenizer: Tokenizer, prefetch: int
) -> None:
    corpus = make_corpus([17, 8])
    unbroken = take(corpus, tokenizer, 24)
    position, pieced = None, []
    for length in (1, 4, 2, 6, 3, 8):
        pieced += take(corpus, tokenizer, length, position=position, prefetch=prefetch)
        position = pieced[-1].position
    assert_same(pieced, unbroken)


@pytest.mark.parametrize("prefetch", [1, 8])
def test_reading_ahead_changes_no_row_and_no_position(
    make_corpus: MakeCorpus, tokenizer: Tokenizer, prefetch: int
) -> None:
    corpus = make_corpus([17, 8])
    ahead = take(corpus, tokenizer, 20, prefetch=prefetch)
    assert_same(ahead, take(corpus, tokenizer, 20))


@pytest.mark.parametrize("encode_documents", [1, 7])
def test_rows_do_not_depend_on_how_many_documents_are_encoded_at_once(
    make_corpus: MakeCorpus,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    encode_documents: int,
) -> None:
    corpus = make_corpus([17, 8])
    expected = take(corpus, tokenizer, 20)
    monkeypatch.setattr(loader, "_ENCODE_DOCUMENTS", encode_documents)
    assert_same(take(corpus, tokenizer, 20), expected)


def test_batches_are_the_same_rows_whatever_their_size(
    make_corpus: MakeCorpus, tokenizer: Tokenizer
) -> None:
    corpus = make_corpus([17, 8])
    single = take(corpus, tokenizer, 18, batch_rows=1)
    for batch_rows in (2, 3, 6):
        batches = take(corpus, tokenizer, 18 // batch_rows, batch_rows=batch_rows)
        ids = np.concatenate([rows.ids for rows in batches])
        assert batches[0].ids.shape == (batch_rows, DATA.row_length)
        assert np.array_equal(ids, np.concatenate([rows.ids for rows in single]))
        assert batches[-1].position == single[-1].position


def test_an_interval_ends_at_a_cursor_alone(make_corpus: MakeCorpus, tokenizer: Tokenizer) -> None:
    positions = [rows.position for rows in take(make_corpus([17, 8]), tokenizer, 9)]
    assert [position.num_rows for position in positions] == [2, 4, 0] * 3


def test_rows_hold_the_slot_s_training_documents_and_no_other(
    make_corpus: MakeCorpus, tokenizer: Tokenizer
) -> None:
    corpus = make_corpus([30, 30])
    data = DataConfig(row_length=256, num_slots=2, held_out_fraction=0.2)
    found: list[str] = []
    for slot in (0, 1):
        batches = take(corpus, tokenizer, 1, data=data, slot=slot, interval_rows=8, batch_rows=8)
        (rows,) = batches
        for ids, doc_ids in zip(rows.ids, rows.doc_ids, strict=True):
            found += [tokenizer.decode(ids[doc_ids == doc]) for doc in range(doc_ids.max() + 1)]
    training = {
        text for unit in (0, 1) for text in corpus.texts(unit) if not is_held_out(text, 0.2)
    }
    assert set(found) == training


def test_an_error_while_reading_ahead_reaches_the_consumer(
    make_corpus: MakeCorpus, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    corpus = make_corpus([40])
    with (tmp_path / "000.jsonl").open("a") as file:
        file.write("\n{broken")
    with open_loader(corpus, tokenizer, prefetch=2) as batches:
        with pytest.raises(UserError, match=r"000\.jsonl:41 is not valid JSON"):
            list(batches)
        assert list(batches) == []


@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_closing_ends_the_thread_and_the_rows(
    make_corpus: MakeCorpus, tokenizer: Tokenizer, prefetch: int
) -> None:
    before = threading.active_count()
    batches = open_loader(make_corpus([17, 8]), tokenizer, prefetch=prefetch)
    next(batches)
    batches.close()
    batches.close()
    assert threading.active_count() == before
    assert list(batches) == []


def test_the_thread_reads_no_further_than_it_was_told(
    make_corpus: MakeCorpus, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Rows] = []
    real = loader._batches

    def counted(rows: Iterator[Rows], batch_rows: int) -> Iterator[Rows]:
        for batch in real(rows, batch_rows):
            made.append(batch)
            yield batch

    monkeypatch.setattr(loader, "_batches", counted)
    with open_loader(make_corpus([17, 8]), tokenizer, prefetch=2) as batches:
        list(islice(batches, 10))
    assert len(made) <= 10 + 2 + 1  # taken, queued, waiting for a place


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"interval_rows": 7}, "no whole number of batches"),
        ({"batch_rows": 0}, "no whole number of batches"),
        ({"position": Position(num_rows=1)}, "cannot continue 1 rows"),
        ({"position": Position(num_rows=6)}, "cannot continue 6 rows"),
        ({"slot": 2}, "slot 2 does not exist"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_at_once(
    make_corpus: MakeCorpus, tokenizer: Tokenizer, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        open_loader(make_corpus([5]), tokenizer, **changes)


def test_the_library_s_rows_read_as_python() -> None:
    corpus = open_corpus(["python:"], "text")
    unit = next(n for n, u in enumerate(corpus.units) if u.name.endswith("/argparse.py"))
    tokenizer = train_tokenizer(corpus.texts(unit), 1024)
    data = DataConfig(row_length=128, num_slots=4)
    (rows,) = take(corpus, tokenizer, 1, data=data, interval_rows=64, batch_rows=64)
    text = "".join(tokenizer.decode(ids) for ids in rows.ids)
    assert "def " in text
    assert "    return" in text
    assert rows.counts.padding_share < 0.1


@pytest.mark.skipif(not SHARED.exists(), reason="the shared data is not here")
@pytest.mark.parametrize("name", ["classics", "stories", "tinystories-2mib", "wiki-passages"])
def test_a_real_data_set_gives_full_rows_and_resumes(name: str) -> None:
    corpus = open_corpus([str(SHARED / "text" / name)], "text")
    tokenizer = load_tokenizer(SHARED / "tokenizer" / "minicpm4" / "tokenizer.json")
    shape: dict[str, Any] = {"data": DataConfig(row_length=512, num_slots=4)}
    shape |= {"interval_rows": 32, "batch_rows": 16}
    batches = take(corpus, tokenizer, 4, prefetch=2, **shape)
    assert batches[-1].counts.padding_share < 0.15  # half of so short an interval is its flush
    shape["position"] = batches[2].position
    assert_same(take(corpus, tokenizer, 1, **shape), batches[3:])
