"""The lead agent's hands: carries out what the commit protocol decides.

Invariants: every decision is `policy.commit`'s; here are only its effects. Planning runs in a thread (it can take seconds for thousands of
ranks) and its result comes back as an event; a plan whose part digests are known is not planned again. Nothing here waits.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from safehold.agent.flusher_client import Flusher
from safehold.agent.parts import PartStore
from safehold.clock import Clock
from safehold.config import Config
from safehold.errors import CheckpointError, ManifestError
from safehold.events import EventStream
from safehold.format import plan as plans
from safehold.policy import commit as protocol
from safehold.policy.coverage import check as check_coverage

Post = Callable[[Callable[[], None]], None]
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
        parts: The ranks' encoded parts.
        facts: Metrics and the final flag of a save.
        on_committed: Told of each commit: (step, attempt).
        on_abandoned: Told of each save given up.
        on_settled: Told when `settle` has come to its end.
        post: Runs a function in the dispatcher.
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
        parts: PartStore,
        facts: Callable[[int, int], tuple[dict[str, float], bool]],
        on_committed: Callable[[int, int], None],
        on_abandoned: Callable[[protocol.Abandon], None],
        on_settled: Callable[[], None],
        post: Post,
        clock: Clock,
        events: EventStream,
    ) -> None:
        self._node_of, self._incarnation, self._run_id = node_of, incarnation, run_id
        self._config, self._flusher, self._parts, self._facts = config, flusher, parts, facts
        self._on_committed, self._on_abandoned, self._on_settled = on_committed, on_abandoned, on_settled
        self._post, self._clock, self._events = post, clock, events
        self._plans: OrderedDict[tuple[str, ...], tuple[str, int]] = OrderedDict()
        deadlines = protocol.Deadlines(
            begin_s=config.begin_timeout_s,
            stage_s=config.stage_timeout_s,
            flush_s=config.flush_timeout_s,
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

    def settle(self, deadline_s: float) -> None:
        """No new saves: finish what all ranks have staged, give up the rest; `on_settled` follows."""
        self.handle(protocol.Settle(deadline=self._clock.monotonic() + deadline_s, grace_s=SETTLE_GRACE_S))

    def _act(self, action: Any) -> None:
        match action:
            case protocol.BuildPlan():
                self._build(action)
            case protocol.Publish():
                self._publish(action)
            case protocol.Committed():
                self._events.emit("commit", "done", step=action.step, attempt=action.attempt)
                self._on_committed(action.step, action.attempt)
            case protocol.Abandon():
                self._events.emit("commit", "failed", step=action.step, error=str(action.error))
                self._on_abandoned(action)
            case protocol.Settled():
                self._on_settled()

    def _build(self, action: protocol.BuildPlan) -> None:
        digests = tuple(action.part_digests[rank] for rank in sorted(action.part_digests))
        known = self._plans.get(digests)
        if known is not None:
            self._plans.move_to_end(digests)
            ready = protocol.PlanReady(
                step=action.step, attempt=action.attempt, plan_digest=known[0], plan_size=known[1]
            )
            self._post(lambda: self.handle(ready))
            return
        found = [self._parts.get(rank, digest) for rank, digest in sorted(action.part_digests.items())]
        parts = [part for part in found if part is not None]
        if len(parts) < len(found):
            error = ManifestError("a rank's part never reached the lead", step=action.step)
            failed = protocol.PlanFailed(step=action.step, attempt=action.attempt, error=error)
            self._post(lambda: self.handle(failed))
            return
        threading.Thread(target=self._plan, args=(action, digests, parts), name="plan", daemon=True).start()

    def _plan(self, action: protocol.BuildPlan, digests: tuple[str, ...], parts: list[bytes]) -> None:
        event: Any
        data = b""
        try:
            with self._events.span("plan", step=action.step):
                plan = plans.merge_parts(parts, self._node_of)
                check_coverage(plan)
                data = plans.encode_plan(plan)
            event = protocol.PlanReady(
                step=action.step, attempt=action.attempt, plan_digest=plans.digest(data), plan_size=len(data)
            )
        except CheckpointError as exc:
            exc.step = exc.step if exc.step is not None else action.step
            event = protocol.PlanFailed(step=action.step, attempt=action.attempt, error=exc)
        except Exception as exc:
            error = ManifestError(f"planning failed: {type(exc).__name__}: {exc}", step=action.step)
            event = protocol.PlanFailed(step=action.step, attempt=action.attempt, error=error)

        self._post(lambda: self._store(event, digests, data))

    def _store(self, event: Any, digests: tuple[str, ...], data: bytes) -> None:
        if not isinstance(event, protocol.PlanReady):
            self.handle(event)
            return

        def stored(value: Any, error: CheckpointError | None) -> None:
            if error is None:
                self._plans[digests] = (event.plan_digest, event.plan_size)
                while len(self._plans) > PLANS_KEPT:
                    self._plans.popitem(last=False)
                self.handle(event)
            else:
                self.handle(protocol.PlanFailed(step=event.step, attempt=event.attempt, error=error))

        arguments = {"digest": event.plan_digest, "plan": data}
        self._flusher.call("plan", arguments, stored, timeout_s=self._config.flush_timeout_s)

    def _publish(self, action: protocol.Publish) -> None:
        metrics, final = self._facts(action.step, action.attempt)
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
            else:
                self.handle(protocol.PublishFailed(step=action.step, attempt=action.attempt, error=error))

        self._flusher.call("publish", arguments, published, timeout_s=self._config.flush_timeout_s)
