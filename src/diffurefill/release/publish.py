"""An exported folder to a model repository of the hub: one commit, checked against the hub's copy.

The commit names the head that it was decided on, so nothing that somebody pushed meanwhile is
overwritten. A repository that does not exist is made private; `--public` makes it public.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, hf_hub_download
from huggingface_hub.hf_api import RepoFile

from diffurefill.config import UserError
from diffurefill.fleet import exported
from diffurefill.store.base import Conflict, Corrupt, sha256_file
from diffurefill.store.hub_client import hub_errors, prepare_client
from diffurefill.store.hub_files import MANIFEST

_ADDRESS = re.compile(r"hf://([\w.-]+/[\w.-]+)")


class Destination:
    """`hf://user/repo`, looked at before anything is computed."""

    def __init__(self, uri: str, *, replace: bool, public: bool) -> None:
        """Raises UserError where the repository holds something that may not be replaced."""
        match = _ADDRESS.fullmatch(uri)
        if match is None or match[1].startswith("buckets/"):
            raise UserError(f"{uri}: write the address as hf://user/repo")
        prepare_client()
        self.uri, self.repo, self._api = uri, match[1], HfApi()
        with hub_errors(uri, "making the repository"):
            self._api.create_repo(self.repo, private=not public, exist_ok=True)
        with hub_errors(uri, "looking at it"):
            self._head = self._api.repo_info(self.repo).sha
            files = self._api.list_repo_files(self.repo, revision=self._head)
        if MANIFEST in files:
            raise UserError(f"{uri} holds a run: export to a repository of the model's own")
        if exported.CONFIG in files and not replace:
            raise UserError(f"{uri} holds a model already: add --replace, or give another name")
        self._written = self._written_before() if exported.PROVENANCE in files else []
        if exported.CONFIG in files and not self._written:
            raise UserError(f"{uri} holds another model than an export: give another name")
        self._present = set(files)

    def has(self, name: str) -> bool:
        """Whether the repository holds a file of this name now."""
        return name in self._present

    def _written_before(self) -> list[str]:
        with hub_errors(self.uri, f"reading {exported.PROVENANCE}"):
            path = hf_hub_download(self.repo, exported.PROVENANCE, revision=self._head)
        return [*exported.read_json_object(Path(path)).get("files", {}), exported.PROVENANCE]

    def publish(self, folder: Path, title: str, report: Callable[[str], None]) -> str:
        """Commit every file of `folder`; the commit's id. Files that no export wrote stay.

        Raises UserError where somebody pushed meanwhile, Corrupt where the hub has other bytes.
        """
        files = {path.name: path for path in sorted(folder.iterdir())}
        gone = sorted((set(self._written) & self._present) - files.keys())
        operations = [
            *(CommitOperationAdd(name, str(path)) for name, path in files.items()),
            *(CommitOperationDelete(name) for name in gone),
        ]
        try:
            with hub_errors(self.uri, "publishing", unsure=True):
                commit = self._api.create_commit(
                    self.repo, operations, commit_message=title, parent_commit=self._head
                ).oid
        except Conflict as error:
            raise UserError(f"{self.uri}: somebody pushed meanwhile ({error}); try again") from None
        self._require_same(files, commit)
        report(f"{self.uri} at {commit[:12]}: {len(files)} files, the hub has the same bytes")
        return commit

    def _require_same(self, files: dict[str, Path], commit: str) -> None:
        with hub_errors(self.uri, "looking at what was published"):
            entries = list(self._api.list_repo_tree(self.repo, recursive=True, revision=commit))
        there = {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}
        for name, path in files.items():
            entry = there.get(name)
            large = entry is not None and entry.lfs is not None
            wanted = sha256_file(path).sha256 if large else _git_id(path.read_bytes())
            found = entry and (entry.lfs.sha256 if entry.lfs else entry.blob_id)
            if found != wanted:
                raise Corrupt(f"{self.uri}: the hub's {name} at {commit} is not what was sent")


def _git_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
