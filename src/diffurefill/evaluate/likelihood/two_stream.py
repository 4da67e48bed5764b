"""The chain rule of many texts in one pass: what a token is computed from stays as it first was.

Row i of the chain shows c_1..c_(i-1) and hides the rest. Exactly, each row is computed anew, for a
token that becomes visible changes every state beside it. Here the prompt keeps the states that it
has in row 1, and each c_j those of row j + 1, where it first is visible: what is left of row i are
c_(i-1) and its own MASKs, and all rows stand in one sequence under an attention mask. Exact for the
first token; approximate for the others (spec performance 6).

The rows of texts with one context and one length are a tree: the root is the row that shows
nothing, a child shows a token more, and texts that begin alike share nodes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diffurefill.evaluate.likelihood.passes import BATCH_LOGITS, BATCH_TOKENS, Reader, Reading
from diffurefill.evaluate.likelihood.texts import Ids, Text
from diffurefill.model.cached import arranged_logits

TREE_TOKENS = 1 << 10
"""Of a tree of several texts: each token of a tree is compared with every other."""
MAX_TEXT_TOKENS = 1 << 11
"""Of a text's own tree. Past it (some 60 tokens to score) the chain's rows are hardly dearer."""


def text_tokens(text: Text, right_masks: int) -> int:
    """Tokens of the tree of `text` alone: all of it but the last, and the MASKs of each row."""
    n = len(text.continuation)
    return len(text.ids) - 1 + n * (n + 1) // 2 + n * right_masks


@dataclass(frozen=True, eq=False)
class Tree:
    """Rows of texts that share context and length, in one sequence of N tokens.

    Nodes are numbered so that those below a node follow it. A token of node u is seen from nodes
    u to `end` - 1: one that is visible from all below, a MASK from its own node alone.
    """

    ids: Ids
    """(N,) tokens and MASKs."""
    place: NDArray[np.int64]
    """(N,): where each stands in its text."""
    node: NDArray[np.int64]
    end: NDArray[np.int64]
    at: list[NDArray[np.int64]]
    """Of each text (n,): the MASKs that stand for its tokens, one a row."""
    texts: list[int]
    """Which texts these are."""


def plant(texts: Sequence[Text], mask_id: int, right_masks: int) -> list[Tree]:
    """Trees that hold each of `texts` once. Which texts share a tree changes nothing but cost."""

    def rows(i: int) -> tuple[int, int, bytes]:
        text = texts[i]
        return text.first, len(text.ids), text.ids[: text.first].tobytes()

    ordered = sorted(range(len(texts)), key=lambda i: (rows(i), texts[i].ids.tobytes()))
    trees = []
    for _, alike in itertools.groupby(ordered, rows):
        members = list(alike)
        root = len(texts[members[0]].ids) + right_masks
        own = text_tokens(texts[members[0]], right_masks) - root
        count = max(1, (TREE_TOKENS - root) // max(1, own))
        parts = (members[start : start + count] for start in range(0, len(members), count))
        trees += [_tree(texts, part, mask_id, right_masks) for part in parts]
    return trees


def _tree(texts: Sequence[Text], members: list[int], mask_id: int, right_masks: int) -> Tree:
    text, n = texts[members[0]], len(texts[members[0]].continuation)
    length, first = len(text.ids) + right_masks, text.first
    paths = [[tuple(texts[i].continuation[:d].tolist()) for d in range(n)] for i in members]
    nodes = sorted({shown for path in paths for shown in path})
    number = {shown: u for u, shown in enumerate(nodes)}
    num_below = np.ones(len(nodes), np.int64)
    for shown in reversed(nodes[1:]):
        num_below[number[shown[:-1]]] += num_below[number[shown]]
    ids, place, node, end, asks = [], [], [], [], []
    for u, shown in enumerate(nodes):
        num_hidden = length - first - len(shown)
        visible = text.ids[:first].tolist() if u == 0 else [shown[-1]]
        asks.append(len(ids) + len(visible))
        ids += [*visible, *[mask_id] * num_hidden]
        place += range(length - num_hidden - len(visible), length)
        node += [u] * (len(visible) + num_hidden)
        end += [u + num_below[u]] * len(visible) + [u + 1] * num_hidden
    at = [np.array([asks[number[shown]] for shown in path]) for path in paths]
    return Tree(
        np.array(ids, np.int32), np.array(place), np.array(node), np.array(end), at, members
    )


def read_trees(
    reader: Reader, texts: Sequence[Text], right_masks: int
) -> Iterator[tuple[int, Reading]]:
    """(index of a text, what its n rows say of its tokens), as they come.

    Raises UserError for a denoiser that is not ours, and for logits that are not finite.
    """
    with torch.inference_mode(), reader.autocast():
        for batch in _batches(reader, plant(texts, reader.mask_id, right_masks)):
            logits, slots = _read(reader, batch)
            members = [i for tree in batch for i in tree.texts]
            tokens = [texts[i].continuation for i in members]
            reader.cost.rows_asked += sum(map(len, tokens))
            reader.cost.tokens_asked += sum(
                len(texts[i].continuation) * (len(texts[i].ids) + right_masks) for i in members
            )
            yield from zip(members, reader.judged(logits, slots, tokens), strict=True)


def _batches(reader: Reader, trees: Sequence[Tree]) -> Iterator[list[Tree]]:
    """Trees of about one size, as many as fit one pass."""
    max_tokens = reader.batch_tokens or BATCH_TOKENS[reader.device.type]
    max_wanted = BATCH_LOGITS[reader.device.type] // reader.vocab_size
    batch: list[Tree] = []
    num_wanted = 0
    for tree in sorted(trees, key=lambda tree: len(tree.ids)):
        size, wanted = len(tree.ids), int(tree.node[-1]) + 1
        is_full = batch and (
            8 * size > 9 * len(batch[0].ids)  # shorter ones are filled up, which is work too
            or (len(batch) + 1) * size > max_tokens
            or num_wanted + wanted > max_wanted
        )
        if is_full:
            yield batch
            batch, num_wanted = [], 0
        batch.append(tree)
        num_wanted += wanted
    if batch:
        yield batch


def _read(reader: Reader, batch: Sequence[Tree]) -> tuple[Tensor, list[NDArray[np.int64]]]:
    """Logits (N, V) float32 of all nodes, and where among them each text's tokens are judged."""
    B, T = len(batch), max(len(tree.ids) for tree in batch)
    ids, place, node, end = (np.zeros((B, T), np.int64) for _ in range(4))
    node[:] = T + np.arange(T)  # what fills a line up sees itself alone
    end[:] = node + 1
    wanted = np.zeros((B, T), bool)
    for b, tree in enumerate(batch):
        size = len(tree.ids)
        ids[b, :size], place[b, :size] = tree.ids, tree.place
        node[b, :size], end[b, :size] = tree.node, tree.end
        wanted[b, np.concatenate(tree.at)] = True
    slot = wanted.cumsum().reshape(B, T) - 1
    slots = [slot[b, at] for b, tree in enumerate(batch) for at in tree.at]
    reader.cost.num_forward_passes += 1
    reader.cost.rows_read += B
    reader.cost.forward_tokens += B * T
    arrays = (ids, place, node, end, wanted)
    ids_, place_, node_, end_, wanted_ = (torch.from_numpy(a).to(reader.device) for a in arrays)
    seer = node_[:, :, None]
    mask = (node_[:, None, :] <= seer) & (seer < end_[:, None, :])  # (B, T, T)
    shown = (ids_, place_, mask[:, None], wanted_)
    return arranged_logits(reader.denoiser, *shown, int(place.max()) + 1).float(), slots
