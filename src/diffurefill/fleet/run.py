"""A run in a store: opening it, reading its state, keeping local copies of its files.

Everything a worker or merger must know lies in the store, so its address is all they are given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from diffurefill import config as configs
from diffurefill.config import RunConfig, UserError
from diffurefill.fleet import records
from diffurefill.fleet.records import State
from diffurefill.store.base import (
    MAIN,
    Corrupt,
    NoRun,
    NotFound,
    Ref,
    Store,
    Version,
    open_store,
    read_json,
    sha256_file,
)

ApplyUpdate = Callable[[Path, Path, Path], None]
"""(base, update, dest): the arithmetic of a downlink update; see averaging.py."""


class Fenced(UserError):
    """Another process took this one's place. It must stop; nothing is lost by stopping."""


@dataclass
class Snapshot:
    """The main lane as one version shows it. Reads through it never mix two versions (I6)."""

    version: Version
    state: State


@dataclass
class Run:
    """An open run. `cache` holds verified copies of files, named by their digest."""

    store: Store
    config: RunConfig
    cache: Path
    tokenizer_json: str
    _latest: Snapshot | None = field(default=None, repr=False)

    def snapshot(self) -> Snapshot:
        """The newest state. Cheap when nothing was published since the last call.

        A generation below one seen before is an old answer, and the newer one is kept.
        """
        if self._latest is not None:
            head_id = self.store.poll([MAIN])[MAIN]
            if head_id == self._latest.version.id:
                return self._latest
        version = self.store.head(MAIN)
        if version is None:
            raise NoRun(self.store.uri)
        found = Snapshot(version, read_state(self.store, version))
        if self._latest is None or not is_older(found.state, self._latest.state):
            self._latest = found
        return self._latest

    def fetch(self, ref: Ref) -> Path:
        """A local, verified copy of a weights file. Corrupt, naming the way out, when it is damaged
        in the store."""
        path = self.path_of(ref)
        if not path.exists():
            self.cache.mkdir(parents=True, exist_ok=True)
            try:
                self.store.fetch(ref, path)
            except Corrupt as error:
                uri = self.store.uri
                raise Corrupt(
                    f"{uri}: weights are damaged in the store ({error}); `diffurefill rollback "
                    f"{uri}` goes on from a generation whose files are whole"
                ) from None
        return path

    def fetch_global(self, now: Snapshot, apply_update: ApplyUpdate) -> Path:
        """The current global: whole, or as the one before it plus the published update."""
        state, dest = now.state, self.path_of(now.state.global_weights)
        if dest.exists() or state.update is None or state.full_gen == state.gen:
            return self.fetch(state.global_weights)
        base = self.fetch(now.version.ref(records.GLOBAL))
        made = self.cache / f"{state.global_weights.sha256}.made"
        apply_update(base, self.fetch(state.update), made)
        if sha256_file(made) != state.global_weights:
            raise Corrupt(f"generation {state.gen} is not what its update makes of the one before")
        return made.replace(dest)

    def path_of(self, ref: Ref) -> Path:
        return self.cache / f"{ref.sha256}.safetensors"

    def forget(self, keep: set[str]) -> None:
        """Delete local copies whose digest is not in `keep`."""
        for path in self.cache.glob("*.safetensors"):
            if path.stem not in keep:
                path.unlink(missing_ok=True)


def is_older(state: State, than: State) -> bool:
    """Generations and epochs only grow, so a smaller pair is a stale answer of the store."""
    return (state.gen, state.epoch, state.beat) < (than.gen, than.epoch, than.beat)


def read_state(store: Store, version: Version) -> State:
    """The state in `version`. Raises Corrupt, naming the way back, when it does not parse, and
    OtherVersion when another version of this package wrote it: then nothing is to be taken back."""
    try:
        return records.state_from_json(read_json(store, version, records.STATE))
    except records.OtherVersion:
        raise
    except (KeyError, TypeError, AttributeError, NotFound) as error:
        raise unreadable(store, version, str(error)) from None
    except Corrupt as error:
        raise unreadable(store, version, str(error)) from None


def unreadable(store: Store, version: Version, why: str) -> Corrupt:
    return Corrupt(
        f"{store.uri}: {records.STATE} of version {version.id} cannot be read ({why}); "
        f"`diffurefill rollback {store.uri}` goes on from the newest generation that can"
    )


def open_run(uri: str, cache: Path) -> Run:
    """The run at `uri`; UserError when there is none or its files disagree with each other."""
    store = open_store(uri)
    version = store.head(MAIN)
    if version is None:
        raise NoRun(uri)
    state = read_state(store, version)
    config = read_config(store, version)
    if configs.digest(config) != state.config_sha:
        raise UserError(
            f"{uri}: the run was made with another configuration than this version reads "
            f"(digest {state.config_sha[:12]}): use the version of diffurefill that made it"
        )
    tokenizer = store.read(version.ref(records.TOKENIZER)).decode()
    return Run(store, config, cache, tokenizer, Snapshot(version, state))


def config_at(store: Store) -> RunConfig:
    """The configuration of the run in `store`."""
    version = store.head(MAIN)
    if version is None:
        raise NoRun(store.uri)
    return read_config(store, version)


def read_config(store: Store, version: Version) -> RunConfig:
    """The run's configuration, which lies beside its state."""
    text = store.read(version.ref(records.CONFIG)).decode()
    return configs.loads(text, RunConfig(), where=f"{store.uri}: {records.CONFIG}")
