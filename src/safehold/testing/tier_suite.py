"""The suite that every tier passes: derive from it, say how a tier is made, and pytest runs the rest.

    class TestFlashTier(TierSuite):
        def make_tier(self, directory: Path) -> Tier:
            return FlashTier(directory / "run")

`make_tier` is called once for each test, with a fresh empty directory; `reopen` again for the same place where a test
wants to see what another process would see. What a tier cannot do by nature is said by the class attributes.
"""

from __future__ import annotations

import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import pytest

from safehold.errors import TornFileError
from safehold.tiers.base import TEMPORARY_PREFIX, PackReader, PackWriter, Tier

MIB = 1 << 20


def pattern(nbytes: int, seed: int = 0) -> bytes:
    """Return bytes of which no two blocks are equal, the same each time."""
    return random.Random(seed).randbytes(nbytes)


class TierSuite:
    """The tests; see the head of this module.

    Attributes:
        exclusive: Whether `put(exclusive=True)` is honoured; a tier without can only be a replica.
        pack_bytes: Size of the larger packs.
    """

    exclusive: ClassVar[bool] = True
    pack_bytes: ClassVar[int] = 3 * MIB

    def make_tier(self, directory: Path) -> Tier:
        """Return a fresh tier that keeps everything in `directory`; the class that derives says how."""
        raise NotImplementedError

    def reopen(self, tier: Tier, directory: Path) -> Tier:
        """Return a tier that sees what `tier` has stored."""
        return tier

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Tier:
        """The tier under test."""
        return self.make_tier(tmp_path)

    def test_follows_the_protocol(self, tier: Tier) -> None:
        """It has all methods, a name and a URL."""
        assert isinstance(tier, Tier)
        assert tier.name and "://" in tier.url

    def test_put_then_get(self, tier: Tier, tmp_path: Path) -> None:
        """A file reads back as it was put, by others too."""
        for path, data in (("run.json", b"{}"), ("incarnations/1.json", b""), ("a/b/c/d.json", pattern(200_001))):
            tier.put(path, data)
            for other in (tier, self.reopen(tier, tmp_path)):
                assert other.get(path, limit_bytes=MIB) == data
                assert other.size(path) == len(data)

    def test_put_replaces(self, tier: Tier) -> None:
        """A put replaces an older file as a whole, shorter or longer."""
        for data in (pattern(5000), b"x", pattern(9000, 7), b""):
            tier.put("pins/000000010.json", data)
            assert tier.get("pins/000000010.json", limit_bytes=MIB) == data
        assert [entry.name for entry in tier.list("pins")] == ["000000010.json"]

    def test_exclusive_put_refuses(self, tier: Tier) -> None:
        """An exclusive put refuses a name that is taken, and changes nothing."""
        if not self.exclusive:
            pytest.skip("the tier does not create exclusively, and says so")
        tier.put("incarnations/1.json", b"first", exclusive=True)
        for data in (b"first", b"second"):
            with pytest.raises(FileExistsError):
                tier.put("incarnations/1.json", data, exclusive=True)
        assert tier.get("incarnations/1.json", limit_bytes=100) == b"first"
        assert [entry.name for entry in tier.list("incarnations")] == ["1.json"]

    def test_exclusive_put_has_one_winner(self, tier: Tier) -> None:
        """Of many exclusive puts at once exactly one succeeds, and its content is what is there."""
        if not self.exclusive:
            pytest.skip("the tier does not create exclusively, and says so")
        barrier = threading.Barrier(8)

        def attempt(number: int) -> int | None:
            barrier.wait()
            try:
                tier.put("incarnations/2.json", b"%d" % number * 1000, exclusive=True)
            except FileExistsError:
                return None
            return number

        with ThreadPoolExecutor(8) as pool:
            winners = [number for number in pool.map(attempt, range(8)) if number is not None]
        assert len(winners) == 1
        assert tier.get("incarnations/2.json", limit_bytes=MIB) == b"%d" % winners[0] * 1000

    def test_readers_see_whole_files(self, tier: Tier) -> None:
        """While a file is replaced again and again, every read gives one of its versions."""
        versions = [bytes([number]) * (1000 * (number + 1)) for number in range(4)]
        tier.put("f.json", versions[0])
        stop = threading.Event()

        def replace() -> None:
            for number in range(40):
                tier.put("f.json", versions[number % 4])
            stop.set()

        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(replace)
            while not stop.is_set() and not done.done():
                assert tier.get("f.json", limit_bytes=MIB, retry_s=5.0) in versions
            done.result()

    def test_get_of_what_is_absent(self, tier: Tier) -> None:
        """What is not there is `FileNotFoundError` on reads, fine on deletes, empty when listed."""
        for path in ("absent.json", "no/such/dir/absent.json"):
            with pytest.raises(FileNotFoundError):
                tier.get(path, limit_bytes=10)
            with pytest.raises(FileNotFoundError):
                tier.size(path)
            with pytest.raises(FileNotFoundError):
                tier.open_pack(path)
            tier.delete(path)
            tier.delete_tree(path)
        assert tier.list("") == []
        assert tier.list("no/such") == []

    def test_get_is_bounded(self, tier: Tier) -> None:
        """A file larger than the limit is refused by name, one of that size is not."""
        tier.put("plans/abc", pattern(1000))
        assert len(tier.get("plans/abc", limit_bytes=1000)) == 1000
        with pytest.raises(TornFileError, match="plans/abc"):
            tier.get("plans/abc", limit_bytes=999)

    def test_list(self, tier: Tier) -> None:
        """Names come sorted, with kind and size."""
        tier.put("d/b.json", b"12345")
        tier.put("d/a.json", b"")
        tier.put("d/sub/x.json", b"1")
        assert [(entry.name, entry.is_dir, entry.size_bytes) for entry in tier.list("d")] == [
            ("a.json", False, 0),
            ("b.json", False, 5),
            ("sub", True, 0),
        ]
        assert [entry.name for entry in tier.list("")] == ["d"]

    def test_delete(self, tier: Tier) -> None:
        """A deleted file is gone, its neighbours stay; the name can be taken again."""
        tier.put("d/a.json", b"a", exclusive=self.exclusive)
        tier.put("d/b.json", b"b")
        tier.delete("d/a.json")
        assert [entry.name for entry in tier.list("d")] == ["b.json"]
        tier.put("d/a.json", b"again", exclusive=self.exclusive)
        assert tier.get("d/a.json", limit_bytes=10) == b"again"

    def test_delete_if_empty(self, tier: Tier) -> None:
        """Only what has nothing in it goes; what is absent is no error."""
        tier.put("c/10/1-0/a", b"x")
        tier.delete_if_empty("c/10")
        assert tier.get("c/10/1-0/a", limit_bytes=1) == b"x"
        tier.delete_tree("c/10/1-0")
        tier.delete_if_empty("c/10")
        assert [entry.name for entry in tier.list("c")] == []
        tier.delete_if_empty("c/10")

    def test_delete_tree(self, tier: Tier) -> None:
        """A deleted tree is gone with all in it, those beside it stay."""
        for path in ("c/10/1-0/m.json", "c/10/1-0/sub/n.json", "c/10/1-1/m.json", "c/100/1-0/m.json"):
            tier.put(path, b"x")
        tier.delete_tree("c/10/1-0")
        assert [entry.name for entry in tier.list("c/10")] == ["1-1"]
        tier.delete_tree("c/10")
        assert [entry.name for entry in tier.list("c")] == ["100"]
        assert tier.get("c/100/1-0/m.json", limit_bytes=10) == b"x"

    def test_temporaries(self, tier: Tier) -> None:
        """Nothing temporary is left or shown after whole operations, and sweeping takes nothing else."""
        tier.put("d/a.json", b"1")
        tier.put("d/a.json", b"2")
        tier.put("d/x/y.json", b"2")
        tier.delete_tree("d/x")
        assert tier.sweep_temporaries("d", older_than_s=0.0) == ()
        assert [entry.name for entry in tier.list("d")] == ["a.json"]
        assert not any(entry.name.startswith(TEMPORARY_PREFIX) for entry in tier.list(""))

    @pytest.mark.parametrize("path", ["../x", "/etc/x", "a/../b", "a//b", "./a", "a\0b", "a/", "x" * 300])
    def test_unsafe_paths_are_refused(self, tier: Tier, path: str) -> None:
        """No operation takes a path that could lead elsewhere."""
        with pytest.raises(ValueError):
            tier.put(path, b"x")
        with pytest.raises(ValueError):
            tier.get(path, limit_bytes=1)
        with pytest.raises(ValueError):
            tier.create_pack(path, 1)
        with pytest.raises(ValueError):
            tier.delete_tree(path)
        with pytest.raises(ValueError):
            tier.delete(path)

    def test_root_is_not_deleted(self, tier: Tier) -> None:
        """The run directory itself cannot be removed."""
        tier.put("run.json", b"x")
        with pytest.raises(ValueError):
            tier.delete_tree("")
        assert tier.get("run.json", limit_bytes=10) == b"x"

    def test_pack_written_in_order(self, tier: Tier, tmp_path: Path) -> None:
        """A pack of aligned blocks reads back as a whole."""
        data = pattern(self.pack_bytes)
        writer = tier.create_pack("c/000000010/1-0/00000-00000.0.safetensors", len(data))
        assert isinstance(writer, PackWriter)
        for at in range(0, len(data), MIB):
            writer.write_at(at, memoryview(data)[at : at + MIB])
        writer.finish()
        tier.sync_tree("c/000000010/1-0")
        assert _whole(self.reopen(tier, tmp_path), "c/000000010/1-0/00000-00000.0.safetensors") == data

    @pytest.mark.parametrize("size", [0, 1, 511, 4096, 4097, 100_003])
    def test_pack_of_any_size(self, tier: Tier, size: int) -> None:
        """Nothing has to be aligned: neither sizes nor offsets nor addresses."""
        data = pattern(size, size)
        writer = tier.create_pack("p", size)
        spoiled = memoryview(bytearray(b"?" + data))[1:]  # an odd address
        for at in range(0, size, 9_001):
            writer.write_at(at, spoiled[at : at + 9_001])
        writer.finish()
        assert tier.size("p") == size
        assert _whole(tier, "p") == data

    def test_pack_written_by_threads(self, tier: Tier) -> None:
        """Blocks may be written in any order by several threads."""
        data = pattern(self.pack_bytes + 5)
        writer = tier.create_pack("p", len(data))
        blocks = [(at, memoryview(data)[at : at + 100_000]) for at in range(0, len(data), 100_000)]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda block: writer.write_at(*block), reversed(blocks)))
        writer.finish()
        assert _whole(tier, "p") == data

    def test_pack_read_anywhere(self, tier: Tier) -> None:
        """Any range reads into any buffer, by several threads at once."""
        data = pattern(1 * MIB + 77)
        _write(tier, "p", data)
        ranges = [(0, 1), (1, 4096), (4096, 4096), (4095, 2), (8191, 70_000), (MIB - 3, 80), (0, len(data)), (5, 0)]
        for direct in (True, False):
            reader = tier.open_pack("p", direct=direct)
            assert isinstance(reader, PackReader)
            assert reader.size_bytes == len(data)

            def check(task: tuple[int, int, int], reader: PackReader = reader) -> None:
                offset, nbytes, shift = task
                buffer = bytearray(nbytes + 64)
                reader.read_into(offset, memoryview(buffer)[shift : shift + nbytes])
                assert buffer == bytes(shift) + data[offset : offset + nbytes] + bytes(64 - shift)

            with ThreadPoolExecutor(4) as pool:
                list(pool.map(check, [(*entry, shift) for entry in ranges for shift in (0, 1, 16)]))
            reader.close()
            reader.close()

    def test_pack_reads_are_exact(self, tier: Tier) -> None:
        """A range that the pack does not have is `TornFileError`, never a short read."""
        _write(tier, "p", pattern(10_000))
        for direct in (True, False):
            reader = tier.open_pack("p", direct=direct)
            for offset, nbytes in ((9_999, 2), (10_000, 1), (0, 10_001), (20_000, 5)):
                with pytest.raises(TornFileError):
                    reader.read_into(offset, memoryview(bytearray(nbytes)))
            reader.close()

    def test_pack_is_created_once(self, tier: Tier) -> None:
        """A name that is taken is refused, and what is there stays."""
        _write(tier, "c/p", b"content")
        with pytest.raises(FileExistsError):
            tier.create_pack("c/p", 10)
        assert _whole(tier, "c/p") == b"content"

    def test_pack_aborted(self, tier: Tier) -> None:
        """An aborted pack is gone; abort can be repeated, and does nothing after finish."""
        writer = tier.create_pack("c/p", 10_000)
        writer.write_at(0, memoryview(bytes(5000)))
        writer.abort()
        writer.abort()
        assert [entry.name for entry in tier.list("c")] == []
        writer = tier.create_pack("c/p", 4)
        writer.write_at(0, memoryview(b"good"))
        writer.finish()
        writer.abort()
        assert _whole(tier, "c/p") == b"good"

    def test_pack_ranges_are_checked(self, tier: Tier) -> None:
        """Writes outside of the pack, and after its end, are refused."""
        writer = tier.create_pack("p", 100)
        for offset, nbytes in ((-1, 1), (100, 1), (50, 51)):
            with pytest.raises(ValueError):
                writer.write_at(offset, memoryview(bytes(nbytes)))
        writer.write_at(0, memoryview(bytes(100)))
        writer.finish()
        with pytest.raises(ValueError):
            writer.write_at(0, memoryview(b"x"))

    def test_make_directory_and_sync(self, tier: Tier) -> None:
        """Directories can be made ahead, and again."""
        tier.make_directory("checkpoints/000000010/1-0")
        tier.make_directory("checkpoints/000000010/1-0")
        tier.put("checkpoints/000000010/1-0/manifest.json", b"m")
        tier.sync_tree("checkpoints/000000010/1-0")
        tier.sync_tree("")
        assert tier.get("checkpoints/000000010/1-0/manifest.json", limit_bytes=10) == b"m"

    def test_probe(self, tier: Tier) -> None:
        """The probe tells the truth about what the suite relies on, and leaves nothing behind."""
        report = tier.probe()
        assert report.writable
        assert report.exclusive_create is self.exclusive
        free = tier.free_bytes()
        assert free is None or free > 0
        assert tier.list("") == []
        assert tier.sweep_temporaries("", older_than_s=0.0) == ()


def _write(tier: Tier, path: str, data: bytes) -> None:
    writer = tier.create_pack(path, len(data))
    writer.write_at(0, memoryview(data))
    writer.finish()


def _whole(tier: Tier, path: str) -> bytes:
    reader = tier.open_pack(path)
    try:
        buffer = bytearray(reader.size_bytes)
        reader.read_into(0, memoryview(buffer))
        return bytes(buffer)
    finally:
        reader.close()


def shared_memory_directory() -> Path | None:
    """Return a directory on a tmpfs, or None where there is none that can be written."""
    path = Path("/dev/shm")
    return path if path.is_dir() and os.access(path, os.W_OK) else None
