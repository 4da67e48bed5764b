"""Configuration: presets parse, TOML round-trips, mistakes are named, and no field is dead."""

import dataclasses
import re
from pathlib import Path

import pytest

from diffurefill import config as configs
from diffurefill.config import FleetConfig, RunConfig, Stage, UserError

SOURCE = Path(configs.__file__).parent


@pytest.mark.parametrize("name", configs.preset_names())
def test_a_preset_parses_and_survives_toml(name: str) -> None:
    config = configs.load_preset(name)
    assert configs.loads(configs.dumps(config), RunConfig()) == config


def test_the_digest_changes_with_any_field() -> None:
    base = RunConfig()
    other = configs.loads("[optim]\neps = 1e-9", base)
    assert configs.digest(base) != configs.digest(other)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[model]\nwidht = 3", "unknown key 'model.widht'; did you mean model.width"),
        ("[modle]\nwidth = 3", "unknown key 'modle'; did you mean model"),
        ("[model]\nwidth = 'wide'", "model.width must be of type int"),
        ("[model]\nwidth = true", "model.width must be of type int"),
        ("model = 3", r"model is a section: write \[model\]"),
        ("[objective]\nloss = 'mean'", "objective.loss must be one of pooled, row, elbo"),
        ("[optim]\nbetas = [0.9]", "optim.betas needs 2 values, not 1"),
        ("[model]\nwidth = 100\nheads = 3", "model.width 100 must be a multiple"),
        ("[[decode.stages]]\nremask_fraction = 0.2", "first decode stage must be a draft"),
        (
            "[[decode.stages]]\n[[decode.stages]]\nremask_fraction = 0.2\ntokens_per_pass = 3",
            "redoes m",
        ),
        ("[[decode.stages]]\nnum_passes = 0", "needs tokens_per_pass"),
        ("[model]\nheads = 0", "sizes must be positive"),
        ("[optim]\npeak_lr = []", "must start with a pair"),
        ("[optim]\ntail_from_step = 300000", "tail_from_step must lie"),
        ("[model\n", "not valid TOML"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_to_do(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        configs.loads(text, RunConfig(), where="run.toml")
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("run.toml")


def test_precedence_is_preset_then_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[train]\nbatch_rows = 3\n")
    config = configs.load_file(file, configs.load_preset("demo"))
    assert config.train.batch_rows == 3
    assert config.model == configs.load_preset("demo").model


def test_an_unknown_preset_is_answered_with_the_known_ones() -> None:
    with pytest.raises(UserError, match="demo"):
        configs.load_preset("dmo")


def test_the_card_preset_is_the_default_decoder() -> None:
    """spec algorithms 5.2 and 5.3, stated twice: in code and as a preset people can copy."""
    assert configs.load_preset("decode-card").decode.stages == (configs.DRAFT, configs.REFILL)


def _sections() -> list[type]:
    hints = [f.default_factory for f in dataclasses.fields(RunConfig) if f.name != "seed"]
    return [RunConfig, *hints, Stage]


@pytest.mark.parametrize("section", _sections(), ids=lambda s: s.__name__)
def test_every_field_is_read_outside_config(section: type) -> None:
    code = "\n".join(p.read_text() for p in SOURCE.rglob("*.py") if p.name != "config.py")
    unread = [f.name for f in dataclasses.fields(section) if not re.search(rf"\.{f.name}\b", code)]
    assert unread == []


@pytest.mark.parametrize(
    "fleet",
    [
        {"outer_lr": 0.7},
        {"outer_step": "sgd", "outer_momentum": 0.5},
        {"outer_step": "replacement", "outer_momentum": 0.5},
    ],
)
def test_an_outer_step_is_given_no_number_that_it_would_ignore(fleet: dict) -> None:
    with pytest.raises(UserError, match="does nothing"):
        FleetConfig(**fleet)
    FleetConfig(outer_step="nesterov", outer_lr=0.7, outer_momentum=0.9)
