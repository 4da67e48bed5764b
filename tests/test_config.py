"""Configuration: presets parse, TOML round-trips, mistakes are named, and no field is dead."""

import dataclasses
import math
import re
import typing
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from diffurefill import config as configs
from diffurefill.config import (
    DataConfig,
    DecodeConfig,
    FleetConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimConfig,
    Phase,
    ProbeConfig,
    RunConfig,
    Source,
    Stage,
    TrainConfig,
    UserError,
)

SOURCE = Path(configs.__file__).parents[1]


@pytest.mark.parametrize("name", configs.preset_names())
def test_a_preset_parses_and_survives_toml(name: str) -> None:
    config = configs.load_preset(name)
    assert configs.loads(configs.dumps(config), RunConfig()) == config


@given(
    path=st.text(),
    number=st.one_of(st.just(math.inf), st.floats(1e-300, 1e300)),
)
@example(path='C:\\data\\ud83d "\x7f\0\n" \u00e9 \U0001f600', number=1e16)
def test_any_text_and_number_survives_toml(path: str, number: float) -> None:
    data = DataConfig(sources=(Source(name=path, paths=(path, "b")),))
    config = RunConfig(data=data, optim=OptimConfig(clip_norm=number))
    assert configs.loads(configs.dumps(config), RunConfig()) == config


def test_what_is_written_stays_as_it_was() -> None:
    """A run's digest hangs on every character, and a run outlives the release it began with."""
    config = RunConfig(data=DataConfig(sources=(Source(name='\u00e9 "\\"'),)))
    text = configs.dumps(config)
    assert 'name = "\\u00e9 \\"\\\\\\""' in text
    assert "peak_lr = [[0, 0.0003]]\n" in text
    assert "eps = 1e-08\n" in text
    assert "has_spans = true\n" in text


def test_a_name_that_is_no_text_is_refused() -> None:
    """What Python makes of a file's name that is not UTF-8; TOML has no way to write it."""
    data = DataConfig(sources=(Source(paths=("caf\udce9.txt",)),))
    with pytest.raises(UserError, match=r"data\.sources\.paths: .* is not valid Unicode"):
        configs.dumps(RunConfig(data=data))


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
        ("[[decode.stages]]\nquota = 'factor'", "quota factor needs a bound"),
        ("[[decode.stages]]\nbound = 0.9", "quota linear has no bound"),
        ("[[decode.stages]]\nquota = 'threshold'\nbound = 1.5", "a probability"),
        ("[[decode.stages]]\nquota = 'one_per_run'\ntokens_per_pass = 2", "not both"),
        ("[[decode.stages]]\norder = 'random'\norder_noise = 1", "has no order_noise"),
        (
            "[[decode.stages]]\nnum_passes = 0\nquota = 'one_per_run'\ntemperature = [2, 1]",
            "give num_passes, over which temperature",
        ),
        (
            "[[decode.stages]]\n[[decode.stages]]\nremask_fraction = 0.2\norder = 'margin'",
            "by confidence or random, not by margin",
        ),
        ("[model]\nheads = 0", "sizes must be positive"),
        ("[optim]\npeak_lr = []", "must start with a pair"),
        ("[optim]\ntail_from_step = 300000", "tail_from_step must lie"),
        ("[model\n", "not valid TOML"),
        ("[optim]\npeak_lr = 0.001", r"an array of arrays: write \[\[0, 0.0003\]\], for example"),
        ("[optim]\npeak_lr = [0, 0.001]", r"an array of arrays: write \[\[0, 0.0003\]\]"),
        ("[optim]\nbetas = 0.9", r"optim.betas is an array: write \[0.9, 0.95\], for example"),
        ("[probe]\nsets = 'wiki'", r'probe.sets is an array: write \["name"\], for example'),
        ("[[data.sources]]\npaths = 'a'", r'paths is an array: write \["python:"\]'),
        ("[data]\nsources = ['a']", r"a list of sections: write \[\[data.sources\]\] with its"),
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
    return [RunConfig, *hints, Stage, Source, Phase]


@pytest.mark.parametrize("section", _sections(), ids=lambda s: s.__name__)
def test_every_field_is_read_outside_config(section: type) -> None:
    code = "\n".join(p.read_text() for p in SOURCE.rglob("*.py") if p.parent.name != "config")
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


