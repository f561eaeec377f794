import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

from run_dirs import RunDir


@dataclass
class Result:
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out, parse_constant=lambda text: pytest.fail(f"{text} is no JSON"))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


@pytest.fixture
def safehold(capfdbinary, monkeypatch, tmp_path):
    """Runs the command line in this process: `safehold("ls", path)`."""
    from safehold.cli.main import main

    monkeypatch.setenv("SAFEHOLD_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object) -> Result:
        capfdbinary.readouterr()
        code = main([str(argument) for argument in arguments])
        out, err = capfdbinary.readouterr()
        return Result(code, out.decode(errors="surrogateescape"), err.decode())

    return call
