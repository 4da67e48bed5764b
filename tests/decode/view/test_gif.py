from pathlib import Path

import pytest

pytest.importorskip("PIL", reason="GIFs need the extra `plot`")
pytest.importorskip("matplotlib", reason="GIFs need the extra `plot`")

from PIL import Image, ImageColor

from diffurefill.decode.view.frames import Cell, Frame, frames
from diffurefill.decode.view.gif import (
    LAST_MILLISECONDS,
    LEVEL_COLOURS,
    MASK,
    MILLISECONDS,
    PAPER,
    REFILL,
    save_gif,
)
from tests.decode.view.passes import decode, story


def pictures(path: Path, rows: list[list[Frame]]) -> list[tuple[Image.Image, int]]:
    save_gif(rows, path)
    found = []
    with Image.open(path) as gif:
        for k in range(gif.n_frames):
            gif.seek(k)
            found.append((gif.convert("RGB"), gif.info["duration"]))
    return found


def holds(picture: Image.Image, colour: str) -> bool:
    return ImageColor.getrgb(colour) in {c for _, c in picture.getcolors(1 << 16)}


def test_a_picture_a_pass_and_the_end_stays(tmp_path: Path) -> None:
    found = pictures(tmp_path / "x.gif", [frames(story(), decode)] * 2)
    durations = [MILLISECONDS["draft"], MILLISECONDS["draft"], LAST_MILLISECONDS]
    assert [duration for _, duration in found] == durations * 2
    assert len({picture.size for picture, _ in found}) == 1


def test_what_is_hidden_sure_or_changed_shows_in_its_colour(tmp_path: Path) -> None:
    cells = (
        Cell("given", "He"),
        Cell("masked", ""),
        *(Cell("standing", f" w{p}", p) for p in (0.05, 0.2, 0.5, 0.7, 0.95)),
    )
    changed = (*cells[:1], Cell("refilled", " small\n", 0.5, " big"), *cells[2:])
    shown = [Frame("draft", "1/1", cells), Frame("refill", "1/1", changed)]
    (first, _), (second, _) = pictures(tmp_path / "x.gif", [shown])
    assert all(holds(first, colour) for colour in (PAPER, MASK, *LEVEL_COLOURS))
    text = (0, 60, 960, 120)  # without the heading and the key to the colours
    assert holds(first.crop(text), MASK)
    assert not holds(first.crop(text), REFILL)
    assert holds(second.crop(text), REFILL)


def test_any_text_can_be_drawn(tmp_path: Path) -> None:
    odd = ["\u4f60\u597d" * 60, "x" * 300, "\n\n\n", "\t", " ", "", "\u0627\u0644", "\U0001f600"]
    cells = tuple(Cell("refilled", text, 0.5, text) for text in odd)
    (picture, _), *_ = pictures(tmp_path / "x.gif", [[Frame("refill", "1", cells)]])
    assert picture.width == 960
