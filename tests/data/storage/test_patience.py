import logging
import os
from collections.abc import Callable

import pytest

from diffurefill.config import UserError
from diffurefill.data.storage.patience import Passing, Patience, retried


class FakeTime:
    """A clock that only sleeping moves."""

    def __init__(self, budget_seconds: float = 900.0) -> None:
        self.now, self.slept = 0.0, list[float]()
        self.patience = Patience(budget_seconds, lambda: self.now, self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept.append(seconds)


def failing(times: int, seconds: float = 0.0) -> Callable[[], str]:
    left = iter(range(times))

    def attempt() -> str:
        if next(left, None) is not None:
            raise Passing("the server answered 503", seconds)
        return "content"

    return attempt


def test_what_fails_for_a_while_succeeds_in_the_end() -> None:
    time = FakeTime()
    assert retried("a", failing(5), time.patience) == "content"
    assert len(time.slept) == 5
    for number, slept in enumerate(time.slept):
        assert 0.25 * 2**number <= slept <= 0.5 * 2**number


def test_two_files_or_two_processes_do_not_come_back_at_the_same_moments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = [FakeTime(), FakeTime(), FakeTime()]
    for name, process, time in zip("abb", (1, 1, 2), times, strict=True):
        monkeypatch.setattr(os, "getpid", lambda process=process: process)
        retried(name, failing(4), time.patience)
    assert times[0].slept != times[1].slept != times[2].slept != times[0].slept


def test_the_budget_is_used_to_its_end_and_no_longer() -> None:
    time = FakeTime()
    with pytest.raises(
        UserError,
        match=r"^a cannot be reached: \d+ attempts in 15 min failed, the "
        r"last with: the server answered 503; check the network",
    ):
        retried("a", failing(10_000), time.patience)
    assert time.now == pytest.approx(900.0)
    assert max(time.slept) <= 60.0
    assert len(time.slept) > 15


def test_a_server_s_wish_to_wait_is_granted_within_the_budget() -> None:
    time = FakeTime()
    assert retried("a", failing(2, seconds=120.0), time.patience) == "content"
    assert time.slept == [120.0, 120.0]
    time = FakeTime()
    assert retried("a", failing(1, seconds=7200.0), time.patience) == "content"
    assert time.slept == [900.0]


def test_other_errors_are_not_repeated() -> None:
    time = FakeTime()
    with pytest.raises(ZeroDivisionError):
        retried("a", lambda: 1 / 0, time.patience)
    assert time.slept == []


def test_only_a_long_wait_is_worth_a_word(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        retried("a", failing(3), FakeTime().patience)
        assert caplog.text == ""
        retried("a", failing(1, seconds=30.0), FakeTime().patience)
    assert "a: the server answered 503; trying again in 30 s" in caplog.text
