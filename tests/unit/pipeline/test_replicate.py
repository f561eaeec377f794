"""Copies at a second place: same bytes, whole or not at all, nothing sent twice, and what is damaged on either side."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import numpy as np
import pytest
from replica_runs import PACKS, FakeClock, believed, copy, is_whole, save, sent, tree
from run_dirs import RunDir, flip

from safehold.errors import (
    ChecksumError,
    IntegrityError,
    StepNotFoundError,
    StorageError,
    StorageFullError,
)
from safehold.format import paths
from safehold.pipeline import ledger, replica_claim
from safehold.pipeline.catalog import Catalog, find_restore_candidate
from safehold.testing.fake_disk import FakeDisk
from safehold.testing.fake_tier import FakeTier
from safehold.tiers.flash import FlashTier


@pytest.fixture
def there(tmp_path: Path) -> FakeTier:
    return FakeTier(FlashTier(tmp_path / "there"))


def test_a_copy_is_a_run_directory_of_the_same_bytes(run: RunDir, there: FakeTier, tmp_path: Path) -> None:
    commit = save(run, 10)
    told: list[tuple[int, int]] = []
    done = copy(run, there, commit, progress=lambda *now: told.append(now))
    assert tree(tmp_path / "there") == tree(run.root)
    total = sum(f.stat().st_size for f in run.path(commit).iterdir() if f.suffix in (".safetensors", ".objects"))
    assert (done.sent_bytes, done.kept_bytes, done.was_there) == (total, 0, False)
    assert told == sorted(told) and told[-1] == (total, total)
    found = find_restore_candidate(there, clock=run)
    assert found.checkpoint is not None and found.checkpoint.commit == commit and found.problems == ()
    assert len(list(run.path(commit).glob("*.safetensors"))) == PACKS


def test_the_manifest_is_last_and_the_incarnations_come_before(run: RunDir, there: FakeTier) -> None:
    commit = save(run, 10)
    copy(run, there, commit)
    made = [op.path for op in there.log if op.kind in ("put", "finish") and not op.path.startswith(paths.REPLICATIONS)]
    assert made[:2] == ["run.json", "incarnations/1.json"] and made[2].startswith("plans/")
    assert made[-1].endswith("/manifest.json")
    records = [n for n, path in enumerate(made) if "/node-" in path and path.endswith(".json")]
    data = [n for n, path in enumerate(made) if path.endswith((".safetensors", ".objects"))]
    assert max(data) < min(records) and len(data) == PACKS + 2


def test_what_is_there_is_not_sent_again(run: RunDir, there: FakeTier) -> None:
    first, second = save(run, 10), save(run, 20)
    copy(run, there, first)
    before = sent(there)
    done = copy(run, there, first)
    assert done.was_there and done.sent_bytes == 0 and sent(there) == before
    copy(run, there, second)
    assert believed(there) == [20, 10]
    assert not there.list(paths.REPLICATIONS)


def test_interrupted_and_resumed(run: RunDir, there: FakeTier) -> None:
    commit = save(run, 10)
    packs = sorted(run.path(commit).glob("*.safetensors"), key=lambda f: (-f.stat().st_size, f.name))
    there.fail("finish", at=2, times=-1)
    with pytest.raises(StorageError, match="injected failure of finish"):
        copy(run, there, commit, settings={"packs_at_once": 1, "retry_s": 0.0})
    assert believed(there) == []
    there.heal()
    before = sent(there)
    done = copy(run, there, commit, settings={"packs_at_once": 1, "retry_s": 0.0})
    assert sent(there) - before == sum(f.stat().st_size for f in packs[2:])
    assert done.kept_bytes >= sum(f.stat().st_size for f in packs[:2]) > 0
    assert is_whole(there, commit) and not there.list(paths.REPLICATIONS)


def test_a_pack_that_was_left_unfinished_is_replaced(run: RunDir, there: FakeTier, tmp_path: Path) -> None:
    """A killed process leaves allocated packs, and complete ones that are perhaps not durable: nobody vouches for either."""
    commit = save(run, 10)
    place = tmp_path / "there" / paths.checkpoint_dir(commit)
    place.mkdir(parents=True)
    names = sorted(f.name for f in run.path(commit).glob("*.safetensors"))
    (place / names[0]).write_bytes(bytes((run.path(commit) / names[0]).stat().st_size))
    shutil.copy(run.path(commit) / names[1], place / names[1])
    (tmp_path / "there" / "run.json").write_bytes((run.root / "run.json").read_bytes())
    done = copy(run, there, commit)
    assert done.kept_bytes == 0 and is_whole(there, commit)


def test_what_was_finished_and_then_damaged_is_sent_again(run: RunDir, there: FakeTier, tmp_path: Path) -> None:
    commit = save(run, 10)
    there.fail("finish", at=2, times=-1)
    with pytest.raises(StorageError):
        copy(run, there, commit, settings={"packs_at_once": 1, "retry_s": 0.0})
    there.heal()
    left = tmp_path / "there" / paths.checkpoint_dir(commit)
    flip(max(left.glob("*.safetensors"), key=lambda f: f.stat().st_size), 9000)
    copy(run, there, commit)
    assert is_whole(there, commit)


@pytest.mark.parametrize("kind", ["write_at", "finish", "create_pack", "put", "list", "sync_tree", "get"])
def test_failures_that_pass_are_tried_again(run: RunDir, there: FakeTier, kind: str) -> None:
    commit = save(run, 10)
    there.fail(kind, times=3)
    clock = FakeClock()
    began = clock.now_s
    copy(run, there, commit, clock=clock, settings={"retry_s": 30.0})
    assert is_whole(there, commit) and 0.1 < clock.now_s - began < 60


def test_reads_of_the_source_are_tried_again(run: RunDir, there: FakeTier) -> None:
    commit = save(run, 10)
    source = FakeTier(run.tier)
    source.fail("read_into", times=3)
    source.fail("open_pack", times=2)
    copy(run, there, commit, source=source, settings={"retry_s": 30.0})
    assert is_whole(there, commit)


def test_failures_that_stay_are_given_up_within_the_budget(run: RunDir, there: FakeTier) -> None:
    commit = save(run, 10)
    source = FakeTier(run.tier)
    source.fail("read_into", times=-1)
    clock = FakeClock()
    began = clock.now_s
    with pytest.raises(StorageError, match="injected failure of read_into"):
        copy(run, there, commit, source=source, clock=clock, settings={"retry_s": 30.0})
    # Two ranks' packs at once, four threads: none has a second budget for the whole pack.
    assert clock.now_s - began < 5 * 30


def test_a_full_place_is_not_tried_again(run: RunDir, there: FakeTier) -> None:
    commit = save(run, 10)
    there.fail("create_pack", times=-1, error=OSError(errno.ENOSPC, "full"))
    with pytest.raises(StorageFullError):
        copy(run, there, commit)
    assert there.count("create_pack") <= 2 and believed(there) == []


def test_room_is_looked_for_before_anything_is_sent(run: RunDir) -> None:
    commit = save(run, 10)
    disk = FakeDisk(capacity_bytes=40_000)
    small = FakeTier(FlashTier(disk.root, disk))
    with pytest.raises(StorageFullError, match="bytes are to be sent"):
        copy(run, small, commit)
    assert small.count("create_pack") == 0


# Damage.


@pytest.mark.parametrize(
    "name", ["00000-00000.0.safetensors", "node-00000.objects", "node-00001.json", "manifest.json"]
)
@pytest.mark.parametrize("how", ["flip", "cut", "missing"])
def test_a_damaged_source_commits_nothing(run: RunDir, there: FakeTier, name: str, how: str) -> None:
    commit = save(run, 10)
    file = run.path(commit, name)
    if how == "flip":
        flip(file, file.stat().st_size // 2)
    elif how == "cut":
        file.write_bytes(file.read_bytes()[:-5])
    else:
        file.unlink()
    with pytest.raises((IntegrityError, StepNotFoundError)) as caught:
        copy(run, there, commit)
    if how != "missing" or name != "manifest.json":
        assert caught.value.path.endswith(f"{paths.checkpoint_dir(commit)}/{name}") and caught.value.step == 10
    assert not (there.list(paths.checkpoint_dir(commit)) and believed(there))


def test_a_damaged_block_is_named(run: RunDir, there: FakeTier) -> None:
    commit = run.save(10, {"w": np.arange(400_000.0)}, world_size=1)
    flip(run.path(commit, "00000-00000.0.safetensors"), (2 << 20) + 17)
    with pytest.raises(ChecksumError, match=r"block 2 \(bytes 2097152 to 3145728\): checksum") as caught:
        copy(run, there, commit)
    assert caught.value.rank == 0 and caught.value.hint


def test_bits_that_flip_on_the_way_from_the_source_are_found(run: RunDir, there: FakeTier) -> None:
    commit = save(run, 10)
    source = FakeTier(run.tier)
    source.flip("*00001-00001.0.safetensors", 5000)
    with pytest.raises(ChecksumError):
        copy(run, there, commit, source=source)
    assert believed(there) == []


@pytest.mark.parametrize(
    "name", ["00000-00000.0.safetensors", "node-00000.objects", "node-00001.json", "manifest.json"]
)
def test_a_copy_that_lacks_something_is_mended(run: RunDir, there: FakeTier, tmp_path: Path, name: str) -> None:
    commit = save(run, 10)
    copy(run, there, commit)
    file = tmp_path / "there" / paths.checkpoint_dir(commit) / name
    file.write_bytes(file.read_bytes()[:-3])
    before = sent(there)
    done = copy(run, there, commit)
    assert not done.was_there and is_whole(there, commit) and tree(tmp_path / "there") == tree(run.root)
    assert sent(there) - before == (file.stat().st_size if name.endswith(".safetensors") else 0)


def test_a_copy_that_was_quarantined_is_read_and_mended(run: RunDir, there: FakeTier, tmp_path: Path) -> None:
    commit = save(run, 10)
    copy(run, there, commit)
    flip(tmp_path / "there" / paths.checkpoint_dir(commit) / "00001-00001.0.safetensors", 9000)
    assert copy(run, there, commit).was_there  # sizes tell nothing
    ledger.put_quarantine(there, commit, incarnation=1, reason="test")
    copy(run, there, commit)
    assert is_whole(there, commit) and not Catalog(there).snapshot().quarantined


def test_a_copy_with_what_the_source_has_lost_is_left_as_it_is(run: RunDir, there: FakeTier, tmp_path: Path) -> None:
    commit = save(run, 10)
    copy(run, there, commit)
    name = "00000-00000.0.safetensors"
    (tmp_path / "there" / paths.checkpoint_dir(commit) / name).unlink()
    flip(run.path(commit, name), 9000)
    before = tree(tmp_path / "there")
    with pytest.raises(IntegrityError, match="here as well as at the second place"):
        copy(run, there, commit)
    after = tree(tmp_path / "there")
    assert {k: v for k, v in after.items() if not k.startswith(paths.REPLICATIONS)} == before


def test_mending_that_was_interrupted_goes_on_where_it_was(run: RunDir, there: FakeTier, tmp_path: Path) -> None:
    commit = save(run, 10)
    copy(run, there, commit)
    file = tmp_path / "there" / paths.checkpoint_dir(commit) / "00000-00000.0.safetensors"
    size = file.stat().st_size
    file.unlink()
    there.fail("finish", times=-1)
    with pytest.raises(StorageError):
        copy(run, there, commit, settings={"retry_s": 0.0})
    assert believed(there) == []
    there.heal()
    before = sent(there)
    copy(run, there, commit)
    assert sent(there) - before == size and is_whole(there, commit)


def test_a_pack_that_is_being_replaced_is_vouched_for_by_nobody(run: RunDir, there: FakeTier, tmp_path: Path) -> None:
    commit = save(run, 10)
    there.fail("finish", at=2, times=-1)
    with pytest.raises(StorageError):
        copy(run, there, commit, settings={"packs_at_once": 1, "retry_s": 0.0})
    there.heal()
    finished = replica_claim.unfinished(there)[commit].finished
    assert len(finished) == 2
    flip(tmp_path / "there" / paths.checkpoint_dir(commit) / finished[0], 9000)
    there.fail("finish", times=-1)
    with pytest.raises(StorageError):
        copy(run, there, commit, settings={"retry_s": 0.0})
    assert replica_claim.unfinished(there)[commit].finished == finished[1:]


def test_what_is_taken_away_before_the_commit_is_seen(run: RunDir, there: FakeTier, tmp_path: Path) -> None:
    commit = save(run, 10)
    pack = tmp_path / "there" / paths.checkpoint_dir(commit) / "00001-00001.0.safetensors"
    put = there.put

    def sweeping(path: str, data: bytes, *, exclusive: bool = False) -> None:
        put(path, data, exclusive=exclusive)
        if path.endswith("node-00001.json"):
            pack.unlink()

    there.put = sweeping  # type: ignore[method-assign]
    with pytest.raises(IntegrityError, match=r"00001-00001\.0\.safetensors .* is missing"):
        copy(run, there, commit)
    assert believed(there) == []
