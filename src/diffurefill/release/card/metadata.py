"""The card's metadata: what the hub reads above the text, `model-index` among it."""

from __future__ import annotations

from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from diffurefill.evaluate.harness.tasks import BENCHMARKS
from diffurefill.release.card.model import CardModel

TAGS = ["masked-diffusion", "diffusion-lm", "diffurefill"]
HUB_DATASET = "hf://datasets/"


def metadata(
    model: CardModel, results: dict[str, Any] | None, license_name: str | None, language: str | None
) -> str:
    """YAML between its two rules. `results`: of this model, from `evaluate`."""
    found = _eval_results(results) if results else []
    data = ModelCardData(
        license=license_name,
        language=language,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=TAGS,
        datasets=datasets(model) or None,
        # The library writes a model-index from these two together alone.
        model_name=model.name if found else None,
        eval_results=found or None,
    )
    return f"---\n{data.to_yaml()}\n---"


def datasets(model: CardModel) -> list[str]:
    """Data sets of the hub among the sources' paths, as user/name."""
    paths = [path for source in model.config.data.sources for path in source.paths]
    names = [path.removeprefix(HUB_DATASET) for path in paths if path.startswith(HUB_DATASET)]
    return sorted({"/".join(name.split("@")[0].split("/")[:2]) for name in names})


def _eval_results(results: dict[str, Any]) -> list[EvalResult]:
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=name,
            dataset_name=f"{BENCHMARKS[name].column} ({task['num_items']:,} items)",
            dataset_split=task["split"],
            metric_type=task["metric"],
            metric_value=round(task["value"], 4),
            metric_name=f"{task['metric']}, zero-shot, {results['scored_by']} scorer",
        )
        for name, task in results["tasks"].items()
    ]
