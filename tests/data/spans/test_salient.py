# ruff: noqa: RUF001 (the letters, quotes and dashes are meant)
"""Which words, numbers and dates are salient."""

from __future__ import annotations

import time
import unicodedata
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffurefill.data.spans.salient import MAX_WORDS, Rule, find_spans

# (text, the spans of S0, the spans of S1 where they differ)
EXAMPLES: list[tuple[str, list[str], list[str] | None]] = [
    ("The capital of France is Paris.", ["France", "Paris"], None),
    (
        "Barack Obama was born in Honolulu, Hawaii, on August 4, 1961.",
        ["Obama", "Honolulu", "Hawaii", "August 4, 1961"],
        ["Barack Obama", "Honolulu", "Hawaii", "August 4, 1961"],
    ),
    ("In 1969 Neil Armstrong walked on the Moon.", ["1969", "Neil Armstrong", "Moon"], None),
    ("I think I'm right, and I know Mary agrees.", ["Mary"], None),
    ('"The dog barked," said John. "Then it ran."', ["John"], None),
    ('He said, "Paris is nice."', [], None),
    ("Mr. Smith met Dr. Jane Doe at St. Louis.", ["Smith", "Dr. Jane Doe", "St. Louis"], None),
    ("J. K. Rowling and J.R.R. Tolkien wrote books.", ["J. K. Rowling", "J.R.R. Tolkien"], None),
    ("The U.S. Army left. Then NASA came.", ["U.S. Army", "NASA"], None),
    (
        "Water boils at 99.97 °C, or 211.9 °F, at 101,325 Pa.",
        ["99.97", "211.9", "101,325", "Pa"],
        None,
    ),
    ("Sales rose 12% to $1,234.56 in the 1990s.", ["12%", "$1,234.56", "1990s"], None),
    ("1. Open the lid.\n2. Add 3 eggs.", ["3"], None),
    ("# Introduction\nThe Roman Empire fell.", ["Roman Empire"], None),
    ("Note: The value is 7.", ["7"], None),
    (
        "Jean-Paul Sartre's mother lived in mid-July with an iPhone 12.",
        ["Sartre", "mid-July", "iPhone 12"],
        ["Jean-Paul Sartre", "mid-July", "iPhone 12"],
    ),
    ("THE QUICK BROWN FOX JUMPS OVER THE LAZY DOG AGAIN.", [], None),
    ("Use `pq.ParquetFile` with buffer_size=1048576, then call Foo.Bar(3).", ["3"], None),
    (
        "See https://Example.com/Page2 or mail Bob@Example.org about COVID-19.",
        ["COVID-19"],
        None,
    ),
    ("Москва — столица России с 1918 года.", ["России", "1918"], None),
    ("東京は日本の首都で、人口は1400万人です。", ["1400"], None),
    ("Wait... Who is Anna?", ["Anna"], None),
    ("(He left.) She met Bob at 12:30.", ["Bob", "12:30"], None),
    (
        "Between 2019-2020 the 21st Century Fox deal closed.",
        ["2019-2020", "21st Century Fox"],
        None,
    ),
    (
        "World War II ended on 2 September 1945.",
        ["War II", "2 September 1945"],
        ["World War II", "2 September 1945"],
    ),
    ("vitamin A, e.g. Retinol, and the letter B.", ["A", "Retinol", "B"], None),
    (
        "AT&T and Johnson & Johnson hired O'Brien.",
        ["Johnson & Johnson", "O'Brien"],
        ["AT&T", "Johnson & Johnson", "O'Brien"],
    ),
]


def found(text: str, rule: Rule = "S1") -> list[str]:
    return [text[start:end] for start, end in find_spans(text, rule)]


@pytest.mark.parametrize(("text", "s0", "s1"), EXAMPLES)
def test_worked_examples(text: str, s0: list[str], s1: list[str] | None):
    assert found(text, "S0") == s0
    assert found(text, "S1") == (s0 if s1 is None else s1)


