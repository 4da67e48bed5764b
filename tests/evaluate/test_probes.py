"""Probes: the same rows and masks for every model, and figures that can be recomputed by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diffurefill.config import ModelConfig, ProbeConfig, UserError
from diffurefill.decode.canvas import Specials
from diffurefill.evaluate import probes
from diffurefill.evaluate.probes import (
    Probe,
    decoding_accuracy,
    held_out_ce,
    make_probe,
    row_values,
)
from diffurefill.evaluate.text import distinct_share, doubled_share
from diffurefill.model.denoiser import Denoiser
from tests.fakes import BOS, EOS, MASK, PAD, OracleDenoiser, TableDenoiser

V, R, T = 32, 6, 24
CPU = torch.device("cpu")
SPECIALS = Specials(BOS, EOS, MASK, PAD, np.arange(V) > 3)


@pytest.fixture
def probe() -> Probe:
    rng = np.random.default_rng(0)
    ids = rng.integers(4, V, (R, T))
    ids[:, 0] = BOS
    doc_ids = np.zeros((R, T), dtype=np.int32)
    ids[-1, T - 4 :], doc_ids[-1, T - 4 :] = PAD, -1
    return make_probe(ids, doc_ids, ProbeConfig(num_rows=R), seed=1, bos_id=BOS)


def small_model() -> Denoiser:
    model = Denoiser(ModelConfig(vocab_size=V, width=16, layers=1, heads=2, ffn_width=16))
    model.init_weights(torch.Generator().manual_seed(0))
    return model.eval()


def ce(model: object, probe: Probe, batch_rows: int = 16) -> float:
    return held_out_ce(model, probe, mask_id=MASK, device=CPU, batch_rows=batch_rows).mean


def test_special_positions_are_never_hidden(probe: Probe) -> None:
    for mask in (*probe.masks.values(), probe.decoding_mask):
        assert not mask[:, 0].any()
        assert not mask[probe.doc_ids < 0].any()


def test_masks_come_near_their_rates(probe: Probe) -> None:
    assert list(probe.masks) == [0.3, 0.6, 0.9]
    shares = [mask.sum() / (R * T - R - 4) for mask in probe.masks.values()]
    assert shares == pytest.approx([0.3, 0.6, 0.9], abs=0.12)


@pytest.mark.parametrize("array", ["ids", "doc_ids", "decoding", "mask_0.3", "mask_0.9"])
def test_the_digest_changes_with_any_number_of_any_array(probe: Probe, array: str) -> None:
    before = probe.digest
    probe.arrays()[array][2, 3] ^= 1
    assert probe.digest != before


def test_the_score_does_not_depend_on_the_batch_size(probe: Probe) -> None:
    model = small_model()
    scores = [ce(model, probe, batch_rows) for batch_rows in (1, 4, 16)]
    assert scores == pytest.approx([scores[0]] * 3, abs=1e-5)


def test_a_large_vocabulary_is_scored_few_rows_at_a_time(
    probe: Probe, monkeypatch: pytest.MonkeyPatch
) -> None:
    denoiser, rows = small_model(), []
    denoiser.register_forward_pre_hook(lambda _, given: rows.append(len(given[0])))
    whole = ce(denoiser, probe)
    monkeypatch.setattr(probes, "MAX_LOGITS", 4 * T * V)
    assert ce(denoiser, probe) == pytest.approx(whole, abs=1e-5)
    monkeypatch.setattr(probes, "MAX_LOGITS", 1)
    ce(denoiser, probe)
    assert rows == [R] * 3 + [4, 2] * 3 + [1] * R * 3


def test_the_score_repeats_bit_for_bit(probe: Probe) -> None:
    assert ce(small_model(), probe) == ce(small_model(), probe)


def test_a_uniform_model_scores_the_logarithm_of_its_vocabulary(probe: Probe) -> None:
    assert ce(TableDenoiser(torch.zeros(T, V)), probe) == pytest.approx(math.log(V))


def test_the_headline_is_the_plain_mean_over_the_rates(probe: Probe) -> None:
    found = held_out_ce(small_model(), probe, mask_id=MASK, device=CPU)
    assert found.mean == pytest.approx(sum(found.by_rate.values()) / 3)
    for rate, rows in found.rows.items():
        assert sum(n for _, n in rows) == probe.masks[rate].sum()
        assert sum(s for s, _ in rows) / sum(n for _, n in rows) == pytest.approx(
            found.by_rate[rate]
        )


def test_the_rows_values_average_to_the_headline(probe: Probe) -> None:
    found = held_out_ce(small_model(), probe, mask_id=MASK, device=CPU)
    assert np.mean(found.row_values()) == pytest.approx(found.mean)
    assert row_values([(1.0, 2), (3.0, 2)]) == [0.5, 1.5]
    assert row_values([(2.0, 1), (6.0, 3)]) == [2.0, 2.0]  # equal rates: nothing is uncertain


def test_a_visible_token_is_never_scored_and_a_hidden_one_never_seen(probe: Probe) -> None:
    """Changing a hidden original changes its target only: the model's input stays the same."""
    seen = []

    def spy(canvas: torch.Tensor, doc_ids: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        seen.append(canvas.clone())
        assert bool((canvas[at] == MASK).all())
        return torch.zeros(int(at.sum()), V)

    ce(spy, probe)
    hidden = probe.masks[0.9]
    probe.ids[hidden] = 5
    ce(spy, probe)
    assert torch.equal(seen[2], seen[5])


def test_too_little_held_out_text_is_said(probe: Probe) -> None:
    with pytest.raises(UserError, match="lower probe"):
        make_probe(probe.ids, probe.doc_ids, ProbeConfig(num_rows=99), seed=1, bos_id=BOS)


def test_the_head_of_a_probe_is_its_first_rows(probe: Probe) -> None:
    head = probe.head(2)
    assert head.ids.shape == (2, T)
    assert np.array_equal(head.masks[0.6], probe.masks[0.6][:2])


def accuracy(model: object, probe: Probe) -> tuple[float, float, int]:
    found = decoding_accuracy(model, probe, specials=SPECIALS, device=CPU, num_passes=8)
    return found.token, found.pair, found.num_forward_passes


def test_an_oracle_decodes_everything_in_eight_passes(probe: Probe) -> None:
    one = probe.head(1)
    oracle = OracleDenoiser(torch.from_numpy(one.ids[0]), V)
    assert accuracy(oracle, one) == (1.0, 1.0, 8)


def test_a_large_vocabulary_is_decoded_few_rows_at_a_time(
    probe: Probe, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe.decoding_mask[2] = False  # nothing to fill in a batch of this row alone
    denoiser, rows = small_model(), set()
    denoiser.register_forward_pre_hook(lambda _, given: rows.add(len(given[0])))

    def found() -> object:
        return decoding_accuracy(denoiser, probe, specials=SPECIALS, device=CPU, num_passes=8)

    whole = found()
    assert max(rows) == R - 1
    rows.clear()
    monkeypatch.setattr(probes, "MAX_LOGITS", T * V)
    assert found() == whole
    assert rows == {1}


def test_pairs_are_adjacent_positions_that_were_both_hidden() -> None:
    ids = np.array([[BOS, 10, 11, 12, 13, 14]])
    hidden = np.array([[0, 1, 1, 0, 1, 1]], dtype=bool)
    probe = Probe(ids, np.zeros_like(ids, dtype=np.int32), {0.5: hidden}, hidden)
    almost = ids[0].copy()
    almost[1] = 20
    model = OracleDenoiser(torch.from_numpy(almost), V)
    assert accuracy(model, probe)[:2] == (3 / 4, 1 / 2)


def test_doubled_and_distinct_on_strings_counted_by_hand() -> None:
    assert doubled_share([[1, 1, 2], [3, 3, 3]]) == 3 / 4
    assert distinct_share([[1, 2, 1, 2], [1, 2]]) == 2 / 4
    assert doubled_share([[]]) == 0.0
    assert distinct_share([[1]]) == 0.0


@given(st.lists(st.integers(0, 3), min_size=2, max_size=20))
def test_the_shares_of_any_text_are_shares(ids: list[int]) -> None:
    assert 0.0 <= doubled_share([ids]) <= 1.0
    assert 0.0 < distinct_share([ids]) <= 1.0


def test_the_twin_is_asked_for_the_same_tokens_from_their_left(probe: Probe) -> None:
    model = Denoiser(replace(small_model().config, causal=True))
    model.init_weights(torch.Generator().manual_seed(0))
    found = held_out_ce(model.eval(), probe, mask_id=MASK, device=CPU)
    for rate, mask in probe.masks.items():
        for row, (total, count) in enumerate(found.rows[rate]):
            places = [i for i in np.flatnonzero(mask[row]) if i > 0]
            nats = 0.0
            for i in places:
                left = torch.from_numpy(probe.ids[row : row + 1, :i])
                nats -= model(left)[0, -1].log_softmax(0)[probe.ids[row, i]].item()
            assert count == len(places)
            assert total == pytest.approx(nats, rel=1e-4)
