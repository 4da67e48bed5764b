"""One pass for all rows of a chain, beside the chain with frozen states run row by row."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diffurefill.config import ModelConfig, UserError
from diffurefill.evaluate.likelihood import two_stream
from diffurefill.evaluate.likelihood.passes import Reader
from diffurefill.evaluate.likelihood.scorer import Scorer, score
from diffurefill.evaluate.likelihood.texts import Text, lay_out
from diffurefill.evaluate.likelihood.two_stream import plant, read_trees, text_tokens
from diffurefill.model.denoiser import Denoiser
from tests.evaluate.likelihood.frozen import frozen_chain
from tests.evaluate.likelihood.toys import CPU, V, scoring, sharp_transformer, some_pairs
from tests.fakes import BOS, MASK, BigramDenoiser

WIDE = 24
TOLERANCE = 1e-5
"""Nats a token, in float32."""


def laid_out(pairs) -> list[Text]:
    texts = [lay_out(*pair, bos_id=BOS, max_tokens=64) for pair in pairs]
    return [text for text in texts if text is not None]


def read(denoiser, pairs, right_masks=0, **more) -> list[np.ndarray]:
    reader = Reader(denoiser, MASK, denoiser.config.vocab_size, CPU, **more)
    found = dict(read_trees(reader, laid_out(pairs), right_masks))
    return [found[i].log_prob for i in range(len(pairs))]


@pytest.mark.parametrize("right_masks", [0, 2])
def test_it_is_the_chain_with_frozen_states(right_masks: int) -> None:
    model, pairs = sharp_transformer(WIDE, layers=3), some_pairs(np.random.default_rng(0), WIDE)
    found = read(model, pairs, right_masks)
    for (context, tokens), one in zip(pairs, found, strict=True):
        expected = frozen_chain(model, context, tokens, right_masks)
        assert one == pytest.approx(expected, abs=TOLERANCE)
    exact = score(scoring(model, WIDE), pairs, Scorer(right_masks=right_masks)).scores
    off = [abs(a.sum() - b.log_likelihood) for a, b in zip(found, exact, strict=True)]
    assert max(off) > 0.1, "this model does not tell frozen states from new ones"


def test_rows_and_tokens_are_asked_for_as_by_the_chain_and_trees_are_read() -> None:
    model, pairs = sharp_transformer(WIDE, layers=1), some_pairs(np.random.default_rng(5), WIDE)
    reader = Reader(model, MASK, WIDE, CPU)
    list(read_trees(reader, laid_out(pairs), 2))
    assert reader.cost.rows_read == len(plant(laid_out(pairs), MASK, 2))
    ours, exact = reader.cost, score(scoring(model, WIDE), pairs, Scorer(right_masks=2)).cost
    assert (ours.rows_asked, ours.tokens_asked) == (exact.rows_asked, exact.tokens_asked)


def test_a_pass_holds_no_more_tokens_than_it_may() -> None:
    pairs = [((token,), (5, 6)) for token in (4, 5, 6)]
    size = text_tokens(laid_out(pairs)[0], 0)
    for num_trees, num_passes in ((1, 3), (2, 2), (3, 1)):
        model = sharp_transformer(WIDE, layers=1)
        reader = Reader(model, MASK, WIDE, CPU, batch_tokens=num_trees * size)
        list(read_trees(reader, laid_out(pairs), 0))
        assert reader.cost.num_forward_passes == num_passes


def test_the_first_token_is_exact_and_so_is_every_one_of_a_single_layer() -> None:
    """With one layer keys and values hang on a token alone: frozen or new, they are the same."""
    pairs = some_pairs(np.random.default_rng(1), WIDE)
    deep, shallow = sharp_transformer(WIDE, layers=3), sharp_transformer(WIDE, layers=1)
    for one, (context, tokens) in zip(read(deep, pairs), pairs, strict=True):
        row = torch.tensor([[BOS, *context, *[MASK] * len(tokens)]])
        with torch.inference_mode():
            expected = deep(row)[0, 1 + len(context)].log_softmax(dim=0)[tokens[0]]
        assert one[0] == pytest.approx(float(expected), abs=TOLERANCE)
    exact = score(scoring(shallow, WIDE), pairs, Scorer()).scores
    for one, other in zip(read(shallow, pairs), exact, strict=True):
        assert one.sum() == pytest.approx(other.log_likelihood, abs=1e-4)


def test_neither_company_nor_batch_changes_a_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    model, pairs = sharp_transformer(WIDE, layers=2), some_pairs(np.random.default_rng(2), WIDE)
    expected = [read(model, [pair])[0] for pair in pairs]
    for batch_tokens, tree_tokens in ((1, 1), (40, 1 << 10), (10_000, 30), (10_000, 1 << 10)):
        monkeypatch.setattr(two_stream, "TREE_TOKENS", tree_tokens)
        found = read(model, pairs, batch_tokens=batch_tokens)
        for one, other in zip(found, expected, strict=True):
            assert one == pytest.approx(other, abs=TOLERANCE)


def seen_from(tree: two_stream.Tree) -> list[set[tuple[int, int]]]:
    """(place, id) of all that each token of a tree may see, in the tree's order."""
    return [
        {
            (int(tree.place[k]), int(tree.ids[k]))
            for k in range(len(tree.ids))
            if tree.node[k] <= tree.node[q] < tree.end[k]
        }
        for q in range(len(tree.ids))
    ]


