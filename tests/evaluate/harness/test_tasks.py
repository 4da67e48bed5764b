"""Benchmarks as the harness defines them, on rows of our own; no row is read from the hub."""

import gzip
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="needs the eval extra: pip install 'diffurefill[eval]'")

import lm_eval
import yaml
from lm_eval.api.model import LM

from diffurefill.config import UserError
from diffurefill.evaluate.harness.results import compare, run_tasks
from diffurefill.evaluate.harness.tasks import (
    BENCHMARKS,
    MMLU_DESCRIPTION,
    chosen,
    evenly_spaced,
    load_tasks,
    local_file,
)
from tests.evaluate.harness.rows import rows_of, write_rows

SHARED = Path(__file__).resolve().parents[3].parent / "shared" / "data" / "bench"


class Answering(LM):
    """Gives each continuation the log-likelihood that `of(context, continuation)` says."""

    def __init__(self, of) -> None:
        super().__init__()
        self.of = of
        self.asked: list[tuple[str, str]] = []

    def loglikelihood(self, requests, disable_tqdm=False):
        self.asked += [request.args for request in requests]
        return [(self.of(*request.args), True) for request in requests]

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        raise NotImplementedError

    def generate_until(self, requests, disable_tqdm=False):
        raise NotImplementedError


def asked(name: str, folder: Path) -> list[tuple[str, str]]:
    lm = Answering(lambda context, continuation: 0.0)
    run_tasks(lm, load_tasks([BENCHMARKS[name]], folder), limit=1)
    return lm.asked


def test_prompts_and_choices_are_those_of_the_harness(tmp_path: Path) -> None:
    write_rows(tmp_path)
    assert asked("hellaswag", tmp_path)[1] == ("Jumping: The fox 0. It", " sing old songs.")
    assert asked("arc_easy", tmp_path)[1] == ("Question: Who jumps, 0?\nAnswer:", " a lazy dog")
    assert asked("piqa", tmp_path)[0] == ("Question: Jump over 0\nAnswer:", " with a fox")
    assert asked("openbookqa", tmp_path)[3] == ("What sings, 0?", " old songs")
    sciq = ("Foxes jump.\nQuestion: Who 0?\nAnswer:", " fox")
    assert asked("sciq", tmp_path)[3] == sciq
    lambada = ("the quick brown fox jumps over 0 lazy", " dog")
    assert asked("lambada_openai", tmp_path) == [lambada]
    one, other = asked("winogrande", tmp_path)
    assert one == ("The fox saw the dog 0 so the fox", " jumped over.")
    assert other[1] == one[1]
    context, answer = asked("mmlu", tmp_path)[2]
    assert context.startswith("The following are multiple choice questions (with answers) about an")
    assert context.endswith("\nC. seven birds\nD. old songs\nAnswer:")
    assert answer == " C"


def test_mmlu_as_one_task_says_what_each_subject_s_file_says() -> None:
    folder = Path(lm_eval.__file__).parent / "tasks" / "mmlu" / "default"
    files = sorted(folder.glob("mmlu_*.yaml"))
    assert len(files) == 57
    for path in files:
        config = yaml.safe_load(path.read_text("utf-8"))
        said = config["dataset_name"].replace("_", " ")
        expected = MMLU_DESCRIPTION.replace("{{subject.replace('_', ' ')}}", said)
        assert config["description"] == expected, path.name


def test_accuracy_counts_the_likeliest_and_its_norm_the_likeliest_a_character(
    tmp_path: Path,
) -> None:
    """The long wrong choice loses by its sum and wins by its mean, or the other way round."""
    write_rows(tmp_path, 8)
    per_character = Answering(
        lambda _, text: -1.0 * len(text) if "dog" in text else -1.3 * len(text)
    )
    tasks = load_tasks([BENCHMARKS["arc_easy"]], tmp_path)
    found = run_tasks(per_character, tasks, limit=None)["arc_easy"]
    # Sums: fox -7.8 before dog -11. Divided by length: dog before all others.
    assert found["items"]["acc"] == [1, 0, 0, 0] * 2
    assert found["items"]["acc_norm"] == [0, 1, 0, 0] * 2
    assert (found["value"], found["metrics"]["acc"]) == (0.25, 0.25)
    assert found["metrics"]["acc_norm"] == 0.25
    assert found["num_items"] == found["num_items_of_task"] == 8
    assert len(found["items"]["log_likelihoods"][0]) == 4


def test_an_item_whose_choices_are_all_too_long_is_wrong(tmp_path: Path) -> None:
    write_rows(tmp_path, 8)
    tasks = load_tasks([BENCHMARKS["arc_easy"]], tmp_path)
    # Where one fits it is the fox, the first choice; it is right for items 0 and 4.
    too_long = Answering(
        lambda text, choice: -1.0 if "fox" in choice and ", 0?" not in text else -math.inf
    )
    found = run_tasks(too_long, tasks, limit=None)["arc_easy"]
    assert found["items"]["acc"] == found["items"]["acc_norm"] == [0, 0, 0, 0, 1, 0, 0, 0]
    assert (found["value"], found["metrics"]["acc"], found["metrics"]["acc_norm"]) == (0.125,) * 3
    with pytest.raises(UserError, match="arc_easy: no answer fits in a row"):
        run_tasks(Answering(lambda *_: -math.inf), tasks, limit=None)


