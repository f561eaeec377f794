"""What an object store's refusals and failures mean: foreign errors become those of `safehold.errors`.

Invariants: nothing that an error said goes into a message unread. Answers of stores hold key ids, and addresses may hold
signatures, so that only the status, the store's own code for it and the kind of a transport's failure are taken over;
the foreign error itself is not chained either. What must not live here: retries, requests.
"""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass
from typing import Literal

from safehold.errors import (
    CheckpointError,
    ConfigurationError,
    StorageError,
    StorageFullError,
    StorageReadOnlyError,
    TornFileError,
)

Meaning = Literal[
    "absent", "exists", "no_bucket", "refused", "replaced", "range", "full", "unsupported", "settings", "busy",
    "unreached", "unclear",
]  # fmt: skip

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(
    r"<Code>([A-Za-z0-9]{1,64})</Code>|\(code: ([A-Za-z0-9]{1,64})\)|\"(?:reason|code)\": ?\"([A-Za-z]{1,64})\""
)
_ADDRESS = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://\S+")
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "specified bucket does not exist")
_FULL = ("QuotaExceeded", "InsufficientStorage", "StorageFull", "AccountBeingFull")
_METADATA = ("169.254.169.254", "169.254.170.2", "metadata.google.internal", "metadata/identity")
_REFUSED = (
    "AccessDenied",
    "SignatureDoesNotMatch",
    "InvalidAccessKeyId",
    "ExpiredToken",
    "AuthenticationFailed",
    "AccountProblem",
)
_BUSY = ("SlowDown", "ServiceUnavailable", "ServerBusy", "TooManyRequests", "RequestTimeTooSkewed")

_HINTS = {
    "refused": "check the credentials in the environment, and what they may do with this bucket",
    "no_bucket": "make the bucket, or correct the URL",
    "full": "free space or raise the quota; checkpoints are untouched",
    "settings": "check region, endpoint and bucket; an http:// endpoint needs AWS_ALLOW_HTTP=true",
    "unsupported": "the store does not know this kind of request; is the endpoint the right one?",
}


class StoreFailure(Exception):
    """What remains of a foreign error: words without addresses, key ids and signatures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A foreign error, understood.

    Attributes:
        meaning: `busy`: refused for now, and surely not done. `unreached`: no connection, surely not done. `unclear`: it
            may be done or not. The others are answers.
        text: What happened, in words that can be shown.
    """

    meaning: Meaning
    text: str

    @property
    def passes(self) -> bool:
        """Whether it may be gone when the request is made again."""
        return self.meaning in ("busy", "unreached", "unclear")

    @property
    def done_is_ruled_out(self) -> bool:
        """Whether the request surely had no effect."""
        return self.meaning in ("busy", "unreached")


def understand(exc: Exception) -> Failure:
    """Say what an error of obstore means."""
    text = str(exc)
    kind = type(exc).__name__
    status = int(found[1]) if (found := _STATUS.search(text)) else 0
    code = next((group for group in found.groups() if group), "") if (found := _CODE.search(text)) else ""
    return Failure(meaning=_meaning(exc, kind, text, status, code), text=_words(text, status, code))


def _meaning(exc: Exception, kind: str, text: str, status: int, code: str) -> Meaning:
    by_kind: dict[str, Meaning] = {
        "AlreadyExistsError": "exists",
        "PermissionDeniedError": "refused",
        "UnauthenticatedError": "refused",
        "NotSupportedError": "unsupported",
        "UnknownConfigurationKeyError": "settings",
        "InvalidPathError": "settings",
    }
    if any(word in text for word in _NO_BUCKET):
        return "no_bucket"
    if kind in by_kind:
        return by_kind[kind]
    if isinstance(exc, FileNotFoundError):
        return "absent"
    if kind in ("PreconditionError", "NotModifiedError"):
        return "replaced"
    if code in _REFUSED or any(word in text for word in _METADATA) or status in (401, 403):
        return "refused"
    if any(word in code for word in _FULL) or status == 507:
        return "full"
    if status in (429, 503) or code in _BUSY:
        return "busy"
    if status == 416 or "Invalid range" in text:
        return "range"
    if status in (405, 501):
        return "unsupported"
    if 300 <= status < 500 and status not in (408, 409):
        return "settings"
    if "builder error" in text or isinstance(exc, ValueError):
        return "settings"
    return "unreached" if "kind: Connect" in text else "unclear"


def _words(text: str, status: int, code: str) -> str:
    if any(word in text for word in _METADATA):
        return "no credentials were found in the environment, and the machine's metadata service gave none"
    if status:
        return f"the store answered {status}{f' {code}' if code else ''}"
    if code:
        return f"the store answered {code}"
    for word, said in (
        ("builder error", "the request could not be made of the settings"),
        ("kind: Timeout", "no answer in time"),
        ("TimedOut", "no answer in time"),
        ("kind: Connect", "no connection"),
        ("kind: Request", "the connection broke"),
        ("kind: Interrupted", "the connection broke"),
        ("kind: Body", "the answer broke off"),
        ("kind: Decode", "the answer broke off"),
    ):
        if word in text:
            return said
    first = _ADDRESS.sub("...", text.partition("\n")[0])[:200]
    return _without_secrets(first) or "it failed without a word"


def _without_secrets(text: str) -> str:
    for name, value in os.environ.items():
        if name.startswith(("AWS_", "AZURE_", "GOOGLE_")) and len(value) >= 6 and _is_secret(name):
            text = text.replace(value, "...")
    return text


def _is_secret(name: str) -> bool:
    return any(word in name for word in ("KEY", "SECRET", "TOKEN", "SAS", "CREDENTIALS", "PASSWORD"))


def to_error(failure: Failure, doing: str, *, tier: str, path: str, tried_s: float = 0.0) -> CheckpointError | OSError:
    """Return the error that says who must act.

    Args:
        failure: What happened.
        doing: At what, as in "reading a file".
        tier: The tier's name.
        path: The URL of the object.
        tried_s: How long it was tried again, where it was.
    """
    error = _to_error(failure, doing, tier, path, tried_s)
    error.__cause__ = StoreFailure(failure.text)
    return error


def _to_error(failure: Failure, doing: str, tier: str, path: str, tried_s: float) -> CheckpointError | OSError:
    meaning, text = failure.meaning, f"{doing} failed: {failure.text}"
    hint = _HINTS.get(meaning)
    if meaning == "absent":
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    if meaning == "exists":
        return FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
    if meaning == "no_bucket":
        return ConfigurationError(f"{doing} failed: there is no such bucket", tier=tier, path=path, hint=hint)
    if meaning == "refused":
        return StorageReadOnlyError(f"{doing} was refused: {failure.text}", tier=tier, path=path, hint=hint)
    if meaning == "full":
        return StorageFullError(text, tier=tier, path=path, hint=hint)
    if meaning in ("settings", "unsupported"):
        return ConfigurationError(text, tier=tier, path=path, hint=hint)
    if meaning in ("replaced", "range"):
        return TornFileError(f"{doing}: it was replaced or cut short meanwhile", tier=tier, path=path)
    again = f", tried for {tried_s:.0f} s" if tried_s >= 1 else ""
    hint = "check the network and the store, then try again"
    return StorageError(text + again, tier=tier, path=path, hint=hint)
