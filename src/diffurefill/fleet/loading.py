"""A trained model ready to write or to be probed, from a run's store or a `train` folder."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from diffurefill.config import RunConfig, Stage, UserError
from diffurefill.data.tokens.tokenizer import Tokenizer
from diffurefill.decode.autoregressive import LeftToRight, generate_left_to_right
from diffurefill.decode.canvas import Canvas, Specials, continuation, infill
from diffurefill.decode.generate import Generation, Pass, cut_at_eos, generate
from diffurefill.decode.viewer import Viewer, replay
from diffurefill.evaluate.probes import (
    DecodingAccuracy,
    HeldOut,
    Probe,
    decoding_accuracy,
    held_out_ce,
)
from diffurefill.fleet import records
from diffurefill.fleet.alone import is_train_folder, read_folder
from diffurefill.fleet.averaging import FileAverager
from diffurefill.fleet.run import Run, open_run
from diffurefill.model.denoiser import Denoiser
from diffurefill.runtime import default_device
from diffurefill.train.checkpoint import load_weights

GAP = re.compile(r"\[MASK\*(\d+)\]")


@dataclass(eq=False)
class LoadedModel:
    """A denoiser with its tokenizer and its run's configuration."""

    name: str
    denoiser: Denoiser
    tokenizer: Tokenizer
    config: RunConfig
    probe: Probe

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
        watch: bool = False,
    ) -> list[str]:
        """Each prompt with `num_tokens` more tokens, cut where the model ends the text."""
        encoded = self.tokenizer.encode_batch(list(prompts))
        length = self.config.data.row_length
        canvas = continuation(encoded, num_tokens, self.specials, max_tokens=length)
        done = self.fill(canvas, stages=stages, seed=seed, watch=watch)
        rows = zip(canvas.rows(done.ids.cpu()), encoded, strict=True)
        cut = [cut_at_eos(ids, self.tokenizer.eos_id, 1 + len(given)) for ids, given in rows]
        return [self.tokenizer.decode(ids) for ids in cut]

    def infill(
        self,
        text: str,
        *,
        stages: Sequence[Stage] | None = None,
        seed: int = 0,
        watch: bool = False,
    ) -> str:
        """`text` with every [MASK*n] filled by n tokens."""
        done = self.fill(self.gaps(text), stages=stages, seed=seed, watch=watch, forbid_eos=True)
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
        watch: bool = False,
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
            on_pass = (lambda _: None) if watch else None
            done = self.continue_text(canvas, how, seeds, on_pass)
        else:
            done = generate(
                self.denoiser,
                canvas,
                stages or self.config.decode.stages,
                self.specials,
                seeds=seeds,
                forbid_eos=forbid_eos,
            )
        if watch:  # a pass takes milliseconds here, too quick to be seen: show it afterwards
            replay(done.trajectory, Viewer(self.decode_token))
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

    def decode_token(self, token: int) -> str:
        return self.tokenizer.decode_inner([token])

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


def load(where: str, weights: str = "ema") -> LoadedModel:
    """The newest model at `where`: a run's store (EMA or `weights="global"`) or a train folder."""
    if is_train_folder(Path(where)):
        found = read_folder(Path(where))
        return _loaded(where, found.weights, found.tokenizer_json, found.config, found.probe_path)
    with tempfile.TemporaryDirectory() as cache:
        return load_from_run(open_run(where, Path(cache)), weights)


def load_from_run(run: Run, weights: str) -> LoadedModel:
    """The run's newest weights of the kind; the global where no EMA has been published yet."""
    snapshot = run.snapshot()
    ema = snapshot.state.ema
    use_ema = weights == "ema" and ema is not None
    if use_ema and ema is not None:
        path = run.fetch(ema.ref)
    else:
        path = run.fetch_global(snapshot, FileAverager().apply_update)
    name = f"{'ema' if use_ema else 'global'}, generation {snapshot.state.gen}"
    probe = run.fetch(snapshot.version.ref(records.PROBE))
    return _loaded(name, load_weights(path), run.tokenizer_json, run.config, probe)


def _loaded(
    name: str,
    weights: dict[str, torch.Tensor],
    tokenizer_json: str,
    config: RunConfig,
    probe: Path,
) -> LoadedModel:
    denoiser = Denoiser(config.model)
    denoiser.load_state_dict(weights)
    denoiser = denoiser.to(default_device()).eval()
    tokenizer = Tokenizer.from_json(tokenizer_json)
    return LoadedModel(name, denoiser, tokenizer, config, Probe.load(probe))


def probe_models(places: Sequence[str], *, as_json: bool) -> None:
    """Print held-out CE and decoding accuracy of every model; a run shows global and EMA."""
    if not places:
        raise UserError("name at least one run or train folder to probe")
    models = []
    for where in places:
        kinds = ["global"] if is_train_folder(Path(where)) else ["global", "ema"]
        models += [load(where, kind) for kind in kinds]
    digests = {model.probe.digest for model in models}
    if len(digests) > 1:
        raise UserError(f"these models have different probes ({', '.join(sorted(digests))})")
    results = [(model.name, model.held_out(), model.accuracy()) for model in models]
    if as_json:
        print(json.dumps([_as_json(*result) for result in results]))
    else:
        Console().print(_table(results))


def _as_json(name: str, held_out: HeldOut, accuracy: DecodingAccuracy) -> dict[str, Any]:
    return {
        "model": name,
        "held_out": held_out.to_json(),
        "decoding_accuracy": {"token": accuracy.token, "pair": accuracy.pair},
    }


def _table(results: Sequence[tuple[str, HeldOut, DecodingAccuracy]]) -> Table:
    first = results[0][1]
    table = Table(title=f"probe {first.probe}: CE in nats per masked token")
    for column in ("model", "held-out CE", *(f"at {rate}" for rate in first.by_rate)):
        table.add_column(column, justify="left" if column == "model" else "right")
    table.add_column("decoding: token", justify="right")
    table.add_column("pair", justify="right")
    for name, held_out, accuracy in results:
        rates = [f"{ce:.3f}" for ce in held_out.by_rate.values()]
        shares = [f"{accuracy.token:.1%}", f"{accuracy.pair:.1%}"]
        table.add_row(name, f"{held_out.mean:.3f}", *rates, *shares)
    return table
