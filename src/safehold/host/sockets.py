"""Frames and file descriptors over Unix sockets.

Invariants: a frame arrives whole or not at all; nothing longer than `MAX_FRAME_BYTES` is accepted or sent; file
descriptors travel with the first byte of their frame, arrive close-on-exec, and are closed if nobody takes them;
every wait has a deadline unless the caller passes None. The end of the stream is how the death of a peer is noticed,
so a forked child closes its copies at once. What the frames mean is not known here.
"""

from __future__ import annotations

import array
import errno
import os
import select
import socket
import stat
import struct
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from safehold.errors import ConfigurationError

MAX_FRAME_BYTES = 64 << 20
MAX_FDS = 8
_HEADER = struct.Struct("<Q")
_SUN_PATH_BYTES = 100
_CHUNK_BYTES = 1 << 20
_SO_PEERPIDFD = 77  # Python's socket module does not name it


class ChannelClosed(Exception):
    """The other end is gone, or this end was closed."""


class ChannelError(ChannelClosed):
    """The other end broke the protocol; the channel is closed."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end, as the kernel knows it at the time of `connect`."""

    pid: int
    uid: int
    gid: int


_live: weakref.WeakSet[Channel | Listener] = weakref.WeakSet()


def _close_in_child() -> None:
    """Close copies that a fork made: else a data-loading worker would keep a dead trainer's connection open."""
    for entry in list(_live):
        entry._abandon()


os.register_at_fork(after_in_child=_close_in_child)


def _deadline(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else time.monotonic() + timeout_s


def _acquire(lock: threading.Lock, timeout_s: float | None, doing: str) -> None:
    # Not below 0: a lock waits for ever where it is told -1.
    if not lock.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s)):
        raise TimeoutError(f"{doing} did not finish in time")


def _wait(sock: socket.socket, mask: int, deadline: float | None, doing: str) -> None:
    poller = select.poll()
    poller.register(sock, mask)
    left_ms = None if deadline is None else max(0.0, (deadline - time.monotonic()) * 1000)
    if not poller.poll(left_ms):
        raise TimeoutError(f"{doing} did not finish in time")