@pytest.mark.parametrize(
    "rest",
    ["[model]\ncausal = true", "[data]\nshort_rows = 1.0"],
)
def test_self_repair_is_refused_where_no_row_would_be_made_anew(rest: str) -> None:
    with pytest.raises(UserError, match=r"objective\.self_repair .*(nothing|no short row)"):
        configs.loads(f"[objective]\nself_repair = 0.1\n{rest}", RunConfig())
    configs.loads(rest, RunConfig())


def test_self_repair_is_allowed_where_some_rows_are_whole() -> None:
    """A short row as long as the row itself is whole."""
    for data in ("short_rows = 0.9", "short_rows = 1.0\nshort_length = 2048"):
        configs.loads(f"[objective]\nself_repair = 0.1\n[data]\n{data}", RunConfig())


# --- numbers ------------------------------------------------------------------------------------

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("section", "field", "bad"),
    [
        (OptimConfig, "clip_norm", (0.0, -1.0, NAN)),
        (OptimConfig, "betas", ((1.0, 0.95), (0.9, -0.1), (NAN, 0.95))),
        (OptimConfig, "eps", (0.0, -1e-8, NAN, INF)),
        (OptimConfig, "weight_decay", (-0.1, NAN, INF)),
        (OptimConfig, "floor", (-0.1, 1.1, NAN)),
        (OptimConfig, "muon_lr_ratio", (0.0, -1.0, NAN, INF)),
        (OptimConfig, "peak_lr", (((0, -1e-3),), ((0, NAN),), ((0, 1e-3), (9, INF)))),
        (OptimConfig, "peak_lr", (((0, 1e-3), (0, 1e-4)), ((0, 1e-3), (9, 1e-3), (9, 1e-4)))),
        (ModelConfig, "rope_base", (0.0, -1.0, NAN, INF)),
        (ModelConfig, "norm_eps", (-1e-5, NAN, INF)),
        (ProbeConfig, "decoding_passes", (0, -1)),
        (FleetConfig, "live_seconds", (0.0, NAN, INF)),
        (FleetConfig, "poll_seconds", (0.0, NAN, INF)),
        (FleetConfig, "grace_seconds", (-1.0, NAN, INF)),
        (FleetConfig, "max_norm_ratio", (1.0, NAN)),
        (FleetConfig, "staleness_discount", (-1.0, NAN, INF)),
        (Stage, "temperature", ((1.0, -1.0), (1.0, NAN), (INF, 1.0))),
        (Stage, "neighbour_ban", (-1.0, NAN, INF)),
        (Stage, "order_noise", (-1.0, NAN, INF)),
        (Stage, "tokens_per_pass", (0, -1)),
    ],
)
def test_a_number_that_means_nothing_is_refused(section: type, field: str, bad: tuple) -> None:
    name = {FleetConfig: "fleet", Stage: "stage"}.get(section, field)
    for value in bad:
        with pytest.raises(UserError, match=name):
            section(**{field: value})


REFILLS, BOUNDED = {"remask_fraction": 0.2}, {"quota": "threshold"}


