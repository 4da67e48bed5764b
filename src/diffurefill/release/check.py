"""An exported folder opened as its users will: in a process of its own, and compared.

`python -m diffurefill.release.check FOLDER REFERENCE` loads the folder by this package and, where
it is installed, by transformers, which then runs the folder's own file. Logits must be equal bit
for bit and the written tokens the same. Prints one JSON object; exit code 1 where it differs.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from diffurefill.config import UserError
from diffurefill.decode.canvas import continuation
from diffurefill.fleet.found import Found, found_exported
from diffurefill.fleet.loading import LoadedModel, build
from diffurefill.runtime import philox

ROWS, POSITIONS, NEW_TOKENS, PROMPT_TOKENS = 2, 128, 16, 8
MASKED_SHARE = 0.5
SEED = 7
TEXTS = ("The quick brown fox.", "def add(a, b):\n    return a + b\n", "Zürich, 2026: 3 % mehr")


# --- what is expected ----------------------------------------------------------------------------


def write_reference(found: Found, path: Path) -> None:
    """Logits and tokens of the model as this process has it, on the CPU, to compare with."""
    model = build(found, torch.device("cpu"))
    ids, doc_ids = _rows(model)
    with torch.inference_mode():
        logits = model.denoiser(torch.from_numpy(ids), torch.from_numpy(doc_ids))
    prompts = [row[1 : 1 + PROMPT_TOKENS - i].tolist() for i, row in enumerate(ids)]
    arrays: dict[str, Any] = {
        "threads": torch.get_num_threads(),
        "ids": ids,
        "doc_ids": doc_ids,
        "logits": logits.numpy(),
        "written": _write(model, prompts),
    }
    arrays |= {f"prompt_{i}": np.array(prompt) for i, prompt in enumerate(prompts)}
    arrays |= {f"text_{i}": np.array(model.tokenizer.prompt(t)) for i, t in enumerate(TEXTS)}
    np.savez(path, **arrays)


def _rows(model: LoadedModel) -> tuple[np.ndarray, np.ndarray]:
    """A few rows (R, T) with half of their tokens hidden: of the probe, or drawn."""
    specials, rng = model.specials, philox("export check")
    T = min(POSITIONS, model.config.data.row_length)
    if model.probes:
        ids, doc_ids = model.probe.ids[:ROWS, :T].copy(), model.probe.doc_ids[:ROWS, :T]
    else:
        ids = rng.choice(np.flatnonzero(specials.emittable), (ROWS, T))
        ids[:, 0] = specials.bos_id
        doc_ids = np.zeros(ids.shape, dtype=np.int32)
    hidden = (rng.random(ids.shape) < MASKED_SHARE) & (doc_ids >= 0)
    hidden[:, : 1 + PROMPT_TOKENS] = False
    ids[hidden] = specials.mask_id
    return ids.astype(np.int64), doc_ids.astype(np.int32)


def _write(model: LoadedModel, prompts: list[list[int]]) -> np.ndarray:
    canvas = continuation(
        prompts, NEW_TOKENS, model.specials, max_tokens=model.config.data.row_length
    )
    ids = model.fill(canvas, seed=SEED).ids
    ended = canvas.fillable & ((ids == model.tokenizer.eos_id) & canvas.fillable).cumsum(1).bool()
    behind = ended & ended.roll(1, dims=1)  # past the EOS itself `generate` puts PAD
    return ids.masked_fill(behind, model.tokenizer.pad_id).numpy()


# --- the process that looks ----------------------------------------------------------------------


def check_folder(folder: Path, reference: Path) -> dict[str, str]:
    """Check `folder` in a new process; what it was opened with. UserError where it differs."""
    with tempfile.TemporaryDirectory() as modules:
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "HF_MODULES_CACHE": modules,
            "TRANSFORMERS_VERBOSITY": "error",
        }
        command = [sys.executable, "-m", "diffurefill.release.check", str(folder), str(reference)]
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
    answer: Any
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):  # it died: its last words
        answer = {"fault": " ".join(done.stderr.split())[-1000:] or f"exit code {done.returncode}"}
    if answer.get("fault"):
        raise UserError(f"the exported model does not hold, nothing was kept: {answer['fault']}")
    return answer["opened_with"]


def main(folder: str, reference: str) -> int:
    expected = np.load(reference)
    torch.set_num_threads(int(expected["threads"]))
    opened_with = {"torch": str(torch.__version__)}
    fault = _by_this_package(Path(folder), expected)
    if fault is None and importlib.util.find_spec("transformers") is not None:
        import transformers

        opened_with["transformers"] = transformers.__version__
        fault = _by_transformers(folder, expected)
    print(json.dumps({"opened_with": opened_with, "fault": fault}))
    return int(fault is not None)


def _by_this_package(folder: Path, expected: Any) -> str | None:
    model = build(found_exported(folder, str(folder)), torch.device("cpu"))
    ids, doc_ids = torch.from_numpy(expected["ids"]), torch.from_numpy(expected["doc_ids"])
    with torch.inference_mode():
        logits = model.denoiser(ids, doc_ids)
    for i, text in enumerate(TEXTS):
        if model.tokenizer.prompt(text) != expected[f"text_{i}"].tolist():
            return f"the tokenizer read back splits {text!r} otherwise"
    return _difference("this package", logits.numpy(), expected)


def _by_transformers(folder: str, expected: Any) -> str | None:
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    for i, text in enumerate(TEXTS):
        if tokenizer(text)["input_ids"] != expected[f"text_{i}"].tolist():
            return f"transformers' tokenizer splits {text!r} otherwise"
    model: Any = AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True)
    ids, doc_ids = torch.from_numpy(expected["ids"]), torch.from_numpy(expected["doc_ids"])
    with torch.inference_mode():
        logits = model(ids, doc_ids=doc_ids).logits
    fault = _difference("transformers", logits.numpy(), expected)
    if fault is not None:
        return fault
    prompts = [[tokenizer.bos_token_id, *expected[f"prompt_{i}"]] for i in range(len(ids))]
    given = tokenizer.pad({"input_ids": prompts}, return_tensors="pt")
    written = model.generate(**given, max_new_tokens=NEW_TOKENS, seed=SEED).numpy()
    same = np.array_equal(written, expected["written"])
    return None if same else "generate() writes other tokens"


def _difference(by: str, logits: np.ndarray, expected: Any) -> str | None:
    if np.array_equal(logits, expected["logits"]):
        return None
    if logits.shape != expected["logits"].shape:
        return f"logits by {by} have the shape {logits.shape}"
    return f"logits by {by} differ by up to {np.abs(logits - expected['logits']).max():.3g}"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
