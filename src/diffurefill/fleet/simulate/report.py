"""The page that `diffurefill simulate` prints: one table of fleets, and the conditions under it."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

from diffurefill.config.fleet import Codec
from diffurefill.fleet.simulate.capacity import MB, Figures, Setting, simulate

COMMITS_PER_HOUR = 128
"""What a model repository took when this was written; seen in an error message, not documented."""
API_CALLS, RESOLVER_CALLS = 1000, 5000
"""A free account's quota in five minutes, shared by all processes with its token."""

REPORT_POLL_SECONDS = 10.0
"""How often the report's processes looked at the hub, we guess."""
SIZES = (1, 4, 16, 64)
GB = 1e9
WIDTH = 100


@dataclass(frozen=True)
class Row:
    """One simulated fleet."""

    section: str
    label: str
    setting: Setting
    figures: Figures

    def json(self) -> dict[str, Any]:
        figures = {**asdict(self.figures), "round_minutes": self.figures.round_minutes}
        setting = asdict(self.setting)
        if math.isinf(self.setting.lifetime_seconds):  # JSON has no infinity
            setting["lifetime_seconds"] = None
        names = {"section": self.section, "label": self.label}
        return {**names, "setting": setting, "figures": figures}


def path(setting: Setting) -> list[tuple[str, Setting]]:
    """From the report's fleet to the least waiting with the same average, a change at a time."""
    whole = replace(setting, codec="fp32-delta", downlink="full", merger="ours")
    ours = replace(whole, poll_seconds=REPORT_POLL_SECONDS)
    int8 = replace(ours, codec="int8-delta")
    both = replace(int8, downlink="update")
    return [
        ("the report's way (a model of it)", replace(ours, merger="report")),
        ("+ our merger: fetches early, EMA later", ours),
        ("+ contributions in int8", int8),
        ("+ new globals as int8 updates", both),
        (
            f"+ polls every {setting.poll_seconds:g} s while waiting",
            replace(both, poll_seconds=setting.poll_seconds),
        ),
    ]


def fleets(setting: Setting) -> list[tuple[str, str, Setting]]:
    """(section, label, setting) of every fleet on the page."""
    best = path(setting)[-1][1]
    mine = [("this fleet", f"{setting.codec}, downlink {setting.downlink}", setting)]
    steps = [("from the report's waiting to the least", *step) for step in path(setting)]
    codecs = [
        ("codecs of contributions", codec, replace(setting, codec=codec))
        for codec in get_args(Codec)
    ]
    sizes = [
        ("sizes, with int8 both ways",
         f"{n} worker{'s' if n > 1 else ''}", replace(best, workers=n))
        for n in SIZES
    ]  # fmt: skip
    return [*mine, *steps, *codecs, *sizes]


def hours_for(setting: Setting) -> float:
    """Counted hours that make a stable figure in a few seconds of real time: more with deaths."""
    hours = min(6.0, max(1.0, 24.0 / setting.workers))
    return hours if math.isinf(setting.lifetime_seconds) else 1.5 * hours


def run(
    setting: Setting, hours: float | None, progress: Callable[[str], None] = lambda line: None
) -> list[Row]:
    """Simulate every fleet on the page, each once."""
    known: dict[Setting, Figures] = {}
    rows = []
    for section, label, wanted in fleets(setting):
        one = replace(wanted, hours=hours or hours_for(wanted))
        if one not in known:
            progress(f"simulating {label} ({section})")
            known[one] = simulate(one)
        rows.append(Row(section, label, one, known[one]))
    return rows


# --- text ----------------------------------------------------------------------------------------

HEADER = (
    f"{'':<40}{'rounds':>7}{'wait-':>7}{'':>6}{'tokens':>8}{'GB per hour':>14}{'com-':>7}"
    f"{'calls':>11}",
    f"{'':<40}{'/hour':>7}{'ing':>7}{'lost':>6}{'/day':>8}{'up':>7}{'down':>7}{'mits/h':>7}"
    f"{'api/res':>11}",
)


