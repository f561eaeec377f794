"""Errors that say who must act.

Invariants: `CheckpointError` is never raised itself. Every class has an exit code that the command line uses, and can cross
a socket (`to_wire`, `from_wire`) without losing its words. Foreign errors are translated where they enter, `from` the original.
"""

from __future__ import annotations

from typing import Any, ClassVar

_FIELDS = ("step", "rank", "node", "tier", "path", "hint")


class CheckpointError(Exception):
    """Base of all errors of safehold; never raised itself.

    Attributes:
        message: What went wrong, one sentence without the fields below.
        step: The step of the checkpoint concerned, if one is.
        rank: The rank concerned.
        node: The node concerned.
        tier: The tier concerned (`memory`, `flash`, `remote`).
        path: The file or directory concerned.
        hint: What to do next.
        retry: Whether the same call can succeed later without anybody acting.
    """

    exit_code: ClassVar[int] = 1
    retry: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        step: int | None = None,
        rank: int | None = None,
        node: str | None = None,
        tier: str | None = None,
        path: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.step = step
        self.rank = rank
        self.node = node
        self.tier = tier
        self.path = path
        self.hint = hint

    def __str__(self) -> str:
        where = ", ".join(
            f"{name} {value}" for name in _FIELDS if name != "hint" and (value := getattr(self, name)) is not None
        )
        text = f"{self.message} ({where})" if where else self.message
        return f"{text}\n  hint: {self.hint}" if self.hint else text

    def to_wire(self) -> dict[str, Any]:
        """Return a plain dict that `from_wire` turns back into this error."""
        wire: dict[str, Any] = {"class": type(self).__name__, "message": self.message}
        for name in _FIELDS:
            if (value := getattr(self, name)) is not None:
                wire[name] = value
        return wire


class ConfigurationError(CheckpointError):
    """What the user asked for cannot be: a bad argument, a bad setting, a call at the wrong time."""

    exit_code = 2


class StateMismatchError(CheckpointError):
    """State and checkpoint, or the state of several ranks, do not fit each other."""

    exit_code = 3


class UnsupportedStateError(StateMismatchError):
    """A leaf of the state has a type that cannot be saved; its name is in the message."""


class StepNotFoundError(CheckpointError):
    """The checkpoint that was asked for does not exist, or none that exists can be used."""

    exit_code = 4


class AgentUnavailableError(CheckpointError):
    """The agent of this node could not be started, reached, or died."""

    exit_code = 5
    retry = True


class IntegrityError(CheckpointError):
    """Stored bytes are not what was written. Never retried."""

    exit_code = 6


class ChecksumError(IntegrityError):
    """Bytes do not match their checksum."""


class TornFileError(IntegrityError):
    """A file is missing, shorter or longer than it was written, or not of the expected form."""


class ManifestError(IntegrityError):
    """A manifest, plan, node record or incarnation file does not verify or contradicts another."""


class FormatVersionError(IntegrityError):
    """The checkpoint was written by a newer format version than this library can read."""


class StorageError(CheckpointError):
    """A tier refused or failed an operation; may pass."""

    exit_code = 7
    retry = True


class StorageFullError(StorageError):
    """No space, or a quota is used up."""

    exit_code = 8
    retry = False


class StorageReadOnlyError(StorageError):
    """The tier cannot be written: read-only, or no permission."""

    exit_code = 7
    retry = False


class CommitError(CheckpointError):
    """A save was not committed."""

    exit_code = 9


class CoverageError(CommitError):
    """The parts of all ranks together do not cover every leaf."""


class RankLostError(CommitError):
    """A rank died or left before its share of the save was staged."""


class RankInterruptedError(RankLostError):
    """A rank was interrupted (Ctrl-C), or its program ended, in the middle of a call."""

    exit_code = 130


class SupersededError(CommitError):
    """A newer incarnation owns the run; what this one writes is not believed."""


class SkippedError(CommitError):
    """The save was skipped or replaced by the overlap policy."""


class DeadlineError(CommitError):
    """Something did not finish in time; the message names what and who is late."""

    exit_code = 10
    retry = True


def _all_classes() -> dict[str, type[CheckpointError]]:
    found: dict[str, type[CheckpointError]] = {}
    todo: list[type[CheckpointError]] = [CheckpointError]
    while todo:
        cls = todo.pop()
        for sub in cls.__subclasses__():
            if sub.__module__ == __name__:
                found[sub.__name__] = sub
            todo.append(sub)
    return found


_CLASSES = _all_classes()


def from_wire(wire: dict[str, Any]) -> CheckpointError:
    """Rebuild an error that `to_wire` made; unknown classes become `CommitError`."""
    cls = _CLASSES.get(str(wire.get("class")), CommitError)
    fields: dict[str, Any] = {name: wire[name] for name in _FIELDS if name in wire}
    return cls(str(wire.get("message", "unknown error")), **fields)


def from_interrupt(exc: BaseException, *, rank: int, step: int | None = None) -> RankInterruptedError:
    """Return what the other ranks are told of what ended a call of this rank and is no error: Ctrl-C, or the program's end."""
    hint = "what was under way was given up; checkpoints that were committed before are whole"
    return RankInterruptedError(f"rank {rank} was interrupted ({type(exc).__name__})", step=step, rank=rank, hint=hint)


def from_os_error(exc: OSError, doing: str, *, tier: str | None = None, path: str | None = None) -> StorageError:
    """Translate an `OSError` met while `doing` something into the storage error that says who must act."""
    import errno

    name = errno.errorcode.get(exc.errno or 0, "unknown error")
    text = f"{doing} failed: {exc.strerror or exc} [{name}]"
    where = path if path is not None else (str(exc.filename) if exc.filename else None)
    if exc.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        hint = "free space or raise the quota; 'safehold gc RUN --grace-s 0' takes what was un-committed; checkpoints are untouched"
        return StorageFullError(text, tier=tier, path=where, hint=hint)
    if exc.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return StorageReadOnlyError(text, tier=tier, path=where, hint="check the mount and the permissions of the path")
    hint = "check the storage, then try again"
    if exc.errno in (errno.ENOENT, errno.ESTALE):
        hint = "is the run directory still where it was? it may have been moved or deleted"
    return StorageError(text, tier=tier, path=where, hint=hint)
