"""Fact sentences without a model: facts put into sentence patterns, and fields of a factbook."""

from __future__ import annotations

import hashlib
import html
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from diffurefill.config import UserError
from diffurefill.data.facts.leads import json_records, subject_name
from diffurefill.runtime import philox

# Patterns that are no whole sentence: "[X], founded in [Y].", "[Y] player [X]", "The [Y]-owned [X]"
_FRAGMENT = re.compile(
    r"\[[XY]\](?:'s [\w ]+)?,|\[[XY]\] (?:owner|player|musicians|that)\b|the \[Y\]-owned", re.I
)
_WHOLE_TENSES = ("present", "past", "future")
_ARTICLE = re.compile(r"\b[Aa]n?(?= \[[XY]\])")
_SOUNDS_LIKE_A_CONSONANT = re.compile(
    r"(?:eu|ew|one\b|once\b|uni(?!n|m)|us[eu]|ut[io]|ub[iu])", re.I
)
_EMPTY_FIELDS = frozenset(("", "none", "na", "n/a", "-"))
_UNFINISHED = (":", "-", "\u2013", ",", ";")


class Fact(NamedTuple):
    id: str
    relation: str
    subject: str
    object: str


class Sentence(NamedTuple):
    text: str
    source_id: str
    title: str


def read_facts(path: Path) -> Iterator[Fact]:
    """Facts of a JSONL file with `relation`, `sub_label`, `obj_label` and maybe `uuid` or `id`."""
    for record in json_records(path):
        names = [_field(record, name, path) for name in ("relation", "sub_label", "obj_label")]
        known = record.get("uuid") or record.get("id")
        fact_id = known or hashlib.sha256(json.dumps(names).encode()).hexdigest()
        yield Fact(str(fact_id), *names)


def read_patterns(path: Path) -> dict[str, list[str]]:
    """The whole sentences among the patterns of a JSONL file, by relation: `pattern` has [X] and
    [Y] once each; where `tense` is given, only whole sentences have a tense."""
    patterns: dict[str, list[str]] = {}
    for record in json_records(path):
        pattern = _field(record, "pattern", path).strip()
        if pattern.count("[X]") != 1 or pattern.count("[Y]") != 1:
            raise UserError(f"{path}: the pattern {pattern!r} must have [X] and [Y] once each")
        is_whole = record.get("tense", "present") in _WHOLE_TENSES
        if is_whole and not _FRAGMENT.match(pattern):
            own = patterns.setdefault(_field(record, "relation", path), [])
            if pattern not in own:
                own.append(pattern)
    if not patterns:
        raise UserError(f"{path} has no sentence patterns")
    return patterns


def _field(record: Mapping[str, Any], name: str, path: Path) -> str:
    value = record.get(name)
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{path}: a record has no {name}")
    return value.strip()


def filled(pattern: str, subject: str, value: str) -> str:
    """`pattern` as a sentence: [X] is the subject, [Y] the value; articles and full stop fitted."""
    pattern = re.sub(r"\s+(?=[.,])", "", re.sub(r"\s+", " ", pattern)).rstrip(".")
    names = {"[X]": subject, "[Y]": value}
    pattern = _ARTICLE.sub(
        lambda a: _article(a[0], names[pattern[a.end() + 1 : a.end() + 4]]), pattern
    )
    text = re.sub(r"\[[XY]\]", lambda place: names[place[0]], pattern)
    first = text.partition(" ")[0]
    # "iPhone" keeps its small letter.
    text = text[0].upper() + text[1:] if first.islower() else text
    return text if text.endswith((".", "!", "?")) else text + "."


def _article(written: str, noun: str) -> str:
    vowel = noun[:1].casefold() in "aeiou" and not _SOUNDS_LIKE_A_CONSONANT.match(noun)
    return written[0] + ("n" if vowel else "")


def written_facts(
    facts: Iterable[Fact], patterns: Mapping[str, Sequence[str]], num_patterns: int, seed: int
) -> list[Sentence]:
    """Each fact in `num_patterns` different patterns (all, where its relation has fewer), in an
    order in which the wordings of one fact lie apart. The same seed gives the same sentences."""
    sentences: dict[str, Sentence] = {}
    for fact in facts:
        own = patterns.get(fact.relation, ())
        chosen = philox("pattern", seed, fact.id).permutation(len(own))[:num_patterns]
        for number in chosen:
            text = filled(own[number], fact.subject, fact.object)
            sentences.setdefault(text, Sentence(text, fact.id, fact.subject))
    order = philox("order", seed).permutation(len(sentences))
    found = list(sentences.values())
    return [found[place] for place in order]


def factbook_sentences(path: Path) -> Iterator[Sentence]:
    """The fields of a JSONL file {file, country, field, text} as "Field of Country: text."

    `field` is a path such as "Energy / Coal / production". Paragraphs stand as they are; fields
    that say nothing ("none") or break off are left out.
    """
    for record in json_records(path):
        country, field = (_field(record, name, path) for name in ("country", "field"))
        text = " ".join(html.unescape(str(record.get("text") or "")).split())
        if text.casefold() in _EMPTY_FIELDS or text.endswith(_UNFINISHED):
            continue
        source_id = f"{record.get('file') or country}#{field}"
        yield Sentence(_field_sentence(country, field, text), source_id, country)


def _field_sentence(country: str, field: str, text: str) -> str:
    """ "Energy / Coal / production" -> "Coal of France, production: 5 tons (2023)." """
    section, *names = field.split(" / ")
    if section == "Introduction":
        return text if text.endswith(".") else text + "."
    topic, details = (names[0], names[1:]) if names else (section, [])
    # "Inflation rate / Inflation rate 2022" says its topic twice, "rural: rural: 5%" its detail.
    details = [detail.removeprefix(topic).strip(" :-") or detail for detail in details]
    for detail in reversed(details):
        last = detail.rpartition(": ")[2]
        text = text.removeprefix(f"{last}:").strip() or text
    label = ", ".join([f"{topic} of {country}", *details])
    return f"{label}: {text}" if text.endswith((".", "!", "?")) else f"{label}: {text}."


def without_subjects(
    sentences: Iterable[Sentence], subjects: frozenset[str]
) -> tuple[list[Sentence], int]:
    """The sentences about other subjects, and how many were about these."""
    found = list(sentences)
    kept = [one for one in found if subject_name(one.title) not in subjects]
    return kept, len(found) - len(kept)
