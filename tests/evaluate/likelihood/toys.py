"""Models whose likelihoods can be enumerated, and the plain scorer: a row at a time, no sharing."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from diffurefill.config import ModelConfig
from diffurefill.decode.canvas import Specials
from diffurefill.evaluate.likelihood.scorer import ScoringModel
from diffurefill.model.denoiser import Denoiser
from tests.fakes import BOS, EOS, MASK, PAD, TinyDenoiser

TOKENS = (4, 5, 6)
V = 7
CPU = torch.device("cpu")


def scoring(denoiser: object, vocab_size: int = V, max_tokens: int = 64, **more) -> ScoringModel:
    emittable = np.arange(vocab_size) > PAD
    specials = Specials(BOS, EOS, MASK, PAD, emittable)
    return ScoringModel(denoiser, specials, max_tokens, CPU, **more)


def sharp_transformer(vocab_size: int, layers: int) -> Denoiser:
    """Untrained, but of large weights: its tokens look at each other, and it is sure of much."""
    sizes = {"width": 32, "layers": layers, "heads": 2, "ffn_width": 32}
    model = Denoiser(ModelConfig(vocab_size=vocab_size, **sizes))
    model.init_weights(torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6.0 if parameter.ndim > 1 else 1.0)
    return model.eval()


def some_pairs(rng: np.random.Generator, vocab_size: int, count: int = 24):
    """Contexts of several lengths, each before four choices with a common beginning."""
    pairs = []
    while len(pairs) < count:
        context = rng.integers(4, vocab_size, rng.integers(0, 8)).tolist()
        start = rng.integers(4, vocab_size, 2).tolist()
        for _ in range(4):
            own = rng.integers(4, vocab_size, rng.integers(1, 4)).tolist()
            pairs.append((context, start + own))
    return pairs


class JointDenoiser(TinyDenoiser):
    """The exact conditionals of a joint distribution over `length` tokens at the row's end.

    What stands before is context and changes nothing. All orders must then give the joint's own
    log-probability, and the ELBO is tight.
    """

    def __init__(self, length: int, seed: int = 0) -> None:
        super().__init__()
        self.length = length
        logits = 1.5 * np.random.default_rng(seed).standard_normal((len(TOKENS),) * length)
        self.joint = np.exp(logits) / np.exp(logits).sum()

    def log_prob(self, tokens: Sequence[int]) -> float:
        return math.log(self.joint[tuple(TOKENS.index(token) for token in tokens)])

    def logits(self, canvas: Tensor, doc_ids: Tensor) -> Tensor:
        B, T = canvas.shape
        out = torch.full((B, T, V), -math.inf)
        for b in range(B):
            tail = canvas[b, T - self.length :].tolist()
            seen = tuple(slice(None) if t == MASK else TOKENS.index(t) for t in tail)
            for i, token in enumerate(tail):
                if token != MASK:
                    continue
                rest = self.joint[seen]
                axis = sum(t == MASK for t in tail[:i])
                others = tuple(a for a in range(rest.ndim) if a != axis)
                marginal = rest.sum(axis=others) / rest.sum()
                out[b, T - self.length + i, list(TOKENS)] = torch.log(
                    torch.tensor(marginal)
                ).float()
        return out


class LeftDenoiser(TinyDenoiser):
    """Looks at all visible tokens to its left alone: an autoregressive model in disguise."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.randn(V, V, generator=torch.Generator().manual_seed(1))

    def logits(self, canvas: Tensor, doc_ids: Tensor) -> Tensor:
        visible = torch.where((canvas == MASK)[..., None], 0.0, self.table[canvas])
        return visible.cumsum(dim=1) - visible

    def autoregressive(self, ids: Sequence[int], first: int) -> float:
        total = 0.0
        for i in range(first, len(ids)):
            logits = sum((self.table[token] for token in ids[:i]), torch.zeros(V))
            total += float(logits.log_softmax(dim=0)[ids[i]])
        return total


def plain_fixed_order(
    denoiser: TinyDenoiser, context: Sequence[int], tokens: Sequence[int], order: Sequence[int]
) -> float:
    """Each token of `order` in a pass of its own, over the whole vocabulary everywhere."""
    start, total = 1 + len(context), 0.0
    canvas = torch.tensor([[BOS, *context, *[MASK] * len(tokens)]])
    for place in order:
        log_probs = denoiser(canvas)[0].log_softmax(dim=1)
        total += float(log_probs[start + place, tokens[place]])
        canvas[0, start + place] = tokens[place]
    return total


def plain_elbo(denoiser: TinyDenoiser, context: Sequence[int], tokens: Sequence[int]) -> float:
    """Every mask of every count: the mean over counts of n / k times the mean over masks."""
    n, start = len(tokens), 1 + len(context)
    by_count = []
    for k in range(1, n + 1):
        values = []
        for hidden in itertools.combinations(range(n), k):
            shown = [MASK if i in hidden else token for i, token in enumerate(tokens)]
            log_probs = denoiser(torch.tensor([[BOS, *context, *shown]]))[0].log_softmax(dim=1)
            values.append(n / k * sum(float(log_probs[start + i, tokens[i]]) for i in hidden))
        by_count.append(np.mean(values))
    return float(np.mean(by_count))