@pytest.mark.parametrize(
    ("section", "field", "good", "bad"),
    [
        (DataConfig, "held_out_fraction", (0.001, 0.499), (0.0, 0.5)),
        (DataConfig, "row_length", (8,), (7,)),
        (DataConfig, "open_rows", (1,), (0,)),
        (DataConfig, "num_slots", (1,), (0,)),
        (DataConfig, "short_rows", (0.0, 1.0), (-0.1, 1.1)),
        (DataConfig, "span_rows", (0.0, 1.0), (-0.1, 1.1)),
        (DataConfig, "phrase_tokens", (0,), (-1,)),
        (ObjectiveConfig, "t_min", (0.0, 0.999), (-0.1, 1.0)),
        (ObjectiveConfig, "prefix_rows", (0.0, 1.0), (-0.1, 1.1)),
        (ObjectiveConfig, "self_repair", (0.0, 1.0), (-0.1, 1.1)),
        (ObjectiveConfig, "self_repair_rate", ((1.0, 1.0),), ((0.0, 1.0), (0.5, 0.4), (0.5, 1.1))),
        (TrainConfig, "batch_rows", (1,), (0,)),
        (TrainConfig, "micro_batch_rows", (0,), (-1,)),
        (TrainConfig, "activation_budget", (0.001, 1.0), (0.0, 1.1)),
        (TrainConfig, "log_every_steps", (1,), (0,)),
        (ModelConfig, "layers", (1,), (0,)),
        (ProbeConfig, "num_rows", (1,), (0,)),
        (ProbeConfig, "mask_rates", ((0.001, 0.999),), ((0.5, 0.0), (1.0, 0.5))),
        (ProbeConfig, "decoding_mask_rate", (0.001, 0.999), (0.0, 1.0)),
        (ProbeConfig, "short_length", (2,), (1,)),
        (FleetConfig, "local_steps", (1,), (0,)),
        (FleetConfig, "min_partial_steps", (1,), (0,)),
        (FleetConfig, "min_fresh", (1,), (0,)),
        (FleetConfig, "ema_decay", (0.0, 0.999), (-0.1, 1.0)),
        (FleetConfig, "training_poll_seconds", (0.001,), (0.0,)),
        (FleetConfig, "log_seconds", (0.001,), (0.0,)),
        (FleetConfig, "lease_seconds", (0.001,), (0.0,)),
        (FleetConfig, "grace_seconds", (0.0,), (-0.1,)),
        (FleetConfig, "min_cosine", (-1, 1), (-1.1, 1.1)),
        (FleetConfig, "snapshot_keep", (1,), (0,)),
        (FleetConfig, "max_staleness", (0,), (-1,)),
        (FleetConfig, "guard_rows", (0,), (-1,)),
        (FleetConfig, "snapshot_every", (0,), (-1,)),
        (FleetConfig, "compact_every", (0,), (-1,)),
        (FleetConfig, "commits_per_hour", (0,), (-1,)),
        (partial(FleetConfig, outer_step="nesterov"), "outer_momentum", (0, 0.999), (-0.1, 1.0)),
        (partial(OptimConfig, total_steps=9), "warmup_steps", (0, 8), (-1, 9)),
        (partial(OptimConfig, warmup_steps=2, total_steps=9), "tail_from_step", (2, 8), (1, 9)),
        (Stage, "num_passes", (1,), (-1,)),
        (Stage, "remask_fraction", (0.0, 1.0), (-0.1, 1.1)),
        (Stage, "min_p", (0.0, 0.999), (-0.1, 1.0)),
        (Stage, "commit_gap", (1,), (0,)),
        (Stage, "refresh_every", (1,), (0,)),
        (partial(Stage, **REFILLS), "groups", (2,), (1,)),
        (partial(Stage, **REFILLS), "sure_above", (0.001, 1), (0, 1.1)),
        (partial(Stage, **BOUNDED), "bound", (0, 0.999), (-0.1, 1.0)),
        (DecodeConfig, "block_length", (0,), (-1,)),
    ],
)
def test_a_bound_takes_its_edge_and_nothing_beyond(
    section: Callable, field: str, good: tuple, bad: tuple
) -> None:
    for value in good:
        section(**{field: value})
    for value in bad:
        with pytest.raises(UserError):
            section(**{field: value})


def test_no_float_of_any_section_may_be_nan() -> None:
    for section in _sections():
        for f in dataclasses.fields(section):
            if typing.get_type_hints(section)[f.name] is float:
                with pytest.raises(UserError):
                    section(**{f.name: NAN})


def test_a_share_of_rows_that_is_nan_is_refused_in_either_place() -> None:
    for field in ("short_rows", "span_rows"):
        with pytest.raises(UserError, match="shares of rows"):
            DataConfig(**{field: NAN})


def test_a_refill_takes_nothing_back_zero_times() -> None:
    with pytest.raises(UserError, match="remask_cap must be at least 1"):
        Stage(remask_fraction=0.2, remask_cap=0)


def test_what_may_be_infinite() -> None:
    """Each says that something is not to be limited."""
    OptimConfig(clip_norm=INF)
    FleetConfig(max_norm_ratio=INF)


# --- mixtures ------------------------------------------------------------------------------------

MIX = """
[[data.sources]]
name = "web"
[[data.sources]]
name = "facts"
[[data.phases]]
shares = [["web", 1.0]]
[[data.phases]]
from_step = 100
span_rows = 0.5
shares = [["web", 0.7], ["facts", 0.3]]
"""


