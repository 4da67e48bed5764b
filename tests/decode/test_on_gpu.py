"""Passes as a GPU would run them, on a stand-in for one: right places, waits as the page says, and
the text of the CPU. What it cannot show are kernels and CUDA graphs."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from diffurefill.config import DRAFT, REFILL, ModelConfig, Stage
from diffurefill.decode.autoregressive import LeftToRight, generate_left_to_right
from diffurefill.decode.canvas import Canvas, continuation
from diffurefill.decode.generate import generate
from diffurefill.model.denoiser import Denoiser
from tests.decode.plain import specials
from tests.gpu_stand_in import GPU, stand_in_gpu

KNOWN = specials()
SIZES = ModelConfig(vocab_size=KNOWN.vocab_size, width=16, layers=2, heads=2, ffn_width=16)
ANSWER = "to cpu"
"""The wait for what the host has asked."""


def build(*, causal: bool = False) -> Denoiser:
    model = Denoiser(replace(SIZES, causal=causal))
    model.init_weights(torch.Generator().manual_seed(0))
    return model.eval()


def canvas() -> Canvas:
    return continuation([[5], [6], [7, 8]], [12, 5, 9], KNOWN, max_tokens=32)


@pytest.mark.parametrize(
    ("stages", "asked"),
    [
        ((DRAFT, REFILL), 0),
        ((Stage(num_passes=0, quota="threshold", bound=0.3, temperature=(0.0, 0.0)),), 1),
        ((replace(DRAFT, quota="entropy_bound", bound=0.5, order="entropy"),), 1),
        ((replace(DRAFT, order="margin"), replace(REFILL, confidence="regrouped")), 1),
        ((Stage(num_passes=6, quota="one_per_run", commit_gap=2), replace(REFILL, min_p=0.1)), 1),
        ((replace(DRAFT, refresh_every=3), replace(REFILL, refresh_every=3)), 2),
        ((replace(DRAFT, commit_gap=3), replace(REFILL, confidence="shadow")), 9),
    ],
)
def test_stages_write_on_a_gpu_what_they_write_on_a_cpu(
    stages: tuple[Stage, ...], asked: int
) -> None:
    seeds = [1, 2, 3]
    here = generate(build(), canvas(), stages, KNOWN, seeds=seeds, min_tokens=2)
    with stand_in_gpu((8, 0)) as gpu:
        model, there = build().to(GPU), canvas().to(GPU)
        generate(
            model, there, [Stage(num_passes=1)], KNOWN, seeds=seeds
        )  # makes the table of angles
        gpu.waits.clear()
        found = generate(model, there, stages, KNOWN, seeds=seeds, min_tokens=2)
        waits = Counter(gpu.waits)
        assert found.ids.device == found.confidence.device == GPU
        assert torch.equal(found.ids.cpu(), here.ids)
    assert found.num_forward_passes == here.num_forward_passes
    # Before the first pass: is there anything to fill, and nowhere else, the rows' sizes, the ids
    # that are never written. After the last: was all finite.
    before = Counter({"_local_scalar_dense": 1, "equal": 1, "to cuda": 1, ANSWER: 1})
    during = waits - before - Counter({ANSWER: 1})
    assert during.total() <= asked * found.num_forward_passes
    assert (during.total() > 0) == (asked > 0)


def test_the_twin_writes_without_a_wait() -> None:
    how = LeftToRight(temperature=0.7, forbid_eos=True)
    options = {"num_layers": SIZES.layers, "seeds": [1, 2, 3]}
    here = generate_left_to_right(build(causal=True), canvas(), KNOWN, how, **options)
    waits = []
    with stand_in_gpu((8, 0)) as gpu:
        twin = build(causal=True).to(GPU)
        for lengths in ([4, 4, 4], [12, 5, 9]):
            gpu.waits.clear()
            there = continuation([[5], [6], [7, 8]], lengths, KNOWN, max_tokens=32).to(GPU)
            found = generate_left_to_right(twin, there, KNOWN, how, **options)
            waits.append(gpu.waits.total())
        assert torch.equal(found.ids.cpu(), here.ids)
    assert waits[1] <= waits[0], "once for the table of angles, and none for a token more"
