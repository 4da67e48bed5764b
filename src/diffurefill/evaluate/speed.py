"""How fast a model writes: the report's protocol, with autoregressive baselines in the same run.

A row is 32 given ids and 256 to write; only written tokens are counted. Every contender is warmed
up and then timed in turn with the others, so that a machine that slows down slows all of them;
medians. Weights may be random: they change no shape. Source: spec algorithms 6.5.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diffurefill.config import ModelConfig, Stage
from diffurefill.decode.autoregressive import LeftToRight, generate_left_to_right
from diffurefill.decode.canvas import Canvas, Specials, continuation
from diffurefill.decode.generate import generate
from diffurefill.model.denoiser import Denoiser
from diffurefill.runtime import philox, wait_for

PROMPT_TOKENS = 32
"""With BOS."""
BOS, EOS, MASK, PAD = range(4)
GREEDY = (0.0, 0.0)
ONE_PER_PASS = (Stage(num_passes=0, tokens_per_pass=1, temperature=GREEDY),)


def eight_per_pass(num_tokens: int) -> tuple[Stage]:
    """Eight tokens a pass, spaced apart, in exactly num_tokens / 8 passes: the last one takes what
    the gap has left, as a draft's last pass does."""
    passes = -(-num_tokens // 8)
    return (Stage(num_passes=passes, tokens_per_pass=8, temperature=GREEDY, commit_gap=2),)


@dataclass(frozen=True)
class Asked:
    """What the passes of one run must compute, all rows together."""

    num_positions: int
    num_logits: int
    num_pairs: int
    """(query, key) pairs."""


@dataclass(frozen=True, eq=False)
class Contender:
    """Something that writes `num_tokens` tokens (all rows together) whenever it is run."""

    name: str
    run: Callable[[], int]
    """Writes once; returns the forward passes that took."""
    num_tokens: int
    asked: Asked | None = None
    """None where nobody counted."""


@dataclass(frozen=True)
class Timing:
    """Medians of one contender's runs."""

    num_passes: int
    seconds: float
    """By the clock, the device waited for."""
    cpu_seconds: float
    """Of this process, all threads: what a shared machine does not blur."""
    num_runs: int


class Recorded:
    """A denoiser that remembers what it was asked, to be asked the same again without decoding."""

    def __init__(self, denoiser: Callable[..., Tensor]) -> None:
        self.denoiser = denoiser
        self.calls: list[tuple[Tensor, Tensor | None, Tensor | None]] = []

    def __call__(
        self, canvas: Tensor, doc_ids: Tensor | None = None, at: Tensor | None = None
    ) -> Tensor:
        self.calls.append((canvas, doc_ids, at))
        return self.denoiser(canvas, doc_ids, at)

    def replay(self) -> int:
        with torch.inference_mode():
            for canvas, doc_ids, at in self.calls:
                self.denoiser(canvas, doc_ids, at)
        return len(self.calls)

    @property
    def asked(self) -> Asked:
        """Of rows without padding."""
        shapes = [canvas.shape for canvas, _, _ in self.calls]
        return Asked(
            num_positions=sum(rows * length for rows, length in shapes),
            num_logits=sum(_num_logits(canvas, at) for canvas, _, at in self.calls),
            num_pairs=sum(rows * length**2 for rows, length in shapes),
        )


def _num_logits(canvas: Tensor, at: Tensor | None) -> int:
    if at is None:
        return canvas.numel()
    return int(at.sum()) if at.dtype == torch.bool else len(at)


def specials(vocab_size: int) -> Specials:
    """The first four ids are special, the others may be written."""
    emittable = torch.ones(vocab_size, dtype=torch.bool)
    emittable[[BOS, MASK, PAD]] = False
    return Specials(BOS, EOS, MASK, PAD, emittable)


def random_model(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Denoiser:
    """In eval mode."""
    model = Denoiser(config)
    model.init_weights(torch.Generator().manual_seed(0))
    return model.to(device, dtype).eval()


def random_canvas(vocab_size: int, num_rows: int, num_tokens: int, device: torch.device) -> Canvas:
    rng = philox("speed", num_rows)
    prompts = rng.integers(4, vocab_size, (num_rows, PROMPT_TOKENS - 1)).tolist()
    length = PROMPT_TOKENS + num_tokens
    return continuation(prompts, num_tokens, specials(vocab_size), max_tokens=length).to(device)


def by_diffusion(
    name: str, denoiser: Denoiser, canvas: Canvas, stages: Sequence[Stage]
) -> tuple[Contender, Contender]:
    """The decoder, and the forward passes alone that it asked for: same rows, same positions."""
    known, seeds = specials(denoiser.config.vocab_size), list(range(len(canvas.ids)))
    recorded = Recorded(denoiser)
    generate(recorded, canvas, stages, known, seeds=seeds, forbid_eos=True)

    def run() -> int:
        done = generate(denoiser, canvas, stages, known, seeds=seeds, forbid_eos=True)
        return done.num_forward_passes

    num_tokens = int(canvas.num_fillable.sum())
    asked = recorded.asked
    bare = Contender(f"{name}, forward passes alone", recorded.replay, num_tokens, asked)
    return Contender(name, run, num_tokens, asked), bare


def by_twin(name: str, twin: Denoiser, canvas: Canvas) -> Contender:
    """Our own cached sampler, greedy."""
    known, seeds = specials(twin.config.vocab_size), list(range(len(canvas.ids)))
    how, layers = LeftToRight(temperature=0.0, forbid_eos=True), twin.config.layers

    def run() -> int:
        done = generate_left_to_right(twin, canvas, known, how, num_layers=layers, seeds=seeds)
        return done.num_forward_passes

    num_tokens = int(canvas.num_fillable.sum())
    return Contender(name, run, num_tokens, asked_of_ar(len(canvas.ids), num_tokens))


def asked_of_ar(num_rows: int, num_tokens: int) -> Asked:
    """With a cache: every position once, but for the token written last, which nobody reads."""
    length = PROMPT_TOKENS + num_tokens // num_rows - 1
    return Asked(num_rows * length, num_tokens, num_rows * length * (length + 1) // 2)


def by_transformers(name: str, model: Any, num_rows: int, num_tokens: int) -> Contender:
    """`generate()` of the library transformers: greedy, its KV cache, never ended by EOS."""
    vocab_size, device = model.config.vocab_size, model.device
    prompts = philox("speed", num_rows).integers(4, vocab_size, (num_rows, PROMPT_TOKENS))
    ids = torch.from_numpy(prompts).to(device)
    mask = torch.ones_like(ids)

    def run() -> int:
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=mask,
                min_new_tokens=num_tokens,
                max_new_tokens=num_tokens,
                do_sample=False,
                use_cache=True,
                pad_token_id=0,
            )
        written = out.shape[1] - PROMPT_TOKENS
        assert written == num_tokens, f"{name} wrote {written} tokens, not {num_tokens}"
        return num_tokens

    return Contender(name, run, num_rows * num_tokens)


def llama_like(
    config: ModelConfig, max_tokens: int, device: torch.device, dtype: torch.dtype
) -> Any:
    """A LlamaForCausalLM of the same width, depth, heads, feed-forward and tied vocabulary, with
    random weights."""
    import transformers  # pyrefly: ignore[missing-import]

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: Any = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=config.vocab_size,
                hidden_size=config.width,
                intermediate_size=config.ffn_width,
                num_hidden_layers=config.layers,
                num_attention_heads=config.heads,
                num_key_value_heads=config.heads,
                max_position_embeddings=max_tokens,
                rms_norm_eps=config.norm_eps,
                tie_word_embeddings=True,
                bos_token_id=None,
                eos_token_id=None,
            )
        )
    return model.to(device, dtype).eval()


