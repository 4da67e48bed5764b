from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffurefill.config import ObjectiveConfig
from diffurefill.objective.corruption import SMALLEST_RATE, corrupt

MASK, BOS = 50, 1
T = 12

configs = st.builds(
    ObjectiveConfig,
    t_min=st.sampled_from([0.0, 0.15, 0.9]),
    prefix_rows=st.sampled_from([0.0, 0.5, 1.0]),
    loss=st.sampled_from(["pooled", "row", "elbo"]),
)


@st.composite
def row_batches(draw):
    """ids with BOS here and there, two documents and a PAD tail; one key per row."""
    num_rows = draw(st.integers(1, 5))
    generator = np.random.default_rng(draw(st.integers(0, 999)))
    ids = generator.integers(0, 49, (num_rows, T))
    ids[generator.random(ids.shape) < 0.2] = BOS
    doc_ids = np.repeat([[0] * 5 + [1] * 7], num_rows, axis=0).astype(np.int32)
    for row in doc_ids:
        row[generator.integers(0, T + 1) :] = -1
    keys = [(draw(st.integers(0, 9)), "mask", row) for row in range(num_rows)]
    return ids, doc_ids, keys


def run(ids, doc_ids, config, keys, span_ids=None, part_length=None):
    spans = np.zeros_like(doc_ids) if span_ids is None else span_ids
    lengths = np.full(len(ids), part_length or ids.shape[1], dtype=np.int32)
    rows = SimpleNamespace(ids=ids, doc_ids=doc_ids, span_ids=spans, part_lengths=lengths)
    return corrupt(rows, config, keys=keys, mask_id=MASK, bos_id=BOS)


def plain_rows(num_rows, num_positions):
    ids = np.full((num_rows, num_positions), 7)
    keys = [("test", row) for row in range(num_rows)]
    return ids, np.zeros_like(ids, dtype=np.int32), keys


@given(batch=row_batches(), config=configs)
def test_mask_stands_exactly_where_is_masked_says(batch, config):
    ids, doc_ids, keys = batch
    out = run(ids, doc_ids, config, keys)
    assert ((out.canvas.numpy() == MASK) == out.is_masked.numpy()).all()
    assert (out.canvas.numpy() == ids)[~out.is_masked.numpy()].all()


@given(batch=row_batches(), config=configs)
def test_pad_and_bos_are_never_masked(batch, config):
    ids, doc_ids, keys = batch
    is_masked = run(ids, doc_ids, config, keys).is_masked.numpy()
    assert not is_masked[(doc_ids < 0) | (ids == BOS)].any()


@given(batch=row_batches(), config=configs)
def test_a_row_depends_on_its_key_alone(batch, config):
    ids, doc_ids, keys = batch
    together = run(ids, doc_ids, config, keys)
    for i, key in enumerate(keys):
        alone = run(ids[i : i + 1], doc_ids[i : i + 1], config, [key])
        assert together.parts[i].tolist() == [i] * T
        for name in ("canvas", "is_masked", "t", "num_eligible"):
            assert (getattr(together, name)[i] == getattr(alone, name)[0]).all()


@given(batch=row_batches(), config=configs)
def test_no_more_is_masked_than_is_eligible_and_at_least_one_unless_elbo(batch, config):
    out = run(*batch[:2], config, batch[2])
    num_masked = out.is_masked.sum(dim=1)
    assert (num_masked <= out.num_eligible).all()
    if config.loss != "elbo":
        assert ((num_masked > 0) == (out.num_eligible > 0)).all()


@given(batch=row_batches(), config=configs)
def test_the_rows_given_are_left_as_they_were(batch, config):
    ids, doc_ids, keys = batch
    copies = ids.copy(), doc_ids.copy()
    run(ids, doc_ids, config, keys)
    assert (ids == copies[0]).all()
    assert (doc_ids == copies[1]).all()


def test_another_key_gives_another_mask():
    ids, doc_ids, _ = plain_rows(2, 64)
    out = run(ids, doc_ids, ObjectiveConfig(), [(0, "a"), (0, "b")])
    assert out.t[0] != out.t[1]
    assert (out.is_masked[0] != out.is_masked[1]).any()


