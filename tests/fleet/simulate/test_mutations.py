"""Every guard of the fleet, switched off, is missed by some seed; what saves work only is not."""

import pytest

from diffurefill.fleet.simulate.chaos import run_seed
from diffurefill.fleet.simulate.mutations import CONTROLS, MUTATIONS, Mutation, harm, hunt

NUM_SEEDS = 100
"""The slowest is found in the thirteenth now; changes of the code move that."""


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_a_fleet_without_the_guard_does_wrong(mutation: Mutation) -> None:
    catch = hunt(mutation, range(NUM_SEEDS))
    assert catch is not None
    assert f"seed {catch.seed}" in catch.violation
    assert run_seed(catch.seed, mutation.profile).violations == []  # with it, all is well


@pytest.mark.parametrize("control", CONTROLS, ids=lambda m: m.name)
def test_what_saves_work_only_is_not_needed_for_safety(control: Mutation) -> None:
    assert harm(control, range(8)) == []
