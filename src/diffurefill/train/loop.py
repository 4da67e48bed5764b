"""A model in training: weights, optimiser, rows. Used alone by `train`, and by a fleet's worker."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from diffurefill.config import RunConfig, UserError
from diffurefill.data.documents import Corpus, training_texts
from diffurefill.data.encoding import with_encoder
from diffurefill.data.loader import Loader
from diffurefill.data.packing import Position, Rows
from diffurefill.data.spans.collocations import Collocations
from diffurefill.data.tokens.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from diffurefill.model.compiling import (
    code_folder,
    compile_blocks,
    run_eagerly,
    why_eager,
    why_not_compiled,
)
from diffurefill.model.denoiser import Denoiser
from diffurefill.model.fastest import fastest_backend
from diffurefill.optim.adamw import build_optimizer
from diffurefill.runtime import default_device, training_dtype
from diffurefill.train.metrics import IntervalMetrics
from diffurefill.train.micro_batch import micro_batch
from diffurefill.train.speed import StepClock, Work, speed_facts
from diffurefill.train.step import StepResult, train_step
from diffurefill.train.timing import is_compiled

TOKENIZER_CHARS = 8_000_000
"""Text a BPE is trained on: merges of a few thousand pieces do not change with more."""


class Trainer:
    """Takes optimiser steps on one slot's rows.

    `interval_steps` steps make an interval, at whose end the packer holds nothing open: there a
    slot's cursor is its whole position. Masks are keyed by (seed, step, slot, row), so a restart
    gives the same run, and another micro-batch size does but for rounding.
    """

    def __init__(
        self,
        config: RunConfig,
        corpus: Corpus,
        tokenizer: Tokenizer,
        *,
        slot: int,
        interval_steps: int,
        device: torch.device | None = None,
        report: Callable[[str], None] = lambda line: None,
        rows_before: int | None = None,
    ) -> None:
        """`device`: None takes a GPU where there is one. `report` takes the lines that say how the
        step is computed here. `rows_before`: at once, in the run that this one goes on with."""
        self.config, self.slot = config, slot
        self.tokenizer = with_encoder(tokenizer, config.data, corpus)
        self.device = default_device() if device is None else device
        self.at_once = micro_batch(config, self.device, rows_before)
        self.model = Denoiser(config.model).to(self.device)
        self.optimizer = build_optimizer(self.model, config.optim)
        self.step = 0
        self._corpus = corpus
        self._interval_rows = interval_steps * config.train.batch_rows
        self._loader: Loader | None = None
        self.position: Position | None = None
        self._metrics = IntervalMetrics(config.optim.clip_norm)
        self._report, self._is_ready = report, False
        self._data_seconds, self._clock, self.work = 0.0, StepClock(self.device), Work()

    def load_weights(self, tensors: dict[str, Tensor], *, step: int) -> None:
        """Replace the weights and the step. The optimiser's moments stay (spec algorithms 3.5)."""
        self.model.load_state_dict(tensors)
        self.step = step

    def reset_optimizer(self) -> None:
        self.optimizer = build_optimizer(self.model, self.config.optim)

    def seek(self, position: Position | None) -> None:
        """Read rows from `position` on; None is the slot's beginning.

        An interval that begins now has the mixture of the present step; one that was begun
        elsewhere keeps its own.
        """
        self.close()
        position = position or Position()
        if position.num_rows == 0:
            position = replace(position, step=self.step)
        self.position = position
        self.take_metrics()
        self._loader = Loader(
            self._corpus,
            self.tokenizer,
            data=self.config.data,
            seed=self.config.seed,
            slot=self.slot,
            interval_rows=self._interval_rows,
            batch_rows=self.config.train.batch_rows,
            position=position,
        )

    def take_step(self) -> StepResult:
        assert self._loader is not None, "seek before the first step"
        self._clock.begin()
        began = time.perf_counter()
        rows = next(self._loader)
        self._data_seconds += time.perf_counter() - began
        if not self._is_ready:
            self._make_ready(rows)
            self._clock = StepClock(self.device)  # what was tried out is no part of a step
            self._clock.begin()
        self.step += 1
        result = self._take_step_on(rows)
        self._clock.end()
        self.work.add(result, rows, causal=self.config.model.causal)
        self._metrics.add(result, rows.counts, self.step, self.position)
        self.position = rows.position
        return result

    def _take_step_on(self, rows: Rows) -> StepResult:
        try:
            return self._train_step(rows)
        except RuntimeError as error:
            reason = why_not_compiled(error)
            if reason is None or not is_compiled(self.model):
                raise
            self._report(f"blocks: eager, for they did not compile here ({reason})")
        # Blocks compile on their way forward or back, before a weight has moved.
        run_eagerly(self.model)
        self.optimizer.zero_grad()
        return self._train_step(rows)

    def _train_step(self, rows: Rows) -> StepResult:
        return train_step(
            self.model,
            self.optimizer,
            rows,
            self.config,
            step=self.step,
            keys=[
                (self.config.seed, "mask", self.step, self.slot, row)
                for row in range(len(rows.ids))
            ],
            mask_id=self.tokenizer.mask_id,
            bos_id=self.tokenizer.bos_id,
            at_once=self.at_once,
        )

    def _make_ready(self, rows: Rows) -> None:
        """Before the first step: what can only be decided on this device, on rows as they are."""
        config, device = self.config, self.device
        reason = why_eager(device, config.train.compile)
        if reason is None:
            compile_blocks(self.model)
            self._report(f"blocks: compiled, with code kept in {code_folder()}")
        elif config.train.compile == "on" or device.type == "cuda":
            self._report(f"blocks: eager, for {reason}")
        if device.type == "cuda" and self.model.attention_backend is None:
            choice = fastest_backend(
                device,
                torch.from_numpy(rows.doc_ids[: self.at_once.rows]),
                heads=config.model.heads,
                head_dim=config.model.width // config.model.heads,
                dtype=training_dtype(device, config.train.precision) or torch.float32,
                causal=config.model.causal,
            )
            self.model.attention_backend = choice.backend
            self._report(choice.describe())
        self._is_ready = True

    def take_metrics(self) -> dict[str, Any]:
        """What the steps since the last call, or since `seek`, were like, and how fast."""
        facts = self._metrics.facts()
        seconds = self._clock.take()
        if self.work.steps:
            facts |= speed_facts(self.config, self.device, self.work, seconds)
            facts |= self.how()
        facts["data_wait_share"] = self._data_seconds / max(seconds, 1e-9)
        self._data_seconds, self.work = 0.0, Work()
        if self.position is not None:
            cursors = self.position.cursor.sources
            facts["epochs"] = {name: cursor.epoch for name, cursor in sorted(cursors.items())}
        self._metrics = IntervalMetrics(self.config.optim.clip_norm)
        return facts

    def how(self) -> dict[str, Any]:
        """How the step is computed on this machine, for a log."""
        return {
            "blocks": "compiled" if is_compiled(self.model) else "eager",
            "attention": self.model.attention_backend or "by rule",
            "rows_at_once": self.at_once.rows,
        }

    def parameters(self) -> dict[str, Tensor]:
        """The weights themselves, where they are."""
        return dict(self.model.state_dict())

    def weights(self) -> dict[str, Tensor]:
        return {name: t.detach().cpu() for name, t in self.model.state_dict().items()}

    def close(self) -> None:
        if self._loader is not None:
            self._loader.close()
            self._loader = None


