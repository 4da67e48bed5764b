# ruff: noqa: RUF001 (the quotes are meant)
"""Which answers may enter a corpus: rules against copies, invented numbers and invented names.

They are strict on purpose. Another answer costs next to nothing; a wrong "fact" is learnt.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from diffurefill.data.spans.salient import find_spans

COPY_WORDS = 8
"""Length of the word sequences whose copied share is limited."""


@dataclass(frozen=True)
class Limits:
    """What a text of one style must keep to."""

    min_words: int
    max_words: int
    max_copied_share: float
    """Of the text's 8-word sequences, how many may stand in the source."""
    max_copied_run: int
    """Words in a row that may stand in the source."""
    min_known_names: float = 0.8
    """Of the text's names, how many must stand in the source."""
    names_subject: bool = False
    """Whether the text must name its subject."""


LIMITS = {
    "restate": Limits(30, 600, max_copied_share=0.2, max_copied_run=12),
    # A sentence has few words to say its fact otherwise: only the run counts.
    "sentences": Limits(4, 60, max_copied_share=1.0, max_copied_run=10, names_subject=True),
}

_WORD = re.compile(r"\w+")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_THOUSANDS = re.compile(r",(?=\d{3}(?!\d))")
_END = re.compile(r"[.!?…][\"'”’)\]]*\Z")
_THINKING = re.compile(r"\A\s*<think>.*?</think>", re.DOTALL)
_LINE_MARK = re.compile(r"\A\s*(?:[-*•]|\(?\d{1,2}[.)])\s+")
_PREFACE = re.compile(
    r"\A\W*(?:here (?:is|are)\b|here's\b|here’s\b|sure\b|certainly\b|of course\b|as an ai\b"
    r"|i cannot\b|i can't\b|i am sorry\b|i'm sorry\b|restated\b|rewritten\b|sentences?:|note:)",
    re.IGNORECASE,
)
_TASK_TALK = re.compile(
    r"\b(?:as an ai|language model|(?:the|this) (?:source|given|provided|original|above)"
    r" (?:text|passage|source)|in (?:the|this) (?:passage|source)"
    r"|the (?:passage|source) (?:says|states|does|describes|mentions))\b",
    re.IGNORECASE,
)
_PRONOUN = re.compile(
    r"\A\W*(?:he|she|it|they|his|her|hers|its|their|theirs|this|that|these|those|there)\b",
    re.IGNORECASE,
)


def _counted(words: str, first: int, step: int = 1) -> dict[str, str]:
    return {word: str(first + step * place) for place, word in enumerate(words.split())}


NUMBER_WORDS = {
    **_counted("zero one two three four five six seven eight nine ten eleven twelve", 0),
    **_counted("thirteen fourteen fifteen sixteen seventeen eighteen nineteen twenty", 13),
    **_counted("thirty forty fifty sixty seventy eighty ninety", 30, 10),
    **_counted("first second third fourth fifth sixth seventh eighth ninth tenth", 1),
}


