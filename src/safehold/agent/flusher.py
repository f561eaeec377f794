"""The flusher process: carries out the agent's calls on a tier, each in a thread of its own.

Invariants: it is the only process of the agent that touches storage, so that one which a dead disk holds for ever can be abandoned. It
takes calls from the socket it was started with and from nowhere else, answers each exactly once, and ends when that socket ends.
It never imports torch.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import msgspec

from safehold.agent import places
from safehold.agent.document_calls import DocumentCalls
from safehold.agent.event_log import EventLog
from safehold.agent.plugins import install_listener
from safehold.agent.tier_calls import TierCalls
from safehold.config import Config
from safehold.errors import CheckpointError, StorageError, StorageFullError, SupersededError, from_os_error
from safehold.events import EventStream
from safehold.host.control import RankControl
from safehold.host.idle import KernelIdleCores
from safehold.host.memfd import Mapping
from safehold.host.process import lower_priority
from safehold.host.sockets import Channel, ChannelClosed
from safehold.pipeline import ledger, maintenance
from safehold.pipeline.flush import FlushJob, PackPlace, StagedWord, flush_rank
from safehold.pipeline.leases import Observer
from safehold.pipeline.memory_check import arena_matches, packs_match
from safehold.pipeline.nowhere import Nowhere
from safehold.pipeline.pacing import Pacer
from safehold.tiers.base import Tier, tier_word
from safehold.tiers.joined import JoinedTier
from safehold.tiers.open import open_tier
from safehold.types import CommitId

_ARENAS_KEPT = 256
_CANCELS_KEPT = 1024
NOT_BEGUN_POLL_S = 0.002
REDUNDANCY = ("protect", "rebuild", "survey", "stop_protecting")
OWN_DISK = ("record", "abandon")
"""What concerns this node's share of a checkpoint only."""


