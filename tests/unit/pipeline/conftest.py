import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

from run_dirs import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """An empty run directory, not yet made."""
    return RunDir(tmp_path / "run")
