"""Starting a worker or a merger as a process: everything comes out of the store."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator

from diffurefill.config import HELD_OUT, FleetConfig, UserError
from diffurefill.copies import local_copies
from diffurefill.data.documents import open_corpus
from diffurefill.data.tokens.tokenizer import Tokenizer
from diffurefill.evaluate.probe_sets import load_probes
from diffurefill.fleet import records
from diffurefill.fleet.averaging import FileAverager
from diffurefill.fleet.guard import ProbeGuard
from diffurefill.fleet.lane import Taken
from diffurefill.fleet.learner import TrainingLearner
from diffurefill.fleet.merger import Merger
from diffurefill.fleet.records import State
from diffurefill.fleet.run import Run, open_run
from diffurefill.fleet.status import read_logs, worker_statuses
from diffurefill.fleet.worker import Worker
from diffurefill.runtime import require_device, set_threads
from diffurefill.train.loop import Trainer, require_corpus

Report = Callable[[str], None]


def start_worker(
    uri: str,
    number: int | None,
    rounds: int | None,
    minutes: float | None,
    threads: int | None,
    report: Report,
    device: str | None = None,
) -> None:
    """Be worker `number` of the run at `uri` until killed, or for `rounds` merged contributions.

    `minutes`: how long this session lasts; it pushes early before its end. `device`: cpu, cuda,
    cuda:1 ...; None takes a GPU where there is one.
    """
    set_threads(threads)
    chosen_device = require_device(device)
    seconds = math.inf if minutes is None else 60.0 * minutes
    ends_at = time.monotonic() + seconds
    with local_copies() as cache:
        run = open_run(uri, cache)
        now = run.snapshot()
        config, tokenizer = run.config, Tokenizer.from_json(run.tokenizer_json)
        corpus = open_corpus(config.data)
        require_corpus(corpus, now.state.corpus_sha, uri)
        probe = load_probes(run.fetch(now.version.ref(records.PROBE)))[HELD_OUT]
        steps = config.fleet.local_steps

        def work(chosen: int) -> None:
            trainer = Trainer(
                config,
                corpus,
                tokenizer,
                slot=chosen,
                interval_steps=steps,
                device=chosen_device,
                report=lambda line: report(f"worker {chosen}: {line}"),
            )
            learner, left = TrainingLearner(trainer, probe), ends_at - time.monotonic()
            worker = Worker(run, chosen, learner, session_seconds=left, report=report)
            try:
                drive(worker.run(rounds))
            finally:
                trainer.close()

        if number is None:
            work_freely(run, work)
        else:
            work(number)


def start_merger(
    uri: str,
    generations: int | None,
    threads: int | None,
    guarded: bool,
    report: Report,
    on_event: Callable[[str, State], None] = lambda event, state: None,
) -> None:
    """Be the merger of the run at `uri` until killed, or until `generations` exist."""
    set_threads(threads, keeps_memory=False)
    with local_copies() as cache:
        run = open_run(uri, cache)
        guard = _guard(run) if guarded and run.config.fleet.guard_rows else None
        averager = averager_of(run.config.fleet)
        merger = Merger(run, averager, guard, report=report, on_event=on_event)
        try:
            drive(merger.run(generations))
        except BaseException:  # Ctrl-C, a full disk, a mistake: the next one need not wait
            with contextlib.suppress(OSError):
                merger.term.release()
            raise


def _guard(run: Run) -> ProbeGuard:
    probe = load_probes(run.fetch(run.snapshot().version.ref(records.PROBE)))[HELD_OUT]
    return ProbeGuard(run.config, probe, Tokenizer.from_json(run.tokenizer_json).mask_id)


def averager_of(fleet: FleetConfig) -> FileAverager:
    """The arithmetic that a run's configuration asks for."""
    return FileAverager(
        outer_step=fleet.outer_step,
        outer_lr=fleet.outer_lr,
        outer_momentum=fleet.outer_momentum,
    )


def drive(actor: Iterator[float]) -> None:
    """Run a worker or merger in real time."""
    for seconds in actor:
        if seconds > 0:
            time.sleep(seconds)


def work_freely(run: Run, work: Callable[[int], None]) -> None:
    """Work under a number nobody holds; again when another process took it at the same moment."""
    while True:
        try:
            work(free_number(run))
            return
        except Taken:
            continue


def free_number(run: Run) -> int:
    """A worker number nobody seems to hold: a new one, else the one silent for longest.

    Log times are wall-clock times of other machines, so this is a guess. A wrong guess costs the
    other worker an interval and nothing else: its lane's compare-and-swap stops it.
    """
    taken = {records.worker_of(lane) for lane in run.store.lanes()}
    unused = [n for n in range(run.config.data.num_slots) if n not in taken]
    if unused:
        return unused[0]
    logs = read_logs(run.store)
    statuses = sorted(worker_statuses(logs, time.time()), key=lambda w: -w.age_seconds)
    silent = [w.worker for w in statuses if w.age_seconds > run.config.fleet.live_seconds]
    if not silent:
        raise UserError(
            f"all {run.config.data.num_slots} workers of this run logged lately; to replace one "
            "all the same, name it with --worker"
        )
    return silent[0]
