"""Capacity planning: calibrated to the report, monotonic, countable by hand, repeatable."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache

import pytest

from diffurefill.config import UserError
from diffurefill.fleet.simulate import report
from diffurefill.fleet.simulate.capacity import Figures, Setting
from diffurefill.fleet.simulate.capacity import simulate as simulate_again
from diffurefill.fleet.simulate.command import Simulate, bandwidth, duration, number
from diffurefill.fleet.simulate.sized import BYTES_PER_PARAMETER

simulate = cache(simulate_again)
SHORT = Setting(hours=2.0, warm_hours=0.5)
REPORT = report.path(SHORT)[0][1]
BOTH = replace(SHORT, codec="int8-delta", downlink="update")


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_the_reports_setting_gives_the_reports_round(workers: int) -> None:
    f = simulate(replace(REPORT, workers=workers))
    assert f.round_minutes == pytest.approx(9.5, rel=0.05)
    assert f.waiting_share == pytest.approx(0.26, abs=0.02)
    assert f.tokens_per_second == pytest.approx(35e3, rel=0.05)


def test_smaller_files_shorten_the_wait_step_by_step() -> None:
    shares = [simulate(replace(s, hours=2.0)).waiting_share for _, s in report.path(SHORT)[:4]]
    assert shares[2] < shares[1] - 0.05
    assert shares[3] < shares[2] - 0.03


def test_the_least_waiting_is_at_most_twelve_percent() -> None:
    best = report.path(SHORT)[-1][1]
    shares = [simulate(replace(best, hours=4.0, seed=seed)).waiting_share for seed in range(3)]
    assert max(shares) <= 0.12


def test_more_bandwidth_never_gives_fewer_tokens() -> None:
    rates = (25e6, 50e6, 100e6, 400e6, 1600e6)
    settings = [
        replace(SHORT, upload_bytes_per_second=r, download_bytes_per_second=r) for r in rates
    ]
    tokens = [simulate(s).tokens_per_day for s in settings]
    assert tokens == sorted(tokens)
    assert tokens[-1] > 1.5 * tokens[0]


def test_a_smaller_codec_never_moves_more_bytes_and_waits_less() -> None:
    by_size = sorted(BYTES_PER_PARAMETER, key=BYTES_PER_PARAMETER.__getitem__)
    found = [simulate(replace(SHORT, codec=codec)) for codec in by_size]
    moved = [(f.up_bytes_per_hour + f.down_bytes_per_hour) / f.rounds_per_hour for f in found]
    assert moved == sorted(moved)
    shares = [f.waiting_share for f in found]
    assert shares == sorted(shares)


def test_bytes_of_a_round_are_those_of_its_files() -> None:
    """One worker, whole fp32 files: up contribution, global and EMA; down contribution, global."""
    one = replace(SHORT, workers=1, hours=4.0)
    f = simulate(one)
    size = 4 * one.params
    assert f.up_bytes_per_hour / f.rounds_per_hour == pytest.approx(3 * size, rel=0.06)
    assert f.down_bytes_per_hour / f.rounds_per_hour == pytest.approx(2 * size, rel=0.06)


def test_the_reports_merger_moves_each_file_once_as_well() -> None:
    """Its early EMA is not sent a second time, its late downloads are counted."""
    f, size = simulate(replace(REPORT, hours=4.0)), 4 * REPORT.params
    assert f.up_bytes_per_hour / f.rounds_per_hour == pytest.approx((4 + 2) * size, rel=0.05)
    assert f.down_bytes_per_hour / f.rounds_per_hour == pytest.approx((4 + 4) * size, rel=0.05)


def test_commits_are_those_counted_by_hand() -> None:
    """A round short enough for no log or beat of its own: a push for each worker, then the global,
    then the EMA."""
    quick = replace(SHORT, workers=3, local_steps=10, params=1e6, hours=1.0)
    f = simulate(quick)
    assert f.rounds_per_hour > 60
    assert f.commits_per_hour == pytest.approx((3 + 2) * f.rounds_per_hour, rel=0.03)


def test_a_round_is_what_its_phases_add_up_to() -> None:
    f = simulate(REPORT)
    p = f.phases
    between_steps = 60 * f.round_minutes - (p.train + p.push + p.others + p.merger + p.adopt)
    assert 0 <= between_steps < 15  # looks at the hub while training
    assert p.train == pytest.approx(150 * SHORT.step_seconds, rel=0.02)


def test_deaths_cost_tokens_and_leave_machines_missing() -> None:
    mortal = replace(BOTH, lifetime_seconds=3600.0, hours=6.0)
    f, immortal = simulate(mortal), simulate(replace(BOTH, hours=6.0))
    assert f.workers_alive < 3.8 < 3.99 < immortal.workers_alive
    assert f.tokens_per_day < 0.95 * immortal.tokens_per_day
    assert f.lost_share > 0.02 > immortal.lost_share


def test_a_slow_merger_is_what_a_big_fleet_waits_for() -> None:
    slow = replace(BOTH, workers=8, merger_bytes_per_second=100e6, hours=1.0)
    f, fast = simulate(slow), simulate(replace(slow, merger_bytes_per_second=1e9))
    assert f.phases.merger > fast.phases.merger + 50
    assert f.waiting_share > fast.waiting_share + 0.05


def test_the_same_seed_gives_the_same_figures_and_another_one_others() -> None:
    mortal = replace(BOTH, lifetime_seconds=1800.0, workers=2)
    assert simulate_again(mortal) == simulate_again(mortal)
    assert simulate_again(mortal) != simulate_again(replace(mortal, seed=1))


# --- the command ---------------------------------------------------------------------------------


def test_units() -> None:
    assert duration("2h", "--x") == 7200
    assert duration("90s", "--x") == 90
    assert duration("10 min", "--x") == 600
    assert math.isinf(duration("never", "--x"))
    assert bandwidth("100MB/s", "--x") == 100e6
    assert bandwidth("1.5GB/s", "--x") == 1.5e9
    assert number("1.08e9", "--x") == number("1.08B", "--x") == 1.08e9


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("lifetime", "2 hours"),
        ("lifetime", "0s"),
        ("lifetime", "-2h"),
        ("bandwidth", "100"),
        ("bandwidth", "100Mbit/s"),
        ("params", "big"),
        ("poll", "1.2.3s"),
        ("workers", 0),
        ("hours", 0.01),
    ],
)
def test_what_makes_no_sense_is_named(option: str, value: object) -> None:
    with pytest.raises(UserError, match=f"--{option} "):
        Simulate(**{option: value}).setting()  # type: ignore


def test_the_page_fits_a_screen_and_flags_quotas(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = simulate(BOTH)

    def stub(setting: Setting) -> Figures:
        return replace(figures, most_commits_per_hour=50 * setting.workers)

    monkeypatch.setattr(report, "simulate", stub)
    assert Simulate(lifetime="2h").run() == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100
    flagged = {line.strip().split("  ")[0] for line in lines[:21] if "!" in line}
    assert {"16 workers", "64 workers"} <= flagged
    assert "1 worker" not in flagged

    assert Simulate(json=True).run() == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == len(report.fleets(SHORT))
    assert rows[1]["setting"]["lifetime_seconds"] is None
    assert rows[1]["figures"]["waiting_share"] == figures.waiting_share
