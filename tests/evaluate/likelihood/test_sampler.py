"""A scorer that is called exact gives the shares of texts that its sampler writes."""

import itertools
import math

import numpy as np
import pytest
import torch

from diffurefill.config import Stage
from diffurefill.config.decode import Order
from diffurefill.decode.canvas import continuation
from diffurefill.decode.generate import generate
from diffurefill.evaluate.likelihood.scorer import Method, Scorer, score
from tests.evaluate.likelihood.toys import TOKENS, V, scoring, sharp_transformer
from tests.fakes import EOS

CONTEXT, LENGTH, NUM_TEXTS = [5, 6], 3, 2000
WRITTEN = (EOS, *TOKENS)


class Emitting:
    """Says of no id that may not be written that it is likely: the sampler bars them, the scorer
    does not."""

    def __init__(self) -> None:
        self.denoiser = sharp_transformer(V, layers=2)
        with torch.no_grad():
            for parameter in self.denoiser.parameters():
                parameter.mul_(0.35 if parameter.ndim > 1 else 1.0)

    def __call__(self, canvas, doc_ids=None, at=None):
        logits = torch.full((1, V), -1e9)
        logits[:, list(WRITTEN)] = 0.0
        return self.denoiser(canvas, doc_ids, at) + logits


@pytest.mark.parametrize(
    ("method", "order", "tokens_per_pass"),
    [
        ("chain", "left_to_right", 1),
        ("entropy", "entropy", 1),
        ("margin", "margin", 1),
        ("entropy", "entropy", 2),
    ],
)
def test_texts_come_as_often_as_their_likelihood_says(
    method: Method, order: Order, tokens_per_pass: int
) -> None:
    denoiser = Emitting()
    model = scoring(denoiser)
    specials = model.specials
    specials.emittable[EOS] = True
    canvas = continuation([CONTEXT] * NUM_TEXTS, LENGTH, specials, max_tokens=16)
    stage = Stage(
        num_passes=0, tokens_per_pass=tokens_per_pass, temperature=(1.0, 1.0), order=order
    )
    done = generate(
        denoiser, canvas, [stage], specials, seeds=range(NUM_TEXTS), keep_trajectory=False
    )
    texts = list(itertools.product(WRITTEN, repeat=LENGTH))
    scorer = Scorer(method=method, tokens_per_pass=tokens_per_pass)
    scores = score(model, [(CONTEXT, list(text)) for text in texts], scorer).scores
    expected = NUM_TEXTS * np.exp([one.log_likelihood for one in scores])
    assert expected.sum() == pytest.approx(NUM_TEXTS, rel=1e-3)
    number = {text: i for i, text in enumerate(texts)}
    written = [number[tuple(row)] for row in canvas.filled(done.ids)]
    found = np.bincount(written, minlength=len(texts))
    common = expected > 5
    chi_squared = ((found - expected)[common] ** 2 / expected[common]).sum()
    freedom = common.sum()
    # Five standard deviations of chi squared; the seeds are fixed.
    assert chi_squared < freedom + 5 * math.sqrt(2 * freedom)
    assert freedom > 10
