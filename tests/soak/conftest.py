from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "procs"))

import puppets


@pytest.fixture(scope="session")
def zygote() -> Iterator[puppets.Zygote]:
    """The process that forks ranks."""
    found = puppets.Zygote()
    try:
        yield found
    finally:
        found.close()
