"""Watch a canvas fill and be refilled: in a terminal, as plain lines, or as an HTML fragment.

All three show the same cells, one per position of one row: given text, what is still masked, what
stands (coloured by confidence), what this pass accepted and what it refilled.
"""

from __future__ import annotations

import html
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from diffurefill.decode.generate import Pass

DecodeToken = Callable[[int], str]

MASK_BLOCK = "\u2591\u2591"
CONFIDENCE_STEPS = (0.1, 0.3, 0.6, 0.9)
"""Probabilities that part the colours, from least to most sure."""
TERMINAL_COLOURS = ("red", "dark_orange", "dark_goldenrod", "chartreuse4", "green")
HTML_COLOURS = ("#b3261e", "#b35900", "#7a6a00", "#2e7d32", "#1b5e20")
MAX_CHANGES = 12
"""Replaced tokens listed below the terminal's text; the rest is counted."""


@dataclass(frozen=True)
class Cell:
    """One position. `probability` and `old` are empty unless something was written or replaced."""

    kind: Literal["given", "masked", "standing", "accepted", "refilled"]
    text: str
    probability: float = 1.0
    old: str | None = None
    """What a refill replaced, where it differs."""

    @property
    def level(self) -> int:
        """Index into the colours."""
        return sum(self.probability >= step for step in CONFIDENCE_STEPS)


def cells(record: Pass, row: int, decode_token: DecodeToken) -> list[Cell]:
    """The row as this pass left it, without padding."""
    columns = (
        record.ids,
        record.confidence,
        record.canvas.fillable,
        record.is_masked,
        record.accepted,
        record.remasked,
        record.previous_ids,
    )
    real = (record.canvas.doc_ids[row] >= 0).tolist()
    found = []
    for keep, token, confidence, fillable, masked, accepted, remasked, old in zip(
        real, *(column[row].tolist() for column in columns), strict=True
    ):
        if not keep:
            continue
        if masked:
            found.append(Cell("masked", MASK_BLOCK))
        elif not fillable:
            found.append(Cell("given", decode_token(token)))
        else:
            kind = "refilled" if remasked else "accepted" if accepted else "standing"
            replaced = decode_token(old) if remasked and old != token else None
            found.append(Cell(kind, decode_token(token), math.exp(confidence), replaced))
    return found


def summary(record: Pass, row: int) -> str:
    """`draft 3/12: 30 of 128 filled`, or `refill 2/8: 25 redone, 14 changed`, of one row."""
    step = f"{record.index + 1}" + (f"/{record.num_passes}" if record.num_passes else "")
    remasked = record.remasked[row]
    if record.remasked.any():
        changed = (remasked & (record.ids != record.previous_ids)[row]).sum()
        return f"refill {step}: {int(remasked.sum())} redone, {int(changed)} changed"
    num_fillable = int(record.canvas.fillable[row].sum())
    num_filled = num_fillable - int(record.is_masked[row].sum())
    return f"draft {step}: {num_filled} of {num_fillable} filled"


class Viewer:
    """A callback for `generate(on_pass=...)` that shows one row; use it as a context manager.

    In a terminal the frame is redrawn in place; elsewhere each pass prints its summary and text.
    """

    def __init__(
        self, decode_token: DecodeToken, *, row: int = 0, console: Console | None = None
    ) -> None:
        self.decode_token = decode_token
        self.row = row
        self.console = console or Console()
        self.live = Live(console=self.console, auto_refresh=False)

    def __enter__(self) -> Viewer:
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.live.stop()

    def __call__(self, record: Pass) -> None:
        shown = cells(record, self.row, self.decode_token)
        if self.console.is_terminal:
            self.live.update(_frame(summary(record, self.row), shown), refresh=True)
        else:
            text = "".join(cell.text for cell in shown)
            line = f"{summary(record, self.row)}\n{text}"
            self.console.print(line, markup=False, emoji=False, highlight=False, soft_wrap=True)


def replay(trajectory: Sequence[Pass], viewer: Viewer, *, seconds_per_pass: float = 0.2) -> None:
    """Show a finished generation again, pass by pass; at once where nobody watches a terminal."""
    with viewer:
        for record in trajectory:
            viewer(record)
            if viewer.console.is_terminal:
                time.sleep(seconds_per_pass)


def _frame(title: str, shown: list[Cell]) -> Group:
    text = Text()
    for cell in shown:
        text.append(cell.text, style=_terminal_style(cell))
    replaced = [cell for cell in shown if cell.old is not None]
    changes = Text()
    for cell in replaced[:MAX_CHANGES]:
        changes.append(repr(cell.old), style="dim strike").append(" -> ", style="dim")
        changes.append(repr(cell.text), style="magenta").append("  ")
    if len(replaced) > MAX_CHANGES:
        changes.append(f"and {len(replaced) - MAX_CHANGES} more", style="dim")
    return Group(Text(title, style="bold"), text, changes)


def _terminal_style(cell: Cell) -> str:
    if cell.kind == "given":
        return ""
    if cell.kind == "masked":
        return "dim"
    if cell.kind == "refilled":
        return "bold white on magenta" if cell.old is not None else "magenta underline"
    colour = TERMINAL_COLOURS[cell.level]
    return f"bold {colour} reverse" if cell.kind == "accepted" else colour


STYLE = (
    ".dr{font:15px/1.6 system-ui,sans-serif;max-width:60em;color:#111;background:#fff}"
    ".dr input{width:100%}"
    ".dr figure{margin:0 0 1em}"
    ".dr figcaption{font-weight:600}"
    ".dr p{white-space:pre-wrap;overflow-wrap:anywhere;margin:.3em 0}"
    ".dr .masked{color:#999}"
    ".dr .accepted{background:#e3f2e1;font-weight:600}"
    ".dr .refilled{background:#f3d9f7;color:#6a1b75;font-weight:600}"
    ".dr del{color:#777;font-weight:400;font-size:85%;margin-right:.2em}"
    + "".join(f".dr .c{level}{{color:{colour}}}" for level, colour in enumerate(HTML_COLOURS))
)

SCRIPT = (
    "(d=>{const f=[...d.querySelectorAll('figure')],s=d.querySelector('input');"
    "const show=()=>f.forEach((e,i)=>e.hidden=i!=s.value);"
    "s.hidden=false;s.oninput=show;show()})(document.currentScript.parentElement)"
)
"""Turns the list of frames into one frame and a slider; without scripts all frames are listed."""


def frames_html(trajectory: Sequence[Pass], decode_token: DecodeToken, *, row: int = 0) -> str:
    """An HTML fragment that stands alone: one figure per pass, and a slider over them."""
    figures = "\n".join(
        f"<figure><figcaption>{html.escape(summary(record, row))}</figcaption>"
        f"<p>{''.join(_span(cell) for cell in cells(record, row, decode_token))}</p></figure>"
        for record in trajectory
    )
    last = len(trajectory) - 1
    slider = f'<input type="range" min="0" max="{last}" value="{last}" aria-label="pass" hidden>'
    return (
        f'<div class="dr"><style>{STYLE}</style>\n{slider}\n{figures}\n'
        f"<script>{SCRIPT}</script></div>"
    )


def _span(cell: Cell) -> str:
    text = html.escape(cell.text)
    if cell.kind == "given":
        return text
    if cell.kind == "masked":
        return f'<span class="masked">{text}</span>'
    old = f"<del>{html.escape(cell.old)}</del>" if cell.old is not None else ""
    return (
        f'{old}<span class="{cell.kind} c{cell.level}" title="p = {cell.probability:.2f}">'
        f"{text}</span>"
    )