@pytest.mark.parametrize("num_keys", [1, 3])
def test_the_number_of_keys_must_match(num_keys):
    ids, doc_ids, _ = plain_rows(2, 8)
    with pytest.raises(ValueError, match="zip"):
        run(ids, doc_ids, ObjectiveConfig(), [(key,) for key in range(num_keys)])


@pytest.mark.parametrize("t_min", [0.0, 0.15])
def test_t_is_uniform_from_t_min_to_one(t_min):
    config = ObjectiveConfig(t_min=t_min, prefix_rows=0.0)
    t = np.sort(run(*plain_rows(2000, 8)[:2], config, plain_rows(2000, 8)[2]).t.numpy())
    low = max(t_min, SMALLEST_RATE)
    uniform = low + (1 - low) * (np.arange(2000) + 0.5) / 2000
    assert t.min() >= low
    assert t.max() <= 1.0
    # Kolmogorov-Smirnov: 1.63 / sqrt(n) is exceeded in 1 of 100 seeds; the keys here are fixed.
    assert np.abs(t - uniform).max() / (1 - low) < 1.63 / 2000**0.5


def test_a_share_t_of_each_row_is_masked_independently():
    ids, doc_ids, keys = plain_rows(400, 200)
    out = run(ids, doc_ids, ObjectiveConfig(prefix_rows=0.0), keys)
    is_masked, t = out.is_masked.numpy(), out.t.numpy().astype(np.float64)
    sd = np.sqrt(t * (1 - t) / 200)
    assert np.abs(is_masked.mean(1) - t).max() < (4.5 * sd + 1e-9).max()
    scores = (is_masked.mean(1) - t) / np.maximum(sd, 1e-3)
    assert abs(scores.mean()) < 0.2
    assert 0.85 < scores.std() < 1.15
    both = (is_masked[:, 1:] & is_masked[:, :-1]).mean(1)
    assert abs((both - t**2).mean()) < 0.01


def test_half_of_the_rows_keep_a_clean_prefix_of_uniform_length():
    ids, doc_ids, keys = plain_rows(2000, 20)
    # At t near 1 the first mask stands where the prefix ends.
    config = ObjectiveConfig(t_min=0.9999, prefix_rows=0.5)
    out = run(ids, doc_ids, config, keys)
    length = 20 - out.num_eligible.numpy()
    assert (out.has_prefix.numpy() == (length > 0)).all()
    assert (out.is_masked.numpy().argmax(1) >= length).all()
    assert (out.is_masked.sum(1) == out.num_eligible).float().mean() > 0.99
    counts = np.bincount(length, minlength=20)
    assert len(counts) == 20  # P is at most T - 1
    # 1000 rows without a prefix, and 1000 / 20 of each length with one; 4.5 sigma.
    assert abs(counts[0] - 1050) < 4.5 * 500**0.5
    assert np.abs(counts[1:] - 50).max() < 4.5 * 50**0.5


def test_the_forced_mask_is_uniform_over_eligible_positions():
    ids, doc_ids, keys = plain_rows(3000, 4)
    ids[:, 0] = BOS
    config = ObjectiveConfig(t_min=0.0, prefix_rows=0.0)
    free = run(ids, doc_ids, ObjectiveConfig(t_min=0.0, prefix_rows=0.0, loss="elbo"), keys)
    forced = run(ids, doc_ids, config, keys)
    was_empty = ~free.is_masked.any(1)
    assert (forced.is_masked == free.is_masked)[~was_empty].all()
    where = forced.is_masked[was_empty].sum(0).numpy()
    # P(no mask) = E[(1 - t)^3] = 1 / 4.
    assert abs(was_empty.sum() - 750) < 4.5 * (3000 * 3 / 16) ** 0.5
    assert where[0] == 0
    assert np.abs(where[1:] - where.sum() / 3).max() < 4.5 * (where.sum() * 2 / 9) ** 0.5


@settings(max_examples=5)
@given(config=configs)
def test_a_row_of_pad_contributes_nothing(config):
    ids, doc_ids, keys = plain_rows(1, 8)
    out = run(ids, doc_ids - 1, config, keys)
    assert out.num_eligible.tolist() == [0]
    assert not out.is_masked.any()


# --- spans ---------------------------------------------------------------------------------------


