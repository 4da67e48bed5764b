"""The fact probe of a tokenizer: whole answers, fair wrong answers, the same file every time."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from diffurefill.config import UserError
from diffurefill.data.tokens.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from diffurefill.evaluate.facts.build import build_fact_probe, choice_by_frequency
from diffurefill.evaluate.facts.popqa import Question, normalised, read_questions
from diffurefill.evaluate.facts.probe import FactProbe, load_fact_probe

SHARED = Path(__file__).parents[4] / "shared" / "data"
CITIES = ["Rome", "Lima", "Oslo", "Cairo", "Paris", "Quito", "Berlin", "Madrid", "Vienna", "Athens"]
JOBS = ["actor", "baker", "judge", "poet", "nurse"]


def questions() -> list[Question]:
    born = [
        Question("place of birth", f"Person {n}", CITIES[n % 10], (CITIES[n % 10], "Eternal City"))
        for n in range(40)
    ]
    jobs = [Question("occupation", f"Person {n}", JOBS[n % 5], (JOBS[n % 5],)) for n in range(30)]
    return born + jobs


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    texts = [q.sentence(q.answer) for q in questions()]
    return train_tokenizer(texts, 500)


def build(tokenizer: Tokenizer, asked: list[Question], **options: int) -> FactProbe:
    return build_fact_probe(asked, tokenizer, **{"min_per_relation": 1, **options})[0]


def test_the_answer_is_where_the_fact_says(tokenizer: Tokenizer) -> None:
    for fact in build(tokenizer, questions()).facts:
        assert fact.ids[0] == tokenizer.bos_id
        assert fact.ids[-1] == tokenizer.eos_id
        assert tokenizer.decode(fact.ids) == fact.text
        assert tokenizer.decode_inner(fact.answer).strip() == fact.accepted[0]


def test_wrong_answers_are_as_long_different_and_not_accepted(tokenizer: Tokenizer) -> None:
    for fact in build(tokenizer, questions()).facts:
        assert len(fact.distractors) == 3
        assert {len(wrong) for wrong in fact.distractors} == {len(fact.answer)}
        texts = [normalised(tokenizer.decode_inner(wrong)) for wrong in fact.distractors]
        assert len({*texts, *map(normalised, fact.accepted)}) == 3 + len(fact.accepted)
        pool = JOBS if fact.relation == "occupation" else map(str.lower, CITIES)
        assert set(texts) <= set(pool)


def test_relations_take_turns(tokenizer: Tokenizer) -> None:
    assert build(tokenizer, questions(), num_facts=20).by_relation() == {
        "occupation": 10,
        "place of birth": 10,
    }
    counts = build(tokenizer, questions(), num_facts=65).by_relation()
    assert counts == {"occupation": 30, "place of birth": 35}


def test_a_small_relation_is_left_out_and_counted(tokenizer: Tokenizer) -> None:
    probe, left_out = build_fact_probe(questions(), tokenizer, num_facts=20, min_per_relation=35)
    assert probe.by_relation() == {"place of birth": 20}
    assert left_out["small_relations"] == {"occupation": 30}
    assert left_out["not_needed"] == 20


def test_a_question_of_two_meanings_is_left_out(tokenizer: Tokenizer) -> None:
    twice = Question("place of birth", "Person 0", "Oslo", ("Oslo",))
    probe, left_out = build_fact_probe([*questions(), twice], tokenizer, min_per_relation=1)
    born = [f for f in probe.facts if f.relation == "place of birth"]
    assert "Person 0" not in [f.subject for f in born]
    assert left_out["ambiguous"] == 2


def test_too_few_wrong_answers_are_taken_from_the_same_type(tokenizer: Tokenizer) -> None:
    """Three capitals leave two wrong ones: the third is a place of birth. Colours have no kin."""
    capitals = [Question("capital", f"Land {n}", CITIES[n], (CITIES[n],)) for n in range(3)]
    colours = [Question("color", f"Club {n}", c, (c,)) for n, c in enumerate(["red", "blue"])]
    probe, left_out = build_fact_probe(
        [*questions(), *capitals, *colours], tokenizer, min_per_relation=1
    )
    assert probe.by_relation()["capital"] == 3
    assert "color" not in probe.by_relation()
    assert left_out["few_distractors"] == 2


def test_frequency_alone_is_chance_only_where_answers_are_equally_common(
    tokenizer: Tokenizer,
) -> None:
    found = choice_by_frequency(build(tokenizer, questions()), questions(), tokenizer)
    assert found == {"all": 0.25, "occupation": 0.25, "place of birth": 0.25}
    jobs = [
        Question("occupation", f"Person {n}", job, (job,))
        for n, job in enumerate([*["actor"] * 12, *JOBS[1:]])
    ]
    skewed = choice_by_frequency(build(tokenizer, jobs), jobs, tokenizer)
    # Right where it is the answer, wrong where it is beside it, and a guess where it is not.
    assert 12 / 16 <= skewed["occupation"] <= 12 / 16 + 4 / 16 * 0.25
    assert skewed["all"] == skewed["occupation"]


@pytest.mark.parametrize("num_facts", [0, -1])
def test_a_probe_of_no_facts_is_refused(tokenizer: Tokenizer, num_facts: int) -> None:
    with pytest.raises(UserError, match="--num-facts must be at least 1"):
        build(tokenizer, questions(), num_facts=num_facts)


def test_no_usable_fact_is_said(tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match="no fact"):
        build(tokenizer, questions()[:2])


def test_the_probe_is_the_same_every_time_whatever_the_order_of_rows(tokenizer: Tokenizer) -> None:
    first, again = (build(tokenizer, asked) for asked in (questions(), questions()))
    assert first.digest == again.digest
    assert build(tokenizer, questions(), seed=1).digest != first.digest


def test_the_file_round_trips_and_is_not_read_when_changed(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    probe, path = build(tokenizer, questions()), tmp_path / "facts.jsonl"
    probe.save(path, {"source": "here"})
    with pytest.raises(UserError, match="is a folder"):
        probe.save(tmp_path, {})
    again = load_fact_probe(path, tokenizer.vocabulary_digest)
    assert (again.digest, list(again.facts)) == (probe.digest, list(probe.facts))
    with pytest.raises(UserError, match="another vocabulary"):
        load_fact_probe(path, "0" * 12)
    lines = path.read_text().splitlines()
    fact = json.loads(lines[1])
    fact["distractors"][0], fact["distractors"][1] = fact["distractors"][1], fact["distractors"][0]
    path.write_text("\n".join([lines[0], json.dumps(fact), *lines[2:]]))
    with pytest.raises(UserError, match="not those that were written"):
        load_fact_probe(path)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n"])
def test_any_line_end_is_read_and_other_separators_are_text(
    tokenizer: Tokenizer, tmp_path: Path, end: str
) -> None:
    facts = build(tokenizer, questions()).facts
    odd = replace(facts[0], subject="A\u2028B\u2029C\x85D\x0cE")
    probe, path = FactProbe([odd, *facts[1:]], tokenizer.vocabulary_digest), tmp_path / "f.jsonl"
    probe.save(path, {"source": "A\u2028B"})
    path.write_bytes(path.read_bytes().replace(b"\n", end.encode()))
    assert load_fact_probe(path).facts[0] == odd


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hello", "not JSONL"),
        ("", "not JSONL"),
        ("[" * 100_000, "not JSONL"),
        ('{"fact_probe": 99}', "version is 99, this one reads 1"),
        ("[1]", "version is None"),
        ('{"fact_probe": 1, "vocabulary": "v"}\n{"ids": [1]}', "a fact has no"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "f.jsonl").write_text(text)
    with pytest.raises(UserError, match=message):
        load_fact_probe(tmp_path / "f.jsonl")
    with pytest.raises(UserError, match="cannot read"):
        load_fact_probe(tmp_path / "none.jsonl")


@pytest.mark.skipif(not SHARED.exists(), reason="needs the shared data")
def test_popqa_gives_the_report_s_1050_facts_with_its_tokenizer() -> None:
    asked = read_questions(SHARED / "facts" / "popqa_subset.jsonl")
    tokenizer = load_tokenizer(SHARED / "tokenizer" / "minicpm4")
    probe, left_out = build_fact_probe(asked, tokenizer)
    assert len(probe.facts) == 1050
    counts = probe.by_relation()
    assert len(counts) == 15
    assert max(counts.values()) == 76
    assert left_out["not_whole_pieces"] == 0
    assert Counter(len(fact.distractors) for fact in probe.facts) == {3: 1050}