choices = st.integers(1, 5).flatmap(
    lambda n: st.lists(st.lists(st.integers(4, 5), min_size=n, max_size=n), min_size=1, max_size=6)
)


@given(choices, st.integers(0, 2))
def test_each_token_sees_what_stands_in_its_row(continuations, right_masks: int) -> None:
    """Group i: the prompt, c_<i and itself. The prompt: itself and group 1. c_j: the prompt, c_<=j
    and group j + 1."""
    texts = laid_out([((6, 7), tokens) for tokens in continuations])
    (tree,) = plant(texts, MASK, right_masks)
    assert sorted(tree.texts) == list(range(len(texts)))
    seen = seen_from(tree)
    for i, at in zip(tree.texts, tree.at, strict=True):
        ids, first = texts[i].ids.tolist(), texts[i].first
        for depth, q in enumerate(at):
            shown = {(place, ids[place]) for place in range(first + depth)}
            hidden = {(place, MASK) for place in range(first + depth, len(ids) + right_masks)}
            in_row = np.flatnonzero(tree.node == tree.node[q])
            assert all(seen[k] == shown | hidden for k in in_row)
            assert (tree.place[q], tree.ids[q]) == (first + depth, MASK)
    if len(texts) == 1:
        assert len(tree.ids) == text_tokens(texts[0], right_masks)


def test_common_beginnings_stand_in_a_tree_once() -> None:
    choices = [[4, 5, 6, 4], [4, 5, 5, 4], [6, 5, 5, 4]]
    (tree,) = plant(laid_out([((5,), c) for c in choices]), MASK, 0)
    # The root; 4 with two below, each with one; 6 with one below, with one.
    assert tree.node[-1] + 1 == 1 + 1 + 1 + 2 + 3
    assert len(tree.ids) == (2 + 4) + (1 + 3) * 2 + (1 + 2) * 2 + (1 + 1) * 3


def test_what_is_shared_does_not_hang_on_the_order_of_requests() -> None:
    texts = laid_out(some_pairs(np.random.default_rng(3), WIDE, 40))
    shuffled = [texts[i] for i in np.random.default_rng(4).permutation(len(texts))]
    sizes = [sorted(len(tree.ids) for tree in plant(each, MASK, 0)) for each in (texts, shuffled)]
    assert sizes[0] == sizes[1]
    assert sum(sizes[0]) < sum(text_tokens(text, 0) for text in texts)


def test_other_models_than_ours_and_weights_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(UserError, match="screen"):
        list(read_trees(Reader(BigramDenoiser(V), MASK, V, CPU), laid_out([((4,), (5, 6))]), 0))
    broken = Denoiser(ModelConfig(vocab_size=V, width=8, layers=1, heads=2, ffn_width=8)).eval()
    with torch.no_grad():
        broken.final_norm.weight.fill_(float("nan"))
    with pytest.raises(UserError, match="not finite"):
        read(broken, [((4,), (5, 6))])
