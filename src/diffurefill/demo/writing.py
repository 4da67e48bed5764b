"""What the demo's model writes: continuations and one infill, draft and refill, with statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from diffurefill.config import DecodeConfig, ProbeConfig, Stage
from diffurefill.decode.canvas import Canvas, continuation
from diffurefill.decode.generate import cut_at_eos
from diffurefill.decode.view.frames import Frame, frames
from diffurefill.evaluate.probes import held_out_ce, make_probe
from diffurefill.evaluate.text import distinct_share, doubled_share
from diffurefill.fleet.loading import LoadedModel

PYTHON_PROMPTS = ("def read_lines(path, ", "class Parser(", "import os\nimport sys\n\n\ndef ")
PYTHON_INFILL = (
    "def count_words(text):\n    counts = {}\n    for word in text.split():\n"
    "        [MASK*14]\n    return counts\n"
)
NUM_TOKENS = 80
NUM_SAMPLES = 64
OWN_CE_MASK_RATE = 0.15
PROMPT_TOKENS = 10
GAP_TOKENS = 16


@dataclass(frozen=True)
class Written:
    """One canvas, filled."""

    title: str
    draft: str
    """The text after the draft, before any refill."""
    text: str
    num_changed: int
    """Tokens that refilling changed."""
    num_forward_passes: int
    frames: list[Frame]
    """Pass by pass."""

    def to_json(self) -> dict[str, Any]:
        keys = ("title", "draft", "text", "num_changed", "num_forward_passes")
        return {key: getattr(self, key) for key in keys}


def write_samples(model: LoadedModel, *, is_python: bool, seed: int = 0) -> list[Written]:
    """A few continuations and one infill in the middle."""
    found = []
    for i, prompt in enumerate(_prompts(model, is_python)):
        canvas = continuation(
            [prompt], NUM_TOKENS, model.specials, max_tokens=model.config.data.row_length
        )
        title = f"continue {model.tokenizer.decode(prompt)!r}"
        found.append(_write(model, canvas, title, seed + i, start=1 + len(prompt)))
    canvas = model.gaps(PYTHON_INFILL) if is_python else _held_out_gap(model)
    found.append(_write(model, canvas, "fill the gap, both sides in view", seed, start=None))
    return found


def sample_statistics(
    model: LoadedModel, stages: tuple[Stage, ...], *, seed: int = 1000
) -> dict[str, float]:
    """Statistics of `NUM_SAMPLES` unprompted samples under `stages`."""
    canvas = continuation(
        [[]] * NUM_SAMPLES, NUM_TOKENS, model.specials, max_tokens=model.config.data.row_length
    )
    done = model.fill(canvas, decode=DecodeConfig(stages=stages), seed=seed, forbid_eos=True)
    return _statistics(model, done.ids.cpu().numpy(), canvas.doc_ids.numpy())


def held_out_statistics(model: LoadedModel) -> dict[str, float]:
    """The same of real held-out text: what the model should come near to."""
    part = slice(NUM_SAMPLES), slice(1 + NUM_TOKENS)
    return _statistics(model, model.probe.ids[part], model.probe.doc_ids[part])


def _statistics(model: LoadedModel, ids: np.ndarray, doc_ids: np.ndarray) -> dict[str, float]:
    """Doubled tokens, distinct bigrams, and the CE that the model itself gives to hidden tokens.

    Its own CE favours what it would write and is no judge of quality: it shows what refilling
    mends, and that a text repeats itself where it falls far below that of real text.
    """
    bos_id, mask_id = model.tokenizer.bos_id, model.tokenizer.mask_id
    masks = ProbeConfig(num_rows=len(ids), mask_rates=(OWN_CE_MASK_RATE,))
    hidden = make_probe(ids, doc_ids, masks, seed=0, bos_id=bos_id)
    own = held_out_ce(model.denoiser, hidden, mask_id=mask_id, device=model.device)
    samples = [row[real].tolist() for row, real in zip(ids, doc_ids >= 0, strict=True)]
    return {
        "doubled_share": doubled_share(samples),
        "distinct_2": distinct_share(samples),
        "own_ce": own.mean,
    }


def _write(model: LoadedModel, canvas: Canvas, title: str, seed: int, start: int | None) -> Written:
    done = model.fill(canvas, seed=seed, forbid_eos=start is None, keep_trajectory=True)
    drafts = [record for record in done.trajectory if not record.remasked.any()]
    decode = model.tokenizer.decode
    eos = model.tokenizer.eos_id
    before, after = (canvas.rows(ids.cpu())[0] for ids in (drafts[-1].ids, done.ids))
    if start is not None:
        before, after = cut_at_eos(before, eos, start), cut_at_eos(after, eos, start)
    return Written(
        title=title,
        draft=decode(before),
        text=decode(after),
        num_changed=int((drafts[-1].ids != done.ids).sum()),
        num_forward_passes=done.num_forward_passes,
        frames=frames(done.trajectory, model.tokenizer.decode_inner),
    )


def _prompts(model: LoadedModel, is_python: bool) -> list[list[int]]:
    """Prompts in the language of the corpus: for other text, how held-out passages begin."""
    if is_python:
        return model.tokenizer.encode_batch(list(PYTHON_PROMPTS))
    return [ids[:PROMPT_TOKENS] for ids in _passages(model)[: len(PYTHON_PROMPTS)]]


def _held_out_gap(model: LoadedModel) -> Canvas:
    """A held-out passage with its middle hidden: the first of those that are longest."""
    longest = max((ids[:NUM_TOKENS] for ids in _passages(model)), key=len)
    ids = model.tokenizer.encode(model.tokenizer.decode(longest))
    hidden = max(1, min(GAP_TOKENS, len(ids) // 2))
    start = (len(ids) - hidden) // 2
    left = model.tokenizer.decode(ids[:start])
    right = model.tokenizer.decode_inner(ids[start + hidden :])
    return model.gaps(f"{left}[MASK*{hidden}]{right}")


def _passages(model: LoadedModel) -> list[list[int]]:
    """What each held-out row begins with, to that document's end and without specials. Beginnings
    of documents come first; where documents are books there may be none."""
    bos_id, eos_id = model.tokenizer.bos_id, model.tokenizer.eos_id
    rows = zip(model.probe.ids, model.probe.doc_ids, strict=True)
    found = [
        [int(i) for i in ids[doc_ids == doc_ids[0]] if i not in (bos_id, eos_id)]
        for ids, doc_ids in sorted(rows, key=lambda row: row[0][0] != bos_id)
    ]
    return [ids for ids in found if ids]
