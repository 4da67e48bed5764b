"""A masked-diffusion model as lm-evaluation-harness sees it; needs no transformers.

The harness's base class splits context and continuation exactly as for its own models: the whole
is encoded, what is behind the context's tokens is the continuation, and trailing spaces of the
context move over. BOS stands first in every row, as in training.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lm_eval.api.model import TemplateLM  # pyrefly: ignore[missing-import]

from diffurefill.data.tokens.tokenizer import Tokenizer
from diffurefill.decode.canvas import Canvas, continuation
from diffurefill.decode.generate import Generation, cut_at_eos
from diffurefill.evaluate.harness.tasks import BENCHMARKS
from diffurefill.evaluate.likelihood.passes import Cost
from diffurefill.evaluate.likelihood.scorer import (
    Scored,
    Scorer,
    ScoringModel,
    score,
    score_rolling,
)
from diffurefill.evaluate.likelihood.screen import Item
from diffurefill.runtime import philox

MAX_NEW_TOKENS = 256
"""MASKs of an answer whose task does not say how many."""
GENERATE_TOKENS = 1 << 13
"""Tokens of the rows that are written side by side."""

ItemKey = tuple[str | None, int | str]
"""The harness's name of a task and its number of an item; where it gives none, the context."""
Fill = Callable[[Canvas, Sequence[int]], Generation]
"""Fills a canvas; one seed per row."""

log = logging.getLogger(__name__)


