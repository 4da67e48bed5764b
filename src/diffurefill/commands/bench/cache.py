"""`diffurefill bench cache`: what kept keys and values cost a model; refused where too much."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from tyro.conf import Positional

from diffurefill.commands.common import progress, say
from diffurefill.config import UserError, load_preset

if TYPE_CHECKING:
    from diffurefill.decode.canvas import Canvas
    from diffurefill.decode.gate import CacheQuality
    from diffurefill.fleet.loading import LoadedModel


@dataclass(kw_only=True)
class BenchCache:
    """Kept keys and values (refresh_every) against exact decoding of a model, in its own nats.

    The same prompts with the same seeds, both ways. Refuses, with exit code 2, where a cost above
    --max-nats cannot be ruled out.
    """

    model: Positional[str]
    """A run's store, a folder made by `train` or `export`, or a hub id of either."""
    weights: str | None = None
    """Of a run: ema (by default), global, swa, or last-3 for the mean of its last three globals."""
    decode: str | None = None
    """A decode preset; the run's own by default."""
    refresh_every: int = 4
    """In all stages: one pass of so many computes every position."""
    max_nats: float = 0.05
    """What a token may cost: about a standard error of a comparison of decoders."""
    prompts: int = 64
    """Beginnings of rows of the held-out probe that came with the model; all where it has fewer."""
    prompt_tokens: int = 32
    """At most: a document may end before."""
    num_tokens: int = 128
    """Tokens to write behind each."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of the weights while they write. auto: float32 on a CPU, half of it on a GPU."""
    threads: int | None = None
    """Limit on CPU threads; all cores by default."""
    seed: int = 0
    """Of the first prompt; the next has the next number."""
    json: bool = False
    """Print one JSON object."""

    def run(self) -> int:
        from diffurefill.decode.gate import measure_cache
        from diffurefill.fleet.loading import load
        from diffurefill.runtime import default_device, set_threads, writing_dtype

        if (
            min(self.prompt_tokens, self.num_tokens) < 1
            or min(self.prompts, self.refresh_every) < 2
        ):
            raise UserError(
                "--prompts and --refresh-every must be at least 2, --prompt-tokens and "
                "--num-tokens 1"
            )
        set_threads(self.threads)
        model = load(self.model, self.weights, writing_dtype(default_device(), self.dtype))
        if model.config.model.causal:
            raise UserError("a causal model keeps its past exactly: there is nothing to measure")
        decode = model.config.decode if self.decode is None else load_preset(self.decode).decode
        canvas = _canvas(model, self.prompts, self.prompt_tokens, self.num_tokens)
        progress("writing both ways")
        quality = measure_cache(
            model.denoiser,
            canvas,
            [replace(stage, refresh_every=self.refresh_every) for stage in decode.stages],
            model.specials,
            seeds=range(self.seed, self.seed + len(canvas.ids)),
            block_length=decode.block_length,
            forbid_eos=True,
        )
        progress("")
        say(json.dumps(as_plain(quality)) if self.json else told(quality))
        quality.check(self.max_nats)
        if not self.json:
            say(f"within {self.max_nats:g} nats: refresh_every = {self.refresh_every} may be kept")
        return 0


def _canvas(model: LoadedModel, num_rows: int, prompt_tokens: int, num_tokens: int) -> Canvas:
    """The first document's first tokens of held-out rows, and what is to be written behind them."""
    import numpy as np

    from diffurefill.decode.canvas import continuation

    special, rows = model.specials, model.probe.head(num_rows)
    is_given = rows.doc_ids == rows.doc_ids[:, :1]
    is_given[:, prompt_tokens:] = False
    is_given &= np.asarray(special.emittable)[rows.ids] & (rows.ids != special.eos_id)
    prompts = [ids[given].tolist() for ids, given in zip(rows.ids, is_given, strict=True)]
    max_tokens = model.config.data.row_length
    return continuation(prompts, num_tokens, special, max_tokens=max_tokens).to(model.device)


def as_plain(quality: CacheQuality) -> dict[str, Any]:
    return {**asdict(quality), "cost": quality.cost}


def told(quality: CacheQuality) -> str:
    return (
        f"{quality.num_rows} texts: {quality.nll_exact:.3f} nats a token exactly, "
        f"{quality.nll_kept:.3f} with kept keys and values: {quality.cost:+.3f} +- "
        f"{quality.standard_error:.3f}\n"
        f"{quality.positions_ratio:.0%} of the positions computed, {quality.agreement:.0%} of the "
        "tokens are the same"
    )
