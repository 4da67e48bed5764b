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
            _require_array(value, hints[key], current, name)
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


def _require_array(value: Any, hint: Any, current: Any, name: str) -> None:
    """UserError where `hint` is an array, of tables or of arrays maybe, and `value` is not; what
    `current` holds is the example."""
    if typing.get_origin(hint) is not tuple:
        return
    item = typing.get_args(hint)[0]
    of_tables, of_arrays = dataclasses.is_dataclass(item), typing.get_origin(item) is tuple
    wanted = dict if of_tables else (list, tuple) if of_arrays else object
    if isinstance(value, (list, tuple)) and all(isinstance(v, wanted) for v in value):
        return
    if of_tables:
        raise UserError(f"{name} is a list of sections: write [[{name}]] with its keys below it")
    example = current[:1] if typing.get_args(hint)[-1] is Ellipsis else current
    raise UserError(
        f"{name} is an array{' of arrays' if of_arrays else ''}: write "
        f"{_value(example or ('name',), name)}, for example, not {value!r}"
    )


def write(record: Any) -> str:
    """TOML, in ASCII, that `merge` reads back to an equal record.

    Raises UserError for a text that is not Unicode, as the name of a file may be.
    """
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
            lines.append(f"{f.name} = {_value(value, prefix + f.name)}")
    for name, value in later:
        header = f"{prefix}{name}"
        for item in value if isinstance(value, tuple) else (value,):
            lines += ["", f"[[{header}]]" if isinstance(value, tuple) else f"[{header}]"]
            _write_section(item, f"{header}.", lines)


def _value(value: Any, name: str) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(_value(item, name) for item in value)}]"
    if isinstance(value, float):
        return repr(value)  # inf and nan as TOML has them, not as JSON has them
    return _quoted(value, name) if isinstance(value, str) else json.dumps(value)


def _quoted(text: str, name: str) -> str:
    """`text` as JSON has it, but for what TOML forbids: surrogates, and the control character DEL
    as it is."""
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise UserError(f"{name}: {text!r} is not valid Unicode: give it another name")
    return '"' + "".join(map(_character, text)) + '"'


def _character(c: str) -> str:
    if ord(c) > 0xFFFF:
        return f"\\U{ord(c):08x}"
    return "\\u007f" if c == "\x7f" else json.dumps(c)[1:-1]
