"""Names are exact: what differs in the state differs in the name, and no string but a name is accepted as one."""

from __future__ import annotations

import pytest

from safehold.format import names
from safehold.format.names import ListIndex, TupleIndex
from safehold.types import Rect


@pytest.mark.parametrize(
    ("components", "name"),
    [
        (("model", "layers", "0", "wq", "weight"), "model.layers.0.wq.weight"),
        (("a", "b"), "a.b"),
        (("a.b",), "a\\.b"),
        (("o", 0), "o.#0"),
        (("o", "0"), "o.0"),
        (("o", "#0"), "o.\\#0"),
        (("o", -7), "o.#-7"),
        (("h", ListIndex(0), "k"), "h.[0].k"),
        (("h", TupleIndex(12)), "h.(12)"),
        (("[0]",), "\\[0]"),
        (("(0)",), "\\(0)"),
        (("a#[(",), "a#[("),
        (("x@3",), "x\\@3"),
        (("back\\slash",), "back\\\\slash"),
        (("",), "\\e"),
        (("", "e", "\\e"), "\\e.e.\\\\e"),
        (("..",), "\\.\\."),
        (("u/é k",), "u/é k"),
        (("new\nline\x7f\x9b",), "new\\u000aline\\u007f\\u009b"),
        (("\ud800",), "\\ud800"),
        (("\\ud800",), "\\\\ud800"),
        (("__metadata__",), "\\__metadata__"),
        (("__metadata__", "x"), "\\__metadata__.x"),
        (("__metadata__2",), "__metadata__2"),
        (("a", "__metadata__"), "a.__metadata__"),
        (("k" * 300,), "k" * 300),
    ],
)
def test_join_and_split_are_inverses(components: tuple[names.Component, ...], name: str) -> None:
    assert names.join(components) == name
    assert names.split(name) == components
    assert [type(component) for component in names.split(name)] == [type(component) for component in components]
    assert names.check_name(name) == name


@pytest.mark.parametrize(
    "text",
    [
        "", ".", "a.", ".a", "a..b", "a@1", "@pad.0", "#", "#05", "#-0", "#+1", "#1 ", "[", "[]", "[-1]", "[01]",
        "[1", "(1",
        "\\", "a\\", "\\x", "\\u0041", "\\u00AD", "\\a", "a\\#", "\\__metadata", "__metadata__", "__metadata__.x",
        "a.\\__metadata__", "a\nb", "\x7f",
        "\ud800",
        "\\E", "a\\e", "x" * 4097, "é" * 2049, ".".join("a" * 65),
    ],
)  # fmt: skip
def test_what_join_does_not_write_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        names.split(text)
    with pytest.raises(ValueError):
        names.check_name(text)


@pytest.mark.parametrize(
    "components",
    [(), (True,), (1.5,), (None,), (ListIndex(-1),), (TupleIndex(True),), ("a",) * 65, ("a" * 4097,), ("\n" * 700,)],
)
def test_what_is_no_path_is_refused(components: tuple[names.Component, ...]) -> None:
    with pytest.raises(ValueError):
        names.join(components)


def test_limits_are_reached() -> None:
    for components in [("a",) * 64, ("a" * 4096,), ("é" * 2048,)]:
        assert names.split(names.join(components)) == components


def test_piece_keys() -> None:
    whole, rows = Rect.whole((4, 3)), Rect((2, 0), (2, 3))
    assert names.piece_key("w", whole, (4, 3)) == "w"
    assert names.piece_key("w", rows, (4, 3)) == "w@2,0"
    assert names.piece_key("s", Rect.whole(()), ()) == "s"
    assert names.parse_piece_key("w@2,0") == ("w", (2, 0))
    assert names.parse_piece_key("w") == ("w", None)
    tricky = names.join(("a@1,2",))
    assert names.parse_piece_key(tricky) == (tricky, None)
    assert names.parse_piece_key(tricky + "@5") == (tricky, (5,))
    ends_in_backslash = names.join(("a\\",))
    assert names.parse_piece_key(ends_in_backslash + "@5") == (ends_in_backslash, (5,))
    for bad in ["w@", "w@x", "w@01", "w@1,", "@1", "w@1@2", "w@-1", "w@" + "9" * 20, "@pad.0", "w@1,2 "]:
        with pytest.raises(ValueError):
            names.parse_piece_key(bad)


def test_display_is_fit_for_a_terminal() -> None:
    assert names.display("model.w") == "model.w"
    assert names.display("é") == "é"
    assert names.display("a\x1b[31m\n\u202e\ud800") == "a\\u001b[31m\\u000a\\u202e\\ud800"
    assert len(names.display("x" * 10_000)) <= 200


def test_numbers_and_nouns_agree() -> None:
    assert [names.counted(n, "rank") for n in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
    assert [names.counted(n, "copy", "copies") for n in (1, 2)] == ["1 copy", "2 copies"]
    assert names.numbered("rank", [3]) == "rank 3" and names.numbered("step", [3, 1]) == "steps 3, 1"
    assert names.numbered("rank", range(9), 3) == "ranks 0, 1, 2, ..."
