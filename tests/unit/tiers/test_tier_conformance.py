"""Every tier passes the one suite."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from safehold.testing.fake_disk import FakeDisk
from safehold.testing.fake_tier import FakeTier
from safehold.testing.tier_suite import TierSuite, shared_memory_directory
from safehold.tiers.base import Tier
from safehold.tiers.flash import FlashTier
from safehold.tiers.open import open_tier


class TestFlashTier(TierSuite):
    def make_tier(self, directory: Path) -> Tier:
        return FlashTier(directory / "deep" / "run")

    def reopen(self, tier: Tier, directory: Path) -> Tier:
        return open_tier(tier.url)


class TestFlashTierBuffered(TierSuite):
    def make_tier(self, directory: Path) -> Tier:
        return FlashTier(directory / "run", direct=False)


class TestFlashTierInMemory(TierSuite):
    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        parent = shared_memory_directory()
        if parent is None:
            pytest.skip("no tmpfs that can be written")
        with tempfile.TemporaryDirectory(dir=parent) as directory:
            yield FlashTier(Path(directory) / "run")


class TestFlashTierOnFakeDisk(TierSuite):
    def make_tier(self, directory: Path) -> Tier:
        disk = FakeDisk(seed=1)
        return FlashTier(disk.root, disk)


class TestFlashTierOnShortDisk(TierSuite):
    """Reads and writes move fewer bytes than asked, direct I/O wants whole pages, signals interrupt."""

    pack_bytes = 1 << 20

    def make_tier(self, directory: Path) -> Tier:
        disk = FakeDisk(seed=2, short_transfers=True, direct_align=4096)
        disk.fail_at(lambda op: op.kind in ("pwrite", "pread") and op.index % 5 == 0, errno.EINTR, times=-1)
        return FlashTier(disk.root, disk)


class TestFlashTierWithoutLinks(TierSuite):
    def make_tier(self, directory: Path) -> Tier:
        disk = FakeDisk(seed=3, links=False, allocates=False, direct_align=0)
        return FlashTier(disk.root, disk)


class TestFlashTierWithNothing(TierSuite):
    """Neither links nor exclusive renames: exclusive creation is what is left."""

    def make_tier(self, directory: Path) -> Tier:
        disk = FakeDisk(seed=4, links=False, exclusive_renames=False, fsyncs_directories=False)
        return FlashTier(disk.root, disk)


class TestFakeTier(TierSuite):
    def make_tier(self, directory: Path) -> Tier:
        return FakeTier()


def test_the_suite_catches_a_careless_tier(tmp_path: Path) -> None:
    """A canary: a tier that ignores `exclusive` fails the suite."""

    class Careless(FlashTier):
        def put(self, path: str, data: bytes, *, exclusive: bool = False) -> None:
            super().put(path, data)

    with pytest.raises(BaseException, match="DID NOT RAISE"):
        TierSuite().test_exclusive_put_refuses(Careless(os.fspath(tmp_path / "run")))
