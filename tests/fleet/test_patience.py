"""A store that does not answer is waited for; an answer that cannot be right is asked for again."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from diffurefill.fleet.patience import LONGEST_PAUSE, MAX_CORRUPT, Patience
from diffurefill.store.base import Busy, Corrupt, Denied, Store, Unknown
from tests.fleet.fakes import FakeFleet, MemoryStore
from tests.fleet.test_fleet import expect_sound


def patience(said: list[str]) -> Patience:
    return Patience(said.append, random.Random(0))


def drive(generator: Iterator[float]) -> tuple[list[float], Any]:
    waits = []
    while True:
        try:
            waits.append(next(generator))
        except StopIteration as done:
            return waits, done.value


def failing(*errors: Exception) -> Callable[[], str]:
    left = list(errors)

    def operation() -> str:
        if left:
            raise left.pop(0)
        return "done"

    return operation


def test_passing_trouble_is_waited_out_with_growing_pauses() -> None:
    said: list[str] = []
    waits, value = drive(patience(said)(failing(*[Busy("down", 0.5)] * 10)))
    assert value == "done"
    assert waits[0] == 0.0
    assert waits[:6] == sorted(waits[:6])
    assert max(waits) <= 1.5 * LONGEST_PAUSE
    assert len(said) == 2  # that it waits, and that it goes on
    assert "nothing is lost" in said[0]


def test_the_store_s_own_wish_is_respected() -> None:
    waits, _ = drive(patience([])(failing(Busy("quota", 900.0))))
    assert waits[1] >= 900.0


def test_one_hiccup_is_no_news() -> None:
    said: list[str] = []
    drive(patience(said)(failing(Busy("late", 0.1))))
    assert said == []


def test_failures_are_counted_for_the_log() -> None:
    io = patience([])
    drive(io(failing(Busy("late", 0.1), Corrupt("x"))))
    drive(io(failing()))
    assert (io.take_failed(), io.take_failed()) == (2, 0)


def test_a_file_that_stays_damaged_is_believed_at_last() -> None:
    assert drive(patience([])(failing(Corrupt("x"))))[1] == "done"
    with pytest.raises(Corrupt):
        drive(patience([])(failing(*[Corrupt("x")] * MAX_CORRUPT)))


def test_a_store_that_may_not_be_written_is_not_asked_again() -> None:
    with pytest.raises(Denied):
        drive(patience([])(failing(Denied("read-only token"))))


class Hub:
    """A store that can be down, and whose answers to publishes can be lost."""

    def __init__(self, store: Store) -> None:
        self._store, self.down, self.loses_answers = store, False, False

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if not callable(method):
            return method

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.down:
                raise Unknown("down") if name == "publish" else Busy("down", 5.0)
            result = method(*args, **kwargs)
            if self.loses_answers and name == "publish":
                raise Unknown("the answer was lost")
            return result

        return call


@pytest.mark.parametrize("moment", range(0, 40, 4))
def test_a_hub_down_for_two_hours_stops_nobody_and_loses_nothing(
    tmp_path: Path, moment: int
) -> None:
    fleet = FakeFleet(MemoryStore(), tmp_path)
    hub = Hub(fleet.store)
    fleet.add_merger(store=hub)
    fleet.add_worker(0, store=hub)
    fleet.add_worker(1, store=hub)
    fleet.run_until(lambda: False, seconds=moment)
    before, hub.down = fleet.state.gen, True
    fleet.run_until(lambda: False, seconds=7200)
    assert fleet.state.gen == before
    hub.down = False
    assert fleet.until_generation(before + 3, seconds=400)
    assert set(fleet.actors) == {"merger", "w0", "w1"}
    expect_sound(fleet)


def test_a_hub_that_loses_every_answer_to_a_publish_loses_no_publish(tmp_path: Path) -> None:
    fleet = FakeFleet(MemoryStore(), tmp_path)
    hub = Hub(fleet.store)
    hub.loses_answers = True
    fleet.add_merger(store=hub)
    fleet.add_worker(0, store=hub)
    fleet.add_worker(1, store=hub)
    assert fleet.until_generation(4)
    assert fleet.state.epoch == 1
    expect_sound(fleet)