@pytest.mark.parametrize(
    ("text", "spans"),
    [
        ("he saw\n```\nFoo 12\n```\nand Bar", ["Bar"]),
        ("he saw\n~~~py\nFoo 12\n```\nBaz\n~~~~\nand Bar", ["Bar"]),
        ("he saw\n```\nFoo that never ends\nand Bar", []),
        ("with ``Foo `12` Baz`` and Bar", ["Bar"]),
        ("he said, ``Foo is out'' and ``then Bar''", ["Bar"]),
        ("he said `Foo' and `then Bar'", ["Foo", "Bar"]),
        ("on http://A.org/B(C). Then Bar", ["Bar"]),
        ("on www.Foo.com, by Bar", ["Bar"]),
        ("from J.Doe+X9@Mail-1.Foo.org, by Bar", ["Bar"]),
        ("a @Bar and 5 @ Bar", ["5", "Bar"]),
    ],
)
def test_code_and_addresses_have_no_spans(text: str, spans: list[str]):
    assert found(text) == spans


@pytest.mark.parametrize(
    ("text", "spans"),
    [
        ("on the 4th August, 1961 in Rome", ["4th August, 1961", "Rome"]),
        ("from 7-8 December 1941 on", ["7-8 December 1941"]),
        ("since Sept. 11, 2001 and Aug 1914", ["Sept. 11, 2001", "Aug 1914"]),
        ("May 5, 1821 was a Saturday.", ["May 5, 1821", "Saturday"]),
        ("on 4 August Britain declared", ["4 August", "Britain"]),
        ("in 1914 August came", ["1914", "August"]),
        ("of 45 May flowers", ["45", "May"]),
        ("Neil Armstrong, 1969", ["Neil Armstrong", "1969"]),
        ("on Sunday 2 May 1999, 300 came", ["Sunday 2 May 1999", "300"]),
    ],
)
def test_dates_are_one_span(text: str, spans: list[str]):
    assert found(text) == spans


@pytest.mark.parametrize(
    ("text", "spans"),
    [
        ("the Mediterranean-Black Sea canal", ["Mediterranean-Black Sea"]),
        ("the 3 Musketeers and the 3rd Man", ["3", "Musketeers", "3rd Man"]),
        ("the 20th-century art of Boeing 747", ["20th", "Boeing 747"]),
        ("the 2,000-year-old X", ["2,000", "X"]),
        ("in 1939–1945 and a 3D mp3", ["1939–1945", "3D mp3"]),
        ("a Foo  Bar, Baz/Qux", ["Foo", "Bar", "Baz"]),
        ("for €5, £1.5bn or US$ 7", ["€5", "£1.5bn", "US", "7"]),
        ("the Ångström and Ǆungla", ["Ångström", "Ǆungla"]),
        ("said d’Artagnan’s Éric", ["d’Artagnan", "Éric"]),
    ],
)
def test_words_and_numbers_merge(text: str, spans: list[str]):
    assert found(text) == spans


@pytest.mark.parametrize(
    ("text", "s0", "s1"),
    [
        # A dot after an abbreviation ends no sentence, unless a function word follows.
        ("in the U.S. The end", ["U.S"], ["U.S"]),
        ("by A. A. Milne vs. Pooh", ["A. A. Milne", "Pooh"], ["A. A. Milne", "Pooh"]),
        ("of Foo Inc. Bar left", ["Foo Inc. Bar"], ["Foo Inc. Bar"]),
        ("in June. Rome fell", ["June"], ["June"]),
        # Looking back through quotes, brackets and bullets.
        ("it ended.” (“Rome fell", [], []),
        ("- Rome fell\n  * Rome fell\n> Rome fell\n2) Rome fell", [], []),
        ("he said, “Rome fell”, “Yes,” Rome said", ["Rome"], ["Rome"]),
        ("the end.Then - Rome", ["Rome"], ["Rome"]),
        # Without a blank after its mark no sentence ends, whatever blanks come later.
        ("he called hello!Rome (the end.(Rome) fell", ["Rome", "Rome"], ["Rome", "Rome"]),
        # S1 keeps a word before a name, not before the pronoun; and words with two capitals.
        ("Yesterday I left. Yesterday Rome fell.", ["Rome"], ["Yesterday Rome"]),
        ("NASA left. McDonald left. iPhones left.", ["iPhones"], ["NASA", "McDonald", "iPhones"]),
        ("The Roman army. Rome, Italy.", ["Roman", "Italy"], ["Roman", "Italy"]),
    ],
)
def test_capitals_at_the_start_of_a_sentence(text: str, s0: list[str], s1: list[str]):
    assert (found(text, "S0"), found(text, "S1")) == (s0, s1)


