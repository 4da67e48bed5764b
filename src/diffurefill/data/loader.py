"""Batches of rows, read ahead in a thread, resumed exactly.

The position travels with the rows, so what the thread has read ahead never counts: only the rows
that the consumer took move it (spec data.md 5).
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from dataclasses import replace
from itertools import islice
from queue import Empty, Queue
from types import TracebackType
from typing import Self

import numpy as np

from diffurefill.config import DataConfig, UserError
from diffurefill.data.documents import Corpus
from diffurefill.data.encoding import encode_documents, span_finder
from diffurefill.data.mixture import read_documents, slot_of
from diffurefill.data.packing import Position, Rows, pack
from diffurefill.data.tokens.tokenizer import Tokenizer


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
        self._corpus, self._tokenizer, self._data = corpus, tokenizer, data
        self._slot = slot_of(data, slot, seed)
        self._interval_rows, self._interval_steps = interval_rows, interval_rows // batch_rows
        self._find = span_finder(data)
        rows = islice(self._rows(position), position.num_rows, None)
        batches = _batches(rows, batch_rows)
        self._batches = _ReadAhead(batches, prefetch) if prefetch else batches

    def _rows(self, position: Position) -> Iterator[Rows]:
        """Single rows from the start of the position's interval on, phase after phase.

        A new phase starts from the cursor, as a resumed run would: what the old phase had already
        drawn for the next interval is drawn again by the new shares.
        """
        position = replace(position, num_rows=0)
        while True:
            for row in islice(self._phase(position), self._rows_of_phase(position.step)):
                yield row
                position = row.position

    def _phase(self, position: Position) -> Iterator[Rows]:
        """Rows by the phase in force at the position, without end."""
        phase = self._data.phase_at(position.step)
        documents = read_documents(self._corpus, phase.shares, self._slot, position.cursor)
        sources = frozenset(s.name for s in self._data.sources if s.has_spans)
        return pack(
            encode_documents(documents, self._tokenizer, self._find, sources),
            position,
            data=replace(self._data, span_rows=phase.span_rows or 0.0),
            seed=self._slot.seed,
            slot=self._slot.number,
            interval_rows=self._interval_rows,
            interval_steps=self._interval_steps,
            pad_id=self._tokenizer.pad_id,
        )

    def _rows_of_phase(self, step: int) -> int | None:
        """Rows of the intervals that begin before the next phase does; None: all."""
        later = [phase.from_step for phase in self._data.phases if phase.from_step > step]
        if not later:
            return None
        return -(-(later[0] - step) // self._interval_steps) * self._interval_rows

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


def _batches(rows: Iterator[Rows], batch_rows: int) -> Generator[Rows]:
    """Single rows stacked; a batch has the position and the counts of its last row."""
    while batch := list(islice(rows, batch_rows)):
        yield Rows(
            ids=np.concatenate([row.ids for row in batch]),
            doc_ids=np.concatenate([row.doc_ids for row in batch]),
            span_ids=np.concatenate([row.span_ids for row in batch]),
            part_lengths=np.concatenate([row.part_lengths for row in batch]),
            position=batch[-1].position,
            counts=batch[-1].counts,
        )


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
