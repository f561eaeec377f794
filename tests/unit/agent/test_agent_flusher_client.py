"""The agent's hold on its flusher, against small scripted children: what they do wrong, and that every call ends exactly once."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from agent_fakes import FakeClock, Work

from safehold.agent import flusher_client
from safehold.agent.flusher_client import INLINE_BYTES, Flusher
from safehold.errors import AgentUnavailableError, CheckpointError, DeadlineError, StorageError, StorageFullError
from safehold.events import Event, EventStream
from safehold.host.process import Process

HEAD = """
import array, os, socket, struct, sys, time
sock = socket.socket(fileno=int(sys.argv[1]))
def read(size):
    data = b""
    while len(data) < size:
        more, anc, _, _ = sock.recvmsg(size - len(data), 1024)
        for _, _, payload in anc:
            fds.extend(array.array("i", payload))
        if not more: os._exit(0)
        data += more
    return data
fds = []
def recv():
    (size,) = struct.unpack("<Q", read(8))
    return read(size)
def send(data, passed=()):
    head = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", passed))] if passed else []
    sock.sendmsg([struct.pack("<Q", len(data)) + data], head)
recv()  # the start
"""
ECHO = """
import msgspec
while True:
    data = recv()
    if not data:
        fd = fds.pop()
        data = os.pread(fd, os.fstat(fd).st_size, 0)
    call = msgspec.msgpack.decode(data)
    value = {"op": call["op"], "args": call["args"], "pid": os.getpid()}
    if call["op"] == "record":
        value["args"] = [blob[:8] for blob in call["args"]["objects"]]
    send(msgspec.msgpack.encode({"id": call["id"], "value": value, "error": None}))
"""
CHILDREN = {
    "echo": ECHO,
    "dies at once": "os._exit(3)",
    "dies in a call": "recv(); os._exit(3)",
    "hangs": "time.sleep(100)",
    "nonsense": "recv(); send(b'garbage'); time.sleep(100)",
    "no id": "recv(); send(bytes.fromhex('81a576616c756501')); time.sleep(100)",  # {"value": 1}
    "an id that is no number": "recv(); send(bytes.fromhex('82a26964a16ea576616c756501')); time.sleep(100)",
    "an error that is none": "recv(); send(bytes.fromhex('82a2696401a56572726f7201')); time.sleep(100)",
    "an error": "recv(); send(bytes.fromhex('82a2696401a56572726f7281a7') + b'message' + b'\\xa1x'); time.sleep(100)",
    "half a frame": "recv(); sock.send(struct.pack('<Q', 100) + b'x'); os._exit(0)",
    "too long": "recv(); sock.send(struct.pack('<Q', 1 << 40)); time.sleep(100)",
    "unknown ids first": "recv(); [send(bytes.fromhex('81a26964') + bytes([n])) for n in (9, 8, 1)]; time.sleep(100)",
    "twice": "recv(); send(bytes.fromhex('81a2696401')); send(bytes.fromhex('81a2696401')); time.sleep(100)",
    "passes descriptors": "recv(); send(bytes.fromhex('81a2696401'), [0, 0, 0]); time.sleep(100)",
}


class Bench:
    """A flusher's client whose children are the test's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.work = FakeClock(), Work()
        self.events: list[Event] = []
        events = EventStream("agent")
        events.subscribe(self.events.append)
        self.next: list[str] = []
        self.children: list[Process] = []
        monkeypatch.setattr(flusher_client, "spawn", self._spawn)
        self.flusher = Flusher(
            "/run", {"flush_nice": 0}, post=self.work.post, clock=self.clock, events=events, log_fd=None
        )
        self.answers: dict[int, list[tuple[Any, CheckpointError | None]]] = {}

    def _spawn(self, module: str, arguments: list[str], *, fds: list[int], **more: Any) -> Process:
        script = CHILDREN[self.next.pop(0) if self.next else "echo"]
        command = [sys.executable, "-S", "-c", HEAD + script, arguments[1]]
        if script is ECHO:
            command.remove("-S")
        child = subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL)
        child.returncode = 0  # reaped by `Process`
        self.children.append(Process(child.pid, child=True))
        return Process(child.pid, child=True)

    def call(
        self, operation: str = "find", timeout_s: float = 100.0, fds: tuple[int, ...] = (), **arguments: Any
    ) -> int:
        answers: list[tuple[Any, CheckpointError | None]] = []
        number = self.flusher.call(
            operation,
            arguments,
            lambda value, error: answers.append((value, error)),
            timeout_s=timeout_s,
            fds=fds,
        )
        self.answers[number] = answers
        return number

    def wait(self, number: int) -> tuple[Any, CheckpointError | None]:
        self.work.run_until(lambda: self.answers[number])
        return self.answers[number][0]

    def check(self) -> None:
        """Every call has ended once."""
        time.sleep(0.02)
        self.work.run()
        assert all(len(answers) == 1 for answers in self.answers.values()), self.answers


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    bench = Bench(monkeypatch)
    yield bench
    for child in bench.children:
        child.kill()
    bench.flusher.close()


