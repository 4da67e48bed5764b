"""A set's figures, its differences to another, and the table that shows both sides."""

import io

import pytest
from rich.console import Console

from diffurefill.evaluate.judge import Score
from diffurefill.evaluate.judged import judged, judged_json, judged_table

SAMPLES = [[1, 1, 2], [3, 4], []]
TEXTS = ["a a b", "c d", ""]


def test_figures_are_pooled_and_differences_are_paired() -> None:
    ours = judged("ours", 20, SAMPLES, TEXTS, [Score(6.0, 3), Score(2.0, 2), Score(0.0, 0)])
    theirs = judged("theirs", 128, SAMPLES, TEXTS, [Score(9.0, 3), Score(4.0, 2), Score(0.0, 0)])
    assert ours.interval("nll").mean == pytest.approx(8 / 5)
    assert ours.interval("doubled").mean == pytest.approx(1 / 3)
    assert ours.interval("doubled_words").mean == pytest.approx(1 / 3)
    assert ours.interval("distinct_2").mean == pytest.approx((1 + 1 + 0) / 3)
    assert theirs.minus(ours, "nll").mean == pytest.approx(1.0)
    assert ours.minus(ours, "nll").low == 0
    assert ours.statistics.num_empty == 1


def test_a_set_of_empty_samples_has_figures_and_says_so() -> None:
    row = judged("empty", 1, [[], []], ["", ""], [Score(0.0, 0)] * 2)
    assert row.interval("nll").mean == 0
    assert row.statistics.num_empty == 2


def test_the_table_shows_no_judge_without_diversity() -> None:
    row = judged("ours", 20, SAMPLES, TEXTS, [Score(6.0, 3), Score(2.0, 2), Score(0.0, 0)])
    shown = io.StringIO()
    Console(width=140, file=shown).print(judged_table("pilot", [judged_json(row, {"ours": row})]))
    for words in ("NLL", "1.600 \u00b1", "dist-2", "each", "entropy", "33.33%", "ours"):
        assert words in shown.getvalue()
