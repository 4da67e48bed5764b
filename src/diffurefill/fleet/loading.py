"""A trained model ready to write or to be probed, from wherever found.py finds it."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from diffurefill.config import HELD_OUT, RunConfig, Stage, UserError
from diffurefill.data.tokens.tokenizer import Tokenizer
from diffurefill.decode.autoregressive import LeftToRight, generate_left_to_right
from diffurefill.decode.canvas import Canvas, Specials, continuation, infill
from diffurefill.decode.generate import Generation, Pass, cut_at_eos, generate
from diffurefill.decode.view.views import Views
from diffurefill.evaluate.probe_sets import load_probes
from diffurefill.evaluate.probes import (
    DecodingAccuracy,
    HeldOut,
    Probe,
    decoding_accuracy,
    held_out_ce,
)
from diffurefill.fleet.found import Found, find, found_in_run
from diffurefill.fleet.run import Run
from diffurefill.model.denoiser import Denoiser
from diffurefill.runtime import default_device
from diffurefill.train.checkpoint import load_weights, schema
from diffurefill.train.tensorfile import require_schema, schema_of

NO_VIEWS = Views()
GAP = re.compile(r"\[MASK\*(\d+)\]")


@dataclass(eq=False)
class LoadedModel:
    """A denoiser with its tokenizer and its run's configuration."""

    name: str
    denoiser: Denoiser
    tokenizer: Tokenizer
    config: RunConfig
    probes: dict[str, Probe]
    """The run's probe sets, held-out first; none for imported weights."""

    @property
    def probe(self) -> Probe:
        """The held-out one."""
        if not self.probes:
            raise UserError(f"{self.name} came without held-out text: there is nothing to probe on")
        return self.probes[HELD_OUT]

    @property
    def device(self) -> torch.device:
        return self.denoiser.embedding.weight.device

    @cached_property
    def specials(self) -> Specials:
        t = self.tokenizer
        emittable = t.emittable(self.config.model.vocab_size)
        return Specials(t.bos_id, t.eos_id, t.mask_id, t.pad_id, emittable)

    def generate(
        self,
        prompts: Sequence[str],
        num_tokens: int,
        *,
        stages: Sequence[Stage] | None = None,
        seed: int = 0,
        views: Views = NO_VIEWS,
    ) -> list[str]:
        """Each prompt with `num_tokens` more tokens, cut where the model ends the text."""
        encoded = self.tokenizer.encode_batch(list(prompts))
        length = self.config.data.row_length
        canvas = continuation(encoded, num_tokens, self.specials, max_tokens=length)
        done = self.fill(canvas, stages=stages, seed=seed, views=views)
        rows = zip(canvas.rows(done.ids.cpu()), encoded, strict=True)
        cut = [cut_at_eos(ids, self.tokenizer.eos_id, 1 + len(given)) for ids, given in rows]
        return [self.tokenizer.decode(ids) for ids in cut]

    def infill(
        self,
        text: str,
        *,
        stages: Sequence[Stage] | None = None,
        seed: int = 0,
        views: Views = NO_VIEWS,
    ) -> str:
        """`text` with every [MASK*n] filled by n tokens."""
        done = self.fill(self.gaps(text), stages=stages, seed=seed, views=views, forbid_eos=True)
        return self.tokenizer.decode(done.ids[0].tolist())

    def gaps(self, text: str) -> Canvas:
        """The canvas of one text whose gaps are written [MASK*n]; UserError when there is none."""
        parts = GAP.split(text)  # text, n, text, n, ..., text
        # What stands behind a gap is no text's beginning: no word starts there of itself.
        encode = [self.tokenizer.encode, *[self.tokenizer.encode_inner] * len(parts)]
        row = [int(part) if i % 2 else encode[i](part) for i, part in enumerate(parts) if part]
        if len(parts) == 1:
            raise UserError("the text has no gap: write [MASK*12] where 12 tokens are to be filled")
        return infill([row], self.specials, max_tokens=self.config.data.row_length)

    def fill(
        self,
        canvas: Canvas,
        *,
        stages: Sequence[Stage] | None = None,
        seed: int = 0,
        views: Views = NO_VIEWS,
        forbid_eos: bool = False,
    ) -> Generation:
        """Fill a canvas with the run's own decoder, or with `stages`. Row i has seed `seed + i`.

        A causal model writes from left to right, at temperature 1 without truncation unless one
        left-to-right stage says otherwise.
        """
        seeds = [seed + i for i in range(len(canvas.ids))]
        canvas = canvas.to(self.device)
        if self.config.model.causal:
            how = replace(left_to_right(stages), forbid_eos=forbid_eos)
            on_pass = (lambda _: None) if views else None
            done = self.continue_text(canvas, how, seeds, on_pass)
        else:
            done = generate(
                self.denoiser,
                canvas,
                stages or self.config.decode.stages,
                self.specials,
                seeds=seeds,
                block_length=0 if stages else self.config.decode.block_length,
                forbid_eos=forbid_eos,
            )
        # A pass takes milliseconds here, too quick to be seen: it is shown afterwards.
        views.show(done.trajectory, self.tokenizer.decode_inner)
        return done

    def continue_text(
        self,
        canvas: Canvas,
        how: LeftToRight,
        seeds: Sequence[int],
        on_pass: Callable[[Pass], None] | None = None,
    ) -> Generation:
        """What the autoregressive twin writes, one token a pass."""
        return generate_left_to_right(
            self.denoiser,
            canvas,
            self.specials,
            how,
            num_layers=self.config.model.layers,
            seeds=seeds,
            on_pass=on_pass,
        )

    def held_out(self) -> HeldOut:
        return held_out_ce(
            self.denoiser, self.probe, mask_id=self.tokenizer.mask_id, device=self.device
        )

    def accuracy(self) -> DecodingAccuracy:
        passes = self.config.probe.decoding_passes
        return decoding_accuracy(
            self.denoiser, self.probe, specials=self.specials, device=self.device, num_passes=passes
        )


