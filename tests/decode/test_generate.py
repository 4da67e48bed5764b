from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diffurefill.config import DRAFT, REFILL, Stage, UserError, load_preset, preset_names
from diffurefill.decode.canvas import Canvas, Specials, continuation, infill
from diffurefill.decode.generate import Generation, Pass, cut_at_eos, generate
from tests.decode.plain import V, plain_generate, specials
from tests.decode.strategies import PLAIN_REFILLS, REFILLS, SEGMENTS, STAGES
from tests.fakes import EOS, MASK, BigramDenoiser, OracleDenoiser, TableDenoiser

CARD = (DRAFT, REFILL)
LEFT_TO_RIGHT = Stage(
    num_passes=0, tokens_per_pass=1, temperature=(0.0, 0.0), order="left_to_right"
)
GREEDY = Stage(num_passes=6, temperature=(0.0, 0.0))


def decode(
    canvas: Canvas, stages: tuple[Stage, ...], seeds: list[int] | None = None, **options
) -> Generation:
    seeds = list(range(len(canvas.ids))) if seeds is None else seeds
    return generate(BigramDenoiser(V), canvas, stages, specials(), seeds=seeds, **options)


def of_length(n: int) -> Canvas:
    return continuation([[5, 6]], n, specials(), max_tokens=64)


def taken(mask: torch.Tensor) -> list[int]:
    return mask.nonzero().flatten().tolist()


@pytest.mark.parametrize(("lengths", "whole"), [([9, 9], True), ([9, 4], False)])
def test_documents_are_named_only_where_they_are_not_the_rows(lengths, whole):
    given_ids = []

    class Noting(BigramDenoiser):
        def __call__(self, canvas, doc_ids=None, at=None):
            given_ids.append(doc_ids)
            return super().__call__(canvas, doc_ids, at)

    canvas = continuation([[5], [6]], lengths, specials(), max_tokens=64)
    generate(Noting(V), canvas, (GREEDY,), specials(), seeds=[0, 1])
    assert [ids is None for ids in given_ids] == [whole] * len(given_ids)


# --- the whole loop ------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    SEGMENTS,
    STAGES,
    st.lists(REFILLS, max_size=2),
    st.integers(0, 2**40),
    st.sampled_from([0, 0, 4]),
    st.sampled_from([0, 0, 5]),
)
def test_generate_equals_the_plain_decoder(row, draft, refills, seed, block_length, min_tokens):
    canvas, stages = infill([row], specials(), max_tokens=64), (draft, *refills)
    options = {"block_length": block_length, "min_tokens": min_tokens}
    wanted = plain_generate(
        BigramDenoiser(V), canvas.ids[0], canvas.fillable[0], stages, seed, **options
    )
    assert decode(canvas, stages, [seed], **options).ids[0].tolist() == wanted


@settings(max_examples=100, deadline=None)
@given(st.lists(SEGMENTS, min_size=1, max_size=3), STAGES, st.lists(REFILLS, max_size=1))
def test_every_mask_is_filled_with_an_emittable_id_and_given_ids_stay(rows, draft, refills):
    canvas = infill(rows, specials(), max_tokens=64)
    result = decode(canvas, (draft, *refills))
    assert torch.as_tensor(specials().emittable)[result.ids[canvas.fillable]].all()
    for record in result.trajectory:
        assert torch.equal(record.ids[~canvas.fillable], canvas.ids[~canvas.fillable])
    assert (result.confidence[~canvas.fillable] == 0).all()


@settings(max_examples=60, deadline=None)
@given(st.lists(SEGMENTS, min_size=2, max_size=4), STAGES, REFILLS, st.integers(0, 2**40))
def test_a_row_in_a_batch_equals_the_row_alone(rows, draft, refill, seed):
    canvas, stages = infill(rows, specials(), max_tokens=64), (draft, refill)
    seeds = [seed + b for b in range(len(rows))]
    together = decode(canvas, stages, seeds)
    for b, row in enumerate(rows):
        alone = decode(infill([row], specials(), max_tokens=64), stages, [seeds[b]])
        T = alone.ids.shape[1]
        assert torch.equal(together.ids[b, :T], alone.ids[0])
        assert torch.equal(together.confidence[b, :T], alone.confidence[0])


