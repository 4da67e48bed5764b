"""What is compared: every way of writing the same continuations, as data.

The ablations change one thing each in the tuned draft and refill. Source: the card's "Pilot
results", spec algorithms 5.2-5.6.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from diffurefill.config import DRAFT, REFILL, Stage, UserError
from diffurefill.config.decode import Quota
from diffurefill.decode.autoregressive import LeftToRight

AR_REPAIR_ROUNDS = 8
AS_IT_IS = LeftToRight()
"""Temperature 1, no truncation: the model's own distribution."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One row of the table."""

    name: str
    title: str
    writer: Literal["nobody", "ar", "diffusion", "diffusion, then ar"]
    """`nobody`: the real text."""
    stages: tuple[Stage, ...] = ()
    """The denoiser's."""
    how: LeftToRight = AS_IT_IS
    """The twin's."""
    changes_tuned: bool = False
    """The tuned draft and refill with one thing changed."""
    repair_rounds: int = 0
    repair_fraction: float = 0.0

    @property
    def needs_twin(self) -> bool:
        """Whether the autoregressive model takes part."""
        return self.writer in ("ar", "diffusion, then ar")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def pilot_arms(tuned: tuple[Stage, ...]) -> list[Arm]:
    """All rows; `tuned` is a draft and a refill. UserError for other decoders."""
    if [stage.remask_fraction > 0 for stage in tuned] != [False, True]:
        raise UserError("the pilot ablates one draft and one refill: give a preset of these two")
    draft, refill = tuned
    if draft.num_passes == 0:
        raise UserError(
            "the pilot gives the same calls to other drafts: give a preset whose draft has a fixed "
            "number of passes (num_passes)"
        )
    changed = [*_ablations(draft, refill), *_other_drafts(draft, refill), *_other_refills(*tuned)]
    changed = [replace(arm, changes_tuned=True) for arm in changed]
    return [*_baselines(draft, refill), _ar_repair(draft), *changed]


def choose_arms(arms: list[Arm], names: tuple[str, ...], *, has_twin: bool) -> list[Arm]:
    """Those of the names, in the table's order; where none is named, all that can be written."""
    unknown = set(names) - {arm.name for arm in arms}
    if unknown:
        known = ", ".join(arm.name for arm in arms)
        raise UserError(f"no arm {', '.join(sorted(unknown))}; there are {known}")
    possible = [arm for arm in arms if has_twin or not arm.needs_twin]
    chosen = [arm for arm in arms if arm.name in names] if names else possible
    impossible = [arm.name for arm in chosen if arm not in possible]
    if impossible:
        raise UserError(f"the autoregressive twin writes {', '.join(impossible)}: give --ar")
    return chosen


def _baselines(draft: Stage, refill: Stage) -> list[Arm]:
    truncated = LeftToRight(temperature=refill.temperature[1], min_p=refill.min_p)
    long = replace(draft, num_passes=draft.num_passes + refill.num_passes)
    return [
        Arm(name="real", title="real text", writer="nobody"),
        Arm(name="ar", title="autoregressive", writer="ar"),
        Arm(
            name="ar_truncated",
            title="autoregressive, sampled as the refill",
            writer="ar",
            how=truncated,
        ),
        _diffusion("draft", "draft only", draft),
        _diffusion("draft_long", "draft only, in as many calls as with refill", long),
        _diffusion("card_draft", "draft only, the card's settings", DRAFT),
        _diffusion("card", "draft + refill, the card's settings", DRAFT, REFILL),
        _diffusion("tuned", "draft + refill, tuned", draft, refill),
    ]


def _ablations(draft: Stage, refill: Stage) -> list[Arm]:
    as_draft = replace(refill, temperature=(draft.temperature[1],) * 2, min_p=draft.min_p)
    as_refill = replace(draft, temperature=refill.temperature, min_p=refill.min_p)
    no_ban = replace(draft, neighbour_ban=0.0), replace(refill, neighbour_ban=0.0)
    no_gap = replace(draft, commit_gap=1), replace(refill, commit_gap=1)
    quiet, blind = replace(draft, order_noise=0.0), replace(refill, order="random")
    return [
        _diffusion("refill_4", "4 refill passes", draft, replace(refill, num_passes=4)),
        _diffusion("refill_16", "16 refill passes", draft, replace(refill, num_passes=16)),
        _diffusion("random_refill", "refill of random positions", draft, blind),
        _diffusion("no_order_noise", "no Gumbel noise on the order", quiet, refill),
        _diffusion("no_ban", "no neighbour ban", *no_ban),
        _diffusion("no_gap", "no commit gap", *no_gap),
        _diffusion("shared_draft", "refill sampled as the draft ends", draft, as_draft),
        _diffusion("shared_refill", "draft sampled as the refill", as_refill, refill),
    ]


def _other_drafts(draft: Stage, refill: Stage) -> list[Arm]:
    """Every other order and quota in the draft, at its usual bound. Without a count of passes
    nothing falls over them: the temperature is the draft's last."""

    def arm(name: str, title: str, **change: Any) -> Arm:
        return _diffusion(name, title, replace(draft, **change), refill)

    def adaptive(quota: Quota, title: str, **change: Any) -> Arm:
        cool = (draft.temperature[1],) * 2
        change |= {"num_passes": 0, "quota": quota, "temperature": cool, "order_noise": 0.0}
        return arm(quota, title, **change)

    return [
        arm("margin", "order by margin", order="margin"),
        arm("entropy", "order by entropy", order="entropy"),
        arm("random", "random order", order="random", order_noise=0.0),
        arm("left_to_right", "order from left to right", order="left_to_right", order_noise=0.0),
        arm("cosine", "cosine quota", quota="cosine"),
        adaptive("one_per_run", "one of each run, its middle", order="middle"),
        adaptive("threshold", "all above 0.9", bound=0.9),
        adaptive("factor", "factor 1", bound=1.0),
        adaptive("entropy_bound", "entropy bound 0.1", bound=0.1, order="entropy"),
    ]


def _other_refills(draft: Stage, refill: Stage) -> list[Arm]:
    """Every other thing that a refill may know or leave alone; and what keeping keys and values,
    which is for speed, does to the text."""

    def arm(name: str, title: str, **change: Any) -> Arm:
        return _diffusion(name, title, draft, replace(refill, **change))

    arms = [
        arm("regrouped", "confidence judged anew in groups", confidence="regrouped"),
        arm("shadow", "confidence judged anew by shadows", confidence="shadow", refresh_every=1),
        arm("remask_cap", "no position back more than twice", remask_cap=2),
        arm("sure_above", "nothing above 0.9 back", sure_above=0.9),
    ]
    if refill.confidence != "shadow":  # shadows want every position computed
        kept = [replace(stage, refresh_every=4) for stage in (draft, refill)]
        arms.append(_diffusion("kept", "keys and values kept for three passes of four", *kept))
    return arms


def _diffusion(name: str, title: str, *stages: Stage) -> Arm:
    return Arm(name=name, title=title, writer="diffusion", stages=stages)


def _ar_repair(draft: Stage) -> Arm:
    return Arm(
        name="ar_repair",
        title="draft, repaired by the autoregressive model",
        writer="diffusion, then ar",
        stages=(draft,),
        repair_rounds=AR_REPAIR_ROUNDS,
        repair_fraction=REFILL.remask_fraction,
    )
