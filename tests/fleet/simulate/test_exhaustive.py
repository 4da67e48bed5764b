"""Every interleaving of a small fleet within bounds; and each guard switched off is found out."""

from pathlib import Path
from typing import Any

import pytest

from diffurefill.fleet import protocol
from diffurefill.fleet.records import Contribution, Registration, State
from diffurefill.fleet.simulate.exhaustive import Bounds, Outcome, search
from diffurefill.store.base import Conflict, Publication, StoreError, Unknown, Version

QUICK = [
    (Bounds(generations=3), 15_000),
    (Bounds(generations=1, preemptions=1, crashes=1), 40_000),
    (Bounds(generations=1, preemptions=1, lost=1), 60_000),
]
LARGE = [
    (Bounds(generations=2, crashes=1), 40_000),
    (Bounds(generations=3, preemptions=1), 200_000),
    (Bounds(generations=2, preemptions=1, crashes=1), 500_000),
]
"""With the states that there are at least: a search that grows narrow shows."""


def expect_sound(found: Outcome, least: int) -> None:
    assert found.violations == [], found.schedule
    assert found.is_whole
    assert found.states >= least
    assert found.completed > 0


@pytest.mark.parametrize(("bounds", "least"), QUICK, ids=str)
def test_no_interleaving_breaks_an_invariant(bounds: Bounds, least: int, tmp_path: Path) -> None:
    found = search(bounds, tmp_path)
    expect_sound(found, least)
    assert bool(found.fates["dies"]) == bool(bounds.crashes)
    assert bool(found.fates["lost answer"]) == bool(bounds.lost)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("bounds", "least"), LARGE, ids=str)
def test_no_interleaving_of_a_larger_fleet_breaks_one(
    bounds: Bounds, least: int, tmp_path: Path
) -> None:
    expect_sound(search(bounds, tmp_path), least)


def test_a_search_may_be_stopped_and_says_so(tmp_path: Path) -> None:
    found = search(Bounds(generations=3), tmp_path, max_states=500)
    assert found.states == 500
    assert not found.is_whole


# --- it can fail: a guard switched off, and what is found -----------------------------------------


def any_base(c: Contribution, state: State, max_staleness: int) -> bool:
    return True


def nothing_inherited(c: Contribution, registration: Registration) -> bool:
    return c.incarnation == registration.incarnation


def believes_errors(publication: Publication) -> Version:
    """No answer is taken for no publish: nobody looks up the nonce."""
    p: Any = publication
    try:
        return p._store.publish(p._lane, p._changes, expect=p._expect, nonce=p.nonce)
    except Unknown as error:
        raise Conflict("it cannot have landed") from error


def overwrites(publication: Publication) -> Version:
    """No compare-and-swap: the head is what is written over, whatever it is."""
    p: Any = publication
    while True:
        try:
            head = p._store.head(p._lane)
            return p._store.publish(p._lane, p._changes, expect=head, nonce=p.nonce)
        except StoreError:
            continue


def cursors_stay(cursors: Any, accepted: Any) -> dict[str, Any]:
    return dict(cursors)


def never(state: State) -> bool:
    return False


GUARDS = {
    "base": (protocol, "has_known_base", any_base, Bounds(generations=2, preemptions=1), "I3"),
    "incarnation": (
        protocol, "holds_the_lane", nothing_inherited,
        Bounds(generations=1, preemptions=1, crashes=1), "5.4",
    ),
    "read-back": (Publication, "attempt", believes_errors, Bounds(generations=1, lost=1), "5.2"),
    "compare-and-swap": (
        Publication, "attempt", overwrites, Bounds(generations=1, preemptions=1, idle=1), "I",
    ),
    "cursors": (protocol, "_moved", cursors_stay, Bounds(generations=1), "I16"),
    "ema": (protocol, "ema_is_due", never, Bounds(generations=2), "I10"),
}  # fmt: skip


@pytest.mark.parametrize("name", GUARDS)
def test_a_guard_switched_off_is_found_out(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, guard, without, bounds, invariant = GUARDS[name]
    monkeypatch.setattr(owner, guard, without)
    found = search(bounds, tmp_path)
    assert found.violations
    assert found.violations[0].startswith(invariant)
    assert 0 < len(found.schedule) < 60


def test_an_interrupted_merger_is_where_compare_and_swap_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bounds matter: without an interruption nothing ever comes between."""
    monkeypatch.setattr(Publication, "attempt", overwrites)
    assert search(Bounds(generations=1), tmp_path).violations == []


def test_the_same_bounds_give_the_same_search(tmp_path: Path) -> None:
    first, second = (search(Bounds(generations=1), tmp_path / n) for n in ("a", "b"))
    assert first == second
