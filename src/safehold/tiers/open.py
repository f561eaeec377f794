"""From the words a user gives (a path or a URL) to a tier."""

from __future__ import annotations

import os
import re
import urllib.parse

from safehold.clock import SYSTEM_CLOCK, Clock
from safehold.errors import ConfigurationError
from safehold.host.disk import Disk
from safehold.tiers.base import Tier
from safehold.tiers.flash import FlashTier

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_OBJECT_STORES = ("s3", "gs", "gcs", "az", "azure", "abfs", "abfss", "r2", "http", "https")


def local_path(url_or_path: str | os.PathLike[str]) -> str:
    """Return the absolute path that a plain path or a `file://` URL stands for.

    Raises:
        ConfigurationError: It is empty, names another host, or has a scheme that is no file system.
    """
    text = os.fspath(url_or_path)
    if not isinstance(text, str) or not text or "\0" in text:
        raise ConfigurationError(f"{text!r} is no path of a run directory")
    found = _SCHEME.match(text)
    if found is None:
        return os.path.abspath(text)
    scheme = found[1].lower()
    if scheme in _OBJECT_STORES:
        raise ConfigurationError(
            f"{scheme}:// is not available yet", path=text, hint="use a path of a file system, or a file:// URL"
        )
    if scheme != "file":
        raise ConfigurationError(f"unknown kind of place {scheme}://", path=text, hint="use a path or a file:// URL")
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


def open_tier(
    url_or_path: str | os.PathLike[str],
    *,
    name: str = "flash",
    disk: Disk | None = None,
    retry_s: float = 0.0,
    file_mode: int = 0o600,
    dir_mode: int = 0o700,
    direct: bool = True,
    clock: Clock = SYSTEM_CLOCK,
) -> Tier:
    """Return the tier for a run directory; touches nothing yet.

    Args:
        url_or_path: A path, or a `file://` URL.
        name: The word for messages.
        disk: A disk rooted there, for tests.
        retry_s: See `FlashTier`.
        file_mode: See `FlashTier`.
        dir_mode: See `FlashTier`.
        direct: See `FlashTier`.
        clock: See `FlashTier`.

    Raises:
        ConfigurationError: Nothing of that kind can be opened.
    """
    return FlashTier(
        local_path(url_or_path),
        disk,
        name=name,
        retry_s=retry_s,
        file_mode=file_mode,
        dir_mode=dir_mode,
        direct=direct,
        clock=clock,
    )
