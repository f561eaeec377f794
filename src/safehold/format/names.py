r"""Names of leaves: typed path components, written as one exact string.

A name joins its components with `.`. A string component stands as it is, with `\` before what would be read
otherwise; the key 5 of a dict is `#5`, item 5 of a list `[5]`, item 5 of a tuple `(5)`, an empty string `\e`.
Ordinary module paths therefore give ordinary names.

Invariants: `join` and `split` are exact inverses; `split` refuses every string that `join` does not make. A name has
no control characters, no lone surrogates, no `@` without a backslash, and never begins with `__metadata__` as a
component. Names are never used as paths.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from safehold.types import Rect

MAX_NAME_LENGTH: Final = 4096
"""Longest name, in bytes of UTF-8."""

MAX_DEPTH: Final = 64
"""Most components of a name."""

PAD_PREFIX: Final = "@pad."
"""Start of the keys of padding tensors; no name starts so, since names have `@` only after a backslash."""

_RESERVED: Final = "__metadata__"
_UNPRINTABLE = r"\x00-\x1f\x7f-\x9f\ud800-\udfff"
_PLAIN_TEXT = rf"[^\\.@#\[({_UNPRINTABLE}][^\\.@{_UNPRINTABLE}]*"
_PLAIN = re.compile(_PLAIN_TEXT)
_PLAIN_NAME = re.compile(rf"{_PLAIN_TEXT}(?:\.{_PLAIN_TEXT})*")
_TO_ESCAPE = re.compile(rf"[\\.@{_UNPRINTABLE}]|^[#\[(]")
_COMPONENT = re.compile(r"(?:[^.\\]|\\.)+", re.DOTALL)
_ESCAPED = re.compile(r"\\(u[0-9a-f]{4}|.)", re.DOTALL)
_INTEGER = re.compile(r"-?[0-9]+")
_OFFSETS = re.compile(r"[0-9]{1,19}(?:,[0-9]{1,19})*")


@dataclass(frozen=True, slots=True)
class ListIndex:
    """A component: the item of a list."""

    index: int


@dataclass(frozen=True, slots=True)
class TupleIndex:
    """A component: the item of a tuple."""

    index: int


Component = str | int | ListIndex | TupleIndex
"""One step from a container to what it holds; an `int` is the key of a dict."""


def join(components: Sequence[Component]) -> str:
    """Write a path of typed components as one name.

    Raises:
        ValueError: There are no components or too many, the name is too long, or a component has another type.
    """
    if not 1 <= len(components) <= MAX_DEPTH:
        raise ValueError(f"a name has 1 to {MAX_DEPTH} components, not {len(components)}")
    name = ".".join([_spell(component) for component in components])
    if components[0] == _RESERVED:
        name = "\\" + name
    if len(name) > MAX_NAME_LENGTH or (not name.isascii() and len(name.encode()) > MAX_NAME_LENGTH):
        raise ValueError(f"the name {display(name, 80)} is longer than {MAX_NAME_LENGTH} bytes")
    return name


def split(name: str) -> tuple[Component, ...]:
    """Read the components of a name; the exact inverse of `join`.

    Raises:
        ValueError: `join` does not make this string.
    """
    if len(name) > MAX_NAME_LENGTH:
        raise ValueError(f"the name {display(name, 80)} is longer than {MAX_NAME_LENGTH} bytes")
    if _PLAIN_NAME.fullmatch(name):
        components: tuple[Component, ...] = tuple(name.split("."))
    else:
        components = tuple(_read(spelled) for spelled in _COMPONENT.findall(name))
    if join(components) != name:
        raise ValueError(f"{display(name, 80)} is not a name as safehold writes it")
    return components


def check_name(name: str) -> str:
    """Return `name` if it is one that `join` makes; faster than `split`.

    Raises:
        ValueError: It is not.
    """
    plain = len(name) <= MAX_NAME_LENGTH and name.count(".") < MAX_DEPTH and _PLAIN_NAME.fullmatch(name)
    if not plain or name.startswith(_RESERVED) or (not name.isascii() and len(name.encode()) > MAX_NAME_LENGTH):
        split(name)
    return name


def piece_key(name: str, rect: Rect, shape: tuple[int, ...]) -> str:
    """Return the key of a piece in its pack: the name, with `@` and the offsets if it is not the whole tensor."""
    if rect.sizes == tuple(shape):
        return name
    return f"{name}@{','.join(map(str, rect.offsets))}"


def parse_piece_key(key: str) -> tuple[str, tuple[int, ...] | None]:
    """Return the name and the offsets (None: the whole tensor) of a key that `piece_key` made.

    Raises:
        ValueError: The key is not one.
    """
    name, at, text = key.rpartition("@")
    # A name that holds `\@1` ends, when cut there, in half an escape; and only then is the whole key a name.
    if not at or (len(name) - len(name.rstrip("\\"))) % 2:
        return check_name(key), None
    if not _OFFSETS.fullmatch(text):
        raise ValueError(f"{display(key, 80)} is not the key of a piece")
    offsets = tuple(int(part) for part in text.split(","))
    if ",".join(map(str, offsets)) != text:
        raise ValueError(f"{display(key, 80)} is not the key of a piece")
    return check_name(name), offsets


def display(text: str, limit: int = 200) -> str:
    r"""Return `text` fit for a terminal: what does not print as `\uXXXX`, the middle cut out beyond `limit`."""
    if len(text) > limit:
        half = max(1, (limit - 3) // 2)
        text = f"{text[:half]}...{text[-half:]}"
    if text.isascii() and text.isprintable():
        return text
    return "".join(_printable(char) for char in text)


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun, for messages: `1 rank`, `2 ranks`."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def numbered(noun: str, numbers: Sequence[int] | Sequence[str], limit: int = 16) -> str:
    """Return a noun with the numbers (or names) of what is meant, for messages: `rank 1`, `ranks 1, 2`; at most `limit` of them."""
    more = ", ..." if len(numbers) > limit else ""
    return f"{noun if len(numbers) == 1 else noun + 's'} {', '.join(map(str, numbers[:limit]))}{more}"


def _printable(char: str) -> str:
    if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Cn", "Co", "Zl", "Zp"):
        return f"\\u{ord(char):04x}"
    return char


@lru_cache(maxsize=4096)
def _spell_text(text: str) -> str:
    if _PLAIN.fullmatch(text):
        return text
    return _TO_ESCAPE.sub(_escape, text) or "\\e"


def _spell(component: Component) -> str:
    kind = type(component)
    if kind is str:
        return _spell_text(component)
    if kind is int:
        return f"#{component}"
    if (kind is ListIndex or kind is TupleIndex) and type(component.index) is int and component.index >= 0:  # type: ignore[union-attr]
        return f"[{component.index}]" if kind is ListIndex else f"({component.index})"  # type: ignore[union-attr]
    raise ValueError(f"{component!r} of type {kind.__name__} cannot be part of a name")


def _escape(match: re.Match[str]) -> str:
    char = match.group()
    return "\\" + char if char in "\\.@#[(" else f"\\u{ord(char):04x}"


def _read(spelled: str) -> Component:
    first, rest = spelled[0], spelled[1:]
    if first == "#" and _INTEGER.fullmatch(rest):
        return int(rest)
    if first == "[" and rest.endswith("]") and _INTEGER.fullmatch(rest[:-1]):
        return ListIndex(int(rest[:-1]))
    if first == "(" and rest.endswith(")") and _INTEGER.fullmatch(rest[:-1]):
        return TupleIndex(int(rest[:-1]))
    if spelled == "\\e":
        return ""
    return _ESCAPED.sub(_unescape, spelled)


def _unescape(match: re.Match[str]) -> str:
    code = match.group(1)
    return chr(int(code[1:], 16)) if len(code) == 5 else code
