"""Another node's disk as a tier, over HTTP on loopback: the tier's suite, and a network that fails."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from agent_fakes import FakeFlusher

from safehold.agent import flash_files, joined_flash
from safehold.agent.net.addresses import Address
from safehold.agent.net.identity import Identity
from safehold.agent.net.peers import Peers
from safehold.agent.net.remote_tier import PIECE_BYTES, PeerTier
from safehold.agent.net.seam import Listeners
from safehold.agent.serving_disk import ask_disk
from safehold.agent.tier_calls import TierCalls
from safehold.config import Config
from safehold.errors import StorageError, StorageFullError, SupersededError, TornFileError
from safehold.events import EventStream
from safehold.format import paths
from safehold.format.document import digest
from safehold.pipeline import ledger
from safehold.testing.fake_tier import FakeTier
from safehold.testing.tier_suite import TierSuite, pattern
from safehold.tiers.base import PackWriter, Tier
from safehold.tiers.flash import FlashTier
from safehold.types import CommitId

TOKEN, URL = "t" * 32, "/a/run"
NOBODY = Listeners(on_message=lambda *_: None, on_lost=lambda *_: None, on_back=lambda *_: None)


class Host:
    """A node's agent as far as its disk goes: the network, and calls carried out in threads."""

    def __init__(
        self, name: str, tier: Tier, root: str, *, names: tuple[str, ...] = ("a", "b", "c"), port: int = 0
    ) -> None:
        self.tier, self.calls, self.num_calls = tier, TierCalls(), 0
        self.delay_s = 0.0
        events = EventStream("test")
        self.peers = Peers(
            name,
            nodes=names,
            bind="127.0.0.1",
            port=port,
            token=TOKEN,
            run_id=digest(URL.encode()),
            incarnation=joined_flash.FIRST,
            listeners=NOBODY,
            events=events,
        )
        self.peers.answer_calls("tier", self._asked)
        self.peers.provide("flash", flash_files.provider(root, allowed=lambda name: True))

    def _asked(self, node: str, question: bytes, reply: Any) -> None:
        self.num_calls += 1

        def work() -> None:
            time.sleep(self.delay_s)
            reply(self.calls.answer(self.tier, question))

        threading.Thread(target=work, daemon=True).start()

    @property
    def address(self) -> Address:
        return self.peers.address

    def close(self) -> None:
        self.peers.close()


OPEN: list[PeerTier] = []


def peer_tier(address: Address, node: str = "b", **settings: float) -> PeerTier:
    times = {"deadline_s": 5.0, "read_s": 5.0, "peer_timeout_s": 1.0} | settings
    identity = Identity(node="a", token=TOKEN, run_id=digest(URL.encode()), incarnation=joined_flash.FIRST)
    OPEN.append(PeerTier(node, address, url="file:///a/run", identity=identity, tls=None, **times))
    return OPEN[-1]


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    """Closed at the end, and the ways to them before."""
    found: list[Host] = []
    yield found
    while OPEN:
        OPEN.pop().close()
    for host in found:
        host.close()


class _PacksBesides(PeerTier):
    """Writes packs as the other node itself does."""

    disk: Tier

    def create_pack(self, path: str, size_bytes: int) -> PackWriter:
        return self.disk.create_pack(path, size_bytes)


class TestPeerTier(TierSuite):
    @pytest.fixture
    def tier(self, tmp_path: Path, hosts: list[Host]) -> Tier:
        root = tmp_path / "run"
        hosts.append(Host("b", FlashTier(root), os.fspath(root)))
        found = peer_tier(hosts[0].address)
        found.__class__ = _PacksBesides
        found.disk = FlashTier(root)  # type: ignore[attr-defined]
        return found


