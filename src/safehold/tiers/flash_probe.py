"""A trial of a disk: what a run that lives there can rely on.

Invariants: works only inside one directory, which the caller made and removes.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from safehold.host import direct_io
from safehold.host.disk import Disk, join
from safehold.tiers.base import ProbeReport

# Gives a finished temporary its name unless that is taken, and says how.
Publish = Callable[[str, str, bytes], str]

_TRIAL_BYTES = 1 << 20


def probe(disk: Disk, directory: str, publish: Publish, *, use_direct: bool) -> ProbeReport:
    """Try out `disk` in `directory`.

    Raises:
        OSError: Files cannot be written there at all.
    """
    notes: list[str] = []
    system = disk.file_system()
    direct_align_bytes, allocates = _try_pack(disk, join(directory, "pack"), use_direct=use_direct)
    exclusive_by, exclusive = _try_exclusive(disk, directory, publish)
    fsync_works = disk.fsync_dir(directory)
    if not exclusive:
        notes.append("a file that must be created exclusively was overwritten: unfit as the place of a run")
    if exclusive_by == "create":
        notes.append("neither links nor exclusive renames: a crash can leave a torn record, which is then not believed")
    if not allocates:
        notes.append("space cannot be reserved: a full quota is met while a pack is being written")
    if not fsync_works:
        notes.append("directories cannot be fsynced: what survives a loss of power is up to the file system")
    if system.kind in ("tmpfs", "ramfs"):
        notes.append("this is memory: nothing survives the host")
    return ProbeReport(
        writable=True,
        exclusive_create=exclusive,
        exclusive_by=exclusive_by,
        direct_io=direct_align_bytes > 0,
        direct_align_bytes=direct_align_bytes,
        allocates=allocates,
        fsync_works=fsync_works,
        shared=system.shared,
        kind=system.kind,
        free_bytes=disk.free_bytes(),
        notes=tuple(notes),
    )


def _try_pack(disk: Disk, path: str, *, use_direct: bool) -> tuple[int, bool]:
    """Write and read back a trial pack; return direct I/O's alignment (0 without), and whether space was reserved."""
    buffered = disk.open(path, "create")
    direct = None
    try:
        direct = disk.open(path, "write", direct=True) if use_direct else None
        allocates = buffered.allocate(_TRIAL_BYTES)
        data, back = direct_io.aligned_buffer(_TRIAL_BYTES), direct_io.aligned_buffer(_TRIAL_BYTES)
        data[:] = os.urandom(_TRIAL_BYTES)
        align = 0
        if direct is not None and direct.direct is not None:
            align = direct.direct.offset_align if direct_io.write_direct(direct, buffered, data, 0) else 0
        else:
            direct_io.write_all(buffered, data, 0)
        buffered.fsync()
        if direct_io.read_all(buffered, back, 0) != _TRIAL_BYTES or back != data:
            raise OSError(None, "a trial file did not read back as it was written", path)
    finally:
        buffered.close()
        if direct is not None:
            direct.close()
    return align, allocates


def _try_exclusive(disk: Disk, directory: str, publish: Publish) -> tuple[str, bool]:
    how = ""
    for content in (b"first", b"second"):
        temporary = join(directory, f"temporary-{content.decode()}")
        file = disk.open(temporary, "create")
        try:
            direct_io.write_all(file, memoryview(content), 0)
            file.fsync()
        finally:
            file.close()
        try:
            how = publish(temporary, join(directory, "record"), content)
        except FileExistsError:
            return how, content == b"second"
    return how, False