def test_the_mixture_is_a_function_of_the_step_alone() -> None:
    data = configs.loads(MIX, RunConfig()).data
    assert data.phase_at(0).shares == data.phase_at(99).shares == (("web", 1.0),)
    assert data.phase_at(100).shares == data.phase_at(10**9).shares
    assert dict(data.phase_at(100).shares) == {"web": 0.7, "facts": 0.3}
    assert (data.phase_at(99).span_rows, data.phase_at(100).span_rows) == (0.0, 0.5)


def test_one_source_needs_no_phase() -> None:
    data = DataConfig(sources=(Source(name="web"),), span_rows=0.25)
    assert data.phase_at(7) == Phase(shares=(("web", 1.0),), span_rows=0.25)


@pytest.mark.parametrize("name", configs.preset_names())
def test_every_mix_of_a_preset_sums_to_one(name: str) -> None:
    data = configs.load_preset(name).data
    for phase in data.phases:
        assert sum(share for _, share in phase.shares) == pytest.approx(1.0, abs=1e-9)


def test_the_presets_mix_as_the_seeds_say() -> None:
    """Report R63-75 (from step 158.8k), card C49-56 (from step 96.8k)."""
    report = dict(configs.load_preset("base-1b").data.phase_at(158_800).shares)
    expected = [0.18, 0.2, 0.15, 0.15, 0.08, 0.07, 0.08, 0.04, 0.05]
    assert sorted(report.values()) == sorted(expected)
    card = configs.load_preset("base-1b-card").data
    assert [share for _, share in card.phase_at(96_800).shares] == [0.56, 0.15] + [0.08] * 3 + [
        0.05
    ]
    assert card.phase_at(96_799).shares == (("ultra-fineweb-l3", 1.0),)
    assert (card.phase_at(96_799).span_rows, card.phase_at(96_800).span_rows) == (0.0, 0.25)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("0.3]]", "0.4]]"), r"from step 100 sum to 1\.1, not to 1"),
        (('["web", 0.7], ["facts", 0.3]', '["web", 1.2], ["facts", -0.2]'), "is negative"),
        (('["facts", 0.3]', '["fakts", 0.3]'), "unknown sources: fakts; there are web, facts"),
        (('["facts", 0.3]', '["web", 0.3]'), "names one source twice"),
        (('name = "facts"', 'name = "web"'), "have the same name"),
        (("from_step = 100", "from_step = 0"), "ordered by from_step"),
        (('shares = [["web", 1.0]]', 'from_step = 5\nshares = [["web", 1.0]]'), "from_step = 0"),
        (("span_rows = 0.5", "span_rows = 1.5"), r"span_rows must lie in \[0, 1\]"),
        (("[[data.phases]]", "[[data.other]]"), "unknown key"),
    ],
)
def test_a_mixture_that_cannot_be_is_named(change: tuple[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        configs.loads(MIX.replace(*change), RunConfig())


def test_several_sources_need_their_shares() -> None:
    with pytest.raises(UserError, match=r"give their shares in \[\[data\.phases\]\]"):
        DataConfig(sources=(Source(name="a"), Source(name="b")))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"short_rows": 0.1, "short_length": 100}, "must be a multiple of data.short_length"),
        ({"span_rows": -0.1}, r"shares of rows must lie in \[0, 1\]"),
        ({"span_rule": "collocations"}, "need a list: make one with"),
        ({"phrase_tokens": 10}, "need a list: make one with"),
        ({"sources": ()}, "data.sources is empty"),
    ],
)
def test_rows_that_cannot_be_made_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        DataConfig(**fields)


def test_paths_of_the_command_line_are_one_source_and_mean_the_same_from_any_folder() -> None:
    mixed = configs.loads(MIX, RunConfig())
    data = configs.with_paths(mixed, ["a.txt", "hf://datasets/x/y", "python:"]).data
    assert data.phases == ()
    assert data.sources[0].paths == (str(Path("a.txt").absolute()), "hf://datasets/x/y", "python:")
    kept = configs.with_paths(mixed, []).data
    assert [source.name for source in kept.sources] == ["web", "facts"]
