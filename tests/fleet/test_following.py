"""Probing from the side in virtual time: every generation once, whatever the fleet does."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from diffurefill.cli import main
from diffurefill.config import UserError
from diffurefill.fleet import following as module
from diffurefill.fleet.following import ProbeLog, following
from diffurefill.store.base import MAIN, Busy, sha256_file
from tests.fleet.fakes import FakeFleet, MemoryStore
from tests.fleet.runs import begun, roll_back, until
from tests.tiny import tiny_config, write_config, write_corpus

ABOUT = {"run": "fake", "probes": {"held_out": "abc"}}
KINDS = ("global", "ema", "swa")


class ReadOnly:
    """A store that nobody may write to."""

    def __init__(self, store: MemoryStore, is_down: Callable[[], bool] = lambda: False) -> None:
        self._store, self._is_down = store, is_down

    def __getattr__(self, name: str) -> Any:
        assert name not in ("publish", "stage", "compact", "selftest"), f"a follower called {name}"
        if self._is_down() and name != "uri":
            raise Busy("down", 1.0)
        return getattr(self._store, name)


def prober(
    fleet: FakeFleet,
    *,
    until: int | None = None,
    kinds: tuple[str, ...] = KINDS,
    store: Any = None,
    score: Callable[[Path], dict] = lambda path: {"sha256": sha256_file(path).sha256},
) -> Iterator[float]:
    run = fleet.run_for("prober", store or ReadOnly(fleet.store))
    log = ProbeLog(fleet.folder / "probes.jsonl", ABOUT)
    return following(run, score, log, kinds=kinds, until=until, report=fleet.said.append)


def logged(fleet: FakeFleet) -> list[dict[str, Any]]:
    if not (fleet.folder / "probes.jsonl").exists():
        return []
    return [json.loads(line) for line in (fleet.folder / "probes.jsonl").read_text().splitlines()]


def published(fleet: FakeFleet) -> dict[tuple[str, int], str]:
    """{(kind, generation): sha256} as the whole history tells."""
    found: dict[tuple[str, int], str] = {}
    for version in fleet.store.history(MAIN):
        state = module.records.state_from_json(
            module.read_json(fleet.store, version, module.records.STATE)
        )
        found.setdefault(("global", state.gen), state.global_weights.sha256)
        for kind in ("ema", "swa"):
            average = getattr(state, kind)
            if average is not None:
                found.setdefault((kind, average.gen), average.ref.sha256)
    return found


def expect_each_once(fleet: FakeFleet, upto: int) -> None:
    found = {(line["weights"], line["gen"]): line["sha256"] for line in logged(fleet)}
    assert len(found) == len(logged(fleet))
    wanted = {key: sha for key, sha in published(fleet).items() if key[1] <= upto}
    assert {key: sha for key, sha in found.items() if key[1] <= upto} == wanted


def test_every_publication_is_probed_once_while_the_fleet_works(tmp_path: Path) -> None:
    fleet = begun(tmp_path, swa_from_step=8)
    fleet.add("prober", prober(fleet, until=5))
    assert fleet.run_until(lambda: "prober" not in fleet.actors)
    expect_each_once(fleet, 5)
    lines = logged(fleet)
    assert [line["gen"] for line in lines] == sorted(line["gen"] for line in lines)
    third = next(line for line in lines if (line["weights"], line["gen"]) == ("global", 3))
    assert (third["step"], third["tokens"]) == (12, 240)
    assert third["run"] == "fake"


def test_one_who_comes_late_catches_up(tmp_path: Path) -> None:
    fleet = until(begun(tmp_path), 5)
    fleet.add("prober", prober(fleet, until=4))
    assert fleet.run_until(lambda: "prober" not in fleet.actors)
    expect_each_once(fleet, 4)


@pytest.mark.parametrize("killed_at", [1, 2, 5])
def test_killed_and_started_again_it_goes_on_where_its_log_ends(
    tmp_path: Path, killed_at: int
) -> None:
    fleet = begun(tmp_path)
    fleet.add("prober", prober(fleet))
    log = tmp_path / "probes.jsonl"
    assert fleet.run_until(lambda: len(logged(fleet)) == killed_at)
    fleet.kill("prober")
    log.write_bytes(log.read_bytes() + b'{"weights": "global", "ge')
    fleet.add("prober", prober(fleet, until=5))
    assert fleet.run_until(lambda: "prober" not in fleet.actors)
    expect_each_once(fleet, 5)


def test_what_was_compacted_away_is_passed_over(tmp_path: Path) -> None:
    fleet = until(begun(tmp_path, compact_every=2, snapshot_every=3), 9)
    fleet.add("prober", prober(fleet, until=9))
    assert fleet.run_until(lambda: "prober" not in fleet.actors)
    found = {line["gen"] for line in logged(fleet) if line["weights"] == "global"}
    assert found >= {3, 9}  # a snapshot, and the newest
    assert 1 not in found
    truth = {state.gen: state.global_weights.sha256 for state in fleet.states()}
    lines = [line for line in logged(fleet) if line["weights"] == "global"]
    # Generation 0 is the same two bytes as the fake run's tokenizer, so it stays.
    assert all(truth[line["gen"]] == line["sha256"] for line in lines if line["gen"])


def test_only_the_kinds_that_were_asked_for(tmp_path: Path) -> None:
    fleet = begun(tmp_path)
    fleet.add("prober", prober(fleet, until=3, kinds=("global",)))
    assert fleet.run_until(lambda: "prober" not in fleet.actors)
    assert [(line["weights"], line["gen"]) for line in logged(fleet)] == [
        ("global", gen) for gen in range(4)
    ]


def test_a_global_that_came_as_an_update_is_probed_once_it_is_whole(tmp_path: Path) -> None:
    fleet = begun(tmp_path, downlink="update")
    fleet.add("prober", prober(fleet, until=4))
    assert fleet.run_until(lambda: "prober" not in fleet.actors)
    expect_each_once(fleet, 4)


def test_a_store_that_is_down_is_waited_for(tmp_path: Path) -> None:
    fleet = begun(tmp_path)
    store = ReadOnly(fleet.store, lambda: 20 < fleet.clock.now < 120)
    fleet.add("prober", prober(fleet, until=6, store=store))
    assert fleet.run_until(lambda: "prober" not in fleet.actors)
    expect_each_once(fleet, 6)
    assert any("does not answer" in line for line in fleet.said)


@pytest.mark.parametrize("late", [False, True])
def test_a_rollback_is_a_generation_like_any_other(tmp_path: Path, late: bool) -> None:
    """Its EMA is that of the generation it restores, under a number of its own or none."""
    fleet = begun(tmp_path)
    if not late:
        fleet.add("prober", prober(fleet))
    until(fleet, 4)
    roll_back(fleet, 2)
    until(fleet, 7)
    if late:
        fleet.add("prober", prober(fleet))
    assert fleet.run_until(
        lambda: any(line["weights"] == "ema" and line["gen"] == 7 for line in logged(fleet))
    )
    found = {(line["weights"], line["gen"]): line["sha256"] for line in logged(fleet)}
    truth = published(fleet)
    assert {key: truth[key] for key in found} == found
    assert found["global", 5] == found["global", 2]
    assert {gen for kind, gen in found if kind == "global"} >= set(range(8))


def test_weights_that_cannot_be_scored_are_a_line_and_no_end(tmp_path: Path) -> None:
    fleet = begun(tmp_path)

    def score(path: Path) -> dict:
        raise UserError("not a finite number")

    fleet.add("prober", prober(fleet, until=2, score=score))
    assert fleet.run_until(lambda: "prober" not in fleet.actors)
    assert {line["problem"] for line in logged(fleet)} == {"not a finite number"}


def test_a_damaged_file_is_passed_over_and_said(tmp_path: Path) -> None:
    fleet = until(begun(tmp_path), 4)
    fleet.store.blobs[published(fleet)["global", 2]] = b"damaged"
    fleet.add("prober", prober(fleet, until=4, kinds=("global",)))
    assert fleet.run_until(lambda: "prober" not in fleet.actors)
    assert [line["gen"] for line in logged(fleet)] == [0, 1, 3, 4]
    assert any("generation 2, global: passed over" in line for line in fleet.said)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"weights": "ema", "gen": 1, **ABOUT, "run": "another"}, "another run"),
        ({"weights": "ema", "gen": 1, **ABOUT, "probes": {}}, "another probes"),
        ({"step": 3}, "not of a probe's log"),
        ([], "not of a probe's log"),
    ],
)
def test_a_log_of_something_else_is_refused_and_kept(
    tmp_path: Path, line: object, message: str
) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(f"{json.dumps(line)}\nhalf")
    with pytest.raises(UserError, match=message):
        ProbeLog(path, ABOUT)
    assert path.read_text().endswith("half")


def test_the_command_follows_a_real_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_config(write_corpus(tmp_path))
    store, log = str(tmp_path / "run"), tmp_path / "log.jsonl"
    assert main(["init", store, "--config", str(write_config(tmp_path, config))]) == 0
    capsys.readouterr()
    command = ["probe", store, "--follow", "--log", str(log), "--until", "0"]
    for _ in range(2):  # the second time there is nothing left to do
        assert main(command) == 0
        (line,) = map(json.loads, log.read_text().splitlines())
    assert (line["weights"], line["gen"]) == ("global", 0)
    assert line["sets"]["held_out"]["mean"] > 0
    assert set(line["probes"]) == {"held_out"}
    assert "generation 0, global: held_out" in capsys.readouterr().out
    for wrong in (["--follow"], ["--log", str(log)], ["--follow", "--log", "none/such/log"]):
        assert main(["probe", store, *wrong]) == 2


def test_the_end_is_told_where_nothing_was_left_to_probe_too(tmp_path: Path) -> None:
    fleet = until(begun(tmp_path), 3)
    for _ in range(2):
        fleet.said.clear()
        fleet.add("prober", prober(fleet, until=2))
        assert fleet.run_until(lambda: "prober" not in fleet.actors)
        assert any(line.startswith("probed up to generation 2; ") for line in fleet.said)
