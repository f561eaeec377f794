"""Passing on between nodes: whatever nodes want, every chunk has one reader per neighbourhood, loads are even, peers are few."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from safehold.policy import passing_on
from safehold.policy.passing_on import MAX_NODES, Numbering, deal, decode, encode


@pytest.fixture(autouse=True)
def no_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passing_on, "MIN_SAVED_BYTES", 0)


def check(wants: dict[int, set[int]], num_chunks: int) -> dict[int, Counter[int]]:
    """Check what holds for all dealing; returns node -> reader -> how many chunks."""
    groups = deal({node: encode(chunks, num_chunks) for node, chunks in wants.items()}, num_chunks)
    peers: dict[int, set[int]] = {node: set() for node in wants}
    passed: dict[int, Counter[int]] = {node: Counter() for node in wants}
    seen: dict[int, set[int]] = {node: set() for node in wants}
    for group in groups:
        assert len(set(group.members)) == len(group.members) >= 2 and len(group.chunks)
        loads = Counter(group.readers().tolist())
        assert max(loads.values()) - min(loads[node] for node in group.members) <= 1
        assert list(group.chunks) == sorted(set(group.chunks))
        for node in group.members:
            assert set(group.chunks.tolist()) <= wants[node] and not seen[node] & set(group.chunks.tolist())
            seen[node] |= set(group.chunks.tolist())
            peers[node] |= set(group.members)
            passed[node].update(loads)
    assert all(len(found) <= MAX_NODES for found in peers.values())
    for node in wants:
        for chunk in wants[node] - seen[node]:
            others = [other for other in wants if other != node and chunk in wants[other] and other in peers[node]]
            assert not others, "what two neighbours want is read once"
    return passed


@settings(deadline=None)
@given(
    st.integers(1, 60).flatmap(
        lambda n: st.tuples(
            st.just(n), st.dictionaries(st.integers(0, 80), st.sets(st.integers(0, n - 1)), max_size=40)
        )
    )
)
def test_any_wants(made: tuple[int, dict[int, set[int]]]) -> None:
    num_chunks, wants = made
    check(wants, num_chunks)


@settings(deadline=None)
@given(num_nodes=st.integers(2, 300), num_chunks=st.integers(1, 200))
def test_replicas_read_once_per_neighbourhood(num_nodes: int, num_chunks: int) -> None:
    groups = deal({node: encode(range(num_chunks), num_chunks) for node in range(num_nodes)}, num_chunks)
    hoods = -(-num_nodes // MAX_NODES)
    assert len(groups) == hoods and sum(len(group.chunks) for group in groups) == hoods * num_chunks
    assert sorted(node for group in groups for node in group.members) == list(range(num_nodes))
    assert {len(group.members) for group in groups} <= {num_nodes // hoods, num_nodes // hoods + 1}


@settings(deadline=None)
@given(shards=st.integers(1, 12), replicas=st.integers(2, 8), per_shard=st.integers(1, 20))
def test_shards_with_replicas_share_the_reading_evenly(shards: int, replicas: int, per_shard: int) -> None:
    num_chunks = shards * per_shard
    wants = {
        replica * shards + shard: set(range(shard * per_shard, (shard + 1) * per_shard))
        for shard in range(shards)
        for replica in range(replicas)
    }
    for node, found in check(wants, num_chunks).items():
        assert sum(found.values()) == per_shard and len(found) == min(replicas, per_shard)
        assert max(found.values()) - min(found.values()) <= 1, node


def test_what_all_want_is_dealt_to_who_has_least() -> None:
    wants = {node: {100, *range(10 * node, 10 * node + node)} for node in range(4)}
    wants[4] = wants[3]
    groups = deal({node: encode(chunks, 101) for node, chunks in wants.items()}, 101)
    shared = next(group for group in groups if 100 in group.chunks)
    assert shared.members[0] == 0 and shared.readers().tolist() == [0]


@settings(deadline=None)
@given(st.integers(0, 500).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, max(0, n - 1)), max_size=n))))
def test_sets_of_chunks_travel_as_they_are(made: tuple[int, set[int]]) -> None:
    num_chunks, chunks = made
    assert set(np.flatnonzero(decode(encode(chunks, num_chunks), num_chunks)).tolist()) == chunks


@pytest.mark.parametrize("data", [b"x", encode([3], 8), encode([3], 900)])
def test_what_is_no_set_of_so_many_chunks_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="chunks"):
        decode(data, 90)


@settings(deadline=None)
@given(st.dictionaries(st.integers(0, 5), st.lists(st.integers(1, 40 << 20), min_size=1, max_size=3), min_size=1))
def test_numbers_lead_back_to_where_chunks_lie(sizes: dict[int, list[int]]) -> None:
    numbers = Numbering(sizes)
    found = [numbers.locate(number) for number in range(numbers.num_chunks)]
    total = sum(size for packs in sizes.values() for size in packs)
    assert sum(size for *_, size in found) == total and found == sorted(found)
    for number, (rank, part, offset, size) in enumerate(found):
        assert numbers.of(rank, part, offset, offset + size) == number
        assert numbers.of(rank, part, offset, offset + passing_on.CHUNK_BYTES + 1) == -1


def test_the_messages_stay_small_for_1024_nodes_and_100_gb() -> None:
    num_chunks = 25_000
    replicas = {node: encode(range(num_chunks), num_chunks) for node in range(1024)}
    assert max(map(len, replicas.values())) < 100
    groups = deal(replicas, num_chunks)
    assert len(groups) == 32 and all(len(encode(group.chunks, num_chunks)) < 100 for group in groups)
    sharded = {node: encode(range(node % 128 * 195, node % 128 * 195 + 196), num_chunks) for node in range(1024)}
    groups = deal(sharded, num_chunks)
    assert max(map(len, sharded.values())) < 100 and sum(len(group.chunks) for group in groups) < 1.1 * num_chunks


def test_borders_of_shards_are_not_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passing_on, "MIN_SAVED_BYTES", 8 << 20)
    borders = {node: encode(range(node * 20, node * 20 + 21), 2000) for node in range(64)}
    assert deal(borders, 2000) == []
    twice = {node: encode(range(node // 2 * 20, node // 2 * 20 + 21), 2000) for node in range(64)}
    assert sum(len(group.chunks) for group in deal(twice, 2000)) >= 32 * 20
