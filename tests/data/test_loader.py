import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diffurefill.config import DataConfig, Phase, Source, UserError
from diffurefill.data import encoding, loader
from diffurefill.data.documents import Corpus, open_corpus, training_texts
from diffurefill.data.loader import Loader
from diffurefill.data.packing import Position, Rows
from diffurefill.data.tokens.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from tests.data.conftest import all_texts, data_config

MakeCorpus = Callable[..., Corpus]
SHARED = Path(__file__).resolve().parents[2] / ".." / "shared" / "data"
DATA = data_config("unused")


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
        assert np.array_equal(one.span_ids, other.span_ids)
        assert np.array_equal(one.part_lengths, other.part_lengths)


KINDS = {
    "plain": {},
    "chop": {"packing": "chop"},
    "reshape": {"short_rows": 0.3, "short_length": 8},
    "docstart": {"short_rows": 0.3, "short_length": 8, "short_mode": "docstart"},
    "spans": {"span_rows": 0.5},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [[17, 8], [3] * 12])
def test_resuming_after_any_row_equals_the_unbroken_run(
    make_corpus: MakeCorpus, tokenizer: Tokenizer, sizes: list[int], kind: str
) -> None:
    corpus, data = make_corpus(sizes), replace(DATA, **KINDS[kind])
    unbroken = take(corpus, tokenizer, 40, batch_rows=1, data=data)
    # The run crosses an epoch.
    assert unbroken[-1].position.cursor.sources["text"].epoch >= 1
    for done in range(1, 40):
        position = Position.from_json(json.loads(json.dumps(unbroken[done - 1].position.to_json())))
        rest = take(corpus, tokenizer, 40 - done, batch_rows=1, position=position, data=data)
        assert_same(rest, unbroken[done:])


