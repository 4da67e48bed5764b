# ruff: noqa: RUF001 (the quotes and dashes are meant)
"""Salient spans of a text: names, numbers and dates, found by plain rules without a model.

Two rules. S0 leaves out every capitalised word that starts a sentence. S1 keeps such a word where
it is surely part of a name: it has two capitals, or it is no function word and another name follows
after one space ("Barack" beside a masked "Obama" would give the name away).

The text is scanned once, from one capital or digit to the next; whatever looks back stops where
the scan has been, so the time is linear in the length of any text.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from typing import Literal, NamedTuple

from diffurefill.data.spans.skipped import without_code_and_addresses

Rule = Literal["S1", "S0"]
Span = tuple[int, int]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SHORT_MONTHS = _words("Jan Feb Mar Apr Jun Jul Aug Sep Sept Oct Nov Dec")
MONTHS = _SHORT_MONTHS | _words(
    "January February March April May June July August September October November December"
)
# A dot after these ends no sentence. Case matters: "No. 5", but "he said no."
ABBREVIATIONS = _SHORT_MONTHS | _words(
    """Mr Mrs Ms Messrs Mme Mlle Dr Prof Rev Hon Fr Sr Jr Esq Bt St Ste Mt Ft Gen Col Maj Capt Cpt
    Lt Sgt Cpl Pvt Adm Cdr Cmdr Brig Gov Sen Rep Pres Supt Inc Ltd Co Corp Bros Dept Univ Ave Blvd
    Rd No Nos Vol Ch Sec Fig Op Ph.D M.Sc B.Sc vs v e.g i.e cf etc al viz approx ca c ed eds
    esp fig nos op p pp vol ch sec a.k.a"""
)
FUNCTION_WORDS = _words(
    """a about after all also although an and another any are as at be because before both but by
    can do during each even every few for from had has have he her here his how however if in into
    is it its just like many more most much my no not now of on once one only or other our out over
    perhaps several she since so some still such than that the their then there these they this
    those though through thus to under until up was we were what when where whether which while who
    whose why will with within without would yes yet you your"""
)
NEVER = frozenset(("I", "I'm", "I've", "I'll", "I'd", "OK"))
CURRENCY = frozenset("$£€¥₹₽₩¢₺₴₪")

MAX_WORDS = 8
"""A longer run of capitalised words is a heading or shouting, not a name."""

_LINE_ENDS = "\n\r\v\f\x85\u2028\u2029"
_BLANKS = " \t\u00a0\u2009\u202f"
_QUOTES = "\"'`“”„‘’‚«»‹›"
_LOOK_THROUGH = _BLANKS + _QUOTES + "()[]{}" + "-–—*+•·▪#>"
_OPENING_QUOTES = frozenset('"`“„«‘')
_SENTENCE_ENDS = frozenset(".!?…:")
_NOT_MID_SENTENCE = frozenset(_LINE_ENDS + _LOOK_THROUGH + "," + "".join(_SENTENCE_ENDS))
_CODE_BEFORE = frozenset("._/\\@$<=")
_CODE_AFTER = re.compile(r"\((?!\s)|[_=<]|::")  # "Sana Saeed( born 1988)" is no call
_JOINERS = frozenset("-'’.&")
_ONE_SPACE = frozenset(" \u00a0")


def _class(kinds: str) -> str:
    """The characters of these Unicode categories, as the inside of a [class]."""
    wanted = kinds.split()
    # The regex engine looks these up in one bitmap; one character beyond the basic plane, where
    # only a few dead scripts have capitals, would make the whole search thirty times slower.
    plane = (chr(i) for i in range(0x10000))
    return "".join(c for c in plane if unicodedata.category(c) in wanted)


_UPPER = _class("Lu Lt")
_WORD = _class("Lu Ll Lt Mn Mc Me Nd")
_IS_UPPER, _IS_WORD = frozenset(_UPPER), frozenset(_WORD)


def _piece_pattern() -> re.Pattern[str]:
    upper, word = re.escape(_UPPER), re.escape(_WORD)
    tail = rf"(?:[-'’.&][{word}]+)*"
    # Nothing in it can fail once its first character has matched, so there is no backtracking.
    return re.compile(
        rf"(\d+(?:[.,:/–-]\d+)*)(%|(?:st|nd|rd|th|s|ST|ND|RD|TH)(?![{word}]))?([{word}]+{tail})?"
        rf"|[{upper}][{word}]*{tail}"
    )


_PIECE = _piece_pattern()
_DAY = re.compile(r"(\d{1,2})(?:[-–]\d{1,2})?(?:st|nd|rd|th)?")
_YEAR = re.compile(r"\d{3,4}")


class _Piece(NamedTuple):
    """One word or number of a span. `if_next` says: only where the next piece joins it."""

    start: int
    end: int
    kind: int
    starts_sentence: bool = False
    if_next: bool = False


_NUMBER, _ORDINAL, _WORD_PIECE, _MONTH = range(4)


def find_spans(text: str, rule: Rule = "S1") -> list[Span]:
    """Character ranges [start, end) of names, numbers and dates: sorted, disjoint, inside `text`.

    No span begins or ends with a blank, or goes over a line's end. Code between backquotes, web
    and e-mail addresses have none.
    """
    text = without_code_and_addresses(text)
    spans: list[Span] = []
    run: list[_Piece] = []
    for piece in _pieces(text, keep_first=rule == "S1"):
        if run and not _joins(text, run, piece):
            _close(run, spans)
            run = []
        run.append(piece)
    _close(run, spans)
    return spans


def _close(run: list[_Piece], spans: list[Span]) -> None:
    if 0 < len(run) <= MAX_WORDS and not (len(run) == 1 and run[0].if_next):
        spans.append((run[0].start, run[-1].end))


def _joins(text: str, run: list[_Piece], piece: _Piece) -> bool:
    """Whether `piece` belongs to the span that `run` has begun."""
    last = run[-1]
    gap = text[last.end : piece.start]
    if gap in (", ", ","):
        return len(run) > 1 and _is_day_and_month(text, run[-2], last) and _is_year(text, piece)
    if gap in (". ", "."):
        if piece.starts_sentence or not _is_abbreviation(text[last.start : last.end]):
            return False
    elif gap not in (" ", "\u00a0", "-", " & "):
        return False
    if piece.kind < _WORD_PIECE:
        return True
    if last.kind == _NUMBER:
        return _is_day_and_month(text, last, piece)
    # "On 4 August Britain ...": a date is complete.
    return not (len(run) > 1 and last.kind == _MONTH and _is_day_and_month(text, run[-2], last))


def _is_day_and_month(text: str, first: _Piece, second: _Piece) -> bool:
    """In either order: "August 4", "4 August", "7-8 August", "4th August"."""
    if second.kind == _MONTH:
        first, second = second, first
    if first.kind != _MONTH or second.kind > _ORDINAL:
        return False
    day = _DAY.fullmatch(text, second.start, second.end)
    return day is not None and 1 <= int(day[1]) <= 31


def _is_year(text: str, piece: _Piece) -> bool:
    return _YEAR.fullmatch(text, piece.start, piece.end) is not None


def _pieces(text: str, keep_first: bool) -> Iterator[_Piece]:
    """The candidates in order."""
    low, marker = 0, -1
    for match in _PIECE.finditer(text):
        start, end = match.span()
        is_number = match[1] is not None and match[3] is None
        if start > low and (text[start - 1] in _IS_WORD or text[start - 1] in _JOINERS):
            begin = _start_of_word(text, start, low)
            is_number = is_number and begin == start
            start = begin
        if is_number:
            if match[2] is None and _is_list_marker(text, low, start, end):
                marker = end
            elif piece := _number(text, low, start, end, match[2]):
                yield piece
        elif piece := _word(text, low, start, end, marker, keep_first):
            yield piece
        low = end


def _start_of_word(text: str, start: int, low: int) -> int:
    """Where the word begins that has its first capital or digit at `start`: mid-July, iPhone."""
    # "end.Then": a dot with small letters before and a capital after it joins nothing.
    if text[start - 1] == "." and text[start] in _IS_UPPER:
        return start
    begin = start
    while begin > low:
        if text[begin - 1] in _IS_WORD:
            begin -= 1
        elif text[begin - 1] in _JOINERS and begin - 1 > low and text[begin - 2] in _IS_WORD:
            begin -= 2
        else:
            break
    return begin


def _is_list_marker(text: str, low: int, start: int, end: int) -> bool:
    """A number alone at the start of a line, before ". " or ") "."""
    if text[end : end + 2] not in (". ", ") "):
        return False
    before = text[low:start].rstrip(_BLANKS)
    return before[-1] in _LINE_ENDS if before else low == 0


def _number(text: str, low: int, start: int, end: int, suffix: str | None) -> _Piece | None:
    before = text[start - 1] if start else ""
    if before in CURRENCY and start > low:
        start -= 1
    elif before in _CODE_BEFORE or text[end : end + 1] == "_":
        return None
    is_ordinal = suffix is not None and suffix not in ("s", "%")
    return _Piece(start, end, _ORDINAL if is_ordinal else _NUMBER)


def _word(
    text: str, low: int, start: int, end: int, marker: int, keep_first: bool
) -> _Piece | None:
    before = text[start - 1] if start else ""
    if before in CURRENCY and text[start].isdecimal():
        start -= 1  # $1.5bn
    elif before in _CODE_BEFORE or before == "°" or _CODE_AFTER.match(text, end):
        return None
    if text[end - 2 : end] in ("'s", "’s"):
        end -= 2
    word = text[start:end]
    if word.replace("’", "'") in NEVER:
        return None
    kind = _MONTH if word in MONTHS else _WORD_PIECE
    if word[0] not in _IS_UPPER or not _starts_sentence(text, low, start, end, marker):
        return _Piece(start, end, kind)
    after = text[end : end + 2]
    if (
        (after[:1] == "." and _is_initials(word))
        or (kind == _MONTH and after[:1] in _ONE_SPACE and after[1:].isdecimal())
        or (keep_first and sum(c in _IS_UPPER for c in word) >= 2)
    ):
        return _Piece(start, end, kind, starts_sentence=True)
    if not keep_first or word.lower() in FUNCTION_WORDS:
        return None
    if after[:1] in _ONE_SPACE and after[1:] in _IS_UPPER:
        return _Piece(start, end, kind, starts_sentence=True, if_next=True)
    return None


def _starts_sentence(text: str, low: int, start: int, end: int, marker: int) -> bool:
    """Whether the capital of the word text[start:end] says nothing. Nothing before `low` is read
    but the last character of what was found there."""
    if start > 1 and text[start - 1] == " " and text[start - 2] not in _NOT_MID_SENTENCE:
        return False
    place = low + len(text[low:start].rstrip(_LOOK_THROUGH))
    if place in (0, marker):
        return True
    last = text[place - 1]
    if last in _LINE_ENDS:
        return True
    if last == ",":
        return text[start - 1] in _OPENING_QUOTES
    if last not in _SENTENCE_ENDS or not any(c in _BLANKS for c in text[place:start]):
        return False
    if last != "." or not _is_abbreviation(_word_before(text, place - 1)):
        return True
    # "in the U.S. The ...": a small word with a capital does start a sentence, "A. A. Milne" not.
    return text[start:end].lower() in FUNCTION_WORDS and text[end : end + 1] != "."


def _word_before(text: str, dot: int) -> str:
    """The word that the dot at `dot` follows, as far as an abbreviation can be long."""
    near = text[max(0, dot - 12) : dot]
    return near.split()[-1].lstrip(_LOOK_THROUGH) if near.strip() else ""


def _is_abbreviation(word: str) -> bool:
    return word in ABBREVIATIONS or _is_initials(word)


def _is_initials(word: str) -> bool:
    """J, U.S, J.R.R: capitals with dots between them."""
    capitals, dots = word[::2], word[1::2]
    return len(word) % 2 == 1 and dots == "." * len(dots) and all(c in _IS_UPPER for c in capitals)
