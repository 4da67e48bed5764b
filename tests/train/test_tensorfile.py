"""Files written and read piece by piece are the files the safetensors library makes and reads."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from diffurefill.config import UserError
from diffurefill.train import directfile
from diffurefill.train.tensorfile import (
    DTYPES,
    StreamingWriter,
    TensorFile,
    chunks,
    require_schema,
    schema_of,
)

COMMON = settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
SHAPE = st.lists(st.integers(0, 6), max_size=3).map(tuple)
TENSORS = st.dictionaries(
    st.text("abc.", min_size=1, max_size=4),
    st.tuples(st.sampled_from(list(DTYPES.values())), SHAPE),
    max_size=6,
).map(
    lambda kinds: {
        name: (torch.arange(torch.Size(shape).numel()) + i).to(dtype).reshape(shape)
        for i, (name, (dtype, shape)) in enumerate(kinds.items())
    }
)


def stream(path: Path, tensors: dict[str, Tensor], chunk_elements: int) -> None:
    with StreamingWriter(path, schema_of(tensors)) as f:
        for name, start, stop in chunks(schema_of(tensors), chunk_elements):
            f.write(name, tensors[name].reshape(-1)[start:stop])


@COMMON
@given(tensors=TENSORS, chunk_elements=st.integers(1, 50))
def test_a_streamed_file_holds_what_was_written_whatever_the_piece(
    tmp_path: Path, tensors: dict[str, Tensor], chunk_elements: int
) -> None:
    stream(tmp_path / "pieces", tensors, chunk_elements)
    stream(tmp_path / "whole", tensors, 10_000)
    assert (tmp_path / "pieces").read_bytes() == (tmp_path / "whole").read_bytes()
    loaded = safetensors.torch.load_file(tmp_path / "pieces")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)


@COMMON
@given(tensors=TENSORS)
def test_every_tensor_is_aligned_in_the_file(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    """Readers that map the file need it."""
    path = tmp_path / "w"
    stream(path, tensors, 10)
    length = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8 : 8 + length])
    assert length % 8 == 0
    for name, tensor in tensors.items():
        assert header[name]["data_offsets"][0] % tensor.element_size() == 0


def test_tensors_of_a_large_file_begin_at_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or every piece of a direct write would leave parts of pages to the page cache."""
    tensors = {"a": torch.arange(4096.0), "b": torch.arange(5.0), "c": torch.ones(1)}
    for large in (False, True):
        monkeypatch.setattr(directfile, "DIRECT_FROM", 0 if large else 1 << 20)
        with StreamingWriter(tmp_path / "w", schema_of(tensors)) as f:
            for name, start, stop in chunks(schema_of(tensors), 1024):
                f.write(name, tensors[name][start:stop])
        content = (tmp_path / "w").read_bytes()
        first = 8 + int.from_bytes(content[:8], "little")
        assert first % (directfile.ALIGN if large else 8) == 0
        assert large == (first == directfile.ALIGN)
        assert len(content) == first + sum(4 * len(t) for t in tensors.values())
        for name, tensor in safetensors.torch.load_file(tmp_path / "w").items():
            assert torch.equal(tensor, tensors[name])


@COMMON
@given(tensors=TENSORS, chunk_elements=st.integers(1, 50))
def test_a_file_of_the_library_is_read_piece_by_piece(
    tmp_path: Path, tensors: dict[str, Tensor], chunk_elements: int
) -> None:
    safetensors.torch.save_file(tensors, tmp_path / "w", {"some": "metadata"})
    read: dict[str, list[Tensor]] = {name: [] for name in tensors}
    with TensorFile(tmp_path / "w") as f:
        assert f.schema == schema_of(tensors)
        for name, start, stop in chunks(f.schema, chunk_elements):
            read[name].append(
                f.read(name, start, torch.empty(stop - start, dtype=tensors[name].dtype))
            )
    for name, pieces in read.items():
        flat = torch.cat(pieces) if pieces else torch.empty(0, dtype=tensors[name].dtype)
        assert torch.equal(flat.reshape(tensors[name].shape), tensors[name])


PAIR = {"a": torch.zeros(4), "b": torch.ones(2)}


@pytest.mark.parametrize(
    "pieces",
    [
        [("a", torch.zeros(4))],
        [("a", torch.zeros(4)), ("b", torch.zeros(1))],
        [("a", torch.zeros(3)), ("b", torch.zeros(2))],
        [("a", torch.zeros(5)), ("b", torch.zeros(1))],
        [("a", torch.zeros(4).half()), ("b", torch.zeros(2))],
    ],
    ids=["tensor missing", "cut short", "gap", "too long", "wrong dtype"],
)
def test_an_incomplete_or_wrong_write_leaves_the_old_file(
    tmp_path: Path, pieces: list[tuple[str, Tensor]]
) -> None:
    path = tmp_path / "w"
    path.write_bytes(b"old")

    def write_all() -> None:
        with StreamingWriter(path, schema_of(PAIR)) as f:
            for name, piece in pieces:
                f.write(name, piece)

    with pytest.raises(ValueError, match=r"too long|not written to its end"):
        write_all()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["w"]


