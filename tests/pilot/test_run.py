"""The pilot on a tiny pair with a judge of known answers: what is written, kept and compared."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diffurefill.config import ObjectiveConfig, RunConfig, Stage, UserError, load_preset
from diffurefill.evaluate.judge import Score
from diffurefill.fleet.loading import load
from diffurefill.pilot import run as pilot
from diffurefill.pilot import writing
from diffurefill.pilot.arms import choose_arms, pilot_arms
from diffurefill.pilot.passages import held_out_passages
from diffurefill.pilot.run import Plan, run_pilot, train_pair
from diffurefill.pilot.writing import Pair
from tests.tiny import tiny_config, write_corpus

TUNED = load_preset("decode-small").decode.stages
PLAN = Plan(tuned=TUNED, num_prompts=5, prompt_tokens=4, num_tokens=10, batch_rows=3)


def quiet(line: str) -> None:
    pass


class CountingJudge:
    """A nat for every letter e."""

    opened = 0

    def __init__(self, name: str) -> None:
        CountingJudge.opened += 1
        self.name = name

    def score(self, prompts: Sequence[str], continuations: Sequence[str]) -> list[Score]:
        return [Score(float(text.count("e")), len(text)) for text in continuations]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, tuple[str, str]]:
    folder = tmp_path_factory.mktemp("pair")
    config = tiny_config(write_corpus(folder))
    return config, train_pair(folder, config, 4, quiet)


def test_of_a_pair_the_denoiser_alone_mends_its_drafts() -> None:
    config = RunConfig(objective=ObjectiveConfig(self_repair=0.5))
    denoiser, twin = (pilot.one_of_pair(config, causal=causal) for causal in (False, True))
    assert denoiser == config
    assert twin.model.causal
    assert twin.objective.self_repair == 0.0


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> type[CountingJudge]:
    monkeypatch.setattr(pilot, "open_judge", CountingJudge)
    monkeypatch.setattr(CountingJudge, "opened", 0)
    return CountingJudge


def test_every_arm_is_written_judged_and_compared(
    trained: tuple[RunConfig, tuple[str, str]], judge: type[CountingJudge], tmp_path: Path
) -> None:
    found = run_pilot(tmp_path, trained[1], PLAN, "a judge", quiet)
    arms = found["arms"]
    assert list(arms) == [arm.name for arm in pilot_arms(TUNED)]
    assert arms["real"]["num_forward_passes"] is None
    calls = {name: arm["num_forward_passes"] for name, arm in arms.items()}
    assert calls["ar"] <= 10
    # 10 tokens to fill: a draft of 12 passes finds nothing masked in the last two.
    assert calls["tuned"] == calls["draft"] + 8
    assert calls["refill_16"] == calls["refill_4"] + 12
    assert calls["ar_repair"] == calls["draft"] + 8 * 2  # a fifth of 10 positions, 8 times
    assert arms["draft"]["minus"]["draft"]["nll"]["mean"] == 0
    for arm in arms.values():
        items, stats = arm["items"], arm["statistics"]
        assert len(items["nll"]) == stats["num_samples"] == 5
        assert arm["nll"]["mean"] == pytest.approx(sum(items["nll"]) / sum(items["judge_tokens"]))
        assert stats["doubled_tokens"] == pytest.approx(sum(items["doubled"]) / sum(items["pairs"]))
        assert set(arm["minus"]) == {"draft", "ar", "tuned"}
    assert found["models"]["ar"]["origin"]["step"] == 4
    assert str(tmp_path) not in json.dumps(found)


def test_an_interrupted_run_goes_on_and_the_same_arm_is_written_once(
    trained: tuple[RunConfig, tuple[str, str]],
    judge: type[CountingJudge],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    some = replace(PLAN, arms=("ar", "draft", "tuned"))
    run_pilot(tmp_path, trained[1], replace(some, arms=("ar", "draft")), "a judge", quiet)
    made: list[str] = []
    write = writing._write
    monkeypatch.setattr(writing, "_write", lambda arm, *a: made.append(arm.name) or write(arm, *a))
    once = run_pilot(tmp_path, trained[1], some, "a judge", quiet)
    assert made == ["tuned"]
    again = run_pilot(tmp_path, trained[1], replace(some, batch_rows=5), "a judge", quiet)
    assert made == ["tuned"]
    assert judge.opened == 2
    assert again["arms"] == once["arms"]
    run_pilot(tmp_path, trained[1], replace(some, seed=1), "a judge", quiet)
    assert made == ["tuned", "ar", "draft", "tuned"]


def test_one_prompt_is_enough(
    trained: tuple[RunConfig, tuple[str, str]], judge: type[CountingJudge], tmp_path: Path
) -> None:
    one = replace(PLAN, num_prompts=1, arms=("real", "tuned"))
    found = run_pilot(tmp_path, trained[1], one, "/somewhere/a judge", quiet)
    assert [len(examples) for examples in found["examples"].values()] == [1, 1]
    assert found["judge"] == "a judge"


def test_a_judge_that_is_missing_is_told_before_much_is_written(
    trained: tuple[RunConfig, tuple[str, str]], tmp_path: Path
) -> None:
    some = replace(PLAN, arms=("draft", "tuned"))
    with pytest.raises(UserError):
        run_pilot(tmp_path, trained[1], some, str(tmp_path / "no judge"), quiet)
    assert [path.stem for path in (tmp_path / "arms").iterdir()] == ["draft"]


def test_the_batch_changes_no_text(
    trained: tuple[RunConfig, tuple[str, str]], judge: type[CountingJudge], tmp_path: Path
) -> None:
    some = replace(PLAN, arms=("ar", "tuned", "ar_repair"))
    for name, rows in (("one", 1), ("all", 5)):
        run_pilot(tmp_path / name, trained[1], replace(some, batch_rows=rows), "a judge", quiet)
    for arm in some.arms:
        one, all_ = (
            json.loads((tmp_path / name / "arms" / f"{arm}.json").read_text())["samples"]
            for name in ("one", "all")
        )
        assert one == all_


def test_prompts_are_held_out_and_can_be_skipped(
    trained: tuple[RunConfig, tuple[str, str]],
) -> None:
    config, (diffusion, _) = trained
    tokenizer = load(diffusion).tokenizer
    sizes = {"prompt_tokens": 4, "num_tokens": 10}
    found = held_out_passages(config.data, tokenizer, num_passages=6, **sizes)
    later = held_out_passages(config.data, tokenizer, num_passages=2, skip=4, **sizes)
    assert later == found[4:]
    assert all(len(p.prompt) == 4 and len(p.real) == 10 for p in found)
    text = (Path(config.data.sources[0].paths[0])).read_text()
    assert tokenizer.decode(found[0].prompt + found[0].real) in text
    with pytest.raises(UserError, match="ask for fewer prompts"):
        held_out_passages(config.data, tokenizer, num_passages=10_000, **sizes)


def test_a_pair_that_does_not_fit_together_is_refused(
    trained: tuple[RunConfig, tuple[str, str]],
) -> None:
    diffusion, ar = (load(place) for place in trained[1])
    with pytest.raises(UserError, match="denoiser first"):
        Pair(ar, diffusion)
    other = replace(ar.config, data=replace(ar.config.data, row_length=64))
    ar.config = other
    with pytest.raises(UserError, match="row_length"):
        Pair(diffusion, ar)


def test_a_denoiser_without_a_twin_is_compared_with_itself(
    trained: tuple[RunConfig, tuple[str, str]], judge: type[CountingJudge], tmp_path: Path
) -> None:
    both = run_pilot(tmp_path / "both", trained[1], PLAN, "a judge", quiet)
    alone = run_pilot(tmp_path / "alone", (trained[1][0], None), PLAN, "a judge", quiet)
    assert set(both["arms"]) - set(alone["arms"]) == {"ar", "ar_truncated", "ar_repair"}
    assert list(alone["models"]) == ["diffusion"]
    for name, arm in alone["arms"].items():
        assert arm["items"] == both["arms"][name]["items"]
        assert set(arm["minus"]) == {"draft", "tuned"}
    with pytest.raises(UserError, match="writes ar_repair: give --ar"):
        choose_arms(pilot_arms(TUNED), ("tuned", "ar_repair"), has_twin=False)


def test_arms_change_one_thing_each() -> None:
    arms = {arm.name: arm for arm in pilot_arms(TUNED)}
    draft, refill = arms["tuned"].stages
    assert arms["no_order_noise"].stages == (replace(draft, order_noise=0.0), refill)
    assert arms["no_gap"].stages == (replace(draft, commit_gap=1), replace(refill, commit_gap=1))
    assert arms["draft"].stages == (draft,)
    for arm in arms.values():
        changed = [a != b for a, b in zip(arm.stages, (draft, refill), strict=False)]
        assert not arm.changes_tuned or any(changed), arm.name
    assert arms["shadow"].stages == (draft, replace(refill, confidence="shadow"))
    cool = draft.temperature[1]
    assert arms["threshold"].stages[0].temperature == (cool, cool)
    assert arms["shared_draft"].stages[1].temperature == (draft.temperature[1],) * 2


@pytest.mark.parametrize("change", [{"confidence": "shadow"}, {"refresh_every": 4}])
def test_shadows_and_kept_keys_may_be_tuned_though_they_exclude_each_other(change: Any) -> None:
    draft, refill = TUNED
    arms = {arm.name: arm.stages for arm in pilot_arms((draft, replace(refill, **change)))}
    assert ("kept" in arms) == (change != {"confidence": "shadow"})
    assert arms["shadow"][1].refresh_every == 1


def test_what_cannot_be_ablated_is_refused() -> None:
    with pytest.raises(UserError, match="one draft and one refill"):
        pilot_arms((Stage(),))
    with pytest.raises(UserError, match="no arm nonsense"):
        choose_arms(pilot_arms(TUNED), ("nonsense",), has_twin=True)
