"""Frames as an animated GIF, for pages where nothing can be clicked. Needs the extra `plot`."""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffurefill.config import UserError
from diffurefill.decode.view.frames import Cell, Frame

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont

WIDTH, MARGIN, LINE, SIZE, SMALL = 960, 28, 46, 21, 14
"""Pixels: of the picture, its margin, a line of text, the text, and what was replaced."""
HEAD, FOOT = 74, 44
INK, SOFT, PAPER, RULE, MASK, REFILL = (
    "#1d1d1f", "#5c5f66", "#ffffff", "#d9dbe0", "#e6e8ec", "#9c27b0",
)  # fmt: skip
LEVEL_COLOURS = ("#f4a77b", "#fad3b8", "#ececea", "#cfe1f5", "#9fc8f0")
SHADES = 6
"""Steps from one colour to another along the edge of a letter."""
MILLISECONDS = {"draft": 450, "refill": 800}
"""Of a pass; less where there are so many that a row would take longer than `MAX_MILLISECONDS`."""
MAX_MILLISECONDS = 16_000
LAST_MILLISECONDS = 3500
MIN_WIDTH = 8
WIDE_FONTS = (
    "Noto Sans CJK JP", "Noto Sans CJK SC", "WenQuanYi Zen Hei", "PingFang SC",
    "Hiragino Sans", "Microsoft YaHei", "Malgun Gothic", "Arial Unicode MS",
)  # fmt: skip


def require_pillow() -> None:
    """UserError where GIFs cannot be drawn."""
    try:
        import matplotlib  # noqa: F401
        import PIL  # noqa: F401
    except ImportError:
        raise UserError(
            "a GIF needs Pillow and its fonts: pip install 'diffurefill[plot]'"
        ) from None


