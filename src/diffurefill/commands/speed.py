"""`diffurefill bench speed`: written tokens a second, beside autoregression with a KV cache."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from diffurefill.commands.common import progress, provenance_as_typed, say
from diffurefill.config import DecodeConfig, RunConfig, UserError

if TYPE_CHECKING:
    import torch
    from rich.table import Table

    from diffurefill.evaluate.speed import Contender, Timing

HF_SAME = "AR generate()"
"""Of transformers, at the same size."""


@dataclass
class BenchSpeed:
    """256 new tokens behind 32: one and eight a pass, draft and refill, and AR with a KV cache.

    `ms` is a pass, `bare` its forward pass alone, of the same rows and positions, `ratio` one over
    the other; `vs AR` compares tokens a second with `generate()` of transformers at the same size.
    `FLOPs` is the share of the time that the products would take at the device's peak, `reads` the
    share that reading all weights once a pass would take (from a cache that is faster).
    """

    preset: str = "stand-38m"
    """Whose model sizes are taken; its weights are drawn, for speed hangs on shapes alone."""
    config: Path | None = None
    """A TOML file laid over the preset; flags are laid over both."""
    batches: tuple[int, ...] = ()
    """Rows written at once; 1 and 32 on a GPU, 1 on a CPU."""
    num_tokens: int = 256
    """Tokens to write in every row."""
    hf: str | None = None
    """A given AR model beside ours: on the hub, in a folder, a .gguf file, or `smollm2`."""
    device: str | None = None
    """cpu, cuda, cuda:1 ...; the one that decoding takes by default."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of everyone's weights. auto: as generate takes it, float32 on a CPU, half of it on a GPU."""
    compile: bool = False
    """Draft and refill, and one or eight a pass, with compiled blocks."""
    repeats: int = 5
    """Timed runs; the median counts."""
    warmups: int = 2
    """Runs before them that are not timed."""
    seconds: float = 60.0
    """Run nobody again that has taken so long."""
    threads: int | None = None
    """Limit on CPU threads; all cores by default."""
    json: bool = False
    """Print one JSON object instead of the table."""
    out: Path | None = None
    """Write the figures there too, with what they were measured on."""
    settings: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)

    def run(self) -> int:
        from diffurefill.runtime import (
            default_device,
            require_device,
            require_writable,
            set_threads,
        )

        if min(self.num_tokens, self.repeats, *self.batches, 1) < 1 or self.warmups < 0:
            raise UserError(
                "--num-tokens, --repeats and --batches must be at least 1, --warmups at least 0"
            )
        if self.out is not None:
            require_writable(self.out)
        set_threads(self.threads)
        device = default_device() if self.device is None else require_device(self.device)
        figures = bench_speed(self, device)
        progress("")
        if self.out is not None:
            record = {**figures, **provenance_as_typed()}
            self.out.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
        if self.json:
            say(json.dumps(figures))
            return 0
        from rich.console import Console

        for batch in figures["batches"]:
            Console().print(speed_table(figures, batch))
        if figures["without_transformers"]:
            say("no figures of transformers: pip install 'diffurefill[hf]'")
        return 0


def bench_speed(options: BenchSpeed, device: torch.device) -> dict[str, Any]:
    """The figures of every batch size, each contender's over the same-size AR `generate()`."""
    import torch

    from diffurefill.evaluate.speed import time_in_turn
    from diffurefill.model.denoiser import num_parameters
    from diffurefill.runtime import writing_dtype

    has_hf = _has_transformers()
    if options.hf is not None and not has_hf:
        raise UserError("--hf needs transformers: pip install 'diffurefill[hf]'")
    batches = options.batches or ((1, 32) if device.type == "cuda" else (1,))
    dtype = writing_dtype(device, options.dtype)
    found: dict[str, Any] = {
        "preset": options.preset,
        "parameters": num_parameters(options.settings.model),
        "num_tokens": options.num_tokens,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "precision": str(dtype).removeprefix("torch."),
        "compiled": options.compile,
        "without_transformers": not has_hf,
        "batches": {},
    }
    given = None if options.hf is None else _given_model(options.hf, device, dtype)
    for num_rows in batches:
        contenders, bare_of = _contenders(options, device, dtype, num_rows, has_hf, given)
        times = time_in_turn(
            contenders,
            device,
            warmups=options.warmups,
            repeats=options.repeats,
            seconds=options.seconds,
            say=lambda line, num_rows=num_rows: progress(f"batch {num_rows}: {line}"),
        )
        rows = _figures(contenders, bare_of, times, num_rows)
        for name, shares in _limit_shares(options, device, dtype, contenders, times).items():
            if name in rows:
                rows[name] |= shares
        found["batches"][str(num_rows)] = rows
    return found


