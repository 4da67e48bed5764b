"""PopQA's questions -> the frozen fact probe of one tokenizer. Deterministic in (questions, seed).

Each step may drop a fact, and says how many: a sentence of two meanings, an answer that is not
whole pieces, too few wrong answers of its length. Source: spec algorithms 4.2.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from diffurefill.config import UserError
from diffurefill.data.tokens.tokenizer import Tokenizer
from diffurefill.evaluate.facts.popqa import Question, answer_type, normalised
from diffurefill.evaluate.facts.probe import NUM_DISTRACTORS, Fact, FactProbe
from diffurefill.runtime import philox

NUM_FACTS = 1050
"""As the report's and the card's probe."""
MIN_PER_RELATION = 35
"""A relation with fewer usable facts is left out: PopQA's color has 34 questions, and without it
1,050 facts are 15 relations of 70."""


@dataclass(frozen=True)
class _Sentence:
    """A question with an answer, as ids with BOS and EOS; the answer's are ids[start:stop]."""

    question: Question
    ids: tuple[int, ...]
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


Pools = Mapping[tuple[str, int], Sequence[Question]]
"""Questions by (relation or answer type, tokens of the answer)."""


def build_fact_probe(
    questions: Iterable[Question],
    tokenizer: Tokenizer,
    *,
    num_facts: int = NUM_FACTS,
    min_per_relation: int = MIN_PER_RELATION,
    seed: int = 0,
) -> tuple[FactProbe, dict[str, Any]]:
    """The probe, and what was left out of it. Raises UserError where no fact is usable
    or none is asked for."""
    if num_facts < 1:
        raise UserError("--num-facts must be at least 1")
    asked = list(questions)
    clear = _unambiguous(asked)
    found = [_sentence(tokenizer, question, question.answer) for question in clear]
    sentences = [sentence for sentence in found if sentence is not None]
    pools = _pools(sentences)
    usable: dict[str, list[Fact]] = defaultdict(list)
    for sentence in sentences:
        fact = _fact(tokenizer, sentence, pools, seed)
        if fact is not None:
            usable[fact.relation].append(fact)
    large = {name: facts for name, facts in usable.items() if len(facts) >= min_per_relation}
    chosen = list(itertools.islice(_in_turn(large, seed), num_facts))
    if not chosen:
        raise UserError("no fact of PopQA can be asked with this tokenizer and these questions")
    left_out = {
        "ambiguous": len(asked) - len(clear),
        "not_whole_pieces": len(clear) - len(sentences),
        "few_distractors": len(sentences) - sum(map(len, usable.values())),
        "small_relations": {n: len(usable[n]) for n in sorted(usable.keys() - large.keys())},
        "not_needed": sum(map(len, large.values())) - len(chosen),
    }
    return FactProbe(chosen, tokenizer.vocabulary_digest), left_out


def choice_by_frequency(
    probe: FactProbe, questions: Iterable[Question], tokenizer: Tokenizer
) -> dict[str, float]:
    """Share of right choices by relation, and of `all`, of one who knows how common each answer is
    among the relation's questions and nothing of the subjects: what knowledge must be above. Where
    the most common choices are equal, one of them at random."""
    sentences = [_sentence(tokenizer, question, question.answer) for question in questions]
    times = Counter((s.question.relation, s.ids[s.start : s.stop]) for s in sentences if s)
    shares: dict[str, list[float]] = defaultdict(list)
    for fact in probe.facts:
        own, *others = (times[fact.relation, ids] for ids in (fact.answer, *fact.distractors))
        share = 1 / (1 + others.count(own)) if own >= max(others) else 0.0
        shares[fact.relation].append(share)
        shares["all"].append(share)
    return {name: round(sum(found) / len(found), 4) for name, found in sorted(shares.items())}


def _unambiguous(questions: Sequence[Question]) -> list[Question]:
    """Without questions that are asked twice: two people of one name have two fathers."""
    times = Counter((q.subject, q.relation) for q in questions)
    return [q for q in questions if times[q.subject, q.relation] == 1]


