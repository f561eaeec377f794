"""What a user says in numbers and flags: the steps that checkpoints are named by, yes or no."""

from __future__ import annotations

import operator
from typing import Any

from safehold.errors import ConfigurationError

END_STEP = 1 << 40


def step_number(step: Any, rank: int | None = None) -> int:
    """Return a step as a plain integer; NumPy's integers are some too.

    Raises:
        ConfigurationError: It is none.
    """
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = -1
    if not 0 <= number < END_STEP:
        raise ConfigurationError(f"a step is an integer from 0, not {step!r}", rank=rank)
    return number


def flag(name: str, value: object) -> bool:
    """Return a yes or no; a text, which would always be a yes, is none.

    Raises:
        ConfigurationError: It is neither True nor False.
    """
    if not isinstance(value, bool):
        raise ConfigurationError(f"{name} is True or False, not {value!r}")
    return value


def check_order(step: int, newest: int | None, *, path: str, rank: int) -> None:
    """Refuse a save behind the run's newest: as the lower step it would be the first that retention lets go.

    Raises:
        ConfigurationError: It is.
    """
    if newest is None or step >= newest:
        return
    hint = "restore first, use another run directory for another training, or restore an older step to go back to it"
    text = f"step {step} comes before step {newest}, which this run has already"
    raise ConfigurationError(text, step=step, path=path, rank=rank, hint=hint)
