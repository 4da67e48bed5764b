"""The report's nine benchmarks: lm-eval's own task definitions, on the hub's rows or local ones.

A task keeps the harness's prompts, choices and metrics; only where its rows come from may change.
The harness's index of all its tasks takes half a minute to build: the nine files are read directly.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffurefill.config import UserError


@dataclass(frozen=True)
class Benchmark:
    """One column of the report's table."""

    name: str
    column: str
    metric: str
    """acc, or acc_norm: by the choices' length in characters."""
    definition: str
    """Below lm_eval/tasks."""
    file: str
    """Local rows, in the field names of the definition; `.gz` may follow."""
    split: str
    """Of those rows."""
    chance: float
    """Accuracy of a guess."""

    @property
    def needs_greedy(self) -> bool:
        """Whether its metric asks for the greedy flag."""
        return self.name == "lambada_openai"


BENCHMARKS = {
    one.name: one
    for one in (
        Benchmark(
            "hellaswag", "HS", "acc_norm", "hellaswag/hellaswag.yaml",
            "hellaswag_validation.jsonl", "validation", 0.25,
        ),
        Benchmark(
            "arc_easy", "ARC-e", "acc", "arc/arc_easy.yaml",
            "arc_easy_test.jsonl", "test", 0.25,
        ),
        Benchmark(
            "arc_challenge", "ARC-c", "acc_norm", "arc/arc_challenge.yaml",
            "arc_challenge_test.jsonl", "test", 0.25,
        ),
        Benchmark(
            "piqa", "PIQA", "acc_norm", "piqa/piqa.yaml",
            "piqa_validation.jsonl", "validation", 0.5,
        ),
        Benchmark(
            "winogrande", "WG", "acc", "winogrande/default.yaml",
            "winogrande_xl_validation.jsonl", "validation", 0.5,
        ),
        Benchmark(
            "openbookqa", "OBQA", "acc_norm", "openbookqa/openbookqa.yaml",
            "openbookqa_test.jsonl", "test", 0.25,
        ),
        Benchmark(
            "sciq", "SciQ", "acc", "sciq/sciq.yaml",
            "sciq_validation.jsonl", "validation", 0.25,
        ),
        Benchmark(
            "lambada_openai", "LAMB", "acc", "lambada/lambada_openai.yaml",
            "lambada_openai_test.jsonl", "test", 0.0,
        ),
        Benchmark(
            "mmlu", "MMLU", "acc", "mmlu/default/_default_template_yaml",
            "mmlu_test.jsonl", "test", 0.25,
        ),
    )
}  # fmt: skip
"""By the harness's names, in the report's order. The local SciQ is the validation split; the
harness scores the test split."""

_LETTERED = {"text": [str], "label": [str]}
FIELDS: dict[str, dict[str, Any]] = {
    "hellaswag": {
        "activity_label": str, "ctx_a": str, "ctx_b": str, "endings": [str], "label": str | int,
    },
    "arc_easy": {"question": str, "choices": _LETTERED, "answerKey": str},
    "arc_challenge": {"question": str, "choices": _LETTERED, "answerKey": str},
    "piqa": {"goal": str, "sol1": str, "sol2": str, "label": int},
    "winogrande": {"sentence": str, "option1": str, "option2": str, "answer": str},
    "openbookqa": {"question_stem": str, "choices": _LETTERED, "answerKey": str},
    "sciq": {
        "question": str, "support": str, "correct_answer": str, "distractor1": str,
        "distractor2": str, "distractor3": str,
    },
    "lambada_openai": {"text": str},
    "mmlu": {"question": str, "subject": str, "choices": [str], "answer": int},
}  # fmt: skip
"""What a local row must have. Without a field some of the harness's prompts are shorter, and score
all the same; others end in an error of its templates."""

MMLU_DESCRIPTION = (
    "The following are multiple choice questions (with answers) about "
    "{{subject.replace('_', ' ')}}.\n\n"
)
"""What the harness's 57 subject files say, a subject each; as one task it is the same mean."""


def chosen(names: str) -> list[Benchmark]:
    """The benchmarks of a comma-separated list; `all` is every one. UserError for a wrong name."""
    if names == "all":
        return list(BENCHMARKS.values())
    asked = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    unknown = [name for name in asked if name not in BENCHMARKS]
    if unknown or not asked:
        raise UserError(
            f"no benchmark {', '.join(unknown) or 'named'}: there are {', '.join(BENCHMARKS)}; "
            "for any other task of the harness use `diffurefill lm-eval`"
        )
    return [BENCHMARKS[name] for name in asked]


