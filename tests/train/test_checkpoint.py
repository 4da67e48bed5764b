"""Weights and training state survive exactly, or the file before them does."""

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from diffurefill.config import UserError
from diffurefill.runtime import philox
from diffurefill.store.base import sha256_file
from diffurefill.train import checkpoint
from diffurefill.train.checkpoint import (
    load_training_state,
    load_weights,
    newest_weights,
    save_training_state,
    save_weights,
    schema,
    schema_digest,
    weights_digest,
)

COMMON = settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
SHAPES = st.dictionaries(
    st.text("abc._0", min_size=1, max_size=6),
    st.lists(st.integers(0, 5), max_size=3).map(tuple),
    max_size=6,
)


def random_tensors(shapes: dict[str, tuple[int, ...]], *key: int | str) -> dict[str, Tensor]:
    draw = philox("test", *key)
    return {
        name: torch.from_numpy(draw.standard_normal(shape, dtype="float32").reshape(shape))
        for name, shape in shapes.items()
    }


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert found[name].contiguous().numpy().tobytes() == tensor.contiguous().numpy().tobytes()


# --- weights ---


@COMMON
@given(shapes=SHAPES)
def test_saved_weights_load_unchanged_here_and_with_the_safetensors_library(
    tmp_path: Path, shapes: dict[str, tuple[int, ...]]
) -> None:
    tensors = random_tensors(shapes)
    path = tmp_path / "w.safetensors"
    save_weights(path, tensors, {"step": "7", "a": "b"})
    assert_same_bits(load_weights(path), tensors)
    assert_same_bits(safetensors.torch.load_file(path), tensors)
    assert schema(path) == {name: ("F32", shape) for name, shape in shapes.items()}
    assert os.listdir(tmp_path) == [path.name]


def test_metadata_is_read_by_the_safetensors_library(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_weights(path, {"w": torch.zeros(2)}, {"step": "7"})
    with safetensors.safe_open(path, "pt") as f:
        assert f.metadata() == {"step": "7"}


def test_special_values_keep_their_bits(tmp_path: Path) -> None:
    values = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-45, 3.4028235e38]
    tensors = {"w": torch.tensor(values)}
    save_weights(tmp_path / "w", tensors)
    assert_same_bits(load_weights(tmp_path / "w"), tensors)


def test_the_same_tensors_make_the_same_file_whatever_their_order(tmp_path: Path) -> None:
    tensors = random_tensors({"b": (3,), "a": (2, 2), "c": ()})
    backwards = dict(reversed(tensors.items()))
    save_weights(tmp_path / "one", tensors, {"x": "1", "y": "2"})
    save_weights(tmp_path / "two", backwards, {"y": "2", "x": "1"})
    assert sha256_file(tmp_path / "one") == sha256_file(tmp_path / "two")


def test_a_tensor_that_is_not_contiguous_is_saved_as_it_looks(tmp_path: Path) -> None:
    tensor = torch.arange(12.0).reshape(3, 4).T.requires_grad_()
    save_weights(tmp_path / "w", {"w": tensor})
    assert torch.equal(load_weights(tmp_path / "w")["w"], tensor)


def test_weights_of_another_dtype_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"fp32, but w is torch\.bfloat16"):
        save_weights(tmp_path / "w", {"w": torch.zeros(2, dtype=torch.bfloat16)})
    assert os.listdir(tmp_path) == []


def test_a_schema_digest_tells_names_shapes_and_dtypes_apart(tmp_path: Path) -> None:
    def digest(tensors: dict[str, Tensor]) -> str:
        safetensors.torch.save_file(tensors, tmp_path / "w")
        return schema_digest(tmp_path / "w")

    base = digest({"a": torch.zeros(2, 3), "b": torch.zeros(1)})
    assert digest({"b": torch.ones(1), "a": torch.ones(2, 3)}) == base
    assert digest({"a": torch.zeros(3, 2), "b": torch.zeros(1)}) != base
    assert digest({"a": torch.zeros(2, 3), "c": torch.zeros(1)}) != base
    assert digest({"a": torch.zeros(2, 3), "b": torch.zeros(1).half()}) != base


def test_a_weights_digest_tells_names_and_bits_apart() -> None:
    tensors = {
        "a": torch.arange(6.0).reshape(2, 3),
        "b": torch.zeros(()),
        "c": torch.ones(2).half(),
    }
    turned = tensors["a"].T.contiguous().T
    same = [dict(reversed(tensors.items())), {**tensors, "a": turned}]
    other = [
        {**tensors, "b": torch.tensor(-0.0)},
        {**tensors, "c": torch.ones(2).bfloat16()},
        {"A": tensors["a"], "b": tensors["b"], "c": tensors["c"]},
    ]
    digest = weights_digest(tensors)
    assert {weights_digest(each) for each in same} == {digest}
    assert len({digest, *map(weights_digest, other)}) == 4


