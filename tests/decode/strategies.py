"""Stages and rows for hypothesis: every combination that a configuration allows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from diffurefill.config import Stage, UserError
from tests.decode.plain import V

BOUNDS = {"threshold": (0.0, 0.3, 0.8), "factor": (0.2, 1.0, 2.0), "entropy_bound": (0.0, 0.5, 3.0)}
ORDERS = ("confidence", "margin", "entropy", "left_to_right", "middle", "random")


@st.composite
def _drafts(draw: st.DrawFn) -> dict[str, Any]:
    quota = draw(st.sampled_from(["linear", "linear", "cosine", *BOUNDS, "one_per_run"]))
    per_pass = None
    if quota in ("linear", "cosine"):
        per_pass = draw(st.sampled_from([None, None, 1, 3]))
    ends = quota not in ("linear", "cosine") or per_pass is not None
    order = draw(st.sampled_from(ORDERS))
    return {
        "num_passes": draw(st.integers(0 if ends else 1, 14)),
        "temperature": draw(st.tuples(*[st.sampled_from([0.0, 0.7, 2.2])] * 2)),
        "min_p": draw(st.sampled_from([0.0, 0.1])),
        "order": order,
        "order_noise": draw(st.sampled_from([0.0, 2.5])),
        "quota": quota,
        "bound": draw(st.sampled_from(BOUNDS[quota])) if quota in BOUNDS else None,
        "tokens_per_pass": per_pass,
        "commit_gap": draw(st.integers(1, 4)),
        "neighbour_ban": draw(st.sampled_from([0.0, 6.0])),
    }


def _is_stage(fields: dict[str, Any]) -> bool:
    try:
        Stage(**fields)
    except UserError:
        return False
    return True


STAGES = _drafts().filter(_is_stage).map(lambda fields: Stage(**fields))
REFILLS = st.builds(
    Stage,
    num_passes=st.integers(1, 4),
    remask_fraction=st.sampled_from([0.01, 0.2, 0.5, 1.0]),
    temperature=st.just((0.8, 0.8)),
    min_p=st.sampled_from([0.0, 0.1]),
    order=st.sampled_from(["confidence", "confidence", "random"]),
    commit_gap=st.integers(1, 3),
    neighbour_ban=st.sampled_from([0.0, 6.0]),
    confidence=st.sampled_from(["stale", "regrouped"]),
    groups=st.sampled_from([2, 5]),
    remask_cap=st.sampled_from([None, None, 1, 2]),
    sure_above=st.sampled_from([None, None, 0.3, 0.9013]),
    stop_unchanged=st.booleans(),
)
PLAIN = {
    "order": "confidence",
    "confidence": "stale",
    "remask_cap": None,
    "sure_above": None,
    "stop_unchanged": False,
}
PLAIN_REFILLS = REFILLS.map(lambda stage: replace(stage, **PLAIN))
SEGMENTS = st.lists(
    st.one_of(st.integers(1, 12), st.lists(st.integers(4, V - 2), max_size=4)),
    min_size=1,
    max_size=4,
).filter(lambda row: any(isinstance(segment, int) for segment in row))
