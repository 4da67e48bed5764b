import copy

import pytest
import torch

from diffurefill.config import ModelConfig, OptimConfig, UserError
from diffurefill.model.denoiser import Denoiser
from diffurefill.optim.adamw import build_optimizer
from diffurefill.optim.cautious import Cautious
from diffurefill.train.checkpoint import load_training_state, save_training_state

TINY = {"vocab_size": 40, "width": 16, "layers": 2, "heads": 2, "ffn_width": 24}


def build(optimizer="adamw", seed=0, optim=None, **changes):
    model = Denoiser(ModelConfig(**{**TINY, **changes}))
    model.init_weights(torch.Generator().manual_seed(seed))
    config = OptimConfig(optimizer=optimizer, muon_lr_ratio=0.5, **(optim or {}))
    return model, build_optimizer(model, config)


def names_of(model, parameters):
    wanted = {id(p) for p in parameters}
    return {name for name, p in model.named_parameters() if id(p) in wanted}


def train(model, optimizer, num_steps, first=0):
    for step in range(first, first + num_steps):
        canvas = torch.randint(40, (2, 8), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad(set_to_none=True)
        model(canvas).logsumexp(-1).square().mean().backward()
        optimizer.set_learning_rate(1e-2 / (step + 1))
        optimizer.step()


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_every_parameter_has_exactly_one_optimiser(kind):
    model, optimizer = build(kind)
    held = [p for part in optimizer.parts.values() for g in part.param_groups for p in g["params"]]
    assert len(held) == len({id(p) for p in held}) == len(list(model.parameters()))


def test_adamw_decays_matrices_and_the_embedding_but_no_gain():
    model, optimizer = build()
    decayed, plain = optimizer.parts["adamw"].param_groups
    assert decayed["weight_decay"] == 0.1
    assert plain["weight_decay"] == 0.0
    assert "embedding.weight" in names_of(model, decayed["params"])
    gains = {name for name in dict(model.named_parameters()) if "norm" in name}
    assert names_of(model, plain["params"]) == gains


def test_muon_has_the_block_matrices_and_nothing_else():
    model, optimizer = build("muon")
    matrices = ("qkv", "attention_out", "gate_up", "down")
    muon = {g["num_pieces"]: g for g in optimizer.parts["muon"].param_groups}
    by_pieces = {n: names_of(model, g["params"]) for n, g in muon.items()}
    full = {m: {f"blocks.{i}.{m}.weight" for i in range(2)} for m in matrices}
    assert by_pieces == {
        1: full["attention_out"] | full["down"],
        2: full["gate_up"],
        3: full["qkv"],
    }


def test_the_rate_reaches_every_group_and_muon_at_its_ratio():
    _, optimizer = build("muon")
    optimizer.set_learning_rate(0.01)
    rates = {n: {g["lr"] for g in part.param_groups} for n, part in optimizer.parts.items()}
    assert rates == {"muon": {0.005}, "adamw": {0.01}}


@pytest.mark.parametrize("cautious", [False, True])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_no_rate_no_movement(kind, cautious):
    model, optimizer = build(kind, optim={"cautious": cautious})
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.zeros(1, 4, dtype=torch.int64)).sum().backward()
    optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("cautious", [False, True])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_loaded_state_continues_bit_for_bit(kind, cautious):
    model, optimizer = build(kind, optim={"cautious": cautious})
    train(model, optimizer, 3)
    other, resumed = build(kind, seed=1, optim={"cautious": cautious})
    other.load_state_dict(model.state_dict())
    # A copy, as a file would be: torch's loading shares tensors with what it is given.
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, 3, first=3)
    train(other, resumed, 3, first=3)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["final_norm.weight", "embedding.weight"])
def test_adamw_equals_the_formula(name):
    model, optimizer = build()
    parameter = model.get_parameter(name)
    decay = 0.0 if parameter.ndim == 1 else 0.1
    expected = parameter.detach().clone()
    mean = square = torch.zeros_like(expected)
    for step, size in enumerate((3.0, -1.0, 0.5), start=1):
        parameter.grad = torch.full_like(parameter, size)
        mean = 0.9 * mean + 0.1 * size
        square = 0.95 * square + 0.05 * size**2
        update = mean / (1 - 0.9**step) / ((square / (1 - 0.95**step)).sqrt() + 1e-8)
        expected = expected * (1 - 1e-2 * decay) - 1e-2 * update
        optimizer.set_learning_rate(1e-2)
        optimizer.step()
    torch.testing.assert_close(parameter.detach(), expected)


@pytest.mark.parametrize("cautious", [False, True])
def test_a_state_of_another_optimiser_is_refused_in_words(cautious):
    _, adamw = build("adamw")
    _, muon = build("muon", optim={"cautious": cautious})
    with pytest.raises(UserError, match=r"optim\.optimizer"):
        muon.load_state_dict(adamw.state_dict())


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("changes", [{"ffn_width": 32}, {"layers": 3}])
def test_a_state_of_another_model_is_refused_and_changes_nothing(kind, changes):
    model, optimizer = build(kind, **changes)
    train(model, optimizer, 1)
    own_model, own = build(kind)
    train(own_model, own, 1)
    before = own.state_dict()["adamw"]["state"][0]["exp_avg"].clone()
    with pytest.raises(UserError, match="another model"):
        own.load_state_dict(optimizer.state_dict())
    assert torch.equal(own.state_dict()["adamw"]["state"][0]["exp_avg"], before)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_state_goes_into_a_file_and_back(kind, tmp_path):
    """A checkpoint holds tensors and plain values alone: a torch dtype in a group would not fit."""
    model, optimizer = build(kind, optim={"muon_dtype": "float32"})
    train(model, optimizer, 2)
    state, tensors = optimizer.state_dict(), dict(model.named_parameters())
    save_training_state(tmp_path, weights=tensors, optimizer_state=state, meta={"step": 2})
    loaded = load_training_state(tmp_path)
    assert loaded is not None
    assert loaded.optimizer_state["adamw"]["param_groups"] == state["adamw"]["param_groups"]
    _, resumed = build(kind, optim={"muon_dtype": "float32"})
    resumed.load_state_dict(loaded.optimizer_state)
    pairs = zip(resumed.parts[kind].param_groups, state[kind]["param_groups"], strict=True)
    for found, saved in pairs:
        assert {name: found[name] for name in saved if name != "params"} == {
            name: value for name, value in saved.items() if name != "params"
        }


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_caution_reaches_every_part_and_holds_back_what_goes_up_the_slope(kind):
    model, optimizer = build(kind, optim={"cautious": True, "weight_decay": 0.0})
    assert all(isinstance(part, Cautious) for part in optimizer.parts.values())
    train(model, optimizer, 3)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(model, optimizer, 1, first=3)
    moved = 0
    for name, parameter in model.named_parameters():
        step = parameter.detach() - before[name]
        assert (step * parameter.grad <= 0).all()
        moved += int((step != 0).sum())
    assert moved > 0


def test_muons_scale_and_dtype_come_from_the_config():
    _, default = build("muon")
    groups = default.parts["muon"].param_groups
    assert {(g["adjust_lr_fn"], g["ns_dtype"]) for g in groups} == {("match_rms_adamw", "auto")}
    _, other = build("muon", optim={"muon_scale": "original", "muon_dtype": "bfloat16"})
    groups = other.parts["muon"].param_groups
    assert {(g["adjust_lr_fn"], g["ns_dtype"]) for g in groups} == {("original", "bfloat16")}