def make_tokenizer(config: RunConfig, corpus: Corpus) -> Tokenizer:
    """The tokenizer that `data.tokenizer` asks for, with its phrase tokens; a trained one never
    sees held-out text.

    Raises UserError when the model's vocabulary has no room for it.
    """
    data = config.data
    if data.tokenizer == "train":
        texts = training_texts(corpus, data, TOKENIZER_CHARS)
        tokenizer = train_tokenizer(texts, data.tokenizer_pieces)
    else:
        tokenizer = load_tokenizer(data.tokenizer)
    if data.phrase_tokens:
        phrases = Collocations.load(data.collocations).bigrams(data.phrase_tokens)
        tokenizer = tokenizer.with_phrases(phrases)
    tokenizer.require_fits(config.model.vocab_size)
    return tokenizer


def initial_weights(config: RunConfig) -> dict[str, Tensor]:
    """The run's first weights, a function of the seed alone."""
    model = Denoiser(config.model)
    model.init_weights(torch.Generator().manual_seed(config.seed))
    return dict(model.state_dict())


def require_corpus(corpus: Corpus, fingerprint: str, where: str) -> None:
    """Cursors count documents, so a run must find the very corpus it was made with."""
    if corpus.fingerprint != fingerprint:
        raise UserError(
            f"the text sources here are not those of {where}: the files (for python: the "
            "interpreter's version) must be the same on every machine of a run"
        )
