"""Objects with `state_dict` and `load_state_dict` that are neither module nor optimizer: schedulers, data loaders, loss
scalers.

Invariants: `state_dict()` is called once per walk, `load_state_dict()` once per restore, both in the trainer's thread;
what they do is the object's own affair, except where an adapter below says why.
"""

from __future__ import annotations

import sys
from typing import Any

from safehold.errors import StateMismatchError, UnsupportedStateError


def is_stateful(value: Any) -> bool:
    """Return whether `value` has both `state_dict` and `load_state_dict`."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def state_dict_of(stateful: Any, *, name: str) -> Any:
    """Return what `state_dict()` gives.

    torch's `GradScaler.state_dict()` reads its scale back from the device, which would make every save wait for all
    kernels; here the live tensors stand in for the numbers.

    Raises:
        UnsupportedStateError: `state_dict()` raised.
    """
    if _is_scaler(stateful) and stateful.is_enabled() and stateful._scale is not None:
        return {
            "scale": stateful._scale,
            "growth_factor": stateful._growth_factor,
            "backoff_factor": stateful._backoff_factor,
            "growth_interval": stateful._growth_interval,
            "_growth_tracker": stateful._growth_tracker,
        }
    try:
        return stateful.state_dict()
    except Exception as exc:
        raise UnsupportedStateError(f"{name}: state_dict() of {_type_of(stateful)} failed: {exc!r}") from exc


def load_state_dict_into(stateful: Any, given: Any, *, name: str) -> None:
    """Call `load_state_dict(given)`.

    Raises:
        StateMismatchError: It raised; the object may be half restored.
    """
    if _is_scaler(stateful) and isinstance(given, dict):
        torch = sys.modules["torch"]
        given = {key: item.item() if isinstance(item, torch.Tensor) else item for key, item in given.items()}
    try:
        stateful.load_state_dict(given)
    except Exception as exc:
        raise StateMismatchError(
            f"{name}: load_state_dict() of {_type_of(stateful)} refused what was saved: {exc!r}",
            hint="the state has been partly restored; do not train on it",
        ) from exc


def _is_scaler(stateful: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(stateful, torch.amp.GradScaler)


def _type_of(value: Any) -> str:
    cls = type(value)
    return f"{cls.__module__}.{cls.__qualname__}"
