"""A trajectory made by hand: two draft passes and one refill over `ab____`, and a shorter row."""

import math
from collections.abc import Sequence

import torch

from diffurefill.decode.canvas import Canvas
from diffurefill.decode.record import Pass

BOS, EOS, MASK, PAD = range(4)
TEXT = {4: "He", 5: " said", 6: " big", 7: " small", 8: "\n", 9: "</script><b>", 10: "\x1b[31m"}
BYTES = {11: b" \xe4", 12: b"\xbd\xa0", 13: "\u597d".encode()}
"""A wide character in two pieces, the first with a blank, and one in one piece."""


def decode(ids: Sequence[int]) -> str:
    known = {**{i: text.encode() for i, text in TEXT.items()}, **BYTES}
    return b"".join(known.get(i, b"") for i in ids).decode("utf-8", "replace")


def trajectory(
    *steps: list[int], given: int, remasked: set[int] = frozenset(), p: float = 0.5
) -> list[Pass]:
    """One row; each of `steps` is the row as a pass left it, and the last refilled `remasked`.

    A token written in pass k has probability p / (k + 1).
    """
    T = len(steps[0])
    fillable = torch.arange(T)[None] >= given
    first = torch.tensor([steps[0]]).masked_fill(fillable, MASK)
    canvas = Canvas(first, fillable, torch.zeros((1, T), dtype=torch.int32))
    before, confidence, found = first, torch.zeros(1, T), []
    for k, step in enumerate(steps):
        ids, back = torch.tensor([step]), torch.zeros(1, T, dtype=torch.bool)
        is_refill = bool(remasked) and k == len(steps) - 1
        if is_refill:
            back[0, list(remasked)] = True
        accepted = back if is_refill else (ids != before)
        confidence = confidence.masked_fill(accepted, math.log(p / (k + 1)))
        num_passes = 1 if is_refill else len(steps) - bool(remasked)
        index = 0 if is_refill else k
        found.append(
            Pass(canvas, int(is_refill), index, num_passes, ids, confidence, accepted, back, before)
        )
        before = ids
    return found


def story() -> list[Pass]:
    """`He said` given, four to fill, of which the refill redoes two and changes one."""
    M = MASK
    return trajectory(
        [BOS, 4, 5, 6, M, M, M],
        [BOS, 4, 5, 6, 8, 7, EOS],
        [BOS, 4, 5, 7, 8, 7, EOS],
        given=3,
        remasked={3, 5},
    )