def save_gif(rows: Sequence[Sequence[Frame]], path: Path) -> None:
    """One picture a pass, the rows one after another, for ever."""
    from PIL import Image

    placed = [[_lay(frame, shown[-1]) for frame in shown] for shown in rows]
    lines = 1 + max(box.line for shown in placed for boxes in shown for box in boxes)
    palette, flat, durations = _palette(), [], []
    for shown, boxes_of in zip(rows, placed, strict=True):
        for k, (frame, boxes) in enumerate(zip(shown, boxes_of, strict=True)):
            picture = _picture(shown, k, boxes, HEAD + LINE * lines + FOOT)
            flat.append(picture.quantize(palette=palette, dither=Image.Dither.NONE))
            durations.append(
                max(40, min(MILLISECONDS[frame.stage], MAX_MILLISECONDS // len(shown)))
            )
        durations[-1] = LAST_MILLISECONDS
    flat[0].save(
        path,
        "GIF",
        save_all=True,
        append_images=flat[1:],
        duration=durations,
        loop=0,
        optimize=True,
    )


def _palette() -> Any:
    """One for all pictures: every colour used, and the shades between letters and their ground."""
    from PIL import Image, ImageColor

    pairs = [(INK, ground) for ground in (PAPER, *LEVEL_COLOURS)]
    pairs += [(SOFT, PAPER), (REFILL, PAPER)]  # nothing else has letters
    colours = [list(ImageColor.getrgb(colour)) for colour in (MASK, RULE)]
    for pair in pairs:
        above, below = map(ImageColor.getrgb, pair)
        for step in range(SHADES + 1):
            share = step / SHADES
            colours.append([
                round(a * share + b * (1 - share)) for a, b in zip(above, below, strict=True)
            ])  # fmt: skip
    found = Image.new("P", (1, 1))
    found.putpalette([part for colour in colours for part in colour])
    return found


# --- fonts ---------------------------------------------------------------------------------------


@functools.cache
def _font(size: int, bold: bool = False, wide: bool = False) -> FreeTypeFont:
    """DejaVu, or for what it lacks the first font found that has the scripts of East Asia."""
    from matplotlib import font_manager, get_data_path
    from PIL import ImageFont

    path = Path(get_data_path()) / "fonts" / "ttf" / f"DejaVuSans{'-Bold' if bold else ''}.ttf"
    for name in WIDE_FONTS if wide else ():
        try:
            path = font_manager.findfont(name, fallback_to_default=False)
        except ValueError:
            continue
        break
    return ImageFont.truetype(str(path), size)


@functools.cache
def _known() -> frozenset[int]:
    from matplotlib.ft2font import FT2Font

    return frozenset(FT2Font(_font(SIZE).path).get_charmap())


def _font_for(text: str, size: int, bold: bool = False) -> FreeTypeFont:
    return _font(size, bold, wide=any(ord(c) not in _known() for c in text))


def _width(text: str, size: int = SIZE, bold: bool = False) -> int:
    return round(_font_for(text, size, bold).getlength(text))


# --- layout --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Box:
    """A cell, or a part of one that stands on one line; x and width in pixels."""

    cell: Cell
    text: str
    line: int
    x: int
    width: int
    is_first: bool


def _lay(frame: Frame, last: Frame) -> list[_Box]:
    """Where each cell goes. A hidden one takes the room of what will stand there at the end, so
    that the text does not run about while it fills."""
    boxes: list[_Box] = []
    line, x = 0, MARGIN
    for word in _words(frame, last):
        width = sum(_text_width(cell, text) for cell, text, _ in word if text != "\n")
        if x > MARGIN and x + width > WIDTH - MARGIN:
            line, x = line + 1, MARGIN
        for cell, text, is_first in word:
            if text == "\n":
                line, x = line + 1, MARGIN
                continue
            word_text = text.lstrip(" ") or text
            blank, width = _width(text) - _width(word_text), _text_width(cell, word_text)
            if x > MARGIN and x + blank + width > WIDTH - MARGIN:
                line, x = line + 1, MARGIN
            x, text = x + (blank if x > MARGIN else 0), word_text
            boxes.append(_Box(cell, text, line, x, width, is_first))
            x += width
    return boxes


def _words(frame: Frame, last: Frame) -> list[list[tuple[Cell, str, bool]]]:
    """Parts that are not parted by a line's end: (cell, text, is it the cell's first part)."""
    words: list[list[tuple[Cell, str, bool]]] = [[]]
    for cell, final in zip(frame.cells, last.cells, strict=True):
        text = final.text if cell.kind == "masked" else cell.text
        text = text.replace("\t", "    ")
        if cell.kind != "given":
            text = text.replace("\n", "\u21b5\n")
        for n, part in enumerate(_lines(text)):
            before = words[-1][-1][1] if words[-1] else ""
            if part[:1].isspace() or before.endswith("\n") or _is_wide(part) or _is_wide(before):
                words.append([])
            words[-1].append((cell, part, n == 0))
    return words


def _lines(text: str) -> list[str]:
    """`a\\nb` as `a`, `\\n`, `b`; an empty text as itself."""
    parts = [part for piece in text.split("\n") for part in (piece, "\n")][:-1]
    return [part for part in parts if part] or [""]


def _is_wide(text: str) -> bool:
    return any(unicodedata.east_asian_width(c) in "WF" for c in text)


def _text_width(cell: Cell, text: str) -> int:
    width = _width(text, bold=cell.kind == "given")
    return width if cell.kind == "given" else max(width, MIN_WIDTH)


# --- drawing -------------------------------------------------------------------------------------


def _picture(shown: Sequence[Frame], k: int, boxes: Sequence[_Box], height: int) -> Any:
    from PIL import Image, ImageDraw

    picture = Image.new("RGB", (WIDTH, height), PAPER)
    draw = ImageDraw.Draw(picture)
    _draw_head(draw, shown, k)
    for box in boxes:
        _draw_box(draw, box)
    changed = [box for box in boxes if box.cell.old is not None and box.is_first]
    for box, after in pairwise([*changed, None]):
        if box is not None:
            beside = after is not None and after.line == box.line
            _draw_old(draw, box, after.x if after and beside else WIDTH)
    _draw_foot(draw, height - FOOT + 8)
    return picture


def _draw_head(draw: ImageDraw, shown: Sequence[Frame], k: int) -> None:
    frame = shown[k]
    colour = REFILL if frame.stage == "refill" else INK
    draw.text((MARGIN, 14), f"{frame.stage} {frame.number}", colour, _font(SIZE, bold=True))
    _, _, told = frame.summary.partition(": ")
    told = f"{told}, mean confidence {frame.mean_confidence:.0%}"
    draw.text((WIDTH - MARGIN, 16), told, SOFT, _font(SMALL + 3), anchor="ra")
    step = (WIDTH - 2 * MARGIN) / len(shown)
    for n, each in enumerate(shown):
        done = REFILL if each.stage == "refill" else SOFT
        left, right = MARGIN + n * step, MARGIN + (n + 1) * step - (2 if step > 6 else 0)
        draw.rectangle((left, 50, right, 54), fill=done if n <= k else RULE)


def _draw_box(draw: ImageDraw, box: _Box) -> None:
    cell, left, right = box.cell, box.x, box.x + box.width
    top = HEAD + LINE * box.line + 14
    if cell.kind == "given":
        draw.text((left, top), box.text, INK, _font_for(box.text, SIZE, bold=True))
        return
    if not box.width:
        return
    area = (left, top - 2, right - 1, top + SIZE + 5)
    if cell.kind == "masked":
        draw.rounded_rectangle((left + 1, top - 1, right - 2, top + SIZE + 4), 4, fill=MASK)
        return
    if cell.kind == "ended":
        draw.text((left, top), box.text, SOFT, _font_for(box.text, SIZE))
        return
    draw.rounded_rectangle(area, 4, fill=LEVEL_COLOURS[cell.level])
    if cell.kind == "accepted":
        draw.rectangle((left, top + SIZE + 4, right - 1, top + SIZE + 5), fill=INK)
    elif cell.kind == "refilled" and cell.old is None:
        draw.rectangle((left, top + SIZE + 4, right - 1, top + SIZE + 5), fill=REFILL)
    elif cell.kind == "refilled":
        draw.rounded_rectangle(area, 4, outline=REFILL, width=2)
    draw.text((left, top), box.text, INK, _font_for(box.text, SIZE))


def _draw_old(draw: ImageDraw, box: _Box, end: int) -> None:
    """What stood there, struck through above the box: as much of it as has room before `end`."""
    text = (box.cell.old or "").replace("\n", "\u21b5").strip() or "(space)"
    x, y = box.x + 3, HEAD + LINE * box.line - SMALL + 9
    if x + _width(text, SMALL) > end - 4:
        while len(text) > 1 and x + _width(f"{text}\u2026", SMALL) > end - 4:
            text = text[:-1]
        text += "\u2026"
    draw.text((x, y), text, SOFT, _font_for(text, SMALL))
    middle = y + SMALL * 0.65
    draw.line((x, middle, x + _width(text, SMALL), middle), SOFT)


def _draw_foot(draw: ImageDraw, y: int) -> None:
    """The key: words and swatches from left to right."""
    draw.line((MARGIN, y - 8, WIDTH - MARGIN, y - 8), RULE)
    x = _draw_word(draw, MARGIN - 6, y, "less sure")
    for colour in LEVEL_COLOURS:
        x = _draw_swatch(draw, x, y, colour, None)
    x = _draw_swatch(draw, _draw_word(draw, x, y, "surer"), y, MASK, None)
    x = _draw_swatch(draw, _draw_word(draw, x, y, "hidden"), y, None, REFILL)
    _draw_word(draw, x, y, "changed, what stood there above it")


def _draw_word(draw: ImageDraw, x: int, y: int, word: str) -> int:
    draw.text((x + 6, y + 3), word, SOFT, _font(SMALL))
    return x + _width(word, SMALL) + 24


def _draw_swatch(draw: ImageDraw, x: int, y: int, fill: str | None, outline: str | None) -> int:
    draw.rounded_rectangle((x, y + 2, x + 28, y + 20), 4, fill=fill, outline=outline, width=2)
    return x + 30