def test_the_oracle_is_written_out_by_every_preset():
    text = torch.arange(20) % 15 + 4
    canvas = continuation([text[1:4].tolist()], 16, specials(), max_tokens=20)
    for name in preset_names():
        how = load_preset(name).decode
        result = generate(
            OracleDenoiser(text, V), canvas, how.stages, specials(),
            seeds=[1], block_length=how.block_length,
        )  # fmt: skip
        assert result.ids[0, 1:].tolist() == text[1:].tolist(), name


def test_a_seed_gives_the_same_text_and_another_seed_another():
    canvas = of_length(30)
    first, again, other = (decode(canvas, CARD, [seed]).ids for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_greedy_decoding_needs_no_luck():
    assert torch.equal(
        decode(of_length(30), (GREEDY,), [1]).ids, decode(of_length(30), (GREEDY,), [2]).ids
    )


def test_one_pass_samples_positions_honestly():
    """A single pass at T = 1 on independent positions is a draw from the table."""
    B, V4 = 20_000, 8
    table = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0, 0.0, -1.0, 0.0]).repeat(3, 1)
    canvas = continuation([[]] * B, 2, specials(V4), max_tokens=3)
    stage = Stage(num_passes=1)
    ids = generate(TableDenoiser(table), canvas, [stage], specials(V4), seeds=range(B)).ids
    emittable = torch.as_tensor(specials(V4).emittable)
    expected = table[0].masked_fill(~emittable, -torch.inf).softmax(0)
    for position in (1, 2):
        seen = ids[:, position].bincount(minlength=V4) / B
        assert ((seen - expected).abs() < 4 * (0.25 / B) ** 0.5).all()


# --- counting passes -----------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "K", "R"), [(12, 12, 8), (40, 12, 8), (7, 3, 2), (1, 1, 1)])
def test_a_row_costs_exactly_draft_plus_refill_passes(n, K, R):
    denoiser = BigramDenoiser(V)
    stages = (replace(DRAFT, num_passes=K), replace(REFILL, num_passes=R))
    result = generate(denoiser, of_length(n), stages, specials(), seeds=[0])
    assert result.num_forward_passes == denoiser.num_calls == len(result.trajectory) == K + R


def test_passes_that_find_nothing_masked_are_skipped():
    result = decode(of_length(5), CARD)
    assert result.num_forward_passes == 5 + 8


@pytest.mark.parametrize(("n", "per_pass", "calls"), [(9, 1, 9), (9, 4, 3), (8, 4, 2)])
def test_n_per_pass_takes_as_many_passes_as_needed(n, per_pass, calls):
    stage = Stage(num_passes=0, tokens_per_pass=per_pass, temperature=(0.0, 0.0))
    result = decode(of_length(n), (stage,))
    assert result.num_forward_passes == calls
    assert [int(p.accepted.sum()) for p in result.trajectory[:-1]] == [per_pass] * (calls - 1)


def test_uncounted_passes_keep_the_gap_to_the_end():
    stage = Stage(num_passes=0, tokens_per_pass=8, commit_gap=2, temperature=(0.0, 0.0))
    for record in decode(of_length(16), (stage,)).trajectory:
        assert not (record.accepted[:, 1:] & record.accepted[:, :-1]).any()


def test_left_to_right_is_monotone():
    trajectory = decode(of_length(10), (LEFT_TO_RIGHT,)).trajectory
    assert [taken(p.accepted[0]) for p in trajectory] == [[i] for i in range(3, 13)]


def test_rows_of_different_length_end_on_their_own():
    canvas = continuation([[5], [6]], [4, 9], specials(), max_tokens=16)
    result = decode(canvas, (LEFT_TO_RIGHT,))
    assert result.num_forward_passes == 9
    assert [bool(p.accepted[0].any()) for p in result.trajectory] == [True] * 4 + [False] * 5
    assert result.row_passes.tolist() == [4, 9]


def test_a_row_that_is_done_is_computed_no_more_nor_the_columns_that_it_alone_reaches():
    canvas = continuation([[5] * 10, [6]], [2, 5], specials(), max_tokens=16)
    assert decode(canvas, (LEFT_TO_RIGHT,)).num_positions == 2 * (2 * 13) + 3 * (1 * 7)


