"""What is particular to a folder: its layout, damaged files, full and read-only disks, kills."""

import contextlib
import errno
import io
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diffurefill.config import UserError
from diffurefill.store.base import (
    Busy,
    Conflict,
    Corrupt,
    Denied,
    Ref,
    Unknown,
    new_nonce,
    open_store,
)
from diffurefill.store.folder import STALE_TMP_SECONDS, FolderStore


@pytest.fixture
def run(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "run", create=True)


def visible_files(store: FolderStore) -> set[str]:
    """Everything but blobs, which nobody sees until a manifest names them."""
    files = (path.relative_to(store.root) for path in store.root.rglob("*") if path.is_file())
    return {str(path) for path in files if path.parts[0] != "blobs"}


def blob_path(store: FolderStore, ref: Ref) -> Path:
    return store.root / "blobs" / "sha256" / ref.sha256[:2] / ref.sha256


def failing(number: int) -> Callable[..., Any]:
    """A stand-in for an os function that raises OSError(number)."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


# --- opening and layout ---


def test_opening_nothing_says_how_to_make_a_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"make one with `diffurefill init .*absent`"):
        open_store(str(tmp_path / "absent"))


def test_opening_a_file_says_that_it_is_one(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(UserError, match="is a file"):
        open_store(str(tmp_path / "run"), create=True)


def test_creating_an_existing_run_keeps_it(run: FolderStore) -> None:
    version = run.publish("main", {"a": b"1"}, expect=None)
    assert open_store(run.uri, create=True).head() == version


def test_a_manifest_says_what_it_follows(run: FolderStore) -> None:
    first = run.publish("main", {"a": b"1"}, expect=None)
    second = run.publish("main", {"b": b"2"}, expect=first, nonce="n2")
    manifest = json.loads((run.root / "lanes/main/00000002.json").read_bytes())
    refs = {path: ref.to_json() for path, ref in second.files.items()}
    assert manifest == {
        "lane": "main", "id": "2", "nonce": "n2", "previous": "1", "files": refs,
    }  # fmt: skip


@pytest.mark.parametrize("hint", [None, "", "1", "999", "-3", "rubbish"])
def test_the_hint_only_saves_time(run: FolderStore, hint: str | None) -> None:
    head = None
    for value in (b"1", b"2", b"3"):
        head = run.publish("main", {"a": value}, expect=head)
    path = run.root / "lanes" / "main" / "HEAD"
    path.unlink()
    if hint is not None:
        path.write_text(hint)
    assert run.head() == head
    assert run.publish("main", {}, expect=head).id == "4"


def test_a_foreign_folder_among_the_lanes_is_passed_over(run: FolderStore) -> None:
    run.publish("main", {"a": b"1"}, expect=None)
    (run.root / "lanes" / ".snapshot dir").mkdir()
    (run.root / "lanes" / "begun-but-never-published").mkdir()
    assert run.lanes() == ["main"]


def test_no_temporary_file_is_left(run: FolderStore, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"x" * 100)
    ref = run.stage(source)
    run.publish("main", {"a": ref, "b": b"1"}, expect=None)
    with pytest.raises(Conflict):
        run.publish("main", {"a": b"2"}, expect=None)
    run.fetch(ref, tmp_path / "fetched" / "out")
    assert os.listdir(run.root / "tmp") == []
    assert os.listdir(tmp_path / "fetched") == ["out"]


def test_the_selftest_sweeps_what_a_killed_process_left_a_day_ago(run: FolderStore) -> None:
    old, young = (run.root / "tmp" / f"{new_nonce()}.tmp" for _ in range(2))
    old.write_bytes(b"half")
    young.write_bytes(b"half")
    make_old(old)
    run.selftest()
    assert os.listdir(run.root / "tmp") == [young.name]


def test_the_selftest_leaves_what_is_not_its_own(run: FolderStore) -> None:
    kept = [run.root / "tmp" / name for name in ("thesis.txt", "photos", f"{new_nonce()}.tmp")]
    kept[0].write_bytes(b"years of work")
    for folder in kept[1:]:
        folder.mkdir()
    for path in kept:
        make_old(path)
    run.selftest()
    assert all(path.exists() for path in kept)


def make_old(path: Path) -> None:
    long_ago = path.stat().st_mtime - 2 * STALE_TMP_SECONDS
    os.utime(path, (long_ago, long_ago))


@pytest.mark.parametrize(("age_seconds", "freed"), [(0.0, False), (3599.0, False), (3601.0, True)])
def test_compaction_frees_only_what_was_written_an_hour_ago(
    run: FolderStore, age_seconds: float, freed: bool
) -> None:
    first = run.publish("main", {"a": b"1"}, expect=None)
    second = run.publish("main", {"a": b"2"}, expect=first)
    old = blob_path(run, first.ref("a"))
    written = blob_path(run, second.ref("a")).stat().st_mtime - age_seconds
    os.utime(old, (written, written))
    run.compact("main", second)
    assert old.exists() is not freed
    assert list(run.history("main")) == [first, second]


def test_access_to_a_read_only_folder_is_denied(
    run: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", failing(errno.EROFS))
    with pytest.raises(Denied, match="can write"):
        run.check_access()


# --- damage ---


@pytest.mark.parametrize("damaged", [b"weighty", b"weight", b"", b"weights and more"])
def test_a_tampered_blob_is_reported_by_name(
    run: FolderStore, tmp_path: Path, damaged: bytes
) -> None:
    ref = run.publish("main", {"w": b"weights"}, expect=None).ref("w")
    blob_path(run, ref).write_bytes(damaged)
    with pytest.raises(Corrupt, match=ref.sha256):
        run.read(ref)
    with pytest.raises(Corrupt, match=ref.sha256):
        run.fetch(ref, tmp_path / "fetched" / "out")
    assert os.listdir(tmp_path / "fetched") == []


def test_a_read_that_goes_wrong_once_is_tried_again(
    run: FolderStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = run.publish("main", {"w": b"weights"}, expect=None).ref("w")
    answers: list[bytes] = []
    monkeypatch.setattr(run, "_open_blob", lambda _: io.BytesIO(answers.pop(0)))
    answers[:] = [b"weighty", b"weights"]
    assert run.read(ref) == b"weights"
    answers[:] = [b"weighty", b"weights"]
    assert run.fetch(ref, tmp_path / "out").read_bytes() == b"weights"


def test_staging_again_heals_a_damaged_blob(run: FolderStore, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"weights")
    ref = run.stage(source)
    blob_path(run, ref).write_bytes(b"damaged")
    assert run.stage(source) == ref
    assert run.read(ref) == b"weights"


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"lane": "main", "id": "1", "non',
        "[]",
        "{}",
        '{"lane": "main", "id": "1", "nonce": "n", "files": []}',
        '{"lane": "main", "id": "1", "nonce": "n", "files": {"a": {"size": 1}}}',
        '{"lane": "main", "id": "7", "nonce": "n", "files": {}}',
        '{"lane": "w-01", "id": "1", "nonce": "n", "files": {}}',
        "\x00\x01",
    ],
)
def test_a_damaged_manifest_is_reported_by_name(run: FolderStore, text: str) -> None:
    run.publish("main", {"a": b"1"}, expect=None)
    (run.root / "lanes/main/00000001.json").write_text(text)
    with pytest.raises(Corrupt, match="00000001"):
        run.head()
    with pytest.raises(Corrupt, match="00000001"):
        list(run.history("main"))


def test_a_digest_that_is_a_path_is_refused(run: FolderStore, tmp_path: Path) -> None:
    """A manifest is read from a folder that others write: it must not reach outside it."""
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    outside = Ref(f"../../../../{secret.name}", 6)
    for attempt in (
        lambda: run.read(outside),
        lambda: run.fetch(outside, tmp_path / "out"),
        lambda: run.publish("main", {"a": outside}, expect=None),
    ):
        with pytest.raises(Corrupt, match="not a sha256"):
            attempt()


# --- disks that are full or read-only (a superuser's tests cannot rely on modes) ---


@pytest.mark.parametrize("function", ["fsync", "link", "replace"])
@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "free space"),
        (errno.EDQUOT, "free space"),
        (errno.EACCES, "can write"),
        (errno.EROFS, "can write"),
    ],
)
def test_a_store_that_cannot_be_written_says_what_to_do_and_shows_nothing(
    run: FolderStore, monkeypatch: pytest.MonkeyPatch, function: str, number: int, advice: str
) -> None:
    first = run.publish("main", {"a": b"1"}, expect=None)
    before = visible_files(run)
    with monkeypatch.context() as patch:
        patch.setattr(os, function, failing(number))
        with pytest.raises(Denied, match=advice):
            run.publish("main", {"a": b"2"}, expect=first)
    assert visible_files(run) == before
    assert run.head() == first
    run.publish("main", {"a": b"2"}, expect=first)


def test_staging_on_a_full_disk_is_denied_and_leaves_no_file(
    run: FolderStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"weights")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing(errno.ENOSPC))
        with pytest.raises(Denied, match="free space"):
            run.stage(source)
    assert [path for path in run.root.rglob("*") if path.is_file()] == []


def test_a_full_disk_of_local_copies_is_not_called_the_stores(
    run: FolderStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = run.publish("main", {"a": b"1"}, expect=None).ref("a")
    monkeypatch.setattr(os, "fsync", failing(errno.ENOSPC))
    place = re.escape(str(tmp_path / "cache"))
    with pytest.raises(Denied, match=f"local copy in {place}: .*free space.*DIFFUREFILL_CACHE"):
        run.fetch(ref, tmp_path / "cache" / "a")


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
def test_a_file_system_whose_server_is_away_is_waited_for(
    run: FolderStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    first = run.publish("main", {"a": b"1"}, expect=None)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing(number))
        with pytest.raises(Busy, match=re.escape(str(run.root))):
            run.publish("main", {"a": b"2"}, expect=first)
    monkeypatch.setattr(run, "_open_blob", failing(number))
    ref = first.ref("a")
    for act in (lambda: run.read(ref), lambda: run.fetch(ref, tmp_path / "a")):
        with pytest.raises(Busy, match="cannot use the store"):
            act()
    assert run.head() == first


def test_a_limit_on_the_size_of_files_is_named(
    run: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", failing(errno.EFBIG))
    with pytest.raises(Denied, match=re.escape(str(run.root)) + ".*ulimit -f"):
        run.publish("main", {"a": b"1"}, expect=None)


def test_a_folder_that_cannot_be_made_is_denied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "mkdir", failing(errno.EROFS))
    with pytest.raises(Denied, match="can write"):
        FolderStore(tmp_path / "run", create=True)


def test_a_disk_without_hard_links_is_denied_by_the_selftest(
    run: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", failing(errno.EPERM))
    with pytest.raises(Denied, match="hard links"):
        run.selftest()


def test_a_failed_hint_does_not_fail_the_publish(
    run: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run.publish("main", {}, expect=None)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", failing(errno.ENOSPC))
        second = run.publish("main", {}, expect=first)
    assert run.head() == second


@pytest.mark.parametrize("landed", [True, False])
def test_a_link_whose_outcome_is_unclear_is_unknown(
    run: FolderStore, monkeypatch: pytest.MonkeyPatch, landed: bool
) -> None:
    """A network file system may carry out the link and lose the answer."""
    link = os.link

    def doubtful(source: Path, dest: Path) -> None:
        if landed:
            link(source, dest)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", doubtful)
        with pytest.raises(Unknown):
            run.publish("main", {"a": b"1"}, expect=None, nonce="mine")
    assert (run.lookup("main", "mine") is not None) == landed


def test_a_version_that_may_not_last_is_unknown(
    run: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link is visible, but the folder's fsync failed."""
    fsync, link = os.fsync, os.link
    linked = []

    def fail_after_link(descriptor: int) -> None:
        if linked:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", lambda a, b: (link(a, b), linked.append(b)))
        patch.setattr(os, "fsync", fail_after_link)
        with pytest.raises(Unknown):
            run.publish("main", {"a": b"1"}, expect=None, nonce="mine")
    assert run.lookup("main", "mine") == run.head()


