"""What a fleet would achieve: the product's own workers and merger, run for hours of virtual time.

Nothing here is a formula of the result. A `Setting` says what things take (transfers, steps, passes
over files, lives of machines); workers and a merger, the same code as in a real fleet, work on the
simulator's hub, and `Figures` count what came of it. The defaults are the report's setting.
Source: fleet.md 2.1 (the report's round budget), 2.2 (bytes).
"""

from __future__ import annotations

import functools
import math
import random
import tempfile
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from diffurefill import config as configs
from diffurefill.config import FleetConfig, RunConfig
from diffurefill.config.fleet import Codec, Downlink
from diffurefill.fleet import records
from diffurefill.fleet.merger import Merger
from diffurefill.fleet.records import State
from diffurefill.fleet.run import Run
from diffurefill.fleet.simulate import sized
from diffurefill.fleet.simulate.chaos import memory_folder
from diffurefill.fleet.simulate.hub import SimHub
from diffurefill.fleet.simulate.kernel import Body, Kernel, Process
from diffurefill.fleet.simulate.report_fleet import DeferringStore, ReportMerger
from diffurefill.fleet.simulate.scenario import NoFaults
from diffurefill.fleet.simulate.sized import (
    MeteredStore,
    SizedAverager,
    SizedCosts,
    SizedGuard,
    SizedLearner,
    Traffic,
)
from diffurefill.fleet.simulate.timeline import Phases, Timeline
from diffurefill.fleet.worker import Worker
from diffurefill.store.base import MAIN, Change, dump_json

HOUR = 3600.0
MB = 1e6


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A fleet and what things take there. Defaults: the report's machines, as far as it tells, and
    the product's settings but for what report.py lays over them."""

    workers: int = 4
    """The report's 92.8B tokens in 200,000 steps of 131,072 are 3.5 workers."""
    params: float = 1.08e9
    local_steps: int = 150
    tokens_per_step: int = 131_072
    tokens_per_second: float = 46_600.0
    """Of a worker while it trains. The report's 35k include the waiting: 150 steps in 74% of 9.5
    minutes."""
    speed_spread: float = 0.02
    """Each launch draws its speed from 1 - this to 1 + this."""
    upload_bytes_per_second: float = 100 * MB
    download_bytes_per_second: float = 100 * MB
    merger_bytes_per_second: float = 1000 * MB
    """Both ways, of the merger's machine."""
    latency_seconds: float = 0.2
    guard_seconds: float = 0.0
    """One scoring of the held-out rows by the merger; 0: no guard, as in the report."""
    lifetime_seconds: float = math.inf
    """Mean of a worker's life, exponential. The report's round and waiting are taken to be those of
    a fleet while nobody dies; its about 200 launches in 1,333 rounds are lives of 3.7 hours."""
    relaunch_seconds: float = 600.0
    """From a worker's death to its successor's first call to the hub."""
    launch_seconds: float = 90.0
    """From there to the first step: imports, compilation."""
    codec: Codec = "fp32-delta"
    downlink: Downlink = "full"
    merger: Literal["ours", "report"] = "ours"
    """`report`: the model of the report's merger in report_fleet.py."""
    poll_seconds: float = FleetConfig().poll_seconds
    grace_seconds: float = 150.0
    min_fresh: int = 2
    hours: float = 4.0
    """Virtual hours that are counted, after the first `warm_hours`."""
    warm_hours: float = 0.75
    seed: int = 0

    @property
    def step_seconds(self) -> float:
        return self.tokens_per_step / self.tokens_per_second

    @property
    def fleet(self) -> FleetConfig:
        return FleetConfig(
            local_steps=self.local_steps,
            codec=self.codec,
            downlink=self.downlink,
            poll_seconds=self.poll_seconds,
            grace_seconds=self.grace_seconds,
            min_fresh=self.min_fresh,
            guard_rows=64 if self.guard_seconds else 0,
            commits_per_hour=120,
        )

    def costs(self, upload: float, download: float) -> SizedCosts:
        return SizedCosts(
            latency_seconds=self.latency_seconds,
            upload_bytes_per_second=upload,
            download_bytes_per_second=download,
            step_seconds=self.step_seconds,
        )


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What a fleet achieved in the counted hours."""

    rounds_per_hour: float
    waiting_share: float
    """Of the workers' time from their first step on: everything that is not training."""
    lost_share: float
    """Of the trained tokens: never merged, because a worker died or was overtaken."""
    tokens_per_day: float
    tokens_per_second: float
    """Of one worker while it lives, waiting and losses included."""
    workers_alive: float
    """In the mean, successors being launched not counted."""
    up_bytes_per_hour: float
    down_bytes_per_hour: float
    commits_per_hour: float
    most_commits_per_hour: int
    """In any 60 minutes."""
    most_api_calls: int
    """Of the whole fleet, in any of the hub's five minutes."""
    most_resolver_calls: int
    phases: Phases

    @property
    def round_minutes(self) -> float:
        return 60.0 / self.rounds_per_hour