# --- gap, ban and the waived set -----------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(STAGES, st.integers(1, 50), st.integers(0, 1000))
def test_no_draft_pass_but_the_last_breaks_the_gap(stage, n, seed):
    for record in decode(of_length(n), (stage,), [seed]).trajectory:
        if record.index < stage.num_passes - 1:
            places = taken(record.accepted[0])
            assert all(b - a >= stage.commit_gap for a, b in pairwise(places))


@pytest.mark.parametrize("num_passes", [1, 3, 12])
def test_a_strong_ban_leaves_no_doubled_token_even_in_the_waived_set(num_passes):
    """The table wants one token everywhere; only the ban can part its copies."""
    table = torch.zeros(40, V)
    table[:, 9], table[:, 10] = 8.0, 4.0
    stage = replace(DRAFT, num_passes=num_passes, neighbour_ban=50.0)
    canvas = continuation([[9]], 37, specials(), max_tokens=40)
    ids = generate(TableDenoiser(table), canvas, [stage], specials(), seeds=[3]).ids[0]
    assert (ids[1:] != ids[:-1]).all()
    loose = replace(stage, neighbour_ban=0.0)
    ids = generate(TableDenoiser(table), canvas, [loose], specials(), seeds=[3]).ids[0]
    assert (ids[1:] == ids[:-1]).any()


def test_the_ban_sees_given_tokens_on_both_sides_of_a_gap():
    table = torch.zeros(8, V)
    table[:, 9], table[:, 10], table[:, 11] = 5.0, 4.0, 3.0
    stage = Stage(num_passes=1, temperature=(0.0, 0.0), neighbour_ban=6.0)
    canvas = infill([[[9], 1, [10]]], specials(), max_tokens=8)
    result = generate(TableDenoiser(table), canvas, [stage], specials(), seeds=[0])
    assert canvas.filled(result.ids) == [[11]]


# --- refill --------------------------------------------------------------------------------------


def refills(result: Generation) -> list[tuple[Pass, Pass]]:
    """Each refill pass with the pass before it."""
    pairs = pairwise(result.trajectory)
    return [(before, after) for before, after in pairs if after.remasked.any()]


def test_without_refill_the_result_is_the_draft():
    canvas = of_length(30)
    draft, full = decode(canvas, (DRAFT,)), decode(canvas, CARD)
    assert torch.equal(full.trajectory[11].ids, draft.ids)
    assert not torch.equal(full.ids, draft.ids)


@settings(max_examples=40, deadline=None)
@given(SEGMENTS, PLAIN_REFILLS, st.integers(0, 1000))
def test_refill_takes_the_least_sure_and_touches_nothing_else(row, refill, seed):
    canvas = infill([row], specials(), max_tokens=64)
    result = decode(canvas, (DRAFT, refill), [seed])
    assert len(refills(result)) == refill.num_passes
    for before, after in refills(result):
        kept = ~after.remasked
        assert torch.equal(after.accepted, after.remasked)
        assert torch.equal(after.ids[kept], before.ids[kept])
        assert torch.equal(after.confidence[kept], before.confidence[kept])
        assert torch.equal(after.previous_ids, before.ids)
        places = taken(after.remasked[0])
        least = before.confidence[canvas.fillable].min()
        assert before.confidence[0, places].min() == least
        assert all(b - a >= refill.commit_gap for a, b in pairwise(places))
        if refill.commit_gap == 1:
            assert len(places) == max(1, round(refill.remask_fraction * int(canvas.num_fillable)))
            others = before.confidence[kept & canvas.fillable].tolist()
            assert before.confidence[0, places].max() <= min(others, default=0.0)


def test_the_card_refills_a_fifth_without_adjacent_positions():
    for _, after in refills(decode(of_length(50), CARD)):
        assert int(after.remasked.sum()) == 10
        assert not (after.remasked[:, 1:] & after.remasked[:, :-1]).any()


def test_refilling_everything_without_a_gap_is_one_fresh_pass():
    stage = Stage(num_passes=1, remask_fraction=1.0)
    result = decode(of_length(12), (DRAFT, stage))
    assert torch.equal(result.trajectory[-1].remasked, of_length(12).fillable)


# --- callbacks, EOS, errors ----------------------------------------------------------------------


