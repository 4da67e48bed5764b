"""When a round closes, and who is waited for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffurefill.config import FleetConfig
from diffurefill.fleet import rounds

FLEET = FleetConfig(min_fresh=2, grace_seconds=150.0, live_seconds=1800.0, log_seconds=300.0)


@pytest.mark.parametrize(
    ("live", "recovering", "needed"),
    [(4, False, 2), (2, False, 2), (1, False, 1), (0, False, 1), (4, True, 1)],
)
def test_how_many_contributions_a_round_needs(live: int, recovering: bool, needed: int) -> None:
    assert rounds.num_needed(FLEET, live, recovering=recovering) == needed


@pytest.mark.parametrize(
    ("eligible", "missing", "elapsed", "closes"),
    [
        (1, [None, None, None], 999.0, False),  # fewer than needed: grace cannot close it
        (2, [None, None], 10.0, False),  # two more may come
        (2, [None, None], 150.0, True),  # grace over
        (4, [], 0.0, True),  # nobody left to wait for
        (2, [100.0], 10.0, False),  # predicted within the 140 s that are left
        (2, [141.0], 10.0, True),  # predicted after them: waiting would gain nothing
        (2, [141.0, None], 10.0, False),  # of the other nothing is known
        (2, [-50.0], 10.0, False),  # overdue: may come at any moment
    ],
)
def test_when_a_round_closes(
    eligible: int, missing: list[float | None], elapsed: float, closes: bool
) -> None:
    closed = rounds.round_closes(
        FLEET, num_eligible=eligible, needed=2, missing=missing, grace_elapsed=elapsed
    )
    assert closed is closes


def test_grace_opens_at_the_nth_or_at_the_first_arrival() -> None:
    nth, first = FleetConfig(grace_from="nth"), FleetConfig(grace_from="first")
    assert [rounds.grace_opens(nth, n, 2) for n in (0, 1, 2)] == [False, False, True]
    assert [rounds.grace_opens(first, n, 2) for n in (0, 1, 2)] == [False, True, True]


@given(
    eligible=st.integers(2, 9),
    missing=st.lists(st.none() | st.floats(-1e4, 1e4)),
    elapsed=st.floats(0, 149),
    later=st.floats(0, 1e4),
)
def test_a_round_that_closes_would_also_close_later(
    eligible: int, missing: list[float | None], elapsed: float, later: float
) -> None:
    """Predictions move with the clock, so waiting never reopens a round."""

    def closes(after: float) -> bool:
        left = [m if m is None else m - after for m in missing]
        return rounds.round_closes(
            FLEET, num_eligible=eligible, needed=2, missing=left, grace_elapsed=elapsed + after
        )

    assert not closes(0.0) or closes(later)


def test_a_pace_is_the_median_of_the_last_intervals() -> None:
    assert rounds.predicted([]) is None
    assert rounds.predicted([9e9, 100.0, 500.0, 120.0, 110.0, 130.0]) == 120.0


@pytest.mark.parametrize(
    ("intervals", "horizon"), [([], 1800.0), ([400.0], 1000.0), ([60.0], 750.0), ([9e3], 1800.0)]
)
def test_a_known_pace_gives_an_earlier_verdict_of_silence(
    intervals: list[float], horizon: float
) -> None:
    assert rounds.live_horizon(FLEET, intervals) == horizon