def _sentence(tokenizer: Tokenizer, question: Question, answer: str) -> _Sentence | None:
    """None where the answer is not whole pieces, a space before it aside."""
    text = question.sentence(answer)
    ids = tokenizer.encode(text)
    ends = tokenizer.byte_ends(ids, text)
    if ends is None:
        return None
    first = len(f"{question.stem} ".encode())
    last = first + len(answer.encode())
    start, stop = int(np.searchsorted(ends, first, side="right")), int(np.searchsorted(ends, last))
    begins = int(ends[start - 1]) if start else 0
    if begins < first - 1 or stop >= len(ends) or ends[stop] != last:
        return None
    return _Sentence(question, tuple(tokenizer.wrap(ids)), start + 1, stop + 2)


def _pools(sentences: Sequence[_Sentence]) -> Pools:
    pools: dict[tuple[str, int], list[Question]] = defaultdict(list)
    for sentence in sentences:
        relation = sentence.question.relation
        for kind in dict.fromkeys((relation, f"type {answer_type(relation)}")):
            pools[kind, sentence.num_tokens].append(sentence.question)
    return pools


def _fact(tokenizer: Tokenizer, gold: _Sentence, pools: Pools, seed: int) -> Fact | None:
    """None where there are not enough wrong answers of this length."""
    question, relation = gold.question, gold.question.relation
    taken = {normalised(answer) for answer in (*question.accepted, question.answer)}
    distractors: list[tuple[int, ...]] = []
    for kind in (relation, f"type {answer_type(relation)}"):
        for other in _shuffled(pools[kind, gold.num_tokens], seed, kind, question.subject):
            if len(distractors) == NUM_DISTRACTORS:
                break
            wrong = _in_place(tokenizer, gold, other.answer)
            if wrong is not None and normalised(other.answer) not in taken:
                taken.add(normalised(other.answer))
                distractors.append(wrong)
    if len(distractors) < NUM_DISTRACTORS:
        return None
    return Fact(
        relation=relation,
        subject=question.subject,
        text=question.sentence(question.answer),
        accepted=tuple(dict.fromkeys((question.answer, *question.accepted))),
        ids=gold.ids,
        start=gold.start,
        stop=gold.stop,
        distractors=tuple(distractors),
    )


def _shuffled(pool: Sequence[Question], seed: int, kind: str, subject: str) -> Iterator[Question]:
    """Every question of the pool with equal chance, so that a frequent answer comes often among the
    wrong ones too, though once a fact at most (`choice_by_frequency`)."""
    order = philox(seed, "facts", kind, subject).permutation(len(pool))
    return (pool[i] for i in order)


def _in_place(tokenizer: Tokenizer, gold: _Sentence, answer: str) -> tuple[int, ...] | None:
    """The ids of another answer in the same sentence, if nothing else of it changes."""
    wrong = _sentence(tokenizer, gold.question, answer)
    if wrong is None or (wrong.start, wrong.stop) != (gold.start, gold.stop):
        return None
    if wrong.ids[: wrong.start] != gold.ids[: gold.start]:
        return None
    if wrong.ids[wrong.stop :] != gold.ids[gold.stop :]:
        return None
    return wrong.ids[wrong.start : wrong.stop]


def _in_turn(usable: Mapping[str, Sequence[Fact]], seed: int) -> Iterator[Fact]:
    """A fact of each relation in turn, until all have ended: any start is as even as can be."""
    shuffled = []
    for relation in sorted(usable):
        facts = sorted(usable[relation], key=lambda fact: fact.subject)
        order = philox(seed, "facts", "chosen", relation).permutation(len(facts))
        shuffled.append([facts[i] for i in order])
    for one_of_each in itertools.zip_longest(*shuffled):
        yield from (fact for fact in one_of_each if fact is not None)
