"""The arms' texts: written to disk one arm at a time, and never written twice."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from diffurefill.config import DecodeConfig, UserError
from diffurefill.decode.autoregressive import repair_left_to_right
from diffurefill.decode.canvas import Canvas, continuation
from diffurefill.decode.generate import Generation, cut_at_eos
from diffurefill.fleet.loading import LoadedModel
from diffurefill.pilot.arms import Arm
from diffurefill.pilot.passages import Passage
from diffurefill.store.durable import write_file
from diffurefill.train.checkpoint import weights_digest


@dataclass(frozen=True, eq=False)
class Pair:
    """A denoiser and its twin: the same tokenizer and row length. UserError otherwise."""

    diffusion: LoadedModel
    ar: LoadedModel | None
    """None where no arm asks for it."""

    def __post_init__(self) -> None:
        one, two = self.diffusion, self.ar
        if one.config.model.causal or (two is not None and not two.config.model.causal):
            raise UserError("name the denoiser first and then the autoregressive (causal) model")
        if two is None:
            return
        if one.tokenizer.to_json() != two.tokenizer.to_json():
            raise UserError("the two models have different tokenizers: train them on the same data")
        if one.config.data.row_length != two.config.data.row_length:
            raise UserError("the two models have different data.row_length: train them alike")

    @cached_property
    def digests(self) -> dict[str, str]:
        """First 16 hex digits of each model's weights_digest."""
        return {n: weights_digest(m.denoiser.state_dict())[:16] for n, m in self.models.items()}

    @property
    def models(self) -> dict[str, LoadedModel]:
        both = {"diffusion": self.diffusion, "ar": self.ar}
        return {name: model for name, model in both.items() if model is not None}


@dataclass(frozen=True)
class Task:
    """What every arm writes. Row i has seed `seed + i` in all of them."""

    passages: Sequence[Passage]
    num_tokens: int
    seed: int
    batch_rows: int


@dataclass(frozen=True)
class Written:
    """One arm's samples, in the order of the prompts."""

    num_forward_passes: int | None
    samples: list[list[int]]
    """Generated ids, cut at EOS."""
    texts: list[str]
    """The same as text, as it stands behind the prompt."""

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.texts).encode()).hexdigest()[:16]


def written(folder: Path, arm: Arm, pair: Pair, task: Task, say: Callable[[str], None]) -> Written:
    """The arm's samples: from `folder` where the same arm has written them with the same weights,
    prompts and seeds, else made now and saved there."""
    path, key = folder / f"{arm.name}.json", _key(arm, pair, task)
    if path.is_file():
        found = json.loads(path.read_text("utf-8"))
        if found["key"] == key:
            return Written(found["num_forward_passes"], found["samples"], found["texts"])
    began = time.monotonic()
    made = _write(arm, pair, task, say)
    folder.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {"key": key, "arm": arm.to_json(), **made.__dict__}
    write_file(path, json.dumps(record).encode())
    say(f"{arm.title}: {len(made.samples)} samples in {time.monotonic() - began:.0f} s")
    return made


def _write(arm: Arm, pair: Pair, task: Task, say: Callable[[str], None]) -> Written:
    tokenizer = pair.diffusion.tokenizer
    if arm.writer == "nobody":
        samples, num_passes = [passage.real[: task.num_tokens] for passage in task.passages], None
    else:
        samples, num_passes = [], 0
        for canvas, seeds in _batches(pair, task):
            done = _fill(arm, pair, canvas, seeds)
            filled = canvas.filled(done.ids.cpu())
            samples += [cut_at_eos(ids, tokenizer.eos_id) for ids in filled]
            num_passes = max(num_passes, done.num_forward_passes)
    return Written(num_passes, samples, [tokenizer.decode_inner(ids) for ids in samples])


def _fill(arm: Arm, pair: Pair, canvas: Canvas, seeds: list[int]) -> Generation:
    ar = pair.ar
    if arm.writer == "ar" and ar is not None:
        return ar.continue_text(canvas, arm.how, seeds)
    decode = DecodeConfig(stages=arm.stages)
    done = pair.diffusion.fill(canvas, decode=decode, seed=seeds[0])
    if ar is None or arm.writer == "diffusion":
        return done
    return repair_left_to_right(
        ar.denoiser,
        done,
        canvas,
        ar.specials,
        arm.how,
        num_layers=ar.config.model.layers,
        seeds=seeds,
        num_rounds=arm.repair_rounds,
        fraction=arm.repair_fraction,
    )


def _batches(pair: Pair, task: Task) -> Iterator[tuple[Canvas, list[int]]]:
    model = pair.diffusion
    for at in range(0, len(task.passages), task.batch_rows):
        prompts = [passage.prompt for passage in task.passages[at : at + task.batch_rows]]
        length = model.config.data.row_length
        canvas = continuation(prompts, task.num_tokens, model.specials, max_tokens=length)
        seeds = [task.seed + at + i for i in range(len(prompts))]
        yield canvas.to(model.device), seeds


def _key(arm: Arm, pair: Pair, task: Task) -> str:
    """Changes with everything that the samples hang on; the batch and the title are not of it."""
    digests = pair.digests
    models = {"ar": ["ar"], "diffusion": ["diffusion"], "nobody": []}
    facts = {
        "arm": {name: value for name, value in arm.to_json().items() if name != "title"},
        "weights": [digests[name] for name in models.get(arm.writer, ["diffusion", "ar"])],
        "passages": [[passage.prompt, passage.real] for passage in task.passages],
        "num_tokens": task.num_tokens,
        "seed": task.seed,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
