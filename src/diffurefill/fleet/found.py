"""What a person may name as a model, and how the kinds are told apart.

| what is named                                  | is taken for                                  |
|------------------------------------------------|-----------------------------------------------|
| `s3://` `gs://` `az://` `hf://buckets/`        | a run's store                                 |
| `hf://user/repo`, with `@revision` if need be  | an exported model if the repository holds     |
|                                                | config.json and no version.json; else a run   |
| a folder with config.json of `diffurefill`     | an exported or imported model                 |
| a folder with config.toml                      | a folder of `train`                           |
| any other folder                               | a run's store                                 |
| `user/repo` where no such folder exists        | as `hf://user/repo`                           |

A run has several weights (weights.py); the others have one, and refuse to be asked for a kind.
Nothing that is named is ever executed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diffurefill import config as configs
from diffurefill.config import RunConfig, UserError
from diffurefill.data.tokens.tokenizer import Tokenizer
from diffurefill.fleet import exported, records
from diffurefill.fleet.alone import is_train_folder
from diffurefill.fleet.run import Run, Snapshot, open_run
from diffurefill.fleet.weights import KINDS, NotThere, describe, require_known, weights_of
from diffurefill.store.base import folder_of
from diffurefill.train.checkpoint import newest_weights

_HUB = re.compile(r"(hf://)?(\w[\w.-]*/[\w.-]+)(@[\w./-]+)?")
"""No name of the hub begins with a dot: ./run is a folder, there or not."""


@dataclass(frozen=True)
class Found:
    """A model's files on this disk, not yet read."""

    name: str
    """For tables: which weights they are."""
    weights: Path
    tokenizer: Tokenizer
    config: RunConfig
    probe: Path | None
    """None for imported weights: they come without held-out text."""
    provenance: dict[str, Any] = field(default_factory=dict)
    """Where they come from, as JSON; no path of this machine."""


def find(where: str, kind: str | None, cache: Path) -> Found:
    """The model at `where`; files that lie elsewhere are copied to `cache`, which the caller owns.

    `kind` as in weights.weights_of. UserError when nothing is there, or nothing of that kind.
    """
    place = locate(where, cache)
    if isinstance(place, Run):
        return found_in_run(place, kind)
    if kind is not None:
        raise UserError(
            f"{where} holds one set of weights: leave out --weights, which chooses among a run's"
        )
    return place


def find_each(where: str, kinds: Sequence[str], cache: Path) -> list[Found]:
    """As many of the kinds as a run has by now; of anything else the one model that it holds.

    UserError for a kind that no run has, and where a run has none of them.
    """
    if not kinds:
        raise UserError(f"name the weights: {KINDS}")
    for kind in kinds:
        require_known(kind)
    place = locate(where, cache)
    if not isinstance(place, Run):
        return [place]
    found, missing = each_in_run(place, place.snapshot(), kinds)
    if not found:
        raise next(iter(missing.values()))
    return list(found.values())


def locate(where: str, cache: Path) -> Run | Found:
    """What `where` names, by the table above."""
    folder = folder_of(where)
    if folder is not None:
        if exported.is_exported(folder):
            return found_exported(folder, where)
        if is_train_folder(folder):
            return _found_trained(folder, where)
        if folder.exists() or not _HUB.fullmatch(where):
            return open_run(where, cache)
    hub = _HUB.fullmatch(where)
    if hub is None or hub[2].startswith("buckets/"):
        return open_run(where, cache)
    fetched = _fetched_export(hub[2], (hub[3] or "@")[1:] or None)
    if fetched is None:
        return open_run(f"hf://{hub[2]}{hub[3] or ''}", cache)
    return found_exported(fetched, where)


def each_in_run(
    run: Run, now: Snapshot, kinds: Sequence[str]
) -> tuple[dict[str, Found], dict[str, NotThere]]:
    """By kind those that `now` has, and why not the others. All at once: a fleet goes on, and what
    is compared must be of one generation."""
    found: dict[str, Found] = {}
    missing: dict[str, NotThere] = {}
    for kind in kinds:
        try:
            found[kind] = found_in_run(run, kind, now)
        except NotThere as error:
            missing[kind] = error
    return found, missing


def found_in_run(run: Run, kind: str | None, now: Snapshot | None = None) -> Found:
    """The run's weights of that kind as `now` shows them, by default the newest."""
    now = now or run.snapshot()
    weights, state = weights_of(run, now, kind), now.state
    provenance: dict[str, Any] = {
        "run_id": state.run_id,
        "generation": state.gen,
        "step": state.step,
        "tokens": state.tokens,
        "weights": weights.kind,
        "globals": weights.num_globals,
        "newest_global": max(weights.gens),
        "config_sha256": state.config_sha,
    }
    if weights.kind.startswith("last-"):
        provenance["generations"] = sorted(weights.gens)
    return Found(
        describe(weights, state),
        weights.path,
        Tokenizer.from_json(run.tokenizer_json),
        run.config,
        run.fetch(now.version.ref(records.PROBE)),
        provenance,
    )


def found_exported(folder: Path, name: str) -> Found:
    probe, provenance = folder / exported.PROBE, folder / exported.PROVENANCE
    return Found(
        name,
        folder / exported.WEIGHTS,
        exported.read_tokenizer(folder),
        exported.read_run_config(folder),
        probe if probe.exists() else None,
        exported.read_json_object(provenance)["source"] if provenance.exists() else {},
    )


def _found_trained(folder: Path, name: str) -> Found:
    newest = newest_weights(folder)
    if newest is None:
        raise UserError(f"{folder} has no saved state yet: let `diffurefill train` save once")
    weights, meta = newest
    config = configs.load_file(folder / records.CONFIG, RunConfig())
    tokenizer = Tokenizer.from_json((folder / records.TOKENIZER).read_text("utf-8"))
    provenance = {
        "step": meta["step"],
        **meta.get("done", {}),
        "weights": "train",
        "config_sha256": configs.digest(config),
    }
    return Found(name, weights, tokenizer, config, folder / records.PROBE, provenance)


# --- the hub -------------------------------------------------------------------------------------


def _fetched_export(repo: str, revision: str | None) -> Path | None:
    """A local copy of the exported model in a repository; None when it holds something else."""
    from huggingface_hub import HfApi, snapshot_download

    from diffurefill.store.base import NotFound
    from diffurefill.store.hub_client import NoRepository, hub_errors, prepare_client
    from diffurefill.store.hub_files import MANIFEST

    uri = f"hf://{repo}"
    prepare_client()
    try:
        with hub_errors(uri, "listing its files"):
            files = HfApi().list_repo_files(repo, revision=revision)
        if MANIFEST in files or exported.CONFIG not in files:
            return None
        with hub_errors(uri, "fetching the model"):
            wanted = [*exported.READ, *exported.NOT_MADE_AGAIN]
            folder = snapshot_download(repo, revision=revision, allow_patterns=wanted)
    except NoRepository as error:
        raise UserError(f"no model at {repo}: no such folder here, and {error}") from None
    except NotFound:
        raise UserError(f"{uri} has no revision {revision}: check its name") from None
    if not exported.is_exported(Path(folder)):
        raise UserError(f"{uri} holds a model of another kind: give one made by `export`")
    return Path(folder)
