"""Refill as repair (T6): planted errors are found and mended, by each kind of confidence."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from diffurefill.config import DRAFT, ModelConfig, Stage, UserError
from diffurefill.decode.canvas import continuation
from diffurefill.decode.generate import Generation, generate
from diffurefill.decode.passes import regrouped
from diffurefill.decode.run import Run
from diffurefill.model.denoiser import Denoiser
from tests.decode.plain import PlainRow, V, specials
from tests.fakes import BOS, MASK, PAD, BigramDenoiser, OracleDenoiser, TinyDenoiser

N = 30
TEXT = torch.arange(N + 1) % 15 + 4
WRONG = [4, 9, 17, 25]
GREEDY = Stage(num_passes=1, remask_fraction=0.2, temperature=(0.0, 0.0))


class Planting(OracleDenoiser):
    """An oracle that drafts a wrong token at WRONG, in its first six calls: as sure of it as of the
    right ones, or, `says_so`, less sure."""

    def __init__(self, *, says_so: bool) -> None:
        super().__init__(TEXT, V)
        self.wrong_logit = 4.0 if says_so else 20.0

    def logits(self, canvas: Tensor, doc_ids: Tensor) -> Tensor:
        logits = super().logits(canvas, doc_ids).clone()
        if self.num_calls <= 6:
            logits[:, WRONG] = 0.0
            logits[:, WRONG, 20] = self.wrong_logit
        return logits


def decoded(denoiser: TinyDenoiser, *refills: Stage) -> Generation:
    """Six greedy draft passes, then the refills."""
    canvas = continuation([[]], N, specials(), max_tokens=N + 1)
    draft = replace(DRAFT, num_passes=6, temperature=(0.0, 0.0), neighbour_ban=0.0)
    return generate(denoiser, canvas, (draft, *refills), specials(), seeds=[0])


def errors(result: Generation) -> list[int]:
    return [i for i in range(1, N + 1) if result.ids[0, i] != TEXT[i]]


def test_without_refill_the_planted_errors_stay():
    assert errors(decoded(Planting(says_so=True))) == WRONG


def test_errors_that_the_draft_doubts_are_mended_by_one_refill():
    result = decoded(Planting(says_so=True), GREEDY)
    assert errors(result) == []
    before, after = result.trajectory[-2:]
    assert after.remasked[0, WRONG].all()
    assert (after.confidence[0, WRONG] > before.confidence[0, WRONG]).all()


def test_errors_of_a_sure_draft_are_found_by_judging_anew_only():
    stale = decoded(Planting(says_so=False), GREEDY)
    assert errors(stale) != []
    found = decoded(Planting(says_so=False), replace(GREEDY, confidence="regrouped"))
    assert errors(found) == []
    assert found.num_forward_passes == stale.num_forward_passes + 1
    assert found.num_positions == stale.num_positions + 5 * (N + 1)


def test_a_cap_gives_every_position_its_turn():
    free = decoded(BigramDenoiser(V), replace(GREEDY, num_passes=5))
    capped = decoded(BigramDenoiser(V), replace(GREEDY, num_passes=5, remask_cap=1))
    times = [sum(p.remasked.int() for p in r.trajectory) for r in (free, capped)]
    assert times[0].max() > 1
    assert times[1].max() == 1
    assert times[1].sum() == N


def test_a_row_without_doubts_is_done():
    result = decoded(OracleDenoiser(TEXT, V), replace(GREEDY, num_passes=8, sure_above=0.9))
    assert result.num_forward_passes == 6


def test_a_pass_that_changes_nothing_is_the_last():
    result = decoded(OracleDenoiser(TEXT, V), replace(GREEDY, num_passes=8, stop_unchanged=True))
    assert result.num_forward_passes == 7


# --- shadows -------------------------------------------------------------------------------------


def model(layers: int) -> Denoiser:
    """Random weights, large enough that positions matter to each other."""
    config = ModelConfig(vocab_size=V, width=32, layers=layers, heads=2, ffn_width=48)
    denoiser = Denoiser(config)
    denoiser.init_weights(torch.Generator().manual_seed(1))
    with torch.no_grad():
        for parameter in denoiser.parameters():
            parameter.mul_(8.0 if parameter.ndim > 1 else 1.0)
    return denoiser.eval()


@pytest.mark.parametrize("layers", [1, 2])
def test_a_shadow_leaves_its_token_out_and_with_one_layer_exactly(layers):
    denoiser = model(layers)
    canvas = continuation([[5, 6], [7]], [9, 5], specials(), max_tokens=16)
    stages = (replace(DRAFT, num_passes=4), replace(GREEDY, confidence="shadow"))
    result = generate(denoiser, canvas, stages, specials(), seeds=[1, 2])
    refill = result.trajectory[-1]
    seen = refill.previous_ids.masked_fill(refill.remasked, MASK)
    worst = 0.0
    for b, i in (canvas.fillable & ~refill.remasked).nonzero().tolist():
        at = torch.zeros_like(seen[:1], dtype=torch.bool)
        at[0, i] = True
        with torch.inference_mode():
            hidden = seen[b : b + 1].masked_fill(at, MASK)
            logits = denoiser(hidden, canvas.doc_ids[b : b + 1], at)[0]
            barred = ~torch.as_tensor(specials().emittable)
            exact = logits.masked_fill(barred, -torch.inf).log_softmax(0)[seen[b, i]]
        worst = max(worst, abs(exact - refill.confidence[b, i]).item())
    assert worst < 1e-4 if layers == 1 else worst > 1e-3
    assert result.num_forward_passes == 5


def test_shadows_do_not_touch_the_pass_itself():
    denoiser, canvas = model(3), continuation([[5, 6], [7]], [9, 5], specials(), max_tokens=16)
    plain, shadow = (
        generate(
            denoiser, canvas, (DRAFT, replace(GREEDY, confidence=kind)), specials(), seeds=[1, 2]
        )
        for kind in ("stale", "shadow")
    )
    assert torch.equal(plain.ids, shadow.ids)


def test_shadows_need_a_model_whose_insides_are_known():
    with pytest.raises(UserError, match="use confidence stale or regrouped"):
        decoded(BigramDenoiser(V), replace(GREEDY, confidence="shadow"))


def test_judging_anew_counts_no_eos_where_none_may_stand():
    denoiser, (B, n) = model(2), (2, 4)
    canvas = continuation([[5], [6, 7]], [9, 6], specials(), max_tokens=16)
    ids = canvas.ids.masked_fill(canvas.fillable, 8)
    run = Run(denoiser, canvas, specials(), [0] * B, torch.tensor([BOS, MASK, PAD, V - 1]))
    run.no_eos = canvas.fillable & (canvas.fillable.cumsum(dim=1) <= n)
    with torch.inference_mode():
        found = regrouped(run, canvas.fillable, ids, groups=3)
    for b, real in enumerate(canvas.doc_ids >= 0):
        allowed = np.asarray(specials().emittable)
        row, fillable = ids[b, real].tolist(), canvas.fillable[b, real].tolist()
        plain = PlainRow(denoiser, row, fillable, allowed, seed=0, min_tokens=n)
        plain.regroup(3)
        expected = [plain.confidence[i] for i in plain.slots]
        assert found[b, canvas.fillable[b]].tolist() == pytest.approx(expected, abs=1e-4)
