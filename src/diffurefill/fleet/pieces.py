"""Work on a model piece by piece, on several threads: what every streaming pass shares.

Pieces are independent, files are read and written by position, and every thread has buffers of its
own. So the number of threads changes the time of a pass and no bit of its result.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

Piece = tuple[str, int, int]
"""(tensor name, start, stop): flat elements of one tensor."""
MAX_THREADS = 8
"""Memory grows with the threads, by about ten pieces each, and disks gain nothing from more."""


class Scratch(threading.local):
    """Flat buffers that are kept between pieces, for each thread its own.

    Fresh pages from the system would cost as much as the arithmetic.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def get(self, key: str, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """`size` elements of the buffer `key`; what it held may be gone."""
        buffer = self._buffers.get((key, dtype))
        if buffer is None or len(buffer) < size:
            buffer = self._buffers[key, dtype] = torch.empty(size, dtype=dtype)
        return buffer[:size]


def for_each(
    work: Callable[[str, int, int], object], pieces: Iterable[Piece], *, in_turn: bool = False
) -> None:
    """`work(name, start, stop)` for every piece, on as many threads as torch may use here.

    Begun in order, finished in any, unless `in_turn`: then one after another. Every piece has one
    thread to itself, also inside torch. The first exception ends the pass and is raised.
    """
    allowed = torch.get_num_threads()
    if allowed == 1:
        for piece in pieces:
            work(*piece)
        return
    # Torch's own threads would spin at the end of each short operation.
    num_threads = 1 if in_turn else min(allowed, MAX_THREADS)
    pool = ThreadPoolExecutor(num_threads, initializer=torch.set_num_threads, initargs=(1,))
    try:
        with pool:
            for _ in pool.map(lambda piece: work(*piece), pieces):
                pass
    finally:
        torch.set_num_threads(allowed)  # threads that are born later follow the last setting
