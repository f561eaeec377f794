"""The commit protocol over every order of the events of one save of two nodes with a rank each, with what may go wrong in between.

Each node's events come in its own order; between them anything may happen: a loss of the node (with all that was on its way, or with
none of it), a rank that goes and comes back, an answer of storage that fails or never comes, a settling, a newer incarnation, the time
passing. States that were reached before are not gone into again.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest

from safehold.errors import StorageError
from safehold.policy import commit as c

DIGESTS = {0: "a" * 64, 1: "b" * 64}
ERROR = StorageError("planted")
NAMED = {"step": 1, "attempt": 0}


def told_by(node: int) -> list[Any]:
    return [
        c.Begun(**NAMED, rank=node, digest=DIGESTS[node]),
        c.Staged(**NAMED, rank=node),
        c.NodeRecorded(**NAMED, node=node, size_bytes=10, blake3="0" * 64, part_digests={node: DIGESTS[node]}),
    ]


@dataclass
class State:
    """The machine, and everything around it that has a say in what can happen next."""

    machine: c.CommitMachine
    now: float = 0.0
    sent: tuple[int, int] = (0, 0)
    planning: bool = False
    publishing: bool = False
    lost: bool = False
    faults: frozenset[str] = frozenset()
    publishes: int = 0
    recorded: frozenset[int] = frozenset()
    verdicts: tuple[str, ...] = ()
    path: tuple[str, ...] = field(default=())

    def key(self) -> object:
        machine = self.machine
        saves = [(k, s.phase, sorted(s.digests), sorted(s.staged), sorted(s.recorded), s.plan, sorted(s.published))
                 for k, s in machine._open.items()]  # fmt: skip
        flags = (
            machine._superseded,
            machine._settle is not None,
            sorted(machine._gone_ranks),
            sorted(machine._gone_nodes),
        )
        rest = (self.sent, self.planning, self.publishing, self.lost, self.faults, self.publishes, self.verdicts)
        return repr((saves, flags, sorted(machine._in_doubt), rest))

    def then(self, word: str, *events: Any, **changes: Any) -> State:
        """Return the state after some events."""
        new = copy.copy(self)
        new.machine = copy.deepcopy(self.machine)
        new.path = (*self.path, word)
        new.__dict__.update(changes)
        for event in events:
            if isinstance(event, c.NodeRecorded):
                new.recorded |= {event.node}
            for action in new.machine.handle(event, new.now):
                new.act(action)
        return new

    def act(self, action: Any) -> None:
        match action:
            case c.BuildPlan():
                self.planning = True
            case c.Publish():
                self.publishing, self.publishes = True, self.publishes + 1
                assert self.recorded == {0, 1}, f"published without the records of all: {self.path}"
            case c.Committed(to_node=None):
                self.verdicts += ("late" if action.late else "committed",)
            case c.Abandon(to_node=None):
                self.verdicts += ("in doubt" if action.in_doubt else "abandoned",)
        assert self.publishes <= 1, f"published twice: {self.path}"
        assert self.verdicts in ALLOWED, f"verdicts {self.verdicts}: {self.path}"


ALLOWED = {(), ("committed",), ("abandoned",), ("in doubt",), ("in doubt", "late")}


def moves(state: State) -> list[State]:
    """Return all that can happen next."""
    found = []
    for node in (0, 1):
        number = state.sent[node]
        events = told_by(node)
        if number < len(events) and not (node == 1 and state.lost):
            sent = (number + 1, state.sent[1]) if node == 0 else (state.sent[0], number + 1)
            found.append(state.then(f"{type(events[number]).__name__} {node}", events[number], sent=sent))
    if state.planning:
        ready = c.PlanReady(**NAMED, plan_digest="c" * 64, plan_size=5)
        found.append(state.then("planned", ready, planning=False))
        found.append(state.then("plan failed", c.PlanFailed(**NAMED, error=ERROR), planning=False))
    if state.publishing:
        found.append(state.then("published", c.Published(**NAMED), publishing=False))
        for certain in (True, False):
            failed = c.PublishFailed(**NAMED, error=ERROR, certain=certain)
            found.append(state.then(f"publish failed {certain}", failed, publishing=False))
        found.append(state.then("no answer", publishing=False))
    if len(state.faults) < 2:
        found += faults(state)
    due = state.machine.next_deadline()
    if due is not None:
        found.append(state.then("time passes", c.Tick(), now=due))
    return found


def faults(state: State) -> list[State]:
    """Return what may go wrong, each once."""
    single: dict[str, Any] = {
        "rank 1 goes": c.RankGone(rank=1),
        "rank 1 fails": c.RankFailed(**NAMED, rank=1, error=ERROR),
        "node 0 fails": c.NodeFailed(**NAMED, node=0, error=ERROR),
        "superseded": c.Superseded(incarnation=9),
        "settle": c.Settle(deadline=state.now + 5.0, grace_s=1.0),
        "cancel": c.Cancel(**NAMED, error=ERROR),
    }
    found = [
        state.then(word, event, faults=state.faults | {word})
        for word, event in single.items()
        if word not in state.faults
    ]
    if not state.lost and "node 1 is lost" not in state.faults:
        gone = state.faults | {"node 1 is lost"}
        found.append(state.then("node 1 is lost", c.NodeGone(node=1), lost=True, faults=gone))
    if state.lost:  # it tells again what is open there, as `Session` does
        again = [c.RankBack(rank=1), *told_by(1)[: min(state.sent[1], 1)]]
        found.append(state.then("node 1 is back", *again, lost=False))
    return found


def explore(start: State) -> int:
    """Go through all states; each must end in a verdict once nothing more comes but time."""
    seen = {start.key()}
    todo = [start]
    while todo:
        state = todo.pop()
        for after in moves(state):
            key = after.key()
            if key not in seen:
                seen.add(key)
                todo.append(after)
        comes_to_an_end(state)
    return len(seen)


def comes_to_an_end(state: State) -> None:
    """Let only time pass: the save must have a verdict, and the machine must wait for nothing."""
    machine = copy.deepcopy(state.machine)
    opened = bool(state.verdicts) or bool(machine.status())
    verdicts = list(state.verdicts)
    for _ in range(8):
        due = machine.next_deadline()
        if due is None:
            break
        for action in machine.handle(c.Tick(), due):
            if isinstance(action, c.Abandon | c.Committed) and action.to_node is None:
                verdicts.append(type(action).__name__)
    assert machine.next_deadline() is None and not machine.status(), state.path
    assert bool(verdicts) == opened, state.path


def test_every_order_of_one_save() -> None:
    assert explore(State(c.CommitMachine(2, [0, 1], 1))) > 1000


def test_a_machine_that_publishes_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = c.WAITS[c.Phase.FLUSHING]
    early = type(wait)(wait.next, wait.limit_s, wait.needed, lambda save: save.staged, wait.of, wait.had_not)
    monkeypatch.setitem(c.WAITS, c.Phase.FLUSHING, early)
    with pytest.raises(AssertionError, match="published without the records"):
        explore(State(c.CommitMachine(2, [0, 1], 1)))


def test_a_machine_that_forgets_its_verdict_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c.CommitMachine, "_close", lambda self, key, verdict: self._actions.append(verdict))
    with pytest.raises(AssertionError, match="verdicts"):
        explore(State(c.CommitMachine(2, [0, 1], 1)))
