"""Schemes and redundancy sets. What holds for any number of nodes is in tests/property/test_policy_placement.py."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from safehold.errors import ConfigurationError
from safehold.policy.placement import Layout, RedundancySet, Scheme, overhead, parse_scheme, place, survives


def scheme(words: str) -> Scheme:
    found = parse_scheme(copies=words) if words.isdigit() else parse_scheme(parity=words)
    assert found is not None
    return found


def in_one_set(layout: Layout, *nodes: int) -> bool:
    return any(set(nodes) <= set(one.members) for one in layout.sets)


@pytest.mark.parametrize(
    ("words", "width", "num_parity", "text"),
    [
        ("1", 2, 1, "copies=1"),
        ("3", 4, 3, "copies=3"),
        ("xor:4", 4, 1, "xor:4"),
        (" XOR:16 ", 16, 1, "xor:16"),
        ("rs:4+2", 6, 2, "rs:4+2"),
        ("rs:60+4", 64, 4, "rs:60+4"),
    ],
)
def test_words(words: str, width: int, num_parity: int, text: str) -> None:
    found = scheme(words)
    assert (found.width, found.num_parity, str(found)) == (width, num_parity, text)


def test_copies_as_a_number_and_nothing_at_all() -> None:
    assert parse_scheme(copies=2) == scheme("2")
    assert parse_scheme() is None


@pytest.mark.parametrize("copies", [0, 4, -1, True, "two", "1.0", 1.0])
def test_nonsense_copies(copies: object) -> None:
    with pytest.raises(ConfigurationError, match="no number of copies"):
        parse_scheme(copies=copies)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "words",
    ["", "xor", "xor:", "xor:0", "xor:1", "xor:2", "xor:-4", "xor:4.5", "xor:65", "xor:4+1", "rs:4", "rs:4+0", "rs:0+2",
     "rs:1+2", "rs:60+5", "rs:4+2+1", "rs: 4+2", "raid6", "rs:٤+٢", "rs:99999+1"],
)  # fmt: skip
def test_nonsense_parity(words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_scheme(parity=words)
    assert repr(words) in caught.value.message and caught.value.hint


def test_copies_and_parity_exclude_each_other() -> None:
    with pytest.raises(ConfigurationError, match="exclude each other"):
        parse_scheme(copies=1, parity="xor:4")


def test_sets_that_cannot_be() -> None:
    for fields in (
        {"kind": "xor", "num_data": 3, "num_parity": 1, "members": (1, 2, 3)},
        {"kind": "xor", "num_data": 2, "num_parity": 2, "members": (1, 2, 3, 4)},
        {"kind": "copies", "num_data": 2, "num_parity": 1, "members": (1, 2, 3)},
        {"kind": "rs", "num_data": 0, "num_parity": 2, "members": (1, 2, 3)},
        {"kind": "rs", "num_data": 1, "num_parity": 2, "members": (1, 2, 2)},
    ):
        with pytest.raises(ValueError):
            RedundancySet(**fields)  # type: ignore[arg-type]


def test_two_racks_of_four_and_pairs() -> None:
    racks = {node: f"rack-{node // 4}" for node in range(8)}
    layout = place(scheme("1"), range(8), racks)
    assert len(layout.sets) == 4 and not layout.warnings
    assert all({racks[node] for node in one.members} == {"rack-0", "rack-1"} for one in layout.sets)
    assert survives(layout, {0, 1, 2, 3}) and survives(layout, {4, 5, 6, 7})
    assert not survives(layout, set(layout.sets[0].members))


def test_domains_inside_domains() -> None:
    names = {node: f"room-{node // 12}/rack-{node // 4}" for node in range(24)}
    layout = place(scheme("rs:4+2"), range(24), names)
    assert [len(one.members) for one in layout.sets] == [6, 6, 6, 6]
    for one in layout.sets:
        assert len({names[node] for node in one.members}) == 6
        assert [names[node].split("/")[0] for node in one.members].count("room-0") == 3
    assert [text.split(" would")[0] for text in layout.warnings] == ["losing room-0", "losing room-1"]
    for rack in range(6):
        assert survives(layout, range(rack * 4, rack * 4 + 4))


def test_what_cannot_be_apart_is_named_and_what_it_costs() -> None:
    layout = place(scheme("xor:4"), range(4), {0: "rack-a", 1: "rack-a", 2: "rack-b", 3: "rack-c"})
    assert len(layout.warnings) == 1
    assert "losing rack-a would lose data of nodes 0, 1" in layout.warnings[0]
    assert "2 nodes of one redundancy set, of which any 1 may be lost" in layout.warnings[0]
    assert not survives(layout, {0, 1}) and survives(layout, {2})


def test_members_of_one_domain_do_not_share_a_stripe_in_a_larger_set() -> None:
    """Five nodes are one set of xor:3; two of a rack are kept apart by the ring."""
    layout = place(scheme("xor:3"), range(5), {0: "rack-a", 1: "rack-a"})
    assert len(layout.sets) == 1
    members = layout.sets[0].members
    distance = abs(members.index(0) - members.index(1))
    assert min(distance, 5 - distance) == 2
    pairs = place(scheme("1"), range(5), {0: "rack-a", 1: "rack-a"})
    assert not in_one_set(pairs, 0, 1) or survives(pairs, {0, 1})


def test_too_few_nodes_get_what_they_can_have_and_are_told() -> None:
    for words, count, kind, num_data, num_parity in [
        ("rs:4+2", 5, "rs", 3, 2),
        ("rs:4+2", 3, "copies", 1, 2),
        ("rs:4+2", 2, "copies", 1, 1),
        ("xor:4", 3, "xor", 2, 1),
        ("xor:4", 2, "copies", 1, 1),
        ("3", 3, "copies", 1, 2),
    ]:
        layout = place(scheme(words), range(count))
        (one,) = layout.sets
        assert (one.kind, one.num_data, one.num_parity) == (kind, num_data, num_parity), (words, count)
        assert f"there are {count}: they get" in layout.warnings[0] and "instead of" in layout.warnings[0]
        assert survives(layout, range(num_parity)) and not survives(layout, range(num_parity + 1))


def test_one_node_is_not_protected_and_told() -> None:
    layout = place(scheme("2"), [5])
    assert (layout.sets, layout.unprotected) == ((), (5,))
    assert "node 5 is the only one" in layout.warnings[0]
    assert survives(layout, ()) and not survives(layout, {5})
    assert overhead(layout) == {5: 0} and layout.set_of(5) is None
    assert place(scheme("2"), []).warnings == ()


def test_what_it_costs() -> None:
    assert set(overhead(place(scheme("xor:4"), range(9))).values()) == {Fraction(1, 3)}
    assert set(overhead(place(scheme("rs:4+2"), range(13))).values()) == {Fraction(1, 2)}
    assert set(overhead(place(scheme("2"), range(7))).values()) == {Fraction(2)}


def test_domains_that_are_none() -> None:
    with pytest.raises(ConfigurationError, match="no such node"):
        place(scheme("1"), range(2), {2: "rack"})
    for name in ("", "/", "room//rack", "room/ ", 7):
        with pytest.raises(ConfigurationError, match="no failure domain"):
            place(scheme("1"), range(2), {0: name})  # type: ignore[dict-item]
    with pytest.raises(ValueError):
        place(scheme("1"), [1, 1])


def test_the_same_input_in_any_order_gives_the_same_sets() -> None:
    names = {node: f"rack-{node % 5}" for node in range(23)}
    first = place(scheme("rs:4+2"), range(23), names)
    for seed in range(3):
        nodes, items = list(range(23)), list(names.items())
        random.Random(seed).shuffle(nodes)
        random.Random(seed).shuffle(items)
        assert place(scheme("rs:4+2"), nodes, dict(items)) == first
