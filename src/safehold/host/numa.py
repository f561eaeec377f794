"""Which memory is near which cores and GPUs, and putting arenas there.

Invariants: everything here is a preference: where the machine has one node, hides its nodes, or forbids binding, the
answer is None or False and memory is wherever the kernel puts it. A binding counts for pages that are touched after
it, so it comes before `memfd.populate`; for shared memory it holds for all processes. Nothing here is needed for
correctness.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from safehold.host import libc
from safehold.host.memfd import Mapping

_MPOL_PREFERRED = 1
_MPOL_F_NODE = 1
_MPOL_F_ADDR = 2
_MAX_NODES = 1024
_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


def nodes(root: str | Path = "/") -> dict[int, frozenset[int]]:
    """Return the NUMA nodes that the kernel shows, with their CPUs.

    Args:
        root: Where `/sys` is looked for; another one is for tests.
    """
    found = {}
    for entry in Path(root, "sys/devices/system/node").glob("node[0-9]*"):
        try:
            found[int(entry.name.removeprefix("node"))] = _parse_cpus((entry / "cpulist").read_text())
        except (OSError, ValueError):
            continue
    return dict(sorted(found.items()))


def _parse_cpus(text: str) -> frozenset[int]:
    """Read the kernel's form: `0-3,8,10-11`."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def node_of_cpus(cpus: frozenset[int] | None = None, *, root: str | Path = "/") -> int | None:
    """Return the node that has all of these CPUs; None if they are spread, or nothing is known.

    Args:
        cpus: None: those that this process may run on.
        root: As in `nodes`.
    """
    wanted = frozenset(os.sched_getaffinity(0)) if cpus is None else cpus
    holders = [node for node, members in nodes(root).items() if wanted and wanted <= members]
    return holders[0] if holders else None


def node_of_pci(address: str, *, root: str | Path = "/") -> int | None:
    """Return the node that a PCI device (`0000:65:00.0`) hangs on; None if the machine does not say."""
    try:
        node = int(Path(root, "sys/bus/pci/devices", address.lower(), "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def prefer(mapping: Mapping, node: int) -> bool:
    """Have pages of an arena that are touched from now on come from `node` while it has any; return whether that was
    taken.

    A preference, not a binding: where the node is full, pages come from elsewhere and nothing fails.
    """
    if mapping.size_bytes == 0 or not 0 <= node < _MAX_NODES:
        return False
    mask = (ctypes.c_ulong * (_MAX_NODES // _BITS))()
    mask[node // _BITS] = 1 << (node % _BITS)
    try:
        libc.syscall("mbind", mapping.address, mapping.size_bytes, _MPOL_PREFERRED, mask, _MAX_NODES + 1, 0)
    except OSError:
        return False
    return True


def node_at(mapping: Mapping, offset: int = 0) -> int | None:
    """Return the node that the page at `offset` lies on (it is touched by asking); None if the kernel does not say."""
    found = (ctypes.c_int * 1)()
    try:
        libc.syscall("get_mempolicy", found, None, 0, mapping.address + offset, _MPOL_F_NODE | _MPOL_F_ADDR)
    except OSError:
        return None
    return int(found[0])
