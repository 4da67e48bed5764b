"""Dataclasses from and to TOML. Imports the standard library only.

An unknown key is an error that names the keys near it: a typo must not train for a day with a
default.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import types
import typing
from dataclasses import replace
from typing import Any, Literal


class UserError(ValueError):
    """A mistake in what a person asked for: printed as one line that says what to do, exit 2."""


def merge(base: Any, changes: dict[str, Any], where: str = "") -> Any:
    """`base` (a config dataclass) with nested `changes` laid over; unknown keys: UserError."""
    hints = typing.get_type_hints(type(base))
    new = {}
    for key, value in changes.items():
        name = f"{where}{key}"
        if key not in hints:
            near = difflib.get_close_matches(key, hints, n=3, cutoff=0.4) or sorted(hints)
            raise UserError(
                f"unknown key {name!r}; did you mean {', '.join(where + n for n in near)}?"
            )
        current = getattr(base, key)
        if dataclasses.is_dataclass(current):
            if not isinstance(value, dict):
                raise UserError(f"{name} is a section: write [{name}] with its keys below it")
            new[key] = merge(current, value, f"{name}.")
        else:
            new[key] = _convert(value, hints[key], name)
    return replace(base, **new)


def _convert(value: Any, hint: Any, name: str) -> Any:
    """`value` as TOML gives it, as the type `hint`; raises UserError where it does not fit."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        rest = [a for a in args if a is not type(None)]
        return None if value is None else _convert(value, rest[0], name)
    if origin is Literal:
        if value in args:
            return value
        raise UserError(f"{name} must be one of {', '.join(map(str, args))}, not {value!r}")
    if origin is tuple and isinstance(value, (list, tuple)):
        items = [args[0]] * len(value) if args[-1] is Ellipsis else list(args)
        if len(items) != len(value):
            raise UserError(f"{name} needs {len(items)} values, not {len(value)}")
        return tuple(
            _convert(v, t, f"{name}[{i}]")
            for i, (v, t) in enumerate(zip(value, items, strict=True))
        )
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return merge(typing.cast(type, hint)(), value, f"{name}.")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if (
        isinstance(hint, type)
        and isinstance(value, hint)
        and not (hint is int and isinstance(value, bool))
    ):
        return value
    wanted = getattr(hint, "__name__", str(hint))
    raise UserError(f"{name} must be of type {wanted}, not {value!r}")


def write(record: Any) -> str:
    """TOML that `merge` reads back to an equal record."""
    lines: list[str] = []
    _write_section(record, "", lines)
    return "\n".join(lines).strip() + "\n"


def _write_section(section: Any, prefix: str, lines: list[str]) -> None:
    later: list[tuple[str, Any]] = []
    for f in dataclasses.fields(section):
        value = getattr(section, f.name)
        if dataclasses.is_dataclass(value) or (
            isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0])
        ):
            later.append((f.name, value))
        elif value is not None:
            lines.append(f"{f.name} = {json.dumps(value)}")
    for name, value in later:
        header = f"{prefix}{name}"
        for item in value if isinstance(value, tuple) else (value,):
            lines += ["", f"[[{header}]]" if isinstance(value, tuple) else f"[{header}]"]
            _write_section(item, f"{header}.", lines)
