"""MinHash against the exact Jaccard similarity."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from diffurefill.data.facts.filters import words_of
from diffurefill.data.facts.near_duplicates import band_hashes, repeats, same_words_hash
from diffurefill.runtime import philox

WORDS = 5


def plain_jaccard(a: str, b: str) -> float:
    def sequences(text: str) -> set[tuple[str, ...]]:
        words = words_of(text)
        return {tuple(words[i : i + WORDS]) for i in range(max(len(words) - WORDS + 1, 1))}

    return len(sequences(a) & sequences(b)) / len(sequences(a) | sequences(b))


def agree(a: str, b: str) -> bool:
    return bool((band_hashes(a, WORDS) == band_hashes(b, WORDS)).any())


def words(*key: int | str, count: int = 120) -> list[str]:
    return [f"w{number}" for number in philox("words", *key).integers(500, size=count)]


def changed(own: list[str], num_places: int, *key: int) -> str:
    """`own` with other words at some places."""
    places = philox("places", *key).choice(len(own), num_places, replace=False)
    other = own.copy()
    for place in places:
        other[place] = f"new{place}"
    return " ".join(other)


def test_pairs_agree_as_often_as_their_similarity_says():
    """Against 1 - (1 - s^8)^16, summed over pairs of all similarities."""
    counts: dict[int, list[tuple[bool, float]]] = {}
    for pair in range(300):
        own = words(pair)
        other = changed(own, 1 + pair % 15, pair)
        similarity = plain_jaccard(" ".join(own), other)
        expected = 1 - (1 - similarity**8) ** 16
        counts.setdefault(int(similarity * 4), []).append((agree(" ".join(own), other), expected))
    assert len(counts) >= 3
    for pairs in counts.values():
        found, expected = np.array(pairs, dtype=float).T
        spread = np.sqrt((expected * (1 - expected)).sum()) + 1
        assert abs(found.sum() - expected.sum()) < 4 * spread


def test_near_duplicates_are_found_and_other_texts_are_not():
    texts = [" ".join(words(number)) for number in range(60)]
    copies = [changed(words(number), 1, number) for number in range(60)]
    assert min(plain_jaccard(a, b) for a, b in zip(texts, copies, strict=True)) > 0.9
    is_repeat = repeats(np.array([band_hashes(text, WORDS) for text in [*texts, *copies]]))
    assert is_repeat.tolist() == [False] * 60 + [True] * 60


def test_capitals_and_punctuation_make_no_difference():
    assert agree("One two three: four, five six.", "one two - three four five (six)")
    assert same_words_hash("One, two.") == same_words_hash("one two")
    assert same_words_hash("One, two.") != same_words_hash("one twos")


def test_texts_of_different_groups_never_agree():
    a, b = (band_hashes("the same words", 2, group) for group in ("first", "second"))
    assert not (a == b).any()


def test_short_and_empty_texts_have_hashes():
    assert not agree("one", "two")
    assert agree("", "...")


def test_the_hashes_are_the_same_on_every_machine():
    assert int(band_hashes("a b c d e f", 5)[0]) == GOLDEN


GOLDEN = 10432132887192493824


@given(st.lists(st.lists(st.integers(0, 6), min_size=3, max_size=3), max_size=12))
def test_a_row_repeats_where_a_column_was_seen_before(rows: list[list[int]]):
    hashes = np.array(rows, dtype=np.uint64).reshape(len(rows), 3)
    plain = [
        any(row[c] == before[c] for before in rows[:i] for c in range(3))
        for i, row in enumerate(rows)
    ]
    assert repeats(hashes).tolist() == plain
