"""A denoiser on the fact probe: four figures of the same sentences, never mixed.

- choice: the hidden answer has a strictly larger summed log probability than three wrong ones of
  its length; all four are read from one pass. By chance 25%.
- NLL: nats per token of the hidden answer, mean over the facts.
- exact: the answer decoded token by token, the surest first, is an accepted one. The model knows
  how many tokens the right answer has, which a free generation does not.
- contained: PopQA's own metric. The sentence is continued freely; an accepted answer stands in it.

Source: spec algorithms 4.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diffurefill.config import Stage, UserError
from diffurefill.decode.canvas import Canvas, Specials
from diffurefill.decode.generate import cut_at_eos, generate
from diffurefill.evaluate.facts.popqa import contains, is_exact
from diffurefill.evaluate.facts.probe import CHANCE, Fact, FactProbe
from diffurefill.evaluate.probes import is_causal
from diffurefill.evaluate.statistics import bootstrap_mean, proportion

Denoiser = Callable[..., Tensor]
Decode = Callable[[Sequence[int]], str]

FREE_TOKENS = 15
"""Written after the stem, as many as PopQA's own script lets a model write."""

SUREST_FIRST = Stage(num_passes=0, tokens_per_pass=1, temperature=(0.0, 0.0))
LEFT_TO_RIGHT = Stage(
    num_passes=0, tokens_per_pass=1, temperature=(0.0, 0.0), order="left_to_right"
)


@dataclass(frozen=True)
class FactScores:
    """Lists hold a value a fact, in the order of the probe."""

    probe: str
    """Digest of the probe."""
    relations: list[str]
    nll: list[float]
    """Nats per answer token."""
    num_tokens: list[int]
    choice: list[bool]
    exact: list[bool]
    contained: list[bool]
    decoded: list[str]
    """What stands in the place of the answer, by exact match's decoding."""
    continued: list[str]
    """What was written freely."""

    def values(self) -> dict[str, list[float]]:
        """Every headline by its name, as values a fact whose mean it is."""
        return {
            "choice": list(map(float, self.choice)),
            "nll": self.nll,
            "exact": list(map(float, self.exact)),
            "contained": list(map(float, self.contained)),
        }

    @property
    def token_nll(self) -> float:
        """Pooled over all answer tokens, so that long answers weigh more."""
        sums = (nll * n for nll, n in zip(self.nll, self.num_tokens, strict=True))
        return sum(sums) / sum(self.num_tokens)

    def by_relation(self) -> dict[str, dict[str, float]]:
        """{relation: {"facts", and every headline}}."""
        found = {}
        for relation in sorted(set(self.relations)):
            own = [i for i, name in enumerate(self.relations) if name == relation]
            means = {
                name: sum(values[i] for i in own) / len(own)
                for name, values in self.values().items()
            }
            found[relation] = {"facts": len(own), **means}
        return found

    def brief(self) -> dict[str, float]:
        """The headlines alone."""
        means = {name: sum(values) / len(values) for name, values in self.values().items()}
        return {**means, "token_nll": self.token_nll}

    def summary(self) -> dict[str, Any]:
        """Headlines with 95% intervals (Wilson's for shares, bootstrap for NLL), without items."""
        shares = {
            name: proportion(sum(right), len(right)).to_json()
            for name, right in (
                ("choice", self.choice),
                ("exact", self.exact),
                ("contained", self.contained),
            )
        }
        return {
            "probe": self.probe,
            "num_facts": len(self.nll),
            "choice_by_chance": CHANCE,
            **shares,
            "nll": bootstrap_mean(self.nll).to_json(),
            "token_nll": self.token_nll,
            "by_relation": self.by_relation(),
        }

    def to_json(self) -> dict[str, Any]:
        items = ("relations", "nll", "num_tokens", "choice", "exact", "contained")
        texts = ("decoded", "continued")
        return {**self.summary(), "items": {key: getattr(self, key) for key in items + texts}}


