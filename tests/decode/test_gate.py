"""Keys and values that are kept: exact with one layer, approximate and measured with more."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from diffurefill.config import DRAFT, REFILL, Stage, UserError
from diffurefill.decode.canvas import Canvas, continuation
from diffurefill.decode.gate import CacheQuality, measure_cache
from diffurefill.decode.generate import generate
from diffurefill.model.cached import RowCache
from diffurefill.model.denoiser import Denoiser
from tests.decode.plain import PlainRow, V, specials
from tests.decode.test_refill import model
from tests.fakes import BigramDenoiser

KEPT = [replace(stage, refresh_every=4) for stage in (DRAFT, REFILL)]


def ragged() -> Canvas:
    return continuation([[5, 6], [7], [8, 9, 10]], [20, 9, 14], specials(), max_tokens=40)


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


def test_what_is_kept_of_a_row_does_not_hang_on_the_others(monkeypatch):
    """The second row is done with the draft after three passes: from the next full one on, the
    fifth, it is not computed."""
    denoiser, prompts, lengths = model(3), [[5, 6], [7], [8, 9, 10]], [20, 3, 14]
    stages = (replace(KEPT[0], quota="threshold", bound=0.2), KEPT[1])
    num_rows, logits = [], RowCache.logits

    def counted(cache: RowCache, canvas: Tensor, *args) -> Tensor:
        num_rows.append(len(canvas))
        return logits(cache, canvas, *args)

    monkeypatch.setattr(RowCache, "logits", counted)
    canvas = continuation(prompts, lengths, specials(), max_tokens=40)
    together = generate(denoiser, canvas, stages, specials(), seeds=[1, 2, 3])
    assert num_rows == [3] * 4 + [2] * 8 + [3] * 8
    for b in range(3):
        alone = continuation(prompts[b : b + 1], lengths[b : b + 1], specials(), max_tokens=40)
        done = generate(denoiser, alone, stages, specials(), seeds=[b + 1])
        assert together.ids[b, : alone.ids.shape[1]].tolist() == done.ids[0].tolist()


def plain_nll(denoiser: Denoiser, canvas: Canvas, ids: Tensor) -> np.ndarray:
    """Mean NLL of each row's generated tokens, every fifth of them masked at a time."""
    found = []
    for row, fillable, real in zip(ids, canvas.fillable, canvas.doc_ids >= 0, strict=True):
        allowed = np.asarray(specials().emittable)
        plain = PlainRow(denoiser, row[real].tolist(), fillable[real].tolist(), allowed, seed=0)
        plain.regroup(5)
        found.append(-np.mean(list(plain.confidence.values())))
    return np.array(found)


def test_more_layers_are_measured_by_the_texts_and_refused_above_the_bound():
    denoiser = model(3)
    canvas = continuation([[5, 6], [7]], [20, 1], specials(), max_tokens=40)
    how = {"seeds": [1, 2], "block_length": 12, "forbid_eos": True}
    exact, kept = (
        generate(denoiser, canvas, stages, specials(), **how) for stages in ((DRAFT, REFILL), KEPT)
    )
    before, after = (plain_nll(denoiser, canvas, done.ids) for done in (exact, kept))
    quality = measure_cache(denoiser, canvas, KEPT, specials(), **how)
    assert 0 < quality.agreement < 1
    assert quality.nll_exact == pytest.approx(before.mean(), abs=1e-6)
    assert quality.nll_kept == pytest.approx(after.mean(), abs=1e-6)
    assert abs(quality.cost) > 1e-3
    error = (after - before).std(ddof=1) / math.sqrt(2)
    assert quality.standard_error == pytest.approx(error, abs=1e-6)
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
