"""The requests that a run makes of its model repository, each with the contract's errors.

Knows branches, commits and files; what a lane or a version is, hub.py and hub_versions.py know.
Files are read by commit id only: for a branch the client may answer from a stale cache.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from huggingface_hub import HfApi, constants, hf_hub_url
from huggingface_hub.errors import HFValidationError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import build_hf_headers, paginate, validate_repo_id

from diffurefill.config import UserError
from diffurefill.store.base import MAIN, Busy, Denied, NoRun, NotFound, Ref, StoreError
from diffurefill.store.hub_client import (
    PASSING_PAUSE,
    CommitLimit,
    NoRepository,
    download,
    hub_errors,
    prepare_client,
)
from diffurefill.store.hub_files import Operation, Uploads

START_TAG = "diffurefill-start"
"""Tags the repository's first commit, where new branches start: a squash of main would drop it."""


class HubRepo:
    """`hf://user/repo`. HF_ENDPOINT and HF_TOKEN are read here, or else the saved login."""

    def __init__(self, uri: str, *, commits_per_hour: int, clock: Callable[[], float]) -> None:
        self.uri = uri
        self.id = _repo_id(uri)
        prepare_client()
        self._endpoint = (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")
        self._token = os.environ.get("HF_TOKEN") or None
        self._api = HfApi(endpoint=self._endpoint, token=self._token)
        self._uploads = Uploads(self._api, self.id)
        self._limit = CommitLimit(commits_per_hour, clock)
        self._start: str | None = None

    # --- the repository ---

    def open(self, create: bool) -> None:
        """Raises UserError when there is none; `create` makes a private one."""
        if create:
            with self._errors("making the repository"):
                self._api.create_repo(self.id, private=True, exist_ok=True)
        try:
            self.branches()
        except NoRepository as error:
            raise NoRun(self.uri, ", or set HF_TOKEN to a token that may read it") from error
        if create:
            self._start_commit()

    def check_token(self) -> None:
        """Raises Denied when there is no token, or one that may only read."""
        with self._errors("asking whose token this is"):
            who = self._api.whoami(cache=True)  # the hub allows few of these
        if who.get("auth", {}).get("accessToken", {}).get("role") == "read":
            raise Denied(
                f"the token is read-only: set HF_TOKEN to a token that may write to {self.uri}"
            )

    def check_access(self) -> None:
        """Raises Denied when the token may not write here."""
        self.check_token()
        try:
            with self._errors("asking whether the token may write"):
                self._api.auth_check(self.id, write=True)
        except NotFound:  # a hub without this question
            self.branches()

    # --- branches and commits ---

    def branches(self) -> dict[str, str]:
        """Commit id of every branch's head. One request."""
        with self._errors("listing the branches"):
            refs = self._api.list_repo_refs(self.id)
        self._start = next((t.target_commit for t in refs.tags if t.name == START_TAG), None)
        return {branch.name: branch.target_commit for branch in refs.branches}

    @property
    def start(self) -> str | None:
        """Where new branches start, by the last listing of the branches; None without its tag."""
        return self._start

    def start_branch(self, branch: str) -> str:
        """Make `branch` unless it is there; returns the commit that a new one starts from."""
        start = self._start_commit()
        with self._errors(f"making branch {branch}"):
            self._api.create_branch(self.id, branch=branch, revision=start, exist_ok=True)
        return start

    def _start_commit(self) -> str:
        """The repository's first commit, tagged so that a squash of main does not drop it."""
        if self._start is None:
            commits = list(self.commits(MAIN))
            if not commits:  # made a moment ago
                raise Busy(f"{self.uri}: its first commit is not to be seen yet", PASSING_PAUSE)
            start = commits[-1]["id"]
            with contextlib.suppress(StoreError), self._errors("tagging the first commit"):
                self._api.create_tag(self.id, tag=START_TAG, revision=start, exist_ok=True)
            self._start = start
        return self._start

    def delete_branch(self, branch: str) -> None:
        with self._errors(f"removing branch {branch}"):
            self._api.delete_branch(self.id, branch=branch)

    def commits(self, branch: str) -> Iterator[dict[str, Any]]:
        """{id, title, ...} of its commits, newest first, a page at a time; none without it."""
        url = f"{self._endpoint}/api/models/{self.id}/commits/{branch}"
        with contextlib.suppress(NotFound), self._errors("listing the commits"):
            yield from paginate(url, params={}, headers=self._headers())

    def tree(self, commit: str) -> dict[str, tuple[str, str | None]]:
        """{path: (git id, sha256 in LFS)} of every file at a commit."""
        with self._errors("listing the files"):
            entries = list(self._api.list_repo_tree(self.id, recursive=True, revision=commit))
        files = [entry for entry in entries if isinstance(entry, RepoFile)]
        return {f.path: (f.blob_id, f.lfs.sha256 if f.lfs else None) for f in files}

    def commit(self, branch: str, operations: list[Operation], *, parent: str, title: str) -> str:
        """Id of the new commit. One request; Conflict when the head is not `parent`."""
        self._limit.spend()
        with self._errors(f"publishing {branch}", unsure=True):
            made = self._api.create_commit(
                self.id, operations, commit_message=title, revision=branch, parent_commit=parent
            )
        return made.oid

    def squash(self, branch: str, title: str) -> None:
        """Ask for it; passing trouble is swallowed, because only the head tells what happened."""
        self._limit.spend()
        with contextlib.suppress(Busy), self._errors(f"squashing {branch}"):
            self._api.super_squash_history(self.id, branch=branch, commit_message=title)

    # --- bytes ---

    def upload(self, source: Path | bytes) -> Ref:
        with self._errors("uploading"):
            return self._uploads.bring(source)

    def download(self, commit: str, path: str, f: BinaryIO, size: int | None = None) -> Ref:
        """Write a file to `f`; returns what came. Raises NoFile, or NotFound without the commit."""
        url = hf_hub_url(self.id, path, revision=commit, endpoint=self._endpoint)
        with self._errors(f"reading {path}"):
            return download(url, self._headers(), f, size)

    def small_file(self, commit: str, path: str) -> bytes:
        buffer = io.BytesIO()
        self.download(commit, path, buffer)
        return buffer.getvalue()

    def _headers(self) -> dict[str, str]:
        return build_hf_headers(token=self._token)

    def _errors(self, doing: str, *, unsure: bool = False) -> contextlib.AbstractContextManager:
        return hub_errors(self.uri, doing, unsure=unsure)


def _repo_id(uri: str) -> str:
    repo_id = uri.removeprefix("hf://")
    if "@" in repo_id:
        raise UserError(f"{uri}: leave out @..., a run uses every branch of its repository")
    try:
        validate_repo_id(repo_id)
    except HFValidationError:
        repo_id = ""
    if repo_id.count("/") != 1:
        raise UserError(f"{uri}: give the model repository as hf://user/repo")
    return repo_id