def score_facts(
    denoiser: Denoiser,
    probe: FactProbe,
    *,
    specials: Specials,
    device: torch.device,
    decode: Decode,
    batch_rows: int = 64,
) -> FactScores:
    """Every figure of one denoiser. `decode` turns ids from inside a text into text.

    Sentences of like length share a batch. Raises UserError for the autoregressive twin.
    """
    if is_causal(denoiser):
        raise UserError("a causal model fills no gaps: the fact probe is of a denoiser")
    facts, asked = probe.facts, _Asked(denoiser, specials, device, batch_rows)
    sums = asked.answers(facts)
    decoded = [decode(ids).strip() for ids in asked.decoded(facts)]
    continued = [decode(ids) for ids in asked.continued(facts)]
    num_tokens = [len(fact.answer) for fact in facts]
    return FactScores(
        probe=probe.digest,
        relations=[fact.relation for fact in facts],
        nll=[-row[0] / n for row, n in zip(sums, num_tokens, strict=True)],
        num_tokens=num_tokens,
        choice=[row[0] > max(row[1:]) for row in sums],
        exact=[is_exact(text, f.accepted) for text, f in zip(decoded, facts, strict=True)],
        contained=[contains(text, f.accepted) for text, f in zip(continued, facts, strict=True)],
        decoded=decoded,
        continued=continued,
    )


@dataclass(frozen=True)
class _Asked:
    """One denoiser, asked batch by batch; every answer comes back in the order of the facts."""

    denoiser: Denoiser
    specials: Specials
    device: torch.device
    batch_rows: int

    @torch.inference_mode()
    def answers(self, facts: Sequence[Fact]) -> list[list[float]]:
        """Summed log probability of the answer and of each distractor, in nats."""
        found: dict[int, list[float]] = {}
        for batch in self._batches([len(fact.ids) for fact in facts]):
            canvas = self._canvas([self._hidden(facts[i]) for i in batch])
            logits = self.denoiser(canvas.ids, canvas.doc_ids, canvas.fillable)
            log_p = logits.float().log_softmax(-1).double()
            lengths = [len(facts[i].answer) for i in batch]
            for i, rows in zip(batch, log_p.split(lengths), strict=True):
                choices = torch.tensor([facts[i].answer, *facts[i].distractors], device=self.device)
                found[i] = rows.gather(1, choices.T).sum(0).tolist()
        return [found[i] for i in range(len(facts))]

    def decoded(self, facts: Sequence[Fact]) -> list[list[int]]:
        """Ids in the place of the answer, the surest first, one a pass."""
        rows = [self._hidden(fact) for fact in facts]
        return self._filled(rows, SUREST_FIRST, [(len(f.answer), len(f.ids)) for f in facts])

    def continued(self, facts: Sequence[Fact]) -> list[list[int]]:
        """Ids after the stem, left to right, up to an EOS."""
        free = [self.specials.mask_id] * FREE_TOKENS
        rows = [[*fact.ids[: fact.start], *free] for fact in facts]
        found = self._filled(rows, LEFT_TO_RIGHT, [fact.start for fact in facts])
        return [cut_at_eos(ids, self.specials.eos_id) for ids in found]

    def _filled(self, rows: list[list[int]], stage: Stage, sizes: Sequence[Any]) -> list[list[int]]:
        found: dict[int, list[int]] = {}
        for batch in self._batches(sizes):
            canvas = self._canvas([rows[i] for i in batch])
            done = generate(self.denoiser, canvas, [stage], self.specials, seeds=[0] * len(batch))
            found |= zip(batch, canvas.filled(done.ids), strict=True)
        return [found[i] for i in range(len(rows))]

    def _batches(self, sizes: Sequence[Any]) -> Iterator[list[int]]:
        """Indices of rows, those of like size together."""
        order = sorted(range(len(sizes)), key=lambda i: (sizes[i], i))
        for at in range(0, len(order), self.batch_rows):
            yield order[at : at + self.batch_rows]

    def _hidden(self, fact: Fact) -> list[int]:
        hidden = [self.specials.mask_id] * len(fact.answer)
        return [*fact.ids[: fact.start], *hidden, *fact.ids[fact.stop :]]

    def _canvas(self, rows: Sequence[Sequence[int]]) -> Canvas:
        """Rows padded on the right; MASK is what may be filled."""
        T = max(map(len, rows))
        padding = [T - len(row) for row in rows]
        ids = torch.tensor(
            [[*row, *[self.specials.pad_id] * n] for row, n in zip(rows, padding, strict=True)]
        )
        doc_ids = torch.tensor(
            [[0] * len(row) + [-1] * n for row, n in zip(rows, padding, strict=True)]
        )
        canvas = Canvas(ids, ids == self.specials.mask_id, doc_ids.int())
        return canvas.to(self.device)
