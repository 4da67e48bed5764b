"""The nine benchmarks on models side by side; a random model at chance; the harness's own command.

    python bench/evaluate.py [--quick] [MODEL ...] [--data-dir DIR] [--limit N]

A MODEL is what `diffurefill evaluate` takes; `random:MODEL`, the first one untrained, is added.
Without one (and with --quick: two steps of the demo preset) only the way through is tried. The rows
come from DIR (the harness's field names, ../shared/data/bench by default), N evenly spaced items
of each task (full: 50; --quick: 3).

`random_at_chance` says for every task whether the chance of a guess lies in the untrained model's
interval; at 1 - 0.05 / tasks, so that all of them hold together with 95%. `side_by_side` gives the
first hf: model's piqa by this command and by lm-eval's own on the same rows and items: accuracies,
and the largest difference of a log-likelihood in nats.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from _barely_trained import barely_trained
from _common import ROOT, report
from diffurefill.commands.evaluate import Evaluate, evaluate, notes
from diffurefill.evaluate.harness.tasks import BENCHMARKS, evenly_spaced, local_file
from diffurefill.evaluate.statistics import proportion
from diffurefill.runtime import set_threads

SHARED = ROOT.parent / "shared" / "data" / "bench"
SIDE_BY_SIDE = "piqa"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("models", nargs="*")
    parser.add_argument("--data-dir", type=Path, default=SHARED)
    parser.add_argument("--limit", type=int)
    options = parser.parse_args()
    set_threads(1)
    if find_spec("lm_eval") is None or not options.data_dir.is_dir():
        print(json.dumps({"skipped": "needs the eval extra, and benchmark rows in --data-dir"}))
        return
    limit = options.limit or (3 if options.quick else 50)
    with tempfile.TemporaryDirectory() as folder:
        models = options.models or [barely_trained(Path(folder))]
        first_own = next(model for model in models if not model.startswith("hf:"))
        asked = Evaluate((*models, f"random:{first_own}"), data_dir=options.data_dir, limit=limit)
        record = evaluate(asked)
    figures = {
        **summary(record),
        "pairs": record["pairs"],
        "side_by_side": side_by_side(models, record, options.data_dir, limit),
        "models": [without_texts(model) for model in record["models"]],
        "limit": limit,
        "notes": notes(record),
        "versions": record["versions"],
    }
    if options.quick:
        figures = {key: figures[key] for key in ("accuracy", "random_at_chance", "side_by_side")}
    report("evaluate", figures, quick=options.quick)


def summary(record: dict[str, Any]) -> dict[str, Any]:
    *_, untrained = record["models"]
    level = 1 - 0.05 / len(untrained["tasks"])
    at_chance = {}
    for name, result in untrained["tasks"].items():
        right = sum(result["items"][result["metric"]])
        interval = proportion(right, result["num_items"], level=level)
        at_chance[name] = result["chance"] in interval
    accuracy = {
        model["name"]: {name: result["value"] for name, result in model["tasks"].items()}
        for model in record["models"]
    }
    return {"accuracy": accuracy, "random_at_chance": at_chance}


def without_texts(model: dict[str, Any]) -> dict[str, Any]:
    """Right and wrong of every item stay, so that models can be paired later; scores go."""
    tasks = {}
    for name, result in model["tasks"].items():
        kept = ("id", "acc", "acc_norm")
        items = {key: value for key, value in result["items"].items() if key in kept}
        tasks[name] = {**result, "items": items}
    return {**model, "tasks": tasks}


# --- lm-eval's own command ------------------------------------------------------------------------


def side_by_side(
    models: list[str], record: dict[str, Any], data_dir: Path, limit: int
) -> dict[str, Any] | None:
    """None where no hf: model is among them."""
    where = next((i for i, model in enumerate(models) if model.startswith("hf:")), None)
    if where is None:
        return None
    ours = record["models"][where]["tasks"][SIDE_BY_SIDE]
    pretrained = models[where].removeprefix("hf:")
    own = own_command(pretrained, data_dir, evenly_spaced(ours["num_items_of_task"], limit))
    differences = [
        abs(a - b)
        for item, answers in zip(ours["items"]["log_likelihoods"], own["scores"], strict=True)
        for a, b in zip(item, answers, strict=True)
    ]
    names = ("acc", "acc_norm")
    return {
        "task": SIDE_BY_SIDE,
        "model": record["models"][where]["name"],
        "num_items": ours["num_items"],
        "evaluate": {name: ours["metrics"][name] for name in names},
        "lm_eval": {name: own["results"][f"{name},none"] for name in names},
        "max_abs_difference": round(max(differences), 6),
    }


def own_command(pretrained: str, data_dir: Path, indices: list[int]) -> dict[str, Any]:
    """What `python -m lm_eval` says of the task: its own definition, with local rows."""
    benchmark = BENCHMARKS[SIDE_BY_SIDE]
    with tempfile.TemporaryDirectory() as temporary:
        folder, out = Path(temporary) / "tasks", Path(temporary) / "out"
        folder.mkdir()
        (folder / "local.yaml").write_text(definition(data_dir), "utf-8")
        subprocess.run(
            [
                sys.executable, "-m", "lm_eval", "run", "--model", "hf",
                "--model_args", f"pretrained={pretrained},dtype=float32",
                "--include_path", str(folder), "--tasks", f"{benchmark.name}_local",
                "--samples", json.dumps({f"{benchmark.name}_local": indices}),
                "--device", "cpu", "--batch_size", "16", "--output_path", str(out),
                "--log_samples",
            ],
            check=True, stdout=subprocess.DEVNULL, cwd=temporary,
        )  # fmt: skip
        results = json.loads(next(out.rglob("results_*.json")).read_text())
        lines = next(out.rglob("samples_*.jsonl")).read_text("utf-8").splitlines()
    samples = sorted((json.loads(line) for line in lines), key=lambda one: one["doc_id"])
    scores = [[float(answer[0]) for answer in one["filtered_resps"]] for one in samples]
    return {"results": results["results"][f"{benchmark.name}_local"], "scores": scores}


def definition(data_dir: Path) -> str:
    import lm_eval

    benchmark = BENCHMARKS[SIDE_BY_SIDE]
    stock = Path(lm_eval.__file__).parent / "tasks" / benchmark.definition
    return "\n".join(
        [
            f"include: {stock}",
            f"task: {benchmark.name}_local",
            "dataset_path: json",
            "dataset_name: null",
            "training_split: null",
            f"dataset_kwargs: {{data_files: {{{benchmark.split}: "
            f"{local_file(benchmark, data_dir).resolve()}}}}}",
        ]
    )


if __name__ == "__main__":
    main()
