import io
import re
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console

from diffurefill.decode.view.frames import Cell, Frame, frames
from diffurefill.decode.view.terminal import Viewer, replay
from tests.decode.view.passes import BOS, MASK, decode, story, trajectory

STYLING = re.compile(r"\x1b\[[0-9;]*m")


def shown(passes, *, terminal: bool, encoding: str = "utf-8", width: int = 200, **environ) -> str:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding=encoding, newline="\n")
    console = Console(
        file=out, force_terminal=terminal, width=width, height=24,
        _environ={"TERM": "xterm-256color", **environ},
    )  # fmt: skip
    replay(frames(passes, decode), Viewer(console), seconds_per_pass=0)
    out.flush()
    return raw.getvalue().decode(encoding)


def test_without_a_terminal_each_pass_is_plain_lines():
    text = shown(story(), terminal=False)
    assert "\x1b" not in text
    assert text.splitlines() == [
        "draft 1/2: 1 of 4 filled, mean confidence 0.50",
        "He said big\u2591\u2591\u2591\u2591\u2591\u2591",
        "draft 2/2: 4 of 4 filled, mean confidence 0.31",
        "He said big",
        " small<eos>",
        "refill 1/1: 2 redone, 1 changed, mean confidence 0.21",
        "He said small",
        " small<eos>",
        "[' big' -> ' small']",
    ]


def test_a_terminal_that_cannot_move_its_cursor_gets_plain_lines():
    assert shown(story(), terminal=True, TERM="dumb") == shown(story(), terminal=False)


def test_letters_that_the_output_cannot_hold_are_replaced():
    wide = trajectory([BOS, MASK, 13], given=1)
    assert shown(wide, terminal=False, encoding="ascii").splitlines()[1] == "__?"


def test_a_terminal_is_redrawn_in_colour_with_what_was_replaced():
    text = shown(story(), terminal=True)
    assert "\x1b[1A" in text, "the cursor goes up"
    last = STYLING.sub("", text[text.rindex("refill 1/1") :])
    assert "He said small\u21b5\n small<eos>" in last
    assert "' big' -> ' small'" in last
    assert "masked  0-10%  10-30%  30-60%  60-90%  90-100%  accepted now" in last


def test_without_colours_the_marks_stay():
    text = shown(story(), terminal=True, NO_COLOR="1")
    assert "38;5" not in text
    last = text[text.rindex("refill 1/1") :]
    assert "\x1b[1;4;7msmall" in last, "changed"
    assert "\x1b[4msmall" in last, "redone, the same again"


@pytest.mark.parametrize("width", [20, 33, 80])
def test_no_line_is_wider_than_the_terminal(width):
    steps = [BOS, *[11, 12, 13, 5, 9] * 8]
    text = shown(trajectory(steps, given=1), terminal=True, width=width)
    lines = STYLING.sub("", text[text.rindex("draft 1/1") :]).splitlines()
    assert max(map(cell_len, lines)) <= width
    assert "".join("".join(lines).split()).count("\u4f60\u597d") >= 6


def test_a_text_taller_than_the_window_is_followed_and_ends_whole():
    still = [Cell("standing", f"line{i}\n", 0.5) for i in range(100)]
    still[70] = replace(still[70], kind="accepted")
    out = io.StringIO()
    console = Console(
        file=out, force_terminal=True, width=80, height=24, _environ={"TERM": "xterm-256color"}
    )
    with Viewer(console) as viewer:
        viewer(Frame("draft", "1/1", tuple(still)))
        live = STYLING.sub("", out.getvalue())
        assert "line70" in live
        assert "line40" not in live
        assert live.count("more lines") == 2
        assert len(live.splitlines()) <= 24
    assert "line40" in STYLING.sub("", out.getvalue())
