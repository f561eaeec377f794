"""Random states of this process: Python, NumPy, torch on the CPU, and the accelerator's, kept per rank.

Each source is one object under the reserved root (`__safehold__.random.torch`), with the policy `derive`. With as many
ranks as were saved every rank gets its own states back, bit for bit. With another number of ranks, a source whose state
was the same on all ranks (as where all shuffle alike) is set to just that; one that differed is seeded per rank from
the first rank's state, the source's name, the new rank and the new number of ranks, so that the same resume always
gives the same streams. That is logged.

Invariants: reading touches no device (generators of an accelerator keep their state on the host) and initialises none.
"""

from __future__ import annotations

import hashlib
import logging
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from safehold.errors import StateMismatchError
from safehold.format.names import counted, join, split
from safehold.state.rank_values import RankValues
from safehold.state.tree import RESERVED_ROOT
from safehold.state.values import from_plain

log = logging.getLogger("safehold")

_ROOT: Final = (RESERVED_ROOT, "random")
_MAX_SEED: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class _Source:
    """One generator: `read` gives None where there is none; `seed` starts it from a number."""

    read: Callable[[], Any]
    write: Callable[[Any], None]
    seed: Callable[[int], None]


def is_random_name(name: str) -> bool:
    """Return whether a leaf of that name is a random state."""
    return name.startswith(RESERVED_ROOT + ".") and split(name)[:2] == _ROOT


def read_random_states() -> dict[str, Any]:
    """Return name -> value of every random state that this process has now; values as `to_plain` takes them."""
    found: dict[str, Any] = {}
    for source, entry in _sources().items():
        value = entry.read()
        if value is not None:
            found[join((*_ROOT, source))] = value
    return found


def write_random_states(values: Mapping[str, Any], *, rank: int, world_size: int) -> list[str]:
    """Set the random states of this process; must be the last thing that a restore does.

    Args:
        values: Name -> decoded plain value, or `RankValues` where the number of ranks changed; other names are ignored.
        rank: This rank.
        world_size: Number of ranks now.

    Returns:
        Sentences about sources that could not be set as they were saved; they were logged too.

    Raises:
        StateMismatchError: A generator refused its state.
    """
    sources = _sources()
    said: list[str] = []
    for name, value in sorted(values.items()):
        if not is_random_name(name):
            continue
        source = str(split(name)[-1])
        entry = sources.get(source)
        if entry is None:
            said.append(f"random state {source}: saved, but there is no such generator in this process")
            continue
        try:
            if not isinstance(value, RankValues):
                entry.write(from_plain(value))
            elif rank == 0 and len(value.values) == 1:
                entry.write(from_plain(_first(value)))
            elif value.equal and len(value.values) > 1:
                entry.write(from_plain(_first(value)))
                said.append(f"random state {source}: the same on all saved ranks, set to that on all ranks")
            else:
                entry.seed(derived_seed(source, _first(value), rank=rank, world_size=world_size))
                said.append(
                    f"random state {source}: saved by {counted(len(value.values), 'rank')}, seeded anew for rank {rank} of "
                    f"{world_size} from what was saved"
                )
        except (ValueError, TypeError, KeyError, RuntimeError, IndexError) as exc:
            raise StateMismatchError(f"{name}: the generator refused the saved state: {exc}", rank=rank) from exc
    for sentence in said:
        log.warning("safehold: %s", sentence)
    return said


def derived_seed(source: str, saved: Any, *, rank: int, world_size: int) -> int:
    """Return the seed of a rank of another world size: a hash of saved plain state, source, rank and world size."""
    text = repr((source, saved, rank, world_size)).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") & _MAX_SEED


def _first(value: RankValues) -> Any:
    return value.values[min(value.values)]


def _sources() -> dict[str, _Source]:
    sources = {
        "python": _Source(random.getstate, random.setstate, random.seed),
        "numpy": _Source(lambda: np.random.get_state(legacy=False), np.random.set_state, _seed_numpy),
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        sources["torch"] = _Source(torch.get_rng_state, torch.set_rng_state, _seed_torch)
        if torch.cuda.is_initialized() or torch.cuda.is_available():
            sources["cuda"] = _Source(_read_cuda, _write_cuda, torch.cuda.manual_seed)
        else:
            sources.update(_other_accelerator(torch))
    return sources


def _seed_numpy(seed: int) -> None:
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])


def _seed_torch(seed: int) -> None:
    sys.modules["torch"].default_generator.manual_seed(seed)


def _read_cuda() -> Any:
    """Return the states of all visible devices and which one is current; None if CUDA is not in use yet."""
    cuda = sys.modules["torch"].cuda
    if not cuda.is_initialized():
        return None
    return {"current": cuda.current_device(), "states": [entry.get_state() for entry in cuda.default_generators]}


def _write_cuda(value: Any) -> None:
    """Set every device's state; where the number of visible devices changed, the current one's only."""
    cuda = sys.modules["torch"].cuda
    states = value["states"]
    if len(states) == cuda.device_count():
        for index, state in enumerate(states):
            cuda.set_rng_state(state, index)
    else:
        cuda.set_rng_state(states[value["current"]], cuda.current_device())


def _other_accelerator(torch: Any) -> dict[str, _Source]:
    """Return the source of an accelerator that is no CUDA device, if torch has one in use."""
    current = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else None
    if current is None:
        return {}
    module = torch.get_device_module(current)
    if not all(hasattr(module, name) for name in ("get_rng_state", "set_rng_state", "manual_seed")):
        return {}
    in_use = getattr(module, "is_initialized", lambda: True)
    return {
        current.type: _Source(
            lambda: module.get_rng_state() if in_use() else None, module.set_rng_state, module.manual_seed
        )
    }
