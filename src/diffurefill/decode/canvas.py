"""What is fixed and what may be filled: plain id lists in, one padded batch out.

A row is BOS, then given ids and gaps in any order; every gap position holds MASK at the start.
Rows of a batch may differ in length: the shorter ones are padded on the right with PAD, which
belongs to no document (doc id -1), so that padding changes nothing for a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from diffurefill.config import UserError


@dataclass(frozen=True, eq=False)
class Specials:
    """The ids a decoder must know. `emittable` (V,) bool: real pieces and EOS, nothing else."""

    bos_id: int
    eos_id: int
    mask_id: int
    pad_id: int
    emittable: np.ndarray | Tensor

    def __post_init__(self) -> None:
        for name in ("bos_id", "mask_id", "pad_id"):
            if self.emittable[getattr(self, name)]:
                raise UserError(f"emittable is True at {name}: a special id must never be written")

    @property
    def vocab_size(self) -> int:
        return len(self.emittable)


@dataclass(frozen=True, eq=False)
class Canvas:
    """A batch to fill. Shapes (B, T): ids int64, fillable bool, doc_ids int32 (-1 on padding)."""

    ids: Tensor
    fillable: Tensor
    doc_ids: Tensor

    @property
    def num_fillable(self) -> Tensor:
        """n of each row, (B,) int64."""
        return self.fillable.sum(dim=1)

    def to(self, device: torch.device) -> Canvas:
        return Canvas(self.ids.to(device), self.fillable.to(device), self.doc_ids.to(device))

    def rows(self, ids: Tensor) -> list[list[int]]:
        """Each row of `ids` (B, T) without padding: BOS, given ids and filled gaps."""
        return [row[real].tolist() for row, real in zip(ids, self.doc_ids >= 0, strict=True)]

    def filled(self, ids: Tensor) -> list[list[int]]:
        """Each row of `ids` (B, T) at the fillable positions only: what was generated."""
        return [row[open_].tolist() for row, open_ in zip(ids, self.fillable, strict=True)]


def continuation(
    prompts: Sequence[Sequence[int]],
    num_tokens: int | Sequence[int],
    specials: Specials,
    *,
    max_tokens: int,
) -> Canvas:
    """BOS + prompt + num_tokens MASKs for each prompt; prompts hold no BOS and may be empty.

    `num_tokens` is one number, or one per prompt. Raises UserError as `infill` does.
    """
    counts = [num_tokens] * len(prompts) if isinstance(num_tokens, int) else list(num_tokens)
    if len(counts) != len(prompts):
        raise UserError(
            f"{len(counts)} values of num_tokens for {len(prompts)} prompts: "
            "give one number, or one per prompt"
        )
    rows = [[prompt, count] for prompt, count in zip(prompts, counts, strict=True)]
    return infill(rows, specials, max_tokens=max_tokens)


def infill(
    rows: Sequence[Sequence[Sequence[int] | int]], specials: Specials, *, max_tokens: int
) -> Canvas:
    """Rows of segments, each a list of given ids or the length of a gap; BOS is put in front.

    `[[5, 6], 3, [7], 2]` is BOS 5 6 _ _ _ 7 _ _. Raises UserError for an empty batch, a row
    without a gap, an empty gap, a row longer than `max_tokens`, and ids that cannot be given.
    """
    if not rows:
        raise UserError("nothing to fill: give at least one row")
    built = [_build_row(i, row, specials, max_tokens) for i, row in enumerate(rows)]
    B, T = len(built), max(len(ids) for ids, _ in built)
    ids = torch.full((B, T), specials.pad_id, dtype=torch.int64)
    fillable = torch.zeros((B, T), dtype=torch.bool)
    doc_ids = torch.full((B, T), -1, dtype=torch.int32)
    for b, (row_ids, row_fillable) in enumerate(built):
        length = len(row_ids)
        ids[b, :length] = torch.tensor(row_ids)
        fillable[b, :length] = torch.tensor(row_fillable)
        doc_ids[b, :length] = 0
    return Canvas(ids, fillable, doc_ids)


def _build_row(
    index: int, segments: Sequence[Sequence[int] | int], specials: Specials, max_tokens: int
) -> tuple[list[int], list[bool]]:
    """Ids and the fillable flag of one row, without padding."""
    _check_lengths(index, segments, max_tokens)
    ids, fillable = [specials.bos_id], [False]
    for segment in segments:
        if isinstance(segment, int):
            ids += [specials.mask_id] * segment
            fillable += [True] * segment
        else:
            _check_given(index, segment, specials)
            ids += segment
            fillable += [False] * len(segment)
    return ids, fillable


def _check_lengths(index: int, segments: Sequence[Sequence[int] | int], max_tokens: int) -> None:
    """Before a row is built: a slip of the keyboard may ask for more than the memory holds."""
    gaps = [segment for segment in segments if isinstance(segment, int)]
    for gap in gaps:
        if gap < 1:
            raise UserError(f"row {index}: ask for at least 1 token to fill, not {gap}")
    if not gaps:
        raise UserError(f"row {index}: nothing to fill; add the length of a gap")
    wanted, given = sum(gaps), 1 + sum(len(s) for s in segments if not isinstance(s, int))
    if given + wanted > max_tokens:
        raise UserError(
            f"row {index}: {given} given tokens (with BOS) and {wanted} to fill make "
            f"{given + wanted}, the context holds {max_tokens}; shorten the text or ask for fewer"
        )


def _check_given(index: int, segment: Sequence[int], specials: Specials) -> None:
    reserved = {specials.mask_id: "MASK", specials.pad_id: "PAD"}
    for token in segment:
        if token in reserved:
            raise UserError(
                f"row {index}: the given text holds the {reserved[token]} id {token}; "
                "remove it, and ask for a gap by its length"
            )
        if not 0 <= token < specials.vocab_size:
            raise UserError(
                f"row {index}: id {token} is outside the vocabulary of {specials.vocab_size}; "
                "use the tokenizer this model was trained with"
            )
