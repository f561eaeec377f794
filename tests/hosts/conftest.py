from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from hosts_here import hosts_or_skip

from safehold.testing.hosts import Hosts, Zygote

PRELOAD = ("torch", "torch.distributed", "numpy", "safehold", "safehold.checkpointer", "safehold.trainer.saver")


@pytest.fixture(scope="session")
def host_zygote() -> Iterator[Zygote]:
    """The process that hosts and their ranks are forked from."""
    found = Zygote(PRELOAD)
    try:
        yield found
    finally:
        found.close()


@pytest.fixture
def four_hosts(host_zygote: Zygote, tmp_path: Path) -> Iterator[Hosts]:
    """Four hosts of this test's own."""
    with hosts_or_skip(4, host_zygote, tmp_path) as found:
        yield found


@pytest.fixture
def two_hosts(host_zygote: Zygote, tmp_path: Path) -> Iterator[Hosts]:
    """Two hosts of this test's own."""
    with hosts_or_skip(2, host_zygote, tmp_path) as found:
        yield found
