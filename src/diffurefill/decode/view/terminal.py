"""Frames in a terminal, redrawn in place; plain lines where nobody could watch that."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from diffurefill.decode.view.frames import LEVELS, Cell, Frame

COLOURS = ("color(166)", "color(172)", "color(245)", "color(68)", "color(33)")
"""Orange to blue: apart for the colour-blind too, readable on light and dark."""
MASK, ASCII_MASK = "\u2591\u2591", "__"
NEWLINE, ASCII_NEWLINE = "\u21b5", "\\n"
MAX_CHANGES = 12
"""Replaced tokens listed below the text; the rest is counted."""
MAX_SECONDS_PER_PASS, MAX_SECONDS = 0.25, 10.0


class Viewer:
    """Shows one frame after another; a context manager, called with each frame.

    In a terminal each frame takes the place of the one before, and a text taller than the window
    is followed where it changes. Elsewhere, and on a terminal that cannot move its cursor, each
    frame is plain lines.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        self.redraws = self.console.is_terminal and not self.console.is_dumb_terminal
        self.mask = self._writable(MASK, ASCII_MASK)
        self.newline = self._writable(NEWLINE, ASCII_NEWLINE)
        self._live = Live(console=self.console, auto_refresh=False, transient=True)
        self._last: Frame | None = None

    def __enter__(self) -> Viewer:
        if self.redraws:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()
        if self.redraws and self._last is not None:
            self.console.print(self._drawn(self._last, None))

    def __call__(self, frame: Frame) -> None:
        self._last = frame
        if self.redraws:
            self._live.update(self._drawn(frame, self.console.height - 1), refresh=True)
        else:
            self._print_plain(frame)

    def _writable(self, text: str, otherwise: str) -> str:
        try:
            text.encode(self.console.encoding)
        except UnicodeEncodeError:
            return otherwise
        return text

    def _print_plain(self, frame: Frame) -> None:
        text = "".join(self.mask if c.kind == "masked" else c.text for c in frame.cells)
        lines = f"{_title(frame)}\n{text}"
        changes = ", ".join(f"{c.old!r} -> {c.text!r}" for c in frame.cells if c.old is not None)
        lines += f"\n[{changes}]" if changes else ""
        known = lines.encode(self.console.encoding, "replace").decode(self.console.encoding)
        self.console.print(known, markup=False, emoji=False, highlight=False, soft_wrap=True)

    def _drawn(self, frame: Frame, max_lines: int | None) -> RenderableType:
        """Title, text, what was replaced, legend; the text cut to its busiest part where that
        would not fit into `max_lines`."""
        text = Text(overflow="fold")
        busy = []
        for cell in frame.cells:
            if cell.kind in ("accepted", "refilled"):
                busy.append(len(text))
            whole = self._cell_text(cell)
            word = whole.lstrip(" ") or whole  # a blank between words has no token's colour
            text.append(whole[: len(whole) - len(word)]).append(word, style=_style(cell))
        head, tail = Text(_title(frame), style="bold"), [_changes(frame), self._legend()]
        if max_lines is not None:
            taken = sum(len(t.wrap(self.console, self.console.width)) for t in (head, *tail))
            text = self._window(text, busy, max(max_lines - taken, 3))
        return Group(*(part for part in (head, text, *tail) if part))

    def _window(self, text: Text, busy: list[int], room: int) -> Text:
        """`room` lines of `text` around the middle one of the offsets `busy`."""
        lines = text.wrap(self.console, self.console.width, overflow="fold", tab_size=4)
        if len(lines) <= room:
            return text
        room -= 2
        passed, centre = 0, 0
        target = busy[len(busy) // 2] if busy else len(text)
        for number, line in enumerate(lines):
            passed += len(line) + 1  # the blank or break at which the line was cut
            if passed <= target:
                centre = number + 1
        first = max(0, min(centre - room // 2, len(lines) - room))
        above, under = (Text(f"  ... {n} more lines", style="dim") for n in
                        (first, len(lines) - first - room))  # fmt: skip
        return Text("\n").join([above, *lines[first : first + room], under])

    def _cell_text(self, cell: Cell) -> str:
        if cell.kind == "masked":
            return self.mask
        return cell.text if cell.kind == "given" else cell.text.replace("\n", f"{self.newline}\n")

    def _legend(self) -> Text:
        legend = Text(f"{self.mask} masked  ", style="dim")
        for colour, low, high in zip(COLOURS, (0, *LEVELS), (*LEVELS, 1), strict=True):
            legend.append(f"{low:.0%}-{high:.0%}".replace("%-", "-"), style=f"not dim {colour}")
            legend.append("  ")
        legend.append("accepted now", style="not dim bold reverse").append("  ")
        legend.append("redone", style="not dim underline").append(", ")
        return legend.append("changed", style="not dim bold underline reverse")


def replay(
    shown: Sequence[Frame], viewer: Viewer, *, seconds_per_pass: float | None = None
) -> None:
    """Show a finished row again, pass by pass; at once where nobody watches a terminal."""
    pause = min(MAX_SECONDS_PER_PASS, MAX_SECONDS / max(len(shown), 1))
    with viewer:
        for frame in shown:
            viewer(frame)
            if viewer.redraws:
                time.sleep(pause if seconds_per_pass is None else seconds_per_pass)


def _title(frame: Frame) -> str:
    return f"{frame.summary}, mean confidence {frame.mean_confidence:.2f}"


def _changes(frame: Frame) -> Text:
    replaced = [cell for cell in frame.cells if cell.old is not None]
    changes = Text()
    for cell in replaced[:MAX_CHANGES]:
        changes.append(repr(cell.old), style="dim strike").append(" -> ", style="dim")
        changes.append(repr(cell.text), style=COLOURS[cell.level]).append("  ")
    if len(replaced) > MAX_CHANGES:
        changes.append(f"and {len(replaced) - MAX_CHANGES} more", style="dim")
    return changes


def _style(cell: Cell) -> str:
    """By colour where there is one, and by other means where there is none (NO_COLOR)."""
    if cell.kind == "given":
        return ""
    if cell.kind in ("masked", "ended"):
        return "dim"
    how = {"accepted": "bold reverse ", "refilled": "underline ", "standing": ""}[cell.kind]
    if cell.old is not None:
        how = "bold reverse underline "
    return how + COLOURS[cell.level]
