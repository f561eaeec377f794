"""Frames and descriptors over Unix sockets: whole or not at all, and the end is noticed."""

import array
import os
import signal
import socket
import struct
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from safehold.errors import ConfigurationError
from safehold.host import sockets
from safehold.host.sockets import Channel, ChannelClosed, ChannelError


@pytest.fixture
def pair():
    one, other = Channel.pair()
    yield one, other
    one.close()
    other.close()


def raw_pair() -> tuple[socket.socket, Channel]:
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return mine, Channel(theirs)


def num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


@settings(max_examples=30, deadline=None)
@given(frames=st.lists(st.binary(max_size=3000), max_size=8))
def test_frames_arrive_whole_and_in_order(frames):
    one, other = Channel.pair()
    with one, other:
        for frame in frames:
            one.send(frame)
        assert [other.recv(1)[0] for _ in frames] == frames


def test_a_large_frame_passes_while_the_receiver_reads(pair):
    one, other = pair
    data = os.urandom(1 << 20) * 20
    sender = threading.Thread(target=one.send, args=(data,))
    sender.start()
    assert other.recv(10)[0] == data
    sender.join()


def test_descriptors_travel_with_their_frame(pair):
    one, other = pair
    read_end, write_end = os.pipe()
    one.send(b"before")
    one.send(b"with", [write_end])
    one.send(b"after")
    assert other.recv(1) == (b"before", [])
    data, fds = other.recv(1)
    assert data == b"with" and len(fds) == 1
    assert not os.get_inheritable(fds[0])
    os.write(fds[0], b"x")
    assert os.read(read_end, 1) == b"x"
    assert other.recv(1) == (b"after", [])
    for fd in (read_end, write_end, *fds):
        os.close(fd)


def test_descriptors_that_nobody_expects_are_closed(pair):
    one, other = pair
    read_end, write_end = os.pipe()
    before = num_fds()
    one.send(b"with", [write_end])
    with pytest.raises(ChannelError, match="file descriptors"):
        other.recv(1, max_fds=0)
    assert num_fds() == before
    os.close(read_end)
    os.close(write_end)


def test_descriptors_in_the_middle_of_a_frame_are_closed():
    mine, other = raw_pair()
    read_end, write_end = os.pipe()
    before = num_fds()
    mine.send(struct.pack("<Q", 4))
    passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [write_end]))]
    mine.sendmsg([b"abcd"], passed)
    assert other.recv(1) == (b"abcd", [])
    assert num_fds() == before
    os.close(read_end)
    os.close(write_end)
    mine.close()
    other.close()


def test_a_frame_longer_than_the_limit_is_refused_before_memory_is_taken():
    mine, other = raw_pair()
    mine.send(struct.pack("<Q", 1 << 60))
    with pytest.raises(ChannelError, match="announced"):
        other.recv(1)
    with pytest.raises(ChannelClosed):
        other.recv(1)
    mine.close()
    other.close()


def test_sending_too_much_is_refused(pair):
    one, _ = pair
    with pytest.raises(ConfigurationError, match="longer"):
        one.send(bytearray(sockets.MAX_FRAME_BYTES + 1))
    with pytest.raises(ConfigurationError, match="descriptors"):
        one.send(b"", [0] * 9)


def ctrl_c(*_):
    raise KeyboardInterrupt


