"""A masked-diffusion language model that writes by draft and refill, in one file.

Needs torch, transformers (>= 5) and the numpy that comes with it.

    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=True)
    model = AutoModelForMaskedLM.from_pretrained(path, trust_remote_code=True)
    ids = model.generate(**tokenizer("Once upon a time", return_tensors="pt"), max_new_tokens=64)
    print(tokenizer.decode(ids[0], skip_special_tokens=True))

`generate` appends MASKs to a prompt and fills them; `infill` fills the MASKs that a text already
holds, both sides in view. Each runs the stages of generation_config.json, or those you give: a
draft accepts some of the masked positions in every pass, a refill takes back the least sure ones
and fills them again. One pass is one call of the model, however many tokens it writes. The same
seed gives the same text, alone or in a batch; logits and tokens equal those of the diffurefill
package, in whose repository every step is explained.

Shapes: B rows, T positions, D width, H heads, K head dim, V vocabulary, N positions of a pass.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import MaskedLMOutput

# --- the model ------------------------------------------------------------------------------------


class DiffuRefillConfig(PreTrainedConfig):
    """Sizes. The head is the embedding; its rows past the tokenizer's pieces are MASK, PAD, unused.

    `max_position_embeddings` is the length the model was trained at; no table depends on it.
    """

    model_type = "diffurefill"

    def __init__(
        self,
        vocab_size: int = 73_760,
        hidden_size: int = 2048,
        num_hidden_layers: int = 18,
        num_attention_heads: int = 16,
        intermediate_size: int = 5632,
        rope_base: float = 10_000.0,
        rms_norm_eps: float = 1e-5,
        max_position_embeddings: int = 2048,
        mask_token_id: int | None = None,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.intermediate_size = intermediate_size
        self.rope_base = rope_base
        self.rms_norm_eps = rms_norm_eps
        self.max_position_embeddings = max_position_embeddings
        self.mask_token_id = mask_token_id
        super().__init__(**kwargs)


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide, weight = x.float(), self.weight.float()
        if not as_package_on_cpu(wide):
            return F.rms_norm(wide, weight.shape, weight, self.eps).to(x.dtype)
        square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square()
        scale = (square / wide.shape[-1] + self.eps).rsqrt()
        return (wide * scale * weight).to(x.dtype)


class Block(nn.Module):
    """x + attention(norm(x)), then x + SwiGLU(norm(x)); x is (B, T, D).

    `wanted` (N,), indices into the B * T positions, returns those alone, (N, D).
    """

    def __init__(self, config: DiffuRefillConfig) -> None:
        super().__init__()
        D, width = config.hidden_size, config.intermediate_size
        self.heads = config.num_attention_heads
        self.attention_norm = RMSNorm(D, config.rms_norm_eps)
        self.qkv = nn.Linear(D, 3 * D, bias=False)
        self.attention_out = nn.Linear(D, D, bias=False)
        self.ffn_norm = RMSNorm(D, config.rms_norm_eps)
        self.gate_up = nn.Linear(D, 2 * width, bias=False)
        self.down = nn.Linear(width, D, bias=False)

    def forward(
        self, x: Tensor, rotary: Tensor, mask: Tensor | None, wanted: Tensor | None = None
    ) -> Tensor:
        B, T, D = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(B, T, 3, self.heads, D // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, H, T, K) each
        q, k = rotate(q, rotary), rotate(k, rotary)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        mixed = mixed.transpose(1, 2).reshape(B, T, D)
        if wanted is not None:
            x = x.flatten(0, 1).index_select(0, wanted)
            mixed = mixed.flatten(0, 1).index_select(0, wanted)
        x = x + self.attention_out(mixed)
        gate, up = self.gate_up(self.ffn_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def rotary_table(num_positions: int, head_dim: int, base: float) -> Tensor:
    """Cosines and sines (2, T, K / 2) of position * base^(-2 i / K): fp64 angles, kept in fp32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim
    positions = torch.arange(num_positions, dtype=torch.float64, device="cpu")
    angles = torch.outer(positions, base**-exponents)
    return torch.stack((angles.cos(), angles.sin())).float()


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """`x` (B, H, T, K) turned by its positions; dimension i is paired with i + K / 2."""
    cos, sin = rotary
    if as_package_on_cpu(x):
        first, second = x.chunk(2, dim=-1)
        low = (first * cos).addcmul(second, sin, value=-1.0)
        return torch.cat((low, (second * cos).addcmul(first, sin)), dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)