@st.composite
def spanned_batches(draw):
    """Rows with spans of one to four tokens, numbered from 1, and free tokens between them."""
    ids, doc_ids, keys = draw(row_batches())
    spans = np.zeros_like(doc_ids)
    for row in spans:
        lengths = draw(st.lists(st.integers(1, 4), max_size=4))
        at = 0
        for number, length in enumerate(lengths, start=1):
            at += draw(st.integers(0, 2))
            row[at : at + length] = number
            at += length
    return ids, doc_ids, spans, keys


@given(batch=spanned_batches(), config=configs)
def test_a_span_is_masked_whole_or_not_at_all(batch, config):
    ids, doc_ids, spans, keys = batch
    out = run(ids, doc_ids, config, keys, spans)
    for row in range(len(ids)):
        masked = out.is_masked[row].numpy()
        can_mask = (doc_ids[row] >= 0) & (ids[row] != BOS)
        for number in range(1, spans[row].max() + 1):
            members = masked[(spans[row] == number) & can_mask].tolist()
            # A clean prefix may end inside the span: what is masked is all that comes after.
            assert members == sorted(members)
            assert config.prefix_rows > 0 or len(set(members)) <= 1


def test_without_a_prefix_no_span_is_ever_split():
    ids, doc_ids, keys = plain_rows(500, 30)
    spans = np.repeat(np.arange(10), 3)[None].repeat(500, 0).astype(np.int32)
    for loss in ("pooled", "elbo"):
        config = ObjectiveConfig(t_min=0.0, prefix_rows=0.0, loss=loss)
        masked = run(ids, doc_ids, config, keys, spans).is_masked.numpy().reshape(500, 10, 3)
        whole = masked[:, 1:]
        assert (whole.all(2) | ~whole.any(2)).all()
        free = masked[:, 0]
        assert (free.any(1) & ~free.all(1)).mean() > 0.2  # what is no span is split


def test_a_token_in_a_span_is_masked_with_probability_t():
    ids, doc_ids, keys = plain_rows(4000, 12)
    spans = np.repeat(np.arange(4), 3)[None].repeat(4000, 0).astype(np.int32)
    config = ObjectiveConfig(t_min=0.0, prefix_rows=0.0, loss="elbo")
    out = run(ids, doc_ids, config, keys, spans)
    masked, t = out.is_masked.numpy(), out.t.numpy()[:, None]
    # Over rows, mean of (masked - t) is 0 with a deviation of sqrt(1 / 6 / 4000).
    assert np.abs((masked - t).mean(0)).max() < 4.5 * (1 / 6 / 4000) ** 0.5


# --- short rows ----------------------------------------------------------------------------------


def test_each_part_of_a_short_row_has_a_rate_a_prefix_and_a_mask_of_its_own():
    ids, doc_ids, keys = plain_rows(50, 64)
    config = ObjectiveConfig(t_min=0.0, prefix_rows=0.5)
    out = run(ids, doc_ids, config, keys, part_length=16)
    assert out.parts.tolist() == [[4 * row + at // 16 for at in range(64)] for row in range(50)]
    assert out.t.shape == out.num_eligible.shape == (200,)
    assert len(set(out.t.tolist())) == 200
    assert len(set(out.num_eligible.tolist())) > 10
    per_part = out.is_masked.view(200, 16).sum(1)
    assert (per_part > 0).all()
    assert (per_part <= out.num_eligible).all()


def test_short_and_whole_rows_stand_in_one_batch():
    ids, doc_ids, keys = plain_rows(3, 32)
    config = ObjectiveConfig()
    lengths = np.array([32, 8, 32], dtype=np.int32)
    spans = np.zeros_like(doc_ids)
    rows = SimpleNamespace(ids=ids, doc_ids=doc_ids, span_ids=spans, part_lengths=lengths)
    out = corrupt(rows, config, keys=keys, mask_id=MASK, bos_id=BOS)
    whole = run(ids, doc_ids, config, keys)
    assert out.parts[:, 0].tolist() == [0, 1, 5]
    assert out.t[[0, 5]].tolist() == whole.t[[0, 2]].tolist()
    assert (out.is_masked[[0, 2]] == whole.is_masked[[0, 2]]).all()
