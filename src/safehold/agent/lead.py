"""The lead agent's hands: carries out what the commit protocol decides.

Invariants: every decision is `policy.commit`'s; here are only its effects. Planning runs in a thread (it can take seconds for thousands of
ranks) and its result comes back as an event; a plan whose part digests are known is not planned again, unless it is missing or damaged
when a manifest is to name it. Where publishing was answered with a failure, the save is told to have failed only after its manifest was
looked for and withdrawn. Nothing here waits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from safehold.agent.flusher_client import ANSWER_SLACK_S, Flusher
from safehold.agent.means import Spawn, in_thread
from safehold.agent.memory_lead import MemoryLead
from safehold.agent.parts import AllParts
from safehold.clock import Clock
from safehold.config import Config
from safehold.errors import CheckpointError, DeadlineError, ManifestError, SupersededError
from safehold.events import EventStream
from safehold.format import paths
from safehold.format import plan as plans
from safehold.policy import commit as protocol
from safehold.policy.coverage import check as check_coverage

Post = Callable[[Callable[[], None]], None]
PlanMade = protocol.PlanReady | protocol.PlanFailed
SETTLE_GRACE_S = 1.0
PLANS_KEPT = 64


class Lead:
    """Runs the commit protocol of one incarnation.

    Args:
        node_of: Node of each rank; `node_names` are the nodes' names.
        run_id: The run's id.
        incarnation: The incarnation.
        config: The run's settings.
        flusher: For plans and manifests.
        parts: The ranks' encoded parts, from all nodes.
        facts: Metrics and the final flag of a save.
        on_committed: Told of each commit: (step, attempt, the one node that is told once more or None).
        on_abandoned: Told of each save given up.
        on_doubtful: Told of each save whose manifest may be visible or not, once nobody works at it any more: (step, attempt).
        on_settled: Told when `settle` has come to its end.
        post: Runs a function in the dispatcher.
        spawn: Has planning done beside it.
        memory: For saves that stay in memory.
    """

    def __init__(
        self,
        *,
        node_of: list[int],
        node_names: list[str],
        incarnation: int,
        run_id: str,
        config: Config,
        flusher: Flusher,
        parts: AllParts,
        facts: Callable[[int, int], tuple[dict[str, float], bool]],
        on_committed: Callable[[int, int, int | None], None],
        on_abandoned: Callable[[protocol.Abandon], None],
        on_doubtful: Callable[[int, int], None],
        on_settled: Callable[[], None],
        post: Post,
        clock: Clock,
        events: EventStream,
        spawn: Spawn = in_thread,
        memory: MemoryLead | None = None,
    ) -> None:
        self._memory = memory
        self._node_of, self._incarnation, self._run_id = node_of, incarnation, run_id
        self._config, self._flusher, self._parts, self._facts = config, flusher, parts, facts
        self._on_committed, self._on_abandoned, self._on_settled = on_committed, on_abandoned, on_settled
        self._on_doubtful = on_doubtful
        self._post, self._clock, self._events, self._spawn = post, clock, events, spawn
        self._plans: OrderedDict[tuple[str, ...], tuple[str, int]] = OrderedDict()
        self._digests: dict[tuple[int, int], tuple[str, ...]] = {}
        deadlines = protocol.Deadlines(
            begin_s=config.begin_timeout_s,
            stage_s=config.stage_timeout_s,
            # A node gives its share up by itself, and knows why: it gets to say so first.
            flush_s=config.flush_timeout_s + 2 * ANSWER_SLACK_S,
            plan_s=config.flush_timeout_s,
            publish_s=config.flush_timeout_s,
        )
        self._machine = protocol.CommitMachine(
            len(node_of), node_of, incarnation, deadlines, node_names=dict(enumerate(node_names))
        )

    @property
    def num_open(self) -> int:
        """Saves without a verdict."""
        return len(self._machine.status())

    def handle(self, event: Any) -> None:
        """Feed one event and carry out what follows."""
        for action in self._machine.handle(event, self._clock.monotonic()):
            self._act(action)

    def tick(self) -> None:
        """Let deadlines pass."""
        self.handle(protocol.Tick())

    def next_deadline(self) -> float | None:
        """When `tick` is due."""
        return self._machine.next_deadline()

    def settle(self, deadline_s: float, grace_s: float = SETTLE_GRACE_S) -> None:
        """No new saves: finish what all ranks have staged, or stage within `grace_s`, give up the rest; `on_settled` follows."""
        self.handle(protocol.Settle(deadline=self._clock.monotonic() + deadline_s, grace_s=grace_s))

    def _act(self, action: Any) -> None:
        match action:
            case protocol.Abandon() if (
                action.to_node is not None
            ):  # once more, for a node where a rank began the save after it
                self._on_abandoned(action)
            case protocol.Committed() if action.to_node is not None:
                self._on_committed(action.step, action.attempt, action.to_node)
            case protocol.BuildPlan():
                self._build(action)
            case protocol.Publish():
                self._publish(action)
            case protocol.Committed():
                self._digests.pop((action.step, action.attempt), None)
                self._events.emit("commit", "done", step=action.step, attempt=action.attempt)
                self._on_committed(action.step, action.attempt, None)
            case protocol.Abandon():
                self._digests.pop((action.step, action.attempt), None)
                self._events.emit("commit", "failed", step=action.step, error=str(action.error))
                self._on_abandoned(action)
            case protocol.Settled():
                self._on_settled()

    # -- plans -----------------------------------------------------------------------------------------------------------

    def _build(self, action: protocol.BuildPlan) -> None:
        digests = tuple(action.part_digests[rank] for rank in sorted(action.part_digests))
        self._digests[action.step, action.attempt] = digests
        memory = self._of_memory(action.step, action.attempt)
        if memory is not None and (error := memory.disagreement(action.step, action.attempt)) is not None:
            failed = protocol.PlanFailed(step=action.step, attempt=action.attempt, error=error)
            self._post(lambda: self.handle(failed))
            return
        known = self._plans.get(digests) if memory is None else memory.plan_of(digests)
        if known is None:
            self._make_plan(action.step, action.attempt, digests, self.handle)
            return
        if memory is None:
            self._plans.move_to_end(digests)
        ready = protocol.PlanReady(step=action.step, attempt=action.attempt, plan_digest=known[0], plan_size=known[1])
        self._post(lambda: self.handle(ready))

    def _make_plan(self, step: int, attempt: int, digests: tuple[str, ...], then: Callable[[PlanMade], None]) -> None:
        """Join the ranks' parts and store the plan; `then` hears in the dispatcher that it is durable, or why it is not."""

        def collected(parts: list[bytes] | None, error: CheckpointError | None) -> None:
            if parts is None:
                failed = protocol.PlanFailed(step=step, attempt=attempt, error=error or ManifestError("no parts"))
                self._post(lambda: then(failed))
                return

            def work() -> None:
                made, data = self._join(step, attempt, parts)
                self._post(lambda: self._store(made, data, digests, then))

            self._spawn("plan", work)

        self._parts.collect(step, attempt, digests, collected)

    def _join(self, step: int, attempt: int, parts: list[bytes]) -> tuple[PlanMade, bytes]:
        """The work of planning; runs in a thread."""
        try:
            with self._events.span("plan", step=step):
                plan = plans.merge_parts(parts, self._node_of)
                check_coverage(plan)
                data = plans.encode_plan(plan)
                plans.decode_plan(data)  # what cannot be read back is never committed with
            digest = plans.digest(data)
            return protocol.PlanReady(step=step, attempt=attempt, plan_digest=digest, plan_size=len(data)), data
        except CheckpointError as exc:
            exc.step = exc.step if exc.step is not None else step
            return protocol.PlanFailed(step=step, attempt=attempt, error=exc), b""
        except Exception as exc:
            error = ManifestError(f"planning failed: {type(exc).__name__}: {exc}", step=step)
            return protocol.PlanFailed(step=step, attempt=attempt, error=error), b""

    def _store(self, made: PlanMade, data: bytes, digests: tuple[str, ...], then: Callable[[PlanMade], None]) -> None:
        if not isinstance(made, protocol.PlanReady):
            then(made)
            return
        memory = self._of_memory(made.step, made.attempt)
        if memory is not None:
            memory.keep_plan(digests, made.plan_digest, data)
            then(made)
            return

        def stored(value: Any, error: CheckpointError | None) -> None:
            if error is None:
                self._plans[digests] = (made.plan_digest, made.plan_size)
                while len(self._plans) > PLANS_KEPT:
                    self._plans.popitem(last=False)
                then(made)
            else:
                then(protocol.PlanFailed(step=made.step, attempt=made.attempt, error=error))

        arguments = {"digest": made.plan_digest, "plan": data}
        self._flusher.call("plan", arguments, stored, timeout_s=self._config.flush_timeout_s)

    # -- the manifest ----------------------------------------------------------------------------------------------------

    def _publish(self, action: protocol.Publish, *, healed: bool = False) -> None:
        metrics, final = self._facts(action.step, action.attempt)
        memory = self._of_memory(action.step, action.attempt)
        if memory is not None:
            memory.publish(action, metrics, final, lambda error: self._told_to_all(action, error))
            return
        arguments = {
            "commit": [action.step, self._incarnation, action.attempt],
            "run_id": self._run_id,
            "world_size": len(self._node_of),
            "nodes": [{"node": ref.node, "size_bytes": ref.size_bytes, "blake3": ref.blake3} for ref in action.nodes],
            "plan_digest": action.plan_digest,
            "plan_size": action.plan_size,
            "metrics": metrics,
            "final": final,
        }

        def published(value: Any, error: CheckpointError | None) -> None:
            if error is None:
                self.handle(protocol.Published(step=action.step, attempt=action.attempt))
            elif not healed and (error.path or "").endswith(paths.plan(action.plan_digest)):
                self._heal(action, error)
            else:
                self._publish_failed(action, error)

        self._flusher.call("publish", arguments, published, timeout_s=self._config.flush_timeout_s)

    def _of_memory(self, step: int, attempt: int) -> MemoryLead | None:
        """Return who commits a save that stays in memory; None for one that does not."""
        return self._memory if self._memory is not None and self._memory.is_memory(step, attempt) else None

    def _told_to_all(self, action: protocol.Publish, error: CheckpointError | None) -> None:
        """The manifest of a memory save is at all nodes, or (after an error) at some of them perhaps."""
        if error is None:
            self.handle(protocol.Published(step=action.step, attempt=action.attempt))
        else:
            self.handle(protocol.PublishFailed(step=action.step, attempt=action.attempt, error=error))

    def _heal(self, action: protocol.Publish, cause: CheckpointError) -> None:
        """Store the plan once more, which was found missing or damaged when it was to be committed with; then publish."""
        digests = self._digests.get((action.step, action.attempt))
        if digests is None:  # given up meanwhile
            self._publish_failed(action, cause)
            return
        self._plans.pop(digests, None)

        def made(event: PlanMade) -> None:
            if isinstance(event, protocol.PlanFailed):
                self._publish_failed(action, event.error)
            elif event.plan_digest != action.plan_digest or (action.step, action.attempt) not in self._digests:
                self._publish_failed(action, cause)
            else:
                self._publish(action, healed=True)

        self._events.emit("plan", "failed", step=action.step, error=str(cause))
        self._make_plan(action.step, action.attempt, digests, made)

    def _publish_failed(self, action: protocol.Publish, error: CheckpointError) -> None:
        """Make sure that the manifest of a save that failed is not believed, where nobody is left who may yet make it visible."""
        key = (action.step, action.attempt)
        answered, open_ = not self._flusher.lost, key in self._digests
        if isinstance(error, DeadlineError | SupersededError) or self._flusher.may_still_run or not open_:
            # Whatever it is now, it was told to be in doubt, or is for the newer incarnation to decide.
            self._unpublished(action, error, certain=False)
            return

        def withdrawn(value: Any, failure: CheckpointError | None) -> None:
            self._unpublished(action, error, certain=answered and failure is None and bool(value))

        arguments = {"commit": [action.step, self._incarnation, action.attempt]}
        self._flusher.call("withdraw", arguments, withdrawn, timeout_s=self._config.flush_timeout_s)

    def _unpublished(self, action: protocol.Publish, error: CheckpointError, *, certain: bool) -> None:
        self.handle(protocol.PublishFailed(step=action.step, attempt=action.attempt, error=error, certain=certain))
        if not certain:
            self._on_doubtful(action.step, action.attempt)
