"""Compiled blocks compute what eager ones do, compile only at first, and are never needed."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

from diffurefill.cli import main
from diffurefill.config import DRAFT, REFILL, ModelConfig, UserError
from diffurefill.decode.canvas import Canvas, continuation
from diffurefill.decode.generate import generate
from diffurefill.model import attention as attention_room
from diffurefill.model import backends, compiling
from diffurefill.model.compiling import (
    CACHE_VARIABLE,
    compile_blocks,
    compile_for_writing,
    why_eager,
    why_not_compiled,
)
from diffurefill.model.denoiser import EAGER, Denoiser
from diffurefill.model.segments import Backend
from tests.decode.plain import specials

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
"""torch's tracer looks at it, and hides the warning where warnings are no errors."""
CPU = torch.device("cpu")
CUDA = torch.device("cuda")
B, T = 4, 128
SMALL = ModelConfig(vocab_size=64, width=32, layers=3, heads=2, ffn_width=48)
CANVASES = ([50], [20, 31, 7], [12, 12], [33])
"""Tokens to write in the rows of each: rows alone, and ragged and whole batches."""
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def build() -> Denoiser:
    model = Denoiser(SMALL)
    model.init_weights(torch.Generator().manual_seed(0))
    return model


def batch(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, ragged documents and masks; more documents than one step of a table of ranges holds."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(64, (B, T), generator=generator)
    num_documents = (3, 40, 7)[seed % 3]
    doc_ids = torch.randint(num_documents, (B, T), generator=generator).sort(-1).values.int()
    return ids, doc_ids, torch.rand(B, T, generator=generator) < (0.5, 0.05, 0.9)[seed % 3]


def gradients(model: Denoiser, seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    model.zero_grad()
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        logits = model(*batch(seed))
    logits.square().mean().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {**found, "logits": logits.detach()}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    torch._dynamo.reset()
    counters.clear()


@DTYPES
@pytest.mark.parametrize("backend", ["loop", "sdpa"])
@pytest.mark.usefixtures("cache")
def test_ragged_documents_compile_nothing_after_the_first_step(
    backend: Backend, dtype: torch.dtype
) -> None:
    model = build()
    model.attention_backend = backend
    compile_blocks(model, backend="eager")
    gradients(model, 0, dtype)
    after_one = counters["stats"]["unique_graphs"]
    assert after_one == 2  # a block, and the last block
    for seed in range(1, 6):
        gradients(model, seed, dtype)
        with torch.no_grad():
            model(*batch(seed))  # scoring is eager unless asked for
    assert counters["stats"]["unique_graphs"] == after_one


def plain_varlen(q, k, v, starts, _, longest, __, *, window_size):
    """torch's `varlen_attn` in plain code that a tracer can follow; not causal."""
    documents = torch.searchsorted(starts, torch.arange(len(q), dtype=torch.int32), right=True)
    mask = documents[:, None] == documents
    parts = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(*parts, attn_mask=mask)[0].transpose(0, 1)


@pytest.mark.usefixtures("cache")
def test_any_number_of_documents_has_one_graph_with_varlen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention_room, "check_backend", lambda *_, **__: None)
    monkeypatch.setattr(attention_room, "_varlen_attn", lambda: plain_varlen)
    model, eager = build(), build()
    model.attention_backend = "varlen"
    compile_blocks(model, backend="eager")
    ids = torch.randint(64, (B, T), generator=torch.Generator().manual_seed(0))
    for num_short in (1, 10, 28, 20, 5):
        row = torch.arange(T).sub(T - num_short - 1).clamp(min=0).int()
        at = torch.rand(B, T, generator=torch.Generator().manual_seed(num_short)) < 0.5
        found = model(ids, row.repeat(B, 1), at)
        torch.testing.assert_close(found, eager(ids, row.repeat(B, 1), at), rtol=0, atol=1e-5)
        assert counters["stats"]["unique_graphs"] == 2  # a block, and the last block


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
def test_compiled_blocks_equal_eager_ones() -> None:
    """The real compiler, half a minute. fp32, 1e-5 of each gradient's largest number."""
    model = build()
    names = list(model.state_dict())
    eager = [gradients(model, seed) for seed in range(3)]
    compile_blocks(model)
    assert list(model.state_dict()) == names
    for seed, expected in enumerate(eager):
        for name, found in gradients(model, seed).items():
            scale = expected[name].abs().max().item()
            torch.testing.assert_close(found, expected[name], rtol=0.0, atol=1e-5 * scale)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["loop", "sdpa"])
@pytest.mark.usefixtures("cache")
def test_compiled_blocks_are_near_eager_ones_in_bf16(backend: Backend) -> None:
    """The real compiler, half a minute. What rounds where differs: 3% of each gradient's norm."""
    model = build()
    model.attention_backend = backend
    eager = [gradients(model, seed, torch.bfloat16) for seed in range(3)]
    compile_blocks(model)
    for seed, expected in enumerate(eager):
        for name, found in gradients(model, seed, torch.bfloat16).items():
            assert (found - expected[name]).norm() <= 0.03 * expected[name].norm(), name


def canvas_of(lengths: list[int]) -> Canvas:
    prompts = [[5 + b, 9] for b in range(len(lengths))]
    return continuation(prompts, lengths, specials(SMALL.vocab_size), max_tokens=64)


