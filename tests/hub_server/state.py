"""Everything the two origins share: repositories, buckets, settings, faults, the request log."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.hub_server.faults import Faults, hourly_limit
from tests.hub_server.http import Request, repo_not_found
from tests.hub_server.repo import Repository


@dataclass
class Settings:
    """`part_bytes`: larger files go up in parts. `lfs_bytes`: larger files go through LFS.

    `commits_per_hour`: one account's commit quota, None for no limit.
    """

    part_bytes: int = 64 << 20
    lfs_bytes: int = 10_000_000
    commits_per_hour: int | None = None

    def update(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if not hasattr(self, name):
                raise ValueError(f"no setting {name!r}")
            setattr(self, name, value)


@dataclass
class State:
    folder: Path
    faults: Faults
    hub_url: str = ""
    blob_url: str = ""
    settings: Settings = field(default_factory=Settings)
    repos: dict[tuple[str, str], Repository] = field(default_factory=dict)
    buckets: dict[str, Any] = field(default_factory=dict)
    uploads: dict[str, Any] = field(default_factory=dict)
    log: list[dict[str, Any]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    clock_offset: float = 0.0
    commit_times: dict[str, list[float]] = field(default_factory=dict)

    def now(self) -> float:
        """Unix seconds of the hub's clock, which a test may put forward."""
        return time.time() + self.clock_offset

    def repo(self, repo_type: str, name: str, request: Request | None = None) -> Repository:
        repo = self.repos.get((repo_type, name))
        hidden = repo is not None and repo.private and request is not None and request.user is None
        if repo is None or hidden:
            raise repo_not_found()
        return repo

    def bucket(self, name: str) -> Any:
        if name not in self.buckets:
            raise repo_not_found()
        return self.buckets[name]

    def web_url(self, repo_type: str, name: str) -> str:
        return f"{self.hub_url}/{'' if repo_type == 'models' else repo_type + '/'}{name}"

    def count_commit(self, user: str) -> None:
        """One commit of `user`; raises the hourly 429 when the quota is spent."""
        quota = self.settings.commits_per_hour
        recent = [t for t in self.commit_times.get(user, []) if t > self.now() - 3600]
        if quota is not None and len(recent) >= quota:
            raise hourly_limit(quota)
        self.commit_times[user] = [*recent, self.now()]

    def object_path(self, sha256: str) -> Path:
        return self.folder / "objects" / sha256

    def store_small(self, oid: str, data: bytes) -> None:
        (self.folder / "small" / oid).write_bytes(data)

    def load_small(self, oid: str) -> bytes:
        return (self.folder / "small" / oid).read_bytes()