# --- kills ---


class Killed(BaseException):
    """Not an Exception: nothing may handle it, as nothing handles SIGKILL."""


STEPS = ("fsync", "link", "replace", "open", "unlink", "mkdir")


def kill_at(patch: pytest.MonkeyPatch, step: int, after: bool) -> list[str]:
    """Raise Killed before or after the `step`-th call that changes the disk; returns the calls."""
    calls: list[str] = []

    def wrap(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if len(calls) > step:
                raise Killed  # a dead process does not clean up either
            calls.append(name)
            if len(calls) > step and not after:
                raise Killed
            try:
                return call(*args, **kwargs)
            finally:
                if len(calls) > step:
                    raise Killed

        return wrapped

    for name in STEPS:
        patch.setattr(os, name, wrap(name, getattr(os, name)))
    return calls


@pytest.mark.parametrize("after", [False, True])
def test_a_kill_at_any_step_leaves_the_old_version_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    outcomes = set()
    for step in range(1000):
        store = FolderStore(tmp_path / f"run{step}", create=True)
        first = store.publish("main", {"a": b"1"}, expect=None)
        with monkeypatch.context() as patch:
            calls = kill_at(patch, step, after)
            killed = True
            with contextlib.suppress(Killed):
                store.publish("main", {"a": b"2", "b": b"2"}, expect=first, nonce="mine")
                killed = False
        survivor = FolderStore(store.root, create=False)
        head = survivor.head()
        assert head is not None
        content = {path: survivor.read(ref) for path, ref in head.files.items()}
        assert content == ({"a": b"2", "b": b"2"} if head.nonce == "mine" else {"a": b"1"})
        assert [version.id for version in survivor.history("main")] == ["1", "2"][: int(head.id)]
        survivor.publish("main", {"a": b"3"}, expect=head)
        outcomes.add(head.id)
        if not killed:
            break
    assert len(calls) == step
    assert outcomes == {"1", "2"}