def words_of(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


def numbers_of(text: str) -> set[str]:
    """The numbers written in digits, without thousands commas: 1,600 and 1600 are one."""
    found: set[str] = set()
    for match in _NUMBER.finditer(text):
        found.update(_THOUSANDS.sub("", match[0]).split(","))
    return found


def names_of(text: str) -> Iterator[list[str]]:
    """The words of each name: of each salient span, what stands before, between, after digits."""
    for start, end in find_spans(text, "S1"):
        name: list[str] = []
        for word in [*words_of(text[start:end]), "0"]:
            if not word[0].isdigit():
                name.append(word)
            elif name:
                yield name
                name = []


def _sequences(words: list[str], length: int) -> Iterator[tuple[str, ...]]:
    return zip(*(words[start:] for start in range(length)), strict=False)


class Source:
    """What a text is held against: the lead as the model saw it, its title included."""

    def __init__(self, title: str, text: str) -> None:
        self.title = title
        self._text = f"{title}\n{text}"
        self._sequences: dict[int, set[tuple[str, ...]]] = {}

    @cached_property
    def _words(self) -> list[str]:
        return words_of(self._text)

    @cached_property
    def _joined(self) -> str:
        return f" {' '.join(self._words)} "

    @cached_property
    def numbers(self) -> set[str]:
        """In digits and, up to a hundred, in words."""
        spelled = {NUMBER_WORDS[word] for word in self._words if word in NUMBER_WORDS}
        return numbers_of(self._text) | spelled

    def has_sequence(self, words: Iterable[str]) -> bool:
        return f" {' '.join(words)} " in self._joined

    def copied(self, words: list[str], length: int) -> float:
        """The share of the `length`-word sequences of `words` that stand in the source."""
        if length not in self._sequences:
            self._sequences[length] = set(_sequences(self._words, length))
        own = list(_sequences(words, length))
        return sum(one in self._sequences[length] for one in own) / len(own) if own else 0.0


def candidates(style: str, text: str, finish_reason: str) -> list[str]:
    """The texts of an answer: the whole of it, or its lines. A line that was cut off stays away."""
    text = _THINKING.sub("", text).strip()
    if style != "sentences":
        return [text]
    lines = [_LINE_MARK.sub("", line).strip() for line in text.splitlines()]
    if finish_reason == "length":
        lines = lines[:-1]
    return [line for line in lines if line]


class Filter:
    """The rules of one style. `asked` is what the model was told, which no text may repeat."""

    def __init__(self, limits: Limits, asked: Iterable[str]) -> None:
        self._limits = limits
        self._asked = {
            sequence for text in asked for sequence in _sequences(words_of(text), COPY_WORDS)
        }

    def first_failure(self, text: str, source: Source, was_cut: bool) -> str | None:
        """The name of the first rule of RULES that `text` breaks. `was_cut`: the model was stopped
        at its token limit."""
        words = words_of(text)
        for name, breaks in RULES:
            if breaks(self, text, words, source) or (was_cut and name == "ending"):
                return name
        return None

    def _length(self, text: str, words: list[str], source: Source) -> bool:
        return not self._limits.min_words <= len(words) <= self._limits.max_words

    def _ending(self, text: str, words: list[str], source: Source) -> bool:
        return _END.search(text) is None

    def _echo(self, text: str, words: list[str], source: Source) -> bool:
        if _PREFACE.search(text) or _TASK_TALK.search(text):
            return True
        return any(sequence in self._asked for sequence in _sequences(words, COPY_WORDS))

    def _subject(self, text: str, words: list[str], source: Source) -> bool:
        """A pronoun in the subject's place, or no word of the subject's name in the text."""
        if not self._limits.names_subject:
            return False
        name = {word for word in words_of(source.title.partition("(")[0]) if len(word) > 2}
        return _PRONOUN.search(text) is not None or bool(name and name.isdisjoint(words))

    def _copied_share(self, text: str, words: list[str], source: Source) -> bool:
        return source.copied(words, COPY_WORDS) > self._limits.max_copied_share

    def _copied_run(self, text: str, words: list[str], source: Source) -> bool:
        return source.copied(words, self._limits.max_copied_run + 1) > 0

    def _numbers(self, text: str, words: list[str], source: Source) -> bool:
        return not numbers_of(text) <= source.numbers

    def _names(self, text: str, words: list[str], source: Source) -> bool:
        known = [source.has_sequence(name) for name in names_of(text)]
        return bool(known) and sum(known) < self._limits.min_known_names * len(known)


RULES = (
    ("length", Filter._length),
    ("ending", Filter._ending),
    ("echo", Filter._echo),
    ("subject", Filter._subject),
    ("copied share", Filter._copied_share),
    ("copied run", Filter._copied_run),
    ("numbers", Filter._numbers),
    ("names", Filter._names),
)
NEAR_DUPLICATE = "near-duplicate"
"""The last rule, which needs all texts: see near_duplicates."""