@pytest.mark.parametrize(
    ("text", "spans"),
    [
        ("call Foo(1) or Foo::bar or Foo_bar or List<Int> or A=B", ["1"]),
        ("Sana Saeed( born 1988) acts", ["Sana Saeed", "1988"]),
        ("in $HOME/Foo\\Bar x.Foo .5 a=5 p<5", []),
        ("a b-Foo 3_000 OK", ["b-Foo"]),
    ],
)
def test_what_looks_like_code_is_left(text: str, spans: list[str]):
    assert found(text) == spans


def test_a_long_run_of_capitals_is_dropped():
    name = " ".join(["Foo"] * MAX_WORDS)
    assert found(f"the {name} is") == [name]
    assert found(f"the {name} Foo is") == []


_WORDS = """The He Rome Mr. J. U.S. NASA I OK 4 1961 1st 12% $5 May August 2. is the of and said,
"Then ... - & ( ) ``` # http://X.org a@B.org I'm Foo's Foo( foo_bar"""

_TEXT = st.one_of(
    st.text(max_size=60),
    st.text(alphabet="aBI1 .,'’\"(-&\n$`:#°_=~@/é東\u0301", max_size=60),
    st.lists(
        st.sampled_from([*_WORDS.split(), "\n"]),
        max_size=40,
    ).map(" ".join),
)


@given(_TEXT)
def test_spans_are_sorted_disjoint_and_trimmed(text: str):
    for rule in ("S0", "S1"):
        spans = find_spans(text, rule)
        bounds = [0, *(place for span in spans for place in span), len(text)]
        assert bounds == sorted(bounds)
        for start, end in spans:
            span = text[start:end]
            assert span
            assert span == span.strip()
            assert "\n" not in span
            assert any(unicodedata.category(c) in ("Lu", "Lt", "Nd") for c in span)
        assert all(before[1] <= after[0] for before, after in pairwise(spans))


@given(_TEXT)
def test_s1_covers_what_s0_finds_but_for_runs_that_became_too_long(text: str):
    kept = find_spans(text, "S1")
    for start, end in find_spans(text, "S0"):
        covered = any(low <= start and end <= high for low, high in kept)
        words = text[start:end].replace("-", " ").replace(",", " ").replace(".", " ").split()
        assert covered or len(words) >= MAX_WORDS


_UNITS = [
    *["A", "a", "é", "東", "1", ".", '"', "\n", "`", "@", "(", "$", "-", " ", "\u0301"],
    *["A ", "A.", "A. ", "1,", "1 ", "1.", "a-", "A-", "a.", "``a", "```\n", "`a\n", "``a''"],
    *[
        "@a",
        "a@",
        "a.b@c.",
        "http://.",
        "www.",
        "www.)",
        '" ',
        "1. ",
        "1.\n",
        "\n1",
        "A & ",
        "May ",
    ],
    *["4 May ", "4, ", "A, ", "A::", "A(", "I ", "A\u0301", "1st ", "1a,", "a a ", "A\n", "°A"],
]


@pytest.mark.parametrize("unit", _UNITS)
def test_the_work_is_linear_in_the_length_of_any_text(unit: str):
    """Eight times the text: eight times the work, where a square would be 64 times."""

    def work(num_chars: int) -> float:
        texts = [unit * (num_chars // len(unit)), "x" * num_chars + unit]
        start = time.process_time()
        for text in (*texts, unit * (num_chars // len(unit)) + "1x`"):
            find_spans(text, "S1")
        return time.process_time() - start

    # CPU time, not the wall's; a pause of the machine may spoil one try, but hardly four.
    assert any(work(60_000) < 24 * max(work(7_500), 0.001) for _ in range(4))