def test_phases_change_the_mixture_at_an_interval_and_resume(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """Intervals of 3 steps; the phase from step 4 begins with the interval from step 6."""
    for name in ("web", "facts"):
        lines = [json.dumps({"text": f"{name} {n} over the hill"}) for n in range(200)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    sources = tuple(Source(name=n, paths=(str(tmp_path / f"{n}.jsonl"),)) for n in ("web", "facts"))
    phases = (
        Phase(shares=(("web", 1.0),)),
        Phase(from_step=4, shares=(("web", 0.5), ("facts", 0.5))),
        Phase(from_step=9, shares=(("facts", 1.0),)),
    )
    data = replace(DATA, sources=sources, phases=phases)
    corpus = open_corpus(data)
    unbroken = take(corpus, tokenizer, 15, data=data)
    steps = [0, 0, 3, 3, 3, 6, 6, 6, 9, 9, 9, 12, 12, 12, 15]
    assert [rows.position.step for rows in unbroken] == steps
    intervals = [set(rows.counts.tokens) for rows in unbroken[2::3]]
    assert intervals == [{"web"}, {"web"}, {"web", "facts"}, {"facts"}, {"facts"}]
    for done in range(1, 15):
        rest = take(corpus, tokenizer, 15 - done, position=unbroken[done - 1].position, data=data)
        assert_same(rest, unbroken[done:])
    texts = [
        tokenizer.decode(ids[docs == d])
        for rows in unbroken
        for ids, docs in _rows(rows)
        for d in range(docs.max() + 1)
    ]
    whole = [text for text in texts if text.endswith("hill")]
    assert len(whole) == len(set(whole)) > 30


def _rows(rows: Rows) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    return zip(rows.ids, rows.doc_ids, strict=True)


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


@pytest.mark.parametrize(
    ("limit", "value"),
    [
        ("_ENCODE_DOCUMENTS", 1),
        ("_ENCODE_DOCUMENTS", 7),
        ("_ENCODE_CHARS", 1),
        ("_ENCODE_CHARS", 300),
    ],
)
def test_rows_do_not_depend_on_how_many_documents_are_encoded_at_once(
    make_corpus: MakeCorpus,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    limit: str,
    value: int,
) -> None:
    corpus = make_corpus([17, 8])
    expected = take(corpus, tokenizer, 20)
    monkeypatch.setattr(encoding, limit, value)
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
        assert batches[-1].position.cursor == single[-1].position.cursor


def test_an_interval_ends_at_a_cursor_alone(make_corpus: MakeCorpus, tokenizer: Tokenizer) -> None:
    positions = [rows.position for rows in take(make_corpus([17, 8]), tokenizer, 9)]
    assert [position.num_rows for position in positions] == [2, 4, 0] * 3


def test_rows_hold_the_slot_s_training_documents_and_no_other(
    make_corpus: MakeCorpus, tokenizer: Tokenizer
) -> None:
    corpus = make_corpus([30, 30])
    data = replace(DATA, row_length=256, open_rows=16)
    found: list[str] = []
    for slot in (0, 1):
        batches = take(corpus, tokenizer, 1, data=data, slot=slot, interval_rows=8, batch_rows=8)
        (rows,) = batches
        for ids, doc_ids in zip(rows.ids, rows.doc_ids, strict=True):
            found += [tokenizer.decode(ids[doc_ids == doc]) for doc in range(doc_ids.max() + 1)]
    assert set(found) == {text for text in all_texts(corpus) if not corpus.is_held_out(text)}


def test_span_rows_hold_the_salient_spans_of_their_texts(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    texts = [f"seven owls saw Anna Lee in {1900 + n} over the hill" for n in range(60)]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    data = replace(data_config(tmp_path), row_length=64, span_rows=0.5)
    batches = take(open_corpus(data), tokenizer, 3, data=data)
    found, without = [], 0
    for rows in batches:
        for ids, spans in zip(rows.ids, rows.span_ids, strict=True):
            numbers = range(1, spans.max() + 1)
            found += [tokenizer.decode(ids[spans == number]).strip() for number in numbers]
            without += not spans.any()
    assert without > 0
    assert len(found) > 4
    assert {text for text in found if not text.isdigit()} == {"Anna Lee"}
    assert all(text.startswith("19") for text in found if text.isdigit())
    counts = batches[-1].counts
    assert 0 < counts.num_span_tokens < counts.num_tokens


def test_no_spans_are_looked_for_in_code(tmp_path: Path, tokenizer: Tokenizer) -> None:
    lines = [json.dumps({"text": f"the call of Anna Lee in {n}"}) for n in range(60)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    data = replace(data_config(tmp_path), span_rows=1.0)
    code = replace(data, sources=(replace(data.sources[0], has_spans=False),))
    assert take(open_corpus(data), tokenizer, 1, data=data)[0].span_ids.any()
    assert not take(open_corpus(code), tokenizer, 1, data=code)[0].span_ids.any()


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
    data = DataConfig(row_length=128, num_slots=4)
    corpus = open_corpus(data)
    tokenizer = train_tokenizer(training_texts(corpus, data, 200_000), 1024)
    (rows,) = take(corpus, tokenizer, 1, data=data, interval_rows=64, batch_rows=64)
    text = "".join(tokenizer.decode(ids) for ids in rows.ids)
    assert "def " in text
    assert "    return" in text
    assert rows.counts.padding_share < 0.1


@pytest.mark.skipif(not SHARED.exists(), reason="the shared data is not here")
@pytest.mark.parametrize("name", ["classics", "stories", "tinystories-2mib", "wiki-passages"])
def test_a_real_data_set_gives_full_rows_and_resumes(name: str) -> None:
    data = data_config(SHARED / "text" / name, row_length=512, num_slots=4, open_rows=16)
    data = replace(data, span_rows=0.25, short_rows=0.1, short_length=128)
    corpus = open_corpus(data)
    tokenizer = load_tokenizer(SHARED / "tokenizer" / "minicpm4" / "tokenizer.json")
    shape: dict[str, Any] = {"data": data}
    shape |= {"interval_rows": 32, "batch_rows": 16}
    batches = take(corpus, tokenizer, 4, prefetch=2, **shape)
    assert batches[-1].counts.padding_share < 0.2  # half of so short an interval is its flush
    shape["position"] = batches[2].position
    assert_same(take(corpus, tokenizer, 1, **shape), batches[3:])