class FlusherProcess:
    """State of the process: the tier, mapped arenas, and the flags that cancel flushes."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._tier: Tier | None = None
        self._config = Config()
        self._pacer: Pacer | None = None
        self._url = ""
        self._peers: dict[str, Any] | None = None
        self._joined: JoinedTier | None = None
        self._calls = TierCalls()
        self._cancelled: dict[tuple[int, int, int], threading.Event] = {}
        self._arenas: dict[int, Mapping] = {}
        self._lock = threading.Lock()
        self._tier_lock = threading.Lock()
        self._room_lock = threading.Lock()
        # Remembers from one look to the next which readers' leases are renewed.
        self._observer = Observer()
        self.events = EventStream("flusher")
        self._remote: Any = None
        self._operations: dict[str, Callable[[dict[str, Any], list[int]], Any]] = {
            "flush": lambda arguments, fds: self._flush(arguments, fds, self._open()),
            "hold": lambda arguments, fds: self._flush(arguments, fds, Nowhere()),
            "check_memory": self._check_memory,
            "documents": self._put_documents,
            "retire": self._observing(maintenance.retire),
            "sweep": self._observing(maintenance.sweep_debris),
            "tier": lambda arguments, fds: self._calls.answer(self._open(), arguments["question"]),
            "place": lambda arguments, fds: places.carry_out(self._open(), arguments),
            "remote_place": lambda arguments, fds: places.carry_out(self._remote_calls().there, arguments),
        }
        self._redundancy_calls: Any = None
        self._documents = DocumentCalls()

    def serve(self) -> None:
        """Take calls until the agent's end closes."""
        while True:
            try:
                data, fds = self._channel.recv(timeout_s=None)
            except ChannelClosed:
                return
            call = msgspec.msgpack.decode(data or _read_large(fds.pop()), type=dict[str, Any])
            operation, arguments = str(call["op"]), dict(call["args"])
            if operation == "start":
                self._url, self._config = arguments["url"], Config.from_wire(arguments["config"])
                self._peers = arguments.get("peers")
                # All calls run in threads that are started from here, and take the priority over.
                lower_priority(self._config.flush_nice)
                self._pacer = Pacer(KernelIdleCores(), self._config.flush_busy_share)
                # Opened afresh by each start of the job: the directory may have been replaced meanwhile, and its
                # attempts may have the names of others that were abandoned here.
                self._tier = self._remote = None
                joined, self._joined = self._joined, None
                if joined is not None:
                    _hang_up(joined)
                with self._lock:
                    self._cancelled = {key: flag for key, flag in self._cancelled.items() if not flag.is_set()}
            elif operation == "forget":
                with self._lock:
                    self._arenas.pop(arguments["arena_id"], None)  # whoever still reads it holds it
            elif operation == "cancel":
                self._cancel(arguments)
                self._answer(call["id"], True, None)
            elif operation == "copy_cancel":
                if self._remote is not None:
                    self._remote.cancel(arguments["key"])
                self._answer(call["id"], True, None)
            else:
                threading.Thread(
                    target=self._run, args=(call["id"], operation, arguments, fds), name=operation, daemon=True
                ).start()

    def _run(self, number: int, operation: str, arguments: dict[str, Any], fds: list[int]) -> None:
        value, error = None, None
        step = (arguments.get("commit") or [None])[0]
        try:
            with self.events.span(operation, step=step, rank=arguments.get("rank")):
                own = self._operations.get(operation)
                if operation in REDUNDANCY:
                    value = self._redundancy(operation, arguments)
                elif own is not None:
                    value = own(arguments, fds)
                elif operation not in maintenance.OPERATIONS:
                    value = self._remote_calls().operations[operation](arguments)
                else:
                    value = self._maintain(operation, arguments)
        except CheckpointError as exc:
            error = exc
        except OSError as exc:
            error = from_os_error(exc, operation, tier=tier_word(self._url))
        except Exception as exc:
            error = StorageError(f"{operation} failed: {type(exc).__name__}: {exc}", path=self._url)
        finally:
            for fd in fds:
                _close(fd)
        if isinstance(error, StorageError) and operation in ("flush", "record", "publish"):
            tier = self._open_all() if operation == "publish" else self._open()
            error = superseded(tier, arguments["commit"]) or error
        self._answer(number, value, error)

    def _maintain(self, operation: str, arguments: dict[str, Any]) -> Any:
        """Carry out one of `maintenance`, on the disks of all nodes where that is what the run directory is."""
        if operation in OWN_DISK:
            tier = self._open()
        else:
            tier = self._open_all()
            if operation == "publish" and isinstance(tier, JoinedTier) and self._peers is not None:
                arguments = {**arguments, "own_disks": self._peers["names"]}
            if operation == "find" and isinstance(tier, JoinedTier):
                from safehold.pipeline.recovering import RecoveringTier

                with closing(RecoveringTier(tier)) as recovering:
                    return maintenance.find(recovering, self._config, arguments, self.events)
            if operation == "find" and "share_from_bytes" in arguments:
                return self._documents.find(tier, self._config, arguments, self.events)
        return maintenance.OPERATIONS[operation](tier, self._config, arguments, self.events)

    def _answer(self, number: int, value: Any, error: CheckpointError | None) -> None:
        reply = {"id": number, "value": value, "error": error.to_wire() if error else None}
        try:
            self._channel.send(msgspec.msgpack.encode(reply), timeout_s=30.0)
        except (OSError, CheckpointError):
            os._exit(0)

    def _open(self) -> Tier:
        with self._tier_lock:
            if self._tier is None:
                self._tier = open_tier(self._url, direct=self._config.direct_io)
            return self._tier

    def _open_all(self) -> Tier:
        """The own disk, joined with those of the other nodes where each has one."""
        own, peers = self._open(), self._peers
        if peers is None:
            return own
        from safehold.agent import joined_flash

        with self._tier_lock:
            if self._joined is None or self._joined.own is not own:
                self._joined = joined_flash.join(own, self._url, peers, self._config)
            return self._joined

    def _remote_calls(self) -> Any:
        """What an agent asks of the process that copies to the second place; imported there only."""
        from safehold.pipeline.remote_calls import RemoteCalls

        tier = self._open_all()
        with self._tier_lock:
            if self._remote is None:
                there = open_tier(self._config.remote, name="remote", direct=self._config.direct_io)
                self._remote = RemoteCalls(tier, there, self._config, self._pacer)
            return self._remote

    def _cancel(self, arguments: dict[str, Any]) -> None:
        self._cancelled_of(tuple(arguments["commit"])).set()

    def _cancelled_of(self, key: tuple[int, int, int]) -> threading.Event:
        """Return the flag that abandons the flushes of an attempt; it may be set before the first of them begins."""
        with self._lock:
            while len(self._cancelled) >= _CANCELS_KEPT:
                del self._cancelled[next(iter(self._cancelled))]
            return self._cancelled.setdefault(key, threading.Event())

    def _mapped(self, arena_id: int, fd: int, size: int) -> Mapping:
        with self._lock:
            found = self._arenas.get(arena_id)
            if found is None:
                while len(self._arenas) >= _ARENAS_KEPT:
                    self._arenas.pop(next(iter(self._arenas)))
                found = self._arenas[arena_id] = Mapping(fd, size, writable=False)
            return found

    def _flush(self, arguments: dict[str, Any], fds: list[int], place: PackPlace) -> dict[str, Any]:
        """Flush an arena; to `Nowhere` it is only checksummed, as it is staged."""
        commit = CommitId(*arguments["commit"])
        key = (commit.step, commit.incarnation, commit.attempt)
        arena_fd, control_fd, wake_fd = fds
        cancelled = self._cancelled_of(key)
        job = FlushJob(
            commit=commit,
            node=arguments["node"],
            rank=arguments["rank"],
            packs=tuple((start, size) for start, size in arguments["packs"]),
            compare=tuple((key_, start, size) for key_, start, size in arguments["compare"]),
            staged_total=arguments["staged_total"],
            block_bytes=self._config.flush_block_bytes,
            threads=self._config.flush_threads,
            rate_bytes_s=self._config.flush_rate_bytes_s // max(1, arguments["num_ranks"]),
            deadline_s=arguments["deadline_s"],
            ring_bytes=arguments["ring_bytes"],
            beside_training=arguments["beside_training"],
        )
        mapping = self._mapped(arguments["arena_id"], arena_fd, arguments["arena_bytes"])
        with closing(RankControl.attach(os.dup(control_fd), os.dup(wake_fd))) as control:
            save_seq = arguments["save_seq"]
            control.begin_flush(save_seq)
            word = _staged_word(control, save_seq)
            result = flush_rank(
                place,
                job,
                mapping.view,
                word,
                cancelled,
                make_room=lambda exc: self._make_room(arguments, exc),
                flushed=lambda done: control.advance_flushed(save_seq, done),
                pacer=self._pacer,
            )
        return {
            "packs": [msgspec.to_builtins(record) for record in result.packs],
            "compare": result.compare,
            "timings": {
                "allocate_s": result.allocate_s,
                "write_s": result.write_s,
                "sync_s": result.sync_s,
            },
        }

    def _check_memory(self, arguments: dict[str, Any], fds: list[int]) -> bool:
        mapping = self._mapped(arguments["arena_id"], fds[0], arguments["arena_bytes"])
        packs = [(start, size) for start, size in arguments["packs"]]
        if arguments.get("block_crcs") is not None:  # of a checkpoint that is on no storage
            return packs_match(arguments["block_crcs"], packs, mapping.view)
        return arena_matches(self._open(), CommitId(*arguments["commit"]), arguments["rank"], packs, mapping.view)

    def _put_documents(self, arguments: dict[str, Any], fds: list[int]) -> None:
        self._put(fds[0], self._documents.bundle(self._open(), self._config, arguments))

    def _put(self, fd: int, data: bytes) -> None:
        """Fill memory of the agent from its beginning."""
        with Mapping(fd, len(data)) as mapping:
            mapping.view[:] = data

    def _observing(self, operation: Callable[..., Any]) -> Callable[[dict[str, Any], list[int]], Any]:
        return lambda arguments, _: operation(self._open_all(), self._config, arguments, self.events, self._observer)

    def _redundancy(self, operation: str, arguments: dict[str, Any]) -> Any:
        """Carry out one of `redundancy_calls`, which nodes without disks of their own need nothing of."""
        from safehold.agent.redundancy_calls import RedundancyCalls

        with self._lock:
            if self._redundancy_calls is None:
                self._redundancy_calls = RedundancyCalls(
                    joined=self._open_all,
                    config=lambda: self._config,
                    pacer=lambda: self._pacer,
                    make_room=self._room_for_redundancy,
                    events=self.events,
                )
        return self._redundancy_calls.operations[operation](arguments)

    def _room_for_redundancy(self, arguments: dict[str, Any], num_bytes: int) -> bool:
        given = {"packs": [(0, num_bytes)], "num_ranks": 1, "given_up": [], **arguments}
        return self._make_room(given, StorageFullError(f"redundancy needs {num_bytes} bytes"))

    def _make_room(self, arguments: dict[str, Any], exc: StorageFullError) -> bool:
        """Delete what no keep rule protects; True if that freed something, so that the allocation is tried again."""
        with self._room_lock:
            self.events.emit("make_room", "started", error=str(exc))
            arguments = {**arguments, "quota": "[EDQUOT]" in exc.message}
            return maintenance.make_room(self._open_all(), self._config, arguments, self.events, self._observer)


