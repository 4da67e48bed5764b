import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask

from diffurefill.config import ModelConfig, UserError
from diffurefill.model import backends, fastest
from diffurefill.model.attention import attention, plan_segments, segments_from_doc_ids
from diffurefill.model.backends import Hardware, Shape, check_backend, choose_backend, why_not
from diffurefill.model.denoiser import Denoiser
from diffurefill.model.fastest import fastest_backend
from diffurefill.model.segments import Ranges, documents_of
from diffurefill.runtime import philox
from tests.model.attention_cases import one_row, qkv

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without")
CPU, T4, A100 = Hardware("cpu"), Hardware("cuda", (7, 5)), Hardware("cuda", (8, 0))
CPU_DEVICE = torch.device("cpu")


def rows(lengths, num_positions, num_rows=2):
    return one_row(lengths, True, num_positions).repeat(num_rows, 1)


def chosen(
    hardware, doc_ids, *, heads=8, head_dim=64, training=True, on_host=True, dtype=torch.float32
):
    shape = Shape(doc_ids.shape[0], heads, doc_ids.shape[1], head_dim, dtype)
    documents = documents_of(doc_ids) if on_host else None
    return choose_backend(hardware, shape, documents, training=training)


@pytest.mark.parametrize(
    ("hardware", "doc_ids", "training", "backend"),
    [
        (CPU, rows([300, 200, 524], 1024), True, "loop"),
        (CPU, rows([128] * 16, 2048), True, "loop"),
        (CPU, rows([900], 1024), True, "loop"),
        (CPU, rows([300, 200, 524], 1024), False, "loop"),
        (CPU, rows([4] * 30, 128), True, "sdpa"),
        (CPU, rows([250], 256), True, "sdpa"),
        (CPU, rows([100, 56, 100], 256), True, "loop"),
        (CPU, rows([5, 7], 16), True, "sdpa"),
        (CPU, rows([100, 200, 200], 512), False, "sdpa"),
        (CPU, torch.tensor([[0] * 600 + [1] * 400 + [0] * 24]), True, "sdpa"),
        (T4, rows([300, 200, 524], 1024), True, "sdpa"),
        (A100, rows([300, 200, 524], 1024), True, "flex"),
        (A100, rows([300, 200, 524], 1024), False, "sdpa"),
        (Hardware("cuda", (12, 0)), rows([60, 60], 128), True, "flex"),
        (Hardware("mps"), rows([300, 724], 1024), True, "sdpa"),
    ],
)
def test_the_choice_by_device_shape_and_documents(hardware, doc_ids, training, backend):
    assert chosen(hardware, doc_ids, training=training) == backend


def drawn_rows(mean, num_rows, num_positions, seed=0):
    """Rows cut at other places each, as real text cuts them: documents of `mean` tokens."""
    drawn = philox("drawn rows", seed).exponential(mean, (num_rows, num_positions)).astype(int) + 1
    return torch.stack([one_row(row.tolist(), False, num_positions) for row in drawn])


def test_short_rows_go_by_how_many_documents_are_alike():
    for doc_ids, heads, backend in (
        (rows([50, 30, 48], 128, 32), 4, "loop"),
        (rows([30, 20, 30, 20, 25], 128, 16), 2, "loop"),
        (rows([78, 50], 128, 16), 2, "sdpa"),
        (drawn_rows(20, 32, 128), 4, "loop"),
        (drawn_rows(100, 32, 128), 4, "sdpa"),
        (drawn_rows(100, 4, 512), 8, "loop"),
        (rows([512], 513, 8), 8, "loop"),
    ):
        assert chosen(CPU, doc_ids, heads=heads, head_dim=48) == backend, doc_ids


def test_in_bf16_and_more_so_with_amx_a_document_must_save_more():
    for lengths, positions, backends_chosen in (
        ([50, 30, 48], 128, ("sdpa", "sdpa")),
        ([100, 56, 100], 256, ("loop", "sdpa")),
        ([200, 60, 252], 512, ("loop", "loop")),
        ([300, 200, 524], 1024, ("loop", "loop")),
    ):
        doc_ids = rows(lengths, positions, 4)
        found = tuple(
            chosen(Hardware("cpu", has_amx=amx), doc_ids, heads=4, dtype=torch.bfloat16)
            for amx in (False, True)
        )
        assert found == backends_chosen, (lengths, positions)