def page(setting: Setting, rows: list[Row]) -> list[str]:
    """The lines to print."""
    lines, section = list(HEADER), ""
    for row in rows:
        if row.section != section:
            section = row.section
            lines.append(section)
        lines.append(_line(row))
    return [*lines, "", *_where_time_goes(rows[0].figures), "", *_conditions(setting, rows)]


def _line(row: Row) -> str:
    f = row.figures
    commits = _marked(f.most_commits_per_hour, COMMITS_PER_HOUR, f"{f.commits_per_hour:.0f}")
    api = _marked(f.most_api_calls, API_CALLS, str(f.most_api_calls))
    resolver = _marked(f.most_resolver_calls, RESOLVER_CALLS, str(f.most_resolver_calls))
    return (
        f"  {row.label:<38}{f.rounds_per_hour:>7.2f}{f.waiting_share:>7.1%}{f.lost_share:>6.1%}"
        f"{f.tokens_per_day / 1e9:>7.2f}B{f.up_bytes_per_hour / GB:>7.0f}"
        f"{f.down_bytes_per_hour / GB:>7.0f}{commits:>7}{f'{api}/{resolver}':>11}"
    )


def _marked(most: int, quota: int, text: str) -> str:
    return f"{text}!" if most > quota else text


def _where_time_goes(f: Figures) -> list[str]:
    p = f.phases
    return _paragraph(
        f"A round of this fleet takes {f.round_minutes:.1f} minutes. In one, a worker trains for "
        f"{p.train:.0f} s, pushes for {p.push:.0f}, waits for other workers {p.others:.0f} and for "
        f"the merger {p.merger:.0f}, adopts for {p.adopt:.0f}; it makes "
        f"{f.tokens_per_second / 1e3:.1f}k tokens/s, waiting included. Workers alive in the mean: "
        f"{f.workers_alive:.1f}."
    )


def _conditions(setting: Setting, rows: list[Row]) -> list[str]:
    s, hours = setting, sorted({row.setting.hours for row in rows})
    span = f"{hours[0]:g}" if len(hours) == 1 else f"{hours[0]:g} to {hours[-1]:g}"
    life = "no worker dies"
    if s.lifetime_seconds < math.inf:
        life = (
            f"a worker lives {_time(s.lifetime_seconds)} (mean, exponential) and starts again "
            f"{_time(s.relaunch_seconds)} later"
        )
    return _paragraph(
        "Conditions: the product's own worker and merger in virtual time on a hub that never "
        f"fails; seed {s.seed}; {span} hours counted; {s.workers} workers unless a row says "
        f"otherwise; {life}. {s.params:.4g} parameters, {s.local_steps} steps of "
        f"{s.tokens_per_step:,} tokens at {s.tokens_per_second / 1e3:.1f}k tokens/s while training."
        f" Polls every {s.poll_seconds:g} s, but every "
        f"{REPORT_POLL_SECONDS:g} s in the first four rows of the path. A worker has "
        f"{s.upload_bytes_per_second / MB:g} MB/s, the merger {s.merger_bytes_per_second / MB:g}, "
        f"each way; a call takes {s.latency_seconds:g} s."
    ) + _paragraph(
        "waiting: all of the workers' time that is not training; lost: trained, never merged; "
        "calls: most in 5 minutes, on one token. ! = over a quota, which is counted here and not "
        f"enforced: {COMMITS_PER_HOUR} commits an hour (seen, not documented), {API_CALLS:,} API "
        f"and {RESOLVER_CALLS:,} resolver calls. The report tells 9.5 min and 26% but no bandwidth:"
        " 100 MB/s and, for its merger, 1000 MB/s are fitted to them. What int8 and int4 do to the "
        "loss is not simulated."
    )


def _paragraph(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH)


def _time(seconds: float) -> str:
    return f"{seconds / 3600:.2g} h" if seconds >= 3600 else f"{seconds / 60:.2g} min"