class Channel:
    """One end of a connection that carries frames.

    Any number of threads may send; one thread at a time receives, others wait for it. `close` may be called from any
    thread and wakes all.
    """

    def __init__(self, sock: socket.socket) -> None:
        """Take ownership of a connected `AF_UNIX` stream socket."""
        sock.setblocking(False)
        self._sock = sock
        self._send_lock = threading.Lock()
        self._recv_lock = threading.Lock()
        self._closed = self._sending = False
        self._head = bytearray()
        self._body: bytearray | None = None
        self._filled = 0
        self._fds: list[int] = []
        _live.add(self)

    @classmethod
    def from_fd(cls, fd: int) -> Channel:
        """Take ownership of an inherited socket."""
        os.set_inheritable(fd, False)
        return cls(socket.socket(fileno=fd))

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Return two connected ends."""
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(one), cls(other)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def fileno(self) -> int:
        """The descriptor, for a poller; -1 once closed."""
        return self._sock.fileno()

    @property
    def closed(self) -> bool:
        """Whether this end was closed (by `close`, by an error, or by the peer's leaving)."""
        return self._closed

    def peer_credentials(self) -> Peer:
        """Return process, user and group of the other end (`SO_PEERCRED`)."""
        raw = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return Peer(*struct.unpack("3i", raw))

    def peer_pidfd(self) -> int:
        """Return a pidfd of the process at the other end (`SO_PEERPIDFD`), also of one whose number is not visible here; to be closed.

        Raises:
            OSError: The kernel is older than 6.5, or the process has ended.
        """
        raw = self._sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, struct.calcsize("i"))
        return int(struct.unpack("i", raw)[0])

    def send(
        self, data: bytes | bytearray | memoryview, fds: Sequence[int] = (), *, timeout_s: float | None = 30.0
    ) -> None:
        """Send one frame.

        Args:
            data: The frame; may be empty.
            fds: Descriptors to pass along; they stay open here.
            timeout_s: How long the peer may take to make room. A frame that was begun and not finished, in time or
                because this thread was interrupted, closes the channel.

        Raises:
            ChannelClosed: The peer is gone.
            TimeoutError: The peer does not read.
            ConfigurationError: The frame is longer than `MAX_FRAME_BYTES` or has more than `MAX_FDS` descriptors.
        """
        size = memoryview(data).nbytes
        if size > MAX_FRAME_BYTES:
            raise ConfigurationError(f"a message of {size} bytes is longer than {MAX_FRAME_BYTES}")
        if len(fds) > MAX_FDS:
            raise ConfigurationError(f"{len(fds)} file descriptors in one message; at most {MAX_FDS}")
        deadline = _deadline(timeout_s)
        _acquire(self._send_lock, timeout_s, "sending")
        try:
            self._send(memoryview(data).cast("B"), fds, deadline)
        except Exception:
            raise
        except BaseException:  # Ctrl-C
            if self._sending:
                self._hang_up()
            raise
        finally:
            self._sending = False
            self._send_lock.release()

    def _send(self, data: memoryview, fds: Sequence[int], deadline: float | None) -> None:
        header = memoryview(_HEADER.pack(data.nbytes))
        total = header.nbytes + data.nbytes
        sent = 0
        passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        while sent < total:
            if self._closed:
                raise ChannelClosed("the channel is closed")
            begin = max(0, sent - header.nbytes)
            parts = [header[sent:], data[begin : begin + _CHUNK_BYTES]]
            try:
                self._sending = True
                sent += self._sock.sendmsg(parts, passed if sent == 0 else [], socket.MSG_NOSIGNAL)
            except BlockingIOError:
                self._sending = sent > 0
                try:
                    _wait(self._sock, select.POLLOUT, deadline, "sending")
                except TimeoutError:
                    if sent:
                        self._hang_up()
                    raise
            except OSError as exc:
                self._hang_up()
                raise ChannelClosed(f"the other end is gone: {exc.strerror or exc}") from exc

    def recv(self, timeout_s: float | None = None, *, max_fds: int = MAX_FDS) -> tuple[bytes, list[int]]:
        """Receive one frame.

        Args:
            timeout_s: None waits until a frame or the end of the stream. After a `TimeoutError` the next call goes on
                where this one stopped.
            max_fds: More descriptors than this are closed and the channel with them.

        Returns:
            The frame and the descriptors that came with it, which the caller owns.

        Raises:
            ChannelClosed: The peer is gone; nothing more will come.
            ChannelError: The peer broke the protocol.
            TimeoutError: No whole frame came in time.
        """
        deadline = _deadline(timeout_s)
        _acquire(self._recv_lock, timeout_s, "receiving")
        try:
            self._receive(deadline, max_fds)
            assert self._body is not None
            data, fds = bytes(self._body), self._fds
            self._head, self._body, self._filled, self._fds = bytearray(), None, 0, []
            return data, fds
        except ChannelClosed:
            self._drop_fds()
            raise
        finally:
            self._recv_lock.release()

    def _receive(self, deadline: float | None, max_fds: int) -> None:
        while self._body is None or self._filled < len(self._body):
            if self._closed:
                raise ChannelClosed("the channel is closed")
            try:
                if self._body is None:
                    self._receive_header(max_fds)
                else:
                    self._receive_body(self._body)
            except BlockingIOError:
                _wait(self._sock, select.POLLIN, deadline, "receiving")
            except OSError as exc:
                self._hang_up()
                raise ChannelClosed(f"the other end is gone: {exc.strerror or exc}") from exc

    def _receive_header(self, max_fds: int) -> None:
        room = socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize)
        data, ancillary, flags, _ = self._sock.recvmsg(
            _HEADER.size - len(self._head), room, getattr(socket, "MSG_CMSG_CLOEXEC", 0x40000000)
        )
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers = array.array("i")
                numbers.frombytes(payload[: len(payload) - len(payload) % numbers.itemsize])
                self._fds.extend(numbers)
        if not data:
            self._hang_up()
            raise ChannelClosed("the other end is gone")
        if flags & socket.MSG_CTRUNC or len(self._fds) > max_fds:
            self._break(f"more than {max_fds} file descriptors came with a message")
        self._head += data
        if len(self._head) == _HEADER.size:
            (size,) = _HEADER.unpack(self._head)
            if size > MAX_FRAME_BYTES:
                self._break(f"a message of {size} bytes was announced; at most {MAX_FRAME_BYTES}")
            self._body = bytearray(size)

    def _receive_body(self, body: bytearray) -> None:
        # Plain `recv`: the kernel closes descriptors that come where none belong.
        got = self._sock.recv_into(memoryview(body)[self._filled :])
        if got == 0:
            self._hang_up()
            raise ChannelClosed("the other end left in the middle of a message")
        self._filled += got

    def _break(self, why: str) -> None:
        self._hang_up()
        raise ChannelError(why)

    def _drop_fds(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = []

    def _hang_up(self) -> None:
        """Wake everybody, this end and the other; the descriptor itself goes with `close`."""
        self._closed = True
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def close(self) -> None:
        """Close; waiting calls in other threads end with `ChannelClosed`."""
        self._hang_up()
        with self._send_lock, self._recv_lock:
            self._drop_fds()
            self._sock.close()

    def _abandon(self) -> None:
        self._closed = True
        self._sock.close()

    def __del__(self) -> None:
        self._sock.close()
        self._drop_fds()


class Listener:
    """Accepts connections of the same user (or root) at a path."""

    def __init__(self, sock: socket.socket, path: Path) -> None:
        """Take ownership of a listening socket; `listen` makes it."""
        sock.setblocking(False)
        self._sock = sock
        self.path = path
        self._inode = path.lstat().st_ino
        self._lock = threading.Lock()
        self._closed = False
        _live.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def fileno(self) -> int:
        """The descriptor, for a poller; -1 once closed."""
        return self._sock.fileno()

    def accept(self, timeout_s: float | None = None) -> Channel:
        """Wait for the next connection; those of other users are closed.

        Raises:
            ChannelClosed: The listener was closed, or the system has nothing left to accept with; then it may be asked again.
            TimeoutError: Nobody came in time.
        """
        deadline = _deadline(timeout_s)
        with self._lock:
            return self._accept(deadline)

    def _accept(self, deadline: float | None) -> Channel:
        while True:
            if self._closed:
                raise ChannelClosed("the listener is closed")
            try:
                sock, _ = self._sock.accept()
            except BlockingIOError:
                _wait(self._sock, select.POLLIN, deadline, "accepting")
                continue
            except OSError as exc:
                if exc.errno == errno.ECONNABORTED:
                    continue
                raise ChannelClosed(f"nobody can be accepted: {exc.strerror}") from exc
            channel = Channel(sock)
            if channel.peer_credentials().uid in (os.getuid(), 0):
                return channel
            channel.close()

    def close(self) -> None:
        """Stop listening and remove the path if it is still this socket's; a waiting `accept` ends."""
        if self._closed:
            return
        self._closed = True
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        try:
            if self.path.lstat().st_ino == self._inode:
                self.path.unlink()
        except FileNotFoundError:
            pass
        with self._lock:
            self._sock.close()

    def _abandon(self) -> None:
        self._closed = True
        self._sock.close()

    def __del__(self) -> None:
        self._sock.close()


class _Address:
    """A socket path of any length, for as long as the context is open (`sun_path` has 108 bytes)."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._directory: int | None = None

    def __enter__(self) -> str:
        if len(os.fsencode(self._path)) <= _SUN_PATH_BYTES:
            return str(self._path)
        if len(os.fsencode(self._path.name)) > _SUN_PATH_BYTES - 24:
            raise ConfigurationError("the name of the socket is too long", path=str(self._path))
        self._directory = os.open(self._path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        return f"/proc/self/fd/{self._directory}/{self._path.name}"

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._directory is not None:
            os.close(self._directory)


def listen(path: str | Path, *, backlog: int = 128) -> Listener:
    """Listen at `path`, readable and writable by this user only; a socket left there by a dead process is replaced.

    The caller holds whatever lock says that nobody else listens there, and made the directory (0700, see
    `host.runtime`).

    Raises:
        ConfigurationError: The directory is open to others, or something that is no socket is in the way.
    """
    path = Path(os.path.abspath(path))
    if stat.S_IMODE(path.parent.stat().st_mode) & 0o077:
        raise ConfigurationError("the directory of a socket must be closed to others (0700)", path=str(path.parent))
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ConfigurationError("something that is no socket is in the way", path=str(path))
        path.unlink()
    except FileNotFoundError:
        pass
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _Address(path) as address:
            sock.bind(address)
            os.chmod(address, 0o600)  # nobody can connect before `listen`
        sock.listen(backlog)
    except BaseException:
        sock.close()
        raise
    return Listener(sock, path)


def connect(path: str | Path, *, timeout_s: float = 5.0) -> Channel:
    """Connect to a listener of the same user (or root) at `path`.

    Raises:
        ChannelClosed: Nobody listens there, or somebody else does.
        TimeoutError: The listener's queue stayed full.
    """
    path = Path(os.path.abspath(path))
    deadline = time.monotonic() + timeout_s
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        with _Address(path) as address:
            while True:
                try:
                    sock.connect(address)
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        raise TimeoutError(f"connecting to {path} did not finish in time") from None
                    time.sleep(0.005)
    except TimeoutError:
        sock.close()
        raise
    except OSError as exc:
        sock.close()
        raise ChannelClosed(f"nobody listens at {path}: {exc.strerror or exc}") from exc
    channel = Channel(sock)
    if channel.peer_credentials().uid not in (os.getuid(), 0):
        channel.close()
        raise ChannelClosed(f"another user listens at {path}")
    return channel