def as_package_on_cpu(x: Tensor) -> bool:
    """Whether norms and turns are summed as the diffurefill package does it on CPU, where it takes
    fewer passes than the usual formulas: the same values but for rounding, here the same bits."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and not torch.compiler.is_compiling()


def attention_mask_of(doc_ids: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Who may see whom, (B, 1, T, T): positions of one document; a PAD (-1) sees itself alone.

    None where every row is one document.
    """
    if doc_ids is None or bool(((doc_ids == doc_ids[:, :1]) & (doc_ids >= 0)).all()):
        return None
    T = doc_ids.shape[1]
    itself = torch.eye(T, dtype=torch.bool, device=doc_ids.device)
    same = (doc_ids[:, :, None] == doc_ids[:, None, :]) & (doc_ids >= 0)[:, :, None]
    mask = (same | itself)[:, None]
    if mask.device.type != "cpu":
        return mask
    return torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, -torch.inf)


class DiffuRefillForMaskedLM(PreTrainedModel, GenerationMixin):
    """Logits at every position of a text with MASKs in it; attention looks both ways.

    Of GenerationMixin it takes only the loading of generation_config.json.
    """

    config_class = DiffuRefillConfig
    _no_split_modules = ["Block"]  # noqa: RUF012 (transformers reads it)

    def __init__(self, config: DiffuRefillConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.final_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self._rotary: Tensor | None = None  # no buffer: `.to(bfloat16)` would ruin the angles
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        assert isinstance(value, nn.Embedding)
        self.embedding = value

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        doc_ids: Tensor | None = None,
        at: Tensor | None = None,
        return_dict: bool | None = None,
    ) -> MaskedLMOutput | tuple[Tensor, ...]:
        """Logits (B, T, V), or (N, V) at the True positions of `at` (B, T), row-major.

        attention_mask: (B, T), 0 on PAD. doc_ids: (B, T), for rows that hold several documents
        which must not see each other, -1 on PAD; it takes the place of attention_mask.
        labels: (B, T), -100 where there is none; the loss is their mean cross entropy.
        """
        if doc_ids is None and attention_mask is not None:
            doc_ids = attention_mask.long() - 1  # 0 on text, -1 on PAD
        x = self.embedding(input_ids)
        mask = attention_mask_of(doc_ids, x.dtype)
        rotary = self._rotary_table(input_ids.shape[1], x.device)
        wanted = None if at is None else at.flatten().nonzero().squeeze(1)
        *blocks, last_block = self.blocks
        for block in blocks:
            x = block(x, rotary, mask)
        x = last_block(x, rotary, mask, wanted)
        logits = F.linear(self.final_norm(x), self.embedding.weight)
        loss = None
        if labels is not None:
            kept = labels if at is None else labels[at]
            loss = F.cross_entropy(logits.flatten(0, -2).float(), kept.flatten())
        if return_dict is False:
            return (logits,) if loss is None else (loss, logits)
        return MaskedLMOutput(loss=loss, logits=logits)

    def _rotary_table(self, num_positions: int, device: torch.device) -> Tensor:
        table = self._rotary
        if table is None or table.device != device or table.shape[1] < num_positions:
            head_dim = self.config.hidden_size // self.config.num_attention_heads
            with torch.inference_mode(False):
                table = rotary_table(num_positions, head_dim, self.config.rope_base).to(device)
            self._rotary = table
        return table[:, :num_positions]

    # --- writing ----------------------------------------------------------------------------------

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        max_new_tokens: int | None = None,
        stages: Sequence[Mapping[str, Any]] | None = None,
        seed: int = 0,
        on_pass: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """Each prompt with `max_new_tokens` more tokens, PAD after the text's end: (B, T).

        A prompt that does not begin with BOS gets one, as every text in training had. Row i is
        drawn with `seed + i`. `stages` are dicts with the fields of `Stage`; `on_pass` sees the
        ids after each pass. Raises ValueError where prompt and answer exceed the trained length.
        """
        config = self.config
        count = self.generation_config.max_new_tokens if max_new_tokens is None else max_new_tokens
        if not count or count < 1:
            raise ValueError("max_new_tokens must be at least 1")
        prompts = self._rows(input_ids, attention_mask)
        if any(config.mask_token_id in prompt for prompt in prompts):
            raise ValueError("the prompt holds MASK: `infill` fills it")
        rows = [[*prompt, *[config.mask_token_id] * count] for prompt in prompts]
        ids, doc_ids = self._batch(rows)
        ids = self._fill(ids, doc_ids, stages, seed, on_pass, forbid_eos=False)
        for row, prompt in zip(ids, prompts, strict=True):
            ends = (row[len(prompt) :] == config.eos_token_id).nonzero()
            if len(ends):
                row[len(prompt) + int(ends[0]) + 1 :] = config.pad_token_id
        return ids

    def infill(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        stages: Sequence[Mapping[str, Any]] | None = None,
        seed: int = 0,
        on_pass: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """Every MASK of each text filled, (B, T); otherwise as `generate`."""
        ids, doc_ids = self._batch(self._rows(input_ids, attention_mask))
        return self._fill(ids, doc_ids, stages, seed, on_pass, forbid_eos=True)

    def _rows(self, input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
        """The ids of each row without padding, BOS in front."""
        bos_id = self.config.bos_token_id
        real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        rows = [row[keep].tolist() for row, keep in zip(input_ids, real.bool(), strict=True)]
        return [row if row[:1] == [bos_id] else [bos_id, *row] for row in rows]

    def _batch(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """ids and doc_ids (B, T), padded on the right."""
        longest, limit = max(map(len, rows)), self.config.max_position_embeddings
        if longest > limit:
            raise ValueError(f"{longest} tokens with BOS; this model was trained on {limit}")
        ids = torch.full((len(rows), longest), self.config.pad_token_id)
        doc_ids = torch.full(ids.shape, -1)
        for b, row in enumerate(rows):
            ids[b, : len(row)] = torch.tensor(row)
            doc_ids[b, : len(row)] = 0
        return ids.to(self.device), doc_ids.to(self.device)

    @torch.no_grad()
    def _fill(
        self,
        ids: Tensor,
        doc_ids: Tensor,
        stages: Sequence[Mapping[str, Any]] | None,
        seed: int,
        on_pass: Callable[[Tensor], None] | None,
        *,
        forbid_eos: bool,
    ) -> Tensor:
        if not (ids == self.config.mask_token_id).any():
            raise ValueError("nothing to fill: no row holds MASK")
        emittable = torch.ones(self.config.vocab_size, dtype=torch.bool, device=ids.device)
        emittable[self.generation_config.suppress_tokens] = False
        if forbid_eos:
            emittable[self.config.eos_token_id] = False
        canvas = _Canvas(self, doc_ids, ids == self.config.mask_token_id, emittable, seed)
        chosen = self.generation_config.to_dict()["stages"] if stages is None else stages
        confidence = torch.zeros(ids.shape, device=ids.device)
        for s, stage in enumerate(Stage(**given) for given in chosen):
            for k in stage.passes():
                after = canvas.one_pass(stage, s, k, ids, confidence)
                if after is None:
                    break
                ids, confidence = after
                if on_pass is not None:
                    on_pass(ids)
        return ids.clone()


# --- stages: from pass k to its numbers -----------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """One stage of decoding: draft, refill, left-to-right and n-per-pass are values of this."""

    num_passes: int = 12
    """Calls of the model. 0: as many as `tokens_per_pass` needs."""
    remask_fraction: float = 0.0
    """0: a draft. Above 0: a refill, whose passes redo this share of the positions."""
    temperature: Sequence[float] = (1.0, 1.0)
    """First and last pass; linear between. 0 is greedy."""
    min_p: float = 0.0
    """Drop candidates below this share of the most likely one, after temperature."""
    order: str = "confidence"
    """Which positions a draft accepts first: `confidence` or `left_to_right`."""
    order_noise: float = 0.0
    """Gumbel noise on the log confidences when choosing positions; 0 in the last pass."""
    quota: str = "linear"
    """How the number still masked falls over the passes: `linear` or `cosine`."""
    tokens_per_pass: int | None = None
    """Accept exactly so many positions a pass instead of following `quota`."""
    commit_gap: int = 1
    """No two positions closer than this are accepted in one pass; 1 puts no constraint."""
    neighbour_ban: float = 0.0
    """Subtracted from the logit of a token already standing to the left or right."""

    def passes(self) -> Iterable[int]:
        endless = self.num_passes == 0 and self.remask_fraction == 0
        return itertools.count() if endless else range(self.num_passes)

    def planned(self, num_fillable: Tensor) -> Tensor:
        """Passes of each row that the schedules count with, (B,)."""
        if self.num_passes > 0 or self.tokens_per_pass is None:
            return torch.full_like(num_fillable, max(1, self.num_passes))
        return (-(-num_fillable // self.tokens_per_pass)).clamp(min=1)

    def temperature_at(self, k: int, planned: Tensor) -> Tensor:
        first, last = self.temperature
        progress = (k / (planned - 1).double()).nan_to_num(nan=1.0, posinf=1.0).clamp(max=1.0)
        return (first + (last - first) * progress).float()

    def noise_at(self, k: int, planned: Tensor) -> Tensor:
        return (self.order_noise * (1 - (k + 1) / planned.double()).clamp(min=0.0)).float()

    def quota_at(self, k: int, num_fillable: Tensor, num_masked: Tensor) -> Tensor:
        """How many positions each row accepts, (B,): all in the last pass."""
        if k == self.num_passes - 1:
            return num_masked
        if self.tokens_per_pass is not None:
            return torch.full_like(num_masked, self.tokens_per_pass)
        K = self.num_passes
        if self.quota == "cosine":
            keep = (num_fillable.double() * math.cos(math.pi / 2 * (k + 1) / K)).floor().long()
        else:
            keep = num_fillable * (K - 1 - k) // K
        return (num_masked - keep).clamp(min=1)

    def remask_count(self, num_fillable: Tensor) -> Tensor:
        share = (self.remask_fraction * num_fillable.double()).round().long()
        return torch.minimum(share.clamp(min=1), num_fillable)


# --- one pass -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Canvas:
    """What stays the same through all passes; tensors (B, T), emittable (V,)."""

    model: DiffuRefillForMaskedLM
    doc_ids: Tensor
    fillable: Tensor
    emittable: Tensor
    seed: int

    def one_pass(
        self, stage: Stage, s: int, k: int, ids: Tensor, confidence: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Ids and confidences (B, T) after pass k of stage s; None when nothing is masked."""
        mask_id, num_fillable = self.model.config.mask_token_id, self.fillable.sum(dim=1)
        refills = stage.remask_fraction > 0
        if refills:
            count = stage.remask_count(num_fillable)
            open_ = choose(-confidence, self.fillable, count, stage.commit_gap)
        else:
            open_ = self.fillable & (ids == mask_id)
        if not open_.any():
            return None
        seen = ids.masked_fill(open_, mask_id)
        logits = self._logits(seen, open_)
        slot = (open_.flatten().cumsum(0) - 1).view(open_.shape)
        planned = stage.planned(num_fillable)
        temperature = stage.temperature_at(k, planned)[:, None].expand_as(ids)
        uniform = self._uniforms("sample", s, k)

        def draw(where: Tensor, around: Tensor) -> tuple[Tensor, Tensor]:
            neighbours = visible_neighbours(around, self.doc_ids, where, mask_id)
            chosen = slot[where], neighbours, uniform[where], temperature[where]
            return sample(logits, *chosen, stage, self.emittable)

        tokens, sure = draw(open_, seen)
        new_ids = seen.masked_scatter(open_, tokens)
        new_confidence = confidence.masked_scatter(open_, sure)
        if refills:
            return new_ids, new_confidence
        score = self._order_score(stage, s, k, new_confidence, planned)
        quota = stage.quota_at(k, num_fillable, open_.sum(dim=1))
        accepted = choose(score, open_, quota, stage.commit_gap)
        ids = torch.where(accepted, new_ids, seen)
        confidence = torch.where(accepted, new_confidence, confidence)
        if k == stage.num_passes - 1:
            return place_one_by_one(draw, score, open_ & ~accepted, ids, confidence)
        return ids, confidence

    def _logits(self, seen: Tensor, open_: Tensor) -> Tensor:
        """Logits (N, V) at the open positions; rows that are done are not read again."""
        rows, doc_ids = open_.any(dim=1), self.doc_ids
        if not rows.all():
            seen, doc_ids, open_ = seen[rows], doc_ids[rows], open_[rows]
            width = int((doc_ids >= 0).any(dim=0).sum())
            seen, doc_ids, open_ = seen[:, :width], doc_ids[:, :width], open_[:, :width]
        return self.model(seen, doc_ids=doc_ids, at=open_).logits

    def _order_score(
        self, stage: Stage, s: int, k: int, confidence: Tensor, planned: Tensor
    ) -> Tensor:
        if stage.order == "left_to_right":
            T = confidence.shape[1]
            return -torch.arange(T, device=confidence.device).float().expand_as(confidence)
        if stage.order_noise == 0:
            return confidence
        gumbel = -(-self._uniforms("order", s, k).clamp(min=1e-300).log()).log()
        return confidence + stage.noise_at(k, planned)[:, None] * gumbel.float()

    def _uniforms(self, use: str, s: int, k: int) -> Tensor:
        """(B, T) float64 in [0, 1), keyed by row, stage and pass: a batch changes nothing."""
        B, T = self.doc_ids.shape
        rows = [keyed_uniforms((self.seed + b, use, s, k), T) for b in range(B)]
        return torch.from_numpy(np.stack(rows)).to(self.doc_ids.device)


def keyed_uniforms(key: tuple[int | str, ...], count: int) -> np.ndarray:
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
    return generator.random(count)


def place_one_by_one(
    draw: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    score: Tensor,
    waived: Tensor,
    ids: Tensor,
    confidence: Tensor,
) -> tuple[Tensor, Tensor]:
    """Fill what the gap kept out of the last pass, best first, so that the ban sees neighbours."""
    order = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    turn = torch.zeros_like(ids).scatter(1, ranking(score, waived), order)
    for j in range(int(waived.sum(dim=1).max())):
        now = waived & (turn == j)
        tokens, sure = draw(now, ids)
        ids, confidence = ids.masked_scatter(now, tokens), confidence.masked_scatter(now, sure)
    return ids, confidence


# --- which positions ------------------------------------------------------------------------------


def ranking(score: Tensor, candidates: Tensor) -> Tensor:
    """Positions of each row from best to worst, ties by position, others last: (B, T)."""
    ranked = score.masked_fill(~candidates, -math.inf)
    return ranked.sort(dim=1, descending=True, stable=True).indices


def choose(score: Tensor, candidates: Tensor, quota: Tensor, gap: int) -> Tensor:
    """The first `quota` (B,) positions down the scores, none closer than `gap`: (B, T) bool."""
    ranked = ranking(score, candidates)
    taken = spaced(ranked, candidates, gap) if gap > 1 else candidates
    taken = taken.gather(1, ranked)
    taken = taken & (taken.cumsum(dim=1) <= quota[:, None])
    return torch.zeros_like(candidates).scatter(1, ranked, taken)


def spaced(ranked: Tensor, candidates: Tensor, gap: int) -> Tensor:
    """All that a greedy walk down the ranking takes, (B, T): each round takes every local best."""
    B, T = ranked.shape
    countdown = torch.arange(T, 0, -1, device=ranked.device).float().expand(B, T)
    priority = torch.zeros_like(countdown).scatter(1, ranked, countdown)
    waiting, taken = candidates, torch.zeros_like(candidates)
    while waiting.any():
        contest = priority.masked_fill(~waiting, 0.0)
        peaks = waiting & (contest == window_max(contest, gap - 1))
        taken = taken | peaks
        waiting = waiting & (window_max(peaks.float(), gap - 1) == 0)
    return taken


def window_max(x: Tensor, reach: int) -> Tensor:
    reach = min(reach, x.shape[1])
    return F.max_pool1d(x[:, None], kernel_size=2 * reach + 1, stride=1, padding=reach)[:, 0]


# --- which tokens ---------------------------------------------------------------------------------

CDF_BLOCK = 160
COLDEST = 1e-30
CHUNK_ELEMENTS = 1 << 24


def visible_neighbours(ids: Tensor, doc_ids: Tensor, at: Tensor, mask_id: int) -> Tensor:
    """The tokens standing left and right of each True of `at`, each named once: (N, 2), -1: none"""
    visible = ids.masked_fill(ids == mask_id, -1)
    same = (doc_ids[:, 1:] == doc_ids[:, :-1]) & (doc_ids[:, 1:] >= 0)
    left = F.pad(torch.where(same, visible[:, :-1], -1), (1, 0), value=-1)[at]
    right = F.pad(torch.where(same, visible[:, 1:], -1), (0, 1), value=-1)[at]
    return torch.stack([left, torch.where(right == left, -1, right)], dim=1)


def sample(
    logits: Tensor,
    slot: Tensor,
    neighbours: Tensor,
    uniform: Tensor,
    temperature: Tensor,
    stage: Stage,
    emittable: Tensor,
) -> tuple[Tensor, Tensor]:
    """One token for each of N positions, and its log probability before ban and temperature."""
    size = max(1, CHUNK_ELEMENTS // logits.shape[1])
    inputs = (slot, neighbours, uniform, temperature)
    parts = zip(*(x.split(size) for x in inputs), strict=True)
    drawn = [_sample_part(logits[s], n, u, t, stage, emittable) for s, n, u, t in parts]
    tokens, confidence = zip(*drawn, strict=True)
    return torch.cat(tokens), torch.cat(confidence)


def _sample_part(
    logits: Tensor,
    neighbours: Tensor,
    uniform: Tensor,
    temperature: Tensor,
    stage: Stage,
    emittable: Tensor,
) -> tuple[Tensor, Tensor]:
    log_p = logits.float().masked_fill(~emittable, -math.inf).log_softmax(dim=1)
    if log_p.isnan().any():
        way_out = (
            "other weights" if logits.dtype == torch.float32 else "it with dtype=torch.float32"
        )
        raise ValueError(f"the model gave logits that are not finite: load {way_out}")
    inverse = 1 / torch.where(temperature > 0, temperature.clamp(min=COLDEST), 1.0)
    charge = torch.where(neighbours >= 0, -stage.neighbour_ban * inverse[:, None], 0.0)
    scaled = (log_p * inverse[:, None]).scatter_add(1, neighbours.clamp(min=0), charge)
    drawn = inverse_cdf(weights(scaled, stage.min_p), uniform)
    drawn = torch.where(temperature == 0, scaled.argmax(dim=1), drawn)
    return drawn, log_p.gather(1, drawn[:, None])[:, 0]


def weights(scaled: Tensor, min_p: float) -> Tensor:
    """Probabilities (N, V) up to a factor, 0 where below `min_p` of the largest."""
    if min_p == 0:
        return scaled.softmax(dim=1)
    relative = (scaled - scaled.amax(dim=1, keepdim=True)).exp()
    return relative.masked_fill(relative < float(np.float32(min_p)), 0.0)


def inverse_cdf(weight: Tensor, uniform: Tensor) -> Tensor:
    """The first id whose cumulative share exceeds `uniform` (N,): (N,).

    Sums in float64, over blocks of the vocabulary and then inside the block that was hit: low
    precision would cool the sampling.
    """
    V = weight.shape[1]
    whole = V // CDF_BLOCK * CDF_BLOCK
    sums = [weight[:, :whole].unflatten(1, (-1, CDF_BLOCK)).sum(dim=2)] if whole else []
    mass = torch.cat([*sums, weight[:, whole:].sum(dim=1, keepdim=True)], dim=1).double()
    cdf = mass.cumsum(dim=1)
    target = uniform * cdf[:, -1]
    block = first_above(cdf, target)[:, None]
    before, own = (cdf - mass).gather(1, block)[:, 0], mass.gather(1, block)[:, 0]
    columns = block * CDF_BLOCK + torch.arange(CDF_BLOCK, device=weight.device)
    inside = weight.gather(1, columns.clamp(max=V - 1)).double()
    inside = inside.masked_fill(columns >= V, 0.0).cumsum(dim=1)
    share = ((target - before) / own).clamp(0.0, 1.0)
    return block[:, 0] * CDF_BLOCK + first_above(inside, share * inside[:, -1])


def first_above(cdf: Tensor, target: Tensor) -> Tensor:
    """Never an id of probability 0: a target that rounding lifts to the total is held below it."""
    total = cdf[:, -1]
    below = torch.nextafter(total, torch.zeros_like(total))
    return torch.searchsorted(cdf, torch.minimum(target, below)[:, None], right=True)[:, 0]
