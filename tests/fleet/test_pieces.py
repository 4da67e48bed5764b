"""Threads change the time of a pass and no bit of its result."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from diffurefill.fleet.averaging import FileAverager
from diffurefill.fleet.folds import average_last
from diffurefill.fleet.outer import OUTER_STEPS
from diffurefill.fleet.pieces import Scratch, for_each
from diffurefill.fleet.records import Fold
from diffurefill.store.base import sha256_file
from tests.fleet.weights import payloads, random_weights, save

SHAPES = {"embedding.weight": (40, 30), "blocks.0.out.weight": (30, 20), "norm.weight": (30,)}
PIECES = [("w", i, i + 1) for i in range(200)]


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_every_piece_is_worked_on_once_by_threads_that_compute_alone(threads: int) -> None:
    together = threading.Barrier(threads, timeout=60)
    seen: Counter[int] = Counter()
    inner: set[int] = set()

    def work(name: str, start: int, stop: int) -> None:
        if start < threads:
            together.wait()  # passes only if so many threads are at work
            inner.add(torch.get_num_threads())
        seen[start] += 1

    for_each(work, PIECES)
    assert seen == Counter(range(200))
    assert inner == {1}
    assert torch.get_num_threads() == threads


def test_threads_that_are_born_later_have_their_share_back(threads: int) -> None:
    for_each(lambda *piece: None, PIECES)
    found: list[int] = []
    later = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert found == [threads]


def test_work_in_turn_keeps_the_order_and_one_thread(threads: int) -> None:
    seen: list[tuple[int, int, int]] = []

    def work(name: str, start: int, stop: int) -> None:
        seen.append((start, threading.get_ident(), torch.get_num_threads()))

    for_each(work, PIECES, in_turn=True)
    assert seen == [(i, seen[0][1], 1) for i in range(200)]


def test_the_first_failure_ends_the_pass(threads: int) -> None:
    done: list[int] = []

    def work(name: str, start: int, stop: int) -> None:
        if start == 3:
            raise OSError("disk full")
        done.append(start)

    with pytest.raises(OSError, match="disk full"):
        for_each(work, ((name, start, stop) for name, start, stop in PIECES))
    assert torch.get_num_threads() == threads
    assert {0, 1, 2} <= set(done)


def test_no_two_threads_share_a_buffer() -> None:
    scratch = Scratch()
    mine = scratch.get("a", 10)
    assert scratch.get("a", 5).data_ptr() == mine.data_ptr()
    assert scratch.get("b", 10).data_ptr() != mine.data_ptr()
    assert scratch.get("a", 10, torch.int8).dtype == torch.int8
    others: list[int] = []
    other = threading.Thread(target=lambda: others.append(scratch.get("a", 10).data_ptr()))
    other.start()
    other.join()
    assert others != [mine.data_ptr()]


def merged(folder: Path, kind: str) -> list[str]:
    """sha256 of everything a merge writes."""
    folder.mkdir()
    base = save(folder / "base", random_weights("base", shapes=SHAPES))
    files = payloads(folder, [(random_weights(i, shapes=SHAPES), i + 1.0) for i in range(3)])
    names = ["next", "update", "ema", "applied", "later", "last"]
    momentum = {"momentum_dest": folder / "momentum"} if kind == "nesterov" else {}
    averager = FileAverager(kind, chunk_elements=17)
    averager.merge(
        base,
        files,
        folder / "next",
        update_dest=folder / "update",
        folds=[Fold(base, 0.9, folder / "ema")],
        **momentum,
    )
    averager.apply_update(base, folder / "update", folder / "applied")
    averager.fold(folder / "next", [Fold(base, 0.9, folder / "later")])
    average_last([base, folder / "next"], folder / "last", chunk_elements=17)
    return [sha256_file(folder / name).sha256 for name in [*names, *(["momentum"] * len(momentum))]]


@pytest.mark.parametrize("kind", OUTER_STEPS)
def test_the_number_of_threads_changes_no_bit(tmp_path: Path, kind: str) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = merged(tmp_path / "alone", kind)
        torch.set_num_threads(4)
        assert merged(tmp_path / "together", kind) == alone
    finally:
        torch.set_num_threads(before)
