"""`train`: a fleet of one, without store or merger. Saves, and resumes exactly where it was.

The folder holds config.toml, tokenizer.json, probe.safetensors, log.jsonl and the numbered states
of train/checkpoint.py. Interrupted and resumed, it gives the same weights: bit for bit on the same
CPU with as many threads and rows at once, which stay where memory has room; but for rounding on a
GPU, where the fastest attention is found anew at every start.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from diffurefill import config as configs
from diffurefill.config import HELD_OUT, RunConfig, TrainConfig, UserError
from diffurefill.data.documents import Corpus, open_corpus, pin_sources
from diffurefill.data.packing import Position
from diffurefill.data.tokens.tokenizer import Tokenizer
from diffurefill.evaluate.probe_sets import Probes, build_probes, load_probes, save_probes
from diffurefill.evaluate.probes import held_out_ce
from diffurefill.fleet import records
from diffurefill.fleet.log import as_line
from diffurefill.runtime import default_device, device_name
from diffurefill.store.durable import make_folder, os_errors_name, write_file
from diffurefill.train.checkpoint import (
    load_training_state,
    newest_weights,
    save_training_state,
)
from diffurefill.train.loop import Trainer, initial_weights, make_tokenizer, require_corpus
from diffurefill.train.metrics import plain

LOG = "log.jsonl"


def is_train_folder(folder: Path) -> bool:
    return (folder / records.CONFIG).is_file()


@dataclass
class Done:
    """What training took so far, over all restarts."""

    tokens: int = 0
    flops: float = 0.0
    """By the exact count (train/flops.py)."""


def train_alone(
    folder: Path,
    config: RunConfig,
    steps: int | None,
    report: Callable[[str], None] = print,
    device: torch.device | None = None,
) -> None:
    """Train to `steps` (default optim.total_steps), saving every `fleet.local_steps` steps."""
    _require_no_fleet(folder)
    last = config.optim.total_steps if steps is None else steps
    config = replace(config, data=pin_sources(config.data))
    corpus = open_corpus(config.data)
    make_folder(folder)
    with _nobody_else(folder):
        _train(folder, config, corpus, last, report, device)


def _train(
    folder: Path,
    config: RunConfig,
    corpus: Corpus,
    last: int,
    report: Callable[[str], None],
    device: torch.device | None,
) -> None:
    # A start that was refused, or killed before its first save, binds the folder to nothing.
    saved = newest_weights(folder)
    if saved is None:
        _require_ours(folder)
        tokenizer = make_tokenizer(config, corpus)
        _lay_out(folder, config, tokenizer, build_probes(config, corpus, tokenizer))
    else:
        _require_same(folder, config)
        tokenizer = Tokenizer.from_json((folder / records.TOKENIZER).read_text("utf-8"))
    interval = config.fleet.local_steps
    trainer = Trainer(
        config,
        corpus,
        tokenizer,
        slot=0,
        interval_steps=interval,
        device=device,
        report=report,
        rows_before=None if saved is None else _rows_before(saved[1], device),
    )
    state, done = load_training_state(folder), Done()
    if state is None:
        trainer.load_weights(initial_weights(config), step=0)
        trainer.seek(None)
    else:
        require_corpus(corpus, state.meta["corpus_sha"], str(folder))
        trainer.load_weights(state.weights, step=state.meta["step"])
        trainer.optimizer.load_state_dict(state.optimizer_state)
        trainer.seek(Position.from_json(state.meta["position"]))
        done = Done(**state.meta["done"])
        report(f"resumed at step {trainer.step}")
    _cut_log(folder, trainer.step)
    began, first = time.monotonic(), trainer.step
    if first >= last:
        trainer.close()
        report(f"train: no step to take, the run is at step {first} and was to get to {last}")
        return
    try:
        _steps(trainer, folder, last, corpus.fingerprint, done, report)
    finally:
        trainer.close()
    seconds = time.monotonic() - began
    report(f"train: steps {first} to {trainer.step} in {seconds:.0f} s, saved in {folder}")


def _rows_before(meta: dict[str, Any], device: torch.device | None) -> int | None:
    """Rows at once of the saved state; None on another device, where sums round otherwise anyway
    and more may fit."""
    is_same = meta.get("device") == device_name(device or default_device())
    return meta.get("rows_at_once") if is_same else None


def _steps(
    trainer: Trainer,
    folder: Path,
    last: int,
    fingerprint: str,
    done: Done,
    report: Callable[[str], None],
) -> None:
    probe, config = load_probes(folder / records.PROBE)[HELD_OUT], trainer.config
    began, tokens, since_save = time.monotonic(), 0, 0
    while trainer.step < last:
        result = trainer.take_step()
        tokens += result.num_tokens
        done.tokens += result.num_tokens
        since_save += result.num_tokens
        if trainer.step % config.train.log_every_steps == 0:
            rate = tokens / max(time.monotonic() - began, 1e-9)
            facts = {**plain(result.metrics()), "tokens_per_second": rate}
            _log(folder, trainer.step, facts)
            report(f"step {trainer.step}/{last}: loss {facts['loss']:.3f}, {rate:,.0f} tokens/s")
        if trainer.step % config.fleet.local_steps == 0 or trainer.step == last:
            interval = trainer.take_metrics()
            mask_id = trainer.tokenizer.mask_id
            ce = held_out_ce(trainer.model, probe, mask_id=mask_id, device=trainer.device).mean
            facts = {"held_out_ce": ce, **interval}
            _log(folder, trainer.step, facts)
            _require_finite(facts)
            report(
                f"step {trainer.step}/{last}: held-out CE {ce:.3f}, "
                f"{facts['tokens_per_second']:,.0f} tokens/s, MFU {facts['mfu_6nd']:.1%} by 6ND, "
                f"{facts['mfu_exact']:.1%} exact (peak: {facts['peak']})"
            )
            done.flops += interval["flops_per_token"] * since_save
            since_save = 0
            _save(trainer, folder, fingerprint, done)


def _require_finite(facts: dict[str, Any]) -> None:
    """UserError before weights that are not numbers replace the last saved ones."""
    if "nonfinite_step" in facts:
        raise UserError(
            f"the loss or its gradient was not finite at step {facts['nonfinite_step']}, on rows "
            f"from {facts['nonfinite_rows_from']}; nothing of it was saved: lower optim.peak_lr, "
            "or look at that text"
        )


def _save(trainer: Trainer, folder: Path, fingerprint: str, done: Done) -> None:
    assert trainer.position is not None, "save after a step"
    meta = {
        "step": trainer.step,
        "position": trainer.position.to_json(),
        "corpus_sha": fingerprint,
        "done": asdict(done),
        "device": device_name(trainer.device),
        "rows_at_once": trainer.at_once.rows,
    }
    save_training_state(
        folder,
        weights=trainer.weights(),
        optimizer_state=trainer.optimizer.state_dict(),
        meta=meta,
    )


def _lay_out(folder: Path, config: RunConfig, tokenizer: Tokenizer, probes: Probes) -> None:
    """Write the fixed files, the configuration last and whole: it makes it a train folder."""
    write_file(folder / records.TOKENIZER, tokenizer.to_json().encode())
    save_probes(folder / records.PROBE, probes, tokenizer.vocabulary_digest)
    write_file(folder / records.CONFIG, configs.dumps(config).encode())


@contextlib.contextmanager
def _nobody_else(folder: Path) -> Generator[None]:
    """UserError while another process of this machine trains in `folder`: each would write over
    what the other saves. Where locks are not to be had, nobody is noticed."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            place = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, place)
            try:
                fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(
                    f"another process trains in {folder}: wait until it ends, or give another "
                    "folder"
                ) from None
        yield


