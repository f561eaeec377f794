"""Being called just before an optimizer changes anything.

Invariants: every optimizer given is hooked, or none is and the error names those that cannot be; hooking changes no
result of a step. Nothing here knows what is done in the hook; no framework is imported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from safehold.errors import ConfigurationError


def hook_optimizers(optimizers: Iterable[tuple[str, Any]], on_before_step: Callable[[], None]) -> Callable[[], None]:
    """Have `on_before_step` called before every step of these optimizers, in the thread that steps.

    Works for plain, foreach and fused steps, for accumulated gradients (only the step itself calls), for steps made
    inside backward, under gradient scalers and schedulers. A step that a CUDA graph replays calls nothing: give no
    such optimizer here.

    Args:
        optimizers: (name, optimizer) for all that change hooked leaves.
        on_before_step: Must not raise; what it raises, the optimizer's step raises.

    Returns:
        A function that takes the hooks away again; more calls of it do nothing.

    Raises:
        ConfigurationError: Some cannot be hooked; their names are in the message, and none is hooked.
    """
    found = list(optimizers)
    refused = [f"{name} ({type(optimizer).__name__})" for name, optimizer in found if not _can_be_hooked(optimizer)]
    if refused:
        raise ConfigurationError(
            f"these optimizers cannot call back before they step: {', '.join(refused)}",
            hint="save with overlap=False, or use an optimizer that derives from torch.optim.Optimizer",
        )
    handles = [optimizer.register_step_pre_hook(_hook(on_before_step)) for _, optimizer in found]

    def unhook() -> None:
        while handles:
            handles.pop().remove()

    return unhook


def _can_be_hooked(optimizer: Any) -> bool:
    """Whether steps call the hooks: torch marks the `step` of a class that it has wrapped for them."""
    return callable(getattr(optimizer, "register_step_pre_hook", None)) and bool(
        getattr(type(optimizer).step, "hooked", False)
    )


def _hook(on_before_step: Callable[[], None]) -> Callable[[Any, Any, Any], None]:
    @functools.wraps(on_before_step)
    def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        on_before_step()

    # A compiled step breaks its graph here and calls this as it is (the mark that `torch.compiler.disable` leaves).
    before_step._torchdynamo_disable = True  # type: ignore[attr-defined]
    return before_step
