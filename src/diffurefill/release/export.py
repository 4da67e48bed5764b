"""`export`: from any model that can be loaded to a folder for transformers, checked, then whole.

The folder is written beside its place, opened in another process and compared, and only then gets
its name: what stands there is a model that works, or nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from diffurefill.config import UserError
from diffurefill.fleet import exported
from diffurefill.fleet.found import Found
from diffurefill.release.check import check_folder, write_reference
from diffurefill.release.files import write_files
from diffurefill.store.base import dump_json, new_nonce, sha256_file
from diffurefill.store.durable import fsync_folder, make_folder, removed_at_exit

FORMAT = 1


def export_folder(
    found: Found,
    dest: Path,
    report: Callable[[str], None],
    extra: Mapping[str, bytes] | None = None,
    *,
    replace: bool = False,
) -> None:
    """Write `found`, and `extra` files by name, to the folder `dest`, or to where it links.

    Raises UserError where something stands there that may not be replaced, and where the model
    cannot be exported or does not hold.
    """
    require_room(dest, replace)
    dest = dest.resolve()  # a link stays one: the folder that it names is replaced
    make_folder(dest.parent)
    part = dest.with_name(f".{dest.name}.{new_nonce()}.part")
    try:
        part.mkdir()
        write_checked(found, part, report, extra)
        _give_name(part, dest)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def write_checked(
    found: Found,
    folder: Path,
    report: Callable[[str], None],
    extra: Mapping[str, bytes] | None = None,
) -> None:
    """All files of an export in the empty `folder`, opened once from there and compared."""
    write_files(found, folder)
    for name, content in (extra or {}).items():
        (folder / name).write_bytes(content)
    reference = folder.with_name(f"{folder.name}.npz")
    with removed_at_exit(reference):
        write_reference(found, reference)
        opened_with = check_folder(folder, reference)
    if "transformers" in opened_with:
        report(f"opened by transformers {opened_with['transformers']}: the same logits and tokens")
    else:
        report("opened again: the same logits; transformers is not installed, so not tried with it")
    names = sorted(p.name for p in folder.iterdir() if p.name not in exported.CARD)
    record = {
        "format": FORMAT,
        "source": {**found.provenance, "sha256": sha256_file(found.weights).sha256},
        "opened_with": opened_with,
        "files": {name: sha256_file(folder / name).to_json() for name in names},
    }
    (folder / exported.PROVENANCE).write_bytes(dump_json(record))


def kept_files(found: Found) -> dict[str, bytes]:
    """{name: content} of what another export of `found` could not write; {} unless it was read
    from an export."""
    folder = found.weights.parent
    if not exported.is_exported(folder):
        return {}
    paths = [folder / name for name in exported.NOT_MADE_AGAIN]
    return {path.name: path.read_bytes() for path in paths if path.exists()}


def require_room(dest: Path, replace: bool) -> None:
    """UserError unless `dest` is free, or an export that may be replaced."""
    if not dest.exists() or (dest.is_dir() and not any(dest.iterdir())):
        return
    if not exported.is_exported(dest):
        raise UserError(f"{dest} holds something else than an export: give another folder")
    if not replace:
        raise UserError(f"{dest} holds an export already: add --replace, or give another folder")


def _give_name(part: Path, dest: Path) -> None:
    """`part` becomes `dest`. Files in an earlier export that export did not write move along."""
    if dest.exists() and any(dest.iterdir()):
        written = {exported.PROVENANCE, *_files_of(dest), *(p.name for p in part.iterdir())}
        old = dest.with_name(f".{dest.name}.{new_nonce()}.old")
        for path in dest.iterdir():
            if path.name not in written:
                copy = shutil.copytree if path.is_dir() else shutil.copy2
                copy(path, part / path.name)
        dest.rename(old)
        part.rename(dest)
        shutil.rmtree(old)
    else:
        part.rename(dest)
    fsync_folder(dest.parent)


def _files_of(folder: Path) -> list[str]:
    path = folder / exported.PROVENANCE
    return list(exported.read_json_object(path).get("files", {})) if path.exists() else []
