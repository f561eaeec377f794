"""Reads many small files a few at a time: on network file systems each costs a round trip."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

N = TypeVar("N")
T = TypeVar("T")

RECORD_READERS = 8


def read_of_all(read: Callable[[N], T], nodes: Sequence[N]) -> list[T]:
    """Return what `read` returns for each, several at a time where they are many; the first that raises is raised."""
    if len(nodes) <= RECORD_READERS:
        return [read(node) for node in nodes]
    with ThreadPoolExecutor(RECORD_READERS) as pool:
        return list(pool.map(read, nodes))
