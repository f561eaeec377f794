"""The control groups of a process (v1 and v2): who is killed together, and who is charged for memory together.

Invariants: only reads; what cannot be read is told as unknown, never guessed. What follows from it belongs to the callers.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

_FIRST_PROCESS_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO of the kernel's include/linux/proc_ns.h
_CONVENTION = {"": ("sys/fs/cgroup", "sys/fs/cgroup/unified"), "memory": ("sys/fs/cgroup/memory",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a process shares its fate with.

    Attributes:
        groups: Its control groups, controller (v1), `name=...` or "" (v2) -> path; empty where that cannot be read.
        kill_together: The directory of a control group above it whose processes the out-of-memory killer kills together
            (`memory.oom.group`); empty: none.
        in_container: Whether its process namespace is not the machine's first: it ends with that namespace's process 1.
        oom_score_adj: Its adjustment; None where that cannot be read.
    """

    groups: dict[str, str]
    kill_together: str = ""
    in_container: bool = False
    oom_score_adj: int | None = None

    @property
    def group(self) -> str:
        """The group that people would name: that of v2, else of systemd, else of memory; the first that is not the root."""
        for name in ("", "name=systemd", "memory"):
            if (path := self.groups.get(name, "/")) != "/":
                return path
        return "/" if self.groups else ""


def paths(pid: int | None = None, *, root: str | Path = "/") -> dict[str, str]:
    """Return the control groups of a process: controller, `name=...` or "" (v2) -> path; empty if it cannot be seen.

    Args:
        pid: Which; None: this one.
        root: Where `/proc` and `/sys` are looked for; another one is for tests.
    """
    try:
        lines = (Path(root) / f"proc/{pid or 'self'}/cgroup").read_text().splitlines()
    except OSError:
        return {}
    found: dict[str, str] = {}
    for line in lines:
        _, controllers, path = line.split(":", 2)
        found.update(dict.fromkeys(controllers.split(","), path))
    return found


def memory_directories(pid: int | None = None, *, root: str | Path = "/") -> list[Path]:
    """Return the directories of the memory control groups of a process and of all above them, as far as they can be seen.

    In a container the path of a group is often that of the host, of which only a part is mounted. So what `mountinfo` says of the mounts
    is taken off; where the path is not below that, the mount itself is the group. Another process may be in a group that cannot be seen.
    """
    base = Path(root)
    found: list[Path] = []
    for controller, path in paths(pid, root=root).items():
        if controller in _CONVENTION and (pid is None or ".." not in path.split("/")):
            for top, mounted in _mounts(base, controller):
                relative = _below(path, mounted)
                found.extend(top.joinpath(*relative[:depth]) for depth in range(len(relative), -1, -1))
    return [directory for directory in dict.fromkeys(found) if directory.is_dir()]


def _mounts(base: Path, controller: str) -> list[tuple[Path, str]]:
    """Return where a hierarchy is mounted, and which of its groups is at each of these places."""
    found = []
    try:
        lines = (base / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        fields, _, rest = line.partition(" - ")
        kind, _, options = [*rest.split(" "), "", "", ""][:3]
        ours = kind == "cgroup2" if controller == "" else kind == "cgroup" and controller in options.split(",")
        if ours:
            mounted, place = map(_unescaped, fields.split(" ")[3:5])
            found.append((base / place.lstrip("/"), mounted))
    return found or [(base / place, "/") for place in _CONVENTION[controller]]


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _below(path: str, mounted: str) -> list[str]:
    """The parts of a group's path below the group that is mounted; none where it is not below it."""
    parts, above = ([part for part in text.split("/") if part] for text in (path, mounted))
    if ".." in parts or parts[: len(above)] != above:
        return []
    return parts[len(above) :]


def surroundings(pid: int | None = None, *, root: str | Path = "/") -> Surroundings:
    """Look at what a process shares its fate with; what is not to be seen is left empty.

    Args:
        pid: Which; None: this one.
        root: As for `paths`.
    """
    base = Path(root)
    process = base / f"proc/{pid or 'self'}"
    together = [place for place in memory_directories(pid, root=root) if _text(place / "memory.oom.group") == "1"]
    try:
        namespace = os.readlink(process / "ns/pid")
    except OSError:
        namespace = _FIRST_PROCESS_NAMESPACE
    adjustment = _text(process / "oom_score_adj")
    return Surroundings(
        groups=paths(pid, root=root),
        kill_together=f"/{together[-1].relative_to(base)}" if together else "",
        in_container=namespace != _FIRST_PROCESS_NAMESPACE,
        oom_score_adj=int(adjustment) if re.fullmatch(r"-?\d+", adjustment) else None,
    )


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
