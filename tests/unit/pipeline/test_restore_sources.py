"""Where a restore gets its bytes: memory first, storage next, never a byte that does not verify, never a wait without end."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from any_plans import (
    Made,
    destination,
    one_leaf,
    reading,
)
from run_dirs import RunDir, flip

from safehold.errors import ChecksumError, DeadlineError, ManifestError, StorageError, TornFileError
from safehold.format import crc, paths
from safehold.pipeline import restore
from safehold.pipeline.catalog import Catalog
from safehold.testing.fake_disk import FakeDisk
from safehold.testing.fake_tier import FakeTier
from safehold.tiers.flash import FlashTier
from safehold.types import Rect


@pytest.fixture(scope="module", autouse=True)
def small_blocks() -> Iterator[None]:
    """Checksum blocks, reads and gaps so small that little tensors have many."""
    patch = pytest.MonkeyPatch()
    patch.setattr(crc, "BLOCK_BYTES", 64)
    patch.setattr(restore, "CHUNK_BYTES", 256)
    patch.setattr(restore, "GAP_BYTES", 64)
    yield
    patch.undo()


def packs_of(made: Made) -> dict[int, list[bytearray]]:
    tree = made.disk.tree()
    found: dict[int, list[bytearray]] = {}
    for (rank, part), _ in made.checkpoint.packs().items():
        found.setdefault(rank, []).insert(part, bytearray(tree[made.checkpoint.pack_path(rank, part)]))
    return found


def read_all(made: Made, tier: Any = None, **options: Any) -> tuple[np.ndarray, Any]:
    view = np.full(made.raw["w"].shape[0], -1.0)
    whole = [destination("w", made.spec("w"), [(Rect.whole(view.shape), view)])]
    return view, reading(tier or made.tier, made.checkpoint, whole, **options).run()


@pytest.mark.parametrize("world_size", [1, 3])
def test_memory_is_taken_first_and_nothing_else_is_opened(world_size: int) -> None:
    made = one_leaf(world_size=world_size)
    packs = packs_of(made)
    tier = FakeTier(made.tier)
    held = {rank: [memoryview(bytes(pack)) for pack in found] for rank, found in packs.items()}
    view, figures = read_all(made, tier, memory=held.get)
    assert view.tobytes() == made.raw["w"].tobytes()
    assert figures.bytes_by_source.keys() == {"memory"} and tier.count("open_pack") == 0


def test_damaged_memory_is_replaced_from_storage_block_by_block() -> None:
    made = one_leaf()
    packs = packs_of(made)
    packs[0][0][int(made.checkpoint.plan.offset[0]) + 800] ^= 1
    view, figures = read_all(made, memory=lambda rank: [memoryview(pack) for pack in packs[rank]])
    assert view.tobytes() == made.raw["w"].tobytes()
    assert figures.bytes_by_source["flash"] < figures.bytes_by_source["memory"]
    assert len(figures.replaced) == 1 and "memory" in figures.replaced[0] and "w" in figures.replaced[0]


def test_memory_that_its_agent_has_verified_is_only_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    made = one_leaf(world_size=2)
    packs = packs_of(made)
    held = {rank: [memoryview(pack) for pack in found] for rank, found in packs.items()}
    view, figures = read_all(made, memory=held.get, in_memory=True, verified=[0, 1])
    assert view.tobytes() == made.raw["w"].tobytes() and figures.bytes_by_source.keys() == {"memory"}
    packs[1][0][int(made.checkpoint.plan.offset[1]) + 8] ^= 1
    _, figures = read_all(made, memory=held.get, in_memory=True, verified=[0])
    assert len(figures.replaced) == 1  # rank 1's was not


def test_verified_memory_that_is_too_short_is_replaced() -> None:
    made = one_leaf()
    view, figures = read_all(made, memory=lambda rank: [memoryview(b"short")], in_memory=True, verified=[0])
    assert view.tobytes() == made.raw["w"].tobytes() and figures.bytes_by_source.keys() == {"flash"}


@pytest.mark.parametrize("held", [[], [memoryview(b"short")], [memoryview(b"")]])
def test_memory_that_is_too_short_is_replaced(held: list[memoryview]) -> None:
    made = one_leaf()
    view, figures = read_all(made, memory=lambda rank: held)
    assert view.tobytes() == made.raw["w"].tobytes() and figures.bytes_by_source.keys() == {"flash"}


def test_damage_in_every_source_names_file_block_and_leaf_and_spoils_nothing() -> None:
    made = one_leaf()
    path = made.checkpoint.pack_path(0, 0)
    packs = packs_of(made)
    row = int(made.checkpoint.plan.offset[0])
    at = row + 8 * 200
    packs[0][0][at] ^= 4
    made.disk.corrupt(path, at, mask=4)
    view = np.full(400, -1.0)
    task = reading(
        made.tier,
        made.checkpoint,
        [destination("w", made.spec("w"), [(Rect.whole((400,)), view)])],
        memory=lambda rank: [memoryview(pack) for pack in packs[rank]],
    )
    with pytest.raises(ChecksumError, match=rf"block {at // 64} .*has bytes of w") as caught:
        task.run()
    assert caught.value.path == path and caught.value.step == 10
    right = np.frombuffer(made.raw["w"].tobytes(), np.float64)
    assert all(found == -1.0 or found.tobytes() == wanted.tobytes() for found, wanted in zip(view, right, strict=True))
    assert view[200] == -1.0


@pytest.mark.parametrize("how", ["missing", "short", "directory"])
def test_packs_that_are_not_what_they_should_be(tmp_path: Path, how: str) -> None:
    run = RunDir(tmp_path / "run")
    commit = run.save(10, {"w": np.arange(400.0)}, {}, world_size=1)
    checkpoint = Catalog(run.tier).load(commit)
    pack = run.path(commit, paths.pack(0, 0, 0))
    data = pack.read_bytes()
    pack.unlink()
    if how == "short":
        pack.write_bytes(data[:-4096])
    elif how == "directory":
        pack.mkdir()
    (spec,) = checkpoint.plan.leaves
    with pytest.raises(TornFileError) as caught:
        reading(run.tier, checkpoint, [destination("w", spec, [(Rect.whole((400,)), np.zeros(400))])]).run()
    assert caught.value.path == checkpoint.pack_path(0, 0)


def test_read_errors_are_raised_by_name_and_tried_in_the_next_source() -> None:
    made = one_leaf()
    tier = FakeTier(made.tier)
    tier.fail("read_into", times=-1)
    with pytest.raises(StorageError, match="injected") as caught:
        read_all(made, tier)
    assert caught.value.path == made.checkpoint.pack_path(0, 0)
    packs = packs_of(made)
    view, figures = read_all(made, tier, memory=lambda rank: [memoryview(pack) for pack in packs[rank]])
    assert view.tobytes() == made.raw["w"].tobytes() and not figures.replaced


def test_storage_that_stalls_is_given_up_and_never_writes_later() -> None:
    made = one_leaf(2000)
    tier = FakeTier(made.tier)
    gate = tier.hang("read_into", at=3, times=-1)
    view = np.full(2000, -1.0)
    task = reading(
        tier, made.checkpoint, [destination("w", made.spec("w"), [(Rect.whole((2000,)), view)])], stall_s=0.3
    )
    begun = time.monotonic()
    with pytest.raises(DeadlineError, match=r"no byte arrived for 0\.3 s"):
        task.run()
    assert time.monotonic() - begun < 5
    view[:] = -2.0
    gate.release()
    for thread in [thread for thread in threading.enumerate() if thread.name.startswith("restore-")]:
        thread.join(10)
    assert (view == -2.0).all()


def test_an_agent_that_does_not_answer_is_given_up_like_storage() -> None:
    asked = threading.Event()
    begun = time.monotonic()
    with pytest.raises(DeadlineError):
        read_all(one_leaf(), memory=lambda rank: asked.wait(20.0) and None, stall_s=0.2)
    assert time.monotonic() - begun < 5.0
    asked.set()


def test_memory_that_takes_no_bytes_is_told_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(restore, "apply", lambda *_: go_on.wait(20.0))
    begun = time.monotonic()
    with pytest.raises(DeadlineError) as caught:
        read_all(one_leaf(), stall_s=0.2)
    assert time.monotonic() - begun < 5.0 and "may still write" in "".join(caught.value.__notes__)
    go_on.set()


def test_after_ctrl_c_nothing_is_written_any_more() -> None:
    made = one_leaf(2000)
    tier = FakeTier(made.tier)
    gate = tier.hang("read_into", at=3, times=-1)
    view = np.full(2000, -1.0)
    calls = []

    def ctrl_c(done: int, total: int) -> None:
        calls.append(done)
        raise KeyboardInterrupt

    whole = [destination("w", made.spec("w"), [(Rect.whole((2000,)), view)])]
    with pytest.raises(KeyboardInterrupt):
        reading(tier, made.checkpoint, whole, progress=ctrl_c).run()
    assert len(calls) == 1
    view[:] = -2.0
    gate.release()
    for thread in [thread for thread in threading.enumerate() if thread.name.startswith("restore-")]:
        thread.join(10)
    assert (view == -2.0).all()


def test_a_slow_thread_that_others_outrun_is_no_stall() -> None:
    made = one_leaf(400)
    tier = FakeTier(made.tier)
    tier.slow("read_into", 0.05)
    view, _ = read_all(made, tier, stall_s=0.5)
    assert view.tobytes() == made.raw["w"].tobytes()


def test_an_error_of_one_thread_ends_all_and_closes_the_files() -> None:
    made = one_leaf(4000, world_size=2)
    tier = FakeTier(made.tier)
    closed: list[str] = []
    whole = tier.open_pack

    def open_pack(path: str, **options: Any) -> Any:
        reader = whole(path, **options)
        close = reader.close
        reader.close = lambda: (closed.append(path), close())[1]  # type: ignore[method-assign]
        return reader

    tier.open_pack = open_pack  # type: ignore[method-assign]
    tier.fail("read_into", at=5, times=-1)
    with pytest.raises(StorageError):
        read_all(made, tier)
    assert len(closed) == tier.count("open_pack") > 0


@pytest.mark.parametrize("rank", range(4))
def test_ranks_that_share_what_they_read_start_apart(rank: int) -> None:
    made = one_leaf(4000, world_size=4)
    tier = FakeTier(made.tier)
    view, _ = read_all(made, tier, shared=True, rank=rank, num_threads=1)
    assert view.tobytes() == made.raw["w"].tobytes()
    first = next(op for op in tier.log if op.kind == "read_into")
    assert first.path == made.checkpoint.pack_path(rank, 0)


def test_a_hole_in_the_plan_is_no_silent_garbage() -> None:
    disk = FakeDisk()
    tier = FlashTier(disk.root, disk)
    run = RunDir(Path(disk.root), tier)
    commit = run.save(10, {"w": np.arange(10.0)}, {}, world_size=1, rects=lambda *_: [Rect((0,), (9,))])
    checkpoint = Catalog(tier).load(commit)
    (spec,) = checkpoint.plan.leaves
    with pytest.raises(ManifestError, match="w") as caught:
        reading(tier, checkpoint, [destination("w", spec, [(Rect.whole((10,)), np.zeros(10))])])
    assert caught.value.path == paths.plan(checkpoint.manifest.plan_digest)


def test_a_flipped_bit_on_disk_is_found_before_it_reaches_memory(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    commit = run.save(10, {"a": np.arange(100.0), "b": np.arange(200.0)}, {}, world_size=1)
    checkpoint = Catalog(run.tier).load(commit)
    names = {spec.name: (index, spec) for index, spec in enumerate(checkpoint.plan.leaves)}
    index, spec = names["b"]
    row = int(np.flatnonzero(checkpoint.plan.leaf == index)[0])
    flip(run.path(commit, paths.pack(0, 0, 0)), int(checkpoint.plan.offset[row]) + 800)
    view = np.zeros(200)
    with pytest.raises(ChecksumError, match="has bytes of b"):
        reading(run.tier, checkpoint, [destination("b", spec, [(Rect.whole((200,)), view)])]).run()
    other = np.zeros(100)
    reading(run.tier, checkpoint, [destination("a", names["a"][1], [(Rect.whole((100,)), other)])]).run()
    assert (other == np.arange(100.0)).all()


class Second(FakeTier):
    """The second place: the same files under another name."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.name = "remote"


