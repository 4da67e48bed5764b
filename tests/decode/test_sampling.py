import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diffurefill.decode import sampling
from diffurefill.decode.sampling import (
    Drawn,
    Places,
    Rules,
    beside,
    inverse_cdf,
    log_p_of,
    sample,
    scaled_logits,
    weights_,
)
from diffurefill.runtime import philox
from tests.fakes import EOS

ALMOST_ONE = 1 - 2.0**-53


def neighbours_of(doc_ids: list[list[int]]) -> list[list[set[int]]]:
    """Of each position of each row, by its place in the row."""
    docs = torch.tensor(doc_ids, dtype=torch.int32)
    T = docs.shape[1]
    return [
        [{i - b * T for i in pair} - {t} for t, pair in enumerate(row)]
        for b, row in enumerate(beside(docs).tolist())
    ]


def draw(
    logits: torch.Tensor,
    uniform: torch.Tensor,
    temperature: float | list[float],
    *,
    neighbours: torch.Tensor | None = None,
    forbidden: tuple[int, ...] = (),
    no_eos: torch.Tensor | None = None,
    **rules,
) -> Drawn:
    """`sample` at every row of `logits`, by default without neighbours."""
    N = len(logits)
    places = Places(neighbours, uniform.double(), torch.tensor(temperature).expand(N), no_eos)
    return sample(logits, places, Rules(torch.tensor(forbidden).long(), EOS, **rules))


def probabilities(logits: torch.Tensor, temperature: float = 1.0, min_p: float = 0.0):
    scaled = scaled_logits(
        logits.log_softmax(1), None, torch.full((len(logits),), temperature), 0.0
    )
    return weights_(scaled, min_p)


# --- neighbours and ban --------------------------------------------------------------------------


def test_neighbours_stand_on_both_sides_in_the_same_row():
    assert neighbours_of([[0] * 3] * 2) == [[{1}, {0, 2}, {1}]] * 2


def test_padding_and_another_document_are_no_neighbours():
    assert neighbours_of([[0, 0, 0, 1, 1, -1]])[0] == [{1}, {0, 2}, {1}, {4}, {3}, set()]


def test_a_token_on_both_sides_is_charged_once():
    both = torch.tensor([[7, 7]])
    assert scaled_logits(torch.zeros(1, 9), both, torch.ones(1), 6.0)[0, 7] == -6.0


def test_an_id_that_is_never_written_stands_for_no_neighbour():
    logits = torch.tensor([[0.0, 1.0, 5.0]])
    drawn = draw(
        logits, torch.tensor([0.5]), 0.0, neighbours=torch.tensor([[2, 2]]), forbidden=(2,),
        neighbour_ban=6.0,
    )  # fmt: skip
    assert drawn.tokens.tolist() == [1]
    torch.testing.assert_close(drawn.confidence, logits[:, :2].log_softmax(1)[:, 1])


@given(
    logits=st.lists(st.integers(-8, 8), min_size=6, max_size=6),
    ban=st.sampled_from([0.5, 2.0, 6.0]),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    banned=st.integers(0, 4),
)
def test_the_log_odds_of_a_banned_token_fall_by_ban_over_temperature(
    logits, ban, temperature, banned
):
    row = torch.tensor([logits], dtype=torch.float32)
    T = torch.tensor([temperature])
    plain = scaled_logits(row, None, T, ban)[0]
    charged = scaled_logits(row, torch.tensor([[banned, banned]]), T, ban)[0]
    fall = (plain[banned] - plain[5]) - (charged[banned] - charged[5])
    assert fall.item() == ban / temperature
    others = [i for i in range(5) if i != banned]
    assert torch.equal(plain[others] - plain[5], charged[others] - charged[5])


def test_the_ban_moves_the_draw_but_not_the_confidence():
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    token, confidence, *_ = draw(
        logits, torch.tensor([0.5]), 0.0,
        neighbours=torch.tensor([[0, 0]]), min_p=0.5, neighbour_ban=6.0,
    )  # fmt: skip
    assert token.item() == 1
    torch.testing.assert_close(confidence, logits.log_softmax(1)[:, 1])


# --- temperature and min-p -----------------------------------------------------------------------


def test_min_p_is_measured_after_temperature():
    logits = torch.tensor([[0.1, 0.05, 0.8, 0.05]]).log()
    # At T = 2 the shares of the best are the square roots: 0.354, 0.25, 1, 0.25.
    kept = probabilities(logits, 2.0, min_p=0.3)
    assert (kept > 0)[0].tolist() == [True, False, True, False]


