"""`torch.save` files, read and written as data: those of the run that this package grew out of, and
our own.

A file is a dict with the state dict under "model", or the state dict itself. It is read with
`weights_only`: a pickle that asks for anything but tensors and plain values is refused. Ours hold
the configuration and the tokenizer too, and are imported without further questions.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffurefill import config as configs
from diffurefill.config import RunConfig, UserError
from diffurefill.data.tokens.tokenizer import Tokenizer
from diffurefill.fleet.found import Found
from diffurefill.model.denoiser import Denoiser
from diffurefill.release.files import without_local_paths
from diffurefill.runtime import require_writable
from diffurefill.store.base import new_nonce, sha256_file
from diffurefill.store.durable import removed_at_exit, replace_durably
from diffurefill.train.checkpoint import load_weights, save_weights

OURS = "diffurefill"
_WRAPPERS = re.compile(r"\b(?:_orig_mod|module)\.")
"""What torch.compile and data parallel put into names."""
_BLOCK = re.compile(r"\bblocks\.(\d+)\.")

Names = Mapping[str, str | Sequence[str]]
"""Our name -> theirs, or several to be laid one below the other; {} stands for the block."""


# --- out -----------------------------------------------------------------------------------------


def require_room(dest: Path, replace: bool) -> None:
    """UserError unless the file `dest` can be written, and may be."""
    place = dest.resolve()  # a link stays one: the file that it names is replaced
    if place.parent.is_dir():  # else it is made, with the file
        require_writable(place)
    if dest.exists() and not replace:
        raise UserError(f"{dest} exists: add --replace, or give another name")


def write_torch_file(found: Found, dest: Path, *, replace: bool = False) -> None:
    """Write `found` as one file. Raises UserError for a file that stands there, for nan and inf."""
    require_room(dest, replace)
    dest = dest.resolve()
    weights = load_weights(found.weights)
    _require_finite(weights)
    record = {
        "model": weights,
        OURS: {
            "config": configs.dumps(without_local_paths(found.config)),
            "tokenizer": found.tokenizer.to_json(),
            "provenance": json.dumps(found.provenance),
        },
    }
    dest.parent.mkdir(parents=True, exist_ok=True)
    with removed_at_exit(dest.with_name(f".{dest.name}.{new_nonce()}.part")) as part:
        with open(part, "xb") as f:
            torch.save(record, f)
            f.flush()
            os.fsync(f.fileno())
        replace_durably(part, dest)


# --- in ------------------------------------------------------------------------------------------


def find_in_torch_file(
    path: Path,
    work: Path,
    *,
    config: RunConfig | None = None,
    tokenizer: Tokenizer | None = None,
    names: Names | None = None,
) -> Found:
    """The model in a file, its weights laid into the folder `work` as fp32 safetensors.

    `config` and `tokenizer` are for files of others, which hold neither. Raises UserError for what
    cannot be read safely, or does not fit together.
    """
    record = read_torch_file(path)
    provenance: dict[str, Any] = {}
    if isinstance(record.get(OURS), dict):
        config, tokenizer, provenance = _what_we_wrote(record[OURS], path)
    if config is None or tokenizer is None:
        raise UserError(
            f"{path} says nothing of its sizes and its tokenizer: give --preset or --config, and "
            "--tokenizer"
        )
    weights = _named_as_ours(_state_dict(record, path), config, names or {}, path)
    _require_finite(weights)
    dest = work / "imported.safetensors"
    save_weights(dest, weights)
    provenance |= {"imported_from": path.name, "imported_sha256": sha256_file(path).sha256}
    return Found(str(path), dest, tokenizer, config, None, provenance)


def read_torch_file(path: Path) -> dict[str, Any]:
    """The dict in a file. Nothing in it is ever executed; UserError where it asks to be."""
    try:
        # Mapped where the format allows it: a checkpoint with optimiser state may exceed memory.
        record = torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
    except OSError as error:
        raise UserError(f"cannot read {path}: {error}") from None
    except pickle.UnpicklingError as error:
        what = str(error).split("GLOBAL ", 1)[-1].splitlines()[0][:120]
        raise UserError(
            f"{path} holds pickled code or is damaged, and was not opened ({what}): only tensors "
            "and plain values are read; have its maker save the state dict alone"
        ) from None
    except Exception as error:  # damaged bytes make the unpickler raise anything
        reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise UserError(f"{path} is not a torch.save file ({reason[0]})") from None
    if not isinstance(record, dict):
        raise UserError(f"{path} holds a {type(record).__name__}, not a dict with a state dict")
    return record


def _what_we_wrote(ours: dict[str, Any], path: Path) -> tuple[RunConfig, Tokenizer, dict[str, Any]]:
    """Configuration, tokenizer and provenance of a file that `write_torch_file` wrote."""
    config, tokenizer, provenance = (ours.get(k) for k in ("config", "tokenizer", "provenance"))
    try:
        record = json.loads(provenance)  # pyrefly: ignore[bad-argument-type]
    except (TypeError, ValueError):
        record = None
    if not (isinstance(config, str) and isinstance(tokenizer, str) and isinstance(record, dict)):
        raise UserError(
            f"{path} is damaged: it holds no whole config, tokenizer and provenance; export the "
            "model again"
        )
    sizes = configs.loads(config, RunConfig(), where=str(path))
    return sizes, Tokenizer.from_json(tokenizer), record


def _state_dict(record: Mapping[str, Any], path: Path) -> dict[str, Tensor]:
    found = record.get("model", record)
    is_one = isinstance(found, Mapping) and all(isinstance(name, str) for name in found)
    if not is_one or not found or not all(isinstance(t, Tensor) for t in found.values()):
        raise UserError(f"{path} has no state dict, neither under 'model' nor as a whole")
    for name, tensor in found.items():
        if tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta:
            raise UserError(f"{path}: {name} is no plain tensor: save it dense, with its numbers")
    return {_WRAPPERS.sub("", name): tensor for name, tensor in found.items()}


def _named_as_ours(
    theirs: dict[str, Tensor], config: RunConfig, names: Names, path: Path
) -> dict[str, Tensor]:
    """The tensors of a denoiser of `config`, fp32. UserError where names or shapes do not fit."""
    with torch.device("meta"):
        expected = Denoiser(config.model).state_dict()
    used, ours = set[str](), dict[str, Tensor]()
    for name, shape in ((name, t.shape) for name, t in expected.items()):
        block = _BLOCK.search(name)
        pattern = _BLOCK.sub("blocks.{}.", name)
        wanted = names.get(pattern, name)
        parts = [wanted] if isinstance(wanted, str) else wanted
        if not isinstance(parts, list) or not parts or not all(isinstance(x, str) for x in parts):
            raise UserError(f"--names: {pattern} wants a name of the file's, or a list of them")
        parts = [part.replace("{}", block[1] if block else "{}") for part in parts]
        missing = [part for part in parts if part not in theirs]
        if missing:
            raise UserError(
                f"{path} has no {missing[0]}, wanted for {name}; it has {_some(theirs)}. Give "
                '--names FILE, JSON such as {"blocks.{}.qkv.weight": ["layers.{}.q.weight", ...]}'
            )
        used.update(parts)
        tensor = _joined(parts, theirs, name, path)
        if tensor.shape != shape or not tensor.is_floating_point():
            raise UserError(
                f"{path}: {name} is {tuple(tensor.shape)} in {tensor.dtype}, the configuration "
                f"wants {tuple(shape)}: give the preset or --config of this model"
            )
        ours[name] = tensor.float().contiguous()
    _require_known(theirs.keys() - used, theirs, ours, path)
    return ours


def _joined(parts: list[str], theirs: Mapping[str, Tensor], name: str, path: Path) -> Tensor:
    """The parts one below the other. UserError where they differ in more than their height."""
    shapes = {part: tuple(theirs[part].shape) for part in parts}
    if len(parts) > 1 and (() in shapes.values() or len({s[1:] for s in shapes.values()}) > 1):
        listed = ", ".join(f"{part} {shape}" for part, shape in shapes.items())
        raise UserError(f"{path}: --names cannot join {listed} to {name}: name parts of one width")
    return torch.cat([theirs[part] for part in parts]) if len(parts) > 1 else theirs[parts[0]]


def _require_known(
    left: set[str], theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor], path: Path
) -> None:
    """A head that is the embedding once more may be left over, and nothing else."""
    embedding = ours["embedding.weight"]
    other = sorted(n for n in left if not torch.equal(theirs[n].float(), embedding))
    if other:
        raise UserError(
            f"{path} has {', '.join(other[:4])}, for which this model has no place: it is another "
            "architecture, or its head is not tied to its embedding"
        )


def _some(theirs: Mapping[str, Tensor]) -> str:
    names = list(theirs)
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")


def _require_finite(weights: Mapping[str, Tensor]) -> None:
    for name, tensor in weights.items():
        if not tensor.isfinite().all():
            raise UserError(f"{name} holds nan or inf: these weights are damaged; take others")
