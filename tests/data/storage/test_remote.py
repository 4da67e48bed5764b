"""Windows over a remote file: what is read, and with how many requests."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffurefill.data.storage import http, remote
from diffurefill.data.storage.remote import BUFFER_BYTES, JUMP_BYTES, RemoteFile
from tests.data.storage.reading import noise, read_all

MIB = 1 << 20


class CountedRanges:
    """Ranges of bytes in memory; see remote.Ranges."""

    uri = "memory"

    def __init__(self, content: bytes, tail: int = 0) -> None:
        self._content, self._tail, self.size = content, tail, len(content)
        self.asked: list[tuple[int, int]] = []

    def open(self) -> bytes:
        return self._content[self.size - min(self._tail, self.size) :]

    def read(self, start: int, end: int) -> bytes:
        assert 0 <= start < end <= self.size
        self.asked.append((start, end))
        return self._content[start:end]


@pytest.mark.parametrize("step", [64, 1000, 8192])
def test_small_steps_cost_one_request_a_buffer(step: int) -> None:
    ranges = CountedRanges(noise(10 * MIB))
    assert read_all(RemoteFile(ranges), step) == ranges._content
    assert len(ranges.asked) == 10


def test_from_the_middle_on_it_costs_one_more() -> None:
    ranges = CountedRanges(noise(10 * MIB))
    file, start = RemoteFile(ranges), 5 * MIB + 17
    for offset in range(start, file.size, 8192):
        assert file.read_at(offset, 8192) == ranges._content[offset : offset + 8192]
    assert ranges.asked[0] == (start, start + JUMP_BYTES)
    assert len(ranges.asked) == 6


def test_a_large_read_takes_what_is_there_and_asks_for_the_rest_exactly() -> None:
    ranges = CountedRanges(noise(9 * MIB))
    file = RemoteFile(ranges)
    file.read_at(0, 100)
    assert file.read_at(50, 3 * MIB) == ranges._content[50 : 50 + 3 * MIB]
    assert ranges.asked == [(0, MIB), (MIB, 50 + 3 * MIB)]
    # Pages: a header, then its body, and so on, each where the last one ended.
    file.read_at(50 + 3 * MIB, 60)
    file.read_at(110 + 3 * MIB, 2 * MIB)
    assert ranges.asked[2:] == [(50 + 3 * MIB, 50 + 4 * MIB), (50 + 4 * MIB, 110 + 5 * MIB)]


def test_a_very_large_read_is_several_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "LARGEST_BYTES", MIB)
    ranges = CountedRanges(noise(4 * MIB))
    assert RemoteFile(ranges).read_at(5, 3 * MIB) == ranges._content[5 : 5 + 3 * MIB]
    assert ranges.asked == [(5 + n * MIB, 5 + (n + 1) * MIB) for n in range(3)]


def test_looking_at_the_footer_does_not_lose_the_place() -> None:
    ranges = CountedRanges(noise(4 * MIB), tail=JUMP_BYTES)
    file = RemoteFile(ranges)
    for offset in range(0, MIB, JUMP_BYTES):
        file.read_at(offset, JUMP_BYTES)
        assert file.read_at(file.size - 8, 8) == ranges._content[-8:]
        # A footer that is longer than what came with the opening.
        assert file.read_at(file.size - 2 * JUMP_BYTES, 2 * JUMP_BYTES)
    sequential = [span for span in ranges.asked if span[0] < 2 * MIB]
    assert sequential == [(0, MIB)]


@settings(max_examples=200)
@given(
    st.binary(max_size=300),
    st.integers(0, 40),
    st.lists(st.tuples(st.integers(0, 320), st.integers(0, 120), st.booleans()), max_size=20),
)
def test_any_reads_give_the_file_s_bytes_and_hold_little(
    content: bytes, tail: int, reads: list[tuple[int, int, bool]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("BUFFER_BYTES", 32), ("JUMP_BYTES", 8), ("LARGEST_BYTES", 50)):
            patch.setattr(remote, name, value)
        file, position = RemoteFile(CountedRanges(content, tail)), 0
        for offset, length, goes_on in reads:
            start = position if goes_on else offset
            assert file.read_at(start, length) == content[start : start + length]
            position = start + length
            assert file._window.end - file._window.start <= 32


def test_a_negative_offset_is_a_mistake_of_the_caller_s() -> None:
    with pytest.raises(ValueError, match="offset -1"):
        RemoteFile(CountedRanges(b"abc")).read_at(-1, 2)


def test_the_windows_of_a_file_are_bounded() -> None:
    assert BUFFER_BYTES + http.TAIL_BYTES <= 2 * MIB