@given(st.lists(st.floats(-20, 20, width=32), min_size=2, max_size=12), st.floats(0.01, 0.99))
def test_min_p_always_keeps_the_most_likely(values, min_p):
    row = torch.tensor([values])
    kept = probabilities(row, min_p=min_p)[0]
    assert kept[row[0].argmax()] == 1.0
    assert ((kept == 0) | (kept >= min_p * (1 - 1e-6))).all()


def test_temperature_zero_is_the_argmax_whatever_the_uniform():
    logits = torch.tensor([[0.0, 3.0, 2.9]]).repeat(3, 1)
    tokens = draw(logits, torch.tensor([0.0, 0.5, ALMOST_ONE], dtype=torch.float64), 0.0).tokens
    assert tokens.tolist() == [1, 1, 1]


@pytest.mark.parametrize("temperature", [1e-30, 1e-6])
def test_a_tiny_temperature_is_the_argmax_and_never_nan(temperature):
    logits = torch.tensor([[-90.0, 80.0, 79.0]])
    tokens = draw(logits, torch.tensor([0.99], dtype=torch.float64), temperature).tokens
    assert tokens.item() == 1


def test_greedy_and_sampled_rows_share_a_call():
    logits = torch.zeros(2, 4)
    logits[:, 1] = 1.0
    tokens = draw(logits, torch.tensor([ALMOST_ONE, ALMOST_ONE]).double(), [0.0, 1.0]).tokens
    assert tokens.tolist() == [1, 3]


# --- inverse CDF ---------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.4, 1.0, 2.2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frequencies_are_those_of_the_softmax(temperature, dtype):
    N, V = 100_000, 350  # three blocks of the two-level CDF
    zipf = (-1.1 * torch.arange(1, V + 1).float().log() + 4.0).to(dtype)
    uniform = torch.from_numpy(philox(5, "frequencies").random(N))
    tokens = draw(zipf.expand(N, V), uniform, temperature).tokens
    expected = N * (zipf.double() / temperature).softmax(0).numpy()
    seen = np.bincount(tokens.numpy(), minlength=V)
    common = expected >= 5
    expected = np.append(expected[common], max(expected[~common].sum(), 1e-9))
    seen = np.append(seen[common], seen[~common].sum())
    chi_square = ((seen - expected) ** 2 / expected).sum()
    degrees = len(expected) - 1
    # About four standard deviations above the mean: one honest sampler in 30,000 fails.
    assert chi_square < degrees + 4 * math.sqrt(2 * degrees)


PLANTED = [
    *range(156, 165),
    *range(340, 349),
]  # across two blocks of the CDF; in the last, short one


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.2])
@pytest.mark.parametrize("cluster", [PLANTED[:9], PLANTED[9:]])
def test_ids_of_one_in_a_million_come_as_often_as_they_should(temperature, cluster):
    """Uniforms from a window of 3e-5 around nine ids of probability 1e-6 each: what 40,000 draws in
    it show would take 10^9 draws from everywhere. No uniform from outside may hit them."""
    V, p = 350, 1e-6
    others = np.exp(np.random.default_rng(2).normal(0, 1.5, V))
    others[PLANTED] = 0.0
    share = others / others.sum() * (1 - p * len(PLANTED))
    share[PLANTED] = p
    logits = torch.from_numpy(temperature * np.log(share)).float()
    cdf = np.cumsum(share)
    first, last = cdf[cluster[0] - 1], cdf[cluster[-1]]
    low, high = first - 1e-5, last + 1e-5
    inside = low + (high - low) * philox(5, "window", cluster[0]).random(40_000)
    anywhere = philox(5, "anywhere").random(20_000)
    uniform = np.sort(np.concatenate([inside, anywhere]))
    tokens = draw(logits.expand(len(uniform), V), torch.from_numpy(uniform), temperature).tokens
    assert (tokens[1:] >= tokens[:-1]).all(), "a CDF only rises"
    tokens = tokens.numpy()
    outside = (uniform < low) | (uniform > high)
    assert not np.isin(tokens[outside], cluster).any()
    seen = np.array([(tokens[~outside] == i).sum() for i in cluster])
    expected = (~outside).sum() * p / (high - low)
    chi_square = ((seen - expected) ** 2 / expected).sum()
    assert chi_square < len(cluster) + 4 * math.sqrt(2 * len(cluster))


@settings(max_examples=200)
@given(
    st.lists(st.one_of(st.floats(-60, 20, width=32), st.just(-math.inf)), min_size=1, max_size=400),
    st.one_of(st.floats(0, 1, exclude_max=True), st.just(ALMOST_ONE), st.just(0.0)),
)
def test_inverse_cdf_is_the_plain_search_and_never_hits_probability_zero(values, u):
    logits = torch.tensor([[*values, 0.0]])
    got = int(inverse_cdf(logits.softmax(1), torch.tensor([u], dtype=torch.float64)))
    p = np.exp(logits.double().numpy()[0] - logits.max().item())
    cdf = np.cumsum(p) / p.sum()
    assert p[got] > 0
    assert cdf[got] > u - 1e-6
    assert (cdf[got - 1] if got else 0.0) < u + 1e-6


