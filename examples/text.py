"""Shuffled batches of a text file as bytes, resumable at any batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class ShuffledText:
    """Cuts a text into sequences of bytes and deals them out, every epoch in another order.

    Its state is the number of the next sequence, the same on all ranks and for any number of ranks: batch `i` takes the next
    `batch_size` sequences for each rank in turn.
    """

    def __init__(self, path: Path, *, length: int, batch_size: int, rank: int, world_size: int, seed: int) -> None:
        data = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
        num_sequences = (len(data) - 1) // length
        self._inputs = data[: num_sequences * length].view(num_sequences, length)
        self._targets = data[1 : num_sequences * length + 1].view(num_sequences, length)
        self._batch_size, self._rank, self._world_size, self._seed = batch_size, rank, world_size, seed
        self._next = 0
        self._order: tuple[int, Tensor] | None = None

    def _sequence(self, number: int) -> int:
        epoch, position = divmod(number, len(self._inputs))
        if self._order is None or self._order[0] != epoch:
            generator = torch.Generator().manual_seed(self._seed + epoch)
            self._order = (epoch, torch.randperm(len(self._inputs), generator=generator))
        return int(self._order[1][position])

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield inputs and targets, each (batch_size, length), for ever."""
        while True:
            first = self._next + self._rank * self._batch_size
            chosen = [self._sequence(number) for number in range(first, first + self._batch_size)]
            self._next += self._world_size * self._batch_size
            yield self._inputs[chosen].long(), self._targets[chosen].long()

    def state_dict(self) -> dict[str, Any]:
        """Return where the next batch begins."""
        return {"next": self._next, "seed": self._seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken."""
        self._next, self._seed, self._order = state["next"], state["seed"], None
