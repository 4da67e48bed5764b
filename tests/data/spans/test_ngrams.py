import itertools
import math
import tempfile
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffurefill.data.spans.ngrams import (
    MAX_ORDER,
    RUN,
    KeyCounts,
    NgramCounts,
    _WordReader,
    count_ngrams,
)

WORDS = ["a", "b", "c", "d"]
texts_of_words = st.lists(
    st.lists(st.sampled_from([*WORDS, ",", "\n\n", "\n"]), max_size=30).map(" ".join), max_size=8
)


def counted(texts: list[str], min_count: int = 0, **limits: int) -> NgramCounts:
    with tempfile.TemporaryFile() as file:
        return count_ngrams(texts, min_count, file, **limits)


def counts_of(found: NgramCounts, order: int) -> dict[tuple[str, ...], int]:
    matrix = found.word_matrix(order).tolist()
    counts = found.levels[order - 1].counts.tolist()
    return {
        tuple(found.words[word] for word in row): count
        for row, count in zip(matrix, counts, strict=True)
    }


def counted_slowly(texts: list[str]) -> list[Counter[tuple[str, ...]]]:
    """By order, from 1; every n-gram of every run, in a dictionary."""
    counts: list[Counter[tuple[str, ...]]] = [Counter() for _ in range(MAX_ORDER)]
    for text in texts:
        for run in RUN.findall(text):
            words = run.split()
            for n in range(1, MAX_ORDER + 1):
                counts[n - 1].update(tuple(words[i : i + n]) for i in range(len(words) - n + 1))
    return counts


@pytest.mark.parametrize(
    ("text", "runs"),
    [
        ("the old man", ["the old man"]),
        ("the old\nman", ["the old\nman"]),
        ("the old \n  man", ["the old \n  man"]),
        ("the old\n\nman", ["the old", "man"]),
        ("the old, man", ["the old", "man"]),
        ("don't re-read O\u2019Brien's", ["don't re-read O\u2019Brien's"]),
        ("end. Start - dash", ["end", "Start", "dash"]),
        ("snake_case 3.5 x", ["snake", "case 3", "5 x"]),
        ("\u00c9mile a 12", ["\u00c9mile a 12"]),
        (" ...\n", []),
    ],
)
def test_word_sequences_end_at_punctuation_and_blank_lines(text: str, runs: list[str]) -> None:
    assert RUN.findall(text) == runs


def test_finding_words_takes_linear_time_on_long_blanks_and_joined_words() -> None:
    for text in (" " * 200_000 + "x", "a-" * 100_000, "a " * 100_000, "\n " * 100_000):
        RUN.findall(text)  # quadratic time would not end


@given(texts_of_words, st.integers(0, 3))
def test_counts_are_those_of_a_plain_dictionary(texts: list[str], min_count: int) -> None:
    found = counted(texts, min_count)
    slow = counted_slowly(texts)
    for order in range(1, MAX_ORDER + 1):
        expected = {gram: n for gram, n in slow[order - 1].items() if n > min_count}
        assert counts_of(found, order) == expected
        assert found.levels[order - 1].total == slow[order - 1].total()
    assert found.lost == 0


def score_slowly(
    gram: tuple[str, ...], counts: list[Counter[tuple[str, ...]]], power: float
) -> float:
    """Every segmentation written out."""

    def log_p(part: tuple[str, ...]) -> float:
        return math.log(counts[len(part) - 1][part] / counts[len(part) - 1].total())

    scores = []
    for cuts in itertools.product([False, True], repeat=len(gram) - 1):
        if any(cuts):
            places = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), len(gram)]
            parts = [gram[a:b] for a, b in itertools.pairwise(places)]
            scores.append(power * log_p(gram) - sum(map(log_p, parts)))
    return min(scores)


@pytest.mark.parametrize("squared", [False, True])
@given(texts=texts_of_words)
def test_a_score_is_the_least_over_all_segmentations(texts: list[str], squared: bool) -> None:
    found, slow = counted(texts), counted_slowly(texts)
    for order in range(2, MAX_ORDER + 1):
        scores = found.scores(order, squared=squared)
        expected = [
            score_slowly(gram, slow, 2.0 if squared else 1.0) for gram in counts_of(found, order)
        ]
        np.testing.assert_allclose(scores, expected, rtol=1e-9, atol=1e-9)


def test_a_score_by_hand() -> None:
    # 5 words, 3 bigrams, 1 trigram. "a b c" parts best as "a b" + "c".
    found = counted(["a b c", "a b"])
    names = list(counts_of(found, 3))
    assert names == [("a", "b", "c")]
    parts = math.log(2 / 3) + math.log(1 / 5), math.log(2 / 5) + math.log(1 / 3)
    assert found.scores(3, squared=False)[0] == pytest.approx(math.log(1 / 1) - max(parts))


@given(st.lists(st.lists(st.integers(0, 30), max_size=20), max_size=6), st.integers(2, 40))
def test_a_table_never_counts_too_high_nor_too_low_by_more_than_it_says(
    parts: list[list[int]], max_size: int
) -> None:
    table = KeyCounts(max_size)
    for part in parts:
        table.add(np.array(part, dtype=np.int64))
        assert len(table.keys) <= max_size
    assert (np.diff(table.keys) > 0).all()
    exact = Counter(key for part in parts for key in part)
    kept = dict(zip(table.keys.tolist(), table.counts.tolist(), strict=True))
    for key, count in exact.items():
        assert count - table.lost <= kept.get(key, 0) <= count
    if len(exact) <= max_size:
        assert kept == exact


@pytest.mark.parametrize("limits", [{"max_words": 8}, {"max_ngrams": 8}])
def test_small_limits_lose_rare_sequences_and_say_so(
    limits: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diffurefill.data.spans.ngrams._BLOCK_WORDS", 40)
    texts = [f"new york w{n % 10} w{n * 7 % 9}, x{n} new york" for n in range(240)]
    found = counted(texts, 20, **limits)
    assert found.lost > 0
    exact = counted_slowly(texts)
    for order in (1, 2):
        for gram, count in counts_of(found, order).items():
            assert 20 < count <= exact[order - 1][gram]
    assert ("new", "york") in counts_of(found, 2)


def test_forgotten_words_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffurefill.data.spans.ngrams._BLOCK_WORDS", 100)
    reader = _WordReader(max_words=50)
    for _ in reader.read(f"new york w{n}" for n in range(4_000)):
        assert len(reader.counts.keys) <= 50
    words, counts, numbers = reader.frequent(20)
    assert (words, numbers.tolist()) == (["new", "york"], [0, 1])
    assert 4_000 - reader.counts.lost <= counts.min() <= counts.max() == 4_000


@given(st.integers(4, 12), st.integers(0, 1000))
def test_the_parts_of_a_listed_sequence_are_listed_whatever_was_lost(limit: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    texts = [" ".join(draw.choice(WORDS, 30)) for _ in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("diffurefill.data.spans.ngrams._BLOCK_WORDS", 20)
        found = counted(texts, 1, max_ngrams=limit)
    for order in range(2, MAX_ORDER + 1):
        shorter = counts_of(found, order - 1)
        for gram in counts_of(found, order):
            assert gram[1:] in shorter
            assert gram[:-1] in shorter


def test_no_text_has_no_sequences() -> None:
    found = counted([])
    assert [len(level.counts) for level in found.levels] == [0] * MAX_ORDER
    assert found.scores(3, squared=False).shape == (0,)