def test_on_pass_sees_every_pass_as_it_ends():
    seen: list[Pass] = []
    result = decode(of_length(20), CARD, on_pass=seen.append)
    assert seen == result.trajectory
    assert [(p.stage, p.index) for p in seen[:1] + seen[12:14]] == [(0, 0), (1, 0), (1, 1)]
    left = [int(p.is_masked.sum()) for p in seen]
    assert left == sorted(left, reverse=True)
    assert left[11:] == [0] * 9


def test_forbid_eos_keeps_eos_out_of_text_and_confidence():
    table = torch.zeros(40, V)
    table[:, EOS] = 9.0
    canvas, denoiser = of_length(30), TableDenoiser(table)
    free = generate(denoiser, canvas, CARD, specials(), seeds=[0])
    bound = generate(denoiser, canvas, CARD, specials(), seeds=[0], forbid_eos=True)
    assert (free.ids == EOS).any()
    assert not (bound.ids == EOS).any()
    num_others = int(torch.as_tensor(specials().emittable).sum()) - 1
    expected = torch.tensor(1 / num_others).log()
    assert torch.allclose(bound.confidence[canvas.fillable], expected)


@pytest.mark.parametrize(
    ("ids", "start", "cut"),
    [
        ([5, EOS, 6, EOS], 0, [5]),
        ([5, EOS, 6, EOS], 2, [5, EOS, 6]),
        ([5, 6], 0, [5, 6]),
        ([], 0, []),
    ],
)
def test_text_is_cut_at_the_first_generated_eos(ids, start, cut):
    assert cut_at_eos(ids, EOS, start) == cut


def test_a_result_does_not_alias_the_canvas():
    canvas = of_length(5)
    before = canvas.ids.clone()
    decode(canvas, CARD)
    assert torch.equal(canvas.ids, before)


def test_seeds_must_match_the_rows():
    with pytest.raises(UserError, match="2 seeds for 1 rows"):
        decode(of_length(5), CARD, [1, 2])


def test_a_refill_cannot_come_first():
    with pytest.raises(UserError, match="first decode stage"):
        decode(of_length(5), (REFILL,))


def test_a_canvas_with_nothing_to_fill_is_refused():
    ids = torch.tensor([[4, 5]])
    canvas = Canvas(ids, torch.zeros_like(ids, dtype=torch.bool), torch.zeros_like(ids))
    with pytest.raises(UserError, match="nothing to fill"):
        decode(canvas, CARD)


def test_a_canvas_must_mask_what_it_fills():
    ids = torch.tensor([[4, MASK, 5]])
    canvas = Canvas(ids, torch.tensor([[False, True, True]]), torch.zeros_like(ids))
    with pytest.raises(UserError, match="must hold MASK at its fillable positions"):
        decode(canvas, CARD)


def test_a_denoiser_of_another_vocabulary_is_refused():
    with pytest.raises(UserError, match="knows 30 ids, the tokenizer 24"):
        generate(BigramDenoiser(30), of_length(5), CARD, specials(), seeds=[0])


@pytest.mark.parametrize(
    ("stages", "calls"),
    [
        (CARD, 20),
        ((Stage(num_passes=0, quota="threshold", bound=0.3, temperature=(0.5, 0.5)), REFILL), 1),
        ((Stage(num_passes=0, tokens_per_pass=8, commit_gap=2, temperature=(0.0, 0.0)),), 3),
    ],
)
def test_logits_that_are_not_finite_are_refused_at_the_next_question(stages, calls):
    """Along a schedule that is the block's end."""
    denoiser = TableDenoiser(torch.full((64, V), torch.nan))
    with pytest.raises(UserError, match="not finite in float32: use other weights"):
        generate(denoiser, of_length(20), stages, specials(), seeds=[0], block_length=20)
    assert denoiser.num_calls == calls


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_where_half_precision_may_be_the_cause_the_way_out_of_it_is_named(dtype):
    denoiser = TableDenoiser(torch.full((64, V), torch.inf, dtype=dtype))
    with pytest.raises(UserError, match=r"float16: use --dtype float32 .* or other weights"):
        generate(denoiser, of_length(20), CARD, specials(), seeds=[0])


def test_nothing_emittable_is_refused():
    nothing = Specials(0, EOS, 2, 3, torch.zeros(V, dtype=torch.bool))
    with pytest.raises(UserError, match="no id may be written"):
        generate(BigramDenoiser(V), of_length(5), CARD, nothing, seeds=[0])
