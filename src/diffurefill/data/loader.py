"""Batches of rows, read ahead in a thread, resumed exactly.

The position travels with the rows, so what the thread has read ahead never counts: only the rows
that the consumer took move it (spec data.md 5).
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable, Iterator
from itertools import islice
from queue import Empty, Queue
from types import TracebackType
from typing import Self

import numpy as np

from diffurefill.config import DataConfig, UserError
from diffurefill.data.documents import Corpus, Cursor, read_documents
from diffurefill.data.packing import Position, Rows, cut_documents, pack
from diffurefill.data.tokenizer import Tokenizer

_ENCODE_DOCUMENTS = 64
"""Documents encoded in one call; changes speed, never a row."""


class Loader:
    """An endless iterator over one slot's rows, `batch_rows` at a time.

    Starts at `position` (default: the slot's first document). `prefetch` batches are made ahead by
    a thread; 0 makes each when it is asked for. The rows do not depend on it. Use as a context
    manager, or call `close()`; a closed loader ends.
    """

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: Tokenizer,
        *,
        data: DataConfig,
        seed: int,
        slot: int,
        interval_rows: int,
        batch_rows: int,
        position: Position | None = None,
        prefetch: int = 2,
    ) -> None:
        """Raises UserError for sizes or a position that do not fit each other."""
        position = position or Position()
        if batch_rows < 1 or interval_rows % batch_rows:
            raise UserError(
                f"an interval of {interval_rows} rows is no whole number of batches of "
                f"{batch_rows} rows: change train.batch_rows"
            )
        if position.num_rows % batch_rows or not 0 <= position.num_rows < interval_rows:
            raise UserError(
                f"cannot continue {position.num_rows} rows into an interval of {interval_rows} "
                f"rows by batches of {batch_rows}: use the run's own train.batch_rows and "
                "fleet.local_steps"
            )
        if not 0 <= slot < data.num_slots:
            raise UserError(f"slot {slot} does not exist: data.num_slots is {data.num_slots}")
        documents = read_documents(
            corpus,
            seed=seed,
            slot=slot,
            num_slots=data.num_slots,
            cursor=position.cursor,
            held_out_fraction=data.held_out_fraction,
        )
        pieces = cut_documents(
            _encoded(documents, tokenizer),
            row_length=data.row_length,
            bos_id=tokenizer.bos_id,
            eos_id=tokenizer.eos_id,
            first_piece=position.cursor.piece,
        )
        rows = pack(
            pieces,
            position.cursor,
            interval_rows=interval_rows,
            row_length=data.row_length,
            open_rows=data.open_rows,
            pad_id=tokenizer.pad_id,
        )
        batches = _batches(islice(rows, position.num_rows, None), batch_rows)
        self._batches = _ReadAhead(batches, prefetch) if prefetch else batches

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Rows:
        return next(self._batches)

    def close(self) -> None:
        """Stops the thread and closes the open files."""
        self._batches.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _encoded(
    documents: Iterable[tuple[str, Cursor]], tokenizer: Tokenizer
) -> Iterator[tuple[list[int], Cursor]]:
    documents = iter(documents)
    while chunk := list(islice(documents, _ENCODE_DOCUMENTS)):
        encoded = tokenizer.encode_batch([text for text, _ in chunk])
        yield from zip(encoded, (cursor for _, cursor in chunk), strict=True)


def _batches(rows: Iterator[Rows], batch_rows: int) -> Generator[Rows]:
    """Single rows stacked; a batch has the position and the counts of its last row."""
    while batch := list(islice(rows, batch_rows)):
        ids = np.concatenate([row.ids for row in batch])
        doc_ids = np.concatenate([row.doc_ids for row in batch])
        yield Rows(ids, doc_ids, batch[-1].position, batch[-1].counts)


class _ReadAhead:
    """Runs an endless generator in a daemon thread, `depth` items ahead of the consumer."""

    def __init__(self, items: Generator[Rows], depth: int) -> None:
        self._items = items
        self._queue: Queue[Rows | BaseException] = Queue(maxsize=depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="read-ahead", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for item in self._items:
                self._queue.put(item)
                if self._stop.is_set():
                    return
        except BaseException as error:
            self._queue.put(error)
        finally:
            self._items.close()

    def __next__(self) -> Rows:
        if self._stop.is_set():
            raise StopIteration
        item = self._queue.get()
        if isinstance(item, BaseException):
            self._stop.set()
            raise item
        return item

    def close(self) -> None:
        """The thread is blocked in `put` at most once more: it looks at `_stop` after each."""
        self._stop.set()
        try:
            while True:
                self._queue.get_nowait()
        except Empty:
            self._thread.join()
