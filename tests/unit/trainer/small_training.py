"""A small model that steps deterministically, and what a run directory holds of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import safehold
from safehold.pipeline.catalog import Catalog
from safehold.tiers.open import open_tier


class Training:
    """A small model that steps deterministically."""

    def __init__(self, *, num_optimizers: int = 1, size: int = 32) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.ModuleList(torch.nn.Linear(size, size) for _ in range(num_optimizers))
        self.optimizers = [torch.optim.AdamW(part.parameters(), lr=0.1) for part in self.model]
        self.num_steps = 0

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizers": self.optimizers, "counter": self.num_steps}

    def backward(self) -> None:
        data = torch.full((4, self.model[0].in_features), 0.5)
        for part in self.model:
            data = torch.tanh(part(data))
        data.sum().backward()

    def step(self, *, accumulate: int = 1) -> None:
        for _ in range(accumulate):
            self.backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.num_steps += 1

    def digest(self) -> list[np.ndarray]:
        found = [parameter.detach().numpy().copy() for parameter in self.model.parameters()]
        for optimizer in self.optimizers:
            for entry in optimizer.state.values():
                found += [entry[name].numpy().copy() for name in sorted(entry)]
        return found


def same(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return len(one) == len(other) and all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def steps_in(ckpt: safehold.Checkpointer) -> list[int]:
    return sorted(view.commit.step for view in Catalog(open_tier(ckpt.path)).commits())
