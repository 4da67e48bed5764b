"""A denoiser that looks again at some positions only, and ones that see what a mask lets them.

All are approximations, for every position of a bidirectional model depends on every other.
`RowCache` keeps each position's keys and values from the last time it was computed. Shadows are
MASKs beside the text that see all of it but the token they stand for. `arranged_logits` reads any
tokens, several at one position if need be. Shape letters: B rows, T positions, n tokens computed,
D width, H heads, K head dim, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from diffurefill.config import UserError
from diffurefill.model.denoiser import Denoiser
from diffurefill.model.kv_cache import CachedLayer
from diffurefill.model.segments import Segments


class RowCache:
    """The keys and values of a batch that is read again and again with few tokens changed.

    Raises UserError for a causal model, and for anything but our `Denoiser`.
    """

    def __init__(self, denoiser: object) -> None:
        self.denoiser = bidirectional(denoiser)
        self.layers = [CachedLayer() for _ in self.denoiser.blocks]
        self.canvas: Tensor | None = None
        """(B, T): the ids each position was last computed with; None before the first call."""

    def changed(self, canvas: Tensor) -> Tensor:
        """Where `canvas` (B, T) has another id than was last computed: everywhere at first."""
        if self.canvas is None:
            return torch.ones_like(canvas, dtype=torch.bool)
        return canvas != self.canvas

    def logits(
        self, canvas: Tensor, doc_ids: Tensor | None, compute: Tensor, most: int, wanted: Tensor
    ) -> Tensor:
        """Logits (N, V) at `wanted` (N,), indices into the B * T positions of `canvas`.

        compute: (B, T) bool, at most `most` a row: what is computed anew, `wanted` and everything
        `changed` among it. doc_ids: (B, T), None when each row is one document.
        """
        T = canvas.shape[1]
        self.canvas = canvas
        place, number = _gathered(compute, most)
        x, rotary = _start(self.denoiser, canvas.gather(1, place), place, T)
        mask = None if doc_ids is None else _same_document(doc_ids, place, x.dtype)
        for layer in self.layers:
            layer.prepare(place, T, mask, is_causal=False, max_tokens=T)
        wanted = wanted // T * most + number.flatten()[wanted]
        *blocks, last_block = self.denoiser.blocks
        for block, layer in zip(blocks, self.layers, strict=False):
            x = block(x, rotary, layer)
        return _head(self.denoiser, last_block(x, rotary, self.layers[-1], wanted))


def shadow_logits(
    denoiser: object, canvas: Tensor, doc_ids: Tensor, at: Tensor, judged: Tensor, mask_id: int
) -> tuple[Tensor, Tensor]:
    """Logits at `at`, exactly those of a plain pass, and at the shadows of `judged`, both (B, T).

    Each shadow is a MASK with the position of a token, which sees the row without that token; no
    token sees a shadow, and no shadow another. With one layer that is what a pass over the row
    with this token masked would give; with more, the others' states have seen the token.
    """
    model, (B, T) = bidirectional(denoiser), canvas.shape
    counts = judged.sum(dim=1)
    n = int(counts.max())
    place, _ = _gathered(judged, n)
    real = torch.arange(n, device=canvas.device) < counts[:, None]
    ids = torch.cat([canvas, torch.full_like(place, mask_id)], dim=1)
    where = torch.cat([torch.arange(T, device=canvas.device).expand(B, T), place], dim=1)
    docs = doc_ids.to(canvas.device)
    mine = docs.gather(1, where)  # (B, T + n)
    sees_text = mine[:, :, None] == docs[:, None, :]  # (B, T + n, T)
    own = where[:, T:, None] == torch.arange(T, device=canvas.device)
    sees_text[:, T:] &= ~own
    itself = torch.eye(T + n, dtype=torch.bool, device=canvas.device)[:, T:].expand(B, -1, -1)
    mask = torch.cat([sees_text, itself], dim=2)[:, None]
    wanted = torch.cat([at, real], dim=1)
    logits = arranged_logits(model, ids, where, mask, wanted, T)
    is_shadow = wanted.nonzero()[:, 1] >= T
    return logits[~is_shadow], logits[is_shadow]


def arranged_logits(
    denoiser: object,
    ids: Tensor,
    place: Tensor,
    mask: Tensor,
    wanted: Tensor,
    num_positions: int,
) -> Tensor:
    """Logits (N, V) at the True tokens of `wanted` (B, n), row-major.

    Token i of `ids` (B, n) stands at position `place[:, i]` of its text, below `num_positions`, and
    sees the tokens that `mask` (B, 1, n, n) names in its line, in every layer.
    """
    model = bidirectional(denoiser)
    x, rotary = _start(model, ids, place, num_positions)
    *blocks, last_block = model.blocks
    segments = Segments(mask, causal=False)
    for block in blocks:
        x = block(x, rotary, segments)
    return _head(model, last_block(x, rotary, segments, wanted.flatten().nonzero().squeeze(1)))


def bidirectional(denoiser: object) -> Denoiser:
    """`denoiser`, if it is one whose insides we know."""
    if not isinstance(denoiser, Denoiser) or denoiser.config.causal:
        raise UserError(
            "shadow confidence, refresh_every and a two-stream screen need diffurefill's own "
            "bidirectional Denoiser: use confidence stale or regrouped, refresh_every 1, no screen"
        )
    return denoiser


def _gathered(which: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The True positions of each row of `which` (B, T) in order, (B, most) int64, and the number of
    each among them, (B, T).

    A row of fewer repeats its first: computed twice, a position is written twice with the same.
    """
    place = which.int().argmax(dim=1, keepdim=True).repeat(1, most + 1)
    number = which.cumsum(dim=1) - 1
    everywhere = torch.arange(which.shape[1], device=which.device).expand_as(which)
    place.scatter_(1, torch.where(which, number, most), everywhere)
    return place[:, :most], number


def _same_document(doc_ids: Tensor, place: Tensor, dtype: torch.dtype) -> Tensor:
    """What tokens at `place` (B, n) see of their rows, (B, 1, n, T): 0, and -inf for the rest. As
    numbers, which every layer would else make of bools."""
    mine = doc_ids.gather(1, place)
    other = mine[:, None, :, None] != doc_ids[:, None, None, :]
    return torch.zeros(other.shape, dtype=dtype, device=other.device).masked_fill_(
        other, -torch.inf
    )


def _start(
    model: Denoiser, ids: Tensor, place: Tensor, num_positions: int
) -> tuple[Tensor, Tensor]:
    """Embeddings (B, n, D) and rotary angles (2, B, 1, n, K / 2) of ids at their places (B, n)."""
    x = model.embedding(ids)
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    return x, model._rotary_table(num_positions, ids.device)[:, place].unsqueeze(2)


def _head(model: Denoiser, x: Tensor) -> Tensor:
    return F.linear(model.final_norm(x), model.embedding.weight)