def test_the_last_rounding_of_a_sum_never_hits_probability_zero():
    """Summed by blocks or one by one, the same terms differ in the last bit; u almost 1 sees it."""
    logits = 12 * torch.randn(4000, 320, generator=torch.Generator().manual_seed(0))
    logits[:, 140:160] = logits[:, 300:] = -math.inf
    got = inverse_cdf(logits.softmax(1), torch.full((4000,), ALMOST_ONE, dtype=torch.float64))
    assert (got < 300).all()
    assert logits.gather(1, got[:, None]).isfinite().all()


def test_a_rare_tail_is_reached_by_its_own_share_of_uniforms_only():
    """A float32 uniform has steps of 2^-24: it would draw a tail of 2^-30 too often or never."""
    logits = torch.tensor([[0.0, -30 * math.log(2)]]).repeat(2, 1)
    uniform = torch.tensor([1 - 2.0**-29, 1 - 2.0**-31], dtype=torch.float64)
    assert inverse_cdf(logits.softmax(1), uniform).tolist() == [0, 1]


@pytest.mark.parametrize("elements", [200, 40])  # four rows of logits at a time, less than one
def test_the_chunks_of_a_large_batch_change_nothing(monkeypatch, elements):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(37, 50, generator=generator)
    uniform = torch.rand(37, generator=generator, dtype=torch.float64)
    neighbours = torch.randint(0, 50, (37, 2), generator=generator)
    no_eos = torch.rand(37, generator=generator) < 0.5

    def results() -> tuple[torch.Tensor, ...]:
        drawn = draw(
            logits, uniform, [0.0, 1.3, 0.7] * 12 + [2.0], neighbours=neighbours, no_eos=no_eos,
            min_p=0.05, neighbour_ban=3.0, measures=("margin", "entropy"),
        )  # fmt: skip
        rules = Rules(torch.tensor([3]), EOS)
        return *drawn, log_p_of(logits, drawn.tokens, rules, no_eos)

    whole = results()
    monkeypatch.setitem(sampling.CHUNK_ELEMENTS, "cpu", elements)
    assert all(map(torch.equal, whole, results()))


# --- confidence and what may be written ----------------------------------------------------------


def test_confidence_is_the_log_softmax_at_temperature_one_over_emittable_ids():
    logits = torch.tensor([[5.0, 1.0, 0.5, 2.0]])
    token, confidence, *_ = draw(logits, torch.tensor([0.999]), 2.2, forbidden=(0,))
    assert token.item() == 3
    torch.testing.assert_close(confidence, logits[:, 1:].log_softmax(1)[:, 2])


def test_eos_can_be_forbidden_at_single_positions():
    logits = torch.zeros(2, 4)
    logits[:, EOS] = 9.0
    drawn = draw(logits, torch.tensor([0.5, 0.5]), 0.0, no_eos=torch.tensor([True, False]))
    assert drawn.tokens.tolist() == [0, EOS]
    assert drawn.confidence[0].exp().item() == pytest.approx(1 / 3)
    assert (logits[:, EOS] == 9.0).all()  # the caller's


def test_margin_and_entropy_are_of_the_distribution_without_ban_or_temperature():
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    drawn = draw(
        logits, torch.tensor([0.9]), 2.2, min_p=0.9, measures=("margin", "entropy"),
        neighbours=torch.tensor([[0, 0]]), neighbour_ban=6.0,
    )  # fmt: skip
    assert drawn.margin.exp().item() == pytest.approx(0.2, rel=1e-5)
    assert drawn.entropy.item() == pytest.approx(-sum(p * math.log(p) for p in (0.5, 0.3, 0.2)))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_are_seen_in_the_confidence(bad, temperature):
    logits = torch.tensor([[0.0, bad, 1.0], [0.0, 1.0, 2.0]])
    confidence = draw(logits, torch.tensor([0.5, 0.5]), temperature).confidence
    assert confidence.isfinite().tolist() == [False, True]


def test_of_broken_logits_an_id_of_the_vocabulary_is_drawn():
    """It is read again before anybody asks whether all was finite."""
    logits = torch.full((2, 200), math.nan)
    tokens = draw(logits, torch.tensor([0.0, ALMOST_ONE]), 1.0).tokens
    assert ((tokens >= 0) & (tokens < 200)).all()