def _contenders(
    options: BenchSpeed,
    device: torch.device,
    dtype: torch.dtype,
    num_rows: int,
    has_hf: bool,
    given: Any,
) -> tuple[list[Contender], dict[str, str]]:
    """Everyone of one batch size; and, for our decoders, who makes their passes alone."""
    from dataclasses import replace

    from diffurefill.evaluate import speed
    from diffurefill.model.compiling import compile_for_writing

    model, n = options.settings.model, options.num_tokens
    denoiser = speed.random_model(replace(model, causal=False), device, dtype)
    if options.compile:
        compile_for_writing(denoiser)
    twin = speed.random_model(replace(model, causal=True), device, dtype)
    canvas = speed.random_canvas(model.vocab_size, num_rows, n, device)
    contenders: list[Contender] = []
    bare_of: dict[str, str] = {}
    for name, stages in (
        ("one token a pass", speed.ONE_PER_PASS),
        ("8 tokens a pass", speed.eight_per_pass(n)),
        ("draft 12 + refill 8", DecodeConfig().stages),
    ):
        progress(f"batch {num_rows}: {name}")
        ours, bare = speed.by_diffusion(name, denoiser, canvas, stages)
        contenders += [ours, bare]
        bare_of[ours.name] = bare.name
    contenders.append(speed.by_twin("AR, our twin", twin, canvas))
    if has_hf:
        same = speed.llama_like(model, speed.PROMPT_TOKENS + n, device, dtype)
        generates = speed.by_transformers(HF_SAME, same, num_rows, n)
        contenders.append(replace(generates, asked=speed.asked_of_ar(num_rows, num_rows * n)))
    if options.hf is not None:
        name = f"AR, {Path(options.hf).name}"
        contenders.append(speed.by_transformers(name, given, num_rows, n))
    return contenders, bare_of


def _given_model(where: str, device: torch.device, dtype: torch.dtype) -> Any:
    from diffurefill.evaluate.judge import load_causal_lm

    model, _ = load_causal_lm(where, dtype, what="--hf")
    model.generation_config.eos_token_id = None
    return model.to(device).eval()


def _figures(
    contenders: list[Contender],
    bare_of: dict[str, str],
    times: dict[str, Timing],
    num_rows: int,
) -> dict[str, Any]:
    """Tokens a second of all rows together; tokens of one row a forward pass."""
    speeds = {c.name: c.num_tokens / times[c.name].seconds for c in contenders}
    rows: dict[str, Any] = {}
    for c in contenders:
        if c.name in bare_of.values():
            continue
        t = times[c.name]
        rows[c.name] = {
            "num_passes": t.num_passes,
            "tokens_per_second": round(speeds[c.name], 1),
            "tokens_per_forward": round(c.num_tokens / num_rows / t.num_passes, 2),
            "ms_per_pass": round(1e3 * t.seconds / t.num_passes, 3),
            "seconds": round(t.seconds, 4),
            "cpu_seconds": round(t.cpu_seconds, 4),
            "runs": t.num_runs,
        }
        if c.name in bare_of:
            bare = times[bare_of[c.name]]
            rows[c.name]["ms_per_bare_forward"] = round(1e3 * bare.seconds / bare.num_passes, 3)
            rows[c.name]["pass_over_forward"] = round(t.seconds / bare.seconds, 3)
        if HF_SAME in speeds:
            rows[c.name]["vs_ar_generate"] = round(speeds[c.name] / speeds[HF_SAME], 3)
    return rows


def _limit_shares(
    options: BenchSpeed,
    device: torch.device,
    dtype: torch.dtype,
    contenders: list[Contender],
    times: dict[str, Timing],
) -> dict[str, dict[str, float]]:
    """How much of everyone's time the device's limits explain; of models of the preset's size."""
    from dataclasses import asdict

    from diffurefill.train.speed import least_seconds

    shares: dict[str, dict[str, float]] = {}
    for c in contenders:
        if c.asked is None:
            continue
        t, model = times[c.name], options.settings.model
        least = least_seconds(model, device, dtype, num_passes=t.num_passes, **asdict(c.asked))
        shares[c.name] = {
            "flop_limit_share": round(least.by_flops / t.seconds, 4),
            "read_limit_share": round(least.by_reads / t.seconds, 4),
        }
    return shares


def _has_transformers() -> bool:
    from importlib.util import find_spec

    return find_spec("transformers") is not None


def speed_table(figures: dict[str, Any], batch: str) -> Table:
    from rich.table import Table

    title = (
        f"batch {batch}: {figures['num_tokens']} new tokens a row, {figures['parameters']:,} "
        f"parameters, {figures['device']}, {figures['precision']}, {figures['threads']} threads"
        f"{', compiled blocks' if figures['compiled'] else ''}"
    )
    table = Table(box=None, title=title, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for column in (
        *("passes", "tok/s", "tok/pass", "ms", "bare", "ratio", "vs AR"),
        *("FLOPs", "reads"),
    ):
        table.add_column(column, justify="right")
    for name, row in figures["batches"][batch].items():
        table.add_row(
            name,
            str(row["num_passes"]),
            f"{row['tokens_per_second']:,.0f}",
            f"{row['tokens_per_forward']:g}",
            f"{row['ms_per_pass']:.2f}",
            *(
                f"{row[key]:.2f}" if key in row else "-"
                for key in ("ms_per_bare_forward", "pass_over_forward", "vs_ar_generate")
            ),
            *(
                f"{row[key]:.0%}" if key in row else "-"
                for key in ("flop_limit_share", "read_limit_share")
            ),
        )
    return table
