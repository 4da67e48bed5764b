"""What must hold whatever happens, checked on the hub's true state at every version it takes.

The ledger reads the JSON as it lies there and recomputes the weights with its own arithmetic; it
shares no rule with the code under test. A violation is a line that names the invariant, the
virtual time and the seed. Source: spec fleet.md 4, I1 to I19.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from fractions import Fraction
from typing import Any

from diffurefill.fleet import gates
from diffurefill.fleet.records import (
    GLOBAL,
    STATE,
    WorkerPaths,
    worker_of,
    worker_paths,
)
from diffurefill.fleet.rounds import SILENT_INTERVALS
from diffurefill.fleet.simulate import provenance, refusals
from diffurefill.fleet.simulate.history import History, Json
from diffurefill.fleet.simulate.provenance import Delta, Weights
from diffurefill.fleet.simulate.refusals import identity, parsed
from diffurefill.store.base import MAIN, Version


class Ledger(History):
    """`watch` it before the run is made."""

    def watch(self) -> Ledger:
        self.hub.on_publish.append(self._published)
        self.hub.on_compact.append(self._compacted)
        return self

    # --- what the hub took -----------------------------------------------------------------------

    def _published(self, version: Version, writer: str) -> None:
        missing = [p for p, ref in version.files.items() if ref.sha256 not in self.hub.blobs]
        self.check("files", not missing, f"{version.lane}@{version.id} names lost files {missing}")
        self.writers[version.lane] = writer
        if version.lane == MAIN:
            self._main(version, writer)
        elif (worker := worker_of(version.lane)) is not None:
            self._lane(version, worker_paths(worker), writer)
        quota = self.hub.commits_per_hour
        if quota is not None:
            used = len(self.hub.commit_times)
            self.check("I17", used <= quota, f"{used} commits in an hour that allows {quota}")

    def _lane(self, version: Version, paths: WorkerPaths, writer: str) -> None:
        """Remember what was pushed, and whether its incarnation held the lane then or later."""
        if paths.manifest not in version.files or paths.registration not in version.files:
            return
        manifest = parsed(self.blob(version.files[paths.manifest].sha256))
        registration = parsed(self.blob(version.files[paths.registration].sha256))
        if writer.startswith("liar"):  # writes over what lay there, as nobody of the fleet does
            overwritten = worker_of(version.lane)
            self.leftovers = {key for key in self.leftovers if key[0] != overwritten}
        if manifest is not None and registration is not None:
            key = identity(manifest)
            foreign = key[1] != registration["incarnation"] and not writer.startswith("liar")
            zombie = foreign and key not in self.pushed
            self.check("5.4", not zombie, f"{writer} pushed on lane {version.lane} of another")
            self.pushed.setdefault(key, manifest)
            if key[1] in (registration["incarnation"], registration["inherited"]):
                self.held.add(key)
            if key[1] == registration["inherited"]:
                self.inherited.add(key)

    def _compacted(self, before: Version, after: Version) -> None:
        self.check("I14", before.files == after.files, f"squash changed lane {before.lane}")
        for lane in self.hub.lanes():
            head = self.hub.head(lane)
            for path, ref in head.files.items() if head else ():
                kept = ref.sha256 in self.hub.blobs
                self.check("I14", kept, f"squash of {before.lane} lost {path} of {lane}")

    def _main(self, version: Version, writer: str) -> None:
        after, before = parsed(self.blob(version.files[STATE].sha256)), self.state
        if after is None:
            self.check("I8", False, f"state.json of version {version.id} is not JSON")
            return
        self.state = after
        if not before:
            self.first[after["gen"]] = after
            self.weights[after["gen"]] = {}
            self.lineage = [after["gen"]]
            return
        self._check_term(before, after, writer)
        self._check_generation(before, after)
        restored = after.get("restored_from")
        if after["gen"] == before["gen"]:
            self._check_same_generation(before, after)
        elif restored is not None and after["gen"] not in self.first:
            self._rolled_back(before, after, restored)
        else:
            self._advanced(before, after, writer)
        self.first.setdefault(after["gen"], after)
        self.num_released += bool(before["merger_id"]) and not after["merger_id"]
        self._check_global(version, after)
        refusals.check_rejections(self, before, after)
        self._check_live(before, after, writer)

    # --- terms and generations -------------------------------------------------------------------

    def _check_term(self, before: Json, after: Json, writer: str) -> None:
        was, now = before["epoch"], after["epoch"]
        self.check("I7", now >= was, f"{writer} publishes for epoch {now} after epoch {was}")
        if now > was:
            foreign = self.owners.get(was) != writer or not before["merger_id"]
            self.check("5.2", foreign, f"{writer} lost epoch {was} to nobody but itself")
            self.owners[now] = writer
            self.leftovers = set()
            if after["gen"] == before["gen"]:
                self.leftovers = refusals.undecided(self, after)
            self.hub.seen_by.pop(writer, None)
        owner = self.owners.get(now)
        self.check("I7", owner == writer, f"{writer} publishes in epoch {now} of {owner}")

    def _check_generation(self, before: Json, after: Json) -> None:
        grown = after["gen"] - before["gen"]
        what = f"generation {before['gen']} -> {after['gen']}"
        self.check("I1", grown in (0, 1), what)
        reused = grown > 0 and after["gen"] in self.first
        self.check("I1", not reused, f"{what}, which existed before")
        sha = after["global_weights"]["sha256"]
        was = self.first.get(after["gen"], after)["global_weights"]["sha256"]
        self.check("I2", sha == was, f"generation {after['gen']} has two sets of weights")

    def _check_same_generation(self, before: Json, after: Json) -> None:
        gen = after["gen"]
        for key in ("step", "tokens", "cursors", "accepted", "parent_gen", "run_id", "config_sha"):
            self.check("I16", before[key] == after[key], f"{key} of generation {gen} changed")
        kept = {identity(r) for r in before["rejected"]} <= {identity(r) for r in after["rejected"]}
        self.check("I19", kept, f"rejections of generation {gen} were forgotten")
        for name in ("ema", "swa"):
            untouched = after["step"] > 0 or after[name] == before[name]
            self.check("I10", untouched, f"generation {gen}, untrained, entered the {name}")
            self._check_average(name, before, after)

    def _rolled_back(self, before: Json, after: Json, target: int) -> None:
        gen = after["gen"]
        known = target in self.first
        self.check("I5", known, f"generation {gen} restores generation {target}, unknown")
        if not known:
            return
        source = self.first[target]
        for key in ("step", "tokens", "cursors", "global_weights"):
            same = after[key] == source[key]
            self.check("I5", same, f"{key} of generation {gen} is not that of {target}")
        self.check("I5", after["epoch"] > before["epoch"], f"rollback to {target} in the old epoch")
        self.weights[gen] = self.weights[target]
        at = self.lineage.index(target) + 1 if target in self.lineage else 0
        self.lineage = [*self.lineage[:at], gen]
        self.leftovers = set()

    # --- a new generation ------------------------------------------------------------------------

    def _advanced(self, before: Json, after: Json, writer: str) -> None:
        gen, accepted = after["gen"], after["accepted"]
        self.check("I9", bool(accepted), f"generation {gen} has no contributions")
        self.check("I5", after["parent_gen"] == before["gen"], f"generation {gen}: its parent")
        parts: list[tuple[Weights, Fraction]] = []
        for c in accepted:
            delta = self._check_accepted(c, before, after)
            if delta is not None:
                parts.append((delta.delta, self._weight(c, before)))
        self._check_sums(before, after)
        if parts:
            mean = provenance.weighted_mean(parts)
            self.weights[gen] = provenance.plus(self.weights.get(before["gen"], {}), mean)
        # At step 0 it has the weights that the run began with, whatever its number.
        due = before["step"] > 0 and (before["ema"] or {"gen": 0})["gen"] != before["gen"]
        self.check("I10", not due, f"generation {before['gen']} never entered the EMA")
        self.lineage.append(gen)
        refusals.check_leftovers(self, after)
        refusals.check_considered(self, after, writer)

    def _check_accepted(self, c: Json, before: Json, after: Json) -> Delta | None:
        who = f"generation {after['gen']}, worker {c['worker']}, contribution {c['seq']}"
        key = identity(c)
        times = self.accepted.get(key)
        self.check("I4", times is None, f"{who}: it is in generation {times} already")
        self.accepted[key] = after["gen"]
        self.check("I5", self.pushed.get(key) == c, f"{who}: not what its worker pushed")
        self.check("I5", key not in self.rejected, f"{who}: it was rejected before")
        self.check("5.4", key in self.held, f"{who}: its incarnation never held the lane")
        forged = self.lies.get(key, "zombie") != "zombie"  # a zombie's may be inherited
        self.check("5.4", not forged, f"{who}: forged ({self.lies.get(key)})")
        try:
            delta = provenance.load_delta(self.blob(c["payload"]["sha256"]))
        except (ValueError, KeyError, TypeError):
            self.check("I8", False, f"{who}: its payload cannot be read")
            return None
        bases = [g for g in self.lineage[-1 - self.fleet.max_staleness :] if g in self.first]
        shas = {self.first[g]["global_weights"]["sha256"] for g in bases}
        told = c["base_gen"] in bases and c["base_sha256"] in shas
        self.check("I3", told, f"{who}: made on generation {c['base_gen']} or other weights")
        self.check("I3", delta.base in shas, f"{who}: trained from other weights than it says")
        self._check_rows(c, delta, before, who)
        self._check_sound(delta, c, before, who)
        for element in delta.delta:
            was = self.elements.setdefault(element, after["gen"])
            self.check("I4", was == after["gen"], f"{who}: {element} entered generation {was} too")
        return delta

    def _check_rows(self, c: Json, delta: Delta, before: Json, who: str) -> None:
        """Rows of a slot follow each other: none twice, none left out."""
        start = before["cursors"].get(str(c["worker"]))
        at = start["rows"] if start else 0
        rows = f"{who}: it read rows {delta.rows}, the slot stood at {at}"
        self.check("I11", delta.rows[0] == at and delta.slot == c["worker"], rows)
        length = delta.rows[1] - delta.rows[0]
        self.check("I11", length == c["steps"], f"{who}: {length} rows in {c['steps']} steps")
        self.check("I11", c["cursor_end"]["rows"] == delta.rows[1], f"{who}: its end cursor")

    def _check_sound(self, delta: Delta, c: Json, before: Json, who: str) -> None:
        """What the gates are for. A norm is usual or not only beside others."""
        guarded, norms = self.fleet.guard_rows > 0, before["norms"]
        tells = len(norms) >= gates.MIN_NORMS
        ratio = self.fleet.max_norm_ratio * (5.0 if c["moment_steps"] < 100 else 1.0)
        usual = ratio * statistics.median(norms) if tells else math.inf
        self.check("I8", delta.finite, f"{who}: it is not finite")
        fits = delta.norm <= (min(usual, 1000.0) if guarded else usual)
        self.check("5.3", fits, f"{who}: its norm is huge")
        self.check("5.3", not (guarded and delta.poisons), f"{who}: it harms held-out text")

    def _weight(self, c: Json, before: Json) -> Fraction:
        late = self.lineage[::-1].index(c["base_gen"]) if c["base_gen"] in self.lineage else 0
        return Fraction(c["tokens"] / (1.0 + self.fleet.staleness_discount * late))

    def _check_sums(self, before: Json, after: Json) -> None:
        gen, accepted = after["gen"], after["accepted"]
        steps = before["step"] + max((c["steps"] for c in accepted), default=0)
        tokens = before["tokens"] + sum(c["tokens"] for c in accepted)
        ends = {str(c["worker"]): c["cursor_end"] for c in accepted}
        self.check("I16", after["step"] == steps, f"generation {gen}: its step")
        self.check("I16", after["tokens"] == tokens, f"generation {gen}: its tokens")
        moved = after["cursors"] == {**before["cursors"], **ends}
        self.check("I16", moved, f"generation {gen}: its cursors")

    def _check_global(self, version: Version, after: Json) -> None:
        """I9: byte for byte what the recorded inputs give."""
        gen, ref = after["gen"], after["global_weights"]
        made = provenance.dump_weights(self.weights.get(gen, {}))
        self.check("I9", sha_of(made) == ref["sha256"], f"generation {gen} is not its inputs' mean")
        if after.get("full_gen", gen) == gen:
            named = version.files[GLOBAL].to_json()
            self.check("I6", named == ref, f"version {version.id}: state and global disagree")

    def _check_average(self, name: str, before: Json, after: Json) -> None:
        old, new, gen = before.get(name), after.get(name), after["gen"]
        if new == old or new is None:
            self.check("I10", new == old, f"the {name} was lost at generation {gen}")
            return
        count, folded = (old["count"], old["gen"]) if old else (0, -1)
        self.check("I10", folded < gen, f"generation {gen} entered the {name} twice")
        self.check("I10", new["count"] == count + 1, f"the {name} of generation {gen}: its count")
        self.check("I10", new["gen"] == gen, f"the {name} names generation {new['gen']}, not {gen}")
        made = self.weights.get(gen, {})
        if old is not None:
            keep = self.fleet.ema_decay if name == "ema" else count / (count + 1)
            previous = provenance.load_weights(self.blob(old["ref"]["sha256"]))
            made = provenance.mixed(previous, keep, made)
        same = sha_of(provenance.dump_weights(made)) == new["ref"]["sha256"]
        self.check("I10", same, f"the {name} of generation {gen} is not what its globals give")

    def _check_live(self, before: Json, after: Json, writer: str) -> None:
        """I18: whose lane was seen to move within the shortest horizon is waited for."""
        if (after["gen"], after["beat"]) == (before["gen"], before["beat"]):
            return
        horizon = min(self.fleet.live_seconds, SILENT_INTERVALS * self.fleet.log_seconds)
        for lane, (_, seen) in self.hub.seen_by.get(writer, {}).items():
            worker, silent = worker_of(lane), self.kernel.now - seen > horizon
            lives = worker is None or silent or worker in after["live"]
            self.check("I18", lives, f"{writer} gave up lane {lane}, which moves")

    # --- what processes do -----------------------------------------------------------------------

    def fenced(self, name: str, lane: str) -> None:
        """A process stops because another took its place: then somebody else wrote there."""
        itself = self.writers.get(lane) == name
        self.check("5.2", not itself, f"{name} was fenced by a publish of its own on lane {lane}")

    def adopted(self, name: str, gen: int, sha256: str, step: int, cursor: Any, slot: int) -> None:
        """A worker starts an interval: from one generation's own weights, step and cursor."""
        truth = self.first.get(gen)
        if truth is None:
            self.check("I2", False, f"{name} adopts generation {gen}, which never was")
            return
        same = truth["global_weights"]["sha256"] == sha256
        self.check("I6", same, f"{name} adopts other bytes than generation {gen}'s")
        self.check("I12", truth["step"] == step, f"{name} is at step {step} of generation {gen}")
        at = truth["cursors"].get(str(slot))
        self.check("I11", at == cursor, f"{name} continues slot {slot} at {cursor}, not at {at}")


def sha_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