def test_after_ctrl_c_in_a_frame_no_other_one_is_taken_for_its_rest(pair, monkeypatch):
    one, other = pair
    monkeypatch.setattr(sockets, "_wait", ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        one.send(bytes(4 << 20))
    monkeypatch.undo()
    with pytest.raises(ChannelClosed):
        one.send(b"next")
    with pytest.raises(ChannelClosed):
        other.recv(1)


def test_ctrl_c_before_a_frame_was_begun_closes_nothing(pair, monkeypatch):
    class Full:
        def sendmsg(self, *_):
            raise BlockingIOError

    one, other = pair
    with monkeypatch.context() as patch:
        patch.setattr(sockets, "_wait", ctrl_c)
        patch.setattr(one, "_sock", Full())
        with pytest.raises(KeyboardInterrupt):
            one.send(b"lost")
    one.send(b"next")
    assert other.recv(1)[0] == b"next"


def test_a_timeout_in_the_middle_of_a_frame_loses_nothing():
    mine, other = raw_pair()
    frame = struct.pack("<Q", 6) + b"abcdef"
    for cut in range(len(frame)):
        mine.send(frame[:cut])
        with pytest.raises(TimeoutError):
            other.recv(0.001)
        mine.send(frame[cut:])
        assert other.recv(1)[0] == b"abcdef"
    mine.close()
    other.close()


@pytest.mark.parametrize("timeout_s", [0.0, -0.5, -1.0])
def test_a_deadline_that_has_passed_is_no_wait(pair, timeout_s):
    one, other = pair
    with pytest.raises(TimeoutError):
        one.recv(timeout_s=timeout_s)
    one.send(b"there is room", timeout_s=timeout_s)
    assert other.recv(timeout_s=5) == (b"there is room", [])


def test_the_peer_that_leaves_is_noticed(pair):
    one, other = pair
    one.send(b"last word")
    one.close()
    assert other.recv(1)[0] == b"last word"
    with pytest.raises(ChannelClosed):
        other.recv(1)
    with pytest.raises(ChannelClosed):
        other.send(b"too late")


def test_leaving_in_the_middle_of_a_frame_is_no_frame():
    mine, other = raw_pair()
    mine.send(struct.pack("<Q", 6) + b"abc")
    mine.close()
    with pytest.raises(ChannelClosed, match="middle"):
        other.recv(1)
    other.close()


def test_close_wakes_a_receiver_in_another_thread(pair):
    one, _ = pair
    seen = []

    def receive():
        try:
            one.recv(None)
        except ChannelClosed as exc:
            seen.append(exc)

    thread = threading.Thread(target=receive)
    thread.start()
    time.sleep(0.05)
    one.close()
    thread.join(5)
    assert len(seen) == 1


def test_a_peer_that_does_not_read_costs_a_deadline_not_a_hang(pair):
    one, _ = pair
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        one.send(bytes(4 << 20), timeout_s=0.1)
    assert time.monotonic() - begun < 5
    assert one.closed  # half a frame is out: nothing sensible can follow


def test_many_senders_do_not_mix_their_frames(pair):
    one, other = pair
    threads = [
        threading.Thread(target=lambda b=b: [one.send(bytes([b]) * 70_000) for _ in range(20)]) for b in range(4)
    ]
    for thread in threads:
        thread.start()
    for _ in range(80):
        data = other.recv(10)[0]
        assert len(data) == 70_000 and len(set(data)) == 1
    for thread in threads:
        thread.join()


def test_listen_connect_and_credentials(tmp_path):
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    path = directory / "agent.sock"
    with sockets.listen(path) as listener:
        assert path.stat().st_mode & 0o777 == 0o600
        with sockets.connect(path) as client, listener.accept(1) as server:
            assert server.peer_credentials().pid == os.getpid()
            assert client.peer_credentials().uid == os.getuid()
            client.send(b"hello")
            assert server.recv(1)[0] == b"hello"
        with pytest.raises(TimeoutError):
            listener.accept(0.01)
    assert not path.exists()
    with pytest.raises(ChannelClosed, match="nobody listens"):
        sockets.connect(path)


def test_a_socket_of_a_dead_process_is_replaced_and_a_file_is_not(tmp_path):
    tmp_path.chmod(0o700)
    path = tmp_path / "agent.sock"
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(path))
    dead.close()
    with pytest.raises(ChannelClosed):
        sockets.connect(path)
    sockets.listen(path).close()
    path.write_text("mine")
    with pytest.raises(ConfigurationError, match="in the way"):
        sockets.listen(path)
    assert path.read_text() == "mine"


def test_a_directory_open_to_others_is_refused(tmp_path):
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigurationError, match="0700"):
        sockets.listen(tmp_path / "s")


def test_closing_leaves_a_successors_socket_alone(tmp_path):
    tmp_path.chmod(0o700)
    path = tmp_path / "s"
    first = sockets.listen(path)
    second = sockets.listen(path)
    first.close()
    assert path.exists()
    second.close()


@pytest.mark.parametrize("length", [90, 100, 140, 200])
def test_paths_of_any_length(tmp_path, length):
    directory = tmp_path
    while len(str(directory)) < length:
        directory = directory / ("x" * min(60, max(1, length - len(str(directory)) - 1)))
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o700)
    path = directory / "agent.sock"
    with sockets.listen(path) as listener, sockets.connect(path) as client, listener.accept(1) as server:
        client.send(b"far")
        assert server.recv(1)[0] == b"far"


def test_close_ends_a_waiting_accept(tmp_path):
    tmp_path.chmod(0o700)
    listener = sockets.listen(tmp_path / "s")
    seen = []

    def accept():
        try:
            listener.accept(None)
        except ChannelClosed as exc:
            seen.append(exc)

    thread = threading.Thread(target=accept)
    thread.start()
    time.sleep(0.05)
    listener.close()
    thread.join(5)
    assert len(seen) == 1


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_does_not_keep_the_connection_open(pair):
    one, other = pair
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    try:
        one.close()
        with pytest.raises(ChannelClosed):
            other.recv(5)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_full_queue_is_waited_for_and_then_given_up(tmp_path):
    tmp_path.chmod(0o700)
    path = Path(tmp_path / "s")
    with sockets.listen(path, backlog=0):
        channels = []
        with pytest.raises(TimeoutError):
            for _ in range(10):
                channels.append(sockets.connect(path, timeout_s=0.05))
        for channel in channels:
            channel.close()
