import copy
import math

import pytest
import torch
import torch.nn.functional as F

from diffurefill.config import ModelConfig, load_preset
from diffurefill.model.denoiser import Denoiser, num_parameters, rotary_table
from diffurefill.model.passes import rotate

TINY = ModelConfig(vocab_size=97, width=48, layers=3, heads=4, ffn_width=80)


def build(seed=0, scale=1.0, **changes):
    """A tiny denoiser; scale > 1 sharpens it, so that leaks are not lost in near-uniform logits."""
    config = ModelConfig(**{**vars(TINY), **changes})
    model = Denoiser(config)
    model.init_weights(torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for block in model.blocks:
            for parameter in block.parameters():
                parameter.mul_(scale if parameter.ndim > 1 else 1.0)
    return model


def random_canvas(*shape, seed=1):
    return torch.randint(TINY.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("preset", "count"), [("base-1b", 1_075_980_288), ("stand-38m", 37_888_512)]
)
def test_presets_have_the_parameters_the_report_counts(preset, count):
    config = load_preset(preset).model
    with torch.device("meta"):
        model = Denoiser(config)
    assert sum(p.numel() for p in model.parameters()) == num_parameters(config) == count


def test_the_twin_has_the_same_state_names_and_shapes():
    state, twin = build().state_dict(), build(causal=True).state_dict()
    assert {n: t.shape for n, t in state.items()} == {n: t.shape for n, t in twin.items()}


def test_state_names_are_fixed():
    block = ["attention_norm", "qkv", "attention_out", "ffn_norm", "gate_up", "down"]
    names = ["embedding", *(f"blocks.0.{part}" for part in block), "final_norm"]
    assert list(build(layers=1).state_dict()) == [f"{name}.weight" for name in names]


def test_building_draws_nothing_from_the_global_generator():
    before = torch.get_rng_state()
    model = Denoiser(TINY)
    assert torch.equal(torch.get_rng_state(), before)
    assert all((p == (p.ndim == 1)).all() for p in model.parameters())


def test_init_is_a_function_of_the_generator():
    for a, b in zip(build(seed=3).parameters(), build(seed=3).parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(build(seed=3).embedding.weight, build(seed=4).embedding.weight)


def test_init_has_the_stated_spreads():
    model = build(width=128, ffn_width=512)
    residual = 0.02 / math.sqrt(2 * TINY.layers)
    spreads = {"qkv": 0.02, "gate_up": 0.02, "attention_out": residual, "down": residual}
    for name, spread in spreads.items():
        weight = getattr(model.blocks[1], name).weight
        assert weight.std().item() == pytest.approx(spread, rel=0.02)
    assert model.embedding.weight.std().item() == pytest.approx(0.02, rel=0.02)


def test_a_fresh_model_is_near_the_uniform_predictor():
    canvas = random_canvas(8, 64)
    loss = F.cross_entropy(build()(canvas).flatten(0, 1), random_canvas(8, 64, seed=2).flatten())
    assert math.log(97) - 0.3 <= loss.item() <= math.log(97) + 0.6


@pytest.mark.parametrize("causal", [False, True])
def test_a_packed_document_reads_as_if_alone(causal):
    model = build(scale=8.0, causal=causal)
    canvas = random_canvas(1, 30)
    doc_ids = torch.tensor([[0] * 7 + [1] * 12 + [2] * 9 + [-1] * 2])
    packed = model(canvas, doc_ids)
    for document in range(3):
        at = (doc_ids == document)[0]
        alone = model(canvas[:, at])
        torch.testing.assert_close(packed[:, at], alone, atol=1e-4, rtol=1e-4)


def test_changing_a_document_changes_nothing_in_another():
    model = build(scale=8.0)
    doc_ids = torch.tensor([[0] * 10 + [1] * 10 + [-1] * 4])
    canvas = random_canvas(1, 24)
    other = canvas.clone()
    other[doc_ids != 1] = random_canvas(14, seed=5)
    before, after = model(canvas, doc_ids), model(other, doc_ids)
    assert torch.equal(before[doc_ids == 1], after[doc_ids == 1])
    assert not torch.allclose(before[doc_ids == 0], after[doc_ids == 0])


@pytest.mark.parametrize("causal", [False, True])
def test_only_the_twin_is_blind_to_later_tokens(causal):
    model = build(scale=8.0, causal=causal)
    canvas = random_canvas(2, 20)
    changed = canvas.clone()
    changed[:, 12:] = random_canvas(2, 8, seed=6)
    before, after = model(canvas)[:, :12], model(changed)[:, :12]
    assert torch.allclose(before, after, atol=1e-5) == causal


def test_shifting_every_position_changes_nothing():
    model = build(scale=8.0)
    canvas = random_canvas(1, 16)
    pads = torch.full((1, 500), 0)
    doc_ids = torch.cat([torch.full((1, 500), -1), torch.zeros(1, 16, dtype=torch.int64)], dim=1)
    shifted = model(torch.cat([pads, canvas], dim=1), doc_ids)[:, 500:]
    torch.testing.assert_close(shifted, model(canvas), atol=1e-4, rtol=0)


def test_rotation_pairs_a_dimension_with_the_one_half_a_head_on():
    x = torch.zeros(1, 1, 6, 8)
    x[..., 1] = 1.0
    turned = rotate(x, rotary_table(6, 8, 100.0))
    angles = torch.arange(6) * 100.0 ** (-2 / 8)
    torch.testing.assert_close(turned[0, 0, :, 1], angles.cos())
    torch.testing.assert_close(turned[0, 0, :, 5], angles.sin())
    assert turned[..., [0, 2, 3, 4, 6, 7]].abs().max() == 0.0


def test_at_gathers_the_full_logits_in_row_major_order():
    model = build(scale=4.0)
    canvas = random_canvas(3, 11)
    at = torch.rand(3, 11, generator=torch.Generator().manual_seed(0)) < 0.4
    full = model(canvas)
    torch.testing.assert_close(model(canvas, at=at), full[at], atol=1e-5, rtol=1e-5)
    assert full.shape == (3, 11, 97)


def test_at_may_be_indices_in_any_order_and_more_than_once():
    model = build(scale=4.0)
    canvas = random_canvas(3, 11)
    at = torch.tensor([30, 4, 4, 17])
    expected = model(canvas).flatten(0, 1)[at]
    torch.testing.assert_close(model(canvas, at=at), expected, atol=1e-5, rtol=1e-5)


def test_at_nowhere_gives_no_logits_and_zero_gradients():
    model = build()
    logits = model(random_canvas(2, 5), at=torch.zeros(2, 5, dtype=torch.bool))
    assert logits.shape == (0, 97)
    logits.sum().backward()
    assert all(p.grad is not None and (p.grad == 0).all() for p in model.parameters())


def test_angles_survive_a_cast_to_bfloat16():
    model = build()
    canvas = random_canvas(1, 400)
    before = model(canvas)
    rough = copy.deepcopy(model).to(torch.bfloat16)
    assert rough(canvas).dtype == torch.bfloat16
    assert rough._rotary.dtype == torch.float32
    torch.testing.assert_close(rough(canvas).float(), before, atol=0.02, rtol=0.1)


def test_under_autocast_the_logits_are_16_bit_and_near():
    model = build(scale=4.0)
    canvas, doc_ids = random_canvas(2, 32), torch.tensor([[0] * 20 + [1] * 10 + [-1] * 2] * 2)
    with torch.autocast("cpu", torch.bfloat16):
        rough = model(canvas, doc_ids)
    exact = model(canvas, doc_ids)
    assert rough.dtype == torch.bfloat16
    assert (rough.float() - exact).abs().mean() < 0.02 * exact.std()
    rough.float().logsumexp(-1).sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_the_residual_stream_is_16_bit_under_autocast():
    model, seen = build(), []
    for block in model.blocks:
        block.register_forward_hook(lambda _, inputs, output: seen.append(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        model(random_canvas(1, 8))
    assert seen == [torch.bfloat16] * 3


def test_a_longer_row_may_follow_a_shorter_one():
    model, fresh = build(), build()
    model(random_canvas(1, 5))
    canvas = random_canvas(1, 40)
    assert torch.equal(model(canvas), fresh(canvas))


def test_decoding_first_leaves_training_possible():
    model = build()
    with torch.inference_mode():
        model(random_canvas(1, 16))
    model(random_canvas(1, 16)).sum().backward()
    assert model.blocks[0].qkv.weight.grad is not None


# Dynamo itself looks at .grad of what it traces.
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_block_compiles_into_one_graph():
    model = build(scale=4.0)
    canvas, doc_ids = random_canvas(2, 32), torch.tensor([[0] * 20 + [1] * 12] * 2)
    masks = [torch.arange(64).view(2, 32) % n == 0 for n in (2, 3, 5)]
    expected = [model(canvas, doc_ids, at) for at in masks]
    for block in model.blocks:
        block.compile(backend="eager", fullgraph=True)
    for at, logits in zip(masks, expected, strict=True):
        torch.testing.assert_close(model(canvas, doc_ids, at), logits)


@pytest.mark.gpu
def test_training_on_cuda_under_autocast_is_near_fp32_on_cpu():
    model = build(scale=4.0, width=128, heads=2)
    canvas = random_canvas(2, 200)
    doc_ids = torch.tensor([[0] * 120 + [1] * 60 + [-1] * 20] * 2)
    at = torch.arange(400).view(2, 200) % 3 == 0
    exact = F.cross_entropy(model(canvas, doc_ids, at), canvas[at])
    exact.backward()
    on_cuda = copy.deepcopy(model).cuda()
    on_cuda.zero_grad()
    with torch.autocast("cuda", torch.bfloat16):
        logits = on_cuda(canvas.cuda(), doc_ids.cuda(), at.cuda())
    rough = F.cross_entropy(logits.float(), canvas[at].cuda())
    rough.backward()
    assert rough.item() == pytest.approx(exact.item(), rel=0.02)
    for ours, theirs in zip(on_cuda.parameters(), model.parameters(), strict=True):
        assert F.cosine_similarity(ours.grad.cpu().flatten(), theirs.grad.flatten(), 0) > 0.98
