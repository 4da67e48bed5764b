"""The fleet under faults, seed after seed, and every guard switched off once.

    python bench/chaos.py [--seeds 20000] [--quick] | --seed N [--profile NAME]

Each seed is one life of a simulated fleet: the product's own workers and merger in virtual time on
a hub that fails (fleet/simulate). After every version the invariants of the protocol are checked
on the hub's true state; at the end faults stop and the fleet must get on. Then every guard is
switched off in turn: some seed must miss it. Seeds run in two processes; finished thousands are
kept in runs/chaos, so an interrupted run goes on where it was. `--seed N` tells all of one seed.
The last line is one JSON object; exit code 1 when an invariant was violated or a guard not missed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from _common import ROOT, report
from diffurefill.fleet.simulate import campaign
from diffurefill.fleet.simulate.campaign import Tally
from diffurefill.fleet.simulate.mutations import CONTROLS, MUTATIONS, Catch, Mutation, harm, hunt
from diffurefill.fleet.simulate.profiles import PROFILES

BLOCK = 1000
PIECE = 50
"""Seeds that a process runs at a time; a quick run's block."""
PROCESSES = 2
HUNTED = 200
"""Seeds among which one must miss a guard."""
CONTROLLED = 100
"""Seeds in which a rule that only saves work must not be missed."""


def code_digest() -> str:
    """Of every module that a seed runs through: blocks of other code are not this run's."""
    modules = {name: m for name, m in sys.modules.items() if name.startswith("diffurefill")}
    digest = hashlib.sha256()
    for name in sorted(modules):
        file = modules[name].__file__
        digest.update(Path(file).read_bytes() if file else b"")
    return digest.hexdigest()[:16]


def tally_piece(first: int, last: int) -> Tally:
    return campaign.tally(range(first, last))


def tally_block(pool: ProcessPoolExecutor, first: int, last: int) -> Tally:
    starts = range(first, last, PIECE)
    pieces = pool.map(tally_piece, starts, [min(start + PIECE, last) for start in starts])
    block = campaign.added(pieces)
    return {**block, "digests": [campaign.digest_of(block["digests"])]}


def run_seeds(pool: ProcessPoolExecutor, num_seeds: int, folder: Path | None) -> Tally:
    """All seeds below `num_seeds`; blocks that lie in `folder` are not run again."""
    blocks, began = [], time.perf_counter()
    for first in range(0, num_seeds, BLOCK):
        last = min(first + BLOCK, num_seeds)
        kept = folder / f"{first}-{last}.json" if folder else None
        if kept is not None and kept.exists():
            blocks.append(json.loads(kept.read_text()))
        else:
            blocks.append(tally_block(pool, first, last))
            if kept is not None:
                kept.parent.mkdir(parents=True, exist_ok=True)
                kept.write_text(json.dumps(blocks[-1]))
        violations = sum(block["violations"] for block in blocks)
        seconds = time.perf_counter() - began
        print(f"{last} seeds, {violations} violations, {seconds:.0f} s", flush=True)
    return campaign.added(blocks)


def hunt_one(mutation_index: int) -> Catch | None:
    return hunt(MUTATIONS[mutation_index], range(HUNTED))


def harm_of(control_index: int, num_seeds: int) -> list[str]:
    return harm(CONTROLS[control_index], range(num_seeds))


def told(mutation: Mutation, catch: Catch | None) -> dict[str, Any]:
    about = {"guard": mutation.guard, "profile": mutation.profile}
    return {**about, **(asdict(catch) if catch else {"mutation": mutation.name, "seed": None})}


def run(num_seeds: int, folder: Path | None) -> dict[str, Any]:
    with ProcessPoolExecutor(PROCESSES) as pool:
        seeds = run_seeds(pool, num_seeds, folder)
        catches = list(pool.map(hunt_one, range(len(MUTATIONS))))
        num_controlled = [min(CONTROLLED, num_seeds // 10)] * len(CONTROLS)
        harmed = list(pool.map(harm_of, range(len(CONTROLS)), num_controlled))
    for mutation, catch in zip(MUTATIONS, catches, strict=True):
        how = f"seed {catch.seed}: {catch.violation}" if catch else "NOT MISSED BY ANY SEED"
        print(f"without `{mutation.guard}`: {how}")
    return {
        "seeds": seeds["seeds"],
        "violations": seeds["violations"] + sum(map(len, harmed)),
        "mutations_caught": sum(catch is not None for catch in catches),
        "mutations": len(MUTATIONS),
        "digest": campaign.digest_of(seeds["digests"]),
        "guards": [told(m, c) for m, c in zip(MUTATIONS, catches, strict=True)],
        "harmless": {c.name: h[:1] for c, h in zip(CONTROLS, harmed, strict=True)},
        **{key: value for key, value in seeds.items() if key not in ("seeds", "violations")},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, help="how many (20000; --quick: 60)")
    parser.add_argument("--quick", action="store_true", help="nothing is kept or written")
    parser.add_argument("--seed", type=int, help="tell all of this one")
    parser.add_argument("--profile", choices=PROFILES, help="with --seed: its faults")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        return 1 if campaign.replay(arguments.seed, arguments.profile) else 0
    num_seeds = arguments.seeds or (60 if arguments.quick else 20_000)
    code = code_digest()
    folder = None if arguments.quick else ROOT / "runs" / "chaos" / code
    figures = {**run(num_seeds, folder), "code": code}
    if folder is not None and code_digest() != code:
        sys.exit("the code changed meanwhile: a result file would name the wrong one; run it again")
    report("chaos", figures, quick=arguments.quick)
    return 1 if figures["violations"] or figures["mutations_caught"] < len(MUTATIONS) else 0


if __name__ == "__main__":
    sys.exit(main())
