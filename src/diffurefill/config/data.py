"""Where text comes from and how it becomes rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from diffurefill.config.checks import require


@dataclass(frozen=True, kw_only=True)
class Source:
    """One source of documents; a mixture draws from it by its name."""

    name: str = "text"
    """What shares, logs and probes call it."""
    paths: tuple[str, ...] = ("python:",)
    """`python:` (the standard library of this interpreter), or files, folders and globs of Parquet,
    JSONL and text: local, `hf://datasets/...`, `s3://`, `gs://`, `az://`, or an `https://` file."""
    text_column: str = "text"
    """Name of the text field in Parquet and JSONL."""
    has_spans: bool = True
    """False for code and mathematics: no spans are looked for in them."""

    def __post_init__(self) -> None:
        require(bool(self.paths), f"data source {self.name!r} has no paths: name at least one")


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
        require(
            abs(total - 1.0) < 1e-6,
            f"the shares of the data phase from step {self.from_step} sum to {total:g}, not to 1",
        )
        require(
            all(share >= 0 for _, share in self.shares),
            f"a share of the data phase from step {self.from_step} is negative",
        )
        require(0.0 <= (self.span_rows or 0.0) <= 1.0, "a phase's span_rows must lie in [0, 1]")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where text comes from and how it becomes rows."""

    sources: tuple[Source, ...] = (Source(),)
    """What is read, each under its name."""
    phases: tuple[Phase, ...] = ()
    """Which shares of the documents the sources get, and when; may be left out for one source."""
    probe_sources: tuple[Source, ...] = ()
    """Sources to probe with: no document of theirs is ever trained on, wherever else it stands.
    Without any, the held-out share of the training sources is what the held-out probe reads. Those
    that probe.sets names are probed apart."""
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
        require(bool(self.sources), "data.sources is empty: name at least one source")
        names = [source.name for source in self.sources]
        require(len(set(names)) == len(names), "two of data.sources have the same name")
        self._check_phases(names)
        require(0.0 < self.held_out_fraction < 0.5, "data.held_out_fraction must lie in (0, 0.5)")
        require(self.row_length >= 8, "data.row_length must be at least 8 tokens")
        require(self.open_rows >= 1, "data.open_rows must be at least 1")
        require(self.num_slots >= 1, "data.num_slots must be at least 1")
        shares = (self.short_rows, self.span_rows)
        require(all(0.0 <= share <= 1.0 for share in shares), "shares of rows must lie in [0, 1]")
        require(
            self.short_rows == 0.0
            or (self.short_length >= 8 and self.row_length % self.short_length == 0),
            f"data.row_length {self.row_length} must be a multiple of data.short_length "
            f"{self.short_length}, and that at least 8 tokens",
        )
        needs_list = self.span_rule == "collocations" or self.phrase_tokens > 0
        require(
            bool(self.collocations) or not needs_list,
            "data.span_rule = collocations and data.phrase_tokens need a list: make one with "
            "`diffurefill data collocations` and name it in data.collocations",
        )
        require(self.phrase_tokens >= 0, "data.phrase_tokens must not be negative")

    def _check_phases(self, names: list[str]) -> None:
        if not self.phases:
            require(
                len(names) == 1,
                f"there are {len(names)} data sources: give their shares in [[data.phases]]",
            )
            return
        steps = [phase.from_step for phase in self.phases]
        require(steps[0] == 0, "the first of data.phases must have from_step = 0")
        require(steps == sorted(set(steps)), "data.phases must be ordered by from_step")
        for phase in self.phases:
            drawn = [name for name, _ in phase.shares]
            unknown = sorted(set(drawn) - set(names))
            require(
                not unknown,
                f"data.phases name unknown sources: {', '.join(unknown)}; there are "
                f"{', '.join(names)}",
            )
            require(len(set(drawn)) == len(drawn), "a data phase names one source twice")

    def phase_at(self, step: int) -> Phase:
        """The phase in force at global `step`: a function of the step alone."""
        if not self.phases:
            return Phase(shares=((self.sources[0].name, 1.0),), span_rows=self.span_rows)
        phase = [phase for phase in self.phases if phase.from_step <= step][-1]
        return phase if phase.span_rows is not None else replace(phase, span_rows=self.span_rows)