def _require_no_fleet(folder: Path) -> None:
    """UserError for a run's store: a config.toml there would hide the run from every command."""
    if (folder / "lanes").exists():
        raise UserError(f"{folder} holds the run of a fleet: give another folder to train in")


def _require_ours(folder: Path) -> None:
    """UserError before a config.toml is written over that no `train` has laid out here."""
    if is_train_folder(folder) and not (folder / records.PROBE).is_file():
        raise UserError(
            f"{folder} holds a {records.CONFIG} but no run: give another folder to train in"
        )


def _require_same(folder: Path, config: RunConfig) -> None:
    there = _on_any_machine(configs.load_file(folder / records.CONFIG, RunConfig()))
    now = _on_any_machine(config)
    if there != now:
        changes = "; ".join(_differences(asdict(there), asdict(now)))
        raise UserError(
            f"{folder} was made with another configuration ({changes}): give another folder, or "
            "the same settings"
        )


def _on_any_machine(config: RunConfig) -> RunConfig:
    """Without what only says how a step is computed: the next machine may have less memory."""
    usual = TrainConfig()
    how = {n: getattr(usual, n) for n in ("micro_batch_rows", "activation_budget", "compile")}
    return replace(config, train=replace(config.train, **how))


def _differences(there: Any, now: Any, where: str = "") -> Iterator[str]:
    """`seed = 0 there, 5 now` for each setting that is not the same; sections are dicts."""
    if there == now:
        return
    if isinstance(there, dict):
        for key in there:
            yield from _differences(there[key], now[key], f"{where}.{key}" if where else key)
    elif isinstance(there, tuple) and len(there) == len(now) and isinstance(there[0], dict):
        for i, (one, other) in enumerate(zip(there, now, strict=True)):
            yield from _differences(one, other, f"{where}.{i}")
    else:
        one, other = ("unset" if x is None else json.dumps(x) for x in (there, now))
        yield f"{where} = {one} there, {other} now"


def _log(folder: Path, step: int, facts: dict[str, Any]) -> None:
    with os_errors_name(folder / LOG), open(folder / LOG, "a", encoding="utf-8") as f:
        f.write(as_line({"step": step, "time": time.time(), **facts}) + "\n")


def _cut_log(folder: Path, step: int) -> None:
    """Leave the lines of steps until `step`, from which training goes on: later ones will come
    again, and of the last a kill may have left a part."""
    path = folder / LOG
    if path.exists():
        lines = path.read_bytes().splitlines(keepends=True)
        write_file(path, b"".join(line for line in lines if _is_until(step, line)))


def _is_until(step: int, line: bytes) -> bool:
    try:
        return line.endswith(b"\n") and json.loads(line)["step"] <= step
    except (ValueError, TypeError, KeyError):
        return False