@pytest.mark.parametrize("how", ["fails", "is not there", "is damaged"])
def test_a_tier_that_fails_is_replaced_by_the_next_for_what_is_left(how: str) -> None:
    made = one_leaf()
    first, second = FakeTier(made.tier), Second(made.tier)
    if how == "fails":
        first.fail("read_into", at=5, error=OSError(errno.EIO, "Input/output error"))
    elif how == "is not there":
        first.fail("open_pack", times=-1, error=FileNotFoundError(errno.ENOENT, "gone"))
    else:
        first.flip(made.checkpoint.pack_path(0, 0), int(made.checkpoint.plan.offset[0]) + 800)
    view, figures = read_all(made, first, more_tiers=[second], num_threads=1)
    assert view.tobytes() == made.raw["w"].tobytes()
    assert figures.replaced and all("flash" in text for text in figures.replaced)
    lost = figures.bytes_by_source["remote"]
    assert (lost == figures.bytes) if how == "is not there" else (0 < lost <= 256), figures.bytes_by_source
    assert figures.storage_bytes == figures.bytes


def test_a_tier_that_keeps_failing_is_asked_last() -> None:
    made = one_leaf(4000)
    first, second = FakeTier(made.tier), Second(made.tier)
    first.fail("read_into", times=-1, error=OSError(errno.EIO, "Input/output error"))
    view, figures = read_all(made, first, more_tiers=[second], num_threads=1)
    assert view.tobytes() == made.raw["w"].tobytes() and figures.bytes_by_source.keys() == {"remote"}
    assert first.count("read_into") == restore.MAX_FAILURES < second.count("read_into")