def left_to_right(stages: Sequence[Stage] | None) -> LeftToRight:
    """How a causal model draws under `stages`; UserError for those that only a denoiser can do."""
    if not stages:
        return LeftToRight()
    (first, last), plain = stages[0].temperature, Stage(num_passes=0, tokens_per_pass=1)
    can = replace(plain, order="left_to_right", temperature=(first, last), min_p=stages[0].min_p)
    if list(stages) != [can] or first != last:
        raise UserError(
            "a causal model writes one token a pass from left to right and cannot draft or refill: "
            "leave the decode preset away, or take decode-left-to-right"
        )
    return LeftToRight(temperature=first, min_p=can.min_p)


def load(where: str, weights: str | None = None) -> LoadedModel:
    """The model at `where`: a run's store, a folder of `train`, an exported folder or hub id.

    `weights` (ema, global, swa, last-3 ...) chooses among a run's; None takes its newest EMA.
    Raises UserError where there is no model, or not these weights.
    """
    with tempfile.TemporaryDirectory() as cache:
        return build(find(where, weights, Path(cache)))


def load_from_run(run: Run, weights: str | None) -> LoadedModel:
    return build(found_in_run(run, weights))


def build(found: Found, device: torch.device | None = None) -> LoadedModel:
    """The model of files that were found; UserError where they do not belong together."""
    config, tokenizer = found.config.model, found.tokenizer
    tokenizer.require_fits(config.vocab_size)
    with torch.device("meta"):
        expected = schema_of(Denoiser(config).state_dict())
    try:
        require_schema(schema(found.weights), expected, found.name)
    except ValueError as error:
        raise UserError(
            f"the weights are of another model than the configuration ({error})"
        ) from None
    denoiser = Denoiser(config)
    denoiser.load_state_dict(load_weights(found.weights))
    denoiser = denoiser.to(device or default_device()).eval()
    probes = {} if found.probe is None else load_probes(found.probe, tokenizer.vocabulary_digest)
    return LoadedModel(found.name, denoiser, tokenizer, found.config, probes)
