import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from diffurefill.decode.counts import Counts
from diffurefill.decode.slots import Slots


@st.composite
def masks(draw: st.DrawFn) -> torch.Tensor:
    B, T = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    return torch.tensor(draw(st.lists(st.booleans(), min_size=B * T, max_size=B * T))).view(B, T)


@given(masks(), st.integers(0, 3))
def test_slots_are_the_true_positions_in_order_and_the_surplus_changes_nothing(mask, surplus):
    numbers = mask.sum(dim=1).numpy()
    slots = Slots.at(mask, Counts(numbers, numbers + surplus))
    found, sink = mask.flatten().nonzero()[:, 0].tolist(), mask.numel()
    N = slots.counts.total
    assert slots.to.tolist() == found + [sink] * (N - len(found))
    assert slots.of[: len(found)].tolist() == found
    assert ((slots.of >= 0) & (slots.of < sink)).all()
    if found:
        assert (slots.of[len(found) :] == found[0]).all()

    values = torch.arange(mask.numel()).view(mask.shape)
    assert slots.read(values)[: len(found)].tolist() == values[mask].tolist()
    assert slots.read(values[..., None]).shape == (N, 1)
    written = slots.write(torch.arange(100, 100 + N), values)
    assert written[mask].tolist() == list(range(100, 100 + len(found)))
    assert torch.equal(written[~mask], values[~mask])


def test_no_slot_of_an_empty_mask_needs_no_position():
    none = np.zeros(2, dtype=np.int64)
    slots = Slots.at(torch.zeros(2, 3, dtype=torch.bool), Counts.exactly(none))
    assert slots.read(torch.ones(2, 3)).shape == (0,)
    assert torch.equal(slots.write(torch.zeros(0), torch.ones(2, 3)), torch.ones(2, 3))
