"""The floors of docs/design.md: imports go downward only, and each room keeps out what must not live there."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import safehold

PACKAGE = Path(safehold.__file__).parent
ROOT = PACKAGE.parent.parent
MAX_FILE_LINES, MAX_FUNCTION_LINES = 500, 70

# First part of a module's name inside the package -> its floor. What is not listed must be added here, with thought.
FLOORS = {
    "_version": 0, "errors": 0, "types": 0, "clock": 0, "events": 0, "config": 0,
    "format": 1,
    "policy": 2,
    "host": 3, "tiers": 3, "state": 3,
    "pipeline": 4,
    "agent": 5, "launch": 5, "trainer": 5,
    "": 6, "checkpointer": 6, "oneshot": 6, "__main__": 6, "cli": 6, "integrations": 6, "report": 6,
    "testing": 7,
}  # fmt: skip

# Rooms that must not know each other although a floor's height would allow it, each with its reason.
FORBIDDEN = {
    "host": ({"policy", "tiers", "state"}, "mechanisms do not decide, and lie below what is built of them"),
    "tiers": ({"policy", "state"}, "a tier stores bytes and decides nothing"),
    "state": ({"tiers"}, "the state does not know where it is stored"),
}

# Modules of the standard library that are I/O, a clock or chance, which floors 0 to 2 (`clock` apart) are handed as parameters.
IMPURE = {
    "os", "io", "socket", "subprocess", "tempfile", "shutil", "mmap", "fcntl", "select", "selectors", "multiprocessing", "glob",
    "time", "random", "secrets", "urllib", "http", "asyncio", "signal", "ctypes",
}  # fmt: skip
PURE_EXCEPT = {"clock": {"time", "secrets"}}

# The only places that know a framework. `testing` may, for tests.
TORCH_ROOMS = ("state", "host.cuda", "host.device_torch", "testing")
SOCKET_ROOMS = ("agent", "launch", "host", "testing", "cli")


@dataclass(frozen=True)
class Import:
    """One import: where, what, and whether it happens when the module is imported."""

    module: str
    line: int
    target: str
    at_import: bool
    typing_only: bool

    def __str__(self) -> str:
        return f"safehold.{self.module or '__init__'}:{self.line} imports {self.target}"


def modules() -> dict[str, ast.Module]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(), filename=str(path))
    return found


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imports(module: str, tree: ast.Module) -> Iterator[Import]:
    def walk(node: ast.AST, at_import: bool, typing_only: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            targets: list[str] = []
            if isinstance(child, ast.Import):
                targets = [alias.name for alias in child.names]
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"safehold.{module}:{child.lineno} uses a relative import"
                base = child.module or ""
                targets = [f"{base}.{alias.name}" for alias in child.names]
            for target in targets:
                yield Import(module, child.lineno, target, at_import, typing_only)
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from walk(child, at_import and not inside, typing_only or is_type_checking(child))

    yield from walk(tree, True, False)


MODULES = modules()
IMPORTS = [entry for module, tree in MODULES.items() for entry in imports(module, tree)]


def inner(target: str) -> str | None:
    """Return the name inside the package of what is imported, or None for other packages."""
    if target != "safehold" and not target.startswith("safehold."):
        return None
    parts = target.split(".")[1:]
    while parts and ".".join(parts) not in MODULES:
        parts.pop()  # the last part is a name inside a module
    return ".".join(parts)


def in_rooms(module: str, rooms: tuple[str, ...]) -> bool:
    return any(module == room or module.startswith(room + ".") for room in rooms)


def room(module: str) -> str:
    return module.split(".")[0]


def fail_if(wrong: list[str]) -> None:
    assert not wrong, "\n" + "\n".join(wrong)


def test_every_room_has_a_floor() -> None:
    fail_if([f"safehold.{module} has no floor" for module in MODULES if room(module) not in FLOORS])


def upward(entries: list[Import]) -> list[str]:
    return [
        str(entry)
        for entry in entries
        if (target := inner(entry.target)) is not None and FLOORS[room(target)] > FLOORS[room(entry.module)]
    ]


def test_imports_go_downward_only() -> None:
    fail_if(upward(IMPORTS))


def test_an_import_upward_would_be_found() -> None:
    canary = ast.parse("def f():\n    if True:\n        from safehold.pipeline import flush")
    assert upward(list(imports("format.pack", canary))) == ["safehold.format.pack:3 imports safehold.pipeline.flush"]


def test_rooms_keep_apart() -> None:
    wrong = []
    for entry in IMPORTS:
        target = inner(entry.target)
        others, reason = FORBIDDEN.get(room(entry.module), (set(), ""))
        if target is not None and room(target) in others:
            wrong.append(f"{entry}: {reason}")
    fail_if(wrong)


def test_testing_is_imported_by_tests_only() -> None:
    wrong = [
        str(entry)
        for entry in IMPORTS
        if (target := inner(entry.target)) is not None and room(target) == "testing" != room(entry.module)
    ]
    fail_if(wrong)


def test_low_floors_are_pure() -> None:
    wrong = []
    for entry in IMPORTS:
        if FLOORS[room(entry.module)] > 2 or entry.typing_only:
            continue
        top = entry.target.split(".")[0]
        if top in IMPURE - PURE_EXCEPT.get(entry.module, set()):
            wrong.append(str(entry))
    fail_if(wrong)


def test_low_floors_open_nothing() -> None:
    wrong = [
        f"safehold.{module}:{node.lineno} calls open"
        for module, tree in MODULES.items()
        if FLOORS[room(module)] <= 2
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open"
    ]
    fail_if(wrong)


def test_frameworks_stay_in_their_rooms() -> None:
    wrong = [
        str(entry)
        for entry in IMPORTS
        if entry.target.split(".")[0] in ("torch", "jax", "tensorflow")
        and not entry.typing_only
        and not in_rooms(entry.module, TORCH_ROOMS)
    ]
    fail_if(wrong)


def test_sockets_stay_in_their_rooms() -> None:
    wrong = [
        str(entry)
        for entry in IMPORTS
        if (entry.target.split(".")[0] == "socket" or inner(entry.target) == "host.sockets")
        and not in_rooms(entry.module, SOCKET_ROOMS)
    ]
    fail_if(wrong)


def test_files_and_functions_are_short() -> None:
    wrong = []
    for folder in ("src", "tests", "benchmarks", "examples"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text()
            name = path.relative_to(ROOT)
            if (lines := text.count("\n")) > MAX_FILE_LINES:
                wrong.append(f"{name} has {lines} lines, {MAX_FILE_LINES} at most")
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    length = (node.end_lineno or node.lineno) - node.lineno + 1
                    if length > MAX_FUNCTION_LINES:
                        wrong.append(
                            f"{name}:{node.lineno} {node.name} has {length} lines, {MAX_FUNCTION_LINES} at most"
                        )
    fail_if(wrong)


def loaded_by(code: str) -> set[str]:
    """Return the top-level modules that a new interpreter has loaded after `code`."""
    script = f"{code}\nimport sys\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


FRAMEWORKS = {"torch", "jax", "tensorflow"}


@pytest.mark.parametrize("rooms", [("agent",), ("cli",), ("format", "policy", "tiers", "pipeline", "launch")])
def test_agent_and_command_line_never_load_a_framework(rooms: tuple[str, ...]) -> None:
    names = [f"safehold.{module}" for module in MODULES if in_rooms(module, rooms) and not module.endswith("__main__")]
    assert not loaded_by("\n".join(f"import {name}" for name in names)) & FRAMEWORKS


def test_importing_the_package_is_cheap() -> None:
    assert not loaded_by("import safehold") & (FRAMEWORKS | {"numpy", "rich", "click"})


def test_help_needs_neither_numpy_nor_rich() -> None:
    code = (
        "import sys\nsys.argv = ['safehold', '--help']\n"
        "try:\n    from safehold.cli.main import main; main()\nexcept SystemExit as exc:\n    assert not exc.code"
    )
    assert not loaded_by(code) & (FRAMEWORKS | {"numpy", "rich"})
