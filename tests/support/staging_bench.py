"""An arena with a control that checks what it is told: the staged word may speak only of bytes that are there."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from safehold.host import memfd
from safehold.host.device import Device
from safehold.host.memfd import Mapping
from safehold.pipeline.staging import StageItem, Stager


class Checker:
    """Takes the place of the control block; `expected` is what the arena must hold at the end."""

    def __init__(self, mapping: Mapping) -> None:
        self.mapping = mapping
        self.expected = b""
        self.told: list[int] = []
        self.wrong: list[int] = []

    def advance_staged(self, num_bytes: int) -> None:
        """Look at the prefix at the very moment it is announced."""
        begin = self.told[-1] if self.told else 0
        if num_bytes < begin or self.mapping.view[begin:num_bytes] != self.expected[begin:num_bytes]:
            self.wrong.append(num_bytes)
        self.told.append(num_bytes)


class Bench:
    """Lays views out in an arena as packs would, with gaps, and stages them."""

    def __init__(
        self, device: Device, leaves: list[tuple[str, Any, bytes, bool]], *, size_bytes: int | None = None
    ) -> None:
        self.items: list[StageItem] = []
        offset = 4096
        for name, view, value, hooked in leaves:
            offset = -(-offset // 64) * 64
            self.items.append(StageItem(view=view, offset=offset, nbytes=len(value), hooked=hooked, name=name))
            offset += len(value)
        self.end = -(-offset // 4096) * 4096
        fd = memfd.create(self.end if size_bytes is None else size_bytes, "bench")
        self.mapping = Mapping(fd)
        os.close(fd)
        self.checker = Checker(self.mapping)
        self.stager = Stager(device, self.mapping, self.checker)
        expected = bytearray(self.end)
        expected[:4] = b"head"
        for item, (_, _, value, _) in zip(self.items, leaves, strict=True):
            expected[item.offset : item.offset + item.nbytes] = value
        self.checker.expected = bytes(expected)
        if size_bytes is None:
            self.mapping.view[:4] = b"head"

    def stage(self, *, overlap: bool) -> Any:
        self.checker.told.clear()
        return self.stager.stage(self.items, overlap=overlap)

    def close(self) -> None:
        self.stager.close()
        assert self.mapping.close()

    def assert_exact(self) -> None:
        assert self.checker.wrong == []
        assert self.checker.told[-1] == self.end
        assert bytes(self.mapping.view) == self.checker.expected


def random_bytes(seed: int, size: int) -> bytes:
    return np.random.default_rng(seed).bytes(size)