class TestJoinedWithPeers(TierSuite):
    """What a flusher has in a job on three nodes."""

    @pytest.fixture
    def tier(self, tmp_path: Path, hosts: list[Host]) -> Tier:
        for name in ("b", "c"):
            root = tmp_path / name / "run"
            hosts.append(Host(name, FlashTier(root), os.fspath(root)))
        names = ["a", "b", "c"]
        addresses = ["127.0.0.1:1", *(str(host.address) for host in hosts)]
        wire = joined_flash.to_wire(node=0, names=names, addresses=addresses, token=TOKEN)
        tier = joined_flash.join(FlashTier(tmp_path / "a" / "run"), URL, wire, Config())
        OPEN.extend(member for member in tier.members.values() if isinstance(member, PeerTier))
        return tier


@pytest.fixture
def host(tmp_path: Path, hosts: list[Host]) -> Host:
    root = tmp_path / "run"
    hosts.append(Host("b", FakeTier(FlashTier(root)), os.fspath(root)))
    return hosts[0]


def test_errors_of_the_other_disk_arrive_as_they_are_with_its_node(host: Host) -> None:
    tier = peer_tier(host.address)
    host.tier.fail("put", error=StorageFullError("no room"))  # type: ignore[attr-defined]
    with pytest.raises(StorageFullError, match="no room") as caught:
        tier.put("f", b"x")
    assert caught.value.node == "b"
    with pytest.raises(StorageError) as caught:
        tier.sync_tree("no/such")
    assert caught.value.node == "b" and isinstance(caught.value.__cause__, FileNotFoundError)
    tier.put("f", b"12345")
    with pytest.raises(TornFileError) as torn:
        tier.get("f", limit_bytes=3)
    assert torn.value.node == "b"


def test_long_files_go_in_pieces(host: Host) -> None:
    tier = peer_tier(host.address)
    data = pattern(2 * PIECE_BYTES + 17)
    tier.put("plans/long", data)
    assert tier.get("plans/long", limit_bytes=1 << 30) == data
    with pytest.raises(FileExistsError):
        tier.put("plans/long", data, exclusive=True)
    with pytest.raises(TornFileError):
        tier.get("plans/long", limit_bytes=PIECE_BYTES)
    assert tier.digests(["plans/long", "plans/none"]) == {"plans/long": digest(data)}


def test_a_node_that_is_not_there_is_named_soon_and_then_at_once(host: Host) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = Address("127.0.0.1", closed.getsockname()[1])
        tier = peer_tier(address, peer_timeout_s=0.3)
        begun = time.monotonic()
        with pytest.raises(StorageError, match="the disk of node b cannot be reached") as caught:
            tier.list("")
        assert caught.value.node == "b" and 0.2 < time.monotonic() - begun < 3
        begun = time.monotonic()
        for ask in (lambda: tier.list(""), lambda: tier.get("f", limit_bytes=1), lambda: tier.put("f", b"")):
            with pytest.raises(StorageError, match="cannot be reached"):
                ask()
        assert time.monotonic() - begun < 0.2


def test_a_disk_that_gives_no_answer_is_given_up_at_the_deadline(host: Host) -> None:
    host.delay_s = 3.0
    begun = time.monotonic()
    with pytest.raises(StorageError, match=r"cannot be reached.*in 0\.5 s"):
        peer_tier(host.address, deadline_s=0.5).list("")
    assert time.monotonic() - begun < 2


def test_an_agent_that_comes_again_is_found_again(host: Host, hosts: list[Host], tmp_path: Path) -> None:
    tier = peer_tier(host.address, peer_timeout_s=4.0)
    tier.put("f", b"x")
    port = host.address.port
    host.close()
    root = tmp_path / "run"
    coming = threading.Timer(0.3, lambda: hosts.append(Host("b", FlashTier(root), os.fspath(root), port=port)))
    coming.start()
    assert tier.get("f", limit_bytes=9) == b"x"
    tier.put("g", b"y", exclusive=True)
    coming.join()


