"""`evaluate` and `lm-eval` as a person calls them, on a tiny trained model and made-up rows."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch

pytest.importorskip("lm_eval", reason="needs the eval extra: pip install 'diffurefill[eval]'")

from diffurefill.cli import main, parse
from diffurefill.commands.evaluate import Evaluate, LmEval, Method, short_names
from diffurefill.commands.scored_models import Reading, open_lm
from diffurefill.config import UserError
from diffurefill.evaluate.likelihood.scorer import Method as ScorerMethod
from diffurefill.evaluate.likelihood.scorer import Scorer
from diffurefill.fleet.alone import train_alone
from tests.evaluate.harness.rows import write_rows
from tests.tiny import tiny_config, write_corpus


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("evaluate")
    write_rows(root)
    train_alone(root / "model", tiny_config(write_corpus(root)), 8, lambda line: None)
    return root


def test_two_models_on_all_nine(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(folder / "model")
    out = folder / "results.json"
    command = ["evaluate", model, f"random:{model}", "--data-dir", str(folder), "--limit", "2"]
    assert main([*command, "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "SciQ is its validation split (the harness scores test)." in shown
    record = json.loads(out.read_text())
    trained, untrained = record["models"]
    assert (trained["name"], untrained["name"]) == ("model", "random:model")
    assert trained["weights_sha256"] != untrained["weights_sha256"]
    assert len(trained["tasks"]) == 9
    assert trained["scorer"]["method"] == "chain"
    assert trained["cost"]["rows_read"] <= trained["cost"]["rows_asked"]
    for name, result in trained["tasks"].items():
        assert (result["num_items"], result["num_items_of_task"]) == (2, 6), name
        assert result["items"]["id"] == [0, 3]
        assert result["interval"]["low"] <= result["value"] <= result["interval"]["high"]
        assert all(score < 0 for item in result["items"]["log_likelihoods"] for score in item)
    assert set(record["pairs"][0]["tasks"]) == set(trained["tasks"])
    assert record["versions"]["lm_eval"]
    assert str(folder) not in out.read_text()


def test_every_scorer_runs_and_says_which_it_was(folder: Path) -> None:
    reports = {}
    for scorer in ("chain", "elbo", "confidence"):
        out = folder / f"{scorer}.json"
        assert main(
            ["evaluate", str(folder / "model"), "--tasks", "mmlu,lambada_openai", "--data-dir",
             str(folder), "--scorer", scorer, "--samples", "4", "--out", str(out)]
        ) == 0  # fmt: skip
        reports[scorer] = json.loads(out.read_text())["models"][0]
        samples = ", 4 samples" if scorer == "elbo" else ""
        assert reports[scorer]["scored_by"] == f"{scorer}, 8 MASKs behind{samples}"
    assert len({json.dumps(report["tasks"]["lambada_openai"]) for report in reports.values()}) == 3


def test_a_screen_marks_what_is_approximate_in_the_results(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = folder / "screened.json"
    command = ["evaluate", str(folder / "model"), "--data-dir", str(folder), "--out", str(out)]
    assert main([*command, "--screen", "two_stream", "--rescore", "0.5"]) == 0
    shown = capsys.readouterr().out
    record = json.loads(out.read_text())
    (model,) = record["models"]
    assert model["scored_by"] == "chain, two_stream screen, 8 MASKs behind"
    assert (model["scorer"]["screen"], model["scorer"]["rescore"]) == ("two_stream", 0.5)
    assert "--screen two_stream --rescore 0.5" in record["command"]
    for name, result in model["tasks"].items():
        flags, scores = result["items"]["approximate"], result["items"]["log_likelihoods"]
        assert [len(item) for item in flags] == [len(item) for item in scores], name
        assert result["num_approximate"] == sum(map(sum, flags))
        assert result["num_log_likelihoods"] == sum(map(len, scores))
        # Half of six items; those with an answer that is too long for a row are exact as well.
        assert sum(any(item) for item in flags) <= 3
    tasks = model["tasks"]
    assert tasks["piqa"]["num_approximate"] > 0
    assert tasks["lambada_openai"]["num_approximate"] == 0, "it has one choice: nothing to rank"
    total = sum(result["num_approximate"] for result in tasks.values())
    assert f"{total} of {6 * (6 * 4 + 2 * 2 + 1)} log-likelihoods" in shown


def test_a_twin_is_scored_on_any_task_whatever_the_denoiser_s_defaults(folder: Path) -> None:
    config = tiny_config(folder / "corpus.jsonl")
    config = replace(config, model=replace(config.model, causal=True))
    train_alone(folder / "twin", config, 8, lambda line: None)
    out = folder / "twin.json"
    command = ["evaluate", str(folder / "twin"), str(folder / "model"), "--tasks", "piqa"]
    assert main([*command, "--data-dir", str(folder), "--out", str(out)]) == 0
    twin, model = json.loads(out.read_text())["models"]
    assert (twin["scored_by"], model["scored_by"]) == ("autoregressive", "chain, 8 MASKs behind")


def expect_mistake(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    return error


def test_what_cannot_be_evaluated_is_said_in_a_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(folder / "model")
    here = ["--data-dir", str(folder)]
    assert "at least one model" in expect_mistake(capsys, "evaluate", *here)
    assert "arc_easy" in expect_mistake(capsys, "evaluate", model, *here, "--tasks", "arc")
    assert "put it there" in expect_mistake(capsys, "evaluate", model, "--data-dir", str(tmp_path))
    assert "--limit" in expect_mistake(capsys, "evaluate", model, *here, "--limit", "0")
    screen = ["--screen", "two_stream"]
    assert "between 0 and 1" in expect_mistake(capsys, "evaluate", model, *here, "--rescore", "2")
    said = expect_mistake(capsys, "evaluate", model, *here, *screen, "--scorer", "elbo")
    assert "plain chain rule" in said
    sciq = ["--tasks", "sciq", *here]
    said = expect_mistake(capsys, "evaluate", model, *sciq, "--max-length", "999")
    assert "rows of 32 tokens" in said
    said = expect_mistake(capsys, "evaluate", f"hf:{tmp_path}/none", *sciq)
    assert "cannot load" in said or "pip install" in said


def test_an_hf_model_without_transformers_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match=r"pip install 'diffurefill\[hf\]'"):
        open_lm("hf:some/model", Scorer(), Reading())


def test_weights_that_are_no_numbers_are_refused(folder: Path, tmp_path: Path) -> None:
    lm, _ = open_lm(str(folder / "model"), Scorer(), Reading())
    with torch.no_grad():
        lm.model.denoiser.final_norm.weight.fill_(float("nan"))
    with pytest.raises(UserError, match="not finite"):
        lm._loglikelihood_tokens([(None, [5], [6])])


def test_the_flag_offers_every_scorer() -> None:
    assert get_args(Method) == get_args(ScorerMethod)


def test_names_carry_no_folders() -> None:
    names = ["/home/me/run", "./run", "hf:/x/y.gguf", "hf:user/repo", "random:../a/b"]
    assert short_names(names) == ["run (1)", "run (2)", "hf:y.gguf", "hf:user/repo", "random:b"]


# --- lm-eval --------------------------------------------------------------------------------------


def test_the_harness_s_flags_are_passed_on_as_they_are() -> None:
    command = parse(["lm-eval", "run", "--model", "diffurefill", "--tasks", "x", "--limit", "3"])
    assert isinstance(command, LmEval)
    assert command.arguments[-2:] == ("--limit", "3")


def test_the_harness_makes_our_model_from_its_arguments(folder: Path) -> None:
    import lm_eval.models  # noqa: F401
    from lm_eval.api.registry import get_model

    import diffurefill.commands.lm_eval_model  # noqa: F401

    build = get_model("diffurefill").create_from_arg_string
    where = f"pretrained={folder / 'model'}"
    lm = build(
        f"{where},scorer=elbo,samples=4,max_length=30", {"device": "cuda:0", "batch_size": 1}
    )
    assert (lm.scorer.method, lm.scorer.samples, lm.max_length) == ("elbo", 4, 30)
    assert lm.scorer.right_masks == Evaluate(models=()).right_masks == 8
    assert build(f"{where},right_masks=0", {}).scorer.right_masks == 0
    assert lm.device.type in ("cpu", "cuda")
    with pytest.raises(UserError, match="pretrained=FOLDER"):
        build("scorer=elbo")


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("scorr=elbo", "no scorr"),
        ("dtype=bf16", "no dtype bf16: choose auto, float32, bfloat16"),
        ("dtype=float16", "no dtype float16"),
        ("tokens_per_pass=x", "must be whole numbers"),
        ("samples=1.5", "must be whole numbers"),
        ("check_greedy=maybe", "check_greedy is True or False"),
        ("max_length=x", "max_length x: give a whole number"),
        ("max_length=0", "max_length 0: give a whole number"),
        ("batch_tokens=-1", "batch_tokens -1: give a whole number"),
        ("seed=x", "whole number"),
        ("weights=3", "weights 3: give their names"),
        ("device=gpu", "no device 'gpu'"),
    ],
)
def test_arguments_that_the_harness_passes_on_are_checked(
    folder: Path, argument: str, said: str
) -> None:
    import diffurefill.commands.lm_eval_model as ours

    with pytest.raises(UserError, match=said):
        ours.DiffuRefillLM.create_from_arg_string(f"pretrained={folder / 'model'},{argument}")
