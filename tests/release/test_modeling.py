"""modeling_diffurefill.py in this process: the same bits and the same tokens as the package."""

from __future__ import annotations

import importlib.util
import itertools
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from diffurefill.config import DecodeConfig, ModelConfig, Stage, load_preset
from diffurefill.decode.canvas import Specials, infill
from diffurefill.decode.generate import generate
from diffurefill.model.denoiser import Denoiser
from diffurefill.release import files

V, BOS, EOS, MASK, PAD, ROW = 97, 0, 1, 94, 95, 64
DECODERS = ("decode-card", "decode-left-to-right", "decode-8-per-pass")


@pytest.fixture(scope="module")
def modeling() -> ModuleType:
    pytest.importorskip("transformers", reason="transformers is not installed")
    path = Path(files.__file__).with_name(files.MODELING)
    spec = importlib.util.spec_from_file_location("exported_modeling", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up by name
    import sys

    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def pair(modeling: ModuleType, **sizes: Any) -> tuple[Denoiser, Any]:
    """The same random weights in the package's model and in the file's."""
    config = ModelConfig(**{"vocab_size": V, "width": 32, "layers": 2, "heads": 2, **sizes})
    ours = Denoiser(config).eval()
    ours.init_weights(torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.mul_(4.0)
    theirs = modeling.DiffuRefillForMaskedLM(
        modeling.DiffuRefillConfig(
            vocab_size=V,
            hidden_size=config.width,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            intermediate_size=config.ffn_width,
            max_position_embeddings=ROW,
            mask_token_id=MASK,
            bos_token_id=BOS,
            eos_token_id=EOS,
            pad_token_id=PAD,
        )
    ).eval()
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


@pytest.mark.parametrize(("width", "heads"), [(32, 2), (64, 1), (96, 4), (128, 2)])
def test_logits_are_equal_bit_for_bit(modeling: ModuleType, width: int, heads: int) -> None:
    ours, theirs = pair(modeling, width=width, heads=heads, ffn_width=width + 8)
    generator = torch.Generator().manual_seed(1)
    for B, T in itertools.product((1, 3), (1, 3, 33, 64)):
        ids = torch.randint(0, V, (B, T), generator=generator)
        packed = torch.zeros(B, T, dtype=torch.int32)
        packed[:, T // 2 :] = 1
        packed[-1, max(1, T - 2) :] = -1
        at = torch.rand(B, T, generator=generator) < 0.5
        at[0, 0] = True
        for doc_ids, where in itertools.product((None, packed), (None, at)):
            with torch.inference_mode():
                expected = ours(ids, doc_ids, where)
                found = theirs(ids, doc_ids=doc_ids, at=where).logits
            assert torch.equal(expected, found)


def test_an_attention_mask_means_padding(modeling: ModuleType) -> None:
    ours, theirs = pair(modeling, ffn_width=40)
    ids = torch.randint(2, 90, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    with torch.inference_mode():
        expected = ours(ids, mask.int() - 1)
        assert torch.equal(theirs(ids, attention_mask=mask).logits, expected)
        assert torch.equal(theirs(ids, return_dict=False)[0], ours(ids))


def test_the_loss_is_the_mean_cross_entropy_and_has_gradients(modeling: ModuleType) -> None:
    _, theirs = pair(modeling, ffn_width=40)
    ids = torch.randint(2, 90, (2, 9), generator=torch.Generator().manual_seed(1))
    labels = ids.masked_fill(torch.rand(ids.shape) < 0.5, -100)
    labels[0, 0] = ids[0, 0]
    found = theirs(ids, labels=labels)
    kept = labels >= 0
    expected = torch.nn.functional.cross_entropy(found.logits[kept], labels[kept])
    torch.testing.assert_close(found.loss, expected)
    found.loss.backward()
    assert theirs.embedding.weight.grad is not None


def specials() -> Specials:
    emittable = np.ones(V, dtype=bool)
    emittable[[BOS, MASK, PAD, 96]] = False
    return Specials(BOS, EOS, MASK, PAD, emittable)


def decoders() -> dict[str, tuple[Stage, ...]]:
    found = {name: load_preset(name).decode.stages for name in DECODERS}
    cosine = Stage(num_passes=5, quota="cosine", temperature=(1.0, 0.0), commit_gap=3)
    refill = Stage(num_passes=3, remask_fraction=0.4, min_p=0.2, neighbour_ban=2.0)
    return {**found, "cosine": (cosine, refill), "short": (Stage(num_passes=2, commit_gap=4),)}


@pytest.mark.parametrize("name", decoders())
def test_tokens_are_the_same_for_the_same_seeds(modeling: ModuleType, name: str) -> None:
    ours, theirs = pair(modeling, ffn_width=40)
    stages = decoders()[name]
    plain = files.plain_stages(DecodeConfig(stages=stages))
    theirs.generation_config.suppress_tokens = [BOS, MASK, PAD, 96]
    rows = [[[5, 6, 7], 30], [[8], 12, [9, 10], 7], [20]]
    canvas = infill(rows, specials(), max_tokens=ROW)
    for seed in (0, 11):
        seeds = [seed + i for i in range(len(rows))]
        expected = generate(ours, canvas, stages, specials(), seeds=seeds, forbid_eos=True)
        seen: list[torch.Tensor] = []
        real = (canvas.doc_ids >= 0).long()
        found = theirs.infill(canvas.ids, real, stages=plain, seed=seed, on_pass=seen.append)
        assert torch.equal(found, expected.ids)
        assert len(seen) == expected.num_forward_passes


def test_a_prompt_gets_its_bos_and_the_text_ends_at_eos(modeling: ModuleType) -> None:
    _, theirs = pair(modeling, ffn_width=40)
    theirs.generation_config.suppress_tokens = [BOS, MASK, PAD, *range(40, 96)]
    stages = [{"num_passes": 4}]
    bare = torch.tensor([[5, 6], [7, PAD]])
    real = torch.tensor([[1, 1], [1, 0]])
    given = torch.tensor([[BOS, 5, 6], [BOS, 7, PAD]])
    found = theirs.generate(bare, real, max_new_tokens=40, stages=stages)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    assert torch.equal(found, theirs.generate(given, mask, max_new_tokens=40, stages=stages))
    assert found[:, 0].tolist() == [BOS, BOS]
    for row in found[:, 3:].tolist():
        if EOS in row:
            assert set(row[row.index(EOS) + 1 :]) <= {PAD}
    assert (found == EOS).any(), "the case occurs"


def test_mistakes_are_refused(modeling: ModuleType) -> None:
    _, theirs = pair(modeling, ffn_width=40)
    theirs.generation_config.suppress_tokens = [BOS]
    prompt = torch.tensor([[BOS, 5]])
    with pytest.raises(ValueError, match="trained on 64"):
        theirs.generate(prompt, max_new_tokens=70, stages=[])
    with pytest.raises(ValueError, match="`infill` fills it"):
        theirs.generate(torch.tensor([[BOS, MASK]]), max_new_tokens=3, stages=[])
    with pytest.raises(ValueError, match="no row holds MASK"):
        theirs.infill(prompt, stages=[])
    with pytest.raises(ValueError, match="at least 1"):
        theirs.generate(prompt, max_new_tokens=0)
    with pytest.raises(TypeError, match="temperature"):
        theirs.generate(prompt, max_new_tokens=3, temperature=2.0)
    with pytest.raises(TypeError, match="num_steps"):
        theirs.generate(prompt, max_new_tokens=3, stages=[{"num_steps": 2}])


@pytest.mark.parametrize(
    ("dtype", "way_out"),
    [(torch.float32, "other"), (torch.bfloat16, "it with dtype=torch.float32")],
)
def test_logits_that_are_not_finite_are_refused_with_what_may_help(
    modeling: ModuleType, dtype: torch.dtype, way_out: str
) -> None:
    _, theirs = pair(modeling, ffn_width=40)
    theirs.generation_config.suppress_tokens = [BOS]
    with torch.no_grad():
        theirs.embedding.weight.fill_(torch.inf)
    theirs, prompt = theirs.to(dtype), torch.tensor([[BOS, 5]])
    with pytest.raises(ValueError, match=f"not finite: load {way_out}"):
        theirs.generate(prompt, max_new_tokens=3, stages=[{"num_passes": 2}])


def test_the_file_s_stage_has_our_defaults(modeling: ModuleType) -> None:
    ours = {f.name: f.default for f in fields(Stage)}
    theirs = {f.name: f.default for f in fields(modeling.Stage)}
    assert set(theirs) == files.STAGE_FIELDS
    assert all(ours[name] == default for name, default in theirs.items())
