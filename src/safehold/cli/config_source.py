"""Reads settings from a TOML file and the environment, and remembers where each value comes from.

Later origins win: default, file (`safehold.toml`), environment (`SAFEHOLD_<NAME>`), argument. Works for any frozen
dataclass whose fields are plain values. In files and the environment, sizes may be written as `64 MiB` (fields that end
in `_bytes` or `_bytes_s`) and times as `10min` (fields that end in `_s`).

Invariants: a name that is not a setting is refused where it is one's own file, or looks like a misspelt setting in the
environment; a value of the wrong type is refused naming the place it was written at. Nothing is read at import.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import tomllib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from safehold.errors import ConfigurationError

PREFIX = "SAFEHOLD_"
FILE_VARIABLE = "SAFEHOLD_CONFIG"
DEFAULT_FILE = "safehold.toml"
MAX_FILE_BYTES = 1 << 20

# Variables of ours that are no settings.
OTHER_VARIABLES = frozenset({FILE_VARIABLE, "SAFEHOLD_LISTENER"})

DEFAULT = "default"
ARGUMENT = "argument"

Sources = dict[str, tuple[Any, str]]
"""Setting -> (value, origin)."""

C = TypeVar("C")

_SIZE_UNITS = {
    "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
}  # fmt: skip
_TIME_UNITS = {"": 1.0, "ms": 1e-3, "s": 1.0, "sec": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*([A-Za-z]*)\s*")
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def load(
    cls: type[Any],
    *,
    path: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> Sources:
    """Return every setting of a dataclass with its value and origin.

    Args:
        cls: The dataclass.
        path: Settings file, which must exist; None: the one that `SAFEHOLD_CONFIG` names, else `safehold.toml` in the
            working directory if there is one.
        env: The environment; None: that of this process.
        arguments: What was given in code; wins. None values are left out.

    Returns:
        In the order of the fields: name -> (value, origin). An origin is `default`, `file PATH`, `environment NAME` or
            `argument`.

    Raises:
        ConfigurationError: A file cannot be read, or a name or value is none of `cls`.
    """
    env = os.environ if env is None else env
    hints = typing.get_type_hints(cls)
    sources: Sources = {field.name: (_default(field), DEFAULT) for field in dataclasses.fields(cls)}
    _from_file(sources, hints, path, env)
    _from_environment(sources, hints, env)
    for name, value in (arguments or {}).items():
        if name not in sources:
            raise _unknown(name, sources, "the arguments")
        if value is not None:
            sources[name] = (value, ARGUMENT)
    return sources


def build(cls: type[C], sources: Sources) -> C:
    """Return the settings as the dataclass; a refusal says where the value was written.

    Raises:
        ConfigurationError: The dataclass refuses a value.
    """
    try:
        return cls(**{name: value for name, (value, _) in sources.items()})
    except ConfigurationError as exc:
        named = [name for name, (_, origin) in sources.items() if origin != DEFAULT and name in exc.message]
        if named and exc.hint is None:
            exc.hint = "; ".join(f"{name} comes from {sources[name][1]}" for name in named)
        raise


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    raise ConfigurationError(f"the setting {field.name} has no default")


def _from_file(
    sources: Sources, hints: dict[str, Any], path: str | os.PathLike[str] | None, env: Mapping[str, str]
) -> None:
    chosen = Path(path) if path is not None else Path(env[FILE_VARIABLE]) if env.get(FILE_VARIABLE) else None
    target = chosen or Path(DEFAULT_FILE)
    try:
        with open(target, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError as exc:
        if chosen is None:
            return
        raise ConfigurationError("the settings file does not exist", path=str(target)) from exc
    except OSError as exc:
        raise ConfigurationError(f"the settings file cannot be read: {exc.strerror}", path=str(target)) from exc
    if len(data) > MAX_FILE_BYTES:
        raise ConfigurationError(f"the settings file is larger than {MAX_FILE_BYTES} bytes", path=str(target))
    try:
        table = tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ConfigurationError(f"the settings file is no TOML: {exc}", path=str(target)) from exc
    for name, value in table.items():
        if name not in sources:
            raise _unknown(name, sources, f"the file {target}")
        origin = f"file {target}"
        sources[name] = (_convert(name, value, hints[name], origin), origin)


def _from_environment(sources: Sources, hints: dict[str, Any], env: Mapping[str, str]) -> None:
    for variable, text in sorted(env.items()):
        if not variable.startswith(PREFIX) or variable in OTHER_VARIABLES:
            continue
        name = variable.removeprefix(PREFIX).lower()
        if name in sources:
            origin = f"environment {variable}"
            sources[name] = (_convert(name, text, hints[name], origin), origin)
        elif difflib.get_close_matches(name, sources, 1, cutoff=0.8):
            # Others may have variables that begin like ours; what is nearly a setting is a misspelt one.
            raise _unknown(name, sources, f"the environment ({variable})")


def _unknown(name: str, sources: Sources, place: str) -> ConfigurationError:
    if name == "config":
        return ConfigurationError(
            "'config' is no setting", hint="give the settings themselves as keywords, such as on_failure='warn'"
        )
    close = difflib.get_close_matches(name, sources, 1, cutoff=0.6)
    hint = f"did you mean {close[0]}?" if close else "'safehold config show' lists all settings"
    return ConfigurationError(f"{name!r} in {place} is no setting", hint=hint)


def _convert(name: str, value: Any, hint: Any, origin: str) -> Any:
    """Return a value from a file or the environment as the type that the field has."""
    for option in _options(hint):
        try:
            return _as(option, name, value)
        except (ValueError, TypeError, LookupError):
            continue
    raise ConfigurationError(f"{name} must be {_words(name, hint)}, not {value!r}", hint=f"it comes from {origin}")


def _options(hint: Any) -> tuple[Any, ...]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        # None first: an empty string or "none" means it; a str last, since everything is one.
        return tuple(sorted(typing.get_args(hint), key=lambda t: (t is not type(None), t is str)))
    return (hint,)


def _as(option: Any, name: str, value: Any) -> Any:
    if typing.get_origin(option) is Literal:
        if value in typing.get_args(option):
            return value
        raise ValueError(value)
    if option is type(None):
        if isinstance(value, str) and value.lower() in ("", "none"):
            return None
    elif option is bool:
        return _as_bool(value)
    elif option in (int, float):
        return _as_number(option, name, value)
    elif isinstance(option, type) and isinstance(value, option):
        return value
    raise ValueError(value)


def _as_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _TRUE + _FALSE:
        return value.lower() in _TRUE
    raise ValueError(value)


def _as_number(kind: type[Any], name: str, value: Any) -> int | float:
    if isinstance(value, bool):
        raise ValueError(value)
    if isinstance(value, (int, float)):
        if kind is int and isinstance(value, float) and not value.is_integer():
            raise ValueError(value)
        return int(value) if kind is int else float(value)
    units: Mapping[str, float] = {"": 1}
    if name.endswith(("_bytes", "_bytes_s")):
        units = _SIZE_UNITS
    elif name.endswith("_s"):
        units = _TIME_UNITS
    match = _QUANTITY.fullmatch(value.removesuffix("/s") if name.endswith("_bytes_s") else value)
    if match is None:
        return int(value) if kind is int else float(value)
    number = float(match[1]) * units[match[2].lower()] if match[2] or "." in match[1] else int(match[1])
    if kind is int and number != int(number):
        raise ValueError(value)
    return int(number) if kind is int else float(number)


def as_bytes(text: str) -> int:
    """Return a number of bytes from a text such as `64 MiB`.

    Raises:
        ValueError: It is none.
        LookupError: Its unit is none.
    """
    return int(_as_number(int, "_bytes", text))


def _words(name: str, hint: Any) -> str:
    words = []
    for option in _options(hint):
        if typing.get_origin(option) is Literal:
            words.append(" or ".join(map(str, typing.get_args(option))))
        elif option in (int, float) and name.endswith(("_bytes", "_bytes_s")):
            words.append("a number of bytes (such as 1048576 or '64 MiB')")
        elif option in (int, float) and name.endswith("_s"):
            words.append("a number of seconds (such as 30 or '10min')")
        else:
            plain = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "none"}
            words.append(plain.get(option, getattr(option, "__name__", str(option))))
    return " or ".join(words)
