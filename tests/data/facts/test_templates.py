"""Facts in sentence patterns, fields as sentences."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path

import pytest

from diffurefill.config import UserError
from diffurefill.data.facts.templates import (
    Fact,
    factbook_sentences,
    filled,
    read_facts,
    read_patterns,
    written_facts,
)

FACTS = Path(__file__).resolve().parents[3] / ".." / "shared" / "data" / "facts"


def lines(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize(
    ("pattern", "subject", "value", "sentence"),
    [
        ("[X] was born in [Y].", "Ada", "London", "Ada was born in London."),
        ("[X] is located in  [Y] .", "Oslo", "Norway", "Oslo is located in Norway."),
        ("the job of [X] is [Y]", "Ada", "poet", "The job of Ada is poet."),
        ("[X] is a [Y].", "Ada", "actor", "Ada is an actor."),
        ("[X] is an [Y].", "Ada", "poet", "Ada is a poet."),
        ("[X] was an [Y]-born man.", "Li", "European", "Li was a European-born man."),
        ("An [Y] is [X]'s job.", "Li", "union man", "A union man is Li's job."),
        ("[Y] owns [X] .", "king of Spain", "prime minister", "Prime minister owns king of Spain."),
        ("[X] is made by [Y].", "iPhone 12", "Apple Inc.", "iPhone 12 is made by Apple Inc."),
        ("[X] is of [Y].", "[Y]", "[X]", "[Y] is of [X]."),
    ],
)
def test_a_pattern_becomes_a_sentence(pattern: str, subject: str, value: str, sentence: str):
    assert filled(pattern, subject, value) == sentence


def test_patterns_that_are_no_sentence_are_left_out(tmp_path: Path):
    fragments = [
        "[X], founded in [Y].",
        "[Y]'s capital, [X].",
        "[Y] player [X] ",
        "[X] that was founded in [Y].",
        "The [Y]-owned [X]",
    ]
    path = lines(
        tmp_path / "patterns.jsonl",
        *({"relation": "r", "pattern": fragment} for fragment in fragments),
        {"relation": "r", "pattern": "[X] label : [Y].", "tense": "-"},
        {"relation": "r", "pattern": "[X] is in [Y].", "tense": "present"},
        {"relation": "r", "pattern": "[X] is in [Y]."},
        {"relation": "s", "pattern": "Officially, [Y] is the language of [X]."},
    )
    assert read_patterns(path) == {
        "r": ["[X] is in [Y]."],
        "s": ["Officially, [Y] is the language of [X]."],
    }


def test_damaged_facts_and_patterns_are_named(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    lines(path, {"relation": "r", "pattern": "[X] is."})
    with pytest.raises(UserError, match=r"'\[X\] is\.' must have \[X\] and \[Y\] once"):
        read_patterns(path)
    lines(path, {"relation": "r", "pattern": "[X], of [Y]."})
    with pytest.raises(UserError, match="has no sentence patterns"):
        read_patterns(path)
    lines(path, {"relation": "r", "sub_label": "a", "obj_label": " "})
    with pytest.raises(UserError, match="a record has no obj_label"):
        list(read_facts(path))


def test_facts_have_an_id_of_their_own_or_one_made_of_their_words(tmp_path: Path):
    record = {"relation": "r", "sub_label": "a", "obj_label": "b"}
    path = lines(
        tmp_path / "a.jsonl", {**record, "uuid": "u"}, record, {**record, "obj_label": "c"}
    )
    first, second, third = read_facts(path)
    assert first == Fact("u", "r", "a", "b")
    assert len({first.id, second.id, third.id}) == 3


def test_each_fact_is_written_with_different_patterns_that_the_seed_chooses():
    patterns = {"r": [f"[X] is {word} [Y]." for word in "abcdef"], "s": ["[Y] has [X]."]}
    facts = [Fact(str(n), "r", f"Subject{n}", "Y") for n in range(200)]
    facts += [Fact("only", "s", "X", "Y"), Fact("none", "t", "X", "Y")]
    sentences = written_facts(facts, patterns, 3, seed=0)
    counts = Counter(sentence.source_id for sentence in sentences)
    assert (counts["0"], counts["199"], counts["only"], counts["none"]) == (3, 3, 1, 0)
    assert len({sentence.text for sentence in sentences}) == len(sentences) == 601
    used = Counter(s.text.split()[2] for s in sentences if s.source_id not in ("only", "none"))
    assert min(used[word] for word in "abcdef") > 60
    assert written_facts(facts, patterns, 3, seed=0) == sentences
    assert written_facts(facts, patterns, 3, seed=1) != sentences


def test_wordings_of_one_fact_do_not_follow_each_other():
    patterns = {"r": [f"[X] is {word} [Y]." for word in "abc"]}
    facts = [Fact(str(n), "r", f"Subject{n}", "Y") for n in range(300)]
    order = [sentence.source_id for sentence in written_facts(facts, patterns, 3, seed=0)]
    places = defaultdict(list)
    for place, source_id in enumerate(order):
        places[source_id].append(place)
    near = sum(min(b - a for a, b in pairwise(p)) < 3 for p in places.values())
    assert near < 15


def test_facts_that_make_one_sentence_make_it_once():
    facts = [Fact("1", "r", "A", "B"), Fact("2", "r", "A", "B")]
    assert [s.source_id for s in written_facts(facts, {"r": ["[X] is [Y]."]}, 3, 0)] == ["1"]


def test_fields_become_sentences(tmp_path: Path):
    fields = [
        ("Energy / Coal / production", "5 tons (2023)", "Coal of Fiji, production: 5 tons (2023)."),
        ("Economy / Industries", "tourism,  sugar", "Industries of Fiji: tourism, sugar."),
        (
            "Economy / Inflation rate / Inflation rate 2022",
            "4.5%",
            "Inflation rate of Fiji, 2022: 4.5%.",
        ),
        (
            "Water / Source / improved: rural",
            "rural: 54.1%",
            "Source of Fiji, improved: rural: 54.1%.",
        ),
        ("Introduction / Background", "Fiji is old.", "Fiji is old."),
        ("Government", "Gal&aacute;&nbsp;1", "Government of Fiji: Galá 1."),
        ("Economy / Debt", "none", None),
        ("Economy / Rate", "dollars per euro -", None),
    ]
    path = lines(
        tmp_path / "a.jsonl",
        *(
            {"file": "f", "country": "Fiji", "field": name, "text": text}
            for name, text, _ in fields
        ),
    )
    sentences = list(factbook_sentences(path))
    assert [s.text for s in sentences] == [text for *_, text in fields if text]
    assert sentences[0][1:] == ("f#Energy / Coal / production", "Fiji")


@pytest.mark.skipif(not FACTS.exists(), reason="the shared fact files are not here")
def test_real_facts_and_patterns_make_sentences():
    patterns = read_patterns(FACTS / "pararel_patterns.jsonl")
    facts = [fact for n, fact in enumerate(read_facts(FACTS / "trex_pararel.jsonl")) if n % 20 == 0]
    sentences = written_facts(facts, patterns, 3, seed=0)
    assert len(patterns) == 39
    assert len(sentences) > 2 * len(facts)
    for sentence in sentences:
        assert sentence.text.endswith((".", "!", "?"))
        assert "[" not in sentence.text
        assert "  " not in sentence.text
        assert sentence.title in sentence.text or sentence.title[1:] in sentence.text
