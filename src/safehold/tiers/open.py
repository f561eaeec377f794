"""From the words a user gives (a path or a URL) to a tier."""

from __future__ import annotations

import os
import re
import urllib.parse

from safehold.clock import SYSTEM_CLOCK, Clock
from safehold.errors import ConfigurationError
from safehold.host.disk import Disk, components
from safehold.tiers.base import Tier
from safehold.tiers.flash import FlashTier
from safehold.tiers.object_requests import Patience, open_stores
from safehold.tiers.object_store import ObjectStoreTier

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_OBJECT_STORES = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "azure": "az"}
_PATH_OF_URL = re.compile(rf"({'|'.join(_OBJECT_STORES)}):/[^/]")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,221}")
_PREFIX = re.compile(r"[A-Za-z0-9_.=+@,:/ -]*")
_URL_HINT = "write s3://bucket/prefix (or gs://, az://); endpoint and credentials come from the environment"


def place(url_or_path: str | os.PathLike[str]) -> str:
    """Return the one spelling of a run directory: an absolute path, or the URL of an object store's prefix.

    Raises:
        ConfigurationError: It is neither.
    """
    if not isinstance(url_or_path, str | os.PathLike):
        text = f"a run directory is a path or a URL, not {url_or_path!r}"
        raise ConfigurationError(text, hint="give a str or a path object: 'runs/llama', or 's3://bucket/llama'")
    found = _object_store(url_or_path)
    return local_path(url_or_path) if found is None else _spelled(*found)


def _spelled(scheme: str, bucket: str, prefix: str) -> str:
    return f"{scheme}://{bucket}/{prefix}" if prefix else f"{scheme}://{bucket}"


def _object_store(url_or_path: str | os.PathLike[str]) -> tuple[str, str, str] | None:
    """Return scheme, bucket and prefix of an object store's URL; None for all else.

    Raises:
        ConfigurationError: There is more in it than these, or less. What it was is not repeated: it may be a secret.
    """
    text = os.fspath(url_or_path)
    if not isinstance(url_or_path, str) and _PATH_OF_URL.match(str(text)):
        raise ConfigurationError(
            "a path object holds no URL: it drops one of two slashes", hint="give the URL as a str"
        )
    found = _SCHEME.match(text) if isinstance(text, str) else None
    scheme = _OBJECT_STORES.get(found[1].lower()) if found is not None else None
    if found is None or scheme is None:
        return None
    bucket, _, prefix = text[found.end() :].partition("/")
    prefix = prefix.strip("/")
    if not _BUCKET.fullmatch(bucket):
        what = "has credentials or options in it" if "@" in bucket or "?" in bucket else "has no name of a bucket"
        raise ConfigurationError(f"the {scheme}:// URL {what}", hint=_URL_HINT)
    if not _PREFIX.fullmatch(prefix):
        raise ConfigurationError(
            f"the prefix in the {scheme}:// URL has a character that is not taken",
            path=f"{scheme}://{bucket}",
            hint=_URL_HINT,
        )
    try:
        components(prefix)
    except ValueError as exc:
        raise ConfigurationError(f"no prefix: {exc}", path=f"{scheme}://{bucket}", hint=_URL_HINT) from exc
    return scheme, bucket, prefix


def local_path(url_or_path: str | os.PathLike[str]) -> str:
    """Return the absolute path that a plain path or a `file://` URL stands for; `~` in front of a plain path is the home directory.

    Raises:
        ConfigurationError: It is empty, begins with the home of nobody, names another host, or has a scheme that is no file system.
    """
    text = os.fspath(url_or_path)
    if not isinstance(text, str) or not text or "\0" in text:
        raise ConfigurationError(f"{text!r} is no path of a run directory")
    found = _SCHEME.match(text)
    if found is None:
        return os.path.abspath(_at_home(text))
    scheme = found[1].lower()
    if scheme != "file":
        hint = "use a path, or a URL with file://, s3://, gs:// or az://"
        raise ConfigurationError(f"unknown kind of place {scheme}://", path=f"{scheme}://", hint=hint)
    try:
        parts = urllib.parse.urlsplit(text)
    except ValueError as exc:
        raise ConfigurationError(f"no URL: {exc}", path=text, hint="write file:///a/path") from exc
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
        raise ConfigurationError("a file:// URL has no host, query or fragment", path=text, hint="write file:///a/path")
    path = urllib.parse.unquote(parts.path)
    if not path.startswith("/") or "\0" in path:
        raise ConfigurationError("a file:// URL needs an absolute path", path=text, hint="write file:///a/path")
    return os.path.abspath(path)


def _at_home(path: str) -> str:
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        user = path.partition("/")[0]
        hint = f"for a directory of that name write ./{path}"
        raise ConfigurationError(f"no home directory is known for {user!r}", path=path, hint=hint)
    return expanded


def open_tier(
    url_or_path: str | os.PathLike[str],
    *,
    name: str | None = None,
    disk: Disk | None = None,
    retry_s: float = 0.0,
    file_mode: int = 0o600,
    dir_mode: int = 0o700,
    direct: bool = True,
    clock: Clock = SYSTEM_CLOCK,
) -> Tier:
    """Return the tier for a run directory; touches nothing yet.

    Args:
        url_or_path: A path, or a URL: `file://`, or an object store's `s3://bucket/prefix`, `gs://`, `az://`.
        name: The word for messages; None: `remote` for object stores, else `flash`.
        disk: A disk rooted there, for tests.
        retry_s: See `FlashTier`.
        file_mode: See `FlashTier`.
        dir_mode: See `FlashTier`.
        direct: See `FlashTier`.
        clock: See `FlashTier`.

    Raises:
        ConfigurationError: Nothing of that kind can be opened.
    """
    found = _object_store(url_or_path)
    if found is not None:
        patience = Patience()
        stores = open_stores(*found, patience)
        return ObjectStoreTier(
            stores, _spelled(*found), name=name or "remote", retry_s=retry_s, patience=patience, clock=clock
        )
    return FlashTier(
        local_path(url_or_path),
        disk,
        name=name or "flash",
        retry_s=retry_s,
        file_mode=file_mode,
        dir_mode=dir_mode,
        direct=direct,
        clock=clock,
    )
