"""Answers -> a corpus of filtered texts, with a manifest that says what was left out and why."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from diffurefill.config import UserError
from diffurefill.data.facts.answers import Answers
from diffurefill.data.facts.ask import Task
from diffurefill.data.facts.filters import LIMITS, NEAR_DUPLICATE, RULES, Filter, Source, candidates
from diffurefill.data.facts.leads import Lead, excerpt
from diffurefill.data.facts.near_duplicates import band_hashes, repeats, same_words_hash
from diffurefill.data.facts.outputs import LICENCE_NOTE, CorpusFile, corpus_file, write_manifest
from diffurefill.data.facts.prompts import MAX_SOURCE_WORDS, instructions

MAX_EXAMPLES = 5
"""Rejected texts shown for each rule."""
_SEQUENCE_WORDS = {"restate": 5, "sentences": 2}


@dataclass
class Rejections:
    """How many texts each rule refused, and a few of them."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[dict[str, str]]] = field(default_factory=dict)

    def add(self, rule: str, source_id: str, text: str) -> None:
        self.counts[rule] += 1
        shown = self.examples.setdefault(rule, [])
        if len(shown) < MAX_EXAMPLES:
            shown.append({"source_id": source_id, "text": text[:500]})

    def report(self, total: int) -> dict[str, Any]:
        """Per rule, in the order of the rules; shares are of all texts."""
        return {
            rule: {
                "count": self.counts[rule],
                "share": round(self.counts[rule] / total, 4) if total else 0.0,
                "examples": self.examples.get(rule, []),
            }
            for rule in (*(name for name, _ in RULES), NEAR_DUPLICATE)
        }


@dataclass
class _Counts:
    """What the first pass finds."""

    rejections: Rejections = field(default_factory=Rejections)
    questions: int = 0
    unanswered: int = 0
    texts: int = 0
    hashes: list[np.ndarray] = field(default_factory=list)


def build_corpus(
    leads: Iterable[Lead], answers: Answers, task: Task, out: Path, facts: dict[str, Any]
) -> dict[str, Any]:
    """Write the texts that pass every rule to `out` (JSONL), in the order of the leads, and the
    manifest beside it: `facts` and all counts. Returns the manifest.

    Of the `sentences` of one lead, those that pass become one text, a line each. The same answers
    give the same bytes.
    """
    found = _Counts()
    # What passes waits on the disk for the last rule, which needs all texts: it may be much.
    with tempfile.TemporaryFile("w+", encoding="utf-8", dir=out.parent) as waiting:
        _filter(leads, answers, task, found, waiting)
        waiting.seek(0)
        with corpus_file(out) as corpus:
            num_kept = _write_kept(waiting, task.style.name, found, corpus)
            _require_some(corpus, found, answers.path)
    return write_manifest(
        out,
        {
            **facts,
            "style": task.style.name,
            "seed": task.seed,
            "prompt_version": task.version,
            "prompts": instructions(task.style, task.num_sentences),
            "temperature": task.style.temperature,
            "max_tokens": task.style.max_tokens,
            "questions": found.questions,
            "unanswered": found.unanswered,
            "texts": found.texts,
            "rejected": found.rejections.report(found.texts),
            "kept_texts": num_kept,
            **corpus.counts(),
            "licence_note": LICENCE_NOTE,
        },
    )


def _filter(
    leads: Iterable[Lead], answers: Answers, task: Task, found: _Counts, waiting: TextIO
) -> None:
    """Every rule but the last; what passes goes to `waiting`, its hashes to `found`."""
    style = task.style.name
    rules = Filter(LIMITS[style], instructions(task.style, task.num_sentences))
    for key, lead in task.questions(leads):
        found.questions += 1
        answer = answers.get(key)
        if answer is None:
            found.unanswered += 1
            continue
        source = Source(lead.title, excerpt(lead.text, MAX_SOURCE_WORDS))
        was_cut = answer["finish_reason"] == "length" and style == "restate"
        for text in candidates(style, answer["text"], answer["finish_reason"]):
            found.texts += 1
            rule = rules.first_failure(text, source, was_cut)
            if rule is not None:
                found.rejections.add(rule, lead.id, text)
                continue
            found.hashes.append(_hashes(style, text, lead.id))
            waiting.write(json.dumps([text, lead.id, lead.title, lead.licence]) + "\n")


def _hashes(style: str, text: str, source_id: str) -> np.ndarray:
    """A restated text may repeat any other; a sentence only those about its lead, since "X was
    born in 1950 in Y" is like many. The same words twice are a repetition anywhere."""
    group = source_id if style == "sentences" else ""
    bands = band_hashes(text, _SEQUENCE_WORDS[style], group)
    return np.append(bands, np.uint64(same_words_hash(text)))


def _write_kept(waiting: Iterable[str], style: str, found: _Counts, corpus: CorpusFile) -> int:
    """The last rule; returns how many texts it leaves."""
    is_repeat = repeats(np.array(found.hashes)) if found.hashes else np.zeros(0, dtype=bool)
    kept: list[list[str]] = []
    num_kept = 0
    for line, repeated in zip(waiting, is_repeat, strict=True):
        text, source_id, *names = json.loads(line)
        if repeated:
            found.rejections.add(NEAR_DUPLICATE, source_id, text)
            continue
        if kept and kept[-1][1] != source_id:
            _write_one(corpus, kept, style)
            kept = []
        kept.append([text, source_id, *names])
        num_kept += 1
    _write_one(corpus, kept, style)
    return num_kept


def _write_one(corpus: CorpusFile, kept: list[list[str]], style: str) -> None:
    """The texts of one lead as one record."""
    if kept:
        _, source_id, title, licence = kept[0]
        corpus.add("\n".join(record[0] for record in kept), source_id, title, licence, style)


def _require_some(corpus: CorpusFile, found: _Counts, answers: Path) -> None:
    if not corpus.records:
        worst = found.rejections.counts.most_common(1)
        why = f"most break the rule {worst[0][0]!r}" if worst else "no question has an answer"
        raise UserError(
            f"none of {found.texts:,} texts passes the filters: {why}; the answers are in {answers}"
        )
