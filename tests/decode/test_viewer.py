import io
import re
from html.parser import HTMLParser

import pytest
from rich.console import Console

from diffurefill.config import DRAFT, REFILL, Stage
from diffurefill.decode.canvas import infill
from diffurefill.decode.generate import Generation, generate
from diffurefill.decode.viewer import MASK_BLOCK, Cell, Viewer, cells, frames_html, replay, summary
from tests.decode.plain import V, specials
from tests.fakes import BigramDenoiser

WORDS = ["<bos>", "<eos>", "<mask>", "<pad>", *(f" w{i}" for i in range(4, V - 1)), " <i>&\n"]


@pytest.fixture(scope="module")
def result() -> Generation:
    """Two rows; the second is shorter and padded."""
    canvas = infill([[[5], 20, [6]], [[7], 4]], specials(), max_tokens=32)
    return generate(BigramDenoiser(V), canvas, (DRAFT, REFILL), specials(), seeds=[1, 2])


def text_of(trajectory, *, row: int = 0, terminal: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=200, color_system="truecolor")
    replay(trajectory, Viewer(WORDS.__getitem__, row=row, console=console), seconds_per_pass=0)
    return out.getvalue()


def test_cells_tell_given_masked_accepted_standing_and_refilled(result):
    first = cells(result.trajectory[0], 0, WORDS.__getitem__)
    assert [cell.kind for cell in first[:2]] == ["given", "given"]
    assert {cell.kind for cell in first} == {"given", "masked", "accepted"}
    second = cells(result.trajectory[1], 0, WORDS.__getitem__)
    assert {cell.kind for cell in second} == {"given", "masked", "accepted", "standing"}
    refill = cells(result.trajectory[-1], 0, WORDS.__getitem__)
    assert {cell.kind for cell in refill} == {"given", "standing", "refilled"}


def test_cells_leave_padding_out(result):
    assert len(cells(result.trajectory[0], 1, WORDS.__getitem__)) == 6


def test_a_refilled_cell_holds_the_old_token_only_where_it_changed(result):
    record = result.trajectory[-1]
    for i, cell in enumerate(cells(record, 0, WORDS.__getitem__)):
        old, new = record.previous_ids[0, i].item(), record.ids[0, i].item()
        changed = bool(record.remasked[0, i]) and old != new
        assert cell.old == (WORDS[old] if changed else None)


@pytest.mark.parametrize(("p", "level"), [(0.05, 0), (0.1, 1), (0.5, 2), (0.6, 3), (0.95, 4)])
def test_a_surer_cell_has_a_higher_level(p, level):
    assert Cell("standing", "x", p).level == level


def test_summaries_count_what_is_filled_and_what_changed(result):
    assert summary(result.trajectory[0], 0) == "draft 1/12: 2 of 20 filled"
    assert summary(result.trajectory[11], 0) == "draft 12/12: 20 of 20 filled"
    assert re.fullmatch(r"refill 1/8: 4 redone, [0-4] changed", summary(result.trajectory[12], 0))


def test_uncounted_passes_are_not_given_a_total():
    canvas = infill([[[5], 3]], specials(), max_tokens=8)
    stage = Stage(num_passes=0, tokens_per_pass=1)
    passes = generate(BigramDenoiser(V), canvas, [stage], specials(), seeds=[0]).trajectory
    assert summary(passes[1], 0) == "draft 2: 2 of 3 filled"


def test_without_a_terminal_each_pass_is_plain_lines(result):
    text = text_of(result.trajectory, terminal=False)
    assert "\x1b" not in text
    assert sum(line.startswith(("draft ", "refill ")) for line in text.splitlines()) == 20
    assert "<bos> w5" in text
    assert text.count(MASK_BLOCK) == sum(int(p.is_masked[0].sum()) for p in result.trajectory)


def test_a_terminal_is_redrawn_in_colour_with_what_was_replaced(result):
    text = text_of(result.trajectory, terminal=True)
    assert "\x1b[" in text
    assert " -> " in text
    assert "refill 8/8" in text


def test_the_viewer_is_a_live_callback(result):
    out = io.StringIO()
    with Viewer(WORDS.__getitem__, console=Console(file=out, width=200)) as viewer:
        generate(
            BigramDenoiser(V),
            result.trajectory[0].canvas,
            (DRAFT, REFILL),
            specials(),
            seeds=[1, 2],
            on_pass=viewer,
        )
    assert out.getvalue() == text_of(result.trajectory, terminal=False)


class _Balance(HTMLParser):
    """Fails on tags that do not nest; collects text outside style and script."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.figures = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.figures += tag == "figure"
        if tag != "input":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self.open):
            self.text += data


def test_html_nests_and_shows_one_figure_per_pass(result):
    page = _Balance()
    page.feed(frames_html(result.trajectory, WORDS.__getitem__))
    assert page.open == []
    assert page.figures == 20
    assert "draft 1/12: 2 of 20 filled" in page.text


def test_html_escapes_every_token(result):
    hostile = "<script>alert('&')</script>"
    page = frames_html(result.trajectory, lambda _: hostile)
    assert page.count("<script>") == 1  # the slider's own
    parsed = _Balance()
    parsed.feed(page)
    assert hostile in parsed.text
