"""The README tells the truth: its commands parse, its files exist, its figures are results."""

import importlib.util
import json
import re
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from diffurefill.cli import COMMANDS, parse
from diffurefill.config import DecodeConfig, Stage, preset_names

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text("utf-8")


def commands() -> list[str]:
    lines = [line.split("  #")[0].strip() for line in README.splitlines()]
    return [line for line in lines if line.startswith("diffurefill ")]


@pytest.mark.parametrize("line", commands())
def test_a_command_in_the_readme_parses(line: str) -> None:
    parse(shlex.split(line)[1:])


def test_every_command_but_doctor_and_demo_is_shown() -> None:
    shown = {" ".join(line.split()[1:][:n]) for line in commands() for n in (1, 2)}
    assert set(COMMANDS) - shown <= {"doctor", "demo"}


def test_every_file_the_readme_names_exists_and_every_room_is_named() -> None:
    house = README.split("## The house")[1].split("```")[1]
    package = ROOT / "src" / "diffurefill"
    present = {path.name for path in package.rglob("*.py")}
    named = set(re.findall(r"[\w]+\.py", house))
    assert named <= present
    rooms = {path.name for path in package.iterdir() if (path / "__init__.py").exists()}
    assert all(f"{room}/" in house for room in rooms)
    unnamed = present - named - {"__init__.py", "__main__.py"}
    rooms_of_their_own = [package / "config", package / "demo", package / "fleet" / "simulate"]
    rooms_of_their_own += [path for path in (package / "data").iterdir() if path.is_dir()]
    inside = {path.name for room in rooms_of_their_own for path in room.glob("*.py")}
    assert unnamed <= inside, f"the README's tree lacks {unnamed - inside}"


@pytest.fixture
def render() -> Any:
    """docs/render.py, as a module."""
    path = ROOT / "docs" / "render.py"
    spec = importlib.util.spec_from_file_location("render", path)
    assert spec is not None
    assert spec.loader is not None
    render = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(render)
    return render


def test_the_figures_are_those_of_the_result_files(render: Any) -> None:
    for name in render.PAGES:
        page = (ROOT / name).read_text("utf-8")
        assert render.rendered(page) == page, "run `python docs/render.py`"


def test_decoding_shows_kept_keys_and_compiled_blocks_where_they_were_measured(render: Any) -> None:
    facts = json.loads((ROOT / "results" / "decode.json").read_text("utf-8"))
    facts["basis"] = "seconds by the clock"
    rows = [*facts["sizes"].values(), *(facts["sizes_bfloat16"] or {}).values()]
    for size in rows:
        size |= {"vs_exact_kept": 1.3, "vs_ar_generate_kept": None, "positions_kept": 0.559}
        size |= {"vs_eager_compiled": 1.04, "forward_vs_eager_compiled": 1.091}
    shown = render.decode_block(facts)
    assert "seconds by the clock" in shown
    assert shown.count("| 56% | 1.30 | - | 1.04 | 1.09 |") == len(rows)
    del rows[0]["positions_kept"]  # an older file
    assert "kept" not in render.decode_block(facts)


def test_links_to_files_of_the_repository_hold() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_the_decoding_page_names_every_knob_and_every_preset() -> None:
    page = (ROOT / "docs" / "decoding.md").read_text("utf-8")
    wanted = [field.name for config in (Stage, DecodeConfig) for field in fields(config)]
    wanted += [name for name in preset_names() if name.startswith("decode-")]
    assert [name for name in wanted if f"`{name}`" not in page] == [], "say it in a line"
