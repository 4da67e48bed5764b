"""Writing 256 tokens by draft and refill on CPU, beside autoregression and a plain loop.

    python bench/decode.py [--quick] [--threads N]

At batch 1, from random weights (speed hangs on shapes alone), in CPU seconds of one thread: medians
of interleaved repeats (full: 5 at 2.5M and stand-38m; --quick: 2 at 2.5M, 64 tokens). With more
threads in seconds by the clock, which a busy machine blurs, for CPU seconds add up what the threads
share; `basis` says which, and the result file is another one. 12 draft and 8 refill passes, the
card's settings. In fp32, as `generate` writes on a CPU; and once more with everyone's weights in
bfloat16, where this CPU multiplies those faster.

`pass_over_forward`: our decoder over its forward passes alone (the same rows, the head at the same
positions): what sampling, ordering and bookkeeping cost; 1.15 was aimed for.
`vs_ar_generate`: seconds of `generate()` of transformers with its KV cache, LlamaForCausalLM of the
same width, depth, heads and vocabulary, over ours; 8 was aimed for. Null without transformers.
`vs_ar_generate_at_peak`: the same if our passes took no longer than their products at this CPU's
peak (a product of 1024 x 1024): what exact passes could reach at the most.
`vs_ar_twin`: the same over our own cached sampler.
`vs_plain_loop`: of the plain loop that the tests hold the decoder against (tests/decode/plain.py).
`tokens_per_forward`: tokens written by a pass.
`vs_exact_kept`, `vs_ar_generate_kept`: seconds of our exact decoder, and of `generate()`, over ours
with keys and values kept for three passes of four (refresh_every = 4 in both stages);
`positions_kept`: the share of the exact decoder's positions that it computes. It is approximate,
and random weights say nothing on what it does to a text: `bench pilot` has an arm for that.
`vs_eager_compiled`, `forward_vs_eager_compiled`: seconds of our decoder, and of its forward passes
alone, over those with compiled blocks. Null without a C++ compiler, and with --quick.

At the top stands the worst of the sizes in fp32; `sizes` has each, `sizes_bfloat16` the others.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

from _common import ROOT, report

sys.path.insert(0, str(ROOT))
from tests.decode.plain import PlainRow

from diffurefill.config import DecodeConfig, ModelConfig, Stage, load_preset
from diffurefill.decode.generate import Generation, generate
from diffurefill.evaluate import speed
from diffurefill.evaluate.speed import Contender
from diffurefill.model.compiling import compile_for_writing, why_eager
from diffurefill.runtime import set_threads
from diffurefill.train.speed import least_seconds, peak_of

CPU = torch.device("cpu")
STAGES = DecodeConfig().stages
SIZES = {
    "2.5M": ModelConfig(vocab_size=4096, width=192, layers=4, heads=3, ffn_width=512),
    "stand-38m": load_preset("stand-38m").model,
}
KEPT = [replace(stage, refresh_every=4) for stage in STAGES]
WORST = {"pass_over_forward": max, "vs_ar_generate": min, "vs_ar_generate_at_peak": min,
         "vs_ar_twin": min, "vs_plain_loop": min,
         "tokens_per_forward": min, "vs_exact_kept": min, "vs_ar_generate_kept": min,
         "positions_kept": max, "vs_eager_compiled": min,
         "forward_vs_eager_compiled": min}  # fmt: skip


OURS, KEEPING, COMPILED = "draft and refill", "draft and refill, kept", "draft and refill, compiled"
PLAIN, TWIN, HF = "plain loop", "our twin", "generate()"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    set_threads(options.threads)
    names = ["2.5M"] if options.quick else list(SIZES)
    num_tokens, repeats = (64, 2) if options.quick else (256, 5)
    compiles = not options.quick and why_eager(CPU, "on") is None
    by_clock = options.threads > 1
    dtypes = [torch.float32, *([torch.bfloat16] if multiplies_bfloat16_faster() else [])]
    measured = {
        dtype: {
            name: measure(SIZES[name], dtype, num_tokens, repeats, by_clock, compiles)
            for name in names
        }
        for dtype in dtypes
    }
    sizes = measured[torch.float32]
    figures: dict[str, Any] = {
        key: worst((size[key] for size in sizes.values() if size[key] is not None), default=None)
        for key, worst in WORST.items()
    }
    figures |= {"basis": "seconds by the clock" if by_clock else "CPU seconds"}
    figures |= {"num_tokens": num_tokens, "repeats": repeats, "sizes": sizes}
    figures["sizes_bfloat16"] = measured.get(torch.bfloat16)
    name = f"decode_{options.threads}_threads" if by_clock else "decode"
    report(name, figures, quick=options.quick)


def multiplies_bfloat16_faster() -> bool:
    fast, plain = (peak_of(CPU, dtype).flops for dtype in (torch.bfloat16, torch.float32))
    return fast > 1.5 * plain


def measure(
    config: ModelConfig,
    dtype: torch.dtype,
    num_tokens: int,
    repeats: int,
    by_clock: bool,
    compiles: bool,
) -> dict[str, Any]:
    denoiser = speed.random_model(config, CPU, dtype)
    twin = speed.random_model(replace(config, causal=True), CPU, dtype)
    canvas = speed.random_canvas(config.vocab_size, 1, num_tokens, CPU)

    def write(stages: Sequence[Stage]) -> Generation:
        known = speed.specials(config.vocab_size)
        return generate(denoiser, canvas, stages, known, seeds=[0], forbid_eos=True)

    ours, bare = speed.by_diffusion(OURS, denoiser, canvas, STAGES)
    contenders = [ours, bare, by_plain_loop(denoiser, canvas), speed.by_twin(TWIN, twin, canvas)]
    contenders.append(Contender(KEEPING, lambda: write(KEPT).num_forward_passes, num_tokens))
    if compiles:
        compiled = speed.random_model(config, CPU, dtype)
        compile_for_writing(compiled)
        contenders += speed.by_diffusion(COMPILED, compiled, canvas, STAGES)
    if importlib.util.find_spec("transformers") is not None:
        model = speed.llama_like(config, speed.PROMPT_TOKENS + num_tokens, CPU, dtype)
        contenders.append(speed.by_transformers(HF, model, 1, num_tokens))

    times = speed.time_in_turn(contenders, CPU, warmups=1, repeats=repeats, seconds=1e9)
    taken = {name: t.seconds if by_clock else t.cpu_seconds for name, t in times.items()}

    def ratio(name: str, over: str) -> float | None:
        return round(taken[name] / taken[over], 3) if {name, over} <= set(taken) else None

    passes = times[OURS].num_passes
    least = least_seconds(config, CPU, dtype, num_passes=passes, **asdict(ours.asked))
    taken["products at the peak"] = least.by_flops
    return {
        "parameters": sum(p.numel() for p in denoiser.parameters()),
        "pass_over_forward": ratio(OURS, bare.name),
        "vs_ar_generate": ratio(HF, OURS),
        "vs_ar_generate_at_peak": ratio(HF, "products at the peak"),
        "vs_ar_twin": ratio(TWIN, OURS),
        "vs_plain_loop": ratio(PLAIN, OURS),
        "vs_exact_kept": ratio(OURS, KEEPING),
        "vs_ar_generate_kept": ratio(HF, KEEPING),
        "positions_kept": round(write(KEPT).num_positions / write(STAGES).num_positions, 3),
        "vs_eager_compiled": ratio(OURS, COMPILED),
        "forward_vs_eager_compiled": ratio(bare.name, f"{COMPILED}, forward passes alone"),
        "tokens_per_forward": round(num_tokens / passes, 2),
        "num_passes": passes,
        "ms_per_pass": round(1e3 * taken[OURS] / passes, 2),
        "seconds": {name: round(seconds, 4) for name, seconds in taken.items()},
    }


def by_plain_loop(denoiser: Any, canvas: Any) -> Contender:
    allowed = np.asarray(speed.specials(denoiser.config.vocab_size).emittable).copy()
    allowed[speed.EOS] = False
    ids, fillable = canvas.ids[0].tolist(), canvas.fillable[0].tolist()

    def run() -> int:
        with torch.inference_mode():
            row = PlainRow(denoiser, ids, fillable, allowed, 0)
            row.run(STAGES, block_length=0)
        return len(row.passes)

    return Contender(PLAIN, run, sum(fillable))


if __name__ == "__main__":
    main()