def simulate(setting: Setting) -> Figures:
    """Run the fleet. The same setting gives the same figures on any machine."""
    with tempfile.TemporaryDirectory(prefix="capacity-", dir=memory_folder()) as folder:
        return Fleet(setting, Path(folder)).run()


@dataclass(eq=False)
class Fleet:
    """One run of `setting`; workers that die are launched again."""

    setting: Setting
    folder: Path
    lives: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.kernel = Kernel(self.setting.seed)
        self.kernel.on_end = self._ended
        self.hub = SimHub(lambda: self.kernel.now)
        self.config = replace(RunConfig(), fleet=self.setting.fleet)
        self.config = replace(
            self.config,
            data=replace(self.config.data, num_slots=max(64, self.setting.workers)),
            train=replace(self.config.train, log_every_steps=self.setting.local_steps),
        )
        self.warm_seconds = self.setting.warm_hours * HOUR
        self.traffic = Traffic(since=self.warm_seconds)
        self.timeline = Timeline(self.hub, self.warm_seconds)
        self.global_bytes = 4.0 * self.setting.params
        self.payload_bytes = sized.BYTES_PER_PARAMETER[self.setting.codec] * self.setting.params
        self._make_run()

    def run(self) -> Figures:
        self._launch_merger()
        for number in range(self.setting.workers):
            self._launch_worker(number)
        end = self.warm_seconds + self.setting.hours * HOUR
        self.kernel.run(end)
        if self.kernel.bugs:
            raise RuntimeError(self.kernel.bugs[0])
        return self._figures()

    def _figures(self) -> Figures:
        """Rates count whole rounds, so that the window cuts none; traffic and commits count all."""
        hours, timeline, traffic = self.setting.hours, self.timeline, self.traffic
        since, until, rounds, tokens = timeline.whole_rounds()
        alive = timeline.alive_seconds(since, until)
        train_seconds, trained_tokens = timeline.trained(since, until)
        commits = [t for t in timeline.commits if t >= self.warm_seconds]
        return Figures(
            rounds_per_hour=rounds * HOUR / (until - since),
            waiting_share=1.0 - train_seconds / alive,
            lost_share=max(0.0, 1.0 - tokens / trained_tokens),
            tokens_per_day=24.0 * HOUR * tokens / (until - since),
            tokens_per_second=tokens / alive,
            workers_alive=alive / (until - since),
            up_bytes_per_hour=traffic.up_bytes / hours,
            down_bytes_per_hour=traffic.down_bytes / hours,
            commits_per_hour=len(commits) / hours,
            most_commits_per_hour=_most_in(commits, HOUR),
            most_api_calls=max(traffic.api_calls.values(), default=0),
            most_resolver_calls=max(traffic.resolver_calls.values(), default=0),
            phases=timeline.phases(),
        )

    # --- the run and its processes ---------------------------------------------------------------

    def _make_run(self) -> None:
        first = self.folder / "first"
        sized.write(first, self.global_bytes, sized.GLOBAL)
        weights = self.hub.stage(first)
        state = State(
            run_id="simulated",
            config_sha=configs.digest(self.config),
            schema_sha="schema",
            corpus_sha="corpus",
            global_weights=weights,
        )
        files: dict[str, Change] = {
            records.STATE: dump_json(records.to_json(state)),
            records.CONFIG: configs.dumps(self.config).encode(),
            records.TOKENIZER: b"{}",
            records.GLOBAL: weights,
        }
        self.hub.publish(MAIN, files, expect=None)

    def _new_id(self) -> str:
        return f"{self.kernel.chance.getrandbits(128):032x}"

    def _launch_merger(self) -> None:
        setting = self.setting
        theirs = setting.merger == "report"

        def make(process: Process) -> Body:
            bandwidth = setting.merger_bytes_per_second
            costs = setting.costs(bandwidth, bandwidth)
            if theirs:  # it knew no digests
                costs = replace(costs, hash_bytes_per_second=math.inf)
            run = self._open(process, costs, DeferringStore if theirs else MeteredStore)
            averager = SizedAverager(
                setting.codec,
                process.spend,
                costs,
                sized.UPDATE_BYTES_PER_PARAMETER * setting.params,
                checks=not theirs,
            )
            seconds = setting.guard_seconds
            merger = (ReportMerger if theirs else Merger)(
                run,
                averager,
                SizedGuard(process.spend, seconds) if seconds else None,
                clock=process.clock,
                report=_silent,
                new_id=self._new_id,
            )
            return merger.run()

        self.kernel.launch("merger#1", make)

    def _launch_worker(self, number: int) -> None:
        setting = self.setting
        self.lives[f"w{number}"] += 1
        name = f"w{number}#{self.lives[f'w{number}']}"
        # Each launch's own: two settings of one seed lose the same workers at the same times.
        chance = random.Random(f"{setting.seed} {name}")
        speed = chance.uniform(1.0 - setting.speed_spread, 1.0 + setting.speed_spread)

        def make(process: Process) -> Body:
            costs = setting.costs(
                setting.upload_bytes_per_second, setting.download_bytes_per_second
            )
            learner = SizedLearner(
                name,
                setting.codec,
                self.payload_bytes,
                setting.step_seconds / speed,
                setting.tokens_per_step,
                costs,
                process,
                on_step=functools.partial(self.timeline.stepped, name),
            )
            worker = Worker(
                self._open(process, costs, MeteredStore),
                number,
                learner,
                clock=process.clock,
                wall_clock=lambda: self.kernel.now,
                report=_silent,
                new_id=self._new_id,
            )
            process.spend(setting.launch_seconds)
            return worker.run()

        process = self.kernel.launch(name, make)
        if math.isfinite(setting.lifetime_seconds):
            life = chance.expovariate(1.0 / setting.lifetime_seconds)
            self.kernel.at(self.kernel.now + life, lambda: self.kernel.kill(process))

    def _ended(self, process: Process) -> None:
        self.timeline.died(process.name, self.kernel.now)
        kind = process.name.partition("#")[0]
        if kind[0] == "w":
            at = self.kernel.now + self.setting.relaunch_seconds
            self.kernel.at(at, lambda: self._launch_worker(int(kind[1:])))

    def _open(self, process: Process, costs: SizedCosts, store: type[MeteredStore]) -> Run:
        cache = self.folder / process.name.replace("#", "-")
        cache.mkdir(parents=True, exist_ok=True)
        return Run(
            store(self.hub, process, NoFaults(), costs, self.traffic), self.config, cache, "{}"
        )


def _most_in(times: list[float], seconds: float) -> int:
    """The most of the sorted `times` within `seconds`."""
    first = most = 0
    for last, time in enumerate(times):
        while times[first] <= time - seconds:
            first += 1
        most = max(most, last - first + 1)
    return most


def _silent(line: str) -> None:
    pass