def test_a_second_model_starts_clean_and_is_compared_item_by_item(tmp_path: Path) -> None:
    write_rows(tmp_path, 8)
    tasks = load_tasks([BENCHMARKS["arc_easy"], BENCHMARKS["piqa"]], tmp_path)
    fox = Answering(lambda _, text: float("fox" in text))
    dog = Answering(lambda _, text: float("dog" in text))
    models = [
        {"name": name, "tasks": run_tasks(lm, tasks, limit=4)}
        for name, lm in (("fox", fox), ("dog", dog))
    ]
    assert models[0]["tasks"]["arc_easy"]["items"]["id"] == [0, 2, 4, 6]
    (pair,) = compare(models)
    found = pair["tasks"]["arc_easy"]
    assert found["difference"]["mean"] == pytest.approx(0.5)
    assert (found["mcnemar"]["only_a"], found["mcnemar"]["only_b"]) == (2, 0)
    models[1]["tasks"] = run_tasks(dog, tasks, limit=3)
    with pytest.raises(UserError, match="different items"):
        compare(models)


def test_subsets_are_spread_over_the_whole_file() -> None:
    assert evenly_spaced(10, 4) == [0, 2, 5, 7]
    assert evenly_spaced(10, None) == list(range(10))
    assert evenly_spaced(3, 99) == [0, 1, 2]


def test_rows_are_read_gzipped_too_and_damage_is_named(tmp_path: Path) -> None:
    write_rows(tmp_path)
    plain = tmp_path / BENCHMARKS["piqa"].file
    text = plain.read_bytes()
    plain.unlink()
    zipped = tmp_path / f"{plain.name}.gz"
    zipped.write_bytes(gzip.compress(text))
    assert local_file(BENCHMARKS["piqa"], tmp_path) == zipped
    assert len(load_tasks([BENCHMARKS["piqa"]], tmp_path)["piqa"].eval_docs) == 6
    packed = gzip.compress(text)
    for damaged in (packed[:60], packed[:30] + b"\xff" * 30 + packed[60:]):
        zipped.write_bytes(damaged)
        with pytest.raises(UserError, match="fetch it again"):
            load_tasks([BENCHMARKS["piqa"]], tmp_path)
    zipped.write_bytes(gzip.compress(b"\n"))
    with pytest.raises(UserError, match="no rows"):
        load_tasks([BENCHMARKS["piqa"]], tmp_path)


@pytest.mark.parametrize("name", BENCHMARKS)
@pytest.mark.parametrize("wrong", ["left out", None, 0.5, []])
def test_a_row_without_a_field_is_refused_by_name(tmp_path: Path, name: str, wrong) -> None:
    (good,) = rows_of(name, 1)
    path = tmp_path / BENCHMARKS[name].file
    for field in good:
        bad = good | {field: wrong}
        if wrong == "left out":
            del bad[field]
        path.write_text(json.dumps(good) + "\n" + json.dumps(bad))
        with pytest.raises(UserError, match=f"{path.name}, row 2: {field} is missing or of"):
            load_tasks([BENCHMARKS[name]], tmp_path)


@pytest.mark.parametrize("line", ["1", "[1]", "null", '"text"'])
def test_a_row_that_is_no_object_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / BENCHMARKS["piqa"].file
    path.write_text(line)
    with pytest.raises(UserError, match=f"{path.name}, row 1 is no JSON object"):
        load_tasks([BENCHMARKS["piqa"]], tmp_path)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"piqa_validation\.jsonl"):
        load_tasks(chosen("piqa"), tmp_path)
    with pytest.raises(UserError, match="hellaswag, arc_easy"):
        chosen("helaswag")
    with pytest.raises(UserError):
        chosen(" , ")
    assert [one.name for one in chosen("sciq, piqa,sciq")] == ["sciq", "piqa"]
    assert len(chosen("all")) == 9


@pytest.mark.skipif(not SHARED.is_dir(), reason="the benchmark files are not beside this checkout")
def test_all_nine_real_files_render() -> None:
    lm = Answering(lambda context, continuation: -float(len(continuation)))
    tasks = load_tasks(chosen("all"), SHARED)
    found = run_tasks(lm, tasks, limit=3)
    sizes = {name: result["num_items_of_task"] for name, result in found.items()}
    assert sizes == {
        "hellaswag": 10_042, "arc_easy": 2_376, "arc_challenge": 1_172, "piqa": 1_838,
        "winogrande": 1_267, "openbookqa": 500, "sciq": 1_000, "lambada_openai": 5_153,
        "mmlu": 14_042,
    }  # fmt: skip
    assert all(context.strip() and continuation.strip() for context, continuation in lm.asked)


def test_a_model_of_ours_needs_no_transformers() -> None:
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "import diffurefill.commands.lm_eval_model\n"
        "from lm_eval.api.registry import get_model\n"
        "print(get_model('diffurefill').__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "DiffuRefillLM", done.stderr
