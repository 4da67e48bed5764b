"""`data facts`: a fact corpus of one's own, written by a model or by sentence patterns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from tyro.conf import OmitArgPrefixes, OmitSubcommandPrefixes, Positional

from diffurefill.commands.common import say
from diffurefill.config import UserError

if TYPE_CHECKING:
    from diffurefill.data.facts.leads import LeadFiles
    from diffurefill.data.facts.templates import Sentence


@dataclass(kw_only=True)
class _HeldOut:
    """What all ways to make a corpus share."""

    out: Path
    """The corpus to write, JSONL; its manifest goes beside it."""
    held_out: Path | None = None
    """Subjects to keep out: PopQA's JSONL (field subj), or a name a line."""
    keep_held_out: bool = False
    """Write about them all the same, and say in the manifest how many there are."""
    licence: str = "unknown"
    """Licence of sources that do not name their own, for example "CC BY-SA 4.0"."""
    seed: int = 0
    """Of patterns and orders that are drawn."""

    def subjects(self) -> frozenset[str]:
        from diffurefill.data.facts.leads import read_subjects
        from diffurefill.runtime import require_writable

        if self.keep_held_out and self.held_out is None:
            raise UserError("--keep-held-out counts subjects: name their list with --held-out")
        require_writable(self.out)
        return frozenset() if self.held_out is None else read_subjects(self.held_out)

    def overlap(self, subjects: frozenset[str], num_about: int) -> dict[str, Any]:
        """What the manifest says of the held-out list; `num_about`: sources or sentences."""
        return {
            "held_out": {
                "list": None if self.held_out is None else self.held_out.name,
                "subjects": len(subjects),
                "left_out": 0 if self.keep_held_out else num_about,
                "overlap": num_about if self.keep_held_out else 0,
            }
        }


@dataclass(kw_only=True)
class Write(_HeldOut):
    """Have a model restate documents, or write their facts as sentences, and filter what it wrote.

    Any server with OpenAI's chat completions will do (vLLM, llama.cpp, a hosted one). Answers are
    kept in OUT.answers.jsonl: start it again after a kill, and only what is missing is asked for.
    """

    leads: Positional[tuple[Path, ...]]
    """JSONL or Parquet files, or folders of them: text, and maybe id, title, licence."""
    endpoint: str
    """Where the server is, up to /v1: http://127.0.0.1:8000/v1"""
    model: str
    """The model's name there."""
    style: Literal["restate", "sentences"] = "restate"
    """restate: the document again in other words. sentences: its facts, one a sentence."""
    num_sentences: int = 8
    """Sentences to ask for about each document (style sentences)."""
    limit: int | None = None
    """Use only so many documents."""
    concurrency: int = 16
    """Questions under way at once."""
    timeout_seconds: float = 180.0
    """For one try; a question is tried 6 times."""
    key_variable: str | None = None
    """The environment variable that holds the server's key."""

    def run(self) -> int:
        from diffurefill.data.facts.answers import Answers
        from diffurefill.data.facts.ask import ask_all, task
        from diffurefill.data.facts.corpus import build_corpus
        from diffurefill.data.facts.endpoint import Endpoint, key_from_environment
        from diffurefill.data.facts.leads import LeadFiles

        key = key_from_environment(self.key_variable)
        endpoint = Endpoint(self.endpoint, self.model, key, self.timeout_seconds)
        if min(self.concurrency, self.num_sentences) < 1 or self.timeout_seconds <= 0:
            raise UserError("--concurrency, --num-sentences and --timeout-seconds must be above 0")
        subjects = self.subjects()
        leads = LeadFiles(self.leads, self.licence, self.limit)
        asked = task(self.style, self.seed, self.num_sentences, subjects)
        if self.keep_held_out:
            asked = replace(asked, left_out=frozenset())
        answers = Answers(self.out.with_name(f"{self.out.name}.answers.jsonl"))
        try:
            progress = ask_all(leads, answers, asked, endpoint, self.concurrency, say)
            facts = {"model": self.model, **self.overlap(subjects, _num_about(leads, subjects))}
            made = build_corpus(leads, answers, asked, self.out, facts)
        finally:
            answers.close()
        for rule, found in made["rejected"].items():
            say(f"  {rule:<15} refuses {found['count']:>7,} ({found['share']:.1%})")
        say(_summary(self.out, made, f"{made['kept_texts']:,} of {made['texts']:,} texts pass"))
        if progress.failed:
            say(f"{progress.failed:,} questions got no answer: start again to ask them")
        return 1 if progress.failed else 0