class DiffusionLM(TemplateLM):
    """Scores by a `Scorer`, writes by `fill`. `cost` and the counts add up over calls."""

    def __init__(
        self,
        model: ScoringModel,
        tokenizer: Tokenizer,
        scorer: Scorer,
        fill: Fill,
        *,
        seed: int = 0,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        super().__init__()
        self.model, self.own_tokenizer, self.scorer = model, tokenizer, scorer
        self.fill, self.seed, self.progress = fill, seed, progress
        self._device = model.device
        self.cost = Cost()
        self.num_truncated = self.num_too_long = 0
        self.items: dict[ItemKey, Item] = {}
        """Of the requests at hand; empty without a screen."""
        self.approximate: dict[ItemKey, list[bool]] | None = None if scorer.screen is None else {}
        """Of each item that came last, which of its choices have a screen's score."""

    @property
    def eot_token_id(self) -> int:
        return self.own_tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        return self.own_tokenizer.bos_id

    @property
    def max_length(self) -> int:
        return self.model.max_tokens

    @property
    def max_gen_toks(self) -> int:
        return MAX_NEW_TOKENS

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        return self.own_tokenizer.encode(string)

    def loglikelihood(
        self, requests: list[Any], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        """As the base class does, with progress of our own, and with the items for a screen."""
        self.items = {} if self.scorer.screen is None else items_of(requests)
        found = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        self.items = {}
        return found

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        pairs = [self._pair(request) for request in requests]
        items = list(self.items.values())
        scored = score(self.model, pairs, self.scorer, self.progress, items)
        self._add(scored)
        if self.approximate is not None:
            self.approximate = {
                key: [i in scored.approximate for i in item.choices]
                for key, item in self.items.items()
            }
        found = [(one.log_likelihood, one.is_greedy) for one in scored.scores]
        for (key, _context, _continuation), one in zip(requests, found, strict=True):
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, one)
        return found

    def _pair(self, request: tuple[Any, list[int], list[int]]) -> tuple[list[int], list[int]]:
        """Where a token runs over the end of the context nothing of the continuation is left, and
        nothing would be certain: the continuation is then encoded alone."""
        key, context, ids = request
        text = key[1] if key is not None else ""
        return context, ids or self.own_tokenizer.encode_inner(text)

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = True
    ) -> list[float]:
        documents = [self.tok_encode(request.args[0]) for request in requests]
        sums, scored = score_rolling(self.model, documents, self.scorer, self.progress)
        self._add(scored)
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[str]:
        texts, seeds = [""] * len(requests), self._seeds(requests)
        done = 0
        for num_tokens, batch in self._generation_batches(requests):
            prompts = [prompt for _, prompt in batch]
            answers = self._write(prompts, num_tokens, [seeds[i] for i, _ in batch])
            for (i, _), answer in zip(batch, answers, strict=True):
                context, options = requests[i].args
                texts[i] = cut_at_stops(answer, options.get("until") or [])
                self.cache_hook.add_partial("generate_until", (context, options), texts[i])
            done += len(batch)
            if self.progress is not None:
                self.progress(done, len(requests))
        return texts

    def _seeds(self, requests: Sequence[Any]) -> list[int]:
        """One for each request, of its text and how often that was asked before: whatever else is
        asked, an answer is the same. With one seed for all, all answers would have the same luck,
        which no number of items averages out."""
        times: Counter[str] = Counter()
        seeds = []
        for request in requests:
            context = request.args[0]
            key = (self.seed, "answer", context, times[context])
            seeds.append(int(philox(*key).integers(2**31)))
            times[context] += 1
        return seeds

    def _generation_batches(
        self, requests: Sequence[Any]
    ) -> Iterator[tuple[int, list[tuple[int, list[int]]]]]:
        """(tokens to write, [(index, prompt)]) of requests that want as many, short ones first."""
        waiting: dict[int, list[tuple[int, list[int]]]] = {}
        for i, request in enumerate(requests):
            context, options = request.args
            if options.get("do_sample"):
                log.warning("do_sample is ignored: answers are written by the decode stages")
            wanted = int(options.get("max_gen_toks", self.max_gen_toks))
            num_tokens = max(1, min(wanted, self.max_length // 2))
            if num_tokens < wanted:
                log.warning("%d tokens do not fit in a row: writing %d", wanted, num_tokens)
            room = self.max_length - 1 - num_tokens
            prompt = self.tok_encode(context)
            waiting.setdefault(num_tokens, []).append((i, prompt[max(0, len(prompt) - room) :]))
        for num_tokens, group in sorted(waiting.items()):
            group.sort(key=lambda item: len(item[1]))
            size = max(1, GENERATE_TOKENS // (1 + num_tokens + len(group[-1][1])))
            for start in range(0, len(group), size):
                yield num_tokens, group[start : start + size]

    def _write(
        self, prompts: Sequence[list[int]], num_tokens: int, seeds: Sequence[int]
    ) -> list[str]:
        specials = self.model.specials
        canvas = continuation(prompts, num_tokens, specials, max_tokens=self.max_length)
        done = self.fill(canvas.to(self.model.device), seeds)
        written = canvas.filled(done.ids.cpu())
        return [
            self.own_tokenizer.decode_inner(cut_at_eos(ids, self.eot_token_id)) for ids in written
        ]

    def _add(self, scored: Scored) -> None:
        self.cost = self.cost + scored.cost
        self.num_truncated += scored.num_truncated
        self.num_too_long += scored.num_too_long


def items_of(requests: Sequence[Any]) -> dict[ItemKey, Item]:
    """The harness's requests by item. Length-normalised where the task's reported metric is: by
    the characters of the choice, without the space before it."""
    places: dict[ItemKey, list[int]] = {}
    for i, request in enumerate(requests):
        item = request.args[0] if request.doc_id is None else request.doc_id
        places.setdefault((request.task_name, item), []).append(i)
    items = {}
    for key, choices in places.items():
        benchmark = BENCHMARKS.get(key[0] or "")
        lengths = None
        if benchmark is not None and benchmark.metric == "acc_norm":
            lengths = tuple(max(1, len(requests[i].args[1].lstrip())) for i in choices)
        items[key] = Item(tuple(choices), lengths)
    return items


def cut_at_stops(text: str, stops: str | Sequence[str]) -> str:
    """`text` up to the first of the stop strings."""
    for stop in [stops] if isinstance(stops, str) else stops:
        if stop:
            text = text.split(stop)[0]
    return text
