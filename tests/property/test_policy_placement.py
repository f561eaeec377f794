"""Sweeps of placement: every number of nodes from 2 to 24, every scheme, every number of lost nodes."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safehold.format.crc import BLOCK_BYTES
from safehold.policy.placement import Layout, Scheme, parse_scheme, place, survives
from safehold.policy.stripes import Geometry, Stream

SCHEMES = [
    scheme
    for scheme in (
        *(parse_scheme(copies=copies) for copies in (1, 2, 3)),
        *(parse_scheme(parity=words) for words in ("xor:3", "xor:4", "xor:8", "rs:2+2", "rs:4+2", "rs:8+2", "rs:4+4")),
    )
    if scheme is not None
]
NODES = range(2, 25)


def domains_of(count: int, per_domain: int) -> dict[int, str]:
    return {node: f"rack-{node // per_domain}" for node in range(count)}


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_every_node_is_in_one_set_and_sets_are_balanced(scheme: Scheme) -> None:
    for count, per_domain in itertools.product(NODES, (1, 2, 3, 5)):
        layout = place(scheme, range(count), domains_of(count, per_domain))
        assert sorted(node for one in layout.sets for node in one.members) == list(range(count))
        sizes = [len(one.members) for one in layout.sets]
        assert max(sizes) - min(sizes) <= 1
        if count >= scheme.width:
            assert min(sizes) >= scheme.width and max(sizes) < 2 * scheme.width
            assert {(one.num_data, one.num_parity) for one in layout.sets} == {(scheme.num_data, scheme.num_parity)}
        else:
            assert layout.warnings and len(layout.sets) == 1


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_each_set_has_as_few_nodes_of_a_domain_as_can_be(scheme: Scheme) -> None:
    for count, per_domain in itertools.product(NODES, (1, 2, 3, 5)):
        names = domains_of(count, per_domain)
        layout = place(scheme, range(count), names)
        for one in layout.sets:
            for name, found in Counter(names[node] for node in one.members).items():
                there = sum(other == name for other in names.values())
                assert found <= -(-there // len(layout.sets)), (count, per_domain, name)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_any_of_as_many_as_there_is_parity_may_be_lost_in_every_set_at_once(scheme: Scheme) -> None:
    rng = random.Random(1)
    for count in NODES:
        layout = place(scheme, range(count))
        num_parity = layout.sets[0].num_parity
        for one in layout.sets:
            for lost in itertools.islice(itertools.combinations(one.members, num_parity), 300):
                assert survives(layout, lost)
        for _ in range(20):
            lost = [node for one in layout.sets for node in rng.sample(one.members, num_parity)]
            assert survives(layout, lost)
        assert not survives(layout, range(count))


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_full_sets_of_the_asked_size_survive_exactly_that_many(scheme: Scheme) -> None:
    layout = place(scheme, range(scheme.width))
    for number in range(scheme.width + 1):
        for lost in itertools.islice(itertools.combinations(range(scheme.width), number), 200):
            assert survives(layout, lost) == (number <= scheme.num_parity), lost


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_what_warnings_do_not_name_survives(scheme: Scheme) -> None:
    for count, per_domain in itertools.product(NODES, (2, 3, 5)):
        names = domains_of(count, per_domain)
        layout = place(scheme, range(count), names)
        for name in set(names.values()):
            nodes = [node for node in names if names[node] == name]
            told = any(text.startswith(f"losing {name} ") for text in layout.warnings)
            assert survives(layout, nodes) == (not told) or len(nodes) == 1


def recoverable(layout: Layout, lost: set[int]) -> bool:
    """Whether every symbol of data that is lost lies in a stripe with enough symbols left, by counting them."""
    for one in layout.sets:
        for position, node in enumerate(one.members):
            for chunk in range(one.num_data) if node in lost else ():
                stripe = one.stripe_of_chunk(position, chunk)
                assert one.data_position(stripe, chunk) == position
                data = [one.members[one.data_position(stripe, other)] for other in range(one.num_data)]
                parity = [one.members[one.parity_position(stripe, row)] for row in range(one.num_parity)]
                assert len({*data, *parity}) == one.num_data + one.num_parity
                if sum(holder not in lost for holder in (*data, *parity)) < one.num_data:
                    return False
    return True


@given(st.sampled_from(SCHEMES), st.integers(2, 24), st.integers(1, 6), st.randoms(use_true_random=False))
def test_surviving_is_having_enough_symbols(scheme: Scheme, count: int, per_domain: int, rng: random.Random) -> None:
    layout = place(scheme, range(count), domains_of(count, per_domain))
    lost = set(rng.sample(range(count), rng.randrange(count + 1)))
    assert survives(layout, lost) == recoverable(layout, lost)


sizes = st.sampled_from(
    [0, 1, 4095, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES, 5 * BLOCK_BYTES + 7]
)


@given(st.sampled_from(SCHEMES), st.data())
def test_every_block_lies_in_one_row_of_one_stripe(scheme: Scheme, data: st.DataObject) -> None:
    (one,) = place(scheme, range(scheme.width)).sets
    files = st.lists(sizes, max_size=4)
    streams = [Stream((str(n), size) for n, size in enumerate(data.draw(files))) for _ in one.members]
    geometry = Geometry(one, streams)
    seen = set()
    for position, stream in enumerate(streams):
        total = 0
        for block in range(stream.num_blocks):
            stripe, chunk, row = geometry.locate(position, block)
            assert geometry.blocks(stripe, chunk, row, 1) == (position, block, 1)
            assert (stripe, chunk, row) not in seen
            seen.add((stripe, chunk, row))
            assert row < geometry.num_rows(stripe) <= geometry.rows_per_chunk
            assert stream.block_bytes(block) <= geometry.row_bytes(stripe, row)
            total += stream.block_bytes(block)
        assert total == sum(file.size_bytes for file in stream.files)
        runs = stream.runs(0, stream.num_blocks + 3)
        assert [run.block for run in runs] == list(itertools.accumulate([0, *(run.count for run in runs)]))[: len(runs)]
    longest = max(stream.num_blocks for stream in streams)
    for position in range(len(one.members)):
        assert geometry.held_bytes(position) <= -(-longest // one.num_data) * one.num_parity * BLOCK_BYTES