@COMMON
@given(tensors=TENSORS, chunk_elements=st.integers(1, 20), random=st.randoms())
def test_pieces_in_any_order_make_the_same_file(
    tmp_path: Path, tensors: dict[str, Tensor], chunk_elements: int, random: Any
) -> None:
    stream(tmp_path / "in order", tensors, 10_000)
    pieces = list(chunks(schema_of(tensors), chunk_elements))
    random.shuffle(pieces)
    with StreamingWriter(tmp_path / "mixed", schema_of(tensors)) as f:
        for name, start, stop in pieces:
            f.write(name, tensors[name].reshape(-1)[start:stop], start)
    assert (tmp_path / "mixed").read_bytes() == (tmp_path / "in order").read_bytes()


def test_an_exception_inside_the_block_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "w"
    path.write_bytes(b"old")

    class Interrupted(Exception):
        pass

    def write_and_stop() -> None:
        with StreamingWriter(path, schema_of(PAIR)) as f:
            f.write("a", torch.zeros(4))
            raise Interrupted

    with pytest.raises(Interrupted):
        write_and_stop()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["w"]


def with_header(header: Any, body: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def entry(dtype: Any, shape: Any, begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x08\x00",
        (1 << 60).to_bytes(8, "little") + b"{}",
        with_header(b"[1, 2]", b""),
        with_header(b"{not json", b""),
        with_header(b"[" * 100_000, b""),
        with_header({"w": {}}, b""),
        with_header({"w": entry("F32", [1], 0, 4)}, b"123"),
        with_header({"w": entry("F32", [1], 0, 4)}, b"12345"),
        with_header({"w": entry("F32", [2], 0, 4)}, b"1234"),
        with_header({"w": entry("F31", [1], 0, 4)}, b"1234"),
        with_header({"w": entry("F32", [-1, -1], 0, 4)}, b"1234"),
        with_header({"w": entry("F32", [1.0], 0, 4)}, b"1234"),
        with_header({"w": entry("F32", [10**400, 0.5], 0, 4)}, b"1234"),
        with_header({"w": entry("F32", [1], 0.0, 4.0)}, b"1234"),
        with_header({"w": entry("F32", [1], 4, 8)}, b"12345678"),
        with_header({"v": entry("F32", [1], 0, 4), "w": entry("F32", [1], 0, 4)}, b"1234"),
        with_header({"w": entry("F32", "x", 0, 4)}, b"1234"),
    ],
)
def test_a_file_that_is_not_whole_is_refused_when_opened(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "w"
    path.write_bytes(content)
    with pytest.raises(UserError, match="not a whole safetensors file"):
        TensorFile(path)


def test_a_header_longer_than_allowed_is_not_parsed(tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(with_header(b"{" + b" " * 1000 + b"}", b""))
    TensorFile(tmp_path / "w", max_header_bytes=1002).__exit__()
    with pytest.raises(UserError, match="longer than 1001 bytes"):
        TensorFile(tmp_path / "w", max_header_bytes=1001)


@COMMON
@given(cut=st.integers(0, 200))
def test_any_truncation_is_refused(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "w"
    stream(path, PAIR, 10)
    whole = path.read_bytes()
    path.write_bytes(whole[: min(cut, len(whole) - 1)])
    with pytest.raises(UserError):
        TensorFile(path)


@pytest.mark.parametrize(
    ("start", "out"),
    [(0, torch.zeros(5)), (3, torch.zeros(2)), (-1, torch.zeros(1)), (0, torch.zeros(1).double())],
)
def test_reading_outside_a_tensor_or_as_another_dtype_is_refused(
    tmp_path: Path, start: int, out: Tensor
) -> None:
    stream(tmp_path / "w", PAIR, 10)
    with TensorFile(tmp_path / "w") as f, pytest.raises(ValueError, match="cannot read"):
        f.read("a", start, out)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"a": torch.zeros(4)}, "b"),
        ({**PAIR, "c": torch.zeros(1)}, "c"),
        ({**PAIR, "a": torch.zeros(2, 2)}, "a"),
        ({**PAIR, "b": torch.zeros(2).half()}, "b"),
    ],
)
def test_a_difference_between_schemas_names_the_tensor(
    other: dict[str, Tensor], named: str
) -> None:
    require_schema(schema_of(PAIR), schema_of(PAIR), "here")
    with pytest.raises(ValueError, match=f"here: tensor {named} is"):
        require_schema(schema_of(other), schema_of(PAIR), "here")
