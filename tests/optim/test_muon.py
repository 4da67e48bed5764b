import copy

import pytest
import torch

from diffurefill.optim import muon as room
from diffurefill.optim import newton_schulz
from diffurefill.optim.muon import Muon

from .test_newton_schulz import plain_newton_schulz, randn

RMS = "match_rms_adamw"


def plain_muon(weight, grads, *, lr, weight_decay, pieces):
    """Momentum by the sum form, every piece by itself, one update after the other."""
    buffer = torch.zeros_like(weight)
    for grad in grads:
        buffer = 0.95 * buffer + grad
        direction = grad + 0.95 * buffer
        update = torch.cat([plain_newton_schulz(d) for d in direction.chunk(pieces)])
        rows, cols = weight.shape[0] // pieces, weight.shape[1]
        weight = weight * (1 - lr * weight_decay) - lr * 0.2 * max(rows, cols) ** 0.5 * update
    return weight


def movement(make, grads, start):
    """How far `start` moves under the gradients, one step each."""
    parameter = torch.nn.Parameter(start.clone())
    optimizer = make([parameter])
    for grad in grads:
        parameter.grad = grad.clone()
        optimizer.step()
    return parameter.detach() - start


@pytest.mark.parametrize("shape", [(64, 64), (192, 64), (64, 176)])
def test_an_update_has_the_rms_of_adamw(shape):
    weight = torch.nn.Parameter(torch.zeros(shape))
    weight.grad = randn(*shape)
    Muon([weight], lr=1.0, adjust_lr_fn=RMS).step()
    assert 0.17 <= weight.detach().square().mean().sqrt().item() <= 0.20


@pytest.mark.parametrize("spectral", [False, True])
def test_several_steps_on_mixed_shapes_equal_a_plain_loop(spectral, monkeypatch):
    # The pieces of the first are as large as the second and share its batch.
    monkeypatch.setattr(newton_schulz, "LARGE_FROM", 1 if spectral else 10**9)
    shapes, pieces = [(72, 24), (24, 24), (80, 24), (24, 40)], [3, 1, 2, 1]
    weights = [randn(*shape, seed=i) for i, shape in enumerate(shapes)]
    parameters = [torch.nn.Parameter(w.clone()) for w in weights]
    groups = [{"params": [p], "num_pieces": n} for p, n in zip(parameters, pieces, strict=True)]
    optimizer = Muon(groups, lr=0.02, weight_decay=0.1, adjust_lr_fn=RMS)
    grads = [[randn(*w.shape, seed=10 * i + s) for s in range(4)] for i, w in enumerate(weights)]
    for step in range(4):
        for parameter, own in zip(parameters, grads, strict=True):
            parameter.grad = own[step].clone()
        optimizer.step()
    for parameter, weight, own, n in zip(parameters, weights, grads, pieces, strict=True):
        expected = plain_muon(weight, own, lr=0.02, weight_decay=0.1, pieces=n)
        torch.testing.assert_close(parameter.detach(), expected, atol=2e-4, rtol=1e-3)


def test_large_matrices_go_one_by_one_and_small_ones_in_a_batch(monkeypatch):
    seen = []
    for name in ("orthogonalise", "orthogonalise_one"):
        original = getattr(room, name)

        def noted(x, iteration, name=name, original=original):
            seen.append((name, tuple(x.shape)))
            return original(x, iteration)

        monkeypatch.setattr(room, name, noted)
    parameters = [torch.nn.Parameter(torch.zeros(s)) for s in ((512, 256), (8, 8), (8, 8))]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    groups = [{"params": parameters[:1], "num_pieces": 2}, {"params": parameters[1:]}]
    Muon(groups).step()
    large = ("orthogonalise_one", (256, 256))
    assert seen == [large, large, ("orthogonalise", (2, 8, 8))]


def test_the_update_of_the_demo_keeps_its_bits():
    """Runs under way repeat bit for bit: this arithmetic, in this order, for small matrices."""
    shapes, grads = [(128, 128), (128, 128)], [randn(128, 128, seed=s) for s in (1, 2)]
    parameters = [torch.nn.Parameter(randn(*s, seed=i)) for i, s in enumerate(shapes)]
    expected = [p.detach().clone() for p in parameters]
    optimizer = Muon(parameters, lr=0.01, weight_decay=0.1, adjust_lr_fn=RMS)
    means = [torch.zeros(s) for s in shapes]
    for _ in range(2):
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad.clone()
        optimizer.step()
        x = torch.stack(
            [g.lerp(m.lerp_(g, 1.0 - 0.95), 0.95) for g, m in zip(grads, means, strict=True)]
        )
        x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
        for _ in range(5):
            gram = x @ x.mT
            p = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
            x = torch.baddbmm(x, p, x, beta=3.4445)
        for weight, update in zip(expected, x, strict=True):
            weight.mul_(1.0 - 0.01 * 0.1).add_(update, alpha=-0.01 * (0.2 * 128**0.5))
    for parameter, weight in zip(parameters, expected, strict=True):
        assert torch.equal(parameter, weight)


