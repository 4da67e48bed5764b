"""The AR twin writes what a plain loop without a cache writes, alone and in any batch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diffurefill.config import ModelConfig, UserError
from diffurefill.decode.autoregressive import (
    LeftToRight,
    generate_left_to_right,
    repair_left_to_right,
)
from diffurefill.decode.canvas import Canvas, continuation, infill
from diffurefill.decode.generate import Generation, Pass
from diffurefill.model.denoiser import Denoiser
from diffurefill.runtime import philox
from tests.decode.plain import V, greedy_gap, specials
from tests.fakes import EOS

LAYERS = 2
ALLOWED = np.asarray(specials().emittable)


@pytest.fixture(scope="module")
def model() -> Denoiser:
    """Random weights of a size that makes its distributions far from flat."""
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=V, width=32, layers=LAYERS, heads=2, ffn_width=64, causal=True)
    twin = Denoiser(config).eval()
    with torch.no_grad():
        for parameter in twin.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 0.3)
    return twin


def plain_draw(
    model: Denoiser, ids: list[int], u: float, how: LeftToRight, may_end: bool
) -> tuple[int, float]:
    """The next token of `ids` and its log p1: the whole text read anew, float64."""
    with torch.no_grad():
        logits = model(torch.tensor([ids]))[0, -1].double().numpy()
    allowed = ALLOWED.copy()
    allowed[EOS] = may_end and not how.forbid_eos
    clean = np.where(allowed, logits, -np.inf)
    log_p1 = clean - clean.max() - math.log(np.exp(clean - clean.max()).sum())
    if how.temperature == 0:
        token = int(clean.argmax())
        return token, float(log_p1[token])
    p = np.exp((clean - clean.max()) / how.temperature)
    p[p < how.min_p] = 0.0
    token = int(np.searchsorted(np.cumsum(p) / p.sum(), u, side="right"))
    return token, float(log_p1[token])


def plain_row(model: Denoiser, ids: list[int], n: int, how: LeftToRight, seed: int) -> list[int]:
    """`ids` and n more tokens; behind EOS nothing but EOS."""
    ids = list(ids)
    uniform = philox(seed, "autoregressive").random(len(ids) + n)
    for k in range(n):
        if ids[-1] == EOS and k > 0:
            ids.append(EOS)
            continue
        ids.append(plain_draw(model, ids, uniform[len(ids)], how, k >= how.min_len)[0])
    return ids


prompts = st.lists(st.lists(st.integers(4, V - 2), max_size=6), min_size=1, max_size=4)


@settings(max_examples=40, deadline=None)
@given(prompts=prompts, data=st.data())
def test_a_ragged_batch_gives_what_the_plain_loop_gives(
    model: Denoiser, prompts: list[list[int]], data: st.DataObject
) -> None:
    counts = [data.draw(st.integers(1, 8)) for _ in prompts]
    how = LeftToRight(
        temperature=data.draw(st.sampled_from([0.0, 0.7, 1.0, 2.0])),
        min_p=data.draw(st.sampled_from([0.0, 0.2])),
        forbid_eos=data.draw(st.booleans()),
        min_len=data.draw(st.integers(0, 3)),
    )
    seeds = [data.draw(st.integers(0, 99)) for _ in prompts]
    canvas = continuation(prompts, counts, specials(), max_tokens=64)
    done = generate_left_to_right(model, canvas, specials(), how, num_layers=LAYERS, seeds=seeds)
    rows = canvas.rows(done.ids)
    for row, prompt, n, seed in zip(rows, prompts, counts, seeds, strict=True):
        assert row == plain_row(model, [specials().bos_id, *prompt], n, how, seed)
    longest = max(
        n if EOS not in row[1 + len(p) :] else 1 + row[1 + len(p) :].index(EOS)
        for row, p, n in zip(rows, prompts, counts, strict=True)
    )
    assert done.num_forward_passes == longest


def test_confidence_is_the_log_probability_at_temperature_one(model: Denoiser) -> None:
    canvas = continuation([[5, 6]], 4, specials(), max_tokens=16)
    how = LeftToRight(temperature=0.0, forbid_eos=True)
    done = generate_left_to_right(model, canvas, specials(), how, num_layers=LAYERS, seeds=[3])
    ids = done.ids[0].tolist()
    for i in range(3, 7):
        _, sure = plain_draw(model, ids[:i], 0.0, how, True)
        assert done.confidence[0, i].item() == pytest.approx(sure, abs=1e-4)


def test_every_pass_is_shown(model: Denoiser) -> None:
    canvas = continuation([[5], [6, 7, 8]], [4, 2], specials(), max_tokens=16)
    seen: list[Pass] = []
    done = generate_left_to_right(
        model, canvas, specials(), LeftToRight(forbid_eos=True), num_layers=LAYERS, seeds=[0, 1],
        on_pass=seen.append,
    )  # fmt: skip
    assert len(seen) == done.num_forward_passes == 4
    assert [int(p.accepted.sum()) for p in seen] == [2, 2, 1, 1]
    assert torch.equal(seen[-1].ids, done.ids)


def test_what_stands_behind_an_end_is_no_token_that_was_drawn(model: Denoiser) -> None:
    canvas = continuation([[5]], 6, specials(), max_tokens=16)
    seen: list[Pass] = []
    generate_left_to_right(
        model, canvas, specials(), LeftToRight(forbid_eos=True), num_layers=LAYERS, seeds=[0],
        stop=lambda ids: len(ids) == 2, on_pass=seen.append,
    )  # fmt: skip
    assert [p.accepted[0].nonzero().flatten().tolist() for p in seen] == [[2], [3]]
    ended = [None if p.ended is None else p.ended[0].nonzero().flatten().tolist() for p in seen]
    assert ended == [[], [4, 5, 6, 7]]


@settings(max_examples=25, deadline=None)
@given(prompts=prompts, seed=st.integers(0, 99))
def test_a_rule_ends_rows_and_changes_nothing_before(
    model: Denoiser, prompts: list[list[int]], seed: int
) -> None:
    canvas = continuation(prompts, 12, specials(), max_tokens=64)
    seeds, how = [seed + b for b in range(len(prompts))], LeftToRight(forbid_eos=True)
    free, ended = (
        generate_left_to_right(
            model, canvas, specials(), how, num_layers=LAYERS, seeds=seeds, stop=stop
        )
        for stop in (None, lambda ids: ids[-1] % 3 == 0)
    )
    pairs = zip(canvas.filled(free.ids), canvas.filled(ended.ids), strict=True)
    lengths = []
    for whole, cut in pairs:
        n = next((i + 1 for i, token in enumerate(whole) if token % 3 == 0), len(whole))
        assert cut == whole[:n] + [EOS] * (len(whole) - n)
        lengths.append(n)
    assert ended.row_passes.tolist() == lengths
    assert ended.num_forward_passes == max(lengths)


class Counted:
    """A causal model that counts the positions it is given, call by call."""

    def __init__(self, model: Denoiser) -> None:
        self.model, self.shapes = model, list[tuple[int, ...]]()

    def __call__(self, canvas: torch.Tensor, *args: Any) -> torch.Tensor:
        self.shapes.append(tuple(canvas.shape))
        return self.model(canvas, *args)


@pytest.mark.parametrize("prompt_lengths", [(3, 3, 3, 3), (1, 5, 2, 3)])
def test_rows_that_ended_are_not_read_again(
    model: Denoiser, prompt_lengths: tuple[int, ...]
) -> None:
    """By a rule, or because the gap is full; the others go on as if alone."""
    prompts = [[5 + i + b for i in range(n)] for b, n in enumerate(prompt_lengths)]
    canvas, seeds = continuation(prompts, [12, 12, 7, 12], specials(), max_tokens=64), [4, 5, 6, 7]
    how = LeftToRight(forbid_eos=True)
    rows = [
        plain_row(model, [specials().bos_id, *p], 12, how, s)
        for p, s in zip(prompts, seeds, strict=True)
    ]
    written = [row[1 + n :] for row, n in zip(rows, prompt_lengths, strict=True)]
    lengths = [2, 5, 7, 11]
    ended = [text[:n] for text, n in zip(written, lengths, strict=True)]

    counted = Counted(model)
    done = generate_left_to_right(
        counted, canvas, specials(), how, num_layers=LAYERS, seeds=seeds, stop=ended.__contains__
    )
    for filled, text, n in zip(canvas.filled(done.ids), written, lengths, strict=True):
        assert filled == text[:n] + [EOS] * (len(filled) - n)
    first = (4, 1 + max(prompt_lengths))
    assert counted.shapes == [first, *((sum(n > k for n in lengths), 1) for k in range(1, 11))]
    assert done.num_positions == sum(B * t for B, t in counted.shapes)


@pytest.mark.parametrize(
    ("dtype", "way_out"), [(torch.float16, "--dtype float32"), (torch.float32, "other weights")]
)
def test_logits_that_are_not_finite_are_refused_with_what_may_help(
    dtype: torch.dtype, way_out: str
) -> None:
    def model(ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        return torch.full((1, V), 1e5).to(dtype) * (1e36 if dtype == torch.float32 else 1.0)

    canvas, how = continuation([[5]], 3, specials(), max_tokens=16), LeftToRight()
    with pytest.raises(UserError, match=f"not finite in float[1236]*: use {way_out}"):
        generate_left_to_right(model, canvas, specials(), how, num_layers=LAYERS, seeds=[0])
    with pytest.raises(UserError, match=way_out):
        repair_left_to_right(
            model, drafted(canvas, 0), canvas, specials(), how,
            num_layers=LAYERS, seeds=[0], num_rounds=1, fraction=0.3,
        )  # fmt: skip


def test_a_gap_with_something_behind_it_is_refused(model: Denoiser) -> None:
    canvas = infill([[[5], 3, [6]]], specials(), max_tokens=16)
    with pytest.raises(UserError, match="only continues text"):
        generate_left_to_right(
            model, canvas, specials(), LeftToRight(), num_layers=LAYERS, seeds=[0]
        )


# --- repair --------------------------------------------------------------------------------------


def plain_repair(
    model: Denoiser,
    ids: list[int],
    confidence: dict[int, float],
    how: LeftToRight,
    seed: int,
    num_rounds: int,
) -> list[int]:
    """One row, 30% of its fillable positions (the keys of `confidence`) a round."""
    ids = list(ids)
    for r in range(num_rounds):
        uniform = philox(seed, "autoregressive repair", r).random(len(ids))
        m = max(1, round(0.3 * len(confidence)))
        for i in sorted(greedy_gap({i: -c for i, c in confidence.items()}, m, 1)):
            ids[i], confidence[i] = plain_draw(model, ids[:i], uniform[i], how, True)
    return ids


def drafted(canvas: Canvas, seed: int) -> Generation:
    """Random tokens, never EOS, with random confidences."""
    generator = torch.Generator().manual_seed(seed)
    shape = canvas.ids.shape
    drawn = torch.randint(4, V - 1, shape, generator=generator)
    confidence = -torch.rand(shape, generator=generator) * 5
    ids = torch.where(canvas.fillable, drawn, canvas.ids)
    passes = torch.full((shape[0],), 12)
    return Generation(ids, torch.where(canvas.fillable, confidence, 0.0), 12, [], passes)


@settings(max_examples=25, deadline=None)
@given(prompts=prompts, data=st.data())
def test_repair_equals_the_plain_loop(
    model: Denoiser, prompts: list[list[int]], data: st.DataObject
) -> None:
    counts = [data.draw(st.integers(1, 9)) for _ in prompts]
    canvas = continuation(prompts, counts, specials(), max_tokens=64)
    draft, how = drafted(canvas, data.draw(st.integers(0, 9))), LeftToRight(forbid_eos=True)
    seeds, num_rounds = list(range(len(prompts))), data.draw(st.integers(0, 3))
    counted = Counted(model)
    done = repair_left_to_right(
        counted, draft, canvas, specials(), how, num_layers=LAYERS, seeds=seeds,
        num_rounds=num_rounds, fraction=0.3,
    )  # fmt: skip
    for b, row in enumerate(canvas.rows(done.ids)):
        places = canvas.fillable[b].nonzero()[:, 0].tolist()
        confidence = {i: draft.confidence[b, i].item() for i in places}
        before = canvas.rows(draft.ids)[b]
        assert row == plain_repair(model, before, confidence, how, seeds[b], num_rounds)
    redone = [max(1, round(0.3 * n)) for n in counts]
    assert done.num_forward_passes == 12 + num_rounds * max(redone)
    rows_read = [sum(m > j for m in redone) for j in range(max(redone))]
    assert [shape[0] for shape in counted.shapes] == num_rounds * rows_read
    assert done.num_positions == sum(B * t for B, t in counted.shapes)


def test_repair_sees_nothing_to_the_right(model: Denoiser) -> None:
    """With one chosen position, what stands behind it does not change its new token."""
    canvas = continuation([[5, 6]], 8, specials(), max_tokens=16)
    draft = drafted(canvas, 0)
    sure = torch.zeros_like(draft.confidence)
    sure[0, 6] = -9.0
    found = set()
    for other in (7, 9):
        ids = draft.ids.clone()
        ids[0, 7:] = other
        unsure = Generation(ids, sure, 0, [], draft.row_passes)
        done = repair_left_to_right(
            model, unsure, canvas, specials(), LeftToRight(),
            num_layers=LAYERS, seeds=[0], num_rounds=1, fraction=0.1,
        )  # fmt: skip
        assert done.ids[0, 7:].tolist() == ids[0, 7:].tolist()
        found.add(done.ids[0, 6].item())
    assert len(found) == 1
