"""`diffurefill demo`: train, kill, audit, probe, write, report."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from diffurefill.config import RunConfig, UserError, load_preset, with_paths
from diffurefill.copies import local_copies
from diffurefill.decode.view.terminal import Viewer, replay
from diffurefill.demo.fleet import DemoFleet, FleetStory
from diffurefill.demo.report import generation_rows, write_reports
from diffurefill.demo.writing import Written, held_out_statistics, sample_statistics, write_samples
from diffurefill.evaluate.probes import held_out_ce
from diffurefill.fleet.audit import Audit, audit_run
from diffurefill.fleet.create import create_run
from diffurefill.fleet.loading import LoadedModel, load_from_run
from diffurefill.fleet.run import Run, open_run, read_state
from diffurefill.fleet.start import averager_of
from diffurefill.runtime import provenance, set_threads
from diffurefill.store.base import MAIN, Ref
from diffurefill.train.checkpoint import load_weights


def run_demo(folder: Path | None, data: Sequence[str], generations: int, minutes: float) -> int:
    """The whole demo; returns 0 when the audit is sound."""
    began = time.monotonic()

    def say(line: str) -> None:
        seconds = int(time.monotonic() - began)
        print(f"{seconds // 60:3d}:{seconds % 60:02d}  {line}", flush=True)

    folder = _new_folder(folder)
    config = with_paths(load_preset("demo"), data)
    is_python = config.data.sources[0].paths == ("python:",)
    with local_copies() as work:
        state = create_run(str(folder), config, work, say)
        story = DemoFleet(str(folder), say).run(generations, minutes)
        set_threads(None)
        say("audit: recomputing every generation from the store")
        run = open_run(str(folder), work / "cache")
        audit = audit_run(
            run.store, averager_of(run.config.fleet), work / "audit", lambda line: None
        )
        say(f"audit: {sum(audit.checks.values())} checks, {audit.verdict}")
        say("probing every generation, and its EMA, on the held-out rows")
        model = load_from_run(run, "global")
        curves = _held_out_curves(run, model)
        best = min(("global", "ema"), key=lambda kind: curves[kind][-1][1])
        model = load_from_run(run, best)
        written = write_samples(model, is_python=is_python)
        facts = {
            **_story_facts(story, curves, audit),
            **_model_facts(model, best, config),
            "samples": [w.to_json() for w in written],
            "run_id": state.run_id,
            "config_digest": state.config_sha,
            "seed": config.seed,
            **provenance(" ".join(["diffurefill", *sys.argv[1:]])),
        }
    _show(written)
    facts["seconds"] = round(time.monotonic() - began, 1)
    (folder / "demo.json").write_text(json.dumps(facts, indent=1), "utf-8")
    write_reports(folder, facts, written)
    _close(facts, folder, say)
    return 0 if audit.verdict == "ok" else 1


def _new_folder(folder: Path | None) -> Path:
    """A folder that holds nothing yet: a second demo never touches the first."""
    if folder is None:
        return Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    if any(place.exists() and not place.is_dir() for place in (folder, *folder.parents)):
        raise UserError(f"{folder} is a file or below one: give the demo a new folder")
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty: give the demo a new folder")
    return folder


def _published(run: Run) -> Iterator[tuple[str, int, Ref]]:
    """(kind, generation, weights) of every global and EMA of the run, oldest first."""
    seen: set[tuple[str, int]] = set()
    for version in run.store.history(MAIN):
        state = read_state(run.store, version)
        found = [("global", state.gen, state.global_weights)]
        if state.ema is not None:
            found.append(("ema", state.ema.gen, state.ema.ref))
        for kind, gen, ref in found:
            if (kind, gen) not in seen:
                seen.add((kind, gen))
                yield kind, gen, ref


def _held_out_curves(run: Run, model: LoadedModel) -> dict[str, list[tuple[int, float]]]:
    """{"global", "ema"}: (generation, held-out CE), all on the same probe."""
    curves: dict[str, list[tuple[int, float]]] = {"global": [], "ema": []}
    mask_id = model.tokenizer.mask_id
    for kind, gen, ref in _published(run):
        model.denoiser.load_state_dict(load_weights(run.fetch(ref)))
        run.forget(keep=set())
        held_out = held_out_ce(model.denoiser, model.probe, mask_id=mask_id, device=model.device)
        curves[kind].append((gen, held_out.mean))
    return curves


def _story_facts(
    story: FleetStory, curves: dict[str, list[tuple[int, float]]], audit: Audit
) -> dict[str, Any]:
    by_gen = dict(curves["global"])
    rows = [{**row, "held_out_ce": by_gen[row["generation"]]} for row in story.generations]
    return {
        "generations": curves["global"][-1][0],
        "kills": len(story.kills),
        "held_out_ce_first": curves["global"][0][1],
        "held_out_ce_last": curves["global"][-1][1],
        "audit": audit.verdict,
        "audit_checks": dict(audit.checks),
        "killed": story.kills,
        "table": rows,
        "curves": curves,
    }


def _model_facts(model: LoadedModel, kind: str, config: RunConfig) -> dict[str, Any]:
    accuracy, held_out = model.accuracy(), model.held_out()
    stages, card = config.decode.stages, load_preset("decode-card").decode.stages
    return {
        "weights_used": kind,
        "probe": held_out.probe,
        "held_out_by_rate": held_out.to_json()["by_rate"],
        "decoding_accuracy": {"token": accuracy.token, "pair": accuracy.pair},
        "parameters": sum(p.numel() for p in model.denoiser.parameters()),
        "decode": [asdict(stage) for stage in stages],
        "text": {
            "draft only": sample_statistics(model, stages[:1]),
            "draft and refill": sample_statistics(model, stages),
            "the card's draft only": sample_statistics(model, card[:1]),
            "the card's draft and refill": sample_statistics(model, card),
            "real held-out text": held_out_statistics(model),
        },
    }


def _show(written: Sequence[Written]) -> None:
    """The first continuation and the infill pass by pass, then every text."""
    console = Console()
    for item in (written[0], written[-1]):
        console.rule(item.title)
        replay(item.frames, Viewer(console))
    for item in written[1:-1]:
        console.rule(item.title)
        console.print(item.text, markup=False, highlight=False)


def _close(facts: dict[str, Any], folder: Path, say: Callable[[str], None]) -> None:
    Console().print(_table(facts))
    say(
        f"held-out CE {facts['held_out_ce_first']:.2f} -> {facts['held_out_ce_last']:.2f} (EMA "
        f"{facts['curves']['ema'][-1][1]:.2f}) over {facts['generations']} generations and "
        f"{facts['kills']} kills; audit: {facts['audit']}"
    )
    say(f"report: {folder / 'report.html'}   facts: {folder / 'demo.json'}")
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6
    say(f"{folder} holds {size:,.0f} MB: every generation, for `diffurefill audit`")
    say(f"next: diffurefill generate {shlex.quote(str(folder))} --watch")


def _table(facts: dict[str, Any]) -> Table:
    head, *rows = generation_rows(facts)
    table = Table()
    for name in head:
        table.add_column(name, justify="left" if name == "killed" else "right")
    for row in rows:
        table.add_row(*row)
    return table
