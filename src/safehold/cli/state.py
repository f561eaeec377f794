"""What a command knows of how it was called, and the options that commands share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


@dataclass
class State:
    """How the command line was called.

    Attributes:
        as_json: Output and errors are for programs.
    """

    as_json: bool = False


def json_option(function: F) -> F:
    """Add `--json`; errors are told as JSON too then."""

    def remember(ctx: click.Context, param: click.Parameter, value: bool) -> bool:
        state = ctx.find_object(State)
        if state is not None:
            state.as_json = value
        return value

    option = click.option(
        "--json", "as_json", is_flag=True, is_eager=True, callback=remember, help="Write JSON, see docs/cli.md."
    )
    return option(function)


def run_argument(function: F) -> F:
    """Add the argument RUN."""
    return click.argument("run", metavar="RUN")(function)


class StepType(click.ParamType):  # type: ignore[type-arg]
    """A step, or `latest` where that is taken."""

    name = "step"

    def __init__(self, *, takes_latest: bool = True) -> None:
        self._takes_latest = takes_latest

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the step as an int, or `LATEST`."""
        if value is None or isinstance(value, int):
            return value
        if value == "latest" and self._takes_latest:
            return LATEST
        if not (value.isascii() and value.isdigit() and len(value) < 19):
            also = ", or 'latest'" if self._takes_latest else ""
            self.fail(f"{value!r} is no step; give a number{also}", param, ctx)
        return int(value)


LATEST = -1
"""What `StepType` makes of `latest`."""

STEP = StepType()
NUMBER = StepType(takes_latest=False)
"""For what changes a checkpoint: it has to be named."""
