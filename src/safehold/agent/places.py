"""Finds out, at the start of a job, whether all nodes see one run directory or each has a disk of its own under that path; and
whether all see one second place, and can write it.

Invariants: the lead's flusher puts a file of random name and content there, all others look for it, and it is deleted again, whatever came
of it. All see it: shared; none: node-local; some: an error that names the nodes. Who looks puts and deletes a file of its own, so that a
directory that a node cannot write to ends the start, and not the first save. Every wait has a deadline, a node that is lost or late is
named; the time that flushers need to start is no part of it (`when_ready`). Used from the dispatcher thread only.
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

_MORE_TIME = "start_timeout_s gives a start more time"
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
        self._asked, self._is_remote = flusher, False
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
        self._ask(self._flusher, then, deadline_s, is_remote=False)

    def second_place(self, copier: Flusher, then: Callable[[CheckpointError | None], None], deadline_s: float) -> None:
        """Call `then(error)` once it is known whether all nodes see the second place that this one sees, and can write it.

        Args:
            copier: The process that copies, on this node.
            then: Called once.
            deadline_s: Seconds that it may take.
        """
        if not self._others:
            then(None)
            return
        self._ask(copier, lambda _, error: then(error), deadline_s, is_remote=True)

    def _ask(self, flusher: Flusher, then: Then, deadline_s: float, *, is_remote: bool) -> None:
        self._over(False, RankLostError("the run is being opened anew"))  # another question before this one
        self._asked, self._is_remote = flusher, is_remote
        self._number += 1
        self._name, self._content = f"{TEMPORARY_PREFIX}where-{new_token()}", new_token().encode()
        self._sees, self._then = {}, then
        number, name = self._number, self._name

        def there(value: Any, error: CheckpointError | None) -> None:
            if number != self._number or self._then is None:
                if error is None:
                    _delete(
                        flusher, name, self._config, is_remote=is_remote
                    )  # that came too late for whoever gave the question up
                return
            if error is not None:
                self._over(False, _not_put(error, self._names[self._here], deadline_s, is_remote=is_remote))
                return
            lost = sorted(self._lost)
            if lost:
                self._over(False, self._lost_error(lost[0]))
                return
            self._deadline = self._clock.monotonic() + deadline_s
            for node in self._others:
                self._tell(node, w.SeeFile(number, self._name, self._content, is_remote))

        arguments = {"do": "put", "name": self._name, "content": self._content}
        flusher.call(_operation(is_remote), arguments, there, timeout_s=deadline_s)

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
        if self._is_remote:
            self._over(False, self._elsewhere(blind) if blind else None)
            return
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
        what = "second place" if self._is_remote else "run directory"
        text = f"node {', '.join(late[:4])} did not say in time whether it sees the {what}"
        hint = f"the {what}'s file system may hang there: try 'ls' and 'touch' in it on that node; {_MORE_TIME}"
        self._over(False, DeadlineError(text, node=late[0] if late else None, hint=hint))

    def stop(self) -> None:
        """Nobody wants to know any more."""
        self._over(False, RankLostError("the ranks that wanted to open the run have left"))

    def _over(self, local: bool, error: CheckpointError | None) -> None:
        then, self._then = self._then, None
        self._deadline = None
        if then is None:
            return
        _delete(self._asked, self._name, self._config, is_remote=self._is_remote)
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

    def _elsewhere(self, blind: list[str]) -> CheckpointError:
        text = f"node {_some(blind)} sees another directory at the remote than node {self._names[self._here]}"
        hint = "mount one file system there on all nodes; is it mounted on that node?"
        return ConfigurationError(text, node=blind[0], path=self._config.remote, tier="remote", hint=hint)


def _delete(flusher: Flusher, name: str, config: Config, *, is_remote: bool) -> None:
    arguments = {"do": "delete", "name": name}
    flusher.call(_operation(is_remote), arguments, lambda *_: None, timeout_s=config.start_timeout_s)


def _operation(is_remote: bool) -> str:
    return "remote_place" if is_remote else "place"


def note(local: bool, num_nodes: int, place: str) -> str:
    """Return what the user is told of a run directory."""
    if in_object_store(place):
        return f"object store: {counted(num_nodes, 'node')} share one run directory"
    if local:
        return (
            f"node-local flash: each of {counted(num_nodes, 'node')} keeps its part of the checkpoints on its own disk"
        )
    return f"shared flash: {counted(num_nodes, 'node')} see one run directory"


def when_ready(flusher: Flusher, config: Config, then: Callable[[], None]) -> None:
    """Call `then` once the flusher has started, or cannot; it has to work at the start where the nodes look for a file."""
    if config.flash == "auto":
        flusher.call("place", {"do": "wait"}, lambda *_: then(), timeout_s=config.start_timeout_s)
    else:
        then()


def look(flusher: Flusher | None, word: w.SeeFile, node: int, config: Config, answer: Callable[[w.Saw], None]) -> None:
    """Have this node look for the lead's file, and try to write one (at the second place, if it sees that)."""

    def looked(value: Any, error: CheckpointError | None) -> None:
        answer(w.Saw(word.number, bool(value), None if error is None else error.to_wire()))

    if flusher is None:
        looked(False, ConfigurationError("this node was started without the second place", hint="start all alike"))
        return
    own = f"{word.name}-{node}"
    arguments = {"do": "see", "name": word.name, "content": word.content, "own": own, "blind": not word.is_remote}
    flusher.call(_operation(word.is_remote), arguments, looked, timeout_s=config.start_timeout_s)


def carry_out(tier: Tier, arguments: dict[str, Any]) -> bool:
    """The flusher's part: put the file, look for it and write one beside it (`blind`: also if it is not seen), or delete it."""
    if arguments["do"] == "wait":
        return True
    name = _checked(arguments["name"])
    match arguments["do"]:
        case "put":
            tier.put(name, bytes(arguments["content"]))
            return True
        case "see":
            sees = _sees(tier, name, bytes(arguments["content"]))
            if sees or arguments["blind"]:
                own = _checked(arguments["own"])
                tier.put(own, bytes(arguments["content"]))
                tier.delete(own)
            return sees
        case _:
            tier.delete(name)
            return True


def _checked(name: object) -> str:
    text = str(name)
    if not text.startswith(TEMPORARY_PREFIX) or "/" in text:
        raise ConfigurationError(f"{text!r} is no name for a trial of the run directory")
    return text


def _sees(tier: Tier, name: str, content: bytes) -> bool:
    try:
        return tier.get(name, limit_bytes=1024, retry_s=SEE_S) == content
    except FileNotFoundError:
        return False


def _not_put(error: CheckpointError, node: str, deadline_s: float, *, is_remote: bool) -> CheckpointError:
    """Return what it means that the lead's own flusher could not put the file."""
    if not isinstance(error, DeadlineError):
        error.node = error.node or node
        return error
    what = "second place" if is_remote else "run directory"
    text = f"storage did not take a small file in the {what} within {deadline_s:g} s"
    hint = f"its file system may hang there: try 'ls' and 'touch' in it on that node; {_MORE_TIME}"
    told = DeadlineError(text, node=node, tier=error.tier, path=error.path, hint=hint)
    told.__cause__ = error
    return told


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
