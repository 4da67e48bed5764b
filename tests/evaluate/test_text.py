"""Repeats and diversity on texts that can be counted by hand."""

import math

import pytest

from diffurefill.evaluate.text import (
    distinct_share,
    distinct_shares,
    doubled_share,
    text_statistics,
    unigram_entropy,
    words,
)


def test_doubled_tokens_are_pooled_over_the_samples() -> None:
    assert doubled_share([[1, 1, 2, 2, 2], [3, 4]]) == 3 / 5
    assert doubled_share([[1, 2, 1, 2]]) == 0
    assert doubled_share([[], [7]]) == 0


def test_a_pair_across_two_samples_is_none() -> None:
    assert doubled_share([[1, 2], [2, 1]]) == 0


def test_distinct_2_of_the_set_and_of_each_sample() -> None:
    samples = [["a", "b", "a", "b"], ["a", "b"]]  # ab ba ab | ab
    assert distinct_share(samples) == 2 / 4
    assert distinct_shares(samples) == [2 / 3, 1.0]
    assert distinct_shares([["a"], []]) == [0.0, 0.0]
    assert distinct_share(samples, n=1) == 2 / 6


def test_entropy_of_even_tokens_is_the_log_of_their_number() -> None:
    assert unigram_entropy([[1, 2], [3, 4]]) == pytest.approx(math.log(4))
    assert unigram_entropy([[5, 5, 5]]) == 0
    assert unigram_entropy([]) == 0
    uneven = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert unigram_entropy([[1, 1], [1, 2]]) == pytest.approx(uneven)


def test_words_are_compared_without_case_and_punctuation() -> None:
    assert words('The "the" dog, Dog! -- \u201cran\u201d') == ["the", "the", "dog", "dog", "ran"]


def test_the_statistics_of_a_set() -> None:
    found = text_statistics([[1, 1, 2], [], [3, 4]], ["The the end.", "", "so it"])
    assert found.num_samples == 3
    assert found.num_empty == 1
    assert found.num_tokens == 5
    assert found.doubled_tokens == 1 / 3
    assert found.doubled_words == 1 / 3
    assert found.distinct_2 == 1.0
    assert found.distinct_2_per_sample == 2 / 3
