"""Rows of a run's text, made as a worker makes them, for the commands that show or time them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from diffurefill.config import RunConfig, UserError
from diffurefill.data.documents import Corpus, open_corpus
from diffurefill.data.encoding import with_encoder
from diffurefill.data.loader import Loader
from diffurefill.data.packing import PackingCounts, Position, Rows
from diffurefill.data.tokens.tokenizer import Tokenizer
from diffurefill.objective.corruption import Corrupted, corrupt
from diffurefill.train.loop import make_tokenizer
from diffurefill.train.metrics import packing_facts


def corrupted_rows(
    config: RunConfig, slot: int, step: int, num_rows: int
) -> tuple[Rows, Corrupted, Tokenizer]:
    """The slot's first rows in the mixture of `step`, masked as that step would mask them."""
    _require_in_range(step, num_rows)
    corpus, tokenizer = _opened(config)
    # As many rows as a real interval has: the padding at an interval's end is no usual sight.
    interval = config.fleet.local_steps * config.train.batch_rows
    interval_rows = -(-interval // num_rows) * num_rows
    with _loader(config, corpus, tokenizer, slot, step, interval_rows, num_rows) as loader:
        rows = next(loader)
    corrupted = corrupt(
        rows,
        config.objective,
        keys=[(config.seed, "mask", step, slot, row) for row in range(num_rows)],
        mask_id=tokenizer.mask_id,
        bos_id=tokenizer.bos_id,
    )
    return rows, corrupted, tokenizer


def packing_report(config: RunConfig, slot: int, step: int, num_rows: int) -> Iterator[str]:
    """Lines: how fast rows come, and what is in them."""
    _require_in_range(step, num_rows)
    began = time.perf_counter()
    corpus, tokenizer = _opened(config)
    yield (
        f"opened {corpus.num_units:,} units and a tokenizer of {tokenizer.num_pieces:,} pieces in "
        f"{time.perf_counter() - began:.1f} s"
    )
    began, cpu = time.perf_counter(), time.process_time()
    first, counts = 0.0, PackingCounts()
    with _loader(config, corpus, tokenizer, slot, step, num_rows, 1) as loader:
        for _ in range(num_rows):
            counts = next(loader).counts
            first = first or time.perf_counter() - began
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    yield (
        f"{counts.num_rows:,} rows, {counts.num_tokens:,} tokens in {seconds:.2f} s "
        f"({cpu:.2f} CPU s): {counts.num_tokens / max(cpu, 1e-9):,.0f} tokens per CPU second; "
        f"first row after {first:.2f} s"
    )
    yield from _facts_lines(packing_facts(counts))


def _require_in_range(step: int, num_rows: int) -> None:
    if num_rows < 1:
        raise UserError("--rows must be at least 1")
    if step < 0:
        raise UserError("--step must not be negative")


def _facts_lines(facts: dict[str, Any]) -> Iterator[str]:
    for name, value in facts.items():
        if isinstance(value, dict):
            shares = ", ".join(f"{key} {share:.1%}" for key, share in value.items())
            yield f"  {name:<20} {shares}"
        else:
            yield f"  {name:<20} {value:.2%}"


def _opened(config: RunConfig) -> tuple[Corpus, Tokenizer]:
    corpus = open_corpus(config.data)
    return corpus, with_encoder(make_tokenizer(config, corpus), config.data, corpus)


def _loader(
    config: RunConfig,
    corpus: Corpus,
    tokenizer: Tokenizer,
    slot: int,
    step: int,
    interval_rows: int,
    batch_rows: int,
) -> Loader:
    return Loader(
        corpus,
        tokenizer,
        data=config.data,
        seed=config.seed,
        slot=slot,
        interval_rows=interval_rows,
        batch_rows=batch_rows,
        position=Position(step=step),
        prefetch=0,
    )
