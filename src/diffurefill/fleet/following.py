"""Probing each generation of a run as it is published, from the side: it only reads the store.

What was published is told by the round records, which stay for ever, and by the newest state. A
file that a compaction took away is passed over. The log is what was done: started again, the
process goes on where its log ends, and probes nothing twice. Imports no torch.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffurefill.config import UserError
from diffurefill.fleet import records
from diffurefill.fleet.patience import Patience
from diffurefill.fleet.records import State
from diffurefill.fleet.run import Run, Snapshot
from diffurefill.store.base import MAIN, Corrupt, NotFound, Ref, read_json

Key = tuple[str, int]
"""(kind of weights, generation); no two publications share it, for a generation is never reused."""

AVERAGES = ("ema", "swa")


@dataclass(frozen=True)
class Recorded:
    """A round record: a generation's first state, and the weights that it was made from."""

    base: Ref
    state: State


@dataclass(frozen=True)
class Published:
    weights: str
    gen: int
    ref: Ref

    @property
    def key(self) -> Key:
        return self.weights, self.gen


class ProbeLog:
    """JSONL, a line a probed publication, of one run on one version of its probes."""

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        """Opens `path` to go on with it. `about`: the run and the versions of the probes, which
        every line repeats. Raises UserError where the lines that are there are of others."""
        self.path, self._about = path, dict(about)
        self.done: set[Key] = set()
        content = path.read_bytes() if path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines(), 1):
            self.done.add(self._checked(line, number))
        if whole != content:  # a kill cut the last line short
            path.write_bytes(whole)

    def _checked(self, line: bytes, number: int) -> Key:
        try:
            record = json.loads(line)
            key = record["weights"], record["gen"]
        except (ValueError, TypeError, KeyError):
            raise UserError(
                f"{self.path}, line {number} is not of a probe's log: name another --log"
            ) from None
        for name, ours in self._about.items():
            if record.get(name) != ours:
                raise UserError(
                    f"{self.path}, line {number} is of another {name} ({record.get(name)}, not "
                    f"{ours}), and figures of two are not kept together: name another --log"
                )
        return key

    def add(self, key: Key, figures: Mapping[str, Any]) -> None:
        record = {"weights": key[0], "gen": key[1], **self._about, **figures}
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        self.done.add(key)


def following(
    run: Run,
    score: Callable[[Path], Mapping[str, Any]],
    log: ProbeLog,
    *,
    kinds: Collection[str],
    until: int | None,
    report: Callable[[str], None],
    jitter: random.Random | None = None,
) -> Generator[float, None, None]:
    """Probe what is there and then what comes, oldest first, until generation `until` is done; for
    ever where it is None. Yields seconds to wait, as a worker does.

    `score` gives the figures of a weights file; a UserError of it is logged as the `problem`.
    """
    io = Patience(report, jitter or random.Random())
    rounds: dict[int, Recorded] = {}
    passed_over: set[Key] = set()
    while True:
        now = yield from io(run.snapshot)
        yield from _read_records(run, io, now, rounds, log.done)
        for item in publications(now.state, rounds):
            if item.weights not in kinds or item.key in log.done | passed_over:
                continue
            path = yield from _fetched(run, io, now, item, report)
            if path is None:
                passed_over |= {item.key} if item.gen < now.state.gen else set()
                continue
            figures = _figures(score, path)
            if item.weights == "global" and item.gen in rounds:
                state = rounds[item.gen].state
                figures = {"step": state.step, "tokens": state.tokens, **figures}
            log.add(item.key, figures)
            run.forget(set())
            report(f"generation {item.gen}, {item.weights}: {_brief(figures)}")
        if until is not None and _is_there(now.state, until, kinds):
            report(f"probed up to generation {until}; {len(log.done)} lines in {log.path}")
            return
        yield run.config.fleet.poll_seconds


def publications(newest: State, rounds: Mapping[int, Recorded]) -> Iterator[Published]:
    """What `rounds` (by generation) and the newest state name, oldest first, each once. A global
    whose whole file is not in the store yet is left for later."""
    seen: set[Key] = set()
    for item in _named(newest, rounds):
        if item.key not in seen:
            seen.add(item.key)
            yield item


def _named(newest: State, rounds: Mapping[int, Recorded]) -> Iterator[Published]:
    if 1 in rounds and rounds[1].state.parent_gen == 0:
        yield Published("global", 0, rounds[1].base)
    for state in [*(rounds[gen].state for gen in sorted(rounds)), newest]:
        for kind in AVERAGES:
            average = getattr(state, kind)
            # What a rollback restored is of an older generation than its number says.
            is_own = average and (state.restored_from is None or average.gen == state.gen)
            if is_own:
                yield Published(kind, average.gen, average.ref)
        if state.gen < newest.gen or newest.full_gen == newest.gen:
            yield Published("global", state.gen, state.global_weights)


def _read_records(
    run: Run, io: Patience, now: Snapshot, rounds: dict[int, Recorded], done: Collection[Key]
) -> Generator[float, None, None]:
    """Add what each generation's record says, except where its global was probed: the averages that
    it names came before that."""
    for path in sorted(now.version.files):
        if not path.startswith(records.ROUNDS):
            continue
        gen = int(Path(path).stem)
        if gen not in rounds and ("global", gen) not in done:
            record = yield from io(lambda path=path: read_json(run.store, now.version, path))
            base, state = Ref.from_json(record["base"]), records.state_from_json(record["state"])
            rounds[gen] = Recorded(base, state)


def _fetched(
    run: Run, io: Patience, now: Snapshot, item: Published, report: Callable[[str], None]
) -> Generator[float, None, Path | None]:
    """A local copy; None where the file is gone or damaged."""
    held = item.ref in now.version.files.values()
    if item.gen < now.state.compacted_gen and not held:
        return None
    try:
        return (yield from io(lambda: run.fetch(item.ref)))
    except NotFound:
        # Some stores know a file of an older version only once they have seen that version.
        yield from io(lambda: list(run.store.history(MAIN)))
    except Corrupt as error:
        report(f"generation {item.gen}, {item.weights}: passed over ({error})")
        return None
    try:
        return (yield from io(lambda: run.fetch(item.ref)))
    except (NotFound, Corrupt):
        report(f"generation {item.gen}, {item.weights}: passed over, its file is gone")
        return None


def _figures(score: Callable[[Path], Mapping[str, Any]], path: Path) -> Mapping[str, Any]:
    try:
        return score(path)
    except UserError as error:
        return {"problem": str(error)}


def _is_there(state: State, until: int, kinds: Collection[str]) -> bool:
    """Whether generation `until` was published with its EMA, where that is asked for."""
    ema_gen = state.ema.gen if state.ema is not None else 0
    return state.full_gen >= until and ("ema" not in kinds or ema_gen >= until)


def _brief(figures: Mapping[str, Any]) -> str:
    if "problem" in figures:
        return figures["problem"]
    sets = figures.get("sets", {})
    return ", ".join(f"{name} {found['mean']:.4f}" for name, found in sets.items())
