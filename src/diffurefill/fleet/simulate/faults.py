"""Who suffers what and when: the seeded plan of a profile, and what came of every fault.

`ChaosPlan` answers for every store operation (connection.Plan) and every step (kernel.Nemesis).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from diffurefill.fleet.records import lane_of
from diffurefill.fleet.simulate.connection import FAULTS
from diffurefill.fleet.simulate.kernel import Kernel, Process
from diffurefill.fleet.simulate.profiles import MINUTE, Profile


@dataclass(eq=False)
class ChaosPlan:
    """A profile at work. `stop` ends all faults for good."""

    profile: Profile
    injected: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(fault, what its process did next)."""
    windows: list[tuple[str, str | None]] = field(default_factory=list)
    """Outages going on: (kind, the one process it befalls or None for all)."""
    stopped: bool = False

    def __post_init__(self) -> None:
        self._menu = {
            op: [(k, self.profile.kinds[k]) for k in kinds if k in self.profile.kinds]
            for op, kinds in FAULTS.items()
        }
        self._total = {op: sum(rate for _, rate in menu) for op, menu in self._menu.items()}
        self._suffering: dict[str, tuple[str, str, str]] = {}
        """Process -> its last fault, the operation and the lane it befell."""

    # --- store operations ------------------------------------------------------------------------

    def fault(self, process: Process, op: str, lane: str) -> str | None:
        self._observe(process, op, lane)
        kind = self._window(process, op) or self._drawn(process, op, lane)
        if kind is not None:
            self._inject(kind, process, op, lane)
        return kind

    def _window(self, process: Process, op: str) -> str | None:
        for kind, who in self.windows:
            if who is not None and who != process.name:
                continue
            if kind == "quota" and op not in ("publish", "compact"):
                continue
            if kind == "full" and op not in ("stage", "publish"):
                continue
            return "down" if kind == "partition" else kind
        return None

    def _drawn(self, process: Process, op: str, lane: str) -> str | None:
        if self.stopped or not self._total[op]:
            return None
        left = process.kernel.chance.random()
        if left >= self._total[op]:
            return None
        for kind, rate in self._menu[op]:
            left -= rate
            if left < 0:
                return kind if _may_befall(kind, process, lane) else None
        return None

    def seconds(self, kind: str) -> float:
        return {"late": self._late, "slow": 120.0, "lag": 60.0}[kind]

    def draw_late(self, kernel: Kernel) -> None:
        """How late the next late publish lands: within the round, or generations after."""
        self._late = kernel.chance.choice((5.0, 40.0, 300.0))

    _late: float = 40.0

    # --- steps -----------------------------------------------------------------------------------

    def after_step(self, process: Process, wait: float) -> float | None:
        if self.stopped:
            return wait
        chance, profile = process.kernel.chance, self.profile
        left = chance.random()
        if left < profile.kill:
            self._inject("kill", process, "step", "")
            return None
        left -= profile.kill
        if left < profile.pause:
            seconds = chance.choice((30.0, 200.0, 10 * MINUTE))
            self._inject("pause", process, "step", "")
            process.kernel.pause(process, seconds)
            return wait
        left -= profile.pause
        if left < profile.delay:
            self._inject("delay", process, "step", "")
            return wait + chance.uniform(1.0, 30.0)
        return wait

    def stop(self) -> None:
        self.stopped = True
        self.windows.clear()

    # --- what came of it -------------------------------------------------------------------------

    def _inject(self, kind: str, process: Process, op: str, lane: str) -> None:
        self.injected[kind] += 1
        self._suffering[process.name] = (kind, op, lane)
        if kind == "late":
            self.draw_late(process.kernel)

    def _observe(self, process: Process, op: str, lane: str) -> None:
        suffered = self._suffering.pop(process.name, None)
        if suffered is not None:
            kind, failed, on = suffered
            what = "asked again" if (failed, on) == (op, lane) else "went on"
            if failed == "publish" and op == "lookup":
                what = "looked up its nonce"
            self.outcomes[kind, what] += 1

    def ended(self, process: Process) -> None:
        """Called at the end of every process."""
        suffered = self._suffering.pop(process.name, None)
        if suffered is not None and process.ending is not None:
            self.outcomes[suffered[0], f"ended: {process.ending.partition(':')[0]}"] += 1


def _may_befall(kind: str, process: Process, lane: str) -> bool:
    """A global damaged for good needs a person; a contribution must not. Of its own lane a process
    is told nothing that is older than what it was told before (spec fleet.md 5.3)."""
    actor = process.name.partition("#")[0]
    is_worker = actor[0] == "w"
    if kind == "damaged":
        return is_worker
    return kind != "back" or (is_worker and lane != lane_of(int(actor[1:])))
