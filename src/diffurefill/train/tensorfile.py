"""safetensors files read and written piece by piece, so that memory does not grow with the model.

A file is 8 bytes of header length, a JSON header {name: {dtype, shape, data_offsets}} and the
tensors' bytes end to end. Files written here put the larger dtypes first, then sort by name, and
in large files the first tensor begins at a page: the same tensors always make the same bytes and
the same sha256 (spec hub.md D).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from diffurefill.config import UserError
from diffurefill.store.base import new_nonce
from diffurefill.store.durable import os_errors_name, removed_at_exit, replace_durably
from diffurefill.train import directfile
from diffurefill.train.directfile import DirectFile

CHUNK_ELEMENTS = 1 << 19
"""Elements read, combined and written at a time, 2 MB in fp32: half as many would be written in
pieces that a disk takes slower, twice as many leave the caches."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER_BYTES = 100_000_000

Schema = dict[str, tuple[str, tuple[int, ...]]]
"""{tensor name: (dtype name, shape)}"""


# --- schemas -------------------------------------------------------------------------------------


def schema_of(tensors: Mapping[str, Tensor]) -> Schema:
    return {name: (_DTYPE_NAMES[t.dtype], tuple(t.shape)) for name, t in tensors.items()}


def require_schema(found: Schema, expected: Schema, where: object) -> None:
    """Raises ValueError that names the first tensor of `where` that is not as expected."""
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            raise ValueError(
                f"{where}: tensor {name} is {found.get(name, 'absent')}, "
                f"expected {expected.get(name, 'absent')}"
            )


def chunks(schema: Schema, chunk_elements: int = CHUNK_ELEMENTS) -> Iterator[tuple[str, int, int]]:
    """(name, start, stop) over every tensor's flat elements, in the order of the file."""
    for name, span in layout(schema).items():
        for start in range(0, span.num_elements, chunk_elements):
            yield name, start, min(start + chunk_elements, span.num_elements)


class _Span(NamedTuple):
    """Where a tensor's bytes lie, counted from the end of the header."""

    begin: int
    end: int
    itemsize: int

    @property
    def num_elements(self) -> int:
        return (self.end - self.begin) // self.itemsize


def layout(schema: Schema) -> dict[str, _Span]:
    """Where each tensor lies, in the order of the file."""
    spans, begin = {}, 0
    # Larger dtypes first keeps every tensor aligned, which readers that map the file rely on.
    for name in sorted(schema, key=lambda n: (-DTYPES[schema[n][0]].itemsize, n)):
        dtype, shape = schema[name]
        itemsize = DTYPES[dtype].itemsize
        end = begin + itemsize * math.prod(shape)
        spans[name] = _Span(begin, end, itemsize)
        begin = end
    return spans


# --- files ---------------------------------------------------------------------------------------


class TensorFile:
    """A safetensors file read piece by piece into the caller's memory. A context manager.

    Raises UserError when the header does not describe exactly the bytes that follow, or is longer
    than `max_header_bytes`: what arrives from another machine is checked before it is used.
    """

    def __init__(self, path: Path, *, max_header_bytes: int = MAX_HEADER_BYTES) -> None:
        self.path = path
        # Unbuffered: pieces are large, and a buffer would copy them once more.
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 (closed by __exit__)
        if hasattr(os, "posix_fadvise"):
            # Several files are read in turns: without a word the kernel reads too little ahead.
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        try:
            self.schema, self._spans, self._body = _read_header(self._file, max_header_bytes)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            self._file.close()
            raise UserError(f"{path} is not a whole safetensors file ({error})") from None

    def read(self, name: str, start: int, out: Tensor) -> Tensor:
        """Fill `out` (1-d, contiguous, on the CPU) with elements [start, start + len(out)).

        Threads may read at once.
        """
        dtype, span = DTYPES[self.schema[name][0]], self._spans[name]
        if out.dtype != dtype or not 0 <= start <= start + out.numel() <= span.num_elements:
            raise ValueError(
                f"{self.path}: cannot read elements {start}:{start + out.numel()} of {name} "
                f"({dtype}, {span.num_elements} elements) as {out.dtype}"
            )
        place = self._body + span.begin + start * span.itemsize
        wanted = memoryview(_bytes_of(out))
        while wanted:
            count = os.preadv(self._file.fileno(), [wanted], place)
            if not count:
                raise UserError(f"{self.path} ends inside {name}")
            wanted, place = wanted[count:], place + count
        return out

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _read_header(f: Any, max_bytes: int) -> tuple[Schema, dict[str, _Span], int]:
    """(schema, spans, offset of the first tensor's bytes); raises ValueError and its like."""
    num_bytes = os.fstat(f.fileno()).st_size
    length = int.from_bytes(f.read(8), "little")
    if num_bytes < 8 or length > num_bytes - 8:
        raise ValueError("its header is cut short")
    if length > max_bytes:
        raise ValueError(f"its header is longer than {max_bytes} bytes")
    header = json.loads(f.read(length))
    header.pop("__metadata__", None)
    found: Schema = {}
    spans: dict[str, _Span] = {}
    expected_begin = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        itemsize = DTYPES[dtype].itemsize
        natural = all(type(n) is int and n >= 0 for n in (*shape, begin, end))
        if not natural or begin != expected_begin or end - begin != itemsize * math.prod(shape):
            raise ValueError(f"the place of {name} does not fit")
        found[name], spans[name], expected_begin = (dtype, shape), _Span(begin, end, itemsize), end
    if 8 + length + expected_begin != num_bytes:
        raise ValueError(f"{num_bytes} bytes instead of {8 + length + expected_begin}")
    return found, spans, 8 + length


