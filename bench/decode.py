"""Writing 256 tokens by draft and refill on CPU, beside autoregression and a plain loop.

    python bench/decode.py [--quick] [--threads N]

At batch 1, from random weights (speed hangs on shapes alone), in CPU seconds of one thread: medians
of interleaved repeats (full: 5 at 2.5M and stand-38m; --quick: 2 at 2.5M, 64 tokens). 12 draft and
8 refill passes, the card's settings. In fp32, as `generate` writes on a CPU; and once more with
everyone's weights in bfloat16, where this CPU multiplies those faster.

`pass_over_forward`: our decoder over its forward passes alone (the same rows, the head at the same
positions): what sampling, ordering and bookkeeping cost; 1.15 was aimed for.
`vs_ar_generate`: CPU seconds of `generate()` of transformers with its KV cache, LlamaForCausalLM of
the same width, depth, heads and vocabulary, over ours; 8 was aimed for. Null without transformers.
`vs_ar_twin`: the same over our own cached sampler.
`vs_plain_loop`: of the plain loop that the tests hold the decoder against (tests/decode/plain.py).
`tokens_per_forward`: tokens written by a pass.

At the top stands the worst of the sizes in fp32; `sizes` has each, `sizes_bfloat16` the others.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from _common import ROOT, report

sys.path.insert(0, str(ROOT))
from tests.decode.plain import PlainRow

from diffurefill.config import DecodeConfig, ModelConfig, load_preset
from diffurefill.evaluate import speed
from diffurefill.evaluate.speed import Contender
from diffurefill.runtime import set_threads
from diffurefill.train.speed import peak_of

CPU = torch.device("cpu")
STAGES = DecodeConfig().stages
SIZES = {
    "2.5M": ModelConfig(vocab_size=4096, width=192, layers=4, heads=3, ffn_width=512),
    "stand-38m": load_preset("stand-38m").model,
}
WORST = {"pass_over_forward": max, "vs_ar_generate": min, "vs_ar_twin": min, "vs_plain_loop": min,
         "tokens_per_forward": min}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    set_threads(options.threads)
    names = ["2.5M"] if options.quick else list(SIZES)
    num_tokens, repeats = (64, 2) if options.quick else (256, 5)
    dtypes = [torch.float32, *([torch.bfloat16] if multiplies_bfloat16_faster() else [])]
    measured = {
        dtype: {name: measure(SIZES[name], dtype, num_tokens, repeats) for name in names}
        for dtype in dtypes
    }
    sizes = measured[torch.float32]
    figures: dict[str, Any] = {
        key: worst((size[key] for size in sizes.values() if size[key] is not None), default=None)
        for key, worst in WORST.items()
    }
    figures |= {"num_tokens": num_tokens, "repeats": repeats, "sizes": sizes}
    figures["sizes_bfloat16"] = measured.get(torch.bfloat16)
    report("decode", figures, quick=options.quick)


def multiplies_bfloat16_faster() -> bool:
    fast, plain = (peak_of(CPU, dtype).flops for dtype in (torch.bfloat16, torch.float32))
    return fast > 1.5 * plain


def measure(
    config: ModelConfig, dtype: torch.dtype, num_tokens: int, repeats: int
) -> dict[str, Any]:
    denoiser = speed.random_model(config, CPU, dtype)
    twin = speed.random_model(replace(config, causal=True), CPU, dtype)
    canvas = speed.random_canvas(config.vocab_size, 1, num_tokens, CPU)
    ours, bare = speed.by_diffusion("draft and refill", denoiser, canvas, STAGES)
    plain = by_plain_loop(denoiser, canvas)
    cached = speed.by_twin("our twin", twin, canvas)
    contenders = [ours, bare, plain, cached]
    hf = None
    if importlib.util.find_spec("transformers") is not None:
        model = speed.llama_like(config, speed.PROMPT_TOKENS + num_tokens, CPU, dtype)
        hf = speed.by_transformers("generate()", model, 1, num_tokens)
        contenders.append(hf)
    times = speed.time_in_turn(contenders, CPU, warmups=1, repeats=repeats, seconds=1e9)
    cpu = {name: t.cpu_seconds for name, t in times.items()}
    passes = times[ours.name].num_passes
    return {
        "parameters": sum(p.numel() for p in denoiser.parameters()),
        "pass_over_forward": round(cpu[ours.name] / cpu[bare.name], 3),
        "vs_ar_generate": None if hf is None else round(cpu[hf.name] / cpu[ours.name], 2),
        "vs_ar_twin": round(cpu[cached.name] / cpu[ours.name], 2),
        "vs_plain_loop": round(cpu[plain.name] / cpu[ours.name], 2),
        "tokens_per_forward": round(num_tokens / passes, 2),
        "num_passes": passes,
        "ms_per_pass": round(1e3 * cpu[ours.name] / passes, 2),
        "cpu_seconds": {name: round(seconds, 4) for name, seconds in cpu.items()},
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

    return Contender("plain loop", run, sum(fillable))


if __name__ == "__main__":
    main()
