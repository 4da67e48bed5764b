"""What a model scored: per item, so that two models can be paired, and as the report's table."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from diffurefill.config import UserError
from diffurefill.evaluate.harness.tasks import BENCHMARKS, evenly_spaced, scored_split
from diffurefill.evaluate.statistics import mcnemar, paired_difference, proportion

ACCURACIES = ("acc", "acc_norm")


def run_tasks(lm: Any, tasks: dict[str, Any], limit: int | None) -> dict[str, Any]:
    """{task: what `lm` scored on it}. `lm` is any model of the harness."""
    from lm_eval import evaluator

    found = {}
    for name, task in tasks.items():
        indices = evenly_spaced(len(task.eval_docs), limit)
        started = time.monotonic()
        with np.errstate(invalid="ignore"):  # its Brier score where no choice fits: -inf - -inf
            out = evaluator.evaluate(
                lm, {"tasks": {name: task}}, samples={name: indices}, bootstrap_iters=0
            )
        if out is None:
            raise UserError("the harness gave no results: run it in one process")
        found[name] = task_result(name, task, out, limit)
        found[name]["seconds"] = round(time.monotonic() - started, 1)
        if getattr(lm, "approximate", None) is not None:
            _mark_approximate(found[name], [lm.approximate[name, i] for i in range(len(indices))])
        # A task keeps the requests it built, answers and all: the next model starts clean.
        task._instances = None
    return found


def task_result(name: str, task: Any, out: Any, limit: int | None) -> dict[str, Any]:
    """One task's record: value and interval of the report's metric, and every item.

    Raises UserError where no choice of any item fits in a row.
    """
    samples = sorted(out["samples"][name], key=lambda sample: sample["doc_id"])
    if not any(map(_has_answer, samples)):
        raise UserError(
            f"{name}: no answer fits in a row: choose a larger --max-length or fewer --right-masks"
        )
    benchmark = BENCHMARKS[name]
    items: dict[str, Any] = {"id": [sample["doc_id"] for sample in samples]}
    for metric in ACCURACIES:
        if metric in samples[0]:
            items[metric] = [int(sample[metric]) * _has_answer(sample) for sample in samples]
    if isinstance(samples[0]["target"], int):
        items["target"] = [sample["target"] for sample in samples]
    items["log_likelihoods"] = [
        [_number(response[0]) for response in sample["filtered_resps"]] for sample in samples
    ]
    right = items[benchmark.metric]
    metrics = {
        key.partition(",")[0]: _number(value)
        for key, value in out["results"][name].items()
        if key.endswith(",none") and "stderr" not in key
    }
    metrics |= {key: round(sum(x) / len(x), 5) for key in ACCURACIES if (x := items.get(key))}
    return {
        "metric": benchmark.metric,
        "split": scored_split(task.config),
        "num_items": len(samples),
        "num_items_of_task": len(task.eval_docs),
        "subset": "all" if limit is None else "evenly spaced",
        "version": out["versions"].get(name),
        "chance": benchmark.chance,
        "value": sum(right) / len(right),
        "interval": proportion(sum(right), len(right)).to_json(),
        "metrics": metrics,
        "items": items,
    }


def _has_answer(sample: dict[str, Any]) -> bool:
    """Whether some choice fitted in a row. Of choices that all score -inf the harness takes the
    first, which would be right wherever the first is."""
    return any(response[0] != -math.inf for response in sample["filtered_resps"])


def _mark_approximate(result: dict[str, Any], flags: list[list[bool]]) -> None:
    """Say of every log-likelihood in a task's record whether it is a screen's."""
    result["items"]["approximate"] = [[int(flag) for flag in item] for item in flags]
    result["num_approximate"] = sum(map(sum, flags))
    result["num_log_likelihoods"] = sum(map(len, flags))


def _number(value: Any) -> float | None:
    """Rounded; None for what JSON has no number for."""
    is_number = isinstance(value, int | float) and math.isfinite(value)
    return round(float(value), 5) if is_number else None


def compare(models: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every two models on every task: the paired difference with its interval, and McNemar's test.

    Raises UserError where they did not answer the same items.
    """
    pairs = []
    for i, a in enumerate(models):
        for b in models[i + 1 :]:
            tasks = {name: _compare_task(name, a, b) for name in a["tasks"] if name in b["tasks"]}
            pairs.append({"a": a["name"], "b": b["name"], "tasks": tasks})
    return pairs


def _compare_task(name: str, a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    one, other = a["tasks"][name], b["tasks"][name]
    if one["items"]["id"] != other["items"]["id"] or one["split"] != other["split"]:
        raise UserError(
            f"{a['name']} and {b['name']} answered different items of {name}: "
            "evaluate both with the same --limit and --data-dir"
        )
    x, y = (result["items"][result["metric"]] for result in (one, other))
    return {"difference": paired_difference(x, y).to_json(), "mcnemar": mcnemar(x, y).to_json()}


def versions() -> dict[str, str | None]:
    """Of the libraries that decide a figure; None for one that is not installed."""
    from importlib import metadata

    def of(package: str) -> str | None:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return None

    names = ("lm_eval", "datasets", "torch", "tokenizers", "transformers")
    return {name: of(name) for name in names}


def quiet_harness() -> None:
    """The harness's own log lines, and the bars of reading its rows, are for its own command."""
    import datasets

    datasets.disable_progress_bars()
    for name in ("lm_eval", "datasets"):
        logging.getLogger(name).setLevel(logging.ERROR)
