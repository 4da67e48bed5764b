"""Large files written past the page cache, where the system can.

What a merge writes nobody reads at once, and at a billion parameters it is more than memory
holds: through the page cache it would push out the inputs still to be read, and wait for the
kernel's own write-back. Where direct writing is refused, plain writing does the same.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import queue
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

ALIGN = 4096
"""Bytes: places, lengths and memory of a direct write are multiples of it on every usual disk."""
DIRECT_FROM = 1 << 28
"""Bytes of a file from which it is written directly: smaller ones are read again soon."""
SMALLEST = 1 << 16
"""Bytes: a shorter piece would wait longer for the disk than copying it takes."""
AT_ONCE = 4
"""Pieces of a file that are on their way to the disk: one at a time leaves it idle in between."""

_CLOEXEC = getattr(os, "O_CLOEXEC", 0)


def _open_direct(path: Path) -> int | None:
    """A second descriptor of the file that goes past the page cache; None where there is none."""
    if not hasattr(os, "O_DIRECT"):
        return None
    with contextlib.suppress(OSError):
        return os.open(path, os.O_WRONLY | os.O_DIRECT | _CLOEXEC)
    return None


class DirectFile:
    """A new file written piece by piece, by position, from any number of threads. To be closed.

    `num_bytes`: what it will hold in all. Pieces must not overlap; the fewer share a page (ALIGN)
    with another, the faster. What could not be written is raised by a later `write`, or by `sync`.
    """

    def __init__(self, path: Path, num_bytes: int) -> None:
        self._plain = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _CLOEXEC, 0o666)
        self._direct = _open_direct(path) if num_bytes >= DIRECT_FROM else None
        self._memory: queue.SimpleQueue[mmap.mmap | None] = queue.SimpleQueue()
        self._pool: ThreadPoolExecutor | None = None
        self._failed: BaseException | None = None
        if self._direct is not None:
            # At its full length from the start: a write that makes a file longer shuts out others.
            os.ftruncate(self._plain, num_bytes)
            self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="direct-write")
            for _ in range(AT_ONCE):
                self._memory.put(None)

    def write(self, content: Any, place: int) -> None:
        """Write the bytes of the buffer `content` from byte `place` on."""
        rest = memoryview(content)
        before = -place % ALIGN  # up to where a page of the file begins
        direct = (len(rest) - before) // ALIGN * ALIGN
        if self._pool is None or direct < SMALLEST:
            self._write_plain(rest, place)
            return
        # A page that two pieces share is written plainly by both: the page cache joins them.
        self._write_plain(rest[:before], place)
        self._write_plain(rest[before + direct :], place + before + direct)
        memory = self._aligned_copy(rest[before : before + direct])
        self._raise_failure()
        self._pool.submit(self._send, memory, direct, place + before).add_done_callback(self._note)

    def sync(self) -> None:
        """Wait until all is on the disk. Raises what went wrong on the way."""
        if self._pool is not None:
            self._pool.shutdown()
        self._raise_failure()
        os.fsync(self._plain)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        for descriptor in (self._plain, self._direct):
            if descriptor is not None:
                os.close(descriptor)

    def _write_plain(self, rest: memoryview, place: int) -> None:
        while rest:
            count = os.pwrite(self._plain, rest, place)
            rest, place = rest[count:], place + count

    def _send(self, memory: mmap.mmap, length: int, place: int) -> None:
        """Write `length` bytes of `memory`, which is then free for another piece."""
        try:
            content = memoryview(memory)[:length]
            done = self._write_direct(content, place)
            self._write_plain(content[done:], place + done)
        finally:
            self._memory.put(memory)

    def _note(self, done: Future[None]) -> None:
        if not done.cancelled() and done.exception() is not None:
            self._failed = self._failed or done.exception()

    def _raise_failure(self) -> None:
        if self._failed is not None:
            raise self._failed

    def _write_direct(self, content: memoryview, place: int) -> int:
        """Bytes written, a multiple of ALIGN; fewer than asked for where the disk wants no more."""
        assert self._direct is not None
        done = 0
        while done < len(content):
            try:
                count = os.pwrite(self._direct, content[done:], place + done)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                break  # this disk wants other alignments: the rest is written plainly
            done += count // ALIGN * ALIGN
            if count % ALIGN:
                break
        return done

    def _aligned_copy(self, content: memoryview) -> mmap.mmap:
        """`content` in memory that begins at a page; waits while all of it is on its way."""
        memory = self._memory.get()
        if memory is None or len(memory) < len(content):
            memory = mmap.mmap(-1, len(content))
        # By numpy, which lets other threads run meanwhile: a slice of mmap does not.
        np.copyto(np.frombuffer(memory, np.uint8, len(content)), np.frombuffer(content, np.uint8))
        return memory
