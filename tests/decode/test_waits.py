"""How often the host asks for a tensor's content while a pass runs: docs/decoding.md says so.

On a GPU each such question waits until everything asked before has been computed. The count is of
the operators that need an answer, whatever the device: `nonzero`, masks as indices, scalars.
"""

from collections import Counter
from itertools import pairwise

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from diffurefill.config import DRAFT, REFILL
from diffurefill.decode.canvas import continuation
from diffurefill.decode.generate import generate
from tests.decode.plain import specials
from tests.decode.test_refill import model

ASKING = {"aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::masked_select"}


class Asked(TorchDispatchMode):
    """Counts what asks, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().split(".")[0]
        by_mask = name in ("aten::index", "aten::index_put", "aten::index_put_") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if name in ASKING or by_mask:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("lengths", [[20, 20], [20, 9]])
def test_a_pass_of_the_card_asks_no_more_often_than_the_page_says(lengths):
    denoiser = model(2)
    canvas = continuation([[5], [6]], lengths, specials(), max_tokens=32)
    ends: list[int] = []
    with Asked() as asked:
        generate(
            denoiser, canvas, (DRAFT, REFILL), specials(),
            seeds=[1, 2], on_pass=lambda _: ends.append(asked.counts.total()),
        )  # fmt: skip
    each = [after - before for before, after in pairwise(ends)]
    assert Counter(each).most_common(1)[0][0] <= 4
    assert max(each) <= 8
