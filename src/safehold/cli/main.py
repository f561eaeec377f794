"""The command line: what people type, and how everything that can go wrong is told.

Invariants: `--help` imports no library but click; a command's module is imported when it is run. Expected errors are
told as message, where and hint on stderr, never as a traceback, and end with the exit code of their class
(docs/cli.md). Ctrl-C ends with 130, a termination signal with 143, and neither leaves anything half done. What comes
from a checkpoint is shown without control characters.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import click

from safehold._version import __version__
from safehold.cli.state import State

EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143
EXIT_BROKEN_PIPE = 141

COMPLETION_VARIABLE = "_SAFEHOLD_COMPLETE"
"""Set by the shell's completion, as click does it."""

# Name -> (module, function, first line of its help). The help is here so that the list of commands imports nothing.
COMMANDS = {
    "ls": ("safehold.cli.look", "ls", "List the checkpoints of a run, newest first."),
    "show": ("safehold.cli.look", "show", "Show a run, or what is in one of its checkpoints."),
    "verify": ("safehold.cli.maintain", "verify", "Read every byte of a checkpoint and check it."),
    "cat": ("safehold.cli.content", "cat", "Write one leaf of a checkpoint."),
    "diff": ("safehold.cli.content", "diff", "Compare two checkpoints leaf by leaf."),
    "rm": ("safehold.cli.maintain", "rm", "Delete checkpoints."),
    "pin": ("safehold.cli.maintain", "pin", "Keep checkpoints from being deleted."),
    "unpin": ("safehold.cli.maintain", "unpin", "Let retention delete checkpoints again."),
    "gc": ("safehold.cli.maintain", "gc", "Delete what nobody needs: debris, and what was un-committed."),
    "replicate": ("safehold.cli.replicate", "replicate", "Copy checkpoints to a second place."),
    "fetch": ("safehold.cli.replicate", "fetch", "Copy a checkpoint back from a second place."),
    "status": ("safehold.cli.replicate", "status", "Compare a run with its copy at a second place."),
    "agent": ("safehold.cli.host", "agent", "Serve a run on this node, ahead of its trainers."),
    "agents": ("safehold.cli.host", "agents", "List the agents of this host."),
    "config": ("safehold.cli.host", "config", "Show the settings and where each comes from."),
}


class _Commands(click.Group):
    """A group whose commands are imported when they are run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, function, _ = COMMANDS[cmd_name]
        found = getattr(importlib.import_module(module), function)
        assert isinstance(found, click.Command)
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in COMMANDS.items()])


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, "-V", "--version", message="safehold %(version)s")
def cli() -> None:
    """Look at and look after the checkpoints of a training run.

    RUN is a run directory: a path or a URL.
    """


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    state = State()
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        if COMPLETION_VARIABLE in os.environ:
            cli.main(prog_name="safehold")
        with cli.make_context("safehold", list(sys.argv[1:] if argv is None else argv), obj=state) as ctx:
            result = cli.invoke(ctx)
        if sys.stdout is not None:  # as after `>&-`
            sys.stdout.flush()
    except click.exceptions.Exit as exc:
        return exc.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return EXIT_INTERRUPTED
    except click.ClickException as exc:
        return _tell_usage(exc, list(sys.argv[1:] if argv is None else argv))
    except BrokenPipeError:
        # Whoever reads our output has seen enough; the interpreter must not try to flush the rest at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except Exception as exc:
        return _tell(exc, state)
    finally:
        signal.signal(signal.SIGTERM, before)
    return result if isinstance(result, int) else 0


def _tell_usage(exc: click.ClickException, arguments: list[str]) -> int:
    """Tell what is wrong with the arguments; they may not have been read as far as `--json`."""
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    if "--json" not in options:
        exc.show()
        return exc.exit_code
    from safehold.cli.output import print_error
    from safehold.errors import ConfigurationError

    context = getattr(exc, "ctx", None)
    hint = f"'{context.command_path if context is not None else 'safehold'} --help' says what is taken"
    print_error(ConfigurationError(exc.format_message(), hint=hint), as_json=True)
    return exc.exit_code


def _tell(exc: Exception, state: State) -> int:
    """Tell an expected error; anything else is a bug and goes on as it came."""
    from safehold.cli.output import print_error
    from safehold.errors import CheckpointError, from_os_error

    if isinstance(exc, OSError):
        exc = from_os_error(exc, "the command")
    if not isinstance(exc, CheckpointError):
        raise exc
    print_error(exc, as_json=state.as_json)
    return exc.exit_code


def _terminate(number: int, frame: FrameType | None) -> Any:
    raise SystemExit(EXIT_TERMINATED)


if __name__ == "__main__":
    sys.exit(main())