def superseded(tier: Tier, commit: list[int]) -> CheckpointError | None:
    """A newer incarnation sweeps what this one writes: where that is why storage failed, it is the first cause."""
    step, incarnation, _ = commit
    try:
        ledger.check_newest(tier, incarnation)
    except SupersededError as exc:
        exc.step = step
        return exc
    except CheckpointError:
        return None
    return None


def _hang_up(tier: JoinedTier) -> None:
    """Close the ways to the other nodes, which belong to a start of the job that is over."""
    from safehold.agent import joined_flash

    joined_flash.close(tier)


def _staged_word(control: RankControl, save_seq: int) -> StagedWord:
    def wait(seen: int, timeout_s: float) -> None:
        if control.wait_staged(save_seq, seen, timeout_s) is None:
            time.sleep(min(timeout_s, NOT_BEGUN_POLL_S))

    return StagedWord(lambda: control.staged_of(save_seq) or 0, wait)


def _read_large(fd: int) -> bytes:
    """Read a call that was too long for a message."""
    with os.fdopen(fd, "rb") as file:
        file.seek(0)
        return file.read()


def _close(fd: int) -> None:
    try:
        os.close(fd)
    except OSError:
        pass


def main(argv: list[str] | None = None) -> int:
    """Entry of `python -m safehold.agent.flusher --fd N`."""
    parser = argparse.ArgumentParser(prog="safehold.agent.flusher")
    parser.add_argument("--fd", type=int, required=True, help="socket to the agent")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    process = FlusherProcess(Channel.from_fd(options.fd))
    process.events.subscribe(EventLog())
    install_listener(process.events)
    process.serve()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
