"""The command line is frozen: a change here is a change for users, and belongs into CHANGELOG.md and docs/cli.md."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest

from safehold import errors
from safehold.cli.main import COMMANDS, cli

DOCS = Path(__file__).parents[3] / "docs" / "cli.md"

OPTIONS = {
    "": ["--help", "--version"],
    "agent": ["RUN", "--idle-exit"],
    "agents": ["--all", "--json"],
    "cat": ["RUN", "STEP", "LEAF", "--format", "--json", "--output", "--rank"],
    "config": [],
    "config show": ["--file", "--json"],
    "diff": ["RUN", "BEFORE", "AFTER", "--exit-code", "--json"],
    "gc": ["RUN", "--dry-run", "--grace-s", "--ignore-leases", "--job-ended", "--json", "--set-aside"],
    "fetch": ["URL", "[STEP]", "--json", "--rate", "--to"],
    "ls": ["RUN", "--all", "--json"],
    "pin": ["RUN", "STEP...", "--json", "--note"],
    "replicate": ["RUN", "[STEP]...", "--all", "--json", "--keep", "--rate", "--to"],
    "rm": ["RUN", "STEP...", "--force", "--json", "--now"],
    "show": ["RUN", "[STEP]", "--json", "--leaves"],
    "status": ["RUN", "--json", "--to"],
    "unpin": ["RUN", "STEP...", "--json"],
    "verify": ["RUN", "[STEP]", "--all", "--json", "--mark"],
}


def walk(command: click.Command, name: str = ""):
    yield name, command
    if isinstance(command, click.Group):
        for child in command.list_commands(click.Context(command)):
            found = command.get_command(click.Context(command), child)
            assert found is not None
            yield from walk(found, f"{name} {child}".strip())


def test_options_are_frozen():
    found = {}
    for name, command in walk(cli):
        context = click.Context(command)
        arguments = [p.make_metavar(context) for p in command.params if isinstance(p, click.Argument)]
        options = [max(p.opts, key=len) for p in command.params if isinstance(p, click.Option)]
        if not name:
            options.append("--help")
        found[name] = arguments + sorted(options)
    assert found == OPTIONS


def test_first_lines_of_help_match_the_list_of_commands():
    for name, (_, _, text) in COMMANDS.items():
        command = cli.get_command(click.Context(cli), name)
        assert command.help.splitlines()[0] == text


def test_every_option_and_exit_code_is_documented():
    page = DOCS.read_text()
    for name, options in OPTIONS.items():
        assert f"safehold {name}".strip() in page
        for option in options:
            assert option.strip("[].") in page, (name, option)
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)}
    raised = {cls.exit_code for cls in errors._CLASSES.values()}
    assert raised | {0, 1, 2, 130, 141, 143} == documented
    for cls in errors._CLASSES.values():
        assert cls.__name__ in page or cls.exit_code == 1, cls


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["ls", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]):
    code = (
        "import sys; from safehold.cli.main import main; code = main(sys.argv[1:]); "
        "heavy = {'numpy', 'rich', 'torch', 'msgspec', 'isal', 'zstandard', 'asyncio'} & set(sys.modules); "
        "sys.exit(f'imported {heavy}' if heavy or code else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout, done.stderr


def test_help_is_fast():
    """The bound is 0.15 s on an idle machine; CPU seconds are measured, since tests run beside others."""
    import resource

    best = 10.0
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        started = time.monotonic()
        subprocess.run([sys.executable, "-m", "safehold.cli.main", "--help"], check=True, capture_output=True)
        wall = time.monotonic() - started
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best = min(best, wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert best < 0.15


def test_no_command_imports_torch():
    code = (
        "import sys, importlib; from safehold.cli.main import COMMANDS; "
        "[importlib.import_module(module) for module, _, _ in COMMANDS.values()]; "
        "import safehold.cli.opening, safehold.cli.values, safehold.pipeline.verify, safehold.pipeline.inspect, "
        "safehold.pipeline.sweep, safehold.host.runtime; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
