"""What the machine itself can do with the same bytes: the limits that every figure stands beside.

    python benchmarks/limits.py --bytes 3000000000 --processes 2 --dir /scratch

- copy: each process copies its share as one block into populated shared memory, all at once; seconds of the slowest. Blocks of some
  hundred MB are copied past the caches, which tensors are too small for; the plain copy of the tensors themselves is in `ours.py`.
- write, read: one process moves all bytes in large aligned direct requests, into (from) as many files as there are processes, with 1,
  2 and 4 threads; the best counts. Writing includes allocation and `fdatasync`. What is written lies in memory as a state does, all of
  it at once and in huge pages: the same few megabytes again and again come out of caches, which took 0.75 of the time here.

Prints one JSON object. Needs NumPy and nothing else.
"""

from __future__ import annotations

import argparse
import json
import mmap
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

BLOCK_BYTES = 8 << 20
POOL_BYTES = 64 << 20
THREADS = (1, 2, 4)


def _copy_worker(share_bytes: int, rounds: int, barrier: Any, results: Any) -> None:
    source = np.random.default_rng(os.getpid()).integers(0, 256, POOL_BYTES, dtype=np.uint8)
    source = np.resize(source, share_bytes)
    fd = os.memfd_create("copy-limit")
    os.ftruncate(fd, share_bytes)
    target = np.frombuffer(mmap.mmap(fd, share_bytes), dtype=np.uint8)
    np.copyto(target, source)  # populates
    for _ in range(rounds):
        barrier.wait()
        begun = time.perf_counter()
        np.copyto(target, source)
        results.put(time.perf_counter() - begun)
        barrier.wait()


