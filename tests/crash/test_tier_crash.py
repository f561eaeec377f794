"""Power cuts in every operation of a save: what was acknowledged survives, what is visible is whole.

And each forgotten fsync is found.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

from safehold.testing.fake_disk import FakeDisk, PowerLostError
from safehold.tiers.base import TEMPORARY_PREFIX
from safehold.tiers.flash import FlashTier

T = TypeVar("T")
SEEDS = range(8)
PACK_BYTES = 3 * 4096


def content(path: str, nbytes: int = 5000) -> bytes:
    return random.Random(path).randbytes(nbytes)


def attempt(step: int, number: int = 0) -> str:
    return f"checkpoints/{step:09d}/1-{number}"


def pack_paths(directory: str) -> list[str]:
    return [f"{directory}/00000-0000{rank}.0.safetensors" for rank in range(2)]


def save(tier: FlashTier, directory: str, promised: set[str]) -> None:
    """What a flusher and the lead do; adds to `promised` what was acknowledged as durable."""
    record = f"{directory}/node-00000.json"
    tier.put(record, content(record))
    promised.add(record)
    for path in pack_paths(directory):
        data = memoryview(content(path, PACK_BYTES))
        writer = tier.create_pack(path, PACK_BYTES)
        for at in range(0, PACK_BYTES, 4096):
            writer.write_at(at, data[at : at + 4096])
        writer.finish()
    tier.sync_tree(directory)
    promised.update(pack_paths(directory))
    tier.put(f"{directory}/manifest.json", content(f"{directory}/manifest.json"), exclusive=True)
    promised.add(f"{directory}/manifest.json")


def whole_run(tier: FlashTier, promised: set[str]) -> None:
    tier.put("run.json", content("run.json"))
    promised.add("run.json")
    tier.put("incarnations/1.json", content("incarnations/1.json"), exclusive=True)
    promised.add("incarnations/1.json")
    save(tier, attempt(10), promised)
    save(tier, attempt(20), promised)


def violations(survivor: FakeDisk, promised: set[str]) -> list[str]:
    """What a survivor lacks of what was promised, and what is visible in it and not whole."""
    there = {path: data for path, data in survivor.tree().items() if not path.endswith("/")}
    found = [f"{path} was acknowledged and is lost" for path in sorted(promised - there.keys())]
    for path, data in there.items():
        if TEMPORARY_PREFIX in path:
            continue
        is_pack = path.endswith(".safetensors")
        right = data == content(path, PACK_BYTES if is_pack else 5000)
        if not right and (not is_pack or path in promised):
            found.append(f"{path} is visible and not what was written")
        if path.endswith("manifest.json"):
            directory = path.rpartition("/")[0]
            for pack in pack_paths(directory):
                if there.get(pack) != content(pack, PACK_BYTES):
                    found.append(f"{path} is visible and {pack} is missing or torn")
    return found


class ForgetfulDisk(FakeDisk):
    """Acknowledges some operations without doing them."""

    def __init__(self, forgets: Callable[[str, str], bool], **options: Any) -> None:
        super().__init__(**options)
        self.forgets = forgets

    def _operate(self, kind: str, path: str, action: Callable[[], T], offset: int = 0, nbytes: int = 0) -> T:
        if self.forgets(kind, path):
            return super()._operate(kind, path, lambda: True, offset, nbytes)  # type: ignore[return-value]
        return super()._operate(kind, path, action, offset, nbytes)


def nothing(kind: str, path: str) -> bool:
    return False


def cut_everywhere(
    forgets: Callable[[str, str], bool] = nothing,
    make_tier: Callable[[FakeDisk], FlashTier] = lambda disk: FlashTier(disk.root, disk),
    scenario: Callable[[FlashTier, set[str]], None] = whole_run,
    **options: Any,
) -> Iterator[str]:
    """Run `scenario` with a power cut in each operation that matters; give all violations."""
    rehearsal = ForgetfulDisk(forgets, **options)
    promised: set[str] = set()
    scenario(make_tier(rehearsal), promised)
    yield from violations(rehearsal.crash(survival="lost"), promised)
    for op in [op for op in rehearsal.log if op.changes]:
        for seed in SEEDS:
            disk = ForgetfulDisk(forgets, seed=seed, **options)
            disk.crash_after(op.index)
            promised = set()
            try:
                scenario(make_tier(disk), promised)
            except PowerLostError:
                pass
            else:
                assert disk.short_transfers, "the cut was missed"  # they change the number of operations
            for survival in ("lost", "kept", "random"):
                if survival == "random" or seed == 0:
                    for text in violations(disk.crash(survival=survival), promised):
                        yield f"{text} (cut in operation {op.index} {op.kind} {op.path}, {survival}, seed {seed})"


@pytest.mark.parametrize(
    "options",
    [{}, {"direct_align": 0}, {"links": False}, {"short_transfers": True}, {"direct_align": 4096, "allocates": False}],
    ids=str,
)
def test_a_cut_anywhere_breaks_no_promise(options: dict[str, Any]) -> None:
    assert list(cut_everywhere(**options)) == []


def test_without_links_and_renames_only_an_unpromised_record_can_be_torn() -> None:
    """The last resort creates under the final name: a cut can leave part of a record, which its reader must see."""
    found = list(cut_everywhere(links=False, exclusive_renames=False))
    assert all("is visible and not what was written" in text for text in found)


class NoSyncTree(FlashTier):
    def sync_tree(self, directory: str) -> None:
        return


class SyncTreeOfItselfOnly(FlashTier):
    def sync_tree(self, directory: str) -> None:
        self.disk.fsync_dir(directory)


class SyncTreeOfAncestorsOnly(FlashTier):
    def sync_tree(self, directory: str) -> None:
        self._sync_upward(directory.rpartition("/")[0])


class SyncsOnlyTheParent(FlashTier):
    def _sync_upward(self, directory: str) -> None:
        self.disk.fsync_dir(directory)


class SyncsNothingUpward(FlashTier):
    def _sync_upward(self, directory: str) -> None:
        return


class PublishesBeforeFsync(FlashTier):
    def _write_new(self, path: str, data: bytes) -> None:
        file = self.disk.open(path, "create")
        file.pwrite(memoryview(data), 0)
        file.close()


class WritesInPlace(FlashTier):
    def put(self, path: str, data: bytes, *, exclusive: bool = False) -> None:
        self._make_directories(path.rpartition("/")[0])
        self._write_new(path, data)
        self._sync_upward(path.rpartition("/")[0])


def only_packs(tier: FlashTier, promised: set[str]) -> None:
    """A flush alone, so that no later put repairs what `sync_tree` forgets."""
    directory = attempt(10)
    for path in pack_paths(directory):
        writer = tier.create_pack(path, PACK_BYTES)
        writer.write_at(0, memoryview(content(path, PACK_BYTES)))
        writer.finish()
    tier.sync_tree(directory)
    promised.update(pack_paths(directory))


@pytest.mark.parametrize(
    "tier_class",
    [
        NoSyncTree,
        SyncTreeOfItselfOnly,
        SyncTreeOfAncestorsOnly,
        SyncsOnlyTheParent,
        SyncsNothingUpward,
        PublishesBeforeFsync,
        WritesInPlace,
    ],
)
def test_a_careless_tier_is_found(tier_class: type[FlashTier]) -> None:
    def make(disk: FakeDisk) -> FlashTier:
        return tier_class(disk.root, disk)

    found = next(cut_everywhere(make_tier=make), None) or next(
        cut_everywhere(make_tier=make, scenario=only_packs), None
    )
    assert found is not None


def test_missing_sync_tree_is_found_in_a_whole_save() -> None:
    assert next(cut_everywhere(make_tier=lambda disk: NoSyncTree(disk.root, disk)), None) is not None


FORGOTTEN: dict[str, Callable[[str, str], bool]] = {
    "fsync of a put file": lambda kind, path: kind == "fsync" and TEMPORARY_PREFIX in path,
    "fsync of a pack": lambda kind, path: kind == "fsync" and path.endswith(".safetensors"),
    "fsync of the root": lambda kind, path: kind == "fsync_dir" and path == "",
    "fsync of incarnations/": lambda kind, path: kind == "fsync_dir" and path == "incarnations",
    "fsync of checkpoints/": lambda kind, path: kind == "fsync_dir" and path == "checkpoints",
    "fsync of a step directory": lambda kind, path: kind == "fsync_dir" and path == "checkpoints/000000010",
    "fsync of an attempt directory": lambda kind, path: kind == "fsync_dir" and path == attempt(20),
}


@pytest.mark.parametrize("what", FORGOTTEN)
def test_each_forgotten_fsync_is_found(what: str) -> None:
    assert next(cut_everywhere(FORGOTTEN[what]), None) is not None


def test_a_cut_while_replacing_leaves_the_old_or_the_new() -> None:
    def replace(tier: FlashTier, promised: set[str]) -> None:
        tier.put("pins/1.json", b"old" * 3000)
        tier.put("pins/1.json", b"new" * 4000)

    rehearsal = FakeDisk()
    replace(FlashTier(rehearsal.root, rehearsal), set())
    first = next(op.index for op in rehearsal.log if op.kind == "rename") + 3  # the first put was acknowledged
    for op in [op for op in rehearsal.log if op.changes and op.index > first]:
        for seed in SEEDS:
            disk = FakeDisk(seed=seed)
            disk.crash_after(op.index)
            with pytest.raises(PowerLostError):
                replace(FlashTier(disk.root, disk), set())
            assert disk.crash().tree()["pins/1.json"] in (b"old" * 3000, b"new" * 4000), f"seed {seed}, {op}"


def test_a_cut_while_deleting_shows_all_or_nothing() -> None:
    rehearsal = FakeDisk()
    tier = FlashTier(rehearsal.root, rehearsal)
    save(tier, attempt(10), set())
    begun = rehearsal.num_ops
    tier.delete_tree(attempt(10))
    assert rehearsal.crash(survival="lost").tree().keys() == {"checkpoints/", "checkpoints/000000010/"}
    for index in range(begun, rehearsal.num_ops):
        for seed in SEEDS:
            disk = FakeDisk(seed=seed)
            disk.crash_after(index)
            tier, promised = FlashTier(disk.root, disk), set()
            save(tier, attempt(10), promised)
            with pytest.raises(PowerLostError):
                tier.delete_tree(attempt(10))
            survivor = disk.crash()
            if any(path.startswith(attempt(10)) for path in survivor.tree()):
                assert violations(survivor, promised) == [], f"seed {seed}, operation {index}"
            again = FlashTier(survivor.root, survivor)
            again.delete_tree(attempt(10))  # by name, whatever of it is left, hidden or not
            assert survivor.tree().keys() <= {"checkpoints/", "checkpoints/000000010/"}, f"seed {seed}"


def test_after_a_cut_the_next_process_goes_on() -> None:
    rehearsal = FakeDisk()
    whole_run(FlashTier(rehearsal.root, rehearsal), set())
    for op in [op for op in rehearsal.log if op.changes][::3]:
        disk = FakeDisk(seed=op.index)
        disk.crash_after(op.index)
        with pytest.raises(PowerLostError):
            whole_run(FlashTier(disk.root, disk), set())
        survivor = disk.crash()
        tier, promised = FlashTier(survivor.root, survivor), set()
        save(tier, attempt(20, 1), promised)
        for directory in ("", "incarnations", "checkpoints", attempt(10), attempt(20)):
            tier.sweep_temporaries(directory, older_than_s=0.0)
        assert not any(TEMPORARY_PREFIX in path for path in survivor.tree()), f"operation {op.index}"
        assert violations(survivor.crash(survival="lost"), promised) == []


def test_the_same_seed_gives_the_same_survivors() -> None:
    def once(seed: int) -> dict[str, bytes]:
        disk = FakeDisk(seed=seed)
        disk.crash_after(40)
        with pytest.raises(PowerLostError):
            only_named(FlashTier(disk.root, disk))
        return disk.crash().tree()

    def only_named(tier: FlashTier) -> None:
        for number in range(20):  # packs alone: temporaries have random names
            writer = tier.create_pack(f"d/{number}", 9000)
            writer.write_at(0, memoryview(bytes([number]) * 9000))

    trees = [once(seed) for seed in (1, 1, 2, 3, 4)]
    assert trees[0] == trees[1]
    assert any(tree != trees[0] for tree in trees)
