"""Keys and values that are kept, against a row computed one position at a time from plain formulas.

The reference keeps of every position, in every layer, what it was last computed with; a position
that is computed looks at that. With everything computed it is the denoiser.
"""

import pytest
import torch
from torch import Tensor

from diffurefill.config import ModelConfig, UserError
from diffurefill.decode.canvas import continuation
from diffurefill.model.cached import RowCache
from diffurefill.model.denoiser import Denoiser
from tests.decode.plain import specials
from tests.decode.test_refill import model
from tests.fakes import BigramDenoiser


class PlainRow:
    """One row and the keys and values of its positions, layer by layer."""

    def __init__(self, denoiser: Denoiser) -> None:
        self.denoiser = denoiser
        self.kept: list[dict[int, tuple[Tensor, Tensor]]] = [{} for _ in denoiser.blocks]

    def logits(self, ids: list[int], compute: list[int]) -> dict[int, Tensor]:
        """Of the positions `compute`; each sees the whole row as it was last computed."""
        denoiser = self.denoiser
        x = {i: denoiser.embedding.weight[ids[i]] for i in compute}
        for block, kept in zip(denoiser.blocks, self.kept, strict=True):
            queries = {}
            for i in compute:
                joint = block.qkv.weight @ self.normed(x[i], block.attention_norm.weight)
                q, k, v = joint.view(3, block.heads, -1)
                queries[i], kept[i] = self.turned(q, i), (self.turned(k, i), v)
            for i in compute:
                mixed = [
                    self.attended(queries[i][h], [(k[h], v[h]) for k, v in kept.values()])
                    for h in range(block.heads)
                ]
                x[i] = x[i] + block.attention_out.weight @ torch.cat(mixed)
                gate, up = (block.gate_up.weight @ self.normed(x[i], block.ffn_norm.weight)).chunk(
                    2
                )
                x[i] = x[i] + block.down.weight @ (gate * gate.sigmoid() * up)
        gain = denoiser.final_norm.weight
        return {i: denoiser.embedding.weight @ self.normed(x[i], gain) for i in compute}

    def attended(self, query: Tensor, past: list[tuple[Tensor, Tensor]]) -> Tensor:
        scores = torch.stack([query @ k for k, _ in past]) / len(query) ** 0.5
        return scores.softmax(0) @ torch.stack([v for _, v in past])

    def normed(self, x: Tensor, gain: Tensor) -> Tensor:
        return x / (x.square().mean() + self.denoiser.config.norm_eps).sqrt() * gain

    def turned(self, x: Tensor, position: int) -> Tensor:
        """(H, K), dimension i turned with i + K / 2."""
        K = x.shape[1]
        speed = self.denoiser.config.rope_base ** -(torch.arange(0, K, 2) / K)
        turn = torch.polar(torch.ones(K // 2), position * speed)
        turned = torch.complex(*x.chunk(2, dim=1)) * turn
        return torch.cat([turned.real, turned.imag], dim=1)


LENGTHS = [[14], [14, 14], [14, 6, 9]]
"""Rows of one batch: alone, all whole, and with padding on their right."""


@pytest.mark.parametrize("lengths", LENGTHS)
def test_every_pass_looks_at_what_was_kept(lengths):
    """Three layers and four passes, each over other positions, not equally many in each row."""
    denoiser, generator = model(3), torch.Generator().manual_seed(0)
    canvas = continuation([[5]] * len(lengths), lengths, specials(), max_tokens=16)
    real, ids = canvas.doc_ids >= 0, canvas.ids
    doc_ids = None if real.all() else canvas.doc_ids
    cache, rows = RowCache(denoiser), [PlainRow(denoiser) for _ in lengths]
    with torch.inference_mode():
        for k in range(4):
            change = real & (torch.rand(ids.shape, generator=generator) < 0.3)
            change[0, 3] = True
            drawn = torch.randint(4, 20, ids.shape, generator=generator)
            ids = torch.where(change, drawn, ids)
            at = real & (torch.rand(ids.shape, generator=generator) < 0.4)
            compute = at | cache.changed(ids)
            assert bool(compute.all()) == (k == 0)
            most = int(compute.sum(dim=1).max())
            wanted = at.flatten().nonzero().squeeze(1)
            found = cache.logits(ids, doc_ids, compute, most, wanted)
            expected = []
            for b, row in enumerate(rows):
                computed = (compute & real)[b].nonzero().squeeze(1).tolist()
                logits = row.logits(ids[b].tolist(), computed)
                expected += [logits[i] for i in at[b].nonzero().squeeze(1).tolist()]
            torch.testing.assert_close(found, torch.stack(expected), rtol=1e-4, atol=1e-4)
            if k == 0:
                plain = denoiser(ids, canvas.doc_ids, wanted)
                torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-4)


def test_other_denoisers_and_causal_ones_are_refused():
    twin = Denoiser(ModelConfig(vocab_size=24, width=8, layers=1, heads=2, causal=True))
    for other in (BigramDenoiser(24), twin):
        with pytest.raises(UserError, match="refresh_every 1"):
            RowCache(other)
