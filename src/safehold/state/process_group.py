"""Finds the launcher's store through torch.distributed, or through the environment that torchrun sets."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

from safehold.errors import ConfigurationError
from safehold.types import Membership

STORE_TIMEOUT_S = 300.0


def launcher_store(store: Any = None) -> Membership:
    """Return rank, world size and store of this process.

    A process without torch and without a launcher's environment is a world of one.

    Args:
        store: Use this store instead of the launcher's.

    Raises:
        ConfigurationError: The environment speaks of several ranks and no store can be reached.
    """
    env_world = _number("WORLD_SIZE", 1)
    if "torch" not in sys.modules and env_world == 1:
        return Membership(rank=0, world_size=1, store=None)
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        world = dist.get_world_size()
        found = store if store is not None else _default_store()
        return Membership(rank=dist.get_rank(), world_size=world, store=found if world > 1 else None)
    if env_world == 1:
        return Membership(rank=0, world_size=1, store=None)
    rank = _number("RANK", -1)
    if store is None:
        from torch._C._distributed_c10d import PrefixStore, TCPStore

        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            hint = "call torch.distributed.init_process_group before making the Checkpointer"
            raise ConfigurationError(f"WORLD_SIZE is {env_world} and torch.distributed is not initialised", hint=hint)
        store = TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            timeout=timedelta(seconds=STORE_TIMEOUT_S),
        )
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = PrefixStore(f"safehold/attempt_{attempt}", store)
    if not 0 <= rank < env_world:
        raise ConfigurationError(f"RANK is {rank} in a world of {env_world}", hint="start the script with torchrun")
    return Membership(rank=rank, world_size=env_world, store=store)


def _default_store() -> Any:
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def _number(name: str, default: int) -> int:
    try:
        return int(os.environ.get(name, default))
    except ValueError as exc:
        raise ConfigurationError(f"{name}={os.environ[name]!r} is no number") from exc
