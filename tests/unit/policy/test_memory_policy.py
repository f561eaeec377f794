"""What a new start believes of what lies in memory, who keeps whose copies, and what that takes."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Collection
from typing import Any

import pytest

from safehold.config import Config
from safehold.errors import ConfigurationError
from safehold.policy.memory_belief import HeldTold, Where, choose
from safehold.policy.memory_need import Need, partners
from safehold.policy.memory_parity import RedundancyTold, padded_bytes, sets_held
from safehold.policy.placement import Layout, RedundancySet, Scheme, parse_scheme, place, survives
from safehold.policy.stripes import Geometry, Stream
from safehold.types import CommitId


def told(
    step: int,
    shares: tuple[int, ...],
    *,
    by: int = 3,
    knows: bool = True,
    run: str = "run",
    manifest: str = "m",
    nodes: tuple[int, ...] = (0, 1),
) -> HeldTold:
    return HeldTold(
        commit=CommitId(step, 3, 0),
        run_id=run,
        manifest=f"{manifest}{step}" if knows else "",
        believed_by=by if knows else 0,
        nodes=nodes if knows else (),
        shares=shares,
    )


def test_the_newest_whole_one_is_taken_and_newer_ones_are_explained() -> None:
    found, words = choose({0: [told(7, (0,)), told(6, (0,))], 1: [told(6, (1, 0))]}, run_id="run", before=3)
    assert found is not None
    assert (found.commit.step, found.manifest, found.knowers) == (6, "m6", (0, 1))
    assert found.holders == {0: (0, 1), 1: (1,)}
    assert len(words) == 1 and "step 7" in words[0] and "node 1" in words[0]


def test_one_node_that_knows_the_commit_is_enough_and_others_may_have_the_shares() -> None:
    found, _ = choose({0: [told(6, (0, 1), knows=False)], 1: [told(6, ())]}, run_id="run", before=3)
    assert found is not None and found.knowers == (1,) and found.holders == {0: (0,), 1: (0,)}


@pytest.mark.parametrize(
    "entry",
    [
        told(6, (0, 1), by=2),  # a start of the job between has not accepted it
        told(6, (0, 1), by=4),
        told(6, (0, 1), run="another"),
        told(6, (0, 1), knows=False),
        told(6, (0,)),
    ],
)
def test_what_is_not_believed_or_not_whole_is_not_used(entry: HeldTold) -> None:
    assert choose({0: [entry]}, run_id="run", before=3)[0] is None
    assert choose({}, run_id="run", before=3) == (None, ())


def test_copies_come_from_other_failure_domains() -> None:
    domains = ["rack-1", "rack-1", "rack-2", "rack-2"]
    found = partners(4, domains, 1)
    assert not found.warnings
    for node, keepers in found.of.items():
        assert len(keepers) == 1 and domains[keepers[0]] != domains[node]
        assert node in found.wards(keepers[0])


@pytest.mark.parametrize(("num_nodes", "copies"), [(2, 1), (3, 1), (5, 2), (6, 3), (2, 3)])
def test_partners_are_those_of_the_redundancy_sets(num_nodes: int, copies: int) -> None:
    found = partners(num_nodes, [], copies)
    layout = place(Scheme(kind="copies", num_data=1, num_parity=copies), range(num_nodes))
    for count in range(num_nodes + 1):
        for lost in itertools.combinations(range(num_nodes), count):
            whole = all(node not in lost or not set(found.of[node]) <= set(lost) for node in range(num_nodes))
            assert whole == survives(layout, lost)


def test_a_lone_node_and_no_copies_have_no_partners() -> None:
    assert partners(1, [], 1).of == {0: ()}
    assert partners(3, [], 0).of == {0: (), 1: (), 2: ()}
    with pytest.raises(ConfigurationError, match="failure domain"):
        partners(2, ["a//b", ""], 1)


def test_what_is_needed_is_counted_in_full_and_shown() -> None:
    need = Need(own_bytes=1000, num_ranks=8, wards={"n1": 900, "n3": 500})
    assert need.total_bytes == 2 * (1000 + 900 + 500)
    assert need.words() == (
        "2 x 1,000 bytes for 8 ranks + 2 x 900 for copies of node n1 + 2 x 500 for copies of node n3 = 4,800 bytes"
    )


# -- parity ------------------------------------------------------------------------------------------------------------


def parity_told(
    layout: Layout, lost: set[int], blocks: dict[int, int], *, number: dict[int, int], halved: Collection[int] = ()
) -> dict[int, list[HeldTold]]:
    """What nodes tell after `lost` are gone; `number`: their index now; `halved`: those that have their own share and no redundancy."""
    found = {}
    nodes = tuple(sorted(blocks))
    for node in sorted(set(nodes) - lost):
        of = layout.set_of(node)
        assert of is not None
        entry = RedundancyTold(
            node=node,
            kind=of.kind,
            num_data=of.num_data,
            num_parity=of.num_parity,
            members=of.members,
            blocks=tuple(blocks[member] for member in of.members),
        )
        redundancy = () if node in halved else (entry,)
        found[number[node]] = [dataclasses.replace(told(6, (node,), nodes=nodes), redundancy=redundancy)]
    return found


def given_back_by_hand(of: RedundancySet, blocks: dict[int, int], lost: set[int], held: set[int]) -> bool:
    """Whether all members can be had: block by block, as a reader would count symbols."""
    stream = {node: Stream([("f", blocks[node] << 20)]) for node in of.members}
    geometry = Geometry(of, [stream[node] for node in of.members])
    for stripe, row in itertools.product(range(len(of.members)), range(geometry.rows_per_chunk)):
        known, wanted = 0, 0
        for chunk in range(of.num_data):
            position, _, there = geometry.blocks(stripe, chunk, row, 1)
            gone = bool(there) and of.members[position] in lost
            known, wanted = known + (not gone), wanted + gone
        known += sum(of.members[of.parity_position(stripe, parity)] in held for parity in range(of.num_parity))
        if wanted and known < of.num_data:
            return False
    return True


@pytest.mark.parametrize(
    ("parity", "num_nodes"), [("xor:4", 4), ("xor:3", 7), ("rs:2+2", 4), ("rs:4+2", 6), ("rs:2+2", 9), ("rs:4+2", 3)]
)
def test_what_parity_gives_back_is_what_a_count_of_symbols_says(parity: str, num_nodes: int) -> None:
    """Sweep: all losses up to one more than parity stands, sets and shares of unequal size, nodes that have other numbers after it."""
    scheme = parse_scheme(parity=parity)
    assert scheme is not None
    layout = place(scheme, range(num_nodes))
    rng = random.Random(parity)
    most = layout.sets[0].num_parity + 1
    for count in range(most + 1):
        for lost in map(set, itertools.combinations(range(num_nodes), count)):
            blocks = {node: rng.choice((0, 1, rng.randrange(12), rng.randrange(12), 30)) for node in range(num_nodes)}
            left = [node for node in range(num_nodes) if node not in lost]
            rng.shuffle(left)
            number = {node: index for index, node in enumerate(left)}
            halved = {node for node in left if rng.random() < 0.1}
            found, words = choose(
                parity_told(layout, lost, blocks, number=number, halved=halved), run_id="run", before=3
            )
            wanted = bool(left) and all(
                set(of.members) <= set(left)
                or (
                    set(of.members) - lost - halved
                    and given_back_by_hand(of, blocks, lost, set(of.members) - lost - halved)
                )
                for of in layout.sets
            )
            assert (found is not None) == wanted, (lost, blocks, halved)
            if survives(layout, lost) and not halved:
                assert wanted, "what the scheme promises"
            if found is None:
                assert not left or "cannot be used" in words[0]
                continue
            assert found.holders == {node: (number[node],) if node in number else () for node in range(num_nodes)}
            back = Where.from_wire(found.to_wire())
            assert (back.knowers, back.holders, back.sets) == (found.knowers, found.holders, found.sets)
            for node in set(left) - halved:
                held = back.set_of(node)
                assert held is not None and held.holders[node] == number[node]


def test_what_makes_no_sense_of_a_set_counts_for_nothing() -> None:
    fields: dict[str, Any] = {"kind": "xor", "num_data": 2, "num_parity": 1, "members": (0, 1, 2), "blocks": (3, 3, 3)}
    good = RedundancyTold(node=0, **fields)
    for change in (
        {"blocks": (3, 3)},
        {"node": 5},
        {"num_parity": 2},
        {"members": (0, 1, 1)},
        {"num_data": 5},
    ):
        assert dataclasses.replace(good, **change).set() is None
        entry = dataclasses.replace(told(6, (0, 1), nodes=(0, 1, 2)), redundancy=(dataclasses.replace(good, **change),))
        assert choose({0: [entry]}, run_id="run", before=3)[0] is None
    other = dataclasses.replace(good, blocks=(3, 3, 9))  # of a set that is told otherwise: they are not one
    assert len(sets_held([(0, good), (1, dataclasses.replace(other, node=1))])) == 2


def test_parity_places_sets_over_domains_and_needs_a_fraction() -> None:
    domains = [f"rack-{index % 3}" for index in range(6)]
    found = partners(6, domains, 1, "xor:3")
    assert not found.warnings and len(found.sets) == 2
    for node in range(6):
        of = found.set_of(node)
        assert of is not None and found.of[node] == () == found.wards(node)
        assert len({domains[member] for member in of.members}) == len(of.members)
        assert found.listeners(node) == found.speakers(node) == tuple(other for other in of.members if other != node)
    alone = partners(1, [], 1, "xor:3")
    assert alone.set_of(0) is None and "the only one" in alone.warnings[0]
    with pytest.raises(ConfigurationError, match="is no scheme"):
        partners(2, [], 1, "raid")
    copies = partners(3, [], 1)
    assert copies.listeners(0) == copies.of[0] and copies.speakers(0) == copies.wards(0)


@pytest.mark.parametrize("parity", ["xor:4", "rs:4+2", "rs:2+2"])
def test_the_parity_that_is_counted_is_never_less_than_what_is_held(parity: str) -> None:
    scheme = parse_scheme(parity=parity)
    assert scheme is not None
    for seed in range(30):
        rng = random.Random(seed)
        layout = place(scheme, range(rng.randint(scheme.width, scheme.width + 3)))
        of = layout.sets[0]
        arenas = {node: [rng.randrange(0, 40 << 20, 4096) for _ in range(2)] for node in of.members}
        padded = {node: padded_bytes(sizes) for node, sizes in arenas.items()}
        streams = [
            Stream([("objects", rng.randrange(1 << 20)), *((f"{n}", size) for n, size in enumerate(arenas[node]))])
            for node in of.members
        ]
        geometry = Geometry(of, streams)
        for position, node in enumerate(of.members):
            wards = {f"n{other}": size for other, size in padded.items() if other != node}
            need = Need(own_bytes=sum(arenas[node]), num_ranks=2, wards=wards, of=of, padded_bytes=padded[node])
            assert geometry.held_bytes(position) <= need.parity_bytes
            assert need.total_bytes == 2 * (sum(arenas[node]) + need.parity_bytes)
            share = max(padded.values()) * of.num_parity / of.num_data
            assert need.parity_bytes <= share + (of.num_parity << 20), "a fraction, and no copy"


def test_settings_and_schemes_agree_on_what_is_parity() -> None:
    words = [f"xor:{n}" for n in (0, 1, 2, 3, 64, 65, 100)] + [
        f"rs:{k}+{m}" for k in (0, 1, 2, 62, 63) for m in (0, 1, 2, 3)
    ]
    for text in [*words, "xor", "rs:4", "rs:4+", "raid:5", "xor:4 "]:
        try:
            parse_scheme(parity=text)
            fits = text == text.strip()
        except ConfigurationError:
            fits = False
        try:
            Config(memory_parity=text)
            taken = True
        except ConfigurationError as exc:
            assert "memory_parity" in exc.message
            taken = False
        assert fits == taken, text
    with pytest.raises(ConfigurationError, match="exclude each other"):
        Config(memory_parity="xor:4", memory_copies=2)
