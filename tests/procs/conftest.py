from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import puppets


@pytest.fixture(scope="session")
def zygote() -> Iterator[puppets.Zygote]:
    """The process that forks ranks."""
    found = puppets.Zygote()
    try:
        yield found
    finally:
        found.close()


@pytest.fixture
def rig(zygote: puppets.Zygote) -> Iterator[puppets.Rig]:
    """Jobs, agents and run directories of one test; everything is ended afterwards."""
    with puppets.temporary_directory() as directory, puppets.rig_of(zygote, Path(directory)) as found:
        yield found