def test_ids_on_a_gpu_are_not_waited_for():
    assert chosen(A100, rows([300, 724], 1024), on_host=False) == "flex"


def test_a_head_dim_flex_cannot_take_gets_sdpa():
    assert chosen(A100, rows([300, 724], 1024), head_dim=8) == "sdpa"


@pytest.mark.parametrize(
    ("backend", "hardware", "changes", "words"),
    [
        ("flex", CPU, {}, "cannot train on CPU: ask for sdpa or loop"),
        ("flex", T4, {}, "needs CUDA from sm_80 on, not sm_75: ask for sdpa"),
        ("flex", A100, {"head_dim": 8}, "head dims of 16 to 256, not 8"),
        ("flex", A100, {"head_dim": 320}, "head dims of 16 to 256, not 320"),
        ("flex", Hardware("mps"), {}, "not mps: ask for sdpa"),
        ("varlen", CPU, {}, "needs CUDA from sm_80 on, not cpu: ask for loop"),
        ("varlen", T4, {}, "not sm_75: ask for sdpa"),
        ("varlen", A100, {"head_dim": 60}, "that 8 divides, not 60"),
        ("varlen", A100, {"head_dim": 264}, "up to 256"),
        ("varlen", A100, {"dtype": torch.float32}, "needs float16 or bfloat16, not torch.float32"),
        ("loop", A100, {}, "runs on CPU only: ask for sdpa"),
        ("mystery", CPU, {}, "no attention backend 'mystery': choose one of sdpa, loop"),
    ],
)
def test_a_backend_that_cannot_run_is_refused_in_words(backend, hardware, changes, words):
    shape = Shape(2, 8, 1024, 64, torch.bfloat16)._replace(**changes)
    with pytest.raises(UserError, match=words):
        check_backend(backend, hardware, shape, training=True)


def test_varlen_needs_a_torch_that_has_it(monkeypatch):
    shape = Shape(2, 8, 1024, 64, torch.bfloat16)
    monkeypatch.setattr(backends, "has_varlen", lambda: True)
    assert why_not("varlen", A100, shape) is None
    monkeypatch.setattr(backends, "has_varlen", lambda: False)
    with pytest.raises(UserError, match=r"varlen attention needs torch 2.11.*ask for flex"):
        check_backend("varlen", A100, shape, training=True)


def test_the_varlen_of_torch_2_10_takes_other_arguments(monkeypatch):
    def of_2_10(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):
        raise AssertionError("never called")

    varlen = pytest.importorskip("torch.nn.attention.varlen")
    backends.has_varlen.cache_clear()
    monkeypatch.setattr(varlen, "varlen_attn", of_2_10)
    assert not backends.has_varlen()
    backends.has_varlen.cache_clear()


@pytest.mark.parametrize("backend", ["flex", "varlen"])
def test_attention_itself_refuses_to_train_on_cpu(backend):
    q, k, v = qkv(1, 128).requires_grad_()
    segments = segments_from_doc_ids(rows([60, 68], 128, 1), causal=False, backend=backend)
    with pytest.raises(UserError, match="ask for"):
        attention(q, k, v, segments)


def test_flex_may_run_forward_on_cpu():
    q, k, v = qkv(1, 128)
    segments = segments_from_doc_ids(rows([60, 68], 128, 1), causal=False, backend="flex")
    assert isinstance(segments.mask, BlockMask)
    assert attention(q, k, v, segments).isfinite().all()


# --- in the denoiser ------------------------------------------------------------------------------


def plan(doc_ids, backend=None, training=True):
    shape = Shape(doc_ids.shape[0], 8, doc_ids.shape[1], 64)
    return plan_segments(
        doc_ids, shape, CPU_DEVICE, causal=False, training=training, backend=backend
    ).mask


def test_a_plan_takes_what_is_asked_for_or_what_the_rules_say():
    doc_ids = rows([300, 724], 1024)
    assert isinstance(plan(doc_ids), Ranges)
    assert isinstance(plan(doc_ids, "sdpa"), torch.Tensor)
    assert isinstance(plan(doc_ids, "flex", training=False), BlockMask)
    with pytest.raises(UserError, match="cannot train on CPU"):
        plan(doc_ids, "flex")


def test_whole_rows_need_no_mask():
    assert plan(torch.zeros(2, 64).int()) is None
    assert plan(rows([63], 64)) is not None


