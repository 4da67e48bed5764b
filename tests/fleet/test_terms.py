"""Two mergers: who has the run, who stands by, and when it passes on."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from diffurefill.fleet import start
from diffurefill.fleet.merger import Merger
from diffurefill.fleet.run import Run
from diffurefill.store.base import Denied
from tests.fleet.fakes import FLEET, FakeAverager, FakeFleet, MemoryStore
from tests.fleet.test_fleet import expect_sound


@pytest.fixture
def fleet(tmp_path: Path) -> FakeFleet:
    return FakeFleet(MemoryStore(), tmp_path)


def test_a_second_merger_stands_by_while_the_first_is_alive(fleet: FakeFleet) -> None:
    fleet.add_merger("first")
    fleet.add_worker(0)
    fleet.until_generation(1)
    fleet.add_merger("second")
    assert fleet.until_generation(6)
    assert fleet.state.epoch == 1
    assert sum("standing by" in line for line in fleet.said) == 1
    expect_sound(fleet)


def test_an_idle_merger_beats_so_that_its_lease_does_not_run_out(fleet: FakeFleet) -> None:
    fleet.add_merger("first")
    fleet.add_merger("second")
    fleet.run_until(lambda: False, seconds=20 * FLEET.lease_seconds)
    assert fleet.state.epoch == 1
    assert fleet.state.beat >= 20


def test_the_run_passes_on_a_lease_after_the_first_died(fleet: FakeFleet) -> None:
    fleet.add_merger("first")
    fleet.add_worker(0)
    fleet.until_generation(2)
    fleet.kill("first")
    died, epoch = fleet.clock.now, fleet.state.epoch
    fleet.add_merger("second")
    assert fleet.run_until(lambda: fleet.state.epoch > epoch)
    assert fleet.clock.now - died >= FLEET.lease_seconds
    assert fleet.until_generation(4)
    expect_sound(fleet)


def test_a_merger_asleep_past_its_lease_cannot_publish_and_stands_by(fleet: FakeFleet) -> None:
    """SIGSTOP for far longer than the lease: it wakes inside a round that is not its own."""
    fleet.add_merger("old")
    fleet.add_worker(0)
    fleet.add_worker(1)
    fleet.until_generation(2)
    fleet.wake["old"] += 20 * FLEET.lease_seconds
    fleet.add_merger("new")
    assert fleet.until_generation(5)
    woken = fleet.wake["old"]
    fleet.run_until(lambda: fleet.clock.now > woken + 5, seconds=2 * (woken - fleet.clock.now))
    assert any("took over after epoch 1; this one stands by" in line for line in fleet.said)
    assert "old" in fleet.actors
    fleet.kill("new")
    assert fleet.until_generation(fleet.state.gen + 2)
    assert fleet.state.epoch == 3
    expect_sound(fleet)


def test_a_merger_that_is_done_gives_its_term_up(fleet: FakeFleet) -> None:
    run = fleet.run_for("once")
    fleet.add_worker(0)
    fleet.add("once", _merger(fleet, run, 2))
    assert fleet.run_until(lambda: "once" not in fleet.actors)
    assert fleet.state.merger_id == ""
    before = fleet.clock.now
    fleet.add_merger("next")
    fleet.run_until(lambda: fleet.state.epoch == 2)
    assert fleet.clock.now - before < FLEET.lease_seconds
    assert fleet.until_generation(4)
    expect_sound(fleet)


def test_an_interrupted_merger_gives_its_term_up(fleet: FakeFleet) -> None:
    merger = Merger(fleet.run_for("m"), FakeAverager(), clock=fleet.clock, report=fleet.said.append)
    fleet.add("m", merger.run())
    fleet.run_until(lambda: fleet.state.epoch == 1)
    merger.term.release()
    assert fleet.state.merger_id == ""


def test_what_a_fenced_merger_had_seen_is_looked_at_again(fleet: FakeFleet) -> None:
    """Seen by the first, never merged by the second, which dies: the first must not overlook it."""
    fleet.fleet = replace(FLEET, min_fresh=2, grace_seconds=500.0)
    fleet.add_merger("first")
    fleet.add_worker(0)
    fleet.run_until(lambda: any("worker 0 contributed" in line for line in fleet.said))
    fleet.wake["first"] += 3 * FLEET.lease_seconds
    fleet.add_merger("second")
    fleet.run_until(lambda: fleet.state.epoch == 2)
    fleet.kill("second")
    assert fleet.until_generation(1, seconds=3000)
    assert [c.worker for c in fleet.state.accepted] == [0]
    expect_sound(fleet)


def test_a_fenced_merger_does_not_keep_the_payloads_it_had_fetched(fleet: FakeFleet) -> None:
    fleet.fleet = replace(FLEET, min_fresh=2, grace_seconds=500.0)
    fleet.add_merger("first")
    fleet.add_worker(0)
    fleet.run_until(lambda: any("worker 0 contributed" in line for line in fleet.said))
    [fetched] = (fleet.folder / "first-1").glob("*.delta")
    fleet.wake["first"] += 3 * FLEET.lease_seconds
    fleet.add_merger("second")
    assert fleet.until_generation(1, seconds=3000)
    fleet.kill("second")
    assert fleet.run_until(lambda: fleet.state.epoch == 3, seconds=3000)
    fleet.run_until(lambda: False, seconds=1)
    assert not fetched.exists()


def _merger(fleet: FakeFleet, run: Run, generations: int) -> Iterator[float]:
    merger = Merger(run, FakeAverager(), clock=fleet.clock, report=fleet.said.append)
    return merger.run(generations)


def test_the_main_lane_names_who_is_waited_for(fleet: FakeFleet) -> None:
    fleet.add_merger()
    fleet.add_worker(0)
    fleet.add_worker(3)
    fleet.until_generation(2)
    assert fleet.state.live == (0, 3)


@pytest.mark.parametrize("error", [Denied("the disk is full"), ValueError(), KeyboardInterrupt()])
def test_a_merger_that_ends_early_gives_its_term_up(
    fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(*_: object) -> Iterator[float]:
        raise error

    monkeypatch.setattr(start, "open_run", lambda uri, cache: fleet.run_for("merger"))
    monkeypatch.setattr(Merger, "_serve", fail)
    with pytest.raises(type(error)):
        start.start_merger("memory:", None, None, False, fleet.said.append)
    assert (fleet.state.epoch, fleet.state.merger_id) == (1, "")