@dataclass(kw_only=True)
class Templates(_HeldOut):
    """Put facts (subject, relation, object) into sentence patterns, without a model."""

    facts: Positional[Path]
    """JSONL: relation, sub_label, obj_label (as T-REx has them)."""
    patterns: Positional[Path]
    """JSONL: relation, pattern such as "[X] was born in [Y]." (as ParaRel has them)."""
    num_patterns: int = 3
    """Different patterns for each fact."""

    def run(self) -> int:
        from diffurefill.data.facts.templates import read_facts, read_patterns, written_facts

        if self.num_patterns < 1:
            raise UserError("--num-patterns must be above 0")
        subjects = self.subjects()
        facts, patterns = list(read_facts(self.facts)), read_patterns(self.patterns)
        sentences = written_facts(facts, patterns, self.num_patterns, self.seed)
        without = sorted({fact.relation for fact in facts} - set(patterns))
        counts = {
            "facts": len(facts),
            "patterns": sum(map(len, patterns.values())),
            "num_patterns": self.num_patterns,
            "seed": self.seed,
            "relations_without_pattern": without,
        }
        return _write_sentences(self, "template", sentences, subjects, counts)


@dataclass(kw_only=True)
class Factbook(_HeldOut):
    """Write the fields of a factbook as sentences, without a model."""

    fields: Positional[Path]
    """JSONL, may be packed with gzip: country, field ("Energy / Coal / production"), text."""

    def run(self) -> int:
        from diffurefill.data.facts.templates import factbook_sentences

        subjects = self.subjects()
        return _write_sentences(
            self, "factbook", list(factbook_sentences(self.fields)), subjects, {}
        )


@dataclass
class Facts:
    """Make a corpus of facts: restated documents, sentences of them, or filled patterns."""

    how: OmitSubcommandPrefixes[
        OmitArgPrefixes[
            Annotated[Write, tyro.conf.subcommand("write")]
            | Annotated[Templates, tyro.conf.subcommand("templates")]
            | Annotated[Factbook, tyro.conf.subcommand("factbook")]
        ]
    ]

    def run(self) -> int:
        return self.how.run()


def _num_about(leads: LeadFiles, subjects: frozenset[str]) -> int:
    from diffurefill.data.facts.leads import subject_name

    return sum(subject_name(lead.title) in subjects for lead in leads) if subjects else 0


def _write_sentences(
    command: _HeldOut,
    style: str,
    sentences: list[Sentence],
    subjects: frozenset[str],
    counts: dict[str, Any],
) -> int:
    from diffurefill.data.facts.outputs import LICENCE_NOTE, corpus_file, write_manifest
    from diffurefill.data.facts.templates import without_subjects

    kept, num_about = without_subjects(sentences, subjects)
    if command.keep_held_out:
        kept = sentences
    if not kept:
        raise UserError("no sentence is left to write: no fact has a pattern, or all are held out")
    with corpus_file(command.out) as corpus:
        for one in kept:
            corpus.add(one.text, one.source_id, one.title, command.licence, style)
    overlap = command.overlap(subjects, num_about)
    made = {"style": style, **counts, **overlap, **corpus.counts(), "licence_note": LICENCE_NOTE}
    say(_summary(command.out, write_manifest(command.out, made), f"{len(kept):,} sentences"))
    return 0


def _summary(out: Path, made: dict[str, Any], what: str) -> str:
    from diffurefill.data.facts.outputs import manifest_path

    return (
        f"facts: {what}; {made['records']:,} records, {made['words']:,} words in {out}; "
        f"manifest {manifest_path(out)}"
    )