@DTYPES
@pytest.mark.usefixtures("cache")
def test_writing_compiles_a_few_graphs_whatever_the_sizes(dtype: torch.dtype) -> None:
    """Three of each function: a row alone, whole rows, rows with padding."""
    model, known = build().to(dtype), specials(SMALL.vocab_size)
    compile_for_writing(model, backend="eager")
    # Rows leave one by one.
    stages = (replace(DRAFT, quota="threshold", bound=0.05), replace(REFILL, sure_above=0.05))
    num_graphs = []
    for lengths in (*CANVASES, [41], [1], [5, 2, 9, 30, 21], [17, 17, 17]):
        seeds = list(range(len(lengths)))
        generate(model, canvas_of(lengths), stages, known, seeds=seeds)
        num_graphs.append(counters["stats"]["unique_graphs"])
    assert num_graphs[0] == 2
    assert num_graphs[2:] == [6] * 6


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
def test_the_compiled_step_writes_the_same_text() -> None:
    """The real compiler, half a minute. fp32, 1e-5 of the largest logit; a greedy text, which hangs
    on no draw, is the same."""
    eager, compiled = build(), build()
    with torch.no_grad():
        for weight in (*eager.parameters(), *compiled.parameters()):
            if weight.ndim > 1:
                weight.mul_(25.0)  # clear logits, which hang on what stands where
    compile_for_writing(compiled)
    assert list(compiled.state_dict()) == list(eager.state_dict())
    known = specials(SMALL.vocab_size)
    greedy = [replace(stage, temperature=(0.0, 0.0), order_noise=0.0) for stage in (DRAFT, REFILL)]
    for lengths in CANVASES:
        canvas = canvas_of(lengths)
        with torch.inference_mode():
            asked = (canvas.ids, canvas.doc_ids, canvas.fillable)
            expected, found = eager(*asked), compiled(*asked)
        scale = expected.abs().max().item()
        torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-5 * scale)
        seeds = list(range(len(lengths)))
        texts = [generate(m, canvas, greedy, known, seeds=seeds) for m in (eager, compiled)]
        assert torch.equal(texts[0].ids, texts[1].ids)
        assert len(texts[0].ids[canvas.fillable].unique()) > 5
    assert counters["stats"]["unique_graphs"] == 6


def test_writing_is_refused_where_it_cannot_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    causal = Denoiser(replace(SMALL, causal=True))
    with pytest.raises(UserError, match=r"causal model .* without --compile"):
        compile_for_writing(causal)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(UserError, match=r"no C\+\+ compiler .* without --compile"):
        compile_for_writing(build())


@pytest.mark.usefixtures("cache")
def test_a_compiler_that_fails_is_told_in_the_first_pass() -> None:
    def broken(graph: object, inputs: object) -> object:
        raise RuntimeError("no such instruction")

    model = build()
    compile_for_writing(model, backend=broken)
    with pytest.raises(UserError, match=r"do not compile here \(no such instruction\)"):
        generate(model, canvas_of([9]), [DRAFT], specials(SMALL.vocab_size), seeds=[0])
    gradients(model, 0)  # training stays as it was


def test_names_of_parameters_stay() -> None:
    model = build()
    names = list(model.state_dict())
    compile_blocks(model)
    assert list(model.state_dict()) == names


@pytest.mark.usefixtures("cache")
def test_a_compiler_that_fails_is_told_from_a_step_that_fails() -> None:
    def broken(graph: object, inputs: object) -> object:
        raise RuntimeError("no such instruction")

    model = build()
    compile_blocks(model, backend=broken)
    with pytest.raises(RuntimeError) as error:
        gradients(model, 0)
    assert why_not_compiled(error.value) == "no such instruction"
    assert why_not_compiled(RuntimeError("out of memory")) is None


def test_where_blocks_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_eager(CPU, "on") is None
    assert "train.compile = on" in str(why_eager(CPU, "auto"))
    assert "off" in str(why_eager(CPU, "off"))
    for capability, compiles in (((7, 5), False), ((8, 0), True), ((9, 0), True), ((12, 0), True)):
        hardware = backends.Hardware("cuda", capability)
        monkeypatch.setattr(compiling, "hardware_of", lambda device, found=hardware: found)
        for choice in ("auto", "on"):
            assert (why_eager(CUDA, choice) is None) == compiles
        assert why_eager(CUDA, "off") is not None


def test_no_compiler_means_eager_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert "no C++ compiler" in str(why_eager(CPU, "on"))


def test_compiled_code_is_kept_unless_the_user_has_a_place_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, "/somewhere/else")
    assert compiling.keep_compiled_code() == Path("/somewhere/else")
    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compiling.keep_compiled_code() == tmp_path / "diffurefill" / "compiled"
    assert os.environ[CACHE_VARIABLE] == str(tmp_path / "diffurefill" / "compiled")
    assert build().training_calls is EAGER


@pytest.mark.parametrize("is_there", [True, False])
def test_doctor_tells_the_size_of_what_was_compiled_and_changes_nothing(
    is_there: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "diffurefill" / "compiled"
    if is_there:
        (folder / "ab").mkdir(parents=True)
        (folder / "ab" / "graph").write_bytes(bytes(3_000_000))
        (folder / "graph").write_bytes(bytes(400_000))
    assert main(["doctor"]) == 0
    size = 3.4 if is_there else 0.0
    assert f"compiled     {size} MB of code in {folder}," in capsys.readouterr().out
    assert CACHE_VARIABLE not in os.environ
    assert folder.exists() == is_there
