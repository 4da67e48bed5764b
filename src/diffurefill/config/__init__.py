"""Every configuration dataclass. Imports the standard library only.

Precedence is preset < TOML file < command-line flags. A run's resolved configuration is stored
with the run, so a worker or merger needs only the store's address.
"""

from diffurefill.config.data import DataConfig, Phase, Shares, Source
from diffurefill.config.decode import DRAFT, REFILL, DecodeConfig, Stage
from diffurefill.config.fleet import FleetConfig
from diffurefill.config.model import ModelConfig
from diffurefill.config.probe import HELD_OUT, SHORT, ProbeConfig
from diffurefill.config.run import (
    RunConfig,
    digest,
    dumps,
    load_file,
    load_preset,
    loads,
    preset_names,
    with_paths,
)
from diffurefill.config.training import ObjectiveConfig, OptimConfig, TrainConfig
from diffurefill.toml import UserError

__all__ = [
    "RunConfig",
    "ModelConfig",
    "Source",
    "Phase",
    "Shares",
    "DataConfig",
    "ObjectiveConfig",
    "OptimConfig",
    "TrainConfig",
    "FleetConfig",
    "HELD_OUT",
    "SHORT",
    "ProbeConfig",
    "Stage",
    "DRAFT",
    "REFILL",
    "DecodeConfig",
    "UserError",
    "preset_names",
    "load_preset",
    "load_file",
    "loads",
    "dumps",
    "digest",
    "with_paths",
]
