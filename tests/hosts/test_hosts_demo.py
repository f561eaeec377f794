"""The demonstration over several hosts, as people run it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from safehold.testing.hosts import Hosts

pytestmark = pytest.mark.root
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(200)
def test_the_demo_over_hosts_loses_nothing(two_hosts: Hosts) -> None:
    two_hosts.close()  # they were made to learn whether they can be
    command = [sys.executable, str(ROOT / "examples/hosts_demo.py")]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Equal bit for bit" in done.stdout
    for words in ("resumed at step 3", "resumed at step 12", "X killed", "+ replaced", "/ cut", "lost steps", "memory"):
        assert words in done.stdout


def test_without_root_it_says_so_in_one_line() -> None:
    user: dict[str, Any] = {"user": 65534, "group": 65534, "extra_groups": []} if os.getuid() == 0 else {}
    with (ROOT / "scripts/hosts-demo").open() as script:  # another user may not be able to read it where it is
        done = subprocess.run(
            ["bash", "-s"], stdin=script, capture_output=True, text=True, timeout=30, check=False, cwd="/", **user
        )
    assert done.returncode == 2
    assert done.stdout == "" and done.stderr.count("\n") == 1 and "needs root" in done.stderr
