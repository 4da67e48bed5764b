"""What the report's fleet would do with other codecs, sizes and lives: `diffurefill simulate`.

    python bench/capacity.py [--quick]

The product's worker and merger in virtual time; no time of this machine enters the figures. The
page is simulated for three seeds (--quick: one, for an hour of virtual time), and once more with
workers that live 3.7 hours, as the report's did. Figures on the last line are means over seeds.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from typing import Any

from _common import report
from diffurefill.fleet.simulate import report as pages
from diffurefill.fleet.simulate.capacity import HOUR, Setting, simulate

SEEDS = (0, 1, 2)
LIFETIME_SECONDS = 3.7 * HOUR
"""At 26.2B tokens a worker, 92.8B are 3.5 workers; for the 211 hours of 1,333 rounds, 200 launches
make 3.7 hours each."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    seeds, hours = (SEEDS[:1], 1.0) if quick else (SEEDS, None)
    runs = [pages.run(Setting(seed=seed), hours, print) for seed in seeds]
    for line in pages.page(Setting(), runs[0]):
        print(line)
    report("capacity", figures_of(runs, seeds, hours or 24.0), quick=quick)


def figures_of(runs: list[list[pages.Row]], seeds: tuple[int, ...], hours: float) -> dict[str, Any]:
    path = [label for label, _ in pages.path(Setting())]

    def mean(label: str, figure: str) -> float:
        rows = [row.json() for run in runs for row in run if row.label == label]
        return round(statistics.fmean(row["figures"][figure] for row in rows), 4)

    mortal = [
        simulate(replace(setting, lifetime_seconds=LIFETIME_SECONDS, hours=hours, seed=seed))
        for setting in (pages.path(Setting())[0][1], pages.path(Setting())[-1][1])
        for seed in seeds
    ]
    half = len(mortal) // 2
    return {
        "waiting_share_report": mean(path[0], "waiting_share"),
        "waiting_share_best": mean(path[-1], "waiting_share"),
        "round_minutes_report": mean(path[0], "round_minutes"),
        "round_minutes_best": mean(path[-1], "round_minutes"),
        "tokens_per_day_ratio": round(
            mean(path[-1], "tokens_per_day") / mean(path[0], "tokens_per_day"), 3
        ),
        "waiting_share_path": {label: mean(label, "waiting_share") for label in path},
        "waiting_share_report_mortal": _mean_waiting(mortal[:half]),
        "waiting_share_best_mortal": _mean_waiting(mortal[half:]),
        "lifetime_seconds_mortal": LIFETIME_SECONDS,
        "seeds": list(seeds),
        "setting": runs[0][0].json()["setting"],
        "rows": [_brief(row) for run in runs for row in run],
    }


def _brief(row: pages.Row) -> dict[str, Any]:
    figures = row.json()["figures"]
    phases = {name: round(seconds, 1) for name, seconds in figures.pop("phases").items()}
    rounded = {name: float(f"{value:.5g}") for name, value in figures.items()}
    where = {"section": row.section, "label": row.label, "seed": row.setting.seed}
    return {**where, "hours": row.setting.hours, **rounded, "phases": phases}


def _mean_waiting(found: list[Any]) -> float:
    return round(statistics.fmean(f.waiting_share for f in found), 4)


if __name__ == "__main__":
    main()
