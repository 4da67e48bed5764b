"""The report says what demo.json says, stands alone, and escapes what the model wrote."""

import re
import shlex
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from diffurefill.chart import line_chart
from diffurefill.decode.view.frames import Cell, Frame
from diffurefill.demo.report import generation_rows, write_reports
from diffurefill.demo.run import _close
from diffurefill.demo.writing import Written

FACTS: dict[str, Any] = {
    "parameters": 1_000,
    "generations": 2,
    "seconds": 61.0,
    "machine": {"cpu_count": 2},
    "held_out_ce_first": 7.0,
    "held_out_ce_last": 4.5,
    "held_out_by_rate": {"0.3": 4.0, "0.6": 4.5, "0.9": 5.0},
    "weights_used": "global",
    "decoding_accuracy": {"token": 0.215, "pair": 0.055},
    "audit": "ok",
    "audit_checks": {"I1": 4, "I9": 2},
    "killed": [{"kind": "worker", "what": "worker 1 after 20 steps", "generation": 1}],
    "curves": {"global": [(0, 7.0), (1, 5.0), (2, 4.5)], "ema": [(1, 5.0), (2, 4.7)]},
    "table": [
        {"generation": 1, "workers": [0, 1], "step": 40, "tokens": 1_000, "held_out_ce": 5.0,
         "killed": "worker 1"},
        {"generation": 2, "workers": [0], "step": 80, "tokens": 1_500, "held_out_ce": 4.5,
         "killed": ""},
    ],
    "decode": [
        {"num_passes": 12, "temperature": (1.0, 0.5), "order_noise": 1.0, "min_p": 0.0,
         "commit_gap": 2, "neighbour_ban": 6.0, "remask_fraction": 0.0},
        {"num_passes": 8, "temperature": (0.8, 0.8), "order_noise": 0.0, "min_p": 0.1,
         "commit_gap": 2, "neighbour_ban": 6.0, "remask_fraction": 0.2},
    ],
    "text": {"draft only": {"doubled_share": 0.1, "distinct_2": 0.5, "own_ce": 3.25}},
}  # fmt: skip
FRAME = Frame("draft", "1/1", (Cell("accepted", "<script>alert(1)</script>", 0.5),))
WRITTEN = [Written("continue '<b>'", "a <i> & ```", "b <script>", 3, 20, [FRAME])]


@pytest.fixture
def reports(tmp_path: Path) -> tuple[str, str]:
    write_reports(tmp_path, FACTS, WRITTEN)
    return (tmp_path / "report.md").read_text(), (tmp_path / "report.html").read_text()


def test_both_reports_hold_every_fact(reports: tuple[str, str]) -> None:
    for text in reports:
        for fact in (
            "7.000",
            "4.500",
            "4.700",
            "1,500",
            "worker 1 after 20 steps",
            "6 checks",
            "3.25",
            "21.5%",
        ):
            assert fact in text


def test_what_the_model_wrote_is_never_markup(reports: tuple[str, str]) -> None:
    markdown, page = reports
    assert page.count("<script>") == 1, "the viewer's own"
    assert "alert(1)" in page
    assert "<script>alert" not in page
    assert "````\na <i> & ```\n````" in markdown


def test_the_page_loads_nothing_from_elsewhere(reports: tuple[str, str]) -> None:
    assert not re.search(r"(src|href)=", reports[1])


def test_a_higher_ema_is_called_higher(reports: tuple[str, str]) -> None:
    assert "stands at 4.700, higher than the last global" in reports[0]


def test_the_demo_names_its_folder_as_a_shell_takes_it(tmp_path: Path) -> None:
    said: list[str] = []
    _close({**FACTS, "kills": 1}, tmp_path / "my demo", said.append)
    folder = str(tmp_path / "my demo")
    assert shlex.split(said[-1]) == ["next:", "diffurefill", "generate", folder, "--watch"]


def test_the_table_has_a_row_per_generation() -> None:
    rows = generation_rows(FACTS)
    assert [row[0] for row in rows] == ["generation", "1", "2"]
    assert rows[1][-1] == "worker 1"


def test_the_chart_is_valid_svg_with_every_point() -> None:
    svg = line_chart(
        {"a & b": [(0, 1.0), (1, 2.0), (2, 1.5)], "flat": [(0, 1.0), (2, 1.0)]},
        x_label="x",
        y_label="<y>",
        marks=[(1, "killed")],
    )
    root = ET.fromstring(svg)
    lines = [e for e in root.iter() if e.tag.endswith("polyline")]
    assert [len(e.attrib["points"].split()) for e in lines] == [3, 2]
    xs = [float(x) for e in lines for x in re.findall(r"([\d.]+),", e.attrib["points"])]
    assert all(0 <= x <= 640 for x in xs)


@pytest.mark.parametrize("values", [[5.0], [5.0, 5.0], [0.0, 1e-3], [0.0, 1e6]])
def test_a_chart_of_any_range_draws(values: list[float]) -> None:
    ET.fromstring(line_chart({"s": list(enumerate(values))}, x_label="", y_label=""))
