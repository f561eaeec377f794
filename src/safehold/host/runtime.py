"""Where the agents of this host keep their lock, socket, note and log.

Invariants: every directory made or used here belongs to this user, is closed to all others and is no symbolic link;
an agent runs exactly as long as it holds its slot's lock, so a note without a lock means a dead agent. Nothing here
is needed after the host's end.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import stat
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import blake3
import msgspec

from safehold.errors import AgentUnavailableError, ConfigurationError

_INFO_LIMIT_BYTES = 64 << 10
LOG_LIMIT_BYTES = 1 << 20


def _private_directory(path: Path, *, parents: bool = False) -> Path:
    """Make a directory of this user's own, or check that it is one."""
    try:
        if parents and not path.parent.is_dir():
            _make_directory(path.parent, parents=True)
        _make_directory(path)
        found = path.lstat()
    except OSError as exc:
        raise ConfigurationError(
            f"the runtime directory cannot be made: {exc.strerror}",
            path=str(path),
            hint="set SAFEHOLD_RUNTIME_DIR to a directory on this host that is yours",
        ) from exc
    if not stat.S_ISDIR(found.st_mode):
        problem = "is no directory (symbolic links are not followed)"
    elif found.st_uid != os.getuid():
        problem = f"belongs to user {found.st_uid}, not to {os.getuid()}"
    elif stat.S_IMODE(found.st_mode) & 0o077:
        problem = f"is open to others (mode {stat.S_IMODE(found.st_mode):04o})"
    else:
        return path
    hint = "it must belong to you and have mode 0700"
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
        hint = f"'chmod 700 {shlex.quote(str(path))}'"
    raise ConfigurationError(
        f"the runtime directory {problem}", path=str(path), hint=f"{hint}; or set SAFEHOLD_RUNTIME_DIR to another"
    )


def _make_directory(path: Path, *, parents: bool = False) -> None:
    """Make a directory for this user only, whatever the umask; it may exist."""
    if parents and not path.parent.is_dir():
        _make_directory(path.parent, parents=True)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and found.st_mode & 0o700 != 0o700:
        path.chmod(0o700)  # made by us or by another process of ours, under an umask that took the owner's bits too


def _open_file(path: Path, flags: int) -> int:
    """Open a file of this user's own, made readable and writable for nobody else, whatever the umask."""
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, 0o600)
    except PermissionError:
        if stat.S_ISLNK(path.lstat().st_mode):
            raise
        path.chmod(0o600)  # made under an umask that took the owner's bits too
        fd = os.open(path, flags, 0o600)
    if stat.S_IMODE(os.fstat(fd).st_mode) & 0o700 != 0o600:
        os.fchmod(fd, 0o600)
    return fd


