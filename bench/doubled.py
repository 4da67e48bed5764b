"""Does refilling lower doubled tokens? With the ban a pilot's table holds too few of them to tell.

    python bench/doubled.py DIFFUSION FOLDER [--seeds 4] [--threads 1]
    python bench/doubled.py --quick

DIFFUSION: a `train` folder or a run's store. FOLDER: texts as they come; an interrupted run goes on
from there. Every way of writing continues the pilot's 256 held-out prompts by 128 tokens, with each
of the seeds; nothing is judged. A pair of neighbours is doubled if both are the same id. Shares are
pooled over the samples, with 95% bootstrap intervals over the prompts; differences from the draft
(of the same ban) are paired by prompt. --quick: 8 prompts, one seed, half as many tokens, of a
barely trained model; prints only.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from _barely_trained import barely_trained
from _common import report
from diffurefill.config import Stage, load_preset
from diffurefill.evaluate.statistics import bootstrap_mean, paired_difference, pooled_items
from diffurefill.evaluate.text import distinct_share, doubled_pairs
from diffurefill.fleet.loading import load
from diffurefill.pilot.arms import Arm
from diffurefill.pilot.passages import held_out_passages
from diffurefill.pilot.writing import Pair, Task, Written, written
from diffurefill.runtime import set_threads

DECODE = "decode-small"
PROMPTS, PROMPT_TOKENS, NUM_TOKENS, BATCH_ROWS = 256, 32, 128, 32


def ways() -> Iterator[tuple[str, str, tuple[Stage, ...]]]:
    """Name, the draft it is compared with, and stages."""
    draft, refill = load_preset(DECODE).decode.stages
    free_draft, free_refill = (replace(stage, neighbour_ban=0.0) for stage in (draft, refill))
    yield "draft", "draft", (draft,)
    yield "draft + refill", "draft", (draft, refill)
    yield (
        "draft + refill, none back more than twice",
        "draft",
        (
            draft,
            replace(refill, remask_cap=2),
        ),
    )
    yield "draft + refill judged by shadows", "draft", (draft, replace(refill, confidence="shadow"))
    yield "draft, no ban", "draft, no ban", (free_draft,)
    yield "draft + refill, no ban", "draft, no ban", (free_draft, free_refill)
    yield "draft, no ban + refill with ban", "draft, no ban", (free_draft, refill)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("diffusion", nargs="?")
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    set_threads(options.threads)
    if options.quick:
        with tempfile.TemporaryDirectory() as folder:
            figures = measured(barely_trained(Path(folder)), Path(folder), 8, 1, NUM_TOKENS // 2)
    elif options.folder is None:
        parser.error("name a denoiser and a folder for its texts, or try it with --quick")
    else:
        figures = measured(options.diffusion, options.folder, PROMPTS, options.seeds, NUM_TOKENS)
    report("doubled", figures, quick=options.quick)


def measured(
    place: str, folder: Path, num_prompts: int, num_seeds: int, num_tokens: int
) -> dict[str, Any]:
    pair = Pair(load(place), None)
    passages = held_out_passages(
        pair.diffusion.config.data,
        pair.diffusion.tokenizer,
        num_passages=num_prompts,
        prompt_tokens=PROMPT_TOKENS,
        num_tokens=num_tokens,
    )
    tasks = [Task(passages, num_tokens, k * PROMPTS, BATCH_ROWS) for k in range(num_seeds)]
    say = partial(print, file=sys.stderr, flush=True)
    found: dict[str, dict[str, Any]] = {}
    shares: dict[str, NDArray[np.float64]] = {}
    for name, draft, stages in ways():
        arm = Arm(name=name, title=name, writer="diffusion", stages=stages)
        texts = [written(folder / str(task.seed), arm, pair, task, say) for task in tasks]
        shares[name], found[name] = counted(texts)
        difference = paired_difference(shares[name], shares[draft])
        found[name] |= {"against": draft, "difference": difference.to_json()}
        say(f"{name}: {found[name]['doubled']} of {found[name]['pairs']} doubled")
    return {
        "decode": DECODE,
        "num_prompts": len(passages),
        "seeds": num_seeds,
        "num_tokens": num_tokens,
        "weights": pair.digests["diffusion"],
        "ways": found,
    }


def counted(texts: list[Written]) -> tuple[NDArray[np.float64], dict[str, Any]]:
    """Of one way's texts, a Written for each seed: by prompt what its share pulls, and counts."""
    counts = np.array([[doubled_pairs(sample) for sample in one.samples] for one in texts])
    doubled, pairs = counts.sum(axis=0).T  # (prompts,) each
    shares = pooled_items(doubled, pairs)
    return shares, {
        "calls": texts[0].num_forward_passes,
        "doubled": int(doubled.sum()),
        "pairs": int(pairs.sum()),
        "share": bootstrap_mean(shares).to_json(),
        "distinct_2": float(np.mean([distinct_share(one.samples) for one in texts])),
    }


if __name__ == "__main__":
    main()
