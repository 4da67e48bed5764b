"""A file of answers that only grows: what a killed process had is there for the next one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from diffurefill.config import UserError


class Answers:
    """JSONL, one record an answer, found by its `key`. A record that `add` has returned from is
    on the disk. Memory: about 200 bytes an answer, whatever its length."""

    def __init__(self, path: Path) -> None:
        """Opens or begins the file; a last line that a kill cut off is removed."""
        self.path = path
        self._offsets: dict[str, int] = {}
        is_new = not path.exists()
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            if is_new:
                _fsync_folder(path.parent)
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}; name another --out") from None
        self._end = self._read_all()

    def _read_all(self) -> int:
        """Index the file; returns where the next record goes."""
        end = 0
        with open(self.path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                record = _record(line)
                if record is None:
                    if lines.read(1):
                        raise UserError(
                            f"{self.path}, line {number}: not an answer; remove the line, and it "
                            "is asked for again"
                        )
                    os.ftruncate(self._file, end)
                    break
                self._offsets.setdefault(record["key"], end)
                end += len(line)
        return end

    def __len__(self) -> int:
        return len(self._offsets)

    def __contains__(self, key: str) -> bool:
        return key in self._offsets

    def get(self, key: str) -> dict[str, Any] | None:
        if key not in self._offsets:
            return None
        with open(self.path, "rb") as lines:
            lines.seek(self._offsets[key])
            return json.loads(lines.readline())

    def add(self, record: dict[str, Any]) -> None:
        """Store `record`; it is safe from a kill or a power cut when this returns."""
        line = (json.dumps(record) + "\n").encode()
        written = 0
        try:
            while written < len(line):
                written += os.pwrite(self._file, line[written:], self._end + written)
            os.fsync(self._file)
        except OSError as error:
            raise UserError(
                f"cannot write {self.path}: {error.strerror}; free some space, then start again"
            ) from None
        self._offsets.setdefault(record["key"], self._end)
        self._end += len(line)

    def close(self) -> None:
        os.close(self._file)


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    is_whole = line.endswith(b"\n") and isinstance(record, dict)
    return record if is_whole and isinstance(record.get("key"), str) else None


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