def until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5.0
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_calls_are_answered_each_with_its_own(bench: Bench) -> None:
    numbers = [bench.call("find", step=number) for number in range(20)]
    for number, step in zip(numbers, range(20), strict=True):
        value, error = bench.wait(number)
        assert error is None and value["args"] == {"step": step}
    bench.check()
    assert bench.flusher.num_open == 0 and bench.flusher.replaced == 0 and len(bench.children) == 1


def test_what_is_long_goes_beside_the_message(bench: Bench) -> None:
    blob = os.urandom(1 << 20)
    number = bench.call("record", objects=[blob] * 70, fds=(0, 1))
    value, error = bench.wait(number)
    assert error is None and value["args"] == [blob[:8]] * 70


def test_the_real_flusher_reads_it_there() -> None:
    import msgspec

    from safehold.agent.flusher import FlusherProcess
    from safehold.host.sockets import Channel

    ours, theirs = Channel.pair()
    process = FlusherProcess(theirs)
    seen: list[int] = []
    process._operations["measure"] = lambda arguments, fds: seen.append(len(arguments["blob"])) or len(fds)
    with ours, theirs:
        import threading

        thread = threading.Thread(target=process.serve, daemon=True)
        thread.start()
        message = {"id": 7, "op": "measure", "args": {"blob": bytes(INLINE_BYTES * 2)}}
        flusher_client._send(ours, message, (0, 1))
        reply = msgspec.msgpack.decode(ours.recv(timeout_s=5.0)[0])
        assert reply == {"id": 7, "value": 2, "error": None} and seen == [INLINE_BYTES * 2]
        for number in range(3000):
            process._cancelled_of((number, 1, 0))
        assert len(process._cancelled) <= 1024
        ours.close()
        thread.join(5.0)


@pytest.mark.parametrize("kind", ["dies at once", "dies in a call", "half a frame"])
def test_one_that_dies_fails_all_calls_and_is_replaced(bench: Bench, kind: str) -> None:
    bench.next = [kind]
    numbers = [bench.call(), bench.call("plan")]
    for number in numbers:
        _, error = bench.wait(number)
        assert isinstance(error, StorageError) and error.retry
    assert bench.flusher.replaced == 1
    value, error = bench.wait(bench.call("again"))
    assert error is None and value["op"] == "again"
    bench.check()
    assert not bench.children[0].is_alive() and bench.flusher.abandoned == []


@pytest.mark.parametrize("kind", ["nonsense", "no id", "an id that is no number", "an error that is none", "too long"])
def test_one_that_speaks_nonsense_is_killed_and_replaced(bench: Bench, kind: str) -> None:
    bench.next = [kind]
    _, error = bench.wait(bench.call())
    assert isinstance(error, StorageError)
    until(lambda: not bench.children[0].is_alive())
    assert bench.wait(bench.call())[1] is None
    bench.check()


@pytest.mark.parametrize("kind", ["unknown ids first", "twice", "passes descriptors"])
def test_answers_to_nothing_do_no_harm(bench: Bench, kind: str) -> None:
    bench.next = [kind]
    assert bench.wait(bench.call()) == (None, None)
    before = len(os.listdir("/proc/self/fd"))
    bench.check()
    until = time.monotonic() + 10
    while len(os.listdir("/proc/self/fd")) > before and time.monotonic() < until:
        time.sleep(0.01)
    assert len(os.listdir("/proc/self/fd")) <= before and bench.flusher.replaced == 0


def test_one_that_stalls_is_given_up_at_its_deadline_by_name(bench: Bench) -> None:
    bench.next = ["hangs"]
    slow, slower = bench.call("flush", timeout_s=10.0), bench.call("plan", timeout_s=20.0)
    assert bench.flusher.next_deadline() == bench.clock.now + 10.0
    bench.clock.now += 9.9
    bench.flusher.check_deadlines()
    assert not bench.answers[slow]
    bench.clock.now += 0.2
    bench.flusher.check_deadlines()
    for number in (slow, slower):
        [(value, error)] = bench.answers[number]
        assert value is None and isinstance(error, DeadlineError) and "flush after 10 s" in str(error)
    assert not bench.children[0].is_alive() and bench.flusher.next_deadline() is None
    assert bench.wait(bench.call())[1] is None
    bench.check()