def test_a_damaged_weights_file_is_a_users_error(tmp_path: Path) -> None:
    path = tmp_path / "w"
    save_weights(path, {"w": torch.zeros(5)})
    path.write_bytes(path.read_bytes()[:-3])
    for read in (load_weights, schema):
        with pytest.raises(UserError, match="not a whole safetensors file"):
            read(path)


# --- training state ---

NUMBERS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4)
)
PLAIN = st.recursive(
    NUMBERS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(0, 9), inner, max_size=3)
    ),
    max_leaves=8,
)


def assert_same_structure(found: Any, expected: Any) -> None:
    """Equal values of equal types at every depth; tensors to the bit."""
    assert type(found) is type(expected)
    if isinstance(expected, Tensor):
        assert_same_bits({"": found}, {"": expected})
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            assert_same_structure(found[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            assert_same_structure(a, b)
    else:
        assert found == expected


@COMMON
@given(value=PLAIN)
def test_plain_values_in_an_optimizer_state_come_back_with_their_types(
    tmp_path: Path, value: Any
) -> None:
    save_training_state(tmp_path / "s", weights={}, optimizer_state=value, meta={})
    loaded = load_training_state(tmp_path / "s")
    assert loaded is not None
    assert_same_structure(loaded.optimizer_state, value)


def trained_optimizer(optimizer: type[torch.optim.Optimizer], **options: Any) -> tuple:
    """(model, optimizer) after three steps on made-up gradients."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    model.load_state_dict(
        random_tensors({k: tuple(v.shape) for k, v in model.state_dict().items()})
    )
    made = optimizer(model.parameters(), **options)
    for step in range(3):
        take_step(model, made, step)
    return model, made


def take_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    for i, parameter in enumerate(model.parameters()):
        parameter.grad = random_tensors({"g": tuple(parameter.shape)}, step, i)["g"]
    optimizer.step()


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.AdamW, {"betas": (0.9, 0.95), "amsgrad": True}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.AdamW, {"lr": torch.tensor(1e-3)}),
    ],
)
def test_training_goes_on_to_the_bit_after_a_save(
    tmp_path: Path, optimizer: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    model, made = trained_optimizer(optimizer, **options)
    meta = {"step": 3, "cursor": {"unit": 5, "row": None}, "config_sha": "ab"}
    save_training_state(
        tmp_path, weights=model.state_dict(), optimizer_state=[made.state_dict()], meta=meta
    )
    loaded = load_training_state(tmp_path)
    assert loaded is not None
    assert loaded.meta == meta
    assert_same_structure(loaded.optimizer_state, [made.state_dict()])
    twin, twin_optimizer = trained_optimizer(optimizer, **options)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    twin.load_state_dict(loaded.weights)
    twin_optimizer.load_state_dict(loaded.optimizer_state[0])
    for step in range(3, 6):
        take_step(model, made, step)
        take_step(twin, twin_optimizer, step)
    assert_same_bits(twin.state_dict(), model.state_dict())


def test_nothing_saved_is_none(tmp_path: Path) -> None:
    assert load_training_state(tmp_path / "absent") is None


def test_an_object_that_is_not_plain_data_is_refused_and_the_old_state_stays(
    tmp_path: Path,
) -> None:
    save_step(tmp_path, 1)
    with pytest.raises(TypeError, match="cannot hold object"):
        save_training_state(tmp_path, weights={}, optimizer_state={"x": object()}, meta={})
    assert loaded_step(tmp_path) == 1


def test_loading_executes_no_code(tmp_path: Path) -> None:
    """Only safetensors and JSON lie in the folder; a pickle in their place is an error."""
    save_step(tmp_path, 1)
    suffixes = {path.suffix for path in tmp_path.rglob("*") if path.is_file()}
    assert suffixes == {".safetensors", ".json", ""}
    torch.save({"w": torch.zeros(1)}, tmp_path / "state-00000001" / "weights.safetensors")
    with pytest.raises(UserError):
        load_training_state(tmp_path)


def test_the_last_two_states_are_kept_and_the_pointer_goes_back(tmp_path: Path) -> None:
    for step in range(1, 5):
        save_step(tmp_path, step)
    assert sorted(p.name for p in tmp_path.glob("state-*")) == ["state-00000003", "state-00000004"]
    (tmp_path / "state-00000004" / "meta.json").write_text("{")
    with pytest.raises(UserError, match="write 3 into"):
        load_training_state(tmp_path)
    (tmp_path / "LATEST").write_text("3")
    assert loaded_step(tmp_path) == 3


@pytest.mark.parametrize("read", [load_training_state, newest_weights])
def test_a_way_back_is_named_only_where_there_is_one(
    tmp_path: Path, read: Callable[[Path], object]
) -> None:
    for step in (1, 2):
        save_step(tmp_path, step)
        (tmp_path / f"state-{step:08d}" / "meta.json").write_text("{")
    with pytest.raises(UserError, match="write 1 into"):
        read(tmp_path)
    (tmp_path / "LATEST").write_text("1")
    with pytest.raises(UserError, match="start anew in another folder"):
        read(tmp_path)


# --- kills ---


def save_step(folder: Path, step: int) -> None:
    """A state whose three parts all say which step they are of."""
    tensor = torch.full((3,), float(step))
    state = {"state": {0: {"m": tensor, "step": step}}, "param_groups": [{"lr": 0.1, "step": step}]}
    save_training_state(folder, weights={"w": tensor}, optimizer_state=state, meta={"step": step})


def loaded_step(folder: Path) -> int | None:
    """The step of a state all of whose parts agree."""
    loaded = load_training_state(folder)
    if loaded is None:
        return None
    optimizer = loaded.optimizer_state
    steps = {
        loaded.meta["step"],
        optimizer["state"][0]["step"],
        optimizer["param_groups"][0]["step"],
        int(optimizer["state"][0]["m"][0]),
        int(loaded.weights["w"][2]),
    }
    assert len(steps) == 1, f"a mix of steps {steps}"
    return steps.pop()


class Killed(BaseException):
    """Not an Exception: nothing may handle it, as nothing handles SIGKILL."""


def kill_at(patch: pytest.MonkeyPatch, step: int) -> None:
    """Raise Killed instead of the `step`-th call that changes the disk, and ever after."""
    made = 0

    def wrap(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal made
            made += 1
            if made > step:
                raise Killed
            return call(*args, **kwargs)

        return wrapped

    for name in ("fsync", "replace", "unlink", "mkdir", "rmdir"):
        patch.setattr(os, name, wrap(getattr(os, name)))


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_a_full_disk_is_named_by_the_file_and_the_state_before_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """At whichever write the disk is full."""
    save_step(tmp_path / "before", 1)
    for left in range(1000):
        folder = shutil.copytree(tmp_path / "before", tmp_path / str(left))
        with monkeypatch.context() as patch:
            _full_after(patch, call, left)
            error = _error_of(lambda folder=folder: save_step(folder, 2))
        assert not list(folder.rglob("*.part"))
        if error is None:
            break
        assert Path(error.filename or "").is_relative_to(folder)
        assert loaded_step(folder) in (1, 2)
    assert left >= 2
    assert loaded_step(folder) == 2


def _error_of(call: Callable[[], object]) -> OSError | None:
    try:
        call()
    except OSError as error:
        return error
    return None


def _full_after(patch: pytest.MonkeyPatch, name: str, left: int) -> None:
    """`left` calls of os.`name` succeed, none after that."""
    real, made = getattr(os, name), 0

    def full(*arguments: Any) -> Any:
        nonlocal made
        made += 1
        if made > left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments)

    patch.setattr(os, name, full)


@pytest.mark.parametrize("saved_before", [0, 2])
def test_a_kill_at_any_moment_leaves_the_previous_state_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved_before: int
) -> None:
    seen = set()
    before = tmp_path / "before"
    before.mkdir()
    for step in range(1, saved_before + 1):
        save_step(before, step)
    for kill in range(1000):
        folder = shutil.copytree(before, tmp_path / str(kill))
        killed = True
        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            kill_at(patch, kill)
            save_step(folder, saved_before + 1)
            killed = False
        seen.add(loaded_step(folder))
        save_step(folder, saved_before + 2)
        assert loaded_step(folder) == saved_before + 2
        assert len(list(folder.glob("state-*"))) <= 2
        if not killed:
            break
    assert seen == {saved_before or None, saved_before + 1}


def test_a_state_is_read_without_its_optimizer_being_guessed(tmp_path: Path) -> None:
    """The JSON half is readable by a person: the values are there, in order."""
    save_step(tmp_path, 2)
    record = json.loads((tmp_path / "state-00000001" / "optimizer.json").read_bytes())
    assert record["structure"]["dict"][1][0] == "param_groups"
    assert checkpoint.schema(tmp_path / "state-00000001" / "optimizer.safetensors") == {
        "000000": ("F32", (3,))
    }
