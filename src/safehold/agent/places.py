"""Finds out, at the start of a job, whether all nodes see one run directory or each has a disk of its own under that path.

Invariants: the lead's flusher puts a file of random name and content there, all others look for it, and it is deleted again, whatever came
of it. All see it: shared; none: node-local; some: an error that names the nodes. Every wait has a deadline, a node that is lost or late is
named. Used from the dispatcher thread only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from safehold.agent import words as w
from safehold.agent.flusher_client import Flusher
from safehold.clock import Clock, new_token
from safehold.config import Config
from safehold.errors import CheckpointError, ConfigurationError, DeadlineError, RankLostError, from_wire
from safehold.format.names import counted
from safehold.tiers.base import TEMPORARY_PREFIX, Tier, in_object_store

Then = Callable[[bool, CheckpointError | None], None]

SEE_S = 0.3
"""How long a node looks for the file: on a network file system it may take a moment to be seen."""


class Places:
    """See the module; the lead's side.

    Args:
        names: The nodes' names.
        here: This node.
        config: The run's settings.
        flusher: For tier work.
        tell: Tells a node.
        clock: Time.
    """

    def __init__(
        self,
        *,
        names: list[str],
        here: int,
        config: Config,
        flusher: Flusher,
        tell: Callable[[int, w.Word], None],
        clock: Clock,
    ) -> None:
        self._names, self._here, self._config = names, here, config
        self._flusher, self._tell, self._clock = flusher, tell, clock
        self._number = 0
        self._name, self._content = "", b""
        self._sees: dict[int, bool] = {}
        self._lost: set[int] = set()
        self._deadline: float | None = None
        self._then: Then | None = None

    @property
    def _others(self) -> list[int]:
        return [node for node in range(len(self._names)) if node != self._here]

    def decide(self, then: Then, deadline_s: float) -> None:
        """Call `then(local, error)` once it is known, or cannot be."""
        if in_object_store(self._flusher.url):  # all nodes reach it alike
            then(False, self._no_disk() if self._config.flash == "local" else None)
            return
        if self._config.flash != "auto" or not self._others:
            then(self._config.flash == "local" and bool(self._others), None)
            return
        self._over(False, RankLostError("the run is being opened anew"))  # another question before this one
        self._number += 1
        self._name, self._content = f"{TEMPORARY_PREFIX}where-{new_token()}", new_token().encode()
        self._sees, self._then = {}, then
        self._deadline = self._clock.monotonic() + deadline_s
        number = self._number

        def there(value: Any, error: CheckpointError | None) -> None:
            if number != self._number or self._then is None:
                return
            if error is not None:
                self._over(False, error)
                return
            lost = sorted(self._lost)
            if lost:
                self._over(False, self._lost_error(lost[0]))
                return
            for node in self._others:
                self._tell(node, w.SeeFile(number, self._name, self._content))

        arguments = {"do": "put", "name": self._name, "content": self._content}
        self._flusher.call("place", arguments, there, timeout_s=deadline_s)

    def saw(self, node: int, told: w.Saw) -> None:
        """A node has looked."""
        self._lost.discard(node)
        if told.number != self._number or self._then is None:
            return
        if told.error is not None:
            error = from_wire(told.error)
            error.node = error.node or self._names[node]
            self._over(False, error)
            return
        self._sees[node] = told.sees
        if len(self._sees) < len(self._others):
            return
        seeing = [self._names[node] for node in self._others if self._sees[node]]
        blind = [self._names[node] for node in self._others if not self._sees[node]]
        self._over(not seeing, self._mixed(seeing, blind) if seeing and blind else None)

    def lost(self, node: int) -> None:
        """A node is dead or cannot be reached."""
        self._lost.add(node)
        if self._then is not None and node not in self._sees:
            self._over(False, self._lost_error(node))

    def back(self, node: int) -> None:
        """It can be reached again."""
        self._lost.discard(node)

    def next_deadline(self) -> float | None:
        """When `tick` is due."""
        return self._deadline

    def tick(self) -> None:
        """Let the deadline pass."""
        if self._deadline is None or self._clock.monotonic() < self._deadline:
            return
        late = [self._names[node] for node in self._others if node not in self._sees]
        text = f"node {', '.join(late[:4])} did not say in time whether it sees the run directory"
        hint = "is the storage of that node slow? start_timeout_s is the time for the start"
        self._over(False, DeadlineError(text, node=late[0] if late else None, hint=hint))

    def _over(self, local: bool, error: CheckpointError | None) -> None:
        then, self._then = self._then, None
        self._deadline = None
        if then is None:
            return
        arguments = {"do": "delete", "name": self._name}
        self._flusher.call("place", arguments, lambda *_: None, timeout_s=self._config.start_timeout_s)
        then(local, error)

    def _lost_error(self, node: int) -> CheckpointError:
        text = f"node {self._names[node]} was lost while the run was being opened"
        return RankLostError(text, node=self._names[node], hint="see whether that node lives, and start the job again")

    def _no_disk(self) -> CheckpointError:
        text, hint = "flash='local' is for a path that is each node's own disk", "leave it out, or use a path"
        return ConfigurationError(
            f"{text}, and the run directory is in an object store", path=self._flusher.url, hint=hint
        )

    def _mixed(self, seeing: list[str], blind: list[str]) -> CheckpointError:
        lead = self._names[self._here]
        text = f"of the other nodes {_some(seeing)} see the run directory of node {lead}, and {_some(blind)} do not"
        hint = "mount one file system on all nodes, or use a path that is each node's own disk"
        return ConfigurationError(text, node=blind[0], hint=hint)


def note(local: bool, num_nodes: int, place: str) -> str:
    """Return what the user is told of a run directory."""
    if in_object_store(place):
        return f"object store: {counted(num_nodes, 'node')} share one run directory"
    if local:
        return (
            f"node-local flash: each of {counted(num_nodes, 'node')} keeps its part of the checkpoints on its own disk"
        )
    return f"shared flash: {counted(num_nodes, 'node')} see one run directory"


def look(flusher: Flusher, word: w.SeeFile, config: Config, answer: Callable[[w.Saw], None]) -> None:
    """Have this node look for the lead's file."""

    def looked(value: Any, error: CheckpointError | None) -> None:
        answer(w.Saw(word.number, bool(value), None if error is None else error.to_wire()))

    arguments = {"do": "see", "name": word.name, "content": word.content}
    flusher.call("place", arguments, looked, timeout_s=config.start_timeout_s)


def carry_out(tier: Tier, arguments: dict[str, Any]) -> bool:
    """The flusher's part: put the file, look for it, or delete it."""
    name = str(arguments["name"])
    if not name.startswith(TEMPORARY_PREFIX) or "/" in name:
        raise ConfigurationError(f"{name!r} is no name for a trial of the run directory")
    match arguments["do"]:
        case "put":
            tier.put(name, bytes(arguments["content"]))
            return True
        case "see":
            try:
                return tier.get(name, limit_bytes=1024, retry_s=SEE_S) == bytes(arguments["content"])
            except FileNotFoundError:
                return False
        case _:
            tier.delete(name)
            return True


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
