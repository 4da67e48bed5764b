"""`--model diffurefill` for lm-evaluation-harness: importing this registers it."""

from __future__ import annotations

from typing import Any

import torch
from lm_eval.api.registry import register_model  # pyrefly: ignore[missing-import]

from diffurefill.commands.common import RIGHT_MASKS
from diffurefill.commands.scored_models import Reading, filler, scoring_model
from diffurefill.config import UserError
from diffurefill.evaluate.harness.lm import DiffusionLM
from diffurefill.evaluate.likelihood.scorer import Scorer
from diffurefill.fleet.loading import load
from diffurefill.runtime import require_device

READING = ("weights", "dtype", "max_length", "batch_tokens", "decode", "seed")
SCORER = (
    "tokens_per_pass", "right_masks", "samples", "guidance", "seed", "check_greedy",
)  # fmt: skip


@register_model("diffurefill")
class DiffuRefillLM(DiffusionLM):
    """`pretrained` names the model; the other arguments are those of `Scorer` and `Reading`."""

    def __init__(
        self,
        pretrained: str | None = None,
        *,
        scorer: str = "chain",
        device: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        **options: Any,
    ) -> None:
        # batch_size is the harness's; rows of one length are batched by batch_tokens here.
        unknown = sorted(set(options) - {*READING, *SCORER, "path"})
        if unknown:
            raise UserError(
                f"model_args: no {', '.join(unknown)}; there are pretrained, scorer, "
                f"{', '.join(dict.fromkeys((*READING, *SCORER)))}"
            )
        where = pretrained or options.pop("path", None)
        if where is None:
            raise UserError("model_args: say pretrained=FOLDER, the store or folder of the model")
        protocol = {"right_masks": RIGHT_MASKS, **_those(options, SCORER)}
        how = Reading(device=_device(device), **_those(options, READING))
        model = load(str(where), how.weights)
        scoring = scoring_model(model, how)
        super().__init__(
            scoring,
            model.tokenizer,
            Scorer(method=scorer, **protocol),  # pyrefly: ignore[bad-argument-type]
            filler(model, scoring, how.decode),
            seed=how.seed,
        )


def _those(options: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name in names}


def _device(name: str | None) -> torch.device | None:
    """The harness's command asks for cuda:0 unless told otherwise, GPU or not. UserError for a
    device that is not to be had here."""
    if name is None or (name.startswith("cuda") and not torch.cuda.is_available()):
        return None
    return require_device(name)
