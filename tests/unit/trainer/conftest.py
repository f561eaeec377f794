import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import safehold
from safehold.agent.start import ask_status
from safehold.errors import AgentUnavailableError
from safehold.host.runtime import RunSlot


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs of a module are; all have one path, so that they find the agent of the one before."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture
def make(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., safehold.Checkpointer]]:
    """Makes Checkpointers of one run directory, new for each test; what a test leaves open is closed."""
    shutil.rmtree(directory / "run", ignore_errors=True)
    monkeypatch.setenv("SAFEHOLD_RUNTIME_DIR", str(directory / "rt"))
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    made: list[safehold.Checkpointer] = []

    def checkpointer(**arguments: Any) -> safehold.Checkpointer:
        made.append(safehold.Checkpointer(directory / "run", **arguments))
        return made[-1]

    yield checkpointer
    for entry in made:
        try:
            entry.close()
        except safehold.CheckpointError:
            pass
    for slot in {entry._run.client._slot for entry in made}:
        _wait_idle(slot)


def _wait_idle(slot: RunSlot) -> None:
    """Wait until retention writes nothing any more."""
    deadline = time.monotonic() + 10.0
    try:
        while ask_status(slot, 5.0)["flusher_calls"]:
            assert time.monotonic() < deadline
            time.sleep(0.005)
    except AgentUnavailableError:
        pass  # it has left
