"""Reading a text in pieces gives the logits of reading it whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from diffurefill.config import ModelConfig, UserError
from diffurefill.model.denoiser import Denoiser
from diffurefill.model.kv_cache import KVCache

SIZES = {"vocab_size": 30, "width": 32, "layers": 2, "heads": 2, "ffn_width": 48}


def twin() -> Denoiser:
    model = Denoiser(ModelConfig(**SIZES, causal=True)).eval()
    model.init_weights(torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)
    return model


def text(*shape: int) -> Tensor:
    return torch.randint(30, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("pieces", [[12], [1] * 12, [5, 1, 6], [5, 5, 1, 1]])
@torch.no_grad()
def test_pieces_give_the_logits_of_the_whole(pieces: list[int]) -> None:
    model, ids = twin(), text(3, 12)
    cache = KVCache(2, 3, 12)
    found = [model(piece, cache=cache) for piece in ids.split(pieces, dim=1)]
    torch.testing.assert_close(torch.cat(found, dim=1), model(ids), atol=2e-5, rtol=1e-4)
    assert cache.lengths.tolist() == [12, 12, 12]


@torch.no_grad()
def test_rows_grow_by_their_own_numbers_of_tokens() -> None:
    model, ids = twin(), text(3, 12)
    whole = model(ids)
    cache = KVCache(2, 3, 12)
    # Even where all end alike after unlike pasts, and where all take one token after unlike ones.
    for counts in ([1, 0, 0], [1, 2, 2], [0, 4, 2], [1, 1, 1], [9, 1, 0]):
        width, starts = max(counts), cache.lengths.copy()
        piece = torch.zeros(3, width, dtype=torch.int64)
        doc_ids = torch.full((3, width), -1)
        for b, (start, count) in enumerate(zip(starts, counts, strict=True)):
            piece[b, :count], doc_ids[b, :count] = ids[b, start : start + count], 0
        found = model(piece, doc_ids, cache=cache)
        for b, (start, count) in enumerate(zip(starts, counts, strict=True)):
            expected = whole[b, start : start + count]
            torch.testing.assert_close(found[b, :count], expected, atol=2e-5, rtol=1e-4)
    assert cache.lengths.tolist() == [12, 8, 5]


@torch.no_grad()
def test_rows_that_leave_take_their_past_with_them() -> None:
    model, ids = twin(), text(4, 12)
    whole, cache = model(ids), KVCache(2, 4, 12)
    first = torch.tensor([[0] * n + [-1] * (5 - n) for n in (5, 2, 4, 1)])
    model(ids[:, :5], first, cache=cache)
    for kept, rows in (([0, 1, 3], [0, 1, 3]), ([1, 2], [1, 3])):
        cache.keep(np.array(kept))
        starts = cache.lengths.copy()
        piece = torch.stack([ids[b, s : s + 3] for b, s in zip(rows, starts, strict=True)])
        found = model(piece, cache=cache)
        for b, start, logits in zip(rows, starts, found, strict=True):
            expected = whole[b, start : start + 3]
            torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-4)
    assert cache.lengths.tolist() == [8, 7]


@torch.no_grad()
def test_only_the_wanted_positions_pass_the_head() -> None:
    model, ids = twin(), text(2, 6)
    at = torch.zeros(2, 6, dtype=torch.bool)
    at[:, -1] = True
    found = model(ids, None, at, KVCache(2, 2, 6))
    torch.testing.assert_close(found, model(ids)[:, -1], atol=2e-5, rtol=1e-4)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(UserError, match="in a cache for 4"):
        twin()(text(1, 5), cache=KVCache(2, 1, 4))
    with pytest.raises(UserError, match="padding behind"):
        twin()(text(1, 3), torch.tensor([[-1, 0, 0]]), cache=KVCache(2, 1, 4))
    denoiser = Denoiser(ModelConfig(**SIZES))
    with pytest.raises(UserError, match="only a causal model"):
        denoiser(text(1, 3), cache=KVCache(2, 1, 4))
