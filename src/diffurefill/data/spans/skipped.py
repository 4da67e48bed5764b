"""What of a text has no salient spans: code between backquotes, web and e-mail addresses."""

from __future__ import annotations

import re
from collections.abc import Iterator

HIDDEN = "\0"
"""Stands in the place of a character of code; it is no blank, letter, digit or mark."""

_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})", re.MULTILINE)
# Not ``quotes like these'' or `these'.
_INLINE_CODE = re.compile(r"``(?:(?!``|'')[^\n])+``|`[^`\n]*[^`\s]`(?![`\w])")
_URL = re.compile(r"(?:https?|ftp)://[^\s<>\"]*[^\s<>\".,;:!?')\]}]|www\.[^\s<>\"]*[\w/]")
_BEFORE_AT = re.compile(r"[\w.+-]{1,64}\Z")
_AFTER_AT = re.compile(r"@\w[\w-]{0,62}(?:\.\w[\w-]{0,62}){1,8}")


def without_code_and_addresses(text: str) -> str:
    """`text` with a neutral character at every place where no span may be; the length stays."""
    if "```" in text or "~~~" in text:
        text = _hidden(text, _fenced(text))
    if "`" in text:
        text = _hidden(text, (m.span() for m in _INLINE_CODE.finditer(text)))
    if "://" in text or "www." in text:
        text = _hidden(text, (m.span() for m in _URL.finditer(text)))
    if "@" in text:
        text = _hidden(text, _mail_addresses(text))
    return text


def _hidden(text: str, ranges: Iterator[tuple[int, int]]) -> str:
    parts, done = [], 0
    for start, end in ranges:
        parts += [text[done:start], HIDDEN * (end - start)]
        done = end
    return "".join([*parts, text[done:]])


def _fenced(text: str) -> Iterator[tuple[int, int]]:
    """From each fence to the line that closes it, or to the end of the text."""
    opened: re.Match[str] | None = None
    for fence in _FENCE.finditer(text):
        if opened is None:
            opened = fence
        elif fence[1].startswith(opened[1]):
            yield opened.start(), fence.end()
            opened = None
    if opened is not None:
        yield opened.start(), len(text)


def _mail_addresses(text: str) -> Iterator[tuple[int, int]]:
    low, at = 0, text.find("@")
    while at >= 0:
        name = _BEFORE_AT.search(text[max(low, at - 64) : at])
        host = _AFTER_AT.match(text, at)
        if name and host:
            yield at - len(name[0]), host.end()
            low = host.end()
        at = text.find("@", max(at + 1, low))