def test_a_process_that_cannot_be_killed_is_told_to_those_who_gave_it_something(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.next = ["hangs"]
    seen: list[bool] = []
    bench.flusher.call("flush", {}, lambda value, error: seen.append(bench.flusher.may_still_run), timeout_s=1.0)
    monkeypatch.setattr(Process, "kill", lambda self, number=9: False)
    monkeypatch.setattr(flusher_client, "KILL_WAIT_S", 0.01)
    bench.clock.now += 2.0
    bench.flusher.check_deadlines()
    assert seen == [True] and not bench.flusher.may_still_run
    assert len(bench.flusher.abandoned) == 1 and not bench.flusher.reap_abandoned()
    _value, error = bench.wait(bench.call())
    assert error is None, "another one works meanwhile"
    bench.next = ["dies in a call"]
    monkeypatch.undo()
    monkeypatch.setattr(flusher_client, "spawn", bench._spawn)
    bench.children[0].kill()
    until(bench.flusher.reap_abandoned)
    bench.check()


def test_callbacks_may_call_and_may_fail(bench: Bench, capfd: pytest.CaptureFixture[str]) -> None:
    bench.next = ["dies in a call"]
    inner: list[int] = []

    def again(value: Any, error: CheckpointError | None) -> None:
        inner.append(bench.call("sweep"))
        raise ZeroDivisionError("a mistake in a callback")

    bench.flusher.call("find", {}, again, timeout_s=5.0)
    after = bench.call("plan")
    assert isinstance(bench.wait(after)[1], StorageError), "the one behind it is told all the same"
    assert bench.wait(inner[0])[1] is None
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_a_mistake_in_a_callback_is_an_answer_to_who_waits_for_it(
    bench: Bench, capfd: pytest.CaptureFixture[str]
) -> None:
    heard: list[tuple[Any, CheckpointError | None]] = []

    def mistaken(value: Any, error: CheckpointError | None) -> None:
        heard.append((value, error))
        raise ZeroDivisionError("a mistake in a callback")

    bench.flusher.call("record", {"objects": []}, mistaken, timeout_s=5.0)
    after = bench.call("plan")
    assert bench.wait(after)[1] is None, "the one behind it is answered all the same"
    (value, first), (nothing, error) = heard
    assert value["op"] == "record" and first is None and nothing is None
    assert isinstance(error, StorageError) and "record was done, and the agent failed: ZeroDivisionError" in str(error)
    assert "ZeroDivisionError: a mistake" in capfd.readouterr().err
    assert bench.flusher.num_open == 0 and bench.flusher.replaced == 0


def test_whether_the_process_was_lost_is_told_with_the_error(bench: Bench) -> None:
    seen: list[bool] = []

    def note(value: Any, error: CheckpointError | None) -> None:
        seen.append(bench.flusher.lost)

    bench.next = ["an error", "dies in a call"]
    for _ in range(2):
        number = len(seen) + 1
        bench.flusher.call("publish", {}, note, timeout_s=5.0)
        bench.work.run_until(lambda number=number: len(seen) == number)
        bench.flusher.close()
    assert seen == [False, True] and not bench.flusher.lost


def test_none_can_be_started(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def spawn(*args: Any, **more: Any) -> Process:
        raise AgentUnavailableError("no processes left")

    monkeypatch.setattr(flusher_client, "spawn", spawn)
    before = len(os.listdir("/proc/self/fd"))
    number = bench.call()
    [(_value, error)] = bench.answers[number]
    assert isinstance(error, StorageError) and "no processes left" in str(error)
    assert len(os.listdir("/proc/self/fd")) == before
    bench.flusher.configure({})
    bench.flusher.forget(3)


def test_errors_come_as_they_were_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    error = StorageFullError("no space", path="/x", hint="delete something")
    import msgspec

    data = msgspec.msgpack.encode({"id": 4, "value": None, "error": error.to_wire()})
    number, value, found = flusher_client._parse(data)
    assert number == 4 and value is None and isinstance(found, StorageFullError) and str(found) == str(error)


def test_configured_and_closed(bench: Bench) -> None:
    bench.wait(bench.call())
    bench.flusher.configure({"flush_nice": 3})
    bench.flusher.forget(5)
    pid = bench.flusher.pid
    assert pid is not None and bench.wait(bench.call())[0]["pid"] == pid
    bench.flusher.close()
    assert not bench.children[0].is_alive() and bench.flusher.pid is None
    assert [event.stage for event in bench.events] == ["started"]