def test_an_exclusive_put_whose_answer_is_lost_is_not_sent_again(host: Host) -> None:
    """It may have been carried out: whoever repeats it is told that the file exists, and compares."""
    taken = []

    def cut(node: str, question: bytes, reply: Any) -> None:
        taken.append(host.calls.answer(host.tier, question))
        threading.Thread(target=host.close, daemon=True).start()

    host.peers.answer_calls("tier", cut)
    with pytest.raises(StorageError, match="broke before it had answered"):
        peer_tier(host.address, peer_timeout_s=2.0).put("f", b"x", exclusive=True)
    assert len(taken) == 1 and host.tier.get("f", limit_bytes=9) == b"x"


def test_a_stranger_gets_nothing(host: Host) -> None:
    identity = Identity(node="a", token="x" * 32, run_id=digest(URL.encode()), incarnation=joined_flash.FIRST)
    times = {"deadline_s": 2.0, "read_s": 2.0, "peer_timeout_s": 0.5}
    stranger = PeerTier("b", host.address, url="file:///a/run", identity=identity, tls=None, **times)
    OPEN.append(stranger)
    with pytest.raises(StorageError, match="cannot be reached"):
        stranger.delete_tree("checkpoints")
    assert host.num_calls == 0


def test_who_has_seen_a_newer_incarnation_refuses_an_older_one(host: Host) -> None:
    """The manifest and the tombstone of a process that was stopped and wakes up."""
    tier = peer_tier(host.address)
    first = ledger.open_incarnation(host.tier, "one").record.number
    old = CommitId(10, first, 0)
    manifest = f"{paths.checkpoint_dir(old)}/{paths.MANIFEST}"
    stone = f"{paths.checkpoint_dir(old)}/{paths.tombstone(first)}"
    tier.put(manifest, b"of the newest")
    tier.put(stone, b"of the newest")
    ledger.open_incarnation(host.tier, "two", lambda listing: [])
    for path in (manifest, stone):
        for exclusive in (True, False):
            with pytest.raises(SupersededError, match="incarnation 2 owns the run now, this is 1"):
                tier.put(path, b"late", exclusive=exclusive)
    assert host.tier.get(manifest, limit_bytes=99) == b"of the newest"
    ledger.open_incarnation(host.tier, "three", lambda listing: [old])
    tier.put(manifest, b"listed")
    with pytest.raises(SupersededError):
        tier.put(stone, b"late")


def test_a_job_that_is_over_gets_nothing_done_on_this_disk() -> None:
    """Its agent here knows of the newer incarnation, before its process on the other node does."""
    replies: list[Any] = []
    flusher = FakeFlusher({"tier": b"answer"})
    session = SimpleNamespace(ended_by=0, flusher=flusher, config=Config(), superseded=lambda: SupersededError("over"))
    ask_disk(session, b"question", replies.append)  # type: ignore[arg-type]
    assert replies == [b"answer"] and flusher.log == [("tier", {"question": b"question"})]
    session.ended_by = 2
    ask_disk(session, b"question", replies.append)  # type: ignore[arg-type]
    assert isinstance(replies[1], SupersededError) and len(flusher.log) == 1


def test_only_files_of_a_run_are_given_away(tmp_path: Path) -> None:
    root = tmp_path / "run"
    tier = FlashTier(root)
    pack = f"{paths.checkpoint_dir(CommitId(10, 1, 0))}/{paths.pack(0, 0, 0)}"
    for path in (pack, "secret", "run.json"):
        tier.put(path, b"x")
    (root / "plans").mkdir()
    (root / "plans" / ("0" * 64)).symlink_to(root / "secret")
    provide = flash_files.provider(os.fspath(root))
    for path in (pack, "run.json"):
        source = provide("a", path)
        assert source is not None and os.pread(source.fd, 9, 0) == b"x" and source.size == 1
        os.close(source.fd)
    for path in ("secret", "checkpoints", "../run/secret", "plans/../secret", paths.checkpoint_dir(CommitId(10, 1, 1))):
        assert provide("a", path) is None
    with pytest.raises(StorageError):
        provide("a", "plans/" + "0" * 64)
