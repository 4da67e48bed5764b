"""What one commit on the hub is made of: files by value, files by digest, and the manifest.

The client would ask the hub, before every commit, how each file is to be stored, and would drop
those that some replica of the hub already has. Both are decided here instead, by setting the
operation's upload mode: one commit is one request, and nothing is dropped from it on the word of
a replica that lags. Source: spec hub.md A1 (holes 1 and 2), A4.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import threading
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants
from huggingface_hub.lfs import UploadInfo
from huggingface_hub.utils._xet import abort_xet_session

from diffurefill.store.base import Corrupt, Ref, Version, dump_json
from diffurefill.store.hub_client import longest_transfer

logger = logging.getLogger(__name__)

MANIFEST = "version.json"
REGULAR_BYTES = 1_000_000
"""Longer content, and content that is not text, is not kept in git itself."""
XET_FAILURES = 2
"""Failures in a row after which this process uploads by plain LFS (spec hub.md A4)."""

Operation = CommitOperationAdd | CommitOperationDelete


@dataclass(frozen=True)
class Known:
    """A version and its place in the lane: `number` counts from 1 and never falls."""

    version: Version
    number: int
    previous: str | None


def is_regular(content: bytes) -> bool:
    """Whether git itself may hold `content`; the hub refuses binary files there."""
    if len(content) > REGULAR_BYTES or b"\0" in content:
        return False
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def regular(path: str, content: bytes) -> CommitOperationAdd:
    operation = CommitOperationAdd(path, content)
    operation._upload_mode = "regular"
    return operation


def by_digest(path: str, ref: Ref) -> CommitOperationAdd:
    """A file whose bytes the hub should have; it refuses the commit when it has not."""
    operation = CommitOperationAdd(path, b"")
    operation.upload_info = UploadInfo(ref.size, sample=b"", sha256=bytes.fromhex(ref.sha256))
    operation._upload_mode, operation._is_uploaded = "lfs", True
    return operation


def removal(path: str) -> CommitOperationDelete:
    return CommitOperationDelete(path, is_folder=False)


class Uploads:
    """Brings bytes to the hub without committing them.

    Goes through Xet, or through LFS once Xet has failed repeatedly.
    """

    def __init__(self, api: HfApi, repo_id: str) -> None:
        self._api, self._repo_id = api, repo_id
        self._xet_failures = 0

    def bring(self, source: Path | bytes) -> Ref:
        """What was brought: hashed in the same pass as it is sent, where the client can.

        Raises what the client raises.
        """
        operation = CommitOperationAdd("staged", source)
        operation._upload_mode = "lfs"
        try:
            with _stalled_xet_ends(operation.upload_info.size):
                self._api.preupload_lfs_files(self._repo_id, [operation], free_memory=False)
        except (RuntimeError, OSError):
            self._count_failure()
            raise
        self._xet_failures = 0
        return Ref(operation.upload_info.sha256.hex(), operation.upload_info.size)

    def _count_failure(self) -> None:
        self._xet_failures += 1
        if self._xet_failures >= XET_FAILURES and not constants.HF_HUB_DISABLE_XET:
            constants.HF_HUB_DISABLE_XET = True  # the client reads it at every call
            logger.warning("uploads through Xet keep failing: going on through LFS")


@contextlib.contextmanager
def _stalled_xet_ends(size: int) -> Generator[None]:
    """Xet has no time limit of its own and is known to stall; plain requests have theirs."""
    watchdog = threading.Timer(longest_transfer(size), abort_xet_session)
    watchdog.daemon = True
    watchdog.start()
    try:
        yield
    finally:
        watchdog.cancel()


# --- the manifest ---


def encode(known: Known) -> bytes:
    """The manifest's bytes. The nonce makes every commit differ from its parent."""
    record = {
        "lane": known.version.lane,
        "number": known.number,
        "nonce": known.version.nonce,
        "previous": known.previous,
        "files": {path: ref.to_json() for path, ref in known.version.files.items()},
    }
    return dump_json({**record, "sha256": _digest(record)})


def decode(content: bytes, commit: str) -> Known:
    """The version at `commit`; Corrupt when the bytes are not a manifest as it was written."""
    try:
        record = json.loads(content)
        if record.pop("sha256") != _digest(record):
            raise ValueError("its digest is another")
        files = {path: Ref.from_json(ref) for path, ref in record["files"].items()}
        version = Version(record["lane"], commit, record["nonce"], files)
        return Known(version, record["number"], record["previous"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Corrupt(f"{MANIFEST} at {commit} is not a manifest ({error})") from None


def _digest(record: Mapping[str, object]) -> str:
    return hashlib.sha256(dump_json(record)).hexdigest()
