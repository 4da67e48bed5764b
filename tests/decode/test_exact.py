"""Kept keys and shadows are exact with one layer: there the plain decoder must give the same.

With one layer a position's keys and values hang on its own id alone. Examples are fixed: logits of
a batch differ from those of a row in the last bits, and a drawn token could, once in millions.
"""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from diffurefill.decode.canvas import infill
from diffurefill.decode.generate import generate
from tests.decode.plain import plain_generate, specials
from tests.decode.strategies import REFILLS, SEGMENTS, STAGES
from tests.decode.test_refill import model

KEPT = st.sampled_from([1, 2, 3])
KEPT_DRAFTS = st.builds(lambda s, n: replace(s, refresh_every=n), STAGES, KEPT)
KEPT_REFILLS = st.builds(lambda s, n: replace(s, refresh_every=n), REFILLS, KEPT)
SHADOWED = REFILLS.map(lambda stage: replace(stage, confidence="shadow"))
DENOISER = model(1)


@settings(max_examples=60, derandomize=True)
@given(
    SEGMENTS,
    KEPT_DRAFTS,
    st.lists(st.one_of(SHADOWED, KEPT_REFILLS), max_size=2),
    st.integers(0, 2**40),
    st.sampled_from([0, 4]),
    st.sampled_from([0, 5]),
)
def test_one_layer_gives_what_the_plain_decoder_gives(
    row, draft, refills, seed, block_length, min_tokens
):
    canvas, stages = infill([row], specials(), max_tokens=64), (draft, *refills)
    options = {"block_length": block_length, "min_tokens": min_tokens}
    done = generate(DENOISER, canvas, stages, specials(), seeds=[seed], **options)
    wanted = plain_generate(DENOISER, canvas.ids[0], canvas.fillable[0], stages, seed, **options)
    assert done.ids[0].tolist() == wanted


@settings(max_examples=30, derandomize=True)
@given(
    st.lists(SEGMENTS, min_size=2, max_size=3),
    KEPT_DRAFTS,
    st.one_of(SHADOWED, KEPT_REFILLS),
    st.integers(0, 2**40),
)
def test_a_row_of_a_batch_is_the_row_alone(rows, draft, refill, seed):
    canvas, stages = infill(rows, specials(), max_tokens=64), (draft, refill)
    seeds = [seed + b for b in range(len(rows))]
    together = generate(DENOISER, canvas, stages, specials(), seeds=seeds)
    for b, row in enumerate(rows):
        alone = infill([row], specials(), max_tokens=64)
        wanted = generate(DENOISER, alone, stages, specials(), seeds=seeds[b : b + 1]).ids[0]
        assert together.ids[b, : len(wanted)].tolist() == wanted.tolist()
