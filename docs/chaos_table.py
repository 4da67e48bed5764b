"""The faults of `make chaos` as a table: what befell the fleet, how often, what it did.

For render.py, from results/chaos.json.
"""

from __future__ import annotations

from typing import Any

MAX_OUTCOMES = 4

FAULTS = {
    "lost_answer": "a commit landed, its answer was lost (500, timeout)",
    "lost_request": "a commit was lost on its way",
    "late": "a commit landed 5 s to 5 min after its sender stopped waiting",
    "doubled": "a commit was sent twice below us: 412 for our own success",
    "busy": "503",
    "quota": "429, single or for 20 minutes",
    "down": "the hub answered nobody, or not this process, for up to 2 hours",
    "slow": "a transfer hung for 2 minutes",
    "stale": "an answer up to a minute old",
    "back": "an answer older than one given before",
    "flip": "a digit changed on the way, same size",
    "truncate": "half a file",
    "flip_twice": "changed twice in a row",
    "damaged": "a payload damaged at the hub",
    "global damaged at rest": "the global damaged at the hub",
    "person mends the global": "... until a person rolled back",
    "state damaged at rest": "state.json damaged at the hub",
    "person mends the state": "... until a person rolled back",
    "disk_full": "this machine's disk full",
    "full": "the hub's storage full",
    "revoked": "the token revoked",
    "kill_before": "SIGKILL just before an operation",
    "kill_after": "SIGKILL just after an operation",
    "kill": "SIGKILL between two operations",
    "pause": "SIGSTOP for 30 s to 10 min",
    "delay": "held up for 1 to 30 s",
    "fleet lost": "every process killed at one moment",
    "session ends": "a worker's session ends",
    "merger interrupted": "Ctrl-C on the merger",
    "second merger": "a second merger",
    "second worker under a number": "a second worker under a number",
    "rollback": "a rollback while uploads are in flight",
    "wall clock jump": "wall clocks off by an hour",
    "vice nan": "a worker whose weights are NaN and says so",
    "vice sneaky_nan": "a worker whose weights are NaN",
    "vice huge": "a worker whose steps are a million times too long",
    "vice poison": "a worker on wrong text",
    "lie: other run": "a contribution of another run",
    "lie: other config": "... of another configuration",
    "lie: other schema": "... for other tensors",
    "lie: other codec": "... in an unknown codec",
    "lie: other weights": "... made on other weights, same generation",
    "lie: other rows": "... made on rows that are not its slot's next",
    "lie: no steps": "... of no steps",
    "lie: zombie": "... pushed over the lane of a successor",
}
WORDS = {
    "asked again": "asked again",
    "went on": "went on",
    "looked up its nonce": "looked up its nonce",
    "goes on": "lives at the end",
    "nobody needed it any more": "replaced before anybody needed it",
    "not pushed": "lost the race for the lane",
    "ended: killed": "killed",
    "ended: done": "done",
    "ended: Fenced": "fenced: it stopped",
    "ended: Taken": "lost the number at once: it stopped",
    "ended: Denied": "stopped and said why",
    "ended: Corrupt": "stopped and named the way out",
}
UNSEEN = {
    "fleet lost": "what was pushed is merged first, then all start again",
    "wall clock jump": "no rule looks at it",
}
"""What happens where no process tells."""
REFETCHED = ("flip", "truncate")
"""What a store itself asks for again: for the actor it went on."""


def chaos_block(facts: dict[str, Any]) -> str:
    """A sentence, the table of faults, the table of guards."""
    machine = facts["machine"]
    intro = (
        f"`make chaos` on {machine['cpu_count']} CPU cores (results/chaos.json): "
        f"{facts['seeds']:,} simulated fleets, {facts['launches']:,} processes, "
        f"{facts['generations']:,} generations, {sum(facts['injected'].values()):,} faults, "
        f"**{facts['violations']} violations**. Of {facts['mutations']} guards that were switched "
        f"off one at a time, {facts['mutations_caught']} are missed: some seed then violates an "
        "invariant."
    )
    return "\n".join([intro, "", *fault_table(facts), "", *guard_table(facts)])


def fault_table(facts: dict[str, Any]) -> list[str]:
    rows = ["| what went wrong | times | what the fleet did |", "|---|---:|---|"]
    unknown = [kind for kind in facts["injected"] if kind not in FAULTS]
    for kind in [*FAULTS, *unknown]:
        times = facts["injected"].get(kind, 0)
        if times:
            told = outcomes(kind, facts["outcomes"].get(kind, {}))
            rows.append(f"| {FAULTS.get(kind, kind)} | {times:,} | {told} |")
    return rows


def outcomes(kind: str, counts: dict[str, int]) -> str:
    """The commonest, with their counts."""
    if not counts:
        return UNSEEN.get(kind, "")
    shown = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:MAX_OUTCOMES]
    return ", ".join(f"{_words(kind, what)} {count:,}" for what, count in shown)


def _words(kind: str, what: str) -> str:
    if kind in REFETCHED and what == "went on":
        return "fetched again at once"
    reason = what.removeprefix("rejected: ")
    return f"rejected (`{reason}`)" if reason != what else WORDS.get(what, what)


def guard_table(facts: dict[str, Any]) -> list[str]:
    rows = ["| guard switched off | first seed that misses it | violated |", "|---|---|---|"]
    for guard in facts["guards"]:
        if guard["seed"] is None:
            rows.append(f"| {guard['guard']} | none | |")
            continue
        violated = ", ".join(guard["invariants"])
        rows.append(f"| {guard['guard']} | {guard['profile']} {guard['seed']} | {violated} |")
    return rows
