"""A whole run: its sections, and TOML in and out."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path

from diffurefill import toml
from diffurefill.config.checks import require
from diffurefill.config.data import DataConfig, Source
from diffurefill.config.decode import DecodeConfig
from diffurefill.config.fleet import FleetConfig
from diffurefill.config.model import ModelConfig
from diffurefill.config.probe import ProbeConfig
from diffurefill.config.training import ObjectiveConfig, OptimConfig, TrainConfig
from diffurefill.toml import UserError


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that defines a run."""

    seed: int = 0
    """Of everything drawn: first weights, order of documents, masks."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    fleet: FleetConfig = field(default_factory=FleetConfig)
    probe: ProbeConfig = field(default_factory=ProbeConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)

    def __post_init__(self) -> None:
        named = {source.name for source in self.data.probe_sources}
        unknown = [name for name in self.probe.sets if name not in named]
        require(
            not unknown,
            f"probe.sets names {', '.join(unknown)}: give each a [[data.probe_sources]] section "
            "with that name",
        )
        if self.objective.self_repair > 0:
            self._check_self_repair()

    def _check_self_repair(self) -> None:
        require(
            not self.model.causal,
            "objective.self_repair does nothing with model.causal, which masks nothing: set it 0",
        )
        data = self.data
        require(
            data.short_rows < 1.0 or data.short_length == data.row_length,
            "objective.self_repair makes no short row anew, and with data.short_rows = 1 there are "
            "no others: set one of them lower",
        )


def preset_names() -> list[str]:
    files = resources.files("diffurefill") / "presets"
    return sorted(f.name.removesuffix(".toml") for f in files.iterdir() if f.name.endswith(".toml"))


def load_preset(name: str) -> RunConfig:
    """The shipped preset `name`; `decode-*` presets hold only a [decode] section."""
    if name not in preset_names():
        raise UserError(f"no preset {name!r}; there are {', '.join(preset_names())}")
    text = (resources.files("diffurefill") / "presets" / f"{name}.toml").read_text("utf-8")
    return loads(text, RunConfig(), where=f"preset {name}")


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
