"""Scores of many continuations: which likelihood, and the order in which texts share rows."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

import torch

from diffurefill.config import UserError
from diffurefill.decode.canvas import Specials
from diffurefill.decode.generate import Denoiser
from diffurefill.evaluate.likelihood import plans
from diffurefill.evaluate.likelihood.passes import Cost, Reader, Sureness
from diffurefill.evaluate.likelihood.screen import Item, screened
from diffurefill.evaluate.likelihood.texts import Score, Text, lay_out, rolling_windows

Method = Literal["chain", "right_to_left", "confidence", "margin", "entropy", "elbo"]
Screen = Literal["two_stream"]
Pair = tuple[Sequence[int], Sequence[int]]
"""Context, continuation: ids without BOS."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """Which likelihood. Another scorer gives other numbers: name it beside every figure."""

    method: Method = "chain"
    """chain: exact, left to right. right_to_left, confidence, margin, entropy: exact for the
    sampler of that order. elbo: a Monte Carlo bound."""
    tokens_per_pass: int = 1
    """Places that the sampler of an order writes in one pass; not for the elbo."""
    right_masks: int = 0
    """MASKs behind the continuation, where the text may go on. With none the model sees that the
    text ends with its last token, and one trained on whole documents expects EOS there."""
    samples: int = 32
    """Masks of an elbo estimate."""
    guidance: float = 0.0
    """w of unsupervised classifier-free guidance; 0 for none."""
    seed: int = 0
    """Of the elbo's masks."""
    check_greedy: bool = True
    """Have the elbo find the greedy flag by the chain rule's rows too."""
    screen: Screen | None = None
    """two_stream: score items by one pass a text, an approximation of the chain rule."""
    rescore: float = 0.2
    """Share of the screened items, the closest ones, that the chain rule scores all the same."""

    def __post_init__(self) -> None:
        if self.method not in get_args(Method):
            raise UserError(
                f"no scorer {self.method!r}: choose one of {', '.join(get_args(Method))}"
            )
        whole = (self.tokens_per_pass, self.samples, self.right_masks, self.seed)
        are_whole = all(isinstance(number, int) for number in whole)
        if not are_whole or min(whole[:2]) < 1 or self.right_masks < 0:
            raise UserError(
                "a scorer's tokens_per_pass, samples, right_masks and seed must be whole numbers, "
                "the first two at least 1, right_masks at least 0"
            )
        if not _is_finite(self.guidance):
            raise UserError(f"a scorer's guidance is a finite number, not {self.guidance}")
        if not isinstance(self.check_greedy, bool):
            raise UserError(f"a scorer's check_greedy is True or False, not {self.check_greedy}")
        if self.method == "elbo" and self.tokens_per_pass > 1:
            raise UserError("tokens_per_pass is for orders, not for the elbo: leave it out")
        is_share = _is_finite(self.rescore) and 0 <= self.rescore <= 1
        if self.screen not in (None, *get_args(Screen)) or not is_share:
            raise UserError("a scorer's screen is two_stream or none, its rescore between 0 and 1")
        if self.screen and (self.method != "chain" or self.tokens_per_pass > 1 or self.guidance):
            raise UserError(
                "a screen stands in for the plain chain rule: leave it out, or the scorer, "
                "tokens_per_pass and guidance"
            )

    @property
    def name(self) -> str:
        """The method, and whatever else changes the figures: what stands beside each."""
        said = (
            (f"{self.screen} screen", self.screen is not None),
            (f"{self.tokens_per_pass} tokens a pass", self.tokens_per_pass > 1),
            (f"{self.right_masks} MASKs behind", self.right_masks > 0),
            (f"{self.samples} samples", self.method == "elbo"),
            (f"guidance {self.guidance:g}", self.guidance != 0),
        )
        return ", ".join((self.method, *(words for words, holds in said if holds)))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def plan(self, text: Text, mask_id: int, *, causal: bool = False) -> plans.Plan:
        if causal:
            return plans.autoregressive(text)
        common = {"mask_id": mask_id, "right_masks": self.right_masks}
        n = len(text.continuation)
        if self.method == "elbo":
            return plans.elbo(
                text,
                samples=self.samples,
                seed=self.seed,
                check_greedy=self.check_greedy,
                **common,
            )
        if self.sureness is not None:
            return plans.surest_first(text, tokens_per_pass=self.tokens_per_pass, **common)
        order = range(n) if self.method == "chain" else range(n - 1, -1, -1)
        return plans.fixed_order(text, order, tokens_per_pass=self.tokens_per_pass, **common)

    @property
    def sureness(self) -> Sureness | None:
        if self.method == "confidence" or self.method == "margin" or self.method == "entropy":
            return self.method
        return None


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


@dataclass(frozen=True, eq=False)
class Scored:
    """Scores in the order of the pairs, and what was done for them."""

    scores: list[Score]
    cost: Cost
    num_truncated: int
    """Contexts cut from the left."""
    num_too_long: int
    """Continuations longer than a row: scored -inf, so that they never win."""
    approximate: frozenset[int] = frozenset()
    """Places of scores that are a screen's."""


