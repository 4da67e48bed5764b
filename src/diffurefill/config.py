"""Every configuration dataclass. Imports the standard library only.

Precedence is preset < TOML file < command-line flags. A run's resolved configuration is stored
with the run, so a worker or merger needs only the store's address.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Literal

from diffurefill import toml
from diffurefill.toml import UserError


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The transformer. Defaults are the 1.08B model of the report (1,075,980,288 parameters)."""

    vocab_size: int = 73_760
    """Rows of the tied embedding: pieces, then MASK and PAD, then unused rows."""
    width: int = 2048
    layers: int = 18
    heads: int = 16
    ffn_width: int = 5632
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5
    causal: bool = False
    """True makes the autoregressive twin: same parameters, causal attention."""

    def __post_init__(self) -> None:
        width, heads = self.width, self.heads
        sizes = (self.vocab_size, width, self.layers, heads, self.ffn_width)
        _require(min(sizes) > 0, "model sizes must be positive")
        _require(
            width % heads == 0, f"model.width {width} must be a multiple of model.heads {heads}"
        )
        _require(width // heads % 2 == 0, "model.width / model.heads must be even for rotary pairs")


@dataclass(frozen=True, kw_only=True)
class Source:
    """One source of documents; a mixture draws from it by its name."""

    name: str = "text"
    paths: tuple[str, ...] = ("python:",)
    """`python:` (the standard library of this interpreter), or files, folders and globs of Parquet,
    JSONL and text: local, `hf://datasets/...`, `s3://`, `gs://`, `az://`, or an `https://` file."""
    text_column: str = "text"
    """Name of the text field in Parquet and JSONL."""
    has_spans: bool = True
    """False for code and mathematics: no spans are looked for in them."""

    def __post_init__(self) -> None:
        _require(bool(self.paths), f"data source {self.name!r} has no paths: name at least one")


Shares = tuple[tuple[str, float], ...]
"""(name of a source, share of the documents drawn) pairs."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """The mixture in force from a global step on."""

    from_step: int = 0
    shares: Shares = ((Source().name, 1.0),)
    span_rows: float | None = None
    """As data.span_rows, which is in force where this is left out."""

    def __post_init__(self) -> None:
        total = sum(share for _, share in self.shares)
        _require(
            abs(total - 1.0) < 1e-6,
            f"the shares of the data phase from step {self.from_step} sum to {total:g}, not to 1",
        )
        _require(
            all(share >= 0 for _, share in self.shares),
            f"a share of the data phase from step {self.from_step} is negative",
        )
        _require(0.0 <= (self.span_rows or 0.0) <= 1.0, "a phase's span_rows must lie in [0, 1]")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where text comes from and how it becomes rows."""

    sources: tuple[Source, ...] = (Source(),)
    phases: tuple[Phase, ...] = ()
    """Which shares of the documents the sources get, and when; may be left out for one source."""
    probe_sources: tuple[Source, ...] = ()
    """Sources to probe with: no document of theirs is ever trained on, wherever else it stands.
    Without any, the held-out share of the training sources is what the probes read."""
    held_out_fraction: float = 0.01
    """Share of documents, chosen by their hash, that no worker ever reads."""
    tokenizer: str = "train"
    """`train` trains a byte-fallback BPE on the sources; otherwise the path of a tokenizer.json, of
    a SentencePiece model, of a folder with either, or `hf://user/repo`."""
    tokenizer_pieces: int = 8192
    """Size of the trained BPE, specials included."""
    encoder: Literal["tokenizers", "gigatoken"] = "tokenizers"
    """What encodes; gigatoken is faster and must first give the same tokens for a sample."""
    row_length: int = 2048
    """T: tokens in a row."""
    packing: Literal["best_fit", "chop"] = "best_fit"
    """`chop` fills rows in order and cuts every document that crosses an edge."""
    open_rows: int = 16
    """Rows that best-fit packing keeps open at once."""
    short_rows: float = 0.0
    """Share of rows that are cut into segments which do not see each other."""
    short_length: int = 128
    """Tokens in such a segment."""
    short_mode: Literal["reshape", "docstart"] = "reshape"
    """`reshape` cuts a row as it is; `docstart` begins every segment with a document's start."""
    span_rows: float = 0.0
    """Share of rows in which whole spans are masked or left."""
    span_rule: Literal["S1", "S0", "collocations"] = "S1"
    """Salient spans by rule S1 or S0 (docs/data.md), or the word sequences of a list."""
    collocations: str = ""
    """The list, made by `diffurefill data collocations`."""
    phrase_tokens: int = 0
    """Word pairs of that list, the first so many, that become tokens of their own."""
    num_slots: int = 16
    """Disjoint shares of the documents; a worker reads exactly one. Fixed for the run."""

    def __post_init__(self) -> None:
        _require(bool(self.sources), "data.sources is empty: name at least one source")
        names = [source.name for source in self.sources]
        _require(len(set(names)) == len(names), "two of data.sources have the same name")
        self._check_phases(names)
        _require(0.0 < self.held_out_fraction < 0.5, "data.held_out_fraction must lie in (0, 0.5)")
        _require(self.row_length >= 8, "data.row_length must be at least 8 tokens")
        _require(self.open_rows >= 1, "data.open_rows must be at least 1")
        _require(self.num_slots >= 1, "data.num_slots must be at least 1")
        shares = (self.short_rows, self.span_rows)
        _require(0.0 <= min(shares) <= max(shares) <= 1.0, "shares of rows must lie in [0, 1]")
        _require(
            self.short_rows == 0.0
            or (self.short_length >= 8 and self.row_length % self.short_length == 0),
            f"data.row_length {self.row_length} must be a multiple of data.short_length "
            f"{self.short_length}, and that at least 8 tokens",
        )
        needs_list = self.span_rule == "collocations" or self.phrase_tokens > 0
        _require(
            bool(self.collocations) or not needs_list,
            "data.span_rule = collocations and data.phrase_tokens need a list: make one with "
            "`diffurefill data collocations` and name it in data.collocations",
        )
        _require(self.phrase_tokens >= 0, "data.phrase_tokens must not be negative")

    def _check_phases(self, names: list[str]) -> None:
        if not self.phases:
            _require(
                len(names) == 1,
                f"there are {len(names)} data sources: give their shares in [[data.phases]]",
            )
            return
        steps = [phase.from_step for phase in self.phases]
        _require(steps[0] == 0, "the first of data.phases must have from_step = 0")
        _require(steps == sorted(set(steps)), "data.phases must be ordered by from_step")
        for phase in self.phases:
            drawn = [name for name, _ in phase.shares]
            unknown = sorted(set(drawn) - set(names))
            _require(
                not unknown,
                f"data.phases name unknown sources: {', '.join(unknown)}; there are "
                f"{', '.join(names)}",
            )
            _require(len(set(drawn)) == len(drawn), "a data phase names one source twice")

    def phase_at(self, step: int) -> Phase:
        """The phase in force at global `step`: a function of the step alone."""
        if not self.phases:
            return Phase(shares=((self.sources[0].name, 1.0),), span_rows=self.span_rows)
        phase = [phase for phase in self.phases if phase.from_step <= step][-1]
        return phase if phase.span_rows is not None else replace(phase, span_rows=self.span_rows)


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """What is masked and how the loss is weighted (spec: algorithms 1)."""

    t_min: float = 0.15
    """t ~ U(t_min, 1) per row. 0.15 is the card's value; 0 is the report's U(0, 1)."""
    prefix_rows: float = 0.5
    """Share of rows that keep a clean prefix of random length: the shape of prompted text."""
    loss: Literal["pooled", "row", "elbo"] = "pooled"

    def __post_init__(self) -> None:
        _require(0.0 <= self.t_min < 1.0, "objective.t_min must lie in [0, 1)")
        _require(0.0 <= self.prefix_rows <= 1.0, "objective.prefix_rows must lie in [0, 1]")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Optimiser and schedule; the learning rate is a pure function of the global step."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """`muon`: Muon for the block matrices, AdamW for the embedding and the gains."""
    peak_lr: tuple[tuple[int, float], ...] = ((0, 3e-4),)
    """(from_step, rate) pairs: the peak in force from that step on."""
    muon_lr_ratio: float = 1.0
    """Muon's rate over the schedule's rate."""
    muon_scale: Literal["rms", "original"] = "rms"
    """`rms`: a matrix moves as far as under AdamW. `original`: by sqrt(max(1, rows / cols)) times
    the rate, which then wants a `muon_lr_ratio` of its own."""
    muon_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Arithmetic of the orthogonalisation; `auto`: bfloat16 where the hardware has it."""
    cautious: bool = False
    """No weight moves against its gradient of the step; what still moves makes up for it."""
    warmup_steps: int = 500
    total_steps: int = 200_000
    floor: float = 0.1
    """The cosine ends at this share of the peak at total_steps."""
    tail_from_step: int | None = None
    """From here the rate falls linearly to zero at total_steps; None leaves the cosine alone."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        steps = [step for step, _ in self.peak_lr]
        _require(steps[:1] == [0], "optim.peak_lr must start with a pair [0, rate]")
        _require(steps == sorted(steps), "optim.peak_lr pairs must be ordered by step")
        warmup, total = self.warmup_steps, self.total_steps
        _require(0 <= warmup < total, "optim.warmup_steps must be below optim.total_steps")
        tail = warmup if self.tail_from_step is None else self.tail_from_step
        _require(warmup <= tail < total, "optim.tail_from_step must lie in [warmup, total) steps")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    batch_rows: int = 64
    """B: rows of one optimiser step."""
    micro_batch_rows: int = 8
    """Rows of one forward pass; changes memory and speed, never the result."""
    log_every_steps: int = 10

    def __post_init__(self) -> None:
        _require(self.batch_rows >= 1, "train.batch_rows must be at least 1")
        _require(self.micro_batch_rows >= 1, "train.micro_batch_rows must be at least 1")
        _require(self.log_every_steps >= 1, "train.log_every_steps must be at least 1")


@dataclass(frozen=True, kw_only=True)
class FleetConfig:
    """The hub-synchronised loop (spec: fleet 5)."""

    local_steps: int = 150
    """H: optimiser steps between two merges."""
    min_partial_steps: int = 30
    """A session about to end pushes what it has, if it has so many steps."""

    min_fresh: int = 2
    """Contributions the merger waits for before its grace period may end the round."""
    grace_seconds: float = 150.0
    """At most so long; a round closes earlier when nobody is likely to arrive within it."""
    grace_from: Literal["nth", "first"] = "nth"
    """Grace starts at the min_fresh-th eligible arrival (report) or at the first (card)."""
    live_seconds: float = 1800.0
    """A worker whose lane has not moved for so long, on the observer's clock, is not waited for."""
    lease_seconds: float = 300.0
    """A merger silent for so long, on the observer's clock, may be replaced. Must be longer than a
    merge takes."""

    max_staleness: int = 0
    """Generations a contribution may be late and still be merged; 0 drops late ones."""
    staleness_discount: float = 0.25
    """A contribution late by s weighs tokens / (1 + staleness_discount * s)."""
    max_norm_ratio: float = 4.0
    """Reject a delta whose norm exceeds so many times the median of those accepted before."""
    min_cosine: float = -0.2
    """Reject a delta whose cosine with the sum of the round's others (two or more) is below."""
    guard_rows: int = 64
    """Held-out rows on which the merger scores a new global before it publishes it; 0: no guard."""

    codec: Literal["fp32-delta", "bf16-delta", "int8-delta", "int4-delta"] = "fp32-delta"
    """How contributions travel; int4-delta is an experiment."""
    downlink: Literal["full", "update"] = "full"
    """`update`: a new global is announced as an int8 step; the whole file follows later."""
    outer_step: Literal["replacement", "sgd", "nesterov", "orthogonal"] = "replacement"
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    adoption: Literal["replace", "keep_drift"] = "replace"
    """`keep_drift`: train on while waiting and add the global's change (an arm that lost)."""

    ema_decay: float = 0.9
    swa_from_step: int | None = None
    """Globals from this step on are averaged with equal weights."""
    snapshot_every: int = 0
    """Keep a copy of every so many-th generation; 0: none."""
    snapshot_keep: int = 5
    """Snapshots kept; the oldest goes first."""
    compact_every: int = 0
    """Generations between two compactions of the store; 0: only by `diffurefill compact`."""

    poll_seconds: float = 3.0
    """How often a waiting worker and the merger look at the store."""
    training_poll_seconds: float = 30.0
    """How often a worker looks for a newer global in the middle of an interval: each look keeps
    its GPU waiting, and finds something only when the worker is late."""
    log_seconds: float = 300.0
    """A waiting worker pushes its log this often, so that it is seen to be alive."""
    commits_per_hour: int = 0
    """What the store allows the whole fleet; 0: no limit. Logs and beats give way first."""

    def __post_init__(self) -> None:
        _require(self.local_steps >= 1, "fleet.local_steps must be at least 1")
        _require(self.min_partial_steps >= 1, "fleet.min_partial_steps must be at least 1")
        _require(self.min_fresh >= 1, "fleet.min_fresh must be at least 1")
        _require(0.0 <= self.ema_decay < 1.0, "fleet.ema_decay must lie in [0, 1)")
        polls = (self.poll_seconds, self.training_poll_seconds, self.log_seconds)
        shortest = min(*polls, self.live_seconds, self.lease_seconds)
        _require(self.grace_seconds >= 0 and shortest > 0, "fleet times must be positive")
        _require(self.max_norm_ratio > 1, "fleet.max_norm_ratio must be above 1")
        _require(-1 <= self.min_cosine <= 1, "fleet.min_cosine must lie in [-1, 1]")
        _require(self.outer_lr > 0, "fleet.outer_lr must be positive")
        _require(0 <= self.outer_momentum < 1, "fleet.outer_momentum must lie in [0, 1)")
        replaces, nesterov = self.outer_step == "replacement", self.outer_step == "nesterov"
        _require(
            not replaces or self.outer_lr == 1.0,
            "fleet.outer_lr does nothing with replacement: set fleet.outer_step to sgd",
        )
        _require(
            nesterov or self.outer_momentum == 0.0,
            "fleet.outer_momentum does nothing but with fleet.outer_step = nesterov",
        )
        _require(self.snapshot_keep >= 1, "fleet.snapshot_keep must be at least 1")
        counts = (self.max_staleness, self.guard_rows, self.snapshot_every, self.compact_every)
        _require(min(*counts, self.commits_per_hour) >= 0, "fleet counts must not be negative")
        _require(self.staleness_discount >= 0, "fleet.staleness_discount must not be negative")


@dataclass(frozen=True, kw_only=True)
class ProbeConfig:
    """Fixed held-out rows with stored masks, made once by `init`."""

    num_rows: int = 64
    mask_rates: tuple[float, ...] = (0.3, 0.6, 0.9)
    decoding_mask_rate: float = 0.5
    decoding_passes: int = 8

    def __post_init__(self) -> None:
        _require(self.num_rows >= 1, "probe.num_rows must be at least 1")
        rates = (*self.mask_rates, self.decoding_mask_rate)
        _require(all(0 < rate < 1 for rate in rates), "probe mask rates must lie in (0, 1)")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of decoding: draft, refill, left-to-right and n-per-pass are values of this."""

    num_passes: int = 12
    """Forward passes. 0: a draft takes as many as `tokens_per_pass` needs, a refill none."""
    remask_fraction: float = 0.0
    """0: fill what is masked, by quota. Above 0: each pass re-masks this share of the fillable
    positions, the least sure ones, and fills them all again."""
    temperature: tuple[float, float] = (1.0, 1.0)
    """First and last pass; linear between. 0 is greedy."""
    min_p: float = 0.0
    """Drop candidates below this share of the most likely one, after temperature."""
    order: Literal["confidence", "left_to_right"] = "confidence"
    order_noise: float = 0.0
    """Gumbel noise on the log confidences when choosing positions; 0 in the last pass."""
    quota: Literal["linear", "cosine"] = "linear"
    """How the number still masked falls over the passes."""
    tokens_per_pass: int | None = None
    """Accept exactly so many positions a pass instead of following `quota`."""
    commit_gap: int = 1
    """No two positions closer than this are accepted in one pass; 1 puts no constraint."""
    neighbour_ban: float = 0.0
    """Subtracted from the logit of a token already standing to the left or right."""

    def __post_init__(self) -> None:
        _require(self.num_passes >= 0, "a stage's num_passes must not be negative")
        _require(0.0 <= self.remask_fraction <= 1.0, "a stage's remask_fraction must lie in [0, 1]")
        _require(min(self.temperature) >= 0.0, "a stage's temperature must not be negative")
        _require(0.0 <= self.min_p < 1.0, "a stage's min_p must lie in [0, 1)")
        _require(self.commit_gap >= 1, "a stage's commit_gap must be at least 1")
        counted, refills = self.tokens_per_pass is not None, self.remask_fraction > 0
        _require((self.tokens_per_pass or 1) >= 1, "a stage's tokens_per_pass must be at least 1")
        endless = self.num_passes == 0 and not refills
        _require(counted or not endless, "a draft with num_passes 0 needs tokens_per_pass")
        _require(not (refills and counted), "a refill stage has no tokens_per_pass: it redoes m")


_APART = Stage(commit_gap=2, neighbour_ban=6.0)
DRAFT = replace(_APART, num_passes=12, temperature=(2.2, 0.9), order_noise=2.5)
REFILL = replace(_APART, num_passes=8, remask_fraction=0.2, temperature=(0.8, 0.8), min_p=0.1)


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """Draft and refill as the card sets them; other decoders are other stages."""

    stages: tuple[Stage, ...] = (DRAFT, REFILL)

    def __post_init__(self) -> None:
        _require(bool(self.stages), "decode.stages is empty")
        _require(
            self.stages[0].remask_fraction == 0.0,
            "the first decode stage must be a draft (remask_fraction = 0)",
        )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that defines a run."""

    seed: int = 0
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    fleet: FleetConfig = field(default_factory=FleetConfig)
    probe: ProbeConfig = field(default_factory=ProbeConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)


# --- reading and writing -------------------------------------------------------------------------


def preset_names() -> list[str]:
    files = resources.files("diffurefill") / "presets"
    return sorted(f.name.removesuffix(".toml") for f in files.iterdir() if f.name.endswith(".toml"))


def load_preset(name: str, base: RunConfig | None = None) -> RunConfig:
    """The shipped preset `name`; `decode-*` presets hold only a [decode] section."""
    if name not in preset_names():
        raise UserError(f"no preset {name!r}; there are {', '.join(preset_names())}")
    text = (resources.files("diffurefill") / "presets" / f"{name}.toml").read_text("utf-8")
    return loads(text, base or RunConfig(), where=f"preset {name}")


def load_file(path: str | Path, base: RunConfig) -> RunConfig:
    """`base` with the TOML file at `path` laid over it."""
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the config {path}: {error}") from None
    return loads(text, base, where=str(path))


def with_paths(config: RunConfig, paths: Sequence[str]) -> RunConfig:
    """`config` reading `paths` as its only source (its own sources where empty), with local paths
    made absolute: a run's configuration must mean the same from any folder."""
    data = config.data
    if paths:
        source = replace(data.sources[0], name=Source().name, paths=tuple(paths))
        data = replace(data, sources=(source,), phases=())
    data = replace(
        data,
        collocations=data.collocations and _absolute_path(data.collocations),
        sources=tuple(_absolute(source) for source in data.sources),
        probe_sources=tuple(_absolute(source) for source in data.probe_sources),
    )
    return replace(config, data=data)


def _absolute(source: Source) -> Source:
    paths = (_absolute_path(p) for p in source.paths)
    return replace(source, paths=tuple(paths))


def _absolute_path(path: str) -> str:
    return path if path == "python:" or "://" in path else str(Path(path).absolute())


def loads(text: str, base: RunConfig, where: str = "config") -> RunConfig:
    try:
        return toml.merge(base, tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{where}: not valid TOML: {error}") from None
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def dumps(config: RunConfig) -> str:
    """TOML that `loads` reads back to an equal config."""
    return toml.write(config)


def digest(config: RunConfig) -> str:
    """sha256 of the resolved configuration: two runs that differ anywhere never mix."""
    return hashlib.sha256(dumps(config).encode()).hexdigest()
