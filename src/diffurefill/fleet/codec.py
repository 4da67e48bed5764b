"""Contributions on the wire: what local training added to the base, as a safetensors file.

A delta and not the weights: 16 bits of a weight are a coarse step for a late, small update, while
a delta keeps its relative precision when it is compressed (spec fleet.md 2.2). Four codecs share
one way in and one way out; both hold a chunk of the model at a time:

    fp32-delta  4 bytes an element, exact
    bf16-delta  2 bytes, off by 2^-8 of each element at most
    int8-delta  1 byte and an fp32 scale for each row of a matrix (formats.RowInt8)
    int4-delta  4.5 bits, an experiment (formats.BlockInt4)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from diffurefill.fleet.formats import BLOCK, FORMATS, SCALE, Format
from diffurefill.fleet.pieces import Piece, Scratch
from diffurefill.train.tensorfile import (
    CHUNK_ELEMENTS,
    DTYPES,
    Schema,
    StreamingWriter,
    TensorFile,
    chunks,
    layout,
    require_schema,
    schema_of,
)

CODEC = "fp32-delta"
CODECS = tuple(FORMATS)

Formats = dict[str, Format]
"""{tensor name: how its delta is stored}"""


def formats_of(codec: str, base: Schema) -> Formats:
    """Raises ValueError for a codec that is not known and for a base that is not all fp32."""
    if codec not in FORMATS:
        raise ValueError(f"codec {codec!r} is not known here; there are {', '.join(CODECS)}")
    for name, (dtype, _) in base.items():
        if dtype != "F32":
            raise ValueError(f"weights are kept in fp32, but {name} is {dtype}")
    return {name: FORMATS[codec](shape) for name, (_, shape) in base.items()}


def payload_schema(formats: Formats) -> Schema:
    """The tensors of a payload. Raises ValueError where two of them would share a name."""
    found: Schema = {}
    for name, stored in formats.items():
        for suffix, kind in stored.stored.items():
            if name + suffix in found:
                raise ValueError(f"tensor {name + suffix} stands for two things in this codec")
            found[name + suffix] = kind
    return found


def decoded_schema(path: Path, codec: str) -> Schema:
    """The fp32 tensors that the payload at `path` decodes to, by its own header.

    int4 fills up its last block, and the header does not say by how much: such a tensor counts
    with the zeros of the filling, as a matrix of blocks. Raises ValueError for a damaged file.
    """
    found: Schema = {}
    with TensorFile(path) as f:
        for name, (_, shape) in f.schema.items():
            if not name.endswith(SCALE):
                blocks = codec == "int4-delta" and name + SCALE in f.schema
                found[name] = ("F32", (*shape[:-1], BLOCK) if blocks else shape)
    return found


def unit_chunks(
    base: Schema, formats: Formats, chunk_elements: int = CHUNK_ELEMENTS
) -> Iterator[Piece]:
    """`chunks` that begin at multiples of the format's unit: one row at least, however long."""
    for name, span in layout(base).items():
        unit = formats[name].unit
        step = max(chunk_elements // unit, 1) * unit
        for start in range(0, span.num_elements, step):
            yield name, start, min(start + step, span.num_elements)


# --- writing -------------------------------------------------------------------------------------


class DeltaWriter:
    """Encodes a delta piece by piece. A context manager; see StreamingWriter."""

    def __init__(self, path: Path, codec: str, base: Schema) -> None:
        self.formats = formats_of(codec, base)
        self._out = StreamingWriter(path, payload_schema(self.formats))

    def write(self, name: str, start: int, delta: Tensor) -> Tensor:
        """Write flat fp32 elements, a piece of `unit_chunks`, that may lie on any device.

        They are encoded there; threads may write at once. Returns `delta`, overwritten by what
        will be decoded from the file.
        """
        pieces = self.formats[name].encode(delta)
        places = self.formats[name].ranges(start, start + len(delta))
        for suffix, piece in pieces.items():
            self._out.write(name + suffix, piece, places[suffix][0])
        return self.formats[name].decode(pieces, start, delta)

    def __enter__(self) -> Self:
        self._out.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._out.__exit__(kind)


def encode_delta(
    base_path: Path,
    new: Mapping[str, Tensor],
    dest: Path,
    *,
    codec: str = CODEC,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> float:
    """Write `new - base` to `dest`, encoded where `new` lies; returns the L2 norm as decoded.

    Infinity says that some element is not finite: such a file must not be pushed. Holds one chunk
    (one row where that is longer). Raises ValueError that names the tensor when `new` and the base
    differ in names, dtypes, shapes.
    """
    squares: list[Tensor] = []
    with TensorFile(base_path) as base:
        require_schema(schema_of(new), base.schema, "the new weights")
        with DeltaWriter(dest, codec, base.schema) as out:
            flat_name, flat = "", torch.empty(0)
            pieces = list(unit_chunks(base.schema, out.formats, chunk_elements))
            buffer = torch.empty(max((stop - start for _, start, stop in pieces), default=0))
            for name, start, stop in pieces:
                if name != flat_name:  # once a tensor: one that is not contiguous is copied here
                    flat_name, flat = name, new[name].detach().reshape(-1)
                piece = base.read(name, start, buffer[: stop - start]).to(flat.device)
                decoded = out.write(name, start, torch.sub(flat[start:stop], piece, out=piece))
                squares.append(_squares(decoded))
    return _norm(sum(float(s) for s in squares))


# --- reading -------------------------------------------------------------------------------------


class DeltaFile:
    """A payload read piece by piece as fp32, whatever its codec. A context manager.

    Raises ValueError when the file is not exactly one delta to weights of schema `base`.
    """

    def __init__(self, path: Path, codec: str, base: Schema) -> None:
        self.path = path
        self._formats = formats_of(codec, base)
        self._scratch = Scratch()
        expected = payload_schema(self._formats)
        # Far above what names and shapes need: a hostile header must not cost its size in memory.
        limit = 65_536 + sum(6 * len(name) + 400 for name in expected)
        self._file = TensorFile(path, max_header_bytes=limit)
        try:
            require_schema(self._file.schema, expected, path)
        except ValueError:
            self._file.__exit__()
            raise

    def read(self, name: str, start: int, out: Tensor) -> Tensor:
        """Fill `out` (flat fp32, on the CPU) with decoded elements [start, start + len(out)).

        Threads may read at once.
        """
        stored = self._formats[name]
        if stored.stored[""][0] == "F32":
            return self._file.read(name, start, out)
        pieces = {}
        for suffix, (begin, end) in stored.ranges(start, start + len(out)).items():
            dtype = DTYPES[stored.stored[suffix][0]]
            buffer = self._scratch.get(suffix, end - begin, dtype)
            pieces[suffix] = self._file.read(name + suffix, begin, buffer)
        return stored.decode(pieces, start, out)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.__exit__()


def delta_norm(
    path: Path, codec: str, base: Schema, *, chunk_elements: int = CHUNK_ELEMENTS
) -> float:
    """L2 norm of the decoded delta; infinity when an element is not finite.

    Reads the file once. Raises ValueError when it is damaged or of another schema.
    """
    buffer = torch.empty(chunk_elements)
    with DeltaFile(path, codec, base) as delta:
        return _norm(
            sum(
                float(_squares(delta.read(name, start, buffer[: stop - start])))
                for name, start, stop in chunks(base, chunk_elements)
            )
        )


def _squares(values: Tensor) -> Tensor:
    """In fp64: squares of finite fp32 values must not overflow into a false alarm."""
    return values.double().square_().sum()


def _norm(squares: float) -> float:
    return math.sqrt(squares) if math.isfinite(squares) else math.inf
