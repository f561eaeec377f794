"""The demonstration, short: a kill in the middle of a save, a resume, and a comparison bit for bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.procs
@pytest.mark.timeout(400)
def test_the_demo_shows_a_bitwise_resume_and_leaves_nothing(tmp_path: Path) -> None:
    options = ("--steps", "6", "--save-every", "2", "--kill-at", "4", "--layers", "1", "--dir", str(tmp_path))
    command = [sys.executable, str(ROOT / "examples/demo.py"), *options]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed at step 2" in done.stdout
    assert "Equal bit for bit" in done.stdout
    for words in ("pause", "window", "time to resume", "plain copy", "raw direct write", "raw direct read"):
        assert words in done.stdout
    assert list(tmp_path.iterdir()) == []
    assert processes_with(str(tmp_path)) == []


def processes_with(text: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text in command:
            found.append(command)
    return found
