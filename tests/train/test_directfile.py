"""A file written past the page cache is the file that was asked for, byte for byte."""

import errno
import itertools
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diffurefill.fleet.pieces import for_each
from diffurefill.train import directfile
from diffurefill.train.directfile import ALIGN, DirectFile

LENGTH = 20 * ALIGN + 123
CONTENT = np.random.default_rng(0).integers(0, 256, LENGTH, dtype=np.uint8)


@pytest.fixture(autouse=True)
def direct_from_the_first_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directfile, "DIRECT_FROM", 0)
    monkeypatch.setattr(directfile, "SMALLEST", ALIGN)


def write(path: Path, edges: list[int], order: list[int]) -> None:
    """CONTENT in the pieces between `edges`, in `order`."""
    path.unlink(missing_ok=True)
    places = [0, *sorted(edges), LENGTH]
    pieces = list(itertools.pairwise(places))
    f = DirectFile(path, LENGTH)
    try:
        for i in order:
            start, stop = pieces[i]
            f.write(CONTENT[start:stop], start)
        f.sync()
    finally:
        f.close()


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(edges=st.lists(st.integers(1, LENGTH - 1), unique=True, max_size=9), data=st.data())
def test_pieces_of_any_length_in_any_order_make_the_file(
    tmp_path: Path, edges: list[int], data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(edges) + 1)))
    write(tmp_path / "f", edges, order)
    assert (tmp_path / "f").read_bytes() == CONTENT.tobytes()


def test_threads_may_write_at_once(tmp_path: Path) -> None:
    f = DirectFile(tmp_path / "f", LENGTH)
    pieces = [("x", start, min(start + 5000, LENGTH)) for start in range(0, LENGTH, 5000)]
    for_each(lambda _, start, stop: f.write(CONTENT[start:stop], start), pieces)
    f.sync()
    f.close()
    assert (tmp_path / "f").read_bytes() == CONTENT.tobytes()


@pytest.mark.parametrize("accepted", [0, 1, 3])
def test_a_disk_that_wants_other_alignments_gets_plain_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accepted: int
) -> None:
    """Refused at once, or after some pages: what is left goes the plain way."""
    plain, calls = os.pwrite, []
    monkeypatch.setattr(directfile, "_open_direct", lambda path: os.open(path, os.O_WRONLY))

    def pwrite(descriptor: int, content: memoryview, place: int) -> int:
        if descriptor == f._direct:
            calls.append(place)
            if len(calls) > accepted:
                raise OSError(errno.EINVAL, "invalid argument")
            return plain(descriptor, content[:ALIGN], place)
        return plain(descriptor, content, place)

    f = DirectFile(tmp_path / "f", LENGTH)
    monkeypatch.setattr(os, "pwrite", pwrite)
    f.write(CONTENT, 0)
    f.sync()
    f.close()
    assert len(calls) == accepted + 1
    assert (tmp_path / "f").read_bytes() == CONTENT.tobytes()


def test_a_full_disk_is_no_reason_to_write_another_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directfile, "_open_direct", lambda path: os.open(path, os.O_WRONLY))

    def pwrite(descriptor: int, content: memoryview, place: int) -> int:
        raise OSError(errno.ENOSPC, "no space left on device")

    f = DirectFile(tmp_path / "f", LENGTH)
    monkeypatch.setattr(os, "pwrite", pwrite)
    f.write(CONTENT[ALIGN : 3 * ALIGN], ALIGN)
    with pytest.raises(OSError, match="no space") as raised:
        f.sync()
    f.close()
    assert raised.value.errno == errno.ENOSPC


def test_small_files_are_written_plainly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directfile, "DIRECT_FROM", LENGTH + 1)
    f = DirectFile(tmp_path / "f", LENGTH)
    assert f._direct is None
    f.write(CONTENT, 0)
    f.close()
    assert (tmp_path / "f").read_bytes() == CONTENT.tobytes()
