"""The table of docs/chaos_table.py has words for all that the simulator injects."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from diffurefill.fleet.simulate import campaign
from diffurefill.fleet.simulate.profiles import PROFILES

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def table() -> ModuleType:
    path = ROOT / "docs" / "chaos_table.py"
    spec = importlib.util.spec_from_file_location("chaos_table", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_fault_and_outcome_has_words(table: ModuleType) -> None:
    found = campaign.added([campaign.tally(range(2 * len(PROFILES)))])
    kinds = {kind for profile in PROFILES.values() for kind in profile.kinds}
    assert kinds | set(found["injected"]) <= set(table.FAULTS)
    told = {what for counts in found["outcomes"].values() for what in counts}
    assert {what for what in told if not what.startswith("rejected: ")} <= set(table.WORDS)


def test_the_table_tells_counts_and_what_no_seed_missed(table: ModuleType) -> None:
    facts = {
        "injected": {"late": 1200, "lie: zombie": 2},
        "outcomes": {"late": {"looked up its nonce": 1200}, "lie: zombie": {"rejected: run": 2}},
        "guards": [
            {"guard": "a", "seed": 3, "profile": "lies", "invariants": ["I3", "I4"]},
            {"guard": "b", "seed": None},
        ],
    }
    assert table.fault_table(facts)[2:] == [
        f"| {table.FAULTS['late']} | 1,200 | looked up its nonce 1,200 |",
        f"| {table.FAULTS['lie: zombie']} | 2 | rejected (`run`) 2 |",
    ]
    assert table.guard_table(facts)[2:] == ["| a | lies 3 | I3, I4 |", "| b | none | |"]
