"""The memory that chunks are passed on through: what its table says is there, and only that can be read over a network."""

from __future__ import annotations

import os
import random

import pytest

from safehold.agent.chunk_cache import GIVEN_UP, ChunkCache, size_bytes, table_bytes
from safehold.agent.net.addresses import Address
from safehold.agent.net.peers import Peers
from safehold.agent.net.seam import Listeners
from safehold.clock import new_token
from safehold.errors import IntegrityError
from safehold.events import EventStream
from safehold.host.memfd import Mapping
from safehold.policy.passing_on import CHUNK_BYTES

DATA = random.Random(3).randbytes(300_001)


@pytest.fixture
def cache():
    found = ChunkCache(1500, 3)
    yield found
    found.close()
    found.close()


def test_slots_are_given_shown_and_free_again(cache: ChunkCache) -> None:
    assert cache.size_bytes == size_bytes(1500, 3) == 8192 + 3 * CHUNK_BYTES == os.fstat(cache.fd).st_size
    with Mapping(cache.fd, cache.size_bytes) as seen:
        table = seen.view[: 4 * 1500].cast("I")
        assert cache.place(7) == 0 and cache.place(1499) == 1 and cache.num_free == 1
        cache.view(1499, 5)[:] = b"hello"
        assert table[1499] == 0, "not before it is said to be there"
        cache.show(1499, 5)
        at = table_bytes(1500) + (table[1499] - 1) * CHUNK_BYTES
        assert bytes(seen.view[at : at + 5]) == b"hello"
        cache.free(1499)
        assert table[1499] == 0 and cache.place(8) == 1, "what was used last comes first"
        cache.give_up(7)
        assert table[7] == GIVEN_UP and cache.num_free == 1
        cache.free(7)
        assert table[7] == GIVEN_UP and cache.num_free == 2
        table.release()


def test_only_what_is_there_is_given_away(cache: ChunkCache) -> None:
    cache.place(3)
    assert (
        cache.source(3) is None and cache.source(4) is None and cache.source(-1) is None and cache.source(10**9) is None
    )
    cache.show(3, 100)
    source = cache.source(3)
    assert source is not None and source.size == 100
    os.close(source.fd)
    cache.free(3)
    assert cache.source(3) is None
    cache.place(3)
    cache.show(3, 10)
    cache.close()
    assert cache.source(3) is None


def peers_of(name: str, token: str) -> Peers:
    listeners = Listeners(on_message=lambda *_: None, on_lost=lambda *_: None, on_back=lambda *_: None)
    return Peers(
        name,
        nodes=["a", "b"],
        bind="127.0.0.1",
        token=token,
        run_id="run",
        incarnation=1,
        listeners=listeners,
        events=EventStream("agent"),
    )


def test_chunks_go_over_real_sockets_from_one_cache_into_another(cache: ChunkCache) -> None:
    token = new_token()
    one, other = peers_of("a", token), peers_of("b", token)
    into = ChunkCache(1500, 2)
    try:
        where = {"a": Address.parse(str(one.address)), "b": Address.parse(str(other.address))}
        one.meet(where)
        other.meet(where)
        other.provide("chunk", lambda node, name: cache.source(int(name)))
        cache.place(1)
        cache.place(5)
        cache.view(5, len(DATA))[:] = DATA
        cache.show(5, len(DATA))
        into.place(5)
        view = into.view(5, len(DATA))
        one.read_into("b", "chunk", "5", 0, view, deadline_s=10.0)
        assert bytes(view) == DATA
        view.release()
        for name in ("1", "6"):
            with pytest.raises(IntegrityError):
                one.read_into("b", "chunk", name, 0, memoryview(bytearray(10)), deadline_s=10.0)
    finally:
        into.close()
        one.close()
        other.close()
