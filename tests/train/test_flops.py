"""FLOPs by hand, and the peaks they are measured against."""

from functools import partial
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diffurefill.config import ModelConfig
from diffurefill.train import flops
from diffurefill.train.flops import (
    Flops,
    Peak,
    datasheet_peak,
    device_peak,
    measured_bandwidth,
    measured_peak,
    six_nd,
    step_flops,
    utilisation,
    visible_pairs,
)

BASE = ModelConfig()
GIGA = 1e9


def per_token(masked_share: float, visible_keys: float, config: ModelConfig = BASE) -> Flops:
    n = 1000
    return step_flops(
        config, num_tokens=n, num_masked=masked_share * n, num_pairs=visible_keys * n
    ).per(n)


def test_the_1b_model_by_the_spec_table() -> None:
    assert six_nd(BASE) == 6 * 1_075_980_288
    everywhere = per_token(1.0, 2048)
    assert everywhere.blocks / GIGA == pytest.approx(1.850, abs=5e-4)
    assert everywhere.head / GIGA == pytest.approx(0.302, abs=5e-4)
    assert everywhere.attention / GIGA == pytest.approx(0.302, abs=5e-4)
    assert everywhere.training / GIGA == pytest.approx(7.36, abs=5e-3)
    assert per_token(1.0, 900).attention / GIGA == pytest.approx(0.133, abs=5e-4)


def test_half_of_the_tokens_spare_the_last_block_too() -> None:
    """The spec's 6.40 GF counts the last block in full; the denoiser leaves half of what follows
    its attention undone: (4 - 3) D^2 + 3 D F parameters, forward and backward."""
    spared = 6 * 0.5 * (2048**2 + 3 * 2048 * 5632)
    found = per_token(0.5, 900)
    whole = found.training + spared
    assert whole / GIGA == pytest.approx(6.40, abs=5e-3)
    assert 3 * found.head / whole == pytest.approx(0.071, abs=1e-3)
    assert 3 * found.attention / whole == pytest.approx(0.062, abs=1e-3)


def test_a_model_counted_by_hand() -> None:
    config = ModelConfig(vocab_size=10, width=4, layers=2, heads=2, ffn_width=6)
    found = step_flops(config, num_tokens=5, num_masked=2, num_pairs=13)
    # two qkv of 4 x 12 at 5 tokens; out 4 x 4, gate and up 4 x 12, down 6 x 4 at 5, then at 2
    assert found.blocks == 2 * (2 * 48 * 5 + (16 + 48 + 24) * (5 + 2))
    assert found.attention == 2 * 2 * (2 * 4) * 13
    assert found.head == 2 * 40 * 2
    assert found.forward == found.blocks + found.attention + found.head
    assert found.training == 3 * found.forward
    assert found.per(5) == Flops(found.blocks / 5, found.attention / 5, found.head / 5)


def test_the_count_is_what_torch_counts() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    from diffurefill.model.denoiser import Denoiser

    config = ModelConfig(vocab_size=96, width=32, layers=3, heads=2, ffn_width=48)
    model, T = Denoiser(config), 24
    is_masked = torch.arange(2 * T).view(2, T) % 3 == 0
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(2, T, dtype=torch.int64), None, is_masked).sum().backward()
    masked = int(is_masked.sum())
    found = step_flops(config, num_tokens=2 * T, num_masked=masked, num_pairs=2 * T * T)
    # torch does not count attention on CPU by one name in all versions: the products alone
    counted = counter.get_flop_counts()["Global"]
    matrices = sum(n for op, n in counted.items() if "attention" not in str(op))
    assert matrices == found.training - 3 * found.attention


def plain_pairs(doc_ids: np.ndarray, causal: bool) -> int:
    T = doc_ids.shape[1]
    return sum(
        bool(row[i] >= 0 and row[i] == row[j] and (j <= i or not causal))
        for row in doc_ids
        for i in range(T)
        for j in range(T)
    )


@given(
    rows=st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=4),
    causal=st.booleans(),
)
def test_visible_pairs_are_those_of_the_plain_loop(rows: list[list[int]], causal: bool) -> None:
    doc_ids = np.full((len(rows), 20), -1, dtype=np.int32)
    for row, lengths in zip(doc_ids, rows, strict=True):
        row[: sum(lengths)] = np.repeat(np.arange(len(lengths)), lengths)
    assert visible_pairs(doc_ids, causal=causal) == plain_pairs(doc_ids, causal)


def test_a_row_that_ends_as_the_next_begins_is_another_document() -> None:
    assert visible_pairs(np.zeros((3, 4), dtype=np.int32)) == 3 * 16


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 503.8),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 438.9),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA L40", 181.05),
        ("Tesla T4", 65.0),
        ("Tesla V100-SXM2-16GB", 125.0),
    ],
)
def test_cards_are_known_by_name(name: str, teraflops: float) -> None:
    peak = datasheet_peak(name)
    assert peak is not None
    assert peak.flops == teraflops * 1e12
    assert f"{teraflops:g}" in peak.what


@pytest.mark.parametrize(
    "name",
    ["NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA A10G", "NVIDIA RTX A4000", "NVIDIA T400 4GB"],
)
def test_no_figure_is_made_up_for_other_cards_and_slices(name: str) -> None:
    assert datasheet_peak(name) is None


def test_the_cpu_is_measured() -> None:
    before = torch.get_rng_state()
    peak = measured_peak(torch.device("cpu"), torch.float32, seconds=0.0)
    assert torch.equal(torch.get_rng_state(), before), "nobody else's draws are taken"
    assert peak.flops > 1e8
    assert "measured" in peak.what
    assert "float32" in peak.what


def test_the_best_try_in_cpu_seconds_counts_for_every_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tries of 3, 1 and 2 seconds of the CPU's clock, one in each second of the wall clock."""

    def restart() -> None:
        shown = iter([0.0, 3.0, 3.0, 4.0, 4.0, 6.0])
        clocks = {"process_time": partial(next, shown), "perf_counter": partial(next, count())}
        monkeypatch.setattr(flops, "time", SimpleNamespace(**clocks))

    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    cpu = torch.device("cpu")
    restart()
    assert measured_peak(cpu, torch.float32, seconds=2.5).flops == 4 * 2 * 1024**3
    restart()
    assert measured_bandwidth(cpu, seconds=2.5) == 4 * 2**28


def test_a_card_without_a_figure_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Peak(1.0, "measured")
    monkeypatch.setattr(flops, "measured_peak", lambda *_: measured)
    for name, expected in (("NVIDIA L4", datasheet_peak("NVIDIA L4")), ("Unheard of", measured)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        assert device_peak(torch.device("cuda"), torch.bfloat16) == expected


@pytest.mark.gpu
def test_a_gpu_reaches_no_more_than_its_datasheet() -> None:
    device = torch.device("cuda")
    known = datasheet_peak(torch.cuda.get_device_name(device))
    if known is None:
        pytest.skip("no figure for this card")
    assert device_peak(device, torch.bfloat16) == known
    assert measured_peak(device, torch.bfloat16).flops < 1.1 * known.flops


def test_mfu_of_the_report() -> None:
    """35k tokens/s on an RTX PRO 6000: 44.8% by 6ND."""
    assert utilisation(six_nd(BASE), 35_000, Peak(503.8e12, "")) == pytest.approx(0.448, abs=1e-3)
