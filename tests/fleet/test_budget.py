"""A process's part of the fleet's hourly commits."""

from hypothesis import given
from hypothesis import strategies as st

from diffurefill.fleet.budget import MERGER_PARTS, CommitPart

HOUR = 3600.0
"""Seconds over which a store counts commits."""


@given(
    st.integers(1, 200),
    st.integers(1, 8),
    st.lists(st.tuples(st.floats(0.0, 600.0), st.booleans()), max_size=80),
)
def test_signs_of_life_never_fill_a_part(
    per_hour: int, num_workers: int, events: list[tuple[float, bool]]
) -> None:
    """Whatever was published before, the commit of a log or beat is not the one too many."""
    now, times = 0.0, list[float]()
    part = CommitPart(per_hour, 1, lambda: now)
    for wait, is_needed in events:
        now += wait
        if is_needed or part.has_room(num_workers):
            part.spend()
            times.append(now)
            in_hour = sum(now - HOUR <= at for at in times)
            assert is_needed or in_hour <= per_hour / (num_workers + MERGER_PARTS)


def test_a_part_is_used_and_comes_back_after_an_hour() -> None:
    now = 0.0
    part = CommitPart(12, MERGER_PARTS, lambda: now)
    num_spent = 0
    while part.has_room(4):
        part.spend()
        num_spent += 1
    assert num_spent == 3  # four fifths of 12 * 2 / 6
    now = HOUR + 1.0
    assert part.has_room(4)


def test_without_a_limit_there_is_always_room() -> None:
    part = CommitPart(0, 1, lambda: 0.0)
    for _ in range(1000):
        part.spend()
    assert part.has_room(4)
    assert not part._times


def test_commits_of_long_ago_are_forgotten_by_who_never_asks_for_room() -> None:
    now = 0.0
    part = CommitPart(120, 1, lambda: now)
    for _ in range(100):
        part.spend()
        now += HOUR
    assert len(part._times) <= 2