def test_the_denoiser_trains_alike_with_the_backends_of_the_cpu():
    model = Denoiser(ModelConfig(vocab_size=40, width=32, layers=2, heads=2, ffn_width=48))
    model.init_weights(torch.Generator().manual_seed(0))
    doc_ids = rows([20, 30, 9], 64, 4)
    canvas = torch.randint(40, (4, 64), generator=torch.Generator().manual_seed(1))
    gradients = []
    for backend in ("sdpa", "loop"):
        model.attention_backend = backend
        model.zero_grad()
        model(canvas, doc_ids).logsumexp(-1).sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for sdpa, loop in zip(*gradients, strict=True):
        torch.testing.assert_close(loop, sdpa, atol=1e-5, rtol=1e-5)
    model.attention_backend = "varlen"
    with pytest.raises(UserError, match="varlen attention needs CUDA"):
        model(canvas, doc_ids)
    with torch.no_grad():
        assert model(canvas, doc_ids).isfinite().all()


# --- the measurement at start-up ------------------------------------------------------------------


def test_the_fastest_backend_comes_with_its_timings():
    choice = fastest_backend(CPU_DEVICE, rows([20, 30], 64), heads=2, head_dim=16, repeats=3)
    assert list(choice.milliseconds) == sorted(choice.milliseconds, key=choice.milliseconds.get)
    assert set(choice.milliseconds) == {"sdpa", "loop"}
    assert choice.backend == next(iter(choice.milliseconds))
    assert "cannot train on CPU" in choice.refused["flex"]
    assert "needs CUDA" in choice.refused["varlen"]
    assert choice.describe().startswith(f"attention: {choice.backend} ({choice.backend} ")


def test_without_gradients_flex_is_timed_on_a_cpu_too(monkeypatch):
    monkeypatch.setattr(fastest, "attention", lambda q, k, v, segments: q)
    choice = fastest_backend(
        CPU_DEVICE, rows([20, 30], 64), heads=2, head_dim=16, training=False, repeats=1
    )
    assert set(choice.milliseconds) == {"sdpa", "loop", "flex"}


def test_a_backend_that_cannot_take_the_documents_is_left_out():
    doc_ids = torch.tensor([[0, 0, 1, 1, 0, 0]])
    choice = fastest_backend(CPU_DEVICE, doc_ids, heads=2, head_dim=16, repeats=1)
    assert choice.backend == "sdpa"
    assert "several pieces" in choice.refused["loop"]


@pytest.mark.parametrize("kind", [RuntimeError, ImportError, TypeError])
def test_a_kernel_that_fails_is_not_the_fastest(kind, monkeypatch):
    def failing(q, k, v, segments):
        if isinstance(segments.mask, Ranges):
            raise kind("out of resource: shared memory\nand a long trace")
        return attention(q, k, v, segments)

    monkeypatch.setattr(fastest, "attention", failing)
    choice = fastest_backend(CPU_DEVICE, rows([20, 30], 64), heads=2, head_dim=16, repeats=1)
    assert choice.backend == "sdpa"
    assert choice.refused["loop"] == "out of resource: shared memory"


def test_where_nothing_runs_that_is_said(monkeypatch):
    def failing(*_):
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(fastest, "attention", failing)
    with pytest.raises(UserError, match=r"no attention backend runs on cpu.*no kernel image"):
        fastest_backend(CPU_DEVICE, rows([20], 64), heads=2, head_dim=16, repeats=1)


def test_medians_are_sorted(monkeypatch):
    clock = iter([0.0, 3.0, 3.0, 4.0] * 2)
    monkeypatch.setattr(fastest.time, "perf_counter", lambda: next(clock))
    calls = {"sdpa": lambda: None, "loop": lambda: None}
    times = fastest._milliseconds(calls, CPU_DEVICE, 2)
    assert times == {"loop": 1000.0, "sdpa": 3000.0}
    assert list(times) == ["loop", "sdpa"]


@pytest.mark.gpu
def test_on_cuda_every_backend_that_runs_is_timed():
    doc_ids = rows([100, 300], 512)
    choice = fastest_backend(
        torch.device("cuda"), doc_ids, heads=2, head_dim=64, dtype=torch.bfloat16, repeats=3
    )
    assert {"sdpa", "flex"} <= set(choice.milliseconds)
