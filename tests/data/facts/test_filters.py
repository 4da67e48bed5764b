"""Each rule refuses what it is for, and nothing beside it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffurefill.data.facts.filters import (
    LIMITS,
    RULES,
    Filter,
    Source,
    candidates,
    names_of,
    numbers_of,
    words_of,
)

TITLE = "Marie Curie (scientist)"
LEAD = (
    "Maria Salomea Skłodowska-Curie, born on 7 November 1867 in Warsaw, was a physicist and "
    "chemist who conducted pioneering research on radioactivity. She was the first woman to win "
    "a Nobel Prize, the first person to win it twice, in 1903 and 1911, and the first woman to "
    "become a professor at the University of Paris. About 1,600 years is the half-life of "
    "radium-226, which she discovered with her husband Pierre Curie."
)
GOOD = (
    "Two Nobel Prizes went to Marie Curie, who came from Warsaw: one in 1903, another in 1911. "
    "Nobody had received two before. Born in 1867, she studied radioactivity, found radium "
    "together with Pierre Curie, and taught in Paris, where no woman had held a chair until then."
)
ASKED = ("Tell all facts of the source below in connected paragraphs of some words.",)


def failure(text: str, style: str = "restate", was_cut: bool = False) -> str | None:
    rules = Filter(LIMITS[style], ASKED)
    return rules.first_failure(text, Source(TITLE, LEAD), was_cut)


def test_a_good_text_passes():
    assert failure(GOOD) is None


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("Curie won two prizes.", "length"),
        (GOOD * 20, "length"),
        (GOOD.removesuffix("."), "ending"),
        (f"Here is the text: {GOOD}", "echo"),
        (f"Sure! {GOOD}", "echo"),
        (f"{GOOD} As an AI, I know no more.", "echo"),
        (f"{GOOD} The source does not say more.", "echo"),
        (f"{ASKED[0]} {GOOD}", "echo"),
        (LEAD, "copied share"),
        (f"{GOOD} {LEAD.partition('. ')[0]}.", "copied share"),
        (GOOD.replace("1867", "1868"), "numbers"),
        (GOOD + " She wrote 32 papers.", "numbers"),
        (
            GOOD.replace("Nobel Prizes", "Fields Medals").replace("Warsaw", "Cracow")
            + " In Berlin she met Lise Meitner.",
            "names",
        ),
    ],
)
def test_what_each_rule_of_restated_texts_refuses(text: str, rule: str):
    assert failure(text) == rule


def test_thirteen_words_in_a_row_are_a_copy_and_twelve_are_none():
    prize = "woman to win a Nobel Prize, the first person to win it twice, in 1903"
    run = prize.split()
    padding = " ".join(GOOD.replace(",", " and").split() * 2).removesuffix(".")
    twelve, thirteen = " ".join(run[:12]), " ".join(run[:13])
    assert (len(words_of(twelve)), len(words_of(thirteen))) == (12, 13)
    assert failure(f"{padding} as the {twelve}.") is None
    assert failure(f"{padding} as the {thirteen}.") == "copied run"


def test_a_text_that_was_cut_at_the_token_limit_is_unfinished():
    assert failure(GOOD, was_cut=True) == "ending"


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("Marie Curie was born in Warsaw.", None),
        ("In 1903, Curie won a prize!", None),
        ("Curie won twice.", "length"),
        ("Marie Curie " + "very " * 60 + "much.", "length"),
        ("Marie Curie was born in Warsaw", "ending"),
        ("Here is a sentence about Curie.", "echo"),
        ("She was born in Warsaw, says Curie.", "subject"),
        ('"It was radium," Marie Curie said.', "subject"),
        ("Radium was discovered in Paris by 1911.", "subject"),
        (
            "Curie was the first woman to become a professor at the University of Paris.",
            "copied run",
        ),
        ("Marie Curie was born in 1868.", "numbers"),
        ("Marie Curie worked with Albert Einstein.", "names"),
    ],
)
def test_what_each_rule_of_sentences_refuses(text: str, rule: str | None):
    assert failure(text, "sentences") == rule


def test_sentences_about_an_unnamed_subject_need_not_name_it():
    rules = Filter(LIMITS["sentences"], ())
    assert rules.first_failure("In Warsaw she was born.", Source("", LEAD), False) is None


def test_every_rule_is_tested_above():
    assert [name for name, _ in RULES] == [
        "length",
        "ending",
        "echo",
        "subject",
        "copied share",
        "copied run",
        "numbers",
        "names",
    ]


def test_the_numbers_of_a_source_are_its_digits_and_small_number_words():
    source = Source("", "In 1,600 days, twelve of the ninety came third; 2.5% paid $1,234.56.")
    assert source.numbers == {"1600", "12", "90", "3", "2.5", "1234.56"}
    assert numbers_of("1600 and 1,600 and 1990s and 21st, 12:30") == {
        "1600",
        "1990",
        "21",
        "12",
        "30",
    }
    assert numbers_of("1,2 and 1,2345") == {"1", "2", "2345"}


def test_names_are_parts_of_spans_without_their_numbers():
    text = "in Rome on 4 August 1961 the iPhone 12 of Pope John Paul II and World War I"
    assert list(names_of(text)) == [
        ["rome"],
        ["august"],
        ["iphone"],
        ["pope", "john", "paul", "ii"],
        ["world", "war"],
    ]


def test_a_name_must_stand_in_the_source_as_a_whole():
    source = Source("Hannah Arendt", "Hannah lived in New York.")
    assert source.has_sequence(["new", "york"])
    assert not source.has_sequence(["ann"])
    assert not source.has_sequence(["hannah", "lived", "york"])


def test_dates_may_be_written_in_another_order():
    text = "The seventh of November is when Marie Curie was born, on November 7, 1867."
    assert failure(text, "sentences") is None


def test_candidates():
    text = "<think>\nHmm.\n</think>\n\n- One is.\n2. Two is.\n\n(3) Three is.\n• Four"
    assert candidates("sentences", text, "stop") == ["One is.", "Two is.", "Three is.", "Four"]
    assert candidates("sentences", text, "length") == ["One is.", "Two is.", "Three is."]
    assert candidates("restate", "<think>Hmm.</think> One\n\n- two. \n", "length") == [
        "One\n\n- two."
    ]
    assert candidates("sentences", " \n", "stop") == []


_SOME_WORDS = st.lists(st.sampled_from(["a", "b", "c"]), max_size=12)


@given(_SOME_WORDS, _SOME_WORDS, st.integers(1, 4))
def test_the_copied_share_is_what_a_plain_search_finds(own: list[str], other: list[str], size: int):
    places = range(len(own) - size + 1)
    hits = [
        any(other[j : j + size] == own[i : i + size] for j in range(len(other))) for i in places
    ]
    plain = sum(hits) / len(hits) if hits else 0.0
    assert Source("", " ".join(other)).copied(own, size) == plain
