"""Hosts for a test, where they can be had."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from safehold.testing.hosts import Hosts, HostsUnavailableError, Zygote


def hosts_or_skip(num: int, zygote: Zygote, root: Path) -> Hosts:
    """Make hosts; where that is not possible, a build server fails and a developer's machine skips."""
    try:
        return Hosts(num, root=root / "hosts", zygote=zygote)
    except HostsUnavailableError as exc:
        if os.environ.get("CI") == "true":
            pytest.fail(str(exc))
        pytest.skip(str(exc))