def load_tasks(benchmarks: Iterable[Benchmark], data_dir: Path | None) -> dict[str, Any]:
    """{name: the harness's task object}, its rows from `data_dir` or from the hub."""
    from lm_eval.api.task import ConfigurableTask

    return {one.name: ConfigurableTask(config=task_config(one, data_dir)) for one in benchmarks}


def task_config(benchmark: Benchmark, data_dir: Path | None) -> dict[str, Any]:
    """The harness's definition, zero-shot, and where the rows come from."""
    config = _definition(benchmark)
    config |= {"task": benchmark.name, "num_fewshot": 0, "training_split": None}
    config |= {"fewshot_split": None, "fewshot_config": None}
    if benchmark.name == "mmlu":
        config |= {"description": MMLU_DESCRIPTION, "dataset_name": "all"}
    if data_dir is not None:
        config |= {"validation_split": None, "test_split": None}
        config[f"{benchmark.split}_split"] = benchmark.split
        # The harness would prepare all rows anew whenever it looks at them.
        prepare = config.pop("process_docs", None)
        path = local_file(benchmark, data_dir)
        config["custom_dataset"] = _local_rows(path, benchmark, prepare)
    return config


def _definition(benchmark: Benchmark) -> dict[str, Any]:
    import lm_eval
    from lm_eval.tasks._yaml_loader import load_yaml

    path = Path(lm_eval.__file__).parent / "tasks" / benchmark.definition
    if not path.is_file():
        raise UserError(
            f"this lm-eval has no {benchmark.definition}: install the tested version, "
            "pip install 'lm-eval==0.4.13'"
        )
    config = load_yaml(path)
    for structure in ("tag", "group", "include"):
        config.pop(structure, None)
    return config


def local_file(benchmark: Benchmark, data_dir: Path) -> Path:
    """The task's file in `data_dir`, plain or gzipped. UserError where there is none."""
    for path in (data_dir / benchmark.file, data_dir / f"{benchmark.file}.gz"):
        if path.is_file():
            return path
    raise UserError(
        f"no {benchmark.file} (or .gz) in {data_dir} for {benchmark.name}: put it there, leave the "
        "task out of --tasks, or leave out --data-dir to read the hub's rows"
    )


def _local_rows(
    path: Path, benchmark: Benchmark, prepare: Callable[[Any], Any] | None
) -> Callable[..., dict[str, Any]]:
    def read(**_: object) -> dict[str, Any]:
        import datasets

        opened = gzip.open if path.suffix == ".gz" else open
        try:
            with opened(path, "rt", encoding="utf-8") as file:
                rows = [json.loads(line) for line in file if line.strip()]
        except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
            raise UserError(f"cannot read {path}: {error}; fetch it again") from None
        if not rows:
            raise UserError(f"{path} has no rows: fetch it again")
        for number, row in enumerate(rows, 1):
            _require_fields(row, FIELDS[benchmark.name], f"{path}, row {number}")
        dataset = datasets.Dataset.from_list(rows)
        return {benchmark.split: dataset if prepare is None else prepare(dataset)}

    return read


def _require_fields(row: Any, fields: dict[str, Any], where: str) -> None:
    if not isinstance(row, dict):
        raise UserError(f"{where} is no JSON object: fetch the file again")
    for name, kind in fields.items():
        if not _fits(row.get(name), kind):
            raise UserError(
                f"{where}: {name} is missing or of a wrong type; give the rows with the fields "
                f"{', '.join(fields)}"
            )


def _fits(value: Any, kind: Any) -> bool:
    """`kind`: a type, [the type of a list's items], or {key: kind}."""
    if isinstance(kind, dict):
        return isinstance(value, dict) and all(_fits(value.get(k), v) for k, v in kind.items())
    if isinstance(kind, list):
        is_list = isinstance(value, list) and bool(value)
        return is_list and all(_fits(x, kind[0]) for x in value)
    return isinstance(value, kind)


def evenly_spaced(num_items: int, limit: int | None) -> list[int]:
    """Indices of `limit` of `num_items` items, spread over all of them: files are sorted by topic,
    so that the first ones alone would be another benchmark. All where `limit` is None."""
    count = num_items if limit is None else min(limit, num_items)
    return [i * num_items // count for i in range(count)]


def scored_split(config: Any) -> str:
    """The split that the harness scores: test where there is one."""
    return config.test_split or config.validation_split
