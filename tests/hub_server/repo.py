"""A repository held in memory: commits, branches, tags, squash. Contents live on disk.

No lock is needed: the server runs every handler on one event loop, and nothing here awaits, so
each change of a repository is one step. Source: spec hf-endpoints.md 2-4.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from tests.hub_server.http import HubError, revision_not_found


def git_oid(data: bytes) -> str:
    """Git's own id of a blob; the client compares it to skip unchanged files."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def lfs_pointer(sha256: str, size: int) -> bytes:
    return (
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n"
    ).encode()


def iso_time(seconds: float) -> str:
    stamp = datetime.fromtimestamp(seconds, UTC)
    return stamp.strftime("%Y-%m-%dT%H:%M:%S.") + f"{stamp.microsecond // 1000:03d}Z"


@dataclass(frozen=True)
class Entry:
    """A file of a tree. `size` in bytes; `sha256` only in LFS; `commit` changed it last."""

    oid: str
    size: int
    sha256: str | None = None
    commit: str = ""


@dataclass(frozen=True)
class Commit:
    oid: str
    parent: str | None
    title: str
    message: str
    author: str
    date: float
    tree: Mapping[str, Entry]


@dataclass
class LfsObject:
    """A large file this repository holds, whether or not a commit names it."""

    size: int
    pushed_at: float
    xet_hash: str | None = None


@dataclass
class Repository:
    repo_type: str
    id: str
    private: bool
    created_at: float
    branches: dict[str, list[str]] = field(default_factory=dict)
    """Every head a branch has had, newest last: what a lagging replica would still answer."""
    tags: dict[str, str] = field(default_factory=dict)
    pulls: dict[str, str] = field(default_factory=dict)
    commits: dict[str, Commit] = field(default_factory=dict)
    objects: dict[str, LfsObject] = field(default_factory=dict)

    def head(self, branch: str, stale: bool = False) -> str:
        """The branch's newest commit; with `stale` the one before, where that still exists."""
        moves = self.branches.get(branch)
        if moves is None:
            raise revision_not_found(branch)
        return moves[-2] if stale and len(moves) > 1 and moves[-2] in self.commits else moves[-1]

    def resolve(self, rev: str, stale: bool = False) -> Commit:
        """A branch, tag, pull request or full commit id."""
        rev = rev.removeprefix("refs/heads/")
        if rev in self.branches:
            return self.commits[self.head(rev, stale)]
        oid = self.tags.get(rev.removeprefix("refs/tags/")) or self.pulls.get(rev) or rev
        if oid not in self.commits:
            raise revision_not_found(rev)
        return self.commits[oid]

    def add_commit(
        self,
        ref: str,
        tree: Mapping[str, Entry],
        *,
        title: str,
        author: str,
        date: float,
        message: str = "",
        parentless: bool = False,
    ) -> Commit:
        """A new commit on the branch or pull request `ref`, holding exactly `tree`."""
        oid = secrets.token_hex(20)
        parent = None if parentless or not self.has_head(ref) else self.resolve(ref)
        before = {} if parent is None else parent.tree
        kept = {
            path: before[path]
            if path in before and before[path].oid == entry.oid
            else replace(entry, commit=oid)
            for path, entry in sorted(tree.items())
        }
        commit = Commit(oid, parent.oid if parent else None, title, message, author, date, kept)
        self.commits[oid] = commit
        if ref in self.pulls:
            self.pulls[ref] = oid
        else:
            self.branches.setdefault(ref, []).append(oid)
        return commit

    def has_head(self, ref: str) -> bool:
        return ref in self.branches or ref in self.pulls

    def open_pull(self, branch: str) -> str:
        """A pull request ref that starts at the head of `branch`."""
        ref = f"refs/pr/{len(self.pulls) + 1}"
        self.pulls[ref] = self.head(branch)
        return ref

    def add_ref(self, refs: dict, name: str, value: object) -> None:
        if name in refs:
            raise HubError(409, f"Reference {name} already exists")
        refs[name] = value

    def squash(self, branch: str, message: str, author: str, date: float) -> Commit:
        """One parentless commit with the same tree; what no ref reaches any more is dropped."""
        tree = self.commits[self.head(branch)].tree
        commit = self.add_commit(
            branch, tree, title=message, author=author, date=date, parentless=True
        )
        self.drop_unreachable()
        return commit

    def drop_unreachable(self) -> None:
        heads = [moves[-1] for moves in self.branches.values()]
        reached: set[str] = set()
        for oid in [*heads, *self.tags.values(), *self.pulls.values()]:
            step: str | None = oid
            while step is not None and step not in reached:
                reached.add(step)
                step = self.commits[step].parent
        self.commits = {oid: c for oid, c in self.commits.items() if oid in reached}

    def history(self, commit: Commit) -> list[Commit]:
        """Newest first."""
        commits = [commit]
        while commits[-1].parent is not None:
            commits.append(self.commits[commits[-1].parent])
        return commits
