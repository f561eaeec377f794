"""A writer killed with SIGKILL, for real, again and again: what it acknowledged is there, what is there is whole."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from safehold.tiers.base import TEMPORARY_PREFIX
from safehold.tiers.flash import FlashTier

WRITER = """
import sys
from safehold.tiers.flash import FlashTier
tier = FlashTier(sys.argv[1])
for number in range(int(sys.argv[2]), 10**6):
    data = str(number).encode() * 5000
    tier.put("record.json", data)
    tier.put(f"once/{number}.json", data, exclusive=True)
    writer = tier.create_pack(f"packs/{number}", len(data))
    writer.write_at(0, memoryview(data))
    writer.finish()
    tier.sync_tree("packs")
    print(number, flush=True)
"""


@pytest.mark.procs
def test_a_killed_writer_leaves_whole_files(tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    tier = FlashTier(tmp_path / "run")
    begin = 0
    for _ in range(5):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path / "run"), str(begin)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        last = begin - 1
        for _ in range(rng.randrange(1, 12)):
            last = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        last = max([last, *(int(line) for line in process.stdout.read().split())])
        process.stdout.close()
        assert process.wait() == -signal.SIGKILL

        data = tier.get("record.json", limit_bytes=1 << 20)
        number = len(data) // 5000
        current = int(data[:number])
        assert data == str(current).encode() * 5000 and current in (last, last + 1), f"seed {seed}"
        for entry in tier.list("once"):
            value = int(entry.name.removesuffix(".json"))
            assert tier.get(f"once/{entry.name}", limit_bytes=1 << 20) == str(value).encode() * 5000, f"seed {seed}"
        names = {entry.name for entry in tier.list("packs")}
        assert {str(value) for value in range(last + 1)} <= names, f"seed {seed}"
        for value in range(last + 1):
            reader = tier.open_pack(f"packs/{value}")
            buffer = bytearray(reader.size_bytes)
            reader.read_into(0, memoryview(buffer))
            reader.close()
            assert buffer == str(value).encode() * 5000, f"seed {seed}"
        tier.delete(f"once/{last + 1}.json")
        tier.delete(f"packs/{last + 1}")
        begin = last + 1
    for directory in ("", "once", "packs"):
        tier.sweep_temporaries(directory, older_than_s=0.0)
    assert not [path for path in (tmp_path / "run").rglob("*") if path.name.startswith(TEMPORARY_PREFIX)]
