from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffurefill.config import DataConfig
from diffurefill.data.cursors import Cursor
from diffurefill.data.open_rows import TokenDocument
from diffurefill.data.packing import Position, Rows, pack

BOS, EOS, PAD = 1, 2, 999

lengths = st.lists(st.integers(0, 50), min_size=1, max_size=60)
shapes = st.tuples(st.integers(8, 40), st.integers(1, 5), st.integers(1, 9))  # T, K, interval
kinds = st.fixed_dictionaries(
    {
        "packing": st.sampled_from(["best_fit", "chop"]),
        "short_rows": st.sampled_from([0.0, 0.4, 1.0]),
        "short_mode": st.sampled_from(["reshape", "docstart"]),
        "span_rows": st.sampled_from([0.0, 0.5]),
    }
)
PLAIN = DataConfig(row_length=16, open_rows=4)


def config(shape: tuple[int, int, int], **changes: Any) -> DataConfig:
    return replace(PLAIN, row_length=shape[0], open_rows=shape[1], **changes)


def documents_of(lengths: list[int], start: Cursor | None = None) -> Iterator[TokenDocument]:
    """Documents whose tokens are all different, so that every one can be followed. Token k of a
    document belongs to span k // 3, every third span left out."""
    start = start or Cursor()
    starts = np.cumsum([1000, *lengths])
    for number, (first, length) in enumerate(zip(starts, lengths, strict=False)):
        if number >= start.num_drawn:
            ids = np.array([BOS, *range(first, first + length), EOS], dtype=np.int64)
            before = start if number == start.num_drawn else Cursor(number)
            spans = np.arange(len(ids), dtype=np.int32) // 3
            spans[spans % 3 == 0] = 0
            source = "ab"[number % 2]
            yield TokenDocument(ids, source, before, Cursor(number + 1), spans.copy)


def pack_lengths(
    lengths: list[int], data: DataConfig, interval_rows: int, start: Position | None = None
) -> list[Rows]:
    start = start or Position()
    rows = pack(
        documents_of(lengths, start.cursor),
        start,
        data=data,
        seed=3,
        slot=0,
        interval_rows=interval_rows,
        interval_steps=2,
        pad_id=PAD,
    )
    return list(rows)


def unpack(rows: list[Rows]) -> list[list[int]]:
    """The pieces that stand in the rows, each a list of ids."""
    found = []
    for row in rows:
        pairs = zip(row.doc_ids[0].tolist(), row.ids[0].tolist(), strict=True)
        found += [
            [token for _, token in pair]
            for doc, pair in groupby(pairs, key=lambda pair: pair[0])
            if doc >= 0
        ]
    return found


def cut_plainly(lengths: list[int], row_length: int) -> list[list[int]]:
    return [
        document.ids[at : at + row_length].tolist()
        for document in documents_of(lengths)
        for at in range(0, len(document.ids), row_length)
    ]


