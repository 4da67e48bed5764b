"""Keep-drift adoption keeps exactly the steps taken since the push."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diffurefill.fleet.adoption import keep_drift
from tests.fleet.weights import PROPERTY, Weights, bits, random_weights, save


def near(weights: Weights, *key: int | str) -> Weights:
    """`weights` some optimiser steps later."""
    steps = random_weights(*key)
    return {name: t * (1 + 0.2 * torch.tanh(steps[name])) for name, t in weights.items()}


@PROPERTY
@given(key=st.integers(0, 1000), chunk_elements=st.integers(1, 100))
def test_the_new_weights_are_the_global_plus_the_drift(
    tmp_path: Path, key: int, chunk_elements: int
) -> None:
    pushed, new = random_weights("pushed", key), random_weights("global", key)
    params = near(pushed, "steps", key)
    expected = {name: params[name] + (new[name] - pushed[name]) for name in params}
    keep_drift(
        params,
        save(tmp_path / "pushed", pushed),
        save(tmp_path / "global", new),
        chunk_elements=chunk_elements,
    )
    assert bits(params) == bits(expected)


def test_without_a_step_since_the_push_it_is_replacement(tmp_path: Path) -> None:
    """Up to rounding; to the bit where no element moved by half or more of itself."""
    params = random_weights("pushed")
    pushed = save(tmp_path / "pushed", params)
    new = random_weights("global")
    keep_drift(params, pushed, save(tmp_path / "global", new))
    for name, tensor in params.items():
        scale = random_weights("pushed")[name].abs()
        assert torch.all((tensor - new[name]).abs() <= 2.0**-23 * (scale + new[name].abs()))
    params = random_weights("pushed")
    new = near(params, "next")
    keep_drift(params, pushed, save(tmp_path / "global", new))
    assert bits(params) == bits(new)


def test_parameters_are_changed_where_they_lie(tmp_path: Path) -> None:
    module = torch.nn.Linear(3, 2)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    new = {name: torch.ones_like(t) for name, t in before.items()}
    keep_drift(
        dict(module.named_parameters()), save(tmp_path / "p", before), save(tmp_path / "g", new)
    )
    for parameter in module.parameters():
        assert parameter.requires_grad
        assert torch.allclose(parameter, torch.ones_like(parameter))


@pytest.mark.parametrize("place", ["pushed", "global", "params", "turned"])
def test_what_does_not_fit_is_refused_before_anything_changes(tmp_path: Path, place: str) -> None:
    files = {name: random_weights(name) for name in ("pushed", "global", "params")}
    if place == "turned":
        files["params"]["embedding"] = files["params"]["embedding"].T.contiguous().T
    else:
        files[place]["gain"] = torch.zeros(8)
    before = bits(files["params"])
    paths = [save(tmp_path / name, files[name]) for name in ("pushed", "global")]
    with pytest.raises(ValueError, match=r"tensor gain is|embedding is not contiguous"):
        keep_drift(files["params"], *paths)
    assert bits(files["params"]) == before
