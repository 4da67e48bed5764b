"""The page holds every pass, loads nothing, and no token can become markup."""

import json
import re
from html.parser import HTMLParser

from diffurefill.decode.view.frames import Cell, Frame, frames
from diffurefill.decode.view.page import Sample, fragment, page
from tests.decode.view.passes import decode, story

HOSTILE = "</script><script>alert(1)</script><!--<b>&amp;\u2028"


def sample(title: str = "He said ...") -> Sample:
    return Sample(title, frames(story(), decode))


def hostile() -> Sample:
    return Sample(HOSTILE, [Frame("refill", "1/1", (Cell("refilled", HOSTILE, 0.5, HOSTILE),))])


class Parsed(HTMLParser):
    """Fails on tags that do not nest; keeps scripts and the text outside of scripts and styles."""

    VOID = ("input", "meta")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.scripts: list[str] = []
        self.text, self.tags = "", []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            self.scripts[-1] += data
        elif self.open[-1:] != ["style"]:
            self.text += data


def data_of(text: str) -> list[dict]:
    return json.loads(Parsed(text).scripts[0])["samples"]


def test_the_page_holds_every_pass_and_what_each_one_changed():
    (told,) = data_of(page([sample()]))
    assert told["title"] == "He said ..."
    assert [(p["stage"], p["number"]) for p in told["passes"]] == [
        ("draft", "1/2"), ("draft", "2/2"), ("refill", "1/1"),
    ]  # fmt: skip
    assert [p["masked"] for p in told["passes"]] == [3, 0, 0]
    assert [p["mean"] for p in told["passes"]] == [0.5, 0.312, 0.208]
    assert [len(p["cells"]) for p in told["passes"]] == [7, 4, 4]
    assert told["passes"][2]["cells"][0] == [3, "refilled", " small", 0.167, " big"]


def test_the_changes_add_up_to_the_frames():
    now: dict[int, list] = {}
    for told, frame in zip(data_of(page([sample()]))[0]["passes"], sample().frames, strict=True):
        now |= {cell[0]: cell[1:] for cell in told["cells"]}
        assert [(now[i][0], now[i][1], now[i][3]) for i in range(len(frame.cells))] == [
            (c.kind, c.text, c.old) for c in frame.cells
        ]


def test_the_slider_goes_from_the_first_pass_to_the_last():
    text = page([sample()])
    slider = next(a for tag, a in Parsed(text).tags if tag == "input")
    assert slider["min"] == "1"
    assert "slider.max = passes.length" in text, "3 passes, each a step"
    assert len(data_of(text)[0]["passes"]) == 3


def test_no_token_can_become_markup():
    text = page([hostile()], heading=HOSTILE)
    parsed = Parsed(text)
    assert len(parsed.scripts) == 2
    assert json.loads(parsed.scripts[0])["samples"][0]["passes"][0]["cells"] == [
        [0, "refilled", HOSTILE, 0.5, HOSTILE]
    ]
    assert not set("<>&") & set(parsed.scripts[0])
    assert HOSTILE in parsed.text, "the text for readers without scripts"
    assert "innerHTML" not in text


def test_the_page_needs_nothing_from_elsewhere():
    text = page([sample(), hostile()])
    parsed = Parsed(text)
    assert not [a for _, a in parsed.tags if {"src", "href", "srcset", "action"} & a.keys()]
    assert not re.search(r"url\(|@import|fetch\(|import\(|XMLHttp", text)
    assert set(re.findall(r"https?://[^\s\"']+", text)) == {"http://www.w3.org/2000/svg"}, (
        "a name, not an address"
    )
    policy = next(a for _, a in parsed.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy["content"].startswith("default-src 'none'")


def test_every_control_has_a_name():
    parsed = Parsed(page([sample()]))
    for tag, attributes in parsed.tags:
        if tag == "input" or (tag == "select" and "which" in attributes["class"]):
            assert attributes["aria-label"]
    buttons = [a for tag, a in parsed.tags if tag == "button"]
    assert all(a.get("aria-label") or a["class"] == "play" for a in buttons)


def test_several_fragments_may_stand_in_one_page():
    text = fragment([sample()]) + fragment([hostile()])
    assert len(Parsed(text).scripts) == 4
    assert "id=" not in text
