from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_sockets import Agent


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    agent = Agent(tmp_path / "slot", monkeypatch)
    yield agent
    agent.close()
