"""The frozen fact probe: sentences as ids, where the answer stands, what it must beat; its file."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from diffurefill.config import UserError
from diffurefill.runtime import require_writable

FORMAT = 1
NUM_DISTRACTORS = 3
CHANCE = 1 / (1 + NUM_DISTRACTORS)


@dataclass(frozen=True)
class Fact:
    """One sentence. `ids`: BOS, the sentence, EOS; the answer's are ids[start:stop]."""

    relation: str
    subject: str
    text: str
    accepted: tuple[str, ...]
    ids: tuple[int, ...]
    start: int
    stop: int
    distractors: tuple[tuple[int, ...], ...]
    """Wrong answers of as many tokens."""

    @property
    def answer(self) -> tuple[int, ...]:
        return self.ids[self.start : self.stop]


@dataclass(frozen=True)
class FactProbe:
    """Facts in the order of their file, for one vocabulary (`Tokenizer.vocabulary_digest`)."""

    facts: Sequence[Fact]
    vocabulary: str

    @cached_property
    def digest(self) -> str:
        """First 12 hex digits of a sha256 over every fact: the probe's version."""
        h = hashlib.sha256()
        for fact in self.facts:
            h.update(_line(fact).encode())
        return h.hexdigest()[:12]

    def by_relation(self) -> dict[str, int]:
        return dict(sorted(Counter(fact.relation for fact in self.facts).items()))

    def save(self, path: Path, about: Mapping[str, Any]) -> None:
        """JSONL: a line about the probe (`about` is for people), then a fact a line. Raises
        UserError where `path` cannot be written."""
        require_writable(path)
        head = {"fact_probe": FORMAT, "vocabulary": self.vocabulary, "digest": self.digest, **about}
        lines = [json.dumps(head, ensure_ascii=False), *map(_line, self.facts)]
        path.write_text("\n".join(lines) + "\n", "utf-8")


def load_fact_probe(path: Path, vocabulary: str | None = None) -> FactProbe:
    """Raises UserError for what is no fact probe of this version, was changed by hand, or is of
    another vocabulary than `vocabulary`."""
    try:
        # Not splitlines: a subject may hold U+2028, which ends no line of JSON.
        lines = filter(str.strip, path.read_text("utf-8").split("\n"))
        head, *records = map(json.loads, lines)
    except OSError as error:
        raise UserError(f"cannot read the fact probe {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise _not_a_probe(path, "it is not JSONL") from None
    if not isinstance(head, dict) or head.get("fact_probe") != FORMAT:
        found = head.get("fact_probe") if isinstance(head, dict) else None
        raise _not_a_probe(path, f"its version is {found}, this one reads {FORMAT}")
    try:
        probe = FactProbe([_fact(record) for record in records], head["vocabulary"])
    except (KeyError, TypeError) as error:
        raise _not_a_probe(path, f"a fact has no {error}") from None
    if not probe.facts or probe.digest != head.get("digest"):
        raise _not_a_probe(path, "its facts are not those that were written")
    if vocabulary is not None and probe.vocabulary != vocabulary:
        raise UserError(
            f"the fact probe {path} is of another vocabulary than the model's: make one with "
            "`diffurefill probe facts --tokenizer MODEL`"
        )
    return probe


def _not_a_probe(path: Path, why: str) -> UserError:
    return UserError(
        f"{path} is not a fact probe ({why}): make one from PopQA's popQA.tsv with "
        "`diffurefill probe facts`"
    )


def _line(fact: Fact) -> str:
    return json.dumps(asdict(fact), ensure_ascii=False)


def _fact(record: Mapping[str, Any]) -> Fact:
    return Fact(
        relation=record["relation"],
        subject=record["subject"],
        text=record["text"],
        accepted=tuple(record["accepted"]),
        ids=tuple(record["ids"]),
        start=record["start"],
        stop=record["stop"],
        distractors=tuple(map(tuple, record["distractors"])),
    )
