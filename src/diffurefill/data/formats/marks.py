"""Where in a unit of text (a file, or a row group) reading may begin again."""

from __future__ import annotations

from typing import NamedTuple


class Mark(NamedTuple):
    """The next row to read is `row` of row group `row_group`; all numbers start at 0.

    Row `offset_row` begins at byte `offset` of the file, so a reader goes there and skips
    `row - offset_row` rows. An offset of 0 means: from the start of the row group.
    """

    row_group: int = 0
    row: int = 0
    offset: int = 0
    offset_row: int = 0
