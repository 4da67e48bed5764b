"""A run in a store: opening it, reading its state, keeping local copies of its files.

Everything a worker or merger must know lies in the store, so its address is all they are given.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from diffurefill import config as configs
from diffurefill.config import RunConfig, UserError
from diffurefill.fleet import protocol
from diffurefill.fleet.protocol import State
from diffurefill.store.base import MAIN, Ref, Store, Version, open_store, read_json


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
        """The newest state. Cheap when nothing was published since the last call."""
        if self._latest is not None:
            head_id = self.store.poll([MAIN])[MAIN]
            if head_id == self._latest.version.id:
                return self._latest
        version = self.store.head(MAIN)
        if version is None:
            raise UserError(f"no run at {self.store.uri}: make one with `diffurefill init`")
        self._latest = Snapshot(version, read_state(self.store, version))
        return self._latest

    def fetch(self, ref: Ref) -> Path:
        """A local, verified copy of a weights file."""
        path = self.cache / f"{ref.sha256}.safetensors"
        if not path.exists():
            self.cache.mkdir(parents=True, exist_ok=True)
            self.store.fetch(ref, path)
        return path

    def forget(self, keep: set[str]) -> None:
        """Delete local copies whose digest is not in `keep`."""
        for path in self.cache.glob("*.safetensors"):
            if path.stem not in keep:
                path.unlink(missing_ok=True)


def read_state(store: Store, version: Version) -> State:
    record = read_json(store, version, protocol.STATE)
    try:
        return protocol.state_from_json(record)
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{store.uri}: state.json is not of this version of diffurefill ({error})"
        ) from None


def open_run(uri: str, cache: Path) -> Run:
    """The run at `uri`; UserError when there is none or its files disagree with each other."""
    store = open_store(uri)
    version = store.head(MAIN)
    if version is None:
        raise UserError(f"no run at {uri}: make one with `diffurefill init {uri}`")
    state = read_state(store, version)
    text = store.read(version.ref(protocol.CONFIG)).decode()
    config = configs.loads(text, RunConfig(), where=f"{uri}: {protocol.CONFIG}")
    if configs.digest(config) != state.config_sha:
        raise UserError(
            f"{uri}: the run was made with another configuration than this version reads "
            f"(digest {state.config_sha[:12]}): use the version of diffurefill that made it"
        )
    tokenizer = store.read(version.ref(protocol.TOKENIZER)).decode()
    return Run(store, config, cache, tokenizer, Snapshot(version, state))
