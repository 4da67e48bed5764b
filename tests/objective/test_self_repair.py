"""Self-repair rows: originals as targets, the model's own tokens around them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from diffurefill.config import ObjectiveConfig, UserError
from diffurefill.objective.corruption import Corrupted, corrupt
from diffurefill.objective.loss import masked_cross_entropy, token_weights
from diffurefill.objective.self_repair import self_repair
from tests.train.test_step import BOS, CONFIG, MASK, B, T, V, build, rows, step

ALWAYS = ObjectiveConfig(self_repair=1.0, self_repair_rate=(0.3, 0.6))
OWN = 31
"""What the fake model writes: above every id of the rows."""
KEYS = [(0, "mask", 1, 0, row) for row in range(B)]


def writes_own(canvas: Tensor, doc_ids: Tensor, at: Tensor) -> Tensor:
    """All but sure of OWN, the surer the further right."""
    logits = torch.zeros(1, T, V)
    logits[0, :, OWN] = 20.0 + torch.arange(T)
    return logits[at]


def made(config: ObjectiveConfig = ALWAYS, predict=writes_own) -> tuple[Corrupted, Corrupted]:
    """The step's ordinary rows, and the same with self-repair."""
    ids = {"keys": KEYS, "mask_id": MASK, "bos_id": BOS}
    plain = corrupt(rows(), config, **ids)
    return plain, self_repair(plain, rows(), predict, config, **ids)


def test_targets_are_originals_and_the_context_is_the_model_s() -> None:
    _, found = made()
    original = torch.from_numpy(rows().ids)
    assert torch.equal(found.targets, original)
    can_mask = torch.from_numpy((rows().doc_ids >= 0) & (rows().ids != BOS))
    for row in range(B):
        own, masked = found.canvas[row] == OWN, found.canvas[row] == MASK
        assert torch.equal(masked, found.is_masked[row])
        untouched = ~own & ~masked
        assert torch.equal(found.canvas[row][untouched], original[row][untouched])
        num_filled = int(own.sum() + masked.sum())
        assert int(masked.sum()) == max(1, round(0.2 * num_filled))
        assert not (own | masked)[~can_mask[row]].any()
        # The least sure are those furthest left.
        assert not own.any() or masked.nonzero().max() < own.nonzero().min()
        assert found.num_eligible[row] == can_mask[row].sum()
        assert found.t[row] == pytest.approx(int(masked.sum()) / int(can_mask[row].sum()))


def test_specials_are_never_written() -> None:
    def likes_specials(canvas: Tensor, doc_ids: Tensor, at: Tensor) -> Tensor:
        logits = torch.zeros(1, T, V)
        logits[..., MASK:] = 50.0
        logits[..., BOS] = 50.0
        return logits[at]

    plain, found = made(predict=likes_specials)
    given = torch.from_numpy(rows().ids)
    written = (found.canvas != given) & ~found.is_masked
    assert written.any()
    assert ((found.canvas[written] > BOS) & (found.canvas[written] < MASK)).all()
    assert torch.equal(plain.targets, found.targets)


def test_rows_are_chosen_by_their_keys_and_the_others_stay_as_they_were() -> None:
    some = replace(ALWAYS, self_repair=0.5)
    plain, found = made(some)
    changed = (found.canvas == OWN).any(dim=1)
    assert 0 < int(changed.sum()) < B
    untouched = corrupt(rows(), some, keys=KEYS, mask_id=MASK, bos_id=BOS)
    assert all(map(torch.equal, plain, untouched))
    for name in ("canvas", "is_masked"):
        assert torch.equal(getattr(plain, name)[~changed], getattr(found, name)[~changed])
    assert torch.equal(found.canvas, made(some)[1].canvas)
    names = ("ids", "doc_ids", "span_ids", "part_lengths")
    alone = replace(rows(), **{name: getattr(rows(), name)[-1:] for name in names})
    ids = {"keys": KEYS[-1:], "mask_id": MASK, "bos_id": BOS}
    lone = self_repair(corrupt(alone, ALWAYS, **ids), alone, writes_own, ALWAYS, **ids)
    assert torch.equal(lone.canvas[0], made()[1].canvas[-1])


def test_the_model_s_distribution_is_what_is_drawn() -> None:
    """One likely token of probability 0.7 over some hundreds of draws."""

    def leans(canvas: Tensor, doc_ids: Tensor, at: Tensor) -> Tensor:
        logits = torch.full((1, T, V), -50.0)
        logits[..., OWN], logits[..., OWN + 1] = np.log(0.7), np.log(0.3)
        return logits[at]

    counts = np.zeros(2)
    for at in range(80):
        keys = [(at, *key[1:]) for key in KEYS]
        ids = {"keys": keys, "mask_id": MASK, "bos_id": BOS}
        # Equal confidences would re-mask by position; all draws but the masked fifth are seen.
        found = self_repair(corrupt(rows(), ALWAYS, **ids), rows(), leans, ALWAYS, **ids)
        seen = found.canvas[found.canvas >= OWN]
        counts += [int((seen == OWN).sum()), int((seen == OWN + 1).sum())]
        # The less likely of the two is less sure, and so masked first.
        counts[1] += int(found.is_masked.sum())
    assert counts[0] / counts.sum() == pytest.approx(0.7, abs=0.04)


def test_a_model_that_is_no_number_any_more_is_told_by_its_loss() -> None:
    config = replace(CONFIG, objective=ALWAYS)
    model, optimizer = build(config)
    with torch.no_grad():
        model.embedding.weight.fill_(torch.nan)
    assert step(model, optimizer, rows(), config).loss.isnan()


def test_no_gradient_goes_through_the_sampling() -> None:
    """The update is that of the corrupted rows taken as given."""
    config = replace(CONFIG, objective=replace(ALWAYS, self_repair=0.5))
    model, optimizer = build(config)
    twin, _ = build(config)
    result = step(model, optimizer, rows(), config)
    c = result.corrupted
    assert ((c.canvas != torch.from_numpy(rows().ids)) & ~c.is_masked).any()
    weights = token_weights(c.is_masked, c.parts, c.t, c.num_eligible, "pooled")
    at = c.is_masked
    logits = twin(c.canvas, torch.from_numpy(rows().doc_ids), at)
    loss, _ = masked_cross_entropy(logits, c.targets[at], weights[at])
    loss.backward()
    grads = [p.grad for p in twin.parameters() if p.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in grads]))
    assert result.loss.item() == pytest.approx(loss.item(), abs=1e-5)
    assert result.grad_norm.item() == pytest.approx(norm.item(), rel=1e-4)


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(UserError, match="no elbo can weigh"):
        ObjectiveConfig(self_repair=0.25, loss="elbo")
    with pytest.raises(UserError, match="two rising shares"):
        ObjectiveConfig(self_repair_rate=(0.5, 0.2))