def plain_best_fit(pieces: list[list[int]], shape: tuple[int, int, int]) -> list[list[list[int]]]:
    """Best fit, written as a table of rows; returns the pieces of each row as they are emitted."""
    row_length, open_rows, interval_rows = shape
    limit = max(1, min(16, row_length // 16))
    emitted: list[list[list[int]]] = []
    table: list[list[list[int]]] = []
    in_interval = 0

    def free(row: list[list[int]]) -> int:
        return row_length - sum(map(len, row))

    for piece in pieces:
        order = sorted(range(len(table)), key=lambda n: (free(table[n]), n))
        best = next((n for n in order if free(table[n]) >= len(piece)), None)
        if best is None and in_interval + len(table) == interval_rows:
            emitted += table
            table, in_interval = [], 0
        if best is None:
            table.append([])
            best = len(table) - 1
        table[best].append(piece)
        done = best if free(table[best]) < limit else None
        if done is None and len(table) > open_rows:
            done = min(range(len(table)), key=lambda n: free(table[n]))
        if done is not None:
            emitted.append(table.pop(done))
            in_interval = (in_interval + 1) % interval_rows
    return emitted + table


@given(lengths, shapes)
def test_best_fit_is_as_the_plain_table_does_it(
    lengths: list[int], shape: tuple[int, int, int]
) -> None:
    packed = [unpack([row]) for row in pack_lengths(lengths, config(shape), shape[2])]
    assert packed == plain_best_fit(cut_plainly(lengths, shape[0]), shape)


@given(lengths, shapes)
def test_chop_fills_every_row_of_an_interval_in_order(
    lengths: list[int], shape: tuple[int, int, int]
) -> None:
    rows = pack_lengths(lengths, config(shape, packing="chop"), shape[2])
    stream = [i for document in documents_of(lengths) for i in document.ids.tolist()]
    assert [i for row in rows for i in row.ids[row.doc_ids >= 0].tolist()] == stream
    assert all((row.doc_ids >= 0).all() for row in rows[:-1])


@given(lengths, shapes, kinds)
def test_rows_hold_every_token_once_and_each_piece_in_its_order(
    lengths: list[int], shape: tuple[int, int, int], kind: dict[str, Any]
) -> None:
    data = config((32, *shape[1:]), short_length=8, **kind)
    pieces = unpack(pack_lengths(lengths, data, shape[2]))
    found: dict[int, int] = {}
    for piece in pieces:
        for token in piece:
            found[token] = found.get(token, 0) + 1
        middle = [token for token in piece if token not in (BOS, EOS)]
        assert middle == list(range(middle[0], middle[0] + len(middle))) if middle else True
    expected = dict.fromkeys(range(1000, 1000 + sum(lengths)), 1)
    assert found == expected | {BOS: len(lengths), EOS: len(lengths)}


@given(lengths, shapes, kinds)
def test_packing_again_from_an_interval_s_end_gives_the_rows_after_it(
    lengths: list[int], shape: tuple[int, int, int], kind: dict[str, Any]
) -> None:
    data = config((32, *shape[1:]), short_length=8, **kind)
    rows = pack_lengths(lengths, data, shape[2])
    assert [row.position.num_rows for row in rows] == [(n + 1) % shape[2] for n in range(len(rows))]
    for done, row in enumerate(rows, start=1):
        if row.position.num_rows == 0:
            assert row.position.step == 2 * done // shape[2]
            rest = pack_lengths(lengths, data, shape[2], row.position)
            assert unpack(rest) == unpack(rows[done:])
            assert [r.position for r in rest] == [r.position for r in rows[done:]]
            assert [r.counts for r in rest] == [r.counts for r in rows[done:]]
            for one, other in zip(rest, rows[done:], strict=True):
                assert np.array_equal(one.span_ids, other.span_ids)


@given(lengths, shapes)
def test_document_ids_ascend_and_padding_stands_at_the_end(
    lengths: list[int], shape: tuple[int, int, int]
) -> None:
    for row in pack_lengths(lengths, config(shape), shape[2]):
        assert row.ids.shape == row.doc_ids.shape == row.span_ids.shape == (1, shape[0])
        assert (row.ids.dtype, row.doc_ids.dtype) == (np.int64, np.int32)
        runs = [doc for doc, _ in groupby(row.doc_ids[0].tolist())]
        num_documents = max(runs) + 1
        assert runs in ([*range(num_documents)], [*range(num_documents), -1])
        assert np.array_equal(row.ids == PAD, row.doc_ids == -1)


# --- short rows ----------------------------------------------------------------------------------


@given(lengths)
def test_a_reshaped_row_is_the_same_row_with_more_borders(lengths: list[int]) -> None:
    shape = (32, 3, 4)
    plain = pack_lengths(lengths, config(shape), 4)
    short = pack_lengths(lengths, config(shape, short_rows=1.0, short_length=8), 4)
    for one, other in zip(plain, short, strict=True):
        assert np.array_equal(one.ids, other.ids)
        assert one.part_lengths.tolist() == [32]
        assert other.part_lengths.tolist() == [8]
        for start in range(0, 32, 8):
            part = slice(start, start + 8)
            inside = {d for d in other.doc_ids[0, part].tolist() if d >= 0}
            outside = set(np.delete(other.doc_ids[0], np.r_[part]).tolist())
            assert inside.isdisjoint(outside)
            borders = np.diff(one.doc_ids[0, part]) != 0
            assert np.array_equal(borders, np.diff(other.doc_ids[0, part]) != 0)


def test_every_piece_of_a_row_of_heads_begins_with_its_document() -> None:
    lengths = [30, 5, 50, 2, 40, 41, 3, 60, 8, 33] * 20
    data = config((32, 3, 0), short_rows=0.1, short_length=8, short_mode="docstart")
    rows = pack_lengths(lengths, data, 100)
    heads = [row for row in rows if row.part_lengths[0] == 8]
    assert 5 < len(heads) < len(rows) / 5
    for row in heads:
        assert all(piece[0] == BOS for piece in unpack([row]))
        begun = row.doc_ids[0, ::8] >= 0  # an interval may end before the row is full
        assert (row.ids[0, ::8][begun] == BOS).all()
    assert sum((row.doc_ids >= 0).all() for row in heads) > len(heads) / 2


def test_about_the_asked_share_of_rows_is_short_and_has_spans() -> None:
    data = config((16, 4, 2000), short_rows=0.1, short_length=8, span_rows=0.25)
    counts = pack_lengths([14] * 2000, data, 2000)[-1].counts
    assert counts.num_rows == 2000
    assert 150 < counts.num_short_rows < 250  # 3.7 sigma
    assert 430 < counts.num_span_rows < 570  # 3.6 sigma


# --- spans ---------------------------------------------------------------------------------------


@given(lengths, st.booleans())
def test_spans_are_the_documents_spans_cut_at_edges(lengths: list[int], is_short: bool) -> None:
    short = {"short_rows": 1.0, "short_length": 8} if is_short else {}
    rows = pack_lengths(lengths, config((32, 3, 5), span_rows=1.0, **short), 5)
    for row in rows:
        spans, docs, ids = row.span_ids[0], row.doc_ids[0], row.ids[0]
        numbers = [span for span in dict.fromkeys(spans.tolist()) if span]
        assert numbers == list(range(1, len(numbers) + 1))
        for number in numbers:
            members = np.flatnonzero(spans == number)
            assert np.array_equal(members, np.arange(members[0], members[-1] + 1))
            assert len(set(docs[members].tolist())) == 1
            assert len(members) <= 3
            assert EOS not in ids[members[:-1]]


def test_only_rows_that_want_spans_look_for_them() -> None:
    asked = []

    def documents() -> Iterator[TokenDocument]:
        for number, document in enumerate(documents_of([10] * 40)):
            find = document.find_spans
            yield document._replace(find_spans=lambda n=number, f=find: (asked.append(n), f())[1])

    data = config((16, 3, 40), span_rows=0.5)
    settings = {"seed": 3, "slot": 0, "interval_rows": 40, "interval_steps": 1, "pad_id": PAD}
    rows = list(pack(documents(), Position(), data=data, **settings))
    with_spans = [row for row in rows if row.span_ids.any()]
    assert 5 < len(with_spans) < 35
    assert len(asked) == len(unpack(with_spans)) == rows[-1].counts.num_span_rows


# --- counts and cursors --------------------------------------------------------------------------


def test_a_piece_that_fits_nowhere_starts_the_next_interval() -> None:
    rows = pack_lengths([10, 10, 10], PLAIN, 2)
    assert [len(unpack([row])) for row in rows] == [1, 1, 1]
    assert rows[1].position == Position(Cursor(2), step=2)


def test_the_token_says_where_a_cut_document_continues() -> None:
    rows = pack_lengths([40], replace(PLAIN, open_rows=1), 1)
    cursors = [row.position.cursor for row in rows]
    assert cursors == [Cursor(token=16), Cursor(token=32), Cursor(1)]


def test_a_document_of_specials_alone_is_packed() -> None:
    assert unpack(pack_lengths([0, 0], config((8, 1, 1)), 1)) == [[BOS, EOS], [BOS, EOS]]


def test_counts_say_what_the_rows_hold() -> None:
    rows = pack_lengths([40, 3, 50], PLAIN, 20)
    counts = rows[-1].counts
    assert counts.num_documents_cut == 2
    assert counts.documents == {"a": 2, "b": 1}
    assert counts.tokens == {"a": 94, "b": 5}
    assert counts.num_tokens == 40 + 3 + 50 + 6
    assert counts.num_padding == sum(int((row.doc_ids < 0).sum()) for row in rows)
    assert counts.padding_share == pytest.approx(counts.num_padding / (16 * len(rows)))
    assert counts.num_heads == sum(int(row.ids[0, 0]) == BOS for row in rows)


def test_best_fit_over_sixteen_rows_pads_far_less_than_next_fit() -> None:
    sizes = np.random.Generator(np.random.Philox(key=3)).geometric(1 / 60, 5_000).tolist()
    best_fit = pack_lengths(sizes, config((256, 16, 0)), 6_000)[-1].counts.padding_share
    next_fit = pack_lengths(sizes, config((256, 1, 0)), 6_000)[-1].counts.padding_share
    assert best_fit < next_fit / 4


@given(st.builds(Position, st.builds(Cursor, *[st.integers(0, 99)] * 2), *[st.integers(0, 99)] * 2))
def test_a_position_survives_json(position: Position) -> None:
    assert Position.from_json(position.to_json()) == position
