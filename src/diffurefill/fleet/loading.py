"""A trained model ready to write or to be probed, from wherever found.py finds it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from diffurefill.config import HELD_OUT, DecodeConfig, RunConfig, Stage, UserError
from diffurefill.copies import local_copies
from diffurefill.data.tokens.tokenizer import Tokenizer
from diffurefill.decode.autoregressive import LeftToRight, generate_left_to_right
from diffurefill.decode.batches import in_buckets
from diffurefill.decode.canvas import Canvas, Specials, infill
from diffurefill.decode.endings import Stop, Streamer
from diffurefill.decode.generate import Generation, Pass, generate
from diffurefill.decode.texts import Reader, WrittenText
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
from diffurefill.model.compiling import compile_for_writing
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

    def generate(self, prompts: Sequence[str], num_tokens: int, **wishes: Any) -> list[str]:
        """Each prompt with `num_tokens` more tokens, cut where the model ends the text.

        `wishes` as for `write`, which says more of each text.
        """
        return [written.text for written in self.write(prompts, num_tokens, **wishes)]

    def infill(self, text: str, **wishes: Any) -> str:
        """`text` with every [MASK*n] filled by n tokens; `wishes` as for `write_gaps`."""
        return self.write_gaps(text, **wishes)[0].text

    def write(
        self,
        prompts: Sequence[str],
        num_tokens: int,
        *,
        suffix: str = "",
        num_samples: int = 1,
        min_tokens: int = 0,
        stop: Sequence[str] = (),
        decode: DecodeConfig | None = None,
        seed: int = 0,
        views: Views = NO_VIEWS,
        streamer: Streamer | None = None,
    ) -> list[WrittenText]:
        """`num_samples` texts of each prompt in turn, row i with seed `seed + i`.

        suffix: text behind the `num_tokens`, which are then filled to the last.
        min_tokens: no EOS among the first so many; stop: the text ends before any of these, however
        short it is. streamer: follows a single text. Raises UserError for what does not go together
        or fit.
        """
        if num_tokens < 1:
            raise UserError(f"num_tokens is {num_tokens}: ask for at least 1")
        if not 0 <= min_tokens <= num_tokens:
            raise UserError(f"min_tokens {min_tokens} must lie within the {num_tokens} to write")
        if suffix and (stop or min_tokens):
            raise UserError(
                "what stands in front of a suffix has no end of its own: leave stop and min_tokens "
                "away, or the suffix"
            )
        behind = [self.tokenizer.encode_inner(_sound(suffix))] if suffix else []
        rows = [
            [given, num_tokens, *behind]
            for given in self.tokenizer.encode_batch([_sound(text) for text in _several(prompts)])
            for _ in range(_counted(num_samples))
        ]
        canvas = infill(rows, self.specials, max_tokens=self.config.data.row_length)
        reader = self._reader(_several(stop))
        wishes = {
            "forbid_eos": bool(suffix),
            "min_tokens": min_tokens,
            "stop_at_eos": True,
            "stop": reader.rule(),
        }
        done = self._filled(canvas, seed, decode=decode, views=views, streamer=streamer, **wishes)
        return reader.texts(canvas, done)

    def write_gaps(
        self,
        text: str,
        *,
        num_samples: int = 1,
        decode: DecodeConfig | None = None,
        seed: int = 0,
        views: Views = NO_VIEWS,
        streamer: Streamer | None = None,
    ) -> list[WrittenText]:
        """`text` with every [MASK*n] filled, `num_samples` times; row i has seed `seed + i`."""
        canvas = self.gaps(text, _counted(num_samples))
        wishes = {"decode": decode, "forbid_eos": True}
        done = self._filled(canvas, seed, views=views, streamer=streamer, **wishes)
        return self._reader(()).texts(canvas, done)

    def _filled(
        self,
        canvas: Canvas,
        seed: int,
        *,
        views: Views,
        streamer: Streamer | None,
        **wishes: Any,
    ) -> Generation:
        """`fill`, row i with seed `seed + i`: in batches of like length that fit into the memory,
        but where somebody follows, whom only one batch can show itself to."""

        def fill(some: Canvas, rows: Sequence[int]) -> Generation:
            seeds = [seed + row for row in rows]
            return self.fill(some, seed=seeds, views=views, streamer=streamer, **wishes)

        if views or streamer is not None:
            return fill(canvas, range(len(canvas.ids)))
        return in_buckets(canvas, fill, device=self.device, vocab_size=self.specials.vocab_size)

    def _reader(self, stop: Sequence[str]) -> Reader:
        t = self.tokenizer
        return Reader(t.decode, t.decode_inner, t.eos_id, tuple(stop))

    def gaps(self, text: str, num_rows: int = 1) -> Canvas:
        """The canvas of `num_rows` times one text whose gaps are written [MASK*n]; UserError when
        there is none."""
        parts = GAP.split(_sound(text))  # text, n, text, n, ..., text
        # What stands behind a gap is no text's beginning: no word starts there of itself.
        encode = [self.tokenizer.encode, *[self.tokenizer.encode_inner] * len(parts)]
        row = [int(part) if i % 2 else encode[i](part) for i, part in enumerate(parts) if part]
        if len(parts) == 1:
            raise UserError("the text has no gap: write [MASK*12] where 12 tokens are to be filled")
        return infill([row] * num_rows, self.specials, max_tokens=self.config.data.row_length)

    def fill(
        self,
        canvas: Canvas,
        *,
        decode: DecodeConfig | None = None,
        seed: int | Sequence[int] = 0,
        views: Views = NO_VIEWS,
        keep_trajectory: bool = False,
        forbid_eos: bool = False,
        min_tokens: int = 0,
        stop_at_eos: bool = False,
        stop: Stop | None = None,
        streamer: Streamer | None = None,
    ) -> Generation:
        """Fill a canvas with the run's own decoder, or with `decode`. Row i has seed `seed + i`, or
        one of as many.

        The others as for `decode.generate`. A causal model writes from left to right and always
        stops at EOS, at temperature 1 without truncation unless a `decode` of one left-to-right
        stage says otherwise, whatever decoder its run has; it has no drafts to stream.
        """
        seeds = [seed + i for i in range(len(canvas.ids))] if isinstance(seed, int) else seed
        canvas = canvas.to(self.device)
        if self.config.model.causal:
            if streamer is not None:
                raise UserError("a causal model has no drafts to stream: leave the streamer away")
            how = replace(left_to_right(decode), forbid_eos=forbid_eos, min_len=min_tokens)
            on_pass = (lambda _: None) if views else None
            done = self.continue_text(canvas, how, seeds, stop, on_pass)
        else:
            decode = decode or self.config.decode
            done = generate(
                self.denoiser,
                canvas,
                decode.stages,
                self.specials,
                seeds=seeds,
                block_length=decode.block_length,
                keep_trajectory=keep_trajectory or bool(views),
                streamer=streamer,
                forbid_eos=forbid_eos,
                min_tokens=min_tokens,
                stop_at_eos=stop_at_eos,
                stop=stop,
            )
        # A pass takes milliseconds here, too quick to be seen: it is shown afterwards.
        views.show(done.trajectory, self.tokenizer.decode_inner)
        return done

    def continue_text(
        self,
        canvas: Canvas,
        how: LeftToRight,
        seeds: Sequence[int],
        stop: Stop | None = None,
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
            stop=stop,
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


def left_to_right(decode: DecodeConfig | None) -> LeftToRight:
    """How a causal model draws under `decode`; UserError for what only a denoiser can do."""
    if decode is None:
        return LeftToRight()
    stage = decode.stages[0]
    (first, last), plain = stage.temperature, Stage(num_passes=0, tokens_per_pass=1)
    can = replace(plain, order="left_to_right", temperature=(first, last), min_p=stage.min_p)
    if decode != DecodeConfig(stages=(can,)) or first != last:
        raise UserError(
            "a causal model writes one token a pass from left to right and cannot draft or refill: "
            "leave the decode preset away, or take decode-left-to-right"
        )
    return LeftToRight(temperature=first, min_p=can.min_p)


def _several(texts: Sequence[str]) -> list[str]:
    if isinstance(texts, str):
        raise UserError(f"{texts!r} is one text: give a list of texts, such as [{texts!r}]")
    return list(texts)


def _sound(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError(
            f"a text holds bytes that are not UTF-8: {ascii(text)[:80]}; convert it first"
        ) from None
    return text


def _counted(num_samples: int) -> int:
    if num_samples < 1:
        raise UserError(f"num_samples is {num_samples}: ask for at least 1")
    return num_samples


def load(
    where: str,
    weights: str | None = None,
    dtype: torch.dtype | None = None,
    *,
    compile: bool = False,  # noqa: A002
) -> LoadedModel:
    """The model at `where`: a run's store, a folder of `train`, an exported folder or hub id.

    `weights` (ema, global, swa, last-3 ...) chooses among a run's; None takes its newest EMA.
    dtype: what they are cast to; None keeps float32, as to measure with.
    compile: write with compiled blocks, as docs/decoding.md says.
    Raises UserError where there is no model, or not these weights, or nothing can be compiled.
    """
    with local_copies() as cache:
        model = build(find(where, weights, cache), dtype=dtype)
    if compile:
        compile_for_writing(model.denoiser)
    return model


def load_from_run(run: Run, weights: str | None) -> LoadedModel:
    return build(found_in_run(run, weights))


def build(
    found: Found, device: torch.device | None = None, dtype: torch.dtype | None = None
) -> LoadedModel:
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
    denoiser = denoiser.to(device or default_device(), dtype).eval()
    probes = {} if found.probe is None else load_probes(found.probe, tokenizer.vocabulary_digest)
    return LoadedModel(found.name, denoiser, tokenizer, found.config, probes)
