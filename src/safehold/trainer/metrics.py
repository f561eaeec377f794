"""The metrics that a user gives with a save, for retention by the best of them."""

from __future__ import annotations

from safehold.errors import ConfigurationError

MAX_NAME_LENGTH = 256


def metric_values(metrics: dict[str, float], step: int) -> dict[str, float]:
    """Return names with numbers.

    Raises:
        ConfigurationError: They are something else, or a name is empty or too long.
    """
    try:
        found = {str(name): float(value) for name, value in metrics.items()}
    except (TypeError, ValueError, AttributeError) as exc:
        raise ConfigurationError(f"metrics are names with numbers, not {metrics!r}", step=step) from exc
    for name in found:
        if not 1 <= len(name) <= MAX_NAME_LENGTH:
            text = f"a metric's name has 1 to {MAX_NAME_LENGTH} characters, not {len(name)}: {name[:40]!r}"
            raise ConfigurationError(text, step=step)
    return found
