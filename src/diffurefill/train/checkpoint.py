"""Weights and training state on disk: safetensors and JSON, never pickle; whole or absent."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from diffurefill.config import UserError
from diffurefill.store.base import dump_json
from diffurefill.store.durable import make_folder, write_file
from diffurefill.train.tensorfile import Schema, StreamingWriter, TensorFile, layout, schema_of

# --- weights -------------------------------------------------------------------------------------


def save_weights(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Replace `path` by the fp32 `tensors`, at once. Raises ValueError for another dtype."""
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float32:
            raise ValueError(f"weights are kept in fp32, but {name} is {tensor.dtype}")
    _save_tensors(path, tensors, metadata)


def load_weights(path: Path, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """The tensors of a safetensors file on `device`; raises UserError when it is damaged."""
    try:
        return safetensors.torch.load_file(path, device=str(device))
    except safetensors.SafetensorError as error:
        raise UserError(f"{path} is not a whole safetensors file ({error})") from None


def schema(path: Path) -> Schema:
    """Names, dtypes and shapes from the header alone; raises UserError when it is damaged."""
    with TensorFile(path) as f:
        return f.schema


def schema_digest(path: Path) -> str:
    """sha256 of names, dtypes and shapes: equal exactly when weights are interchangeable."""
    return hashlib.sha256(json.dumps(sorted(schema(path).items())).encode()).hexdigest()


def weights_digest(tensors: Mapping[str, Tensor]) -> str:
    """sha256 of names and bytes, wherever and however the tensors lie, and of any dtype."""
    h = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        flat = tensor.detach().cpu().contiguous().flatten()
        h.update(name.encode() + flat.view(torch.uint8).numpy().data)
    return h.hexdigest()


def _save_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    with StreamingWriter(path, schema_of(tensors), metadata) as f:
        for name in layout(schema_of(tensors)):
            f.write(name, tensors[name])


# --- training state ------------------------------------------------------------------------------

_POINTER = "LATEST"


@dataclass(frozen=True)
class TrainingState:
    """What `train` resumes from. `optimizer_state` as torch gives it; `meta` is plain JSON."""

    weights: dict[str, Tensor]
    optimizer_state: Any
    meta: dict[str, Any]


def save_training_state(
    folder: Path, *, weights: Mapping[str, Tensor], optimizer_state: Any, meta: Mapping[str, Any]
) -> None:
    """Write a numbered state beside the current one, then move one pointer.

    A kill at any moment leaves the previous state or the new one. The last two are kept.
    `optimizer_state` is a `state_dict()` or a list of them.
    """
    current = _current_number(folder) or 0
    target = _state_folder(folder, current + 1)
    make_folder(target)  # a kill may have left it: each of its files is replaced whole
    tensors: dict[str, Tensor] = {}
    structure = _pack(optimizer_state, tensors)
    save_weights(target / "weights.safetensors", weights)
    _save_tensors(target / "optimizer.safetensors", tensors)
    write_file(target / "optimizer.json", dump_json({"structure": structure}))
    write_file(target / "meta.json", dump_json(meta))
    write_file(folder / _POINTER, f"{current + 1}\n".encode())
    for old in folder.glob("state-*"):
        if old not in (target, _state_folder(folder, current)):
            shutil.rmtree(old)


def load_training_state(folder: Path) -> TrainingState | None:
    """The last complete state, on the CPU; None when nothing has been saved here."""
    number = _current_number(folder)
    if number is None:
        return None
    source = _state_folder(folder, number)
    try:
        structure = json.loads((source / "optimizer.json").read_bytes())["structure"]
        meta = json.loads((source / "meta.json").read_bytes())
        tensors = load_weights(source / "optimizer.safetensors")
        weights = load_weights(source / "weights.safetensors")
    except (OSError, ValueError) as error:
        raise _damaged(folder, number, error) from None
    return TrainingState(weights, _unpack(structure, tensors), meta)


def newest_weights(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The weights file of the last complete state, and its meta; None when nothing is saved."""
    number = _current_number(folder)
    if number is None:
        return None
    source = _state_folder(folder, number)
    try:
        return source / "weights.safetensors", json.loads((source / "meta.json").read_bytes())
    except (OSError, ValueError) as error:
        raise _damaged(folder, number, error) from None


def _damaged(folder: Path, number: int, error: Exception) -> UserError:
    """With the way back to the state before, where there is one."""
    way_out = "start anew in another folder"
    if _state_folder(folder, number - 1).is_dir():
        way_out = f"write {number - 1} into {folder / _POINTER} to go back to the state before"
    return UserError(f"{_state_folder(folder, number)} is damaged ({error}); {way_out}")


def _state_folder(folder: Path, number: int) -> Path:
    return folder / f"state-{number:08d}"


def _current_number(folder: Path) -> int | None:
    try:
        return int((folder / _POINTER).read_text("ascii"))
    except FileNotFoundError:
        return None
    except ValueError:
        raise UserError(f"{folder / _POINTER} must hold the number of a state") from None


def _pack(value: Any, tensors: dict[str, Tensor]) -> Any:
    """`value` as JSON that keeps tuples and integer keys; its tensors move to `tensors`."""
    if isinstance(value, Tensor):
        name = f"{len(tensors):06d}"
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, dict):
        return {"dict": [[key, _pack(item, tensors)] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_pack(item, tensors) for item in value]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"an optimizer state cannot hold {type(value).__name__}")


def _unpack(packed: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(packed, dict):
        return packed
    ((kind, content),) = packed.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _unpack(item, tensors) for key, item in content}
    items = [_unpack(item, tensors) for item in content]
    return items if kind == "list" else tuple(items)
