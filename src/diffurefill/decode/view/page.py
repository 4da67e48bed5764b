"""Frames as one HTML page that needs nothing else: opened from a disk, mailed, put on a site.

The template page.html holds style, controls and script. The frames go into it as JSON in which no
`<` is left, and the script writes text only as text, so no token can become markup.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from diffurefill.decode.view.frames import Frame

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
"""The browser itself refuses whatever would come from elsewhere."""
PAGE_STYLE = (
    ":root{color-scheme:light dark}body{margin:1.5em auto;padding:0 1em;max-width:60rem;"
    "font:16px/1.5 system-ui,sans-serif;background:light-dark(#fff,#17181b);"
    "color:light-dark(#1d1d1f,#ececee)}h1{font-size:1.25em;margin:0 0 .6em}"
)
"""Light or dark as the reader's system is; the viewer follows the page that it stands in."""


@dataclass(frozen=True)
class Sample:
    """One row with the name under which it is chosen."""

    title: str
    frames: list[Frame]


def page(samples: Sequence[Sample], heading: str = "Draft and refill, pass by pass") -> str:
    """A whole document; the first of `samples` is shown first."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(heading)}</title>\n<style>{PAGE_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{html.escape(heading)}</h1>\n{fragment(samples)}</body>\n</html>\n"
    )


def fragment(samples: Sequence[Sample]) -> str:
    """The viewer alone, to stand in a page of one's own; several of them may."""
    template = (files("diffurefill.decode.view") / "page.html").read_text("utf-8")
    before, rest = template.split("{{plain}}")
    between, after = rest.split("{{data}}")
    data = {"samples": [{"title": s.title, "passes": _passes(s.frames)} for s in samples]}
    plain = "".join(f"<pre>{html.escape(_final_text(s.frames))}</pre>" for s in samples)
    return before + plain + between + _script_safe(data) + after


def _passes(frames: Sequence[Frame]) -> list[dict[str, Any]]:
    """Each pass with what it changed against the one before: most cells stand still."""
    passes, before = [], [None] * len(frames[0].cells)
    for frame in frames:
        cells = [
            [i, cell.kind, cell.text, round(cell.probability, 3), cell.old]
            for i, (cell, old) in enumerate(zip(frame.cells, before, strict=True))
            if cell != old
        ]
        before = frame.cells
        passes.append(
            {
                "stage": frame.stage,
                "number": frame.number,
                "masked": frame.num_masked,
                "fillable": frame.num_fillable,
                "mean": round(frame.mean_confidence, 3),
                "redone": frame.num_redone,
                "changed": frame.num_changed,
                "cells": cells,
            }
        )
    return passes


def _final_text(frames: Sequence[Frame]) -> str:
    return "".join(cell.text for cell in frames[-1].cells)


def _script_safe(data: Any) -> str:
    """JSON without `<`, `>` and `&`: no `</script>` or `<!--` can end the element it stands in."""
    text = json.dumps(data, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