def measure_copy(total_bytes: int, *, processes: int, rounds: int) -> list[float]:
    """Return, per round, the seconds that the slowest process takes to copy its share into populated memory."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(processes + 1), context.SimpleQueue()
    share = max(1, total_bytes // processes)
    workers = [
        context.Process(target=_copy_worker, args=(share, rounds, barrier, results), daemon=True)
        for _ in range(processes)
    ]
    for worker in workers:
        worker.start()
    slowest = []
    try:
        for _ in range(rounds):
            barrier.wait(120)
            barrier.wait(120)
            slowest.append(max(results.get() for _ in workers))
    finally:
        for worker in workers:
            worker.join(5)
            worker.kill()
    return slowest


def _in_threads(number: int, work: Callable[[int], None]) -> float:
    """Run `work(0..number-1)` in threads; return the seconds. The first error is raised."""
    errors: list[BaseException] = []

    def guarded(index: int) -> None:
        try:
            work(index)
        except BaseException as exc:
            errors.append(exc)

    threads = [threading.Thread(target=guarded, args=(index,)) for index in range(number)]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return time.perf_counter() - begun


def _share(blocks: list[tuple[int, int, int]], index: int, number: int) -> list[tuple[int, int, int]]:
    """Return thread `index`'s contiguous share of the blocks."""
    return blocks[len(blocks) * index // number : len(blocks) * (index + 1) // number]


class DiskLimit:
    """Writes and reads the same bytes as plainly as it goes."""

    def __init__(self, directory: Path, total_bytes: int, *, num_files: int) -> None:
        """`total_bytes` is rounded up to whole blocks of 4096 bytes per file."""
        self._paths = [directory / f"limit-{index}.bin" for index in range(num_files)]
        self._file_bytes = -(-total_bytes // num_files // 4096) * 4096
        self.total_bytes = self._file_bytes * num_files
        self._direct = os.O_DIRECT if self.takes_direct(directory) else 0
        source = mmap.mmap(-1, self.total_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):
            source.madvise(mmap.MADV_HUGEPAGE)  # fewer, larger segments for the device
        pool = np.random.default_rng(1).integers(0, 256, POOL_BYTES, dtype=np.uint8).tobytes()
        for at in range(0, self.total_bytes, POOL_BYTES):
            source[at : at + POOL_BYTES] = pool[: min(POOL_BYTES, self.total_bytes - at)]
        self._source = memoryview(source)

    @property
    def is_direct(self) -> bool:
        """Whether the file system takes direct I/O; else the page cache is in between."""
        return bool(self._direct)

    @staticmethod
    def takes_direct(directory: Path) -> bool:
        """Whether the file system of a directory takes direct I/O."""
        path = directory / "direct-probe.bin"
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
            try:
                return os.pwrite(fd, mmap.mmap(-1, 4096), 0) == 4096
            finally:
                os.close(fd)
        except OSError:
            return False
        finally:
            path.unlink(missing_ok=True)

    def write(self, threads: int) -> float:
        """Write fresh files; return the seconds until the bytes are on the disk."""
        for path in self._paths:
            path.unlink(missing_ok=True)
        begun = time.perf_counter()
        fds = [os.open(path, os.O_WRONLY | os.O_CREAT | self._direct, 0o600) for path in self._paths]
        try:
            for fd in fds:
                with suppress(OSError):
                    os.posix_fallocate(fd, 0, self._file_bytes)
            blocks = _blocks(fds, [self._file_bytes] * len(fds))

            def work(index: int) -> None:
                for fd, at, size in _share(blocks, index, threads):
                    begin = fds.index(fd) * self._file_bytes + at
                    if os.pwrite(fd, self._source[begin : begin + size], at) != size:
                        raise OSError("short write")

            _in_threads(threads, work)
            for fd in fds:
                os.fdatasync(fd)
        finally:
            for fd in fds:
                os.close(fd)
        return time.perf_counter() - begun

    def read(self, threads: int) -> float:
        """Read the files that `write` left, past the page cache; return the seconds."""
        return read_files(self._paths, threads, direct=self.is_direct)

    def remove(self) -> None:
        """Delete the files."""
        for path in self._paths:
            path.unlink(missing_ok=True)


def _blocks(fds: list[int], sizes: list[int]) -> list[tuple[int, int, int]]:
    return [
        (fd, at, min(BLOCK_BYTES, size - at))
        for fd, size in zip(fds, sizes, strict=True)
        for at in range(0, size, BLOCK_BYTES)
    ]


def read_files(paths: list[Path], threads: int, *, direct: bool) -> float:
    """Read whole files, past the page cache; return the seconds. Where a file lies can count more than how it is read."""
    fds = [os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0)) for path in paths]
    try:
        if not direct:
            for fd in fds:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        blocks = _blocks(fds, [path.stat().st_size for path in paths])
        buffers = [mmap.mmap(-1, BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(threads)]
        for buffer in buffers:
            with suppress(OSError):
                buffer.madvise(mmap.MADV_HUGEPAGE)
            buffer[:] = b"\1" * BLOCK_BYTES

        def work(index: int) -> None:
            view = memoryview(buffers[index])
            for fd, at, size in _share(blocks, index, threads):
                if os.preadv(fd, [view[:size]], at) != size:
                    raise OSError("short read")

        return _in_threads(threads, work)
    finally:
        for fd in fds:
            os.close(fd)


def measure_packs(run: Path) -> float:
    """Return the seconds that reading the packs of the newest checkpoint takes at best: a restore reads these very bytes."""
    newest = max(run.glob("checkpoints/*/*/manifest.json")).parent
    paths = sorted(newest.glob("*.safetensors"))
    direct = DiskLimit.takes_direct(newest)
    return min(read_files(paths, threads, direct=direct) for threads in THREADS)


def measure_disk(directory: Path, total_bytes: int, *, num_files: int, rounds: int) -> dict[str, Any]:
    """Return medians of `rounds` per number of threads, and the best of them, in seconds."""
    limit = DiskLimit(directory, total_bytes, num_files=num_files)
    writes: dict[int, list[float]] = {threads: [] for threads in THREADS}
    reads: dict[int, list[float]] = {threads: [] for threads in THREADS}
    try:
        for _ in range(rounds):
            for threads in THREADS:
                writes[threads].append(limit.write(threads))
                reads[threads].append(limit.read(threads))
    finally:
        limit.remove()
    write = {threads: statistics.median(seconds) for threads, seconds in writes.items()}
    read = {threads: statistics.median(seconds) for threads, seconds in reads.items()}
    return {
        "bytes": limit.total_bytes,
        "direct": limit.is_direct,
        "write_s": min(write.values()),
        "read_s": min(read.values()),
        "write_s_by_threads": write,
        "read_s_by_threads": read,
    }


def measure(directory: Path, total_bytes: int, *, processes: int, rounds: int) -> dict[str, Any]:
    """Measure copy, write and read of `total_bytes`."""
    copies = measure_copy(total_bytes, processes=processes, rounds=max(3, rounds))
    disk = measure_disk(directory, total_bytes, num_files=processes, rounds=rounds)
    return {**disk, "copy_s": statistics.median(copies)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path, help="where to write; default: a temporary directory")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="limits-", dir=arguments.dir) as scratch:
        result = measure(Path(scratch), arguments.bytes, processes=arguments.processes, rounds=arguments.rounds)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
