import pytest
import torch

from diffurefill.optim.cautious import Cautious, cautious_update
from diffurefill.optim.muon import Muon

from .test_newton_schulz import randn

MAKERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
    "muon": lambda p: Muon(p, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
}
both = pytest.mark.parametrize("kind", MAKERS)


def run(make, grads, start):
    parameter = torch.nn.Parameter(start.clone())
    optimizer = make([parameter])
    for grad in grads:
        parameter.grad = grad.clone()
        optimizer.step()
    return parameter.detach()


def cautious(kind):
    return lambda parameters: Cautious(MAKERS[kind](parameters))


def test_adamw_equals_the_formula_over_several_steps():
    """The mask comes from the mean *and* the gradient; from the mean alone it would be all ones."""
    weight, lr, decay = randn(6, 5), 0.01, 0.1
    grads = [randn(6, 5, seed=s) for s in range(1, 5)]
    found = run(cautious("adamw"), grads, weight)
    mean = square = torch.zeros_like(weight)
    masked = 0
    for step, g in enumerate(grads, start=1):
        mean, square = 0.9 * mean + 0.1 * g, 0.999 * square + 0.001 * g * g
        update = mean / (1 - 0.9**step) / ((square / (1 - 0.999**step)).sqrt() + 1e-8)
        mask = (mean * g > 0).float()
        masked += int((mask == 0).sum())
        update = update * mask / mask.mean().clamp(min=1e-3)
        weight = weight * (1 - lr * decay) - lr * update
    assert masked > 0
    torch.testing.assert_close(found, weight)


@both
def test_where_all_signs_agree_it_is_the_inner_optimiser(kind):
    # A Hadamard matrix is orthogonal but for its size: Muon's update is a multiple of it, and
    # AdamW's of any gradient that stays the same has its signs.
    pair = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    grads, start = [torch.kron(pair, torch.kron(pair, pair))] * 3, randn(8, 8)
    torch.testing.assert_close(run(cautious(kind), grads, start), run(MAKERS[kind], grads, start))


def test_an_element_without_gradient_does_not_move():
    """The rows of tokens that a step has not met: momentum alone does not carry them on."""
    update = torch.tensor([-1.0, 1.0, -1.0, 1.0])
    found = cautious_update(update, torch.tensor([0.0, 0.0, 3.0, -3.0]))
    assert found.tolist() == [0.0, 0.0, -2.0, 2.0]


@both
def test_an_element_against_its_gradient_only_decays(kind):
    start, first, second = randn(8, 8), randn(8, 8, seed=1), randn(8, 8, seed=2)
    before = run(cautious(kind), [first], start)
    after = run(cautious(kind), [first, second], start)
    plain_before = run(MAKERS[kind], [first], start)
    plain = run(MAKERS[kind], [first, second], start) - plain_before * (1 - 0.001)
    against = plain * second > 0
    assert 0 < against.sum() < 64
    torch.testing.assert_close(after[against], before[against] * (1 - 0.001))
    scale = 64 / (~against).sum()
    moved = (after - before * (1 - 0.001))[~against]
    torch.testing.assert_close(moved, scale * plain[~against], atol=1e-6, rtol=1e-4)


def test_an_update_that_nothing_agrees_with_vanishes():
    update = cautious_update(torch.ones(4), torch.ones(4))
    assert (update == 0).all()


def test_the_scale_is_bounded_when_next_to_nothing_agrees():
    update, grad = torch.ones(10_000), torch.ones(10_000)
    grad[0] = -1.0
    assert cautious_update(update, grad)[0].item() == pytest.approx(1000.0)


@both
def test_a_parameter_without_a_gradient_stays(kind):
    parameters = [torch.nn.Parameter(randn(8, 8)) for _ in range(2)]
    parameters[0].grad = randn(8, 8, seed=1)
    before = [p.detach().clone() for p in parameters]
    cautious(kind)(parameters).step()
    assert not torch.equal(parameters[0], before[0])
    assert torch.equal(parameters[1], before[1])


def test_weights_come_back_when_the_inner_step_fails():
    class Broken(torch.optim.SGD):
        def step(self, closure=None):
            raise RuntimeError("out of memory")

    weight = torch.nn.Parameter(randn(8, 8))
    weight.grad = randn(8, 8, seed=1)
    before = weight.detach().clone()
    with pytest.raises(RuntimeError, match="out of memory"):
        Cautious(Broken([weight], lr=0.1)).step()
    assert torch.equal(weight, before)