class StreamingWriter:
    """Writes a safetensors file piece by piece; the file appears whole at the end of the block.

        with StreamingWriter(path, schema) as f:
            for name, start, stop in chunks(schema):
                f.write(name, piece)

    Pieces may come in any order, if each says where it belongs, and from several threads at once.
    An exception inside the block, or a tensor left unfinished (ValueError), leaves the old file.
    """

    def __init__(
        self, path: Path, schema: Schema, metadata: Mapping[str, str] | None = None
    ) -> None:
        self._path = path
        self._part = path.with_name(f".{path.name}.{new_nonce()}.part")
        self._schema, self._metadata = schema, metadata
        self._spans = layout(schema)
        self._written = dict.fromkeys(schema, 0)
        """Elements of each tensor."""
        self._lock = threading.Lock()
        self._file: DirectFile
        self._body = 0
        self._cleanup: contextlib.ExitStack

    def write(self, name: str, piece: Tensor, start: int | None = None) -> None:
        """Write `piece` as the elements of tensor `name` from `start` on (None: the next ones).

        Each element is to be written once.
        """
        dtype, span = DTYPES[self._schema[name][0]], self._spans[name]
        with self._lock:
            first = self._written[name] if start is None else start
            self._written[name] += piece.numel()
        if piece.dtype != dtype or not 0 <= first <= first + piece.numel() <= span.num_elements:
            raise ValueError(f"{name}: a {piece.dtype} piece is too long, or not {dtype}")
        if not piece.numel():
            return
        place = self._body + span.begin + first * span.itemsize
        content = _bytes_of(piece.detach().cpu().contiguous().flatten())
        with os_errors_name(self._path):
            self._file.write(content, place)

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.enter_context(os_errors_name(self._path))
            stack.enter_context(removed_at_exit(self._part))
            num_bytes = max((span.end for span in self._spans.values()), default=0)
            header = self._header(num_bytes)
            self._body = len(header)
            file = DirectFile(self._part, self._body + num_bytes)
            self._file = stack.enter_context(contextlib.closing(file))
            self._file.write(header, 0)
            self._cleanup = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._cleanup:
            if kind is None:
                self._require_complete()
                self._file.sync()
                replace_durably(self._part, self._path)

    def _header(self, num_bytes: int) -> bytes:
        """For tensors of so many bytes, which then begin at a page where that helps writing."""
        header: dict[str, Any] = {}
        if self._metadata:
            header["__metadata__"] = dict(sorted(self._metadata.items()))
        for name, span in self._spans.items():
            dtype, shape = self._schema[name]
            offsets = [span.begin, span.end]
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        text = json.dumps(header, separators=(",", ":")).encode()
        align = directfile.ALIGN if num_bytes >= directfile.DIRECT_FROM else 8
        text += b" " * (-(8 + len(text)) % align)
        return len(text).to_bytes(8, "little") + text

    def _require_complete(self) -> None:
        for name, span in self._spans.items():
            if self._written[name] != span.num_elements:
                raise ValueError(f"{self._path}: tensor {name} was not written to its end")


def _bytes_of(flat: Tensor) -> Any:
    """The memory of a contiguous 1-d CPU tensor as a numpy array of bytes; nothing is copied."""
    return flat.view(torch.uint8).numpy()
