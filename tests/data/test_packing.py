from itertools import groupby

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffurefill.data.documents import Cursor
from diffurefill.data.packing import Piece, Position, Rows, cut_documents, pack

BOS, EOS, PAD = 1, 2, 999

lengths = st.lists(st.integers(0, 50), min_size=1, max_size=60)
shapes = st.tuples(st.integers(8, 40), st.integers(1, 5), st.integers(1, 9))  # T, K, interval


def documents_of(lengths: list[int]) -> list[tuple[list[int], Cursor]]:
    """Documents whose tokens are all different, so that every one can be followed."""
    starts = np.cumsum([1000, *lengths])
    return [
        (list(range(start, start + length)), Cursor(document=number + 1))
        for number, (start, length) in enumerate(zip(starts, lengths, strict=False))
    ]


def pieces_of(lengths: list[int], row_length: int, start: Cursor | None = None) -> list[Piece]:
    start = start or Cursor()
    return list(
        cut_documents(
            documents_of(lengths)[start.document :],
            row_length=row_length,
            bos_id=BOS,
            eos_id=EOS,
            first_piece=start.piece,
        )
    )


def pack_lengths(
    lengths: list[int], shape: tuple[int, int, int], start: Cursor | None = None
) -> list[Rows]:
    row_length, open_rows, interval_rows = shape
    return list(
        pack(
            pieces_of(lengths, row_length, start),
            start or Cursor(),
            interval_rows=interval_rows,
            row_length=row_length,
            open_rows=open_rows,
            pad_id=PAD,
        )
    )


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


def plain_pack(lengths: list[list[int]], shape: tuple[int, int, int]) -> list[list[list[int]]]:
    """Best fit, written as a table of rows; returns the pieces of each row as they are emitted."""
    row_length, open_rows, interval_rows = shape
    limit = max(1, min(16, row_length // 16))
    emitted: list[list[list[int]]] = []
    table: list[list[list[int]]] = []
    in_interval = 0

    def free(row: list[list[int]]) -> int:
        return row_length - sum(map(len, row))

    for piece in lengths:
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


@given(lengths, st.integers(8, 40))
def test_pieces_join_to_bos_tokens_eos_and_fit_a_row(lengths: list[int], row_length: int) -> None:
    pieces = pieces_of(lengths, row_length)
    assert all(1 <= len(piece.ids) <= row_length for piece in pieces)
    joined = [i for piece in pieces for i in piece.ids.tolist()]
    assert joined == [i for tokens, _ in documents_of(lengths) for i in (BOS, *tokens, EOS)]


@given(lengths, st.integers(8, 40))
def test_cutting_again_from_a_piece_gives_the_pieces_after_it(
    lengths: list[int], row_length: int
) -> None:
    pieces = pieces_of(lengths, row_length)
    for done, piece in enumerate(pieces, start=1):
        rest = pieces_of(lengths, row_length, piece.after)
        assert [p.ids.tolist() for p in rest] == [p.ids.tolist() for p in pieces[done:]]
        assert [p.after for p in rest] == [p.after for p in pieces[done:]]


@given(lengths, shapes)
def test_rows_hold_every_piece_exactly_once_and_whole(
    lengths: list[int], shape: tuple[int, int, int]
) -> None:
    expected = [piece.ids.tolist() for piece in pieces_of(lengths, shape[0])]
    assert sorted(unpack(pack_lengths(lengths, shape))) == sorted(expected)


@given(lengths, shapes)
def test_document_ids_ascend_and_padding_stands_at_the_end(
    lengths: list[int], shape: tuple[int, int, int]
) -> None:
    for row in pack_lengths(lengths, shape):
        assert row.ids.shape == row.doc_ids.shape == (1, shape[0])
        assert (row.ids.dtype, row.doc_ids.dtype) == (np.int64, np.int32)
        runs = [doc for doc, _ in groupby(row.doc_ids[0].tolist())]
        num_documents = max(runs) + 1
        assert runs in ([*range(num_documents)], [*range(num_documents), -1])
        assert np.array_equal(row.ids == PAD, row.doc_ids == -1)


@given(lengths, shapes)
def test_packing_is_best_fit_as_the_plain_table_does_it(
    lengths: list[int], shape: tuple[int, int, int]
) -> None:
    pieces = [piece.ids.tolist() for piece in pieces_of(lengths, shape[0])]
    packed = [unpack([row]) for row in pack_lengths(lengths, shape)]
    assert packed == plain_pack(pieces, shape)


@given(lengths, shapes)
def test_every_interval_has_its_exact_number_of_rows(
    lengths: list[int], shape: tuple[int, int, int]
) -> None:
    rows = pack_lengths(lengths, shape)
    counted = [row.position.num_rows for row in rows]
    assert counted == [(n + 1) % shape[2] for n in range(len(rows))]


@given(lengths, shapes)
def test_packing_again_from_an_interval_s_end_gives_the_rows_after_it(
    lengths: list[int], shape: tuple[int, int, int]
) -> None:
    rows = pack_lengths(lengths, shape)
    for done, row in enumerate(rows, start=1):
        if row.position.num_rows == 0:
            rest = pack_lengths(lengths, shape, row.position.cursor)
            assert unpack(rest) == unpack(rows[done:])
            assert [r.position for r in rest] == [r.position for r in rows[done:]]
            assert [r.counts for r in rest] == [r.counts for r in rows[done:]]


def test_a_piece_that_fits_nowhere_starts_the_next_interval() -> None:
    rows = pack_lengths([10, 10, 10], (16, 4, 2))
    assert [len(unpack([row])) for row in rows] == [1, 1, 1]
    assert rows[1].position == Position(Cursor(document=2))


def test_the_piece_index_says_where_a_cut_document_continues() -> None:
    rows = pack_lengths([40], (16, 1, 1))
    positions = [row.position.cursor for row in rows]
    assert positions == [Cursor(piece=1), Cursor(piece=2), Cursor(document=1)]


def test_a_document_of_specials_alone_is_packed() -> None:
    assert unpack(pack_lengths([0, 0], (8, 1, 1))) == [[BOS, EOS], [BOS, EOS]]


def test_counts_say_how_much_is_padding_and_how_many_documents_were_cut() -> None:
    rows = pack_lengths([40, 3, 50], (16, 4, 20))
    counts = rows[-1].counts
    assert counts.num_documents_cut == 2
    assert counts.num_tokens == 40 + 3 + 50 + 6
    assert counts.num_padding == sum(int((row.doc_ids < 0).sum()) for row in rows)
    assert counts.padding_share == pytest.approx(counts.num_padding / (16 * len(rows)))


def test_best_fit_over_sixteen_rows_pads_far_less_than_next_fit() -> None:
    sizes = np.random.Generator(np.random.Philox(key=3)).geometric(1 / 60, 5_000).tolist()
    best_fit = pack_lengths(sizes, (256, 16, 10**6))[-1].counts.padding_share
    next_fit = pack_lengths(sizes, (256, 1, 10**6))[-1].counts.padding_share
    assert best_fit < next_fit / 4


@given(st.builds(Position, st.builds(Cursor, *[st.integers(0, 99)] * 4), st.integers(0, 99)))
def test_a_position_survives_json(position: Position) -> None:
    assert Position.from_json(position.to_json()) == position
