"""Keys and values that are kept: exact with one layer, approximate and measured with more."""

import math
from dataclasses import replace

import pytest
import torch

from diffurefill.config import DRAFT, REFILL, Stage, UserError
from diffurefill.decode.canvas import Canvas, continuation
from diffurefill.decode.gate import CacheQuality, measure_cache
from diffurefill.decode.generate import generate
from diffurefill.model.cached import RowCache
from tests.decode.plain import V, specials
from tests.decode.test_refill import model
from tests.fakes import MASK, BigramDenoiser

KEPT = [replace(stage, refresh_every=4) for stage in (DRAFT, REFILL)]


def ragged() -> Canvas:
    return continuation([[5, 6], [7], [8, 9, 10]], [20, 9, 14], specials(), max_tokens=40)


def test_a_full_pass_gives_the_plain_logits():
    denoiser, canvas = model(3), ragged()
    with torch.inference_mode():
        wanted = denoiser(canvas.ids, canvas.doc_ids, canvas.fillable)
        cache = RowCache(denoiser)
        got, computed = cache.logits(canvas.ids, canvas.doc_ids, canvas.fillable, full=True)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    assert computed == canvas.ids.numel()


def test_a_pass_over_some_positions_uses_what_the_others_were():
    """With one layer keys and values hang on a position's own id alone: nothing is approximate."""
    denoiser, canvas = model(1), ragged()
    cache = RowCache(denoiser)
    changed = canvas.ids.clone()
    changed[:, 4], changed[0, 10] = 11, 12
    at = (changed == MASK) & (torch.arange(changed.shape[1]) % 3 == 0)
    with torch.inference_mode():
        cache.logits(canvas.ids, canvas.doc_ids, canvas.fillable, full=True)
        got, computed = cache.logits(changed, canvas.doc_ids, at, full=False)
        wanted = denoiser(changed, canvas.doc_ids, at)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    assert computed == int((at | (changed != canvas.ids)).sum())


def test_one_layer_decodes_the_same_with_fewer_positions_computed():
    denoiser, canvas = model(1), ragged()
    exact, kept = (
        generate(denoiser, canvas, stages, specials(), seeds=[1, 2, 3])
        for stages in ((DRAFT, REFILL), KEPT)
    )
    assert torch.equal(exact.ids, kept.ids)
    assert kept.num_positions < 0.7 * exact.num_positions
    quality = measure_cache(denoiser, canvas, KEPT, specials(), seeds=[1, 2, 3])
    assert quality.agreement == 1.0
    assert quality.positions_ratio == kept.num_positions / exact.num_positions
    quality.check()


def test_more_layers_are_measured_and_refused_above_the_bound():
    quality = measure_cache(model(3), ragged(), KEPT, specials(), seeds=[1, 2, 3])
    assert 0 < quality.agreement < 1
    with pytest.raises(UserError, match="cannot be ruled out"):
        quality.check(max_nats=-1e9)


@pytest.mark.parametrize(
    ("nll", "error", "passes"),
    [
        (3.0, 0.0, True),
        (3.04, 0.0, True),
        (3.04, 0.01, False),
        (3.1, 0.0, False),
        (3.0, math.nan, False),
    ],
)
def test_the_gate_wants_the_cost_ruled_out(nll, error, passes):
    quality = CacheQuality(9, 3.0, nll, error, 0.9, 0.5)
    if passes:
        quality.check()
    else:
        with pytest.raises(UserError, match="decode exactly"):
            quality.check()


def test_other_denoisers_are_refused():
    with pytest.raises(UserError, match="refresh_every 1"):
        generate(BigramDenoiser(V), ragged(), [Stage(refresh_every=2)], specials(), seeds=[1, 2, 3])
