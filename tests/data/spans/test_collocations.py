import itertools
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffurefill.commands import collocations as commands
from diffurefill.config import UserError
from diffurefill.data.spans.collocations import Collocations, build_collocations
from diffurefill.data.spans.ngrams import RUN

LIST = Collocations(("a b", "b c", "c d", "a b c", "c d e f g", "New York"), {})
words = st.sampled_from(["a", "b", "c", "d", "e", "f", "g", ","])
any_words = st.lists(words, max_size=40).map(" ".join)


def spoken(seed: int, num_words: int = 4_000) -> str:
    """Words at random, with some sequences that come again and again."""
    draw = random.Random(seed)
    fixed = ["New York", "in front of", "on the other hand", "as a matter of fact"]
    parts: list[str] = []
    while len(parts) < num_words:
        parts.append(draw.choice(fixed) if draw.random() < 0.2 else f"w{draw.randrange(60)}")
    return " ".join(parts)


TEXTS = [spoken(seed) for seed in range(4)]
WHOLE = build_collocations(TEXTS, size=4_000, min_count=5)


# --- spans ----------------------------------------------------------------------------------------


def found_in(text: str) -> list[str]:
    return [text[start:end] for start, end in LIST.find_spans(text)]


@pytest.mark.parametrize(
    ("text", "spans"),
    [
        ("x a b x", ["a b"]),
        ("x a b c x", ["a b c"]),  # the longest wins over what it holds
        ("a, b and a  b\nc", ["a  b\nc"]),
        ("new york, New York", ["New York"]),  # as written
        ("New Yorks", []),
        ("", []),
    ],
)
def test_spans_are_the_ranges_of_entries(text: str, spans: list[str]) -> None:
    assert found_in(text) == spans


def test_entries_that_overlap_are_resolved_at_random_by_the_text_alone() -> None:
    texts = [f"a b c d {'x' * n}" for n in range(40)]
    outcomes = [tuple(found_in(text)) for text in texts]
    assert set(outcomes) == {("a b c",), ("a b", "c d")}
    assert outcomes == [tuple(found_in(text)) for text in texts]


@given(any_words)
def test_spans_are_entries_disjoint_in_order_and_leave_no_entry_out(text: str) -> None:
    spans = LIST.find_spans(text)
    assert all(" ".join(text[a:b].split()) in LIST.entries for a, b in spans)
    assert all(one[1] < other[0] for one, other in itertools.pairwise(spans))
    masked = list(text)
    for a, b in spans:
        masked[a:b] = "," * (b - a)
    rest = "".join(masked)
    for run in RUN.findall(rest):
        run_words = run.split()
        for a in range(len(run_words)):
            for b in range(a + 2, len(run_words) + 1):
                assert " ".join(run_words[a:b]) not in LIST.entries


def test_a_long_text_of_overlapping_entries_is_resolved_in_good_time() -> None:
    text = "a b c d e f g " * 20_000
    spans = LIST.find_spans(text)
    assert len(spans) >= 20_000


# --- coverage -------------------------------------------------------------------------------------


def test_coverage_is_the_share_of_words_inside_an_entry() -> None:
    assert LIST.coverage(["x a b c d x", "New York x x"]) == (4 + 2) / 10
    assert LIST.coverage(["", "..."]) == 0.0


def test_coverage_grows_with_the_list_and_is_what_the_list_says_of_itself() -> None:
    before = 0.0
    for size in (8, 20, 50, 150, 400):
        made = build_collocations(TEXTS, size=size, min_count=5)
        assert made.coverage(TEXTS) == made.facts["coverage"]
        assert made.facts["coverage"] >= before
        before = made.facts["coverage"]
    assert before > 0.2


def test_a_wanted_coverage_is_reached_by_the_smallest_list() -> None:
    made = build_collocations(TEXTS, coverage=0.3, min_count=5)
    assert made.coverage(TEXTS) >= 0.3
    smaller = build_collocations(TEXTS, size=made.facts["size"] - 1, min_count=5)
    assert smaller.coverage(TEXTS) < 0.3


# --- the list -------------------------------------------------------------------------------------