def time_in_turn(
    contenders: Sequence[Contender],
    device: torch.device,
    *,
    warmups: int,
    repeats: int,
    seconds: float,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Timing]:
    """Medians by name. Nobody is run again once it has taken `seconds`, timed or warming up; all
    are timed once at least."""
    for c in contenders:
        spent = 0.0
        for _ in range(warmups):
            if spent <= seconds:
                say(f"{c.name}, warming up")
                spent += _timed(c, device)[1]
    taken: dict[str, list[tuple[int, float, float]]] = {c.name: [] for c in contenders}
    for r in range(repeats):
        for c in contenders:
            if r == 0 or sum(wall for _, wall, _ in taken[c.name]) <= seconds:
                say(f"{c.name}, run {r + 1} of {repeats}")
                taken[c.name].append(_timed(c, device))
    return {name: _medians(runs) for name, runs in taken.items()}


def _timed(contender: Contender, device: torch.device) -> tuple[int, float, float]:
    """Passes, seconds by the clock, CPU seconds of one run."""
    wall, cpu = time.perf_counter(), time.process_time()
    num_passes = contender.run()
    wait_for(device)
    return num_passes, time.perf_counter() - wall, time.process_time() - cpu


def _medians(runs: Sequence[tuple[int, float, float]]) -> Timing:
    passes, wall, cpu = zip(*runs, strict=True)
    return Timing(passes[-1], statistics.median(wall), statistics.median(cpu), len(runs))