@dataclass(frozen=True, eq=False)
class ScoringModel:
    """What scoring asks of a model."""

    denoiser: Denoiser
    specials: Specials
    max_tokens: int
    """Of a row, BOS included."""
    device: torch.device
    causal: bool = False
    """An autoregressive twin: its chain rule takes one row a text, and no other scorer fits."""
    dtype: torch.dtype | None = None
    batch_tokens: int | None = None


def score(
    model: ScoringModel,
    pairs: Sequence[Pair],
    scorer: Scorer,
    progress: Callable[[int, int], None] | None = None,
    items: Sequence[Item] = (),
) -> Scored:
    """The log-likelihood of each continuation behind its context.

    The scores do not depend on the order of `pairs` or on `batch_tokens`, but for rounding (in
    float32 below 1e-5 nats a token). An empty continuation scores 0. `items`: what a screen may
    score approximately. `progress` is told how many of how many are done. Raises UserError where
    the scorer does not fit the model.
    """
    scorer = _fitting(scorer, model)
    texts = [
        lay_out(
            context,
            continuation,
            bos_id=model.specials.bos_id,
            max_tokens=model.max_tokens,
            right_masks=scorer.right_masks,
        )
        for context, continuation in pairs
    ]
    reader = _reader(model, scorer)

    def say(num_done: int) -> None:
        if progress is not None:
            progress(num_done, len(pairs))

    known: dict[int, Score] = {}
    if scorer.screen is not None:
        how = {"right_masks": scorer.right_masks, "rescore": scorer.rescore}
        known = screened(reader, texts, items, **how, on_scores=say)
    approximate = frozenset(i for i in known if len(pairs[i][1]) > 1)
    rest = {
        i: text
        for i, text in enumerate(texts)
        if i not in known and text is not None and len(text.continuation)
    }
    known |= _by_plans(model, reader, scorer, rest, lambda done: say(len(approximate) + done))
    never, certain = Score(float("-inf"), False), Score(0.0, True)
    scores = [known.get(i, never if text is None else certain) for i, text in enumerate(texts)]
    num_truncated = sum(text is not None and text.is_truncated for text in texts)
    num_too_long = sum(text is None for text in texts)
    _warn(num_truncated, num_too_long, model.max_tokens)
    return Scored(scores, reader.cost, num_truncated, num_too_long, approximate)


def _fitting(scorer: Scorer, model: ScoringModel) -> Scorer:
    """`scorer` for this model: a causal one sees nothing of what stands behind, and asks for its
    greedy flag nothing more. Raises UserError where another likelihood is asked of it."""
    if not model.causal:
        return scorer
    plain = scorer.method == "chain" and scorer.tokens_per_pass == 1 and scorer.screen is None
    if not plain or scorer.guidance != 0:
        raise UserError(
            "an autoregressive model has one likelihood: leave the scorer's options out"
        )
    return replace(scorer, right_masks=0)


def _by_plans(
    model: ScoringModel,
    reader: Reader,
    scorer: Scorer,
    texts: Mapping[int, Text],
    on_scores: Callable[[int], None],
) -> dict[int, Score]:
    # Texts of one context, and of one length, come together: they share rows, and batches.
    ordered = sorted(texts, key=lambda i: (texts[i].first, texts[i].ids.tobytes()))
    mask_id = model.specials.mask_id
    found = plans.run_plans(
        (scorer.plan(texts[i], mask_id, causal=model.causal) for i in ordered), reader, on_scores
    )
    return dict(zip(ordered, found, strict=True))


def _reader(model: ScoringModel, scorer: Scorer) -> Reader:
    return Reader(
        model.denoiser,
        model.specials.mask_id,
        model.specials.vocab_size,
        model.device,
        dtype=model.dtype,
        guidance=scorer.guidance,
        sureness=scorer.sureness,
        batch_tokens=model.batch_tokens,
    )


def score_rolling(
    model: ScoringModel,
    documents: Sequence[Sequence[int]],
    scorer: Scorer,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[list[float], Scored]:
    """The log-likelihood of whole documents, window by window: their sums, and the windows'.

    Raises UserError for a scorer that is not exact, or whose MASKs leave a row no room.
    """
    if scorer.method == "elbo":
        raise UserError("whole documents are scored exactly: choose the chain scorer")
    scorer = _fitting(scorer, model)
    room = model.max_tokens - scorer.right_masks
    windows = [rolling_windows(tokens, room) for tokens in documents]
    pairs = [window for part in windows for window in part]
    scored = score(model, pairs, scorer, progress)
    remaining = iter(scored.scores)
    sums = [sum(next(remaining).log_likelihood for _ in part) for part in windows]
    return sums, scored


def _warn(num_truncated: int, num_too_long: int, max_tokens: int) -> None:
    if num_truncated:
        log.warning("%d contexts were cut from the left to %d tokens", num_truncated, max_tokens)
    if num_too_long:
        log.warning(
            "%d continuations are longer than a row of %d tokens: they score -inf and never win",
            num_too_long,
            max_tokens,
        )