def lengths(made: Collocations) -> list[int]:
    return [sum(entry.count(" ") + 1 == n for entry in made.entries) for n in (2, 3, 4, 5)]


def test_half_are_bigrams_a_quarter_trigrams_an_eighth_each_of_four_and_five_words() -> None:
    assert lengths(build_collocations(TEXTS, size=160, min_count=3)) == [80, 40, 20, 20]


def test_the_best_of_each_length_come_first() -> None:
    assert "New York" in WHOLE.bigrams(12)
    top = {entry for entry in WHOLE.entries[:40] if " " in entry}
    assert {"in front of", "on the other hand", "as a matter of fact"} <= top


def test_a_smaller_list_is_the_beginning_of_a_larger_one() -> None:
    small = build_collocations(TEXTS, size=40, min_count=5)
    large = build_collocations(TEXTS, size=80, min_count=5)
    assert set(small.entries) < set(large.entries)
    assert large.bigrams(10) == small.bigrams(10)


def test_squared_puts_frequent_sequences_first() -> None:
    # "left" is before "right" half of the time, "old" before "oak" nearly always.
    texts = ["left right, left up,"] * 6 + ["old oak"] * 200 + ["old elm"] * 20
    plain = build_collocations(texts, size=8, min_count=5)
    squared = build_collocations(texts, size=8, min_count=5, squared=True)
    assert plain.bigrams(4).index("left right") < plain.bigrams(4).index("old oak")
    assert squared.bigrams(1) == ["old oak"]
    assert squared.facts["squared"] is True


def test_saving_and_loading_keeps_entries_and_facts(tmp_path: Path) -> None:
    path = tmp_path / "list.txt"
    WHOLE.save(path)
    assert Collocations.load(path) == WHOLE
    first, second = path.read_text().splitlines()[:2]
    assert "min_count" in first
    assert second == WHOLE.entries[0]


def test_the_same_texts_give_the_same_list() -> None:
    assert build_collocations(TEXTS, size=4_000, min_count=5) == WHOLE


# --- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot read the list"),
        ("", "cannot read the list"),
        ("New York\n", "its first line"),
        ("# diffurefill collocations {\nNew York\n", "cannot read the list"),
        ("# diffurefill collocations {}\nNew York\nYork\n", ":3: 'York' is not two to five"),
        ("# diffurefill collocations {}\na b c d e f\n", ":2: .* is not two to five"),
        ("# diffurefill collocations {}\na  b\n", ":2: .* is not two to five"),
    ],
)
def test_a_file_that_is_no_list_is_refused(
    tmp_path: Path, content: str | None, reason: str
) -> None:
    path = tmp_path / "list.txt"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=reason):
        Collocations.load(path)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({}, "either a size"),
        ({"size": 10, "coverage": 0.1}, "either a size"),
        ({"coverage": 0.0}, "between 0 and 1"),
        ({"coverage": 1.5}, "between 0 and 1"),
        ({"coverage": 0.99}, r"together cover 0\.\d+ of the words, not 0\.99"),
        ({"size": 10, "min_count": 100_000}, "more than 100000 times"),
        ({"size": 7}, "at least 8"),
    ],
)
def test_a_list_that_cannot_be_made_is_refused(how: dict[str, int], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        build_collocations(TEXTS, **how)


def test_no_text_is_refused() -> None:
    with pytest.raises(UserError, match="give more text"):
        build_collocations([], size=10)


# --- the command ----------------------------------------------------------------------------------


def test_the_command_writes_the_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("\n\n".join(TEXTS))
    out = tmp_path / "list.txt"
    command = commands.Collocations(sources=(str(tmp_path),), out=out, size=40, min_count=5)
    assert command.run() == 0
    made = Collocations.load(out)
    assert "40 entries" in capsys.readouterr().out.splitlines()[-1]
    assert len(made.entries) == 40
    assert "New York" in made.entries


@pytest.mark.parametrize(("out", "message"), [("no/list.txt", "no folder"), (".", "is a folder")])
def test_the_command_refuses_what_it_cannot_write_before_it_reads(
    tmp_path: Path, out: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        commands.Collocations(sources=("missing",), out=tmp_path / out, size=40).run()
