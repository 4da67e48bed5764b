"""What the folder and the object stores write alike: manifests, and the names of blobs.

A manifest is one version as JSON: {lane, id, nonce, files, previous}. Ids are numbers without a
gap from 1 on, and a number is never used twice in a lane.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from diffurefill.store.base import (
    Change,
    Conflict,
    Corrupt,
    Ref,
    Version,
    check_path,
    dump_json,
    new_nonce,
)

SELFTEST_LANE = "selftest"
"""Lanes whose name begins so belong to self-tests: `lanes()` leaves them out."""

GRACE_SECONDS = 3600.0
"""Age below which `compact` deletes no blob: whoever staged it may be about to publish it."""


def blob_name(ref: Ref) -> str:
    """The place of a blob below the root of a run. Corrupt for a digest that is none."""
    # A manifest written elsewhere must not name a file outside blobs/.
    if not re.fullmatch(r"[0-9a-f]{64}", ref.sha256):
        raise Corrupt(f"{ref.sha256!r} is not a sha256")
    return f"blobs/sha256/{ref.sha256[:2]}/{ref.sha256}"


def manifest_name(number: int) -> str:
    return f"{number:08d}.json"


def number_of(version: Version | None) -> int:
    """The number of a version of these stores; 0 for a lane nobody has written."""
    return int(version.id) if version else 0


def same_version(a: Version | None, b: Version | None) -> bool:
    """By nonce as well as by number: a lane that was removed and made again has old numbers."""
    return (a and (a.id, a.nonce)) == (b and (b.id, b.nonce))


def require_head(lane: str, head: Version | None, expect: Version | None) -> None:
    """Raises Conflict when `expect` is not the head."""
    if not same_version(head, expect):
        raise Conflict(f"lane {lane} is not at {expect.id if expect else 'its start'} any more")


def check_paths(changes: Mapping[str, Change]) -> None:
    for path in changes:
        check_path(path)


def next_version(
    lane: str,
    expect: Version | None,
    changes: Mapping[str, Change],
    nonce: str | None,
    blob_of: Callable[[bytes | Ref], Ref],
) -> Version:
    """The version after `expect`; `blob_of` stores new bytes and checks that staged ones exist."""
    files = dict(expect.files) if expect else {}
    for path, change in changes.items():
        if change is None:
            files.pop(path, None)
        else:
            files[path] = blob_of(change)
    return Version(lane, str(number_of(expect) + 1), nonce or new_nonce(), files)


def dump_manifest(version: Version) -> bytes:
    number = number_of(version)
    record = {
        "lane": version.lane,
        "id": version.id,
        "nonce": version.nonce,
        "files": {name: ref.to_json() for name, ref in version.files.items()},
        "previous": str(number - 1) if number > 1 else None,
    }
    return dump_json(record)


def parse_manifest(content: bytes, where: object, lane: str, number: int | None = None) -> Version:
    """The version in `content`. Corrupt, naming `where`, when it is not `lane` (at `number`)."""
    try:
        record: Any = json.loads(content)
        files = {name: Ref.from_json(ref) for name, ref in record["files"].items()}
        version = Version(record["lane"], record["id"], record["nonce"], files)
        found = number_of(version)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Corrupt(f"{where} is not a manifest ({error}): restore it from a copy") from None
    if version.lane != lane or found < 1 or found != (number or found):
        raise Corrupt(f"{where} says it is {version.lane}@{version.id}: restore it from a copy")
    return version


def refs_of(versions: Iterable[Version | None]) -> set[Ref]:
    """Every file that one of `versions` names."""
    return {ref for version in versions if version for ref in version.files.values()}
