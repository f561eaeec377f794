"""Documents of a restore between the agents of several nodes: read once, handed down a tree, and who cannot give is replaced."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from agent_fakes import Node
from several_nodes import Job

from safehold.agent import document_messages as dm
from safehold.agent import documents
from safehold.agent import messages as m
from safehold.agent import words as w
from safehold.agent.documents import PIECE_BYTES, fetch, share_from_bytes
from safehold.agent.means import REAL
from safehold.config import Config
from safehold.errors import AgentUnavailableError, StorageError
from safehold.format import document
from safehold.policy import document_tree as tree

DATA = os.urandom(50_000)
DIGEST = document.digest(DATA)


class Restoring:
    """A job whose ranks ask what to restore, and for its documents.

    Attributes:
        read: Node -> how often its flusher had to give the documents.
        failing: Nodes whose flushers cannot.
    """

    def __init__(self, num_nodes: int = 6, per_node: int = 2, **settings: Any) -> None:
        self.job = Job(num_nodes, per_node, **settings)
        self.read: Counter[int] = Counter()
        self.failing: set[int] = set()
        self.round = 0
        for node, session in enumerate(self.job.sessions):
            room = session.passing.documents
            room._means = replace(REAL, spawn=lambda name, work: self.job.work.post(work))
            flusher = self.job.flushers[node]
            flusher.at_once["documents"] = lambda arguments, node=node: self._put(node, arguments)

    def _put(self, node: int, arguments: dict[str, Any]) -> Any:
        assert arguments == {"commit": [10, 1, 0], "blake3": DIGEST}
        self.read[node] += 1
        if node in self.failing:
            return StorageError("no storage here")
        os.pwrite(self.job.flushers[node].last_fds[0], DATA, 0)
        return None

    def offer(self, documents: Any = (len(DATA), DIGEST)) -> None:
        """All ask, and are offered a checkpoint."""
        job = self.job
        asks = [job.send(rank, m.RestoreAsk(0, None)) for rank in range(job.world_size)]
        found = {"commit": [10, 1, 0], "manifest": b"manifest", "newest": [10, 1, 0], "any_commit": True}
        told = None if documents is None else list(documents)
        job.flushers[0].answer("find", {**found, "bad": [], "skipped": [], "documents": told})
        job.deliver()
        self.round = job.answer_to(0, asks[0]).round

    def ask(self) -> list[int]:
        """All ranks ask for the documents."""
        return [self.job.send(rank, dm.DocumentsAsk(0, self.round)) for rank in range(self.job.world_size)]

    def took(self, asked: list[int]) -> dict[int, bytes]:
        """What each rank that was answered has got."""
        found = {}
        for rank, number in enumerate(asked):
            if self.job.answer_to(rank, number) is not None:
                found[rank] = self.job.peers[rank].taken.get(number, b"")
        return found

    def over(self, *, done: bool = True, ranks: Any = None) -> None:
        for rank in range(self.job.world_size) if ranks is None else ranks:
            self.job.send(rank, dm.DocumentsOver(0, self.round, done))

    def lent(self) -> list[int]:
        return [pool.total_bytes for pool in self.job.pools]


def all_have(found: Restoring, asked: list[int], but: tuple[int, ...] = ()) -> bool:
    took = found.took(asked)
    return all(took[rank] == (b"" if rank // found.job.per_node in but else DATA) for rank in range(len(asked)))


def test_one_reads_and_no_node_gives_away_more_than_its_children_take() -> None:
    found = Restoring(22)
    found.offer()
    assert all(reply.manifest == b"" for peer in found.job.peers for reply in peer.of(m.RestoreOffer))
    asked = found.ask()
    assert all_have(found, asked) and found.read == {0: 1}
    given = found.job.read_bytes
    assert sum(given.values()) == 21 * len(DATA) and max(given.values()) == tree.DEGREE * len(DATA)
    assert given["n0"] == tree.DEGREE * len(DATA)
    assert all(found.lent())
    found.over()
    assert not any(found.lent())


def test_ranks_may_ask_before_the_documents_are_there() -> None:
    found = Restoring(2)
    del found.job.flushers[0].at_once["documents"]
    found.offer()
    asked = found.ask()
    assert not found.took(asked)
    os.pwrite(found.job.flushers[0].last_fds[0], DATA, 0)
    found.job.flushers[0].answer("documents")
    found.job.deliver()
    assert all_have(found, asked)


def test_a_node_that_is_cut_off_reads_storage_and_gives_to_those_below() -> None:
    found = Restoring(9)
    job = found.job
    room = job.sessions[1].passing.documents
    job.cuts.add(frozenset(("n0", "n1")))
    assert tree.below(1, 0, 9) == [5, 6, 7, 8]
    for node in range(9):  # as if the offer had come by another way
        offer = m.RestoreOffer(0, 10, 1, 0, round=1, documents=(len(DATA), DIGEST))
        job.sessions[node].passing.documents.offered(offer)
    job.deliver()
    found.round = 1
    asked = found.ask()
    assert set(found.took(asked)) == {0, 1, 4, 5, 6, 7, 8, 9}, "n1 waits for n0, and those below for n1"
    job.clock.now = room.next_deadline()
    for session in job.sessions:
        session.passing.tick()
    job.deliver()
    assert all_have(found, asked) and found.read == {0: 1, 1: 1}
    assert job.read_bytes["n1"] == 4 * len(DATA)


def test_those_below_a_silent_node_ask_those_above_it() -> None:
    found = Restoring(6)
    job = found.job
    job.sessions[1].passing.documents._tell_below = lambda held, here: None  # type: ignore[method-assign]
    found.offer()
    asked = found.ask()
    assert 10 not in found.took(asked)
    job.wires["n1"].providers.clear()
    job.wires["n1"].providers[documents.KIND] = lambda node, name: None
    job.tick(60.0)
    assert all_have(found, asked) and found.read == {0: 1} and job.read_bytes["n0"] == 5 * len(DATA)


def test_a_node_without_memory_lets_its_ranks_read_and_those_below_take_from_above() -> None:
    found = Restoring(6)
    found.job.pools[1].configure(4096)
    found.offer()
    asked = found.ask()
    assert all_have(found, asked, but=(1,)) and found.read == {0: 1}
    assert found.job.read_bytes["n0"] == 4 * len(DATA), "three of its children, and one of theirs"


def test_a_lead_without_memory_has_others_read() -> None:
    found = Restoring(6)
    found.job.pools[0].configure(4096)
    found.offer()
    assert all_have(found, found.ask(), but=(0,)) and set(found.read) == {1, 2, 3, 4}, "each child of the lead"


def test_what_is_larger_than_the_cache_is_read_by_every_rank() -> None:
    found = Restoring(2, restore_cache_bytes=len(DATA) - 1)
    found.offer()
    assert all_have(found, found.ask(), but=(0, 1)) and not found.read


def test_a_node_that_sends_something_else_is_not_believed() -> None:
    found = Restoring(6)
    wire = found.job.wires["n1"]
    honest = wire.providers[documents.KIND]

    def lies(node: str, name: str) -> Any:
        source = honest(node, name)
        os.pwrite(source.fd, b"other", 100)
        return source

    wire.providers[documents.KIND] = lies
    found.offer()
    asked = found.ask()
    took = found.took(asked)
    assert took[10] == took[11] == DATA and found.read == {0: 1, 5: 1}
    assert took[2] != DATA, "a rank compares what it got with the offer"


def test_where_storage_fails_too_the_ranks_are_told_to_read_themselves() -> None:
    found = Restoring(6)
    found.failing = {0, 1, 2, 3, 4, 5}
    found.offer()
    assert all_have(found, found.ask(), but=(0, 1, 2, 3, 4, 5))
    assert not any(found.lent())


def test_a_new_offer_ends_the_one_before() -> None:
    found = Restoring(2)
    found.offer()
    before = found.round
    found.job.send(0, m.Vote(0, before, "planned", {"class": "TornFileError", "message": "bad"}, "a/b"))
    for rank in range(1, 4):
        found.job.send(rank, m.Vote(0, before, "planned"))
    found.job.flushers[0].answer("quarantine")
    found.job.deliver()
    found.offer(documents=None)
    assert not any(found.lent()) and found.round != before
    assert found.job.peers[3].last(m.RestoreOffer).manifest == b"manifest"
    found.round = before
    assert all_have(found, found.ask(), but=(0, 1))


def test_memory_goes_back_when_the_ranks_have_gone_or_given_up() -> None:
    found = Restoring(2)
    found.offer()
    found.ask()
    for rank in (0, 1):
        found.job.sessions[0].detach(rank, found.job.peers[rank], orderly=False)
    found.over(done=False, ranks=[2])
    assert found.lent()[0] == 0 and found.lent()[1] > 0, "rank 3 has not said that it is through"
    found.over(done=False, ranks=[3])
    assert not any(found.lent())


def test_memory_goes_back_where_ranks_die_before_they_ask() -> None:
    found = Restoring(2)
    found.offer()
    assert found.lent()[1] > 0
    found.job.sessions[1].detach(2, found.job.peers[2], orderly=False)
    assert found.lent()[1] == 0


def test_storage_that_hangs_is_left_to_the_ranks() -> None:
    found = Restoring(2, stall_timeout_s=7.0)
    del found.job.flushers[0].at_once["documents"]
    found.offer()
    asked = found.ask()
    found.job.tick(6.9)
    assert 0 not in found.took(asked)
    found.job.tick(0.2)
    took = found.took(asked)
    assert took[0] == b"" and took[2] == DATA and found.read == {1: 1}
    found.job.flushers[0].answer("documents")  # too late
    assert found.lent()[0] == 0 and found.job.sessions[0].passing.documents.provide("n1", DIGEST) is None


def test_ranks_of_one_node_are_handed_what_is_large() -> None:
    job = Node(2)
    session = job.session
    job.flusher.at_once["documents"] = lambda _: os.pwrite(job.flusher.last_fds[0], DATA, 0) and None
    session.passing.documents.offered(m.RestoreOffer(0, 10, 1, 0, round=1, documents=(len(DATA), DIGEST)))
    for peer in job.peers:
        session.handle(peer, dm.DocumentsAsk(7, 1), None)
        assert peer.taken[7] == DATA
    session.handle(job.peers[1], dm.DocumentsOver(8, 1, True), None)
    assert job.pool.total_bytes == 0


def test_memory_of_a_node_that_still_fetches_goes_back_afterwards() -> None:
    found = Restoring(2)
    work: list[Any] = []
    room = found.job.sessions[1].passing.documents
    room._means = replace(REAL, spawn=lambda name, fetching: work.append(fetching))
    found.offer()
    asked = found.ask()
    found.over()
    assert found.lent()[1] > 0 and found.took(asked)[2] == b""
    work.pop()()
    found.job.deliver()
    assert not any(found.lent()) and found.read == {0: 1}


def test_a_word_that_comes_before_the_offer_counts() -> None:
    found = Restoring(2)
    room = found.job.sessions[1].passing.documents
    found.job.sessions[0].passing.documents.offered(m.RestoreOffer(0, 10, 1, 0, round=1, documents=(len(DATA), DIGEST)))
    found.job.deliver()
    assert room._early == [(0, w.DocumentsTold(DIGEST, True))] and not found.job.read_bytes
    room.offered(m.RestoreOffer(0, 10, 1, 0, round=1, documents=(len(DATA), DIGEST)))
    found.job.deliver()
    assert found.job.read_bytes == {"n0": len(DATA)}


def test_a_node_above_that_is_lost_is_not_waited_for() -> None:
    found = Restoring(6)
    found.job.sessions[5].passing.documents.offered(m.RestoreOffer(0, 10, 1, 0, round=1, documents=(len(DATA), DIGEST)))
    found.job.sessions[5].passing.node_lost(3)
    assert not found.read
    found.job.sessions[5].passing.node_lost(1)
    found.job.deliver()
    assert found.read == {5: 1}, "the lead has none, so storage it is"


def test_nothing_is_handed_out_where_that_is_switched_off() -> None:
    for settings in ({"restore_pass_on": "off"}, {}):
        job = Job(2, **settings)
        for rank in range(2):
            job.send(rank, m.RestoreAsk(0, None))
        asked = job.flushers[0].open("find")[0]
        assert asked.get("share_from_bytes") == (None if settings else 0)


def test_from_which_size_on_documents_are_handed_out() -> None:
    many, alone, one = (
        m.World("t", 4, [0, 0, 1, 1], ["a", "b"]),
        m.World("t", 2, [0, 0], ["a"]),
        m.World("t", 1, [0], ["a"]),
    )
    config = Config()
    assert share_from_bytes(config, many, local_flash=False) == 0
    assert share_from_bytes(config, many, local_flash=True) is None
    assert share_from_bytes(config, alone, local_flash=False) == 1 << 20
    assert share_from_bytes(config, one, local_flash=False) is None
    assert share_from_bytes(Config(restore_pass_on="off"), many, local_flash=False) is None


class Cutting:
    """A network whose nodes each give so many bytes and then no more."""

    def __init__(self, data: bytes, gives: dict[str, int]) -> None:
        self.data, self.gives = data, gives
        self.asked: list[tuple[str, int]] = []

    def read_into(self, node: str, kind: str, name: str, offset: int, view: memoryview, *, deadline_s: float) -> int:
        self.asked.append((node, offset))
        self.gives[node] -= len(view)
        if self.gives[node] < 0:
            view[:] = bytes(len(view))
            raise AgentUnavailableError("gone", node=node)
        view[:] = self.data[offset : offset + len(view)]
        return 0


def test_what_one_node_began_the_next_goes_on_with() -> None:
    data = bytes(range(256)) * (2 * PIECE_BYTES // 256) + b"rest"
    network, view = Cutting(data, {"a": PIECE_BYTES, "b": 10 * PIECE_BYTES}), memoryview(bytearray(len(data)))
    assert fetch(network, ["a", "b"], document.digest(data), view, deadline_s=1.0) == ("b", "")  # type: ignore[arg-type]
    assert view == data
    assert network.asked == [("a", 0), ("a", PIECE_BYTES), ("b", PIECE_BYTES), ("b", 2 * PIECE_BYTES)]


def test_that_no_node_gave_it_is_said_with_every_reason() -> None:
    network, view = Cutting(b"0123", {"a": 0, "b": 0}), memoryview(bytearray(4))
    found = fetch(network, ["a", "b"], "", view, deadline_s=1.0)  # type: ignore[arg-type]
    assert found == ("", "node a: gone; node b: gone")


@pytest.mark.parametrize(("num_nodes", "root"), [(1, 0), (2, 1), (5, 0), (6, 3), (33, 32), (1024, 7)])
def test_the_tree_reaches_every_node_once(num_nodes: int, root: int) -> None:
    children = {node: tree.below(node, root, num_nodes) for node in range(num_nodes)}
    found = sorted(child for below in children.values() for child in below)
    assert found == sorted(set(range(num_nodes)) - {root})
    for node, below in children.items():
        assert len(below) <= tree.DEGREE
        assert all(tree.above(child, root) == [node, *tree.above(node, root)] for child in below)
    assert max(len(tree.above(node, root)) for node in range(num_nodes)) <= 5
