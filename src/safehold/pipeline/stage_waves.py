"""Staging what is larger than the arena, through it as a ring.

Invariants: byte `n` of the packs lies at `n % ring_bytes`; nothing is overwritten before the flusher has written it;
the staged word is told before every wait, so flusher and stager never wait for each other as long as the ring holds a
wave and a block of the flusher.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from safehold.errors import ConfigurationError, DeadlineError
from safehold.host import memfd
from safehold.host.device import Copier, Device, Piece, PieceError
from safehold.host.memfd import Mapping
from safehold.pipeline.stage_work import Control, StageItem, pieces_of, translate

_WAVE_BYTES = 8 << 20
_LIMIT_S = 600.0


class Ring:
    """An arena used modulo its size."""

    def __init__(self, device: Device, copier: Copier, mapping: Mapping, ring_bytes: int) -> None:
        """Use the first `ring_bytes` of an arena.

        Raises:
            ConfigurationError: The ring is not a positive multiple of 4096 bytes, or larger than the arena.
        """
        if ring_bytes % 4096 or not 0 < ring_bytes <= mapping.size_bytes:
            raise ConfigurationError(f"a ring of {ring_bytes} bytes does not fit an arena of {mapping.size_bytes}")
        self._copier = copier
        self._mapping = mapping
        self.ring_bytes = ring_bytes
        self.wave_bytes = min(_WAVE_BYTES, ring_bytes // 4)
        # A piece that goes over the end of the ring is copied here first: a strided one cannot be cut anywhere.
        scratch_fd = memfd.create(self.wave_bytes, "scratch")
        self._scratch = Mapping(scratch_fd)
        os.close(scratch_fd)
        self._scratch_copier = device.copier(self._scratch)

    def write(self, piece: Piece) -> None:
        """Copy a piece of at most `wave_bytes` to its place, and wait until it is there."""
        view, offset, nbytes = piece
        start = offset % self.ring_bytes
        if start + nbytes <= self.ring_bytes:
            _copy(self._copier, (view, start, nbytes))
            return
        if nbytes > self._scratch.size_bytes:
            raise ConfigurationError(f"one element of {nbytes} bytes is longer than a wave of {self.wave_bytes}")
        _copy(self._scratch_copier, (view, 0, nbytes))
        head = self.ring_bytes - start
        self._mapping.view[start : start + head] = self._scratch.view[:head]
        self._mapping.view[: nbytes - head] = self._scratch.view[head:nbytes]

    def close(self) -> None:
        """Free the scratch memory."""
        self._scratch_copier.close()
        self._scratch.close()


def _copy(copier: Copier, piece: Piece) -> None:
    copier.copy([piece])
    if not copier.reached(copier.mark(), _LIMIT_S):
        raise DeadlineError(f"the device did not copy {piece[2]} bytes within {_LIMIT_S:.0f} s")


def stage_through(
    ring: Ring,
    copier: Copier,
    control: Control,
    items: Iterable[StageItem],
    wait_flushed: Callable[[int], None],
) -> int:
    """Stage items that leave no gaps, in order; return where they end.

    Raises:
        ConfigurationError: There is a gap.
        CheckpointError: A copy failed, or what `wait_flushed` raised.
    """
    staged = told = 0
    for item in items:
        if item.offset != staged:
            raise ConfigurationError(
                f"{item.name} begins at {item.offset}, not at {staged}: waves need all bytes as items"
            )
        copier.begin([item.view])
        for piece in pieces_of(copier, [item], ring.wave_bytes)[0]:
            end = piece[1] + piece[2]
            if end > ring.ring_bytes:
                if staged > told:
                    control.advance_staged(staged)
                    told = staged
                wait_flushed(end - ring.ring_bytes)
            try:
                ring.write(piece)
            except PieceError as exc:
                raise translate(exc.__cause__ or exc, item.name) from exc.__cause__
            staged = end
            if staged - told >= ring.wave_bytes:
                control.advance_staged(staged)
                told = staged
    return staged