needs_torch_muon = pytest.mark.skipif(
    not hasattr(torch.optim, "Muon"), reason="this torch has no Muon"
)
ARGUMENTS = [
    {},
    {"adjust_lr_fn": "original"},
    {"adjust_lr_fn": RMS},
    {"nesterov": False},
    {"momentum": 0.8, "weight_decay": 0.3},
    {"ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5)},
]


@needs_torch_muon
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
@pytest.mark.parametrize("shape", [(40, 64), (96, 32), (256, 512)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-2), ("auto", 2e-2)])
def test_updates_equal_those_of_torch_muon(arguments, shape, dtype, tolerance):
    """In bf16 to the bit where products are batched; large oblong matrices and fp32 to rounding,
    which is mostly torch's: it knows no arithmetic but bf16."""
    start, grads = randn(*shape, seed=9), [randn(*shape, seed=s) for s in range(3)]
    expected = movement(lambda p: torch.optim.Muon(p, lr=0.02, **arguments), grads, start)
    found = movement(lambda p: Muon(p, lr=0.02, ns_dtype=dtype, **arguments), grads, start)
    assert (found - expected).norm() < tolerance * expected.norm()


def test_pieces_move_as_separate_parameters_do():
    start, grad = randn(96, 32), randn(96, 32, seed=1)
    for scale in ("original", RMS):
        whole = torch.nn.Parameter(start.clone())
        whole.grad = grad.clone()
        Muon([{"params": [whole], "num_pieces": 3}], lr=0.1, adjust_lr_fn=scale).step()
        cut = [torch.nn.Parameter(piece.clone()) for piece in start.chunk(3)]
        for parameter, piece in zip(cut, grad.chunk(3), strict=True):
            parameter.grad = piece.clone()
        Muon(cut, lr=0.1, adjust_lr_fn=scale).step()
        torch.testing.assert_close(whole.detach(), torch.cat(cut).detach())


def test_groups_of_one_shape_keep_their_own_settings():
    start, grad = randn(16, 16), randn(16, 16, seed=1)
    settings_ = [{"lr": 0.1}, {"lr": 0.2, "ns_steps": 2}, {"lr": 0.1, "adjust_lr_fn": RMS}]
    together = [torch.nn.Parameter(start.clone()) for _ in settings_]
    for parameter in together:
        parameter.grad = grad.clone()
    Muon([{"params": [p], **s} for p, s in zip(together, settings_, strict=True)]).step()
    for parameter, own in zip(together, settings_, strict=True):
        expected = movement(lambda p, own=own: Muon(p, **own), [grad], start)
        torch.testing.assert_close(parameter.detach() - start, expected)


def test_a_parameter_without_a_gradient_stays():
    weight = torch.nn.Parameter(randn(8, 8))
    before = weight.detach().clone()
    Muon([weight], lr=1.0).step()
    assert torch.equal(weight, before)


def test_a_closure_is_called_with_gradients_on_and_its_loss_returned():
    weight = torch.nn.Parameter(randn(8, 8))
    before = weight.detach().clone()

    def closure():
        loss = weight.square().sum()
        loss.backward()
        return loss.item()

    assert Muon([weight], lr=0.1).step(closure) == pytest.approx(before.square().sum().item())
    assert not torch.equal(weight, before)


def test_a_state_saved_before_an_argument_existed_takes_the_default():
    weight = torch.nn.Parameter(randn(8, 8))
    optimizer = Muon([weight], lr=0.1, adjust_lr_fn=RMS)
    state = copy.deepcopy(optimizer.state_dict())
    old = ("lr", "momentum", "weight_decay", "num_pieces", "params")
    state["param_groups"] = [
        {k: v for k, v in g.items() if k in old} for g in state["param_groups"]
    ]
    state["param_groups"][0]["lr"] = 0.7
    optimizer.load_state_dict(state)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["adjust_lr_fn"], group["ns_dtype"]) == (0.7, RMS, "auto")


@pytest.mark.parametrize(
    ("arguments", "shape", "words"),
    [
        ({"adjust_lr_fn": "rms"}, (8, 8), "adjust_lr_fn must be one of"),
        ({"lr": -1.0}, (8, 8), "lr must be at least 0"),
        ({"momentum": -1.0}, (8, 8), "momentum must be at least 0"),
        ({"weight_decay": -1.0}, (8, 8), "weight_decay must be at least 0"),
        ({"ns_dtype": "bf16"}, (8, 8), "ns_dtype must be"),
        ({"ns_dtype": torch.int32}, (8, 8), "ns_dtype must be"),
        ({"num_pieces": 3}, (8, 8), "8 rows do not divide into 3 pieces"),
        ({}, (8,), "Muon is for matrices"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_at_once(arguments, shape, words):
    with pytest.raises(ValueError, match=words):
        Muon([torch.nn.Parameter(torch.zeros(shape))], **arguments)


def test_a_dtype_may_be_given_by_name():
    """As the config gives it, and as a state in a file must hold it."""
    start, grads = randn(16, 40), [randn(16, 40, seed=1)]
    by_name = movement(lambda p: Muon(p, ns_dtype="bfloat16"), grads, start)
    assert torch.equal(by_name, movement(lambda p: Muon(p, ns_dtype=torch.bfloat16), grads, start))
    assert not torch.equal(by_name, movement(Muon, grads, start))