@contextlib.contextmanager
def _translated(doing: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise AgentUnavailableError(
            f"{doing} failed: {exc.strerror or exc}",
            path=str(path),
            hint="the runtime directory must be there and have room; or set SAFEHOLD_RUNTIME_DIR to another",
        ) from exc


def runtime_dir(env: Mapping[str, str] | None = None) -> Path:
    """Return the directory for the agents of this user on this host, made if need be.

    It is `$SAFEHOLD_RUNTIME_DIR`, else `$XDG_RUNTIME_DIR/safehold` where that exists, else `/tmp/safehold-<uid>`.
    Processes that shall find each other's agents must agree on it.

    Args:
        env: The environment; None: that of this process.

    Raises:
        ConfigurationError: The directory belongs to somebody else, is open to others, or cannot be made.
    """
    env = os.environ if env is None else env
    if chosen := env.get("SAFEHOLD_RUNTIME_DIR"):
        path = Path(os.path.abspath(chosen))
        return _private_directory(path, parents=True)
    if (session := env.get("XDG_RUNTIME_DIR")) and Path(session).is_dir():
        return _private_directory(Path(os.path.abspath(session)) / "safehold")
    return _private_directory(Path("/tmp") / f"safehold-{os.getuid()}")


def run_key(run_directory: str | os.PathLike[str]) -> str:
    """Return 16 hex digits that name a run directory on this host: equal for all spellings of one path, whether it
    exists or not.
    """
    text = os.fspath(run_directory)
    scheme, found, rest = text.partition("://")
    if found and scheme.lower() == "file":
        text = urllib.parse.unquote(urllib.parse.urlsplit(text).path)
    elif found:
        return blake3.blake3(f"{scheme.lower()}://{rest.rstrip('/')}".encode()).hexdigest()[:16]
    return blake3.blake3(os.fsencode(os.path.realpath(text))).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentInfo:
    """The note that an agent leaves for people and tools; advisory, the lock is what counts.

    Attributes:
        pid: Its process.
        start_ticks: When that process started (`process.start_ticks`).
        version: safehold's version that it runs.
        run: The run directory.
        started_s: Wall time of its start.
        extra: Whatever else is worth knowing.
    """

    pid: int
    start_ticks: int
    version: str
    run: str
    started_s: float
    extra: dict[str, str] = field(default_factory=dict)


class SlotLock:
    """Held by the one agent of a slot; released by `release` or by the end of the process."""

    def __init__(self, fd: int) -> None:
        """Take ownership of a descriptor of the lock's file."""
        self._fd = fd

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def fileno(self) -> int:
        """The descriptor; -1 once released."""
        return self._fd

    def release(self) -> None:
        """Let the next agent in."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.release()


@dataclass(frozen=True, slots=True)
class RunSlot:
    """The place of one run's agent on this host.

    Attributes:
        directory: `<runtime directory>/<run key>`; `open_slot` makes and checks it.
    """

    directory: Path

    @property
    def key(self) -> str:
        """The run key."""
        return self.directory.name

    @property
    def lock_path(self) -> Path:
        """Locked (`flock`) by the agent as long as it lives."""
        return self.directory / "agent.lock"

    @property
    def socket_path(self) -> Path:
        """Where the agent listens."""
        return self.directory / "agent.sock"

    @property
    def info_path(self) -> Path:
        """The agent's note."""
        return self.directory / "agent.json"

    @property
    def log_path(self) -> Path:
        """Standard output and error of the agent and its flushers."""
        return self.directory / "agent.log"

    def lock(self, timeout_s: float = 2.0) -> SlotLock | None:
        """Become the agent of this slot; None if another one is, and stayed so until the time was over.

        A `timeout_s` of a second or two outlasts the moments in which `is_locked` looks.

        Raises:
            AgentUnavailableError: The lock's file cannot be made, opened or locked.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            with _translated("locking an agent's slot", self.lock_path):
                held = SlotLock(_open_file(self.lock_path, os.O_RDWR | os.O_CREAT))
                try:
                    fcntl.flock(held.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if self._is_current(held.fileno()):
                        return held
                except BlockingIOError:
                    pass
                except OSError:
                    held.release()
                    raise
            held.release()
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.02)

    def _is_current(self, fd: int) -> bool:
        """Whether the locked file is still the one at the path (`remove` may have come between)."""
        try:
            at_path = os.stat(self.lock_path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(os.fstat(fd), at_path)

    def is_locked(self) -> bool:
        """Whether an agent lives in this slot."""
        try:
            fd = os.open(self.lock_path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    def write_info(self, info: AgentInfo) -> None:
        """Leave the note, atomically; where that fails (no room, say) there is none, since nothing depends on it."""
        with contextlib.suppress(OSError):
            self._put(self.info_path, msgspec.json.encode(info))

    def _put(self, path: Path, data: bytes) -> None:
        temporary = self.directory / f".{path.name}.{os.getpid()}"
        try:
            temporary.write_bytes(data)
            temporary.rename(path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise

    def read_info(self) -> AgentInfo | None:
        """Return the note; None if there is none or it cannot be read as one (it is advisory)."""
        try:
            fd = os.open(self.info_path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None
        with os.fdopen(fd, "rb") as file:
            data = file.read(_INFO_LIMIT_BYTES)
        try:
            return msgspec.json.decode(data, type=AgentInfo)
        except msgspec.DecodeError:
            return None

    def open_log(self) -> int:
        """Open the log for appending, trimmed if there is room for that, and return the descriptor.

        Raises:
            AgentUnavailableError: It cannot be made or opened.
        """
        with contextlib.suppress(OSError):
            self.trim_log()
        with _translated("opening the agent's log", self.log_path):
            return _open_file(self.log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def trim_log(self, limit_bytes: int = LOG_LIMIT_BYTES) -> bool:
        """Move what the log has to `agent.log.1` if it is longer than `limit_bytes`; return whether it was.

        To be called now and then: processes write to it through descriptors that they inherited, so the file stays
        and is emptied.
        """
        try:
            fd = os.open(self.log_path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            size = os.fstat(fd).st_size
            if size <= limit_bytes:
                return False
            kept = os.pread(fd, limit_bytes, size - limit_bytes)
            self._put(self.directory / "agent.log.1", kept)
            os.ftruncate(fd, 0)
        finally:
            os.close(fd)
        return True

    def tail_log(self, limit_bytes: int = 4096) -> str:
        """Return the end of the log, for the message that tells why an agent ended."""
        try:
            with open(self.log_path, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - limit_bytes))
                return file.read(limit_bytes).decode(errors="replace")
        except FileNotFoundError:
            return ""

    def remove(self) -> bool:
        """Remove what a dead agent left; return False, and leave all, if an agent lives here."""
        held = self.lock(timeout_s=0)
        if held is None:
            return False
        with held:
            for path in sorted(self.directory.iterdir(), key=lambda entry: entry == self.lock_path):
                path.unlink(missing_ok=True)
            try:
                self.directory.rmdir()
            except OSError:
                pass  # somebody is moving in
        return True


def open_slot(run_directory: str | os.PathLike[str], *, directory: Path | None = None) -> RunSlot:
    """Return the slot of a run on this host; its directory is made and checked.

    Args:
        run_directory: Path or URL of the run directory.
        directory: The runtime directory; None: `runtime_dir()`.
    """
    base = runtime_dir() if directory is None else directory
    return RunSlot(_private_directory(base / run_key(run_directory)))


def list_slots(directory: Path | None = None) -> list[RunSlot]:
    """Return all slots of this user on this host, sorted by key, with or without a living agent."""
    base = runtime_dir() if directory is None else directory
    return [
        RunSlot(entry)
        for entry in sorted(base.iterdir())
        if len(entry.name) == 16 and not set(entry.name) - set("0123456789abcdef") and entry.is_dir()
    ]
