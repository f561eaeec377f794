"""What tests of replications share: a clock, checkpoints of several packs, copies, and what a place holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from run_dirs import RunDir

from safehold.pipeline.catalog import Catalog
from safehold.pipeline.replicate import Replicated, replicate
from safehold.pipeline.trials import CopySettings
from safehold.pipeline.verify import verify
from safehold.policy import belief
from safehold.testing.fake_tier import FakeTier
from safehold.types import CommitId

PACKS = 4
"""Packs of the checkpoints that `save` makes: two ranks, two each."""


class FakeClock:
    """Time that passes only by waiting."""

    now_s = 1_700_000_000.0

    def wall(self) -> float:
        return self.now_s

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def save(run: RunDir, step: int, **options: Any) -> CommitId:
    """Two ranks, two packs each, of some 20 KB."""
    tensors = {name: np.random.default_rng(step + n).normal(size=(64, 30)) for n, name in enumerate("abcd")}
    return run.save(step, tensors, pack_size_bytes=16384, **options)


def copy(run: RunDir, there: Any, commit: CommitId, **options: Any) -> Replicated:
    settings = CopySettings(**{"chunk_bytes": 1 << 20, "retry_s": 2.0, **options.pop("settings", {})})
    options = {"clock": FakeClock(), "patience_s": 0.0, **options}
    return replicate(options.pop("source", run.tier), there, commit, settings=settings, **options)


def tree(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def believed(tier: Any) -> list[int]:
    return [commit.step for commit in belief.believed(Catalog(tier).listing())]


def sent(there: FakeTier) -> int:
    return sum(op.nbytes for op in there.log if op.kind == "write_at")


def is_whole(tier: Any, commit: CommitId) -> bool:
    return verify(tier, commit, direct=False, patience_s=0.0).ok
