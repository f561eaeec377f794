"""Getting an arena ready before the first save: in a thread of its own, so that nobody waits who does not want to.

Invariants: at most one thread prepares at a time; what went wrong is logged, and raised to who waited for it. A save that comes meanwhile
needs nothing of this; it is only slower.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from safehold.agent import messages as m
from safehold.config import Config
from safehold.errors import CheckpointError, ConfigurationError
from safehold.format import objects
from safehold.state.leaves import Leaves, TensorLeaf
from safehold.trainer.arena import ArenaWriter
from safehold.trainer.connection import Run

log = logging.getLogger("safehold")
ENDING = "interpreter shutdown"
"""What Python says to who starts threads while it ends."""


class Preparing:
    """Asks the agent for an arena, and makes it fit for fast copies in this process."""

    def __init__(self, run: Run, arena: ArenaWriter, config: Config) -> None:
        self._run, self._arena, self._config = run, arena, config
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Have `work` done in the thread, behind what it does now."""
        before, self._error = self._thread, None
        self._thread = threading.Thread(target=self._run_all, args=(work, before), name="prepare", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of it; returns whether that came."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    @property
    def idle(self) -> bool:
        """Whether nothing is being prepared now."""
        return self.join(0.0)

    def arena(self, leaves: Leaves, size_bytes: int) -> None:
        """Get an arena of that size from the agent, mapped, populated and pinned; takes as long as that takes."""
        self._arena.make_room(size_bytes)
        reply, fds = self._run.client.request(
            m.Prepare(0, size_bytes, self._arena.numa_node(leaves)),
            m.Prepared,
            self._config.start_timeout_s,
            "preparing the arena",
        )
        self._arena.prepare(reply, fds, leaves)
        if self._run.generations == 1:
            return
        request = m.Prepare(0, size_bytes, self._arena.numa_node(leaves), other=True)
        other, fds = self._run.client.ask(request, self._config.start_timeout_s, "preparing the other arena")
        if isinstance(other, m.Prepared):
            self._arena.prepare(other, fds, leaves)

    def wait(self, timeout_s: float) -> None:
        """Wait until it is done.

        Raises:
            CheckpointError: It failed, or takes longer.
        """
        if not self.join(timeout_s):
            hint = "saves work all the same, and the first is slower; raise start_timeout_s"
            raise ConfigurationError(f"preparing for saves took longer than {timeout_s:g} s", hint=hint)
        if self._error is not None:
            raise self._error

    def _run_all(self, work: Callable[[], None], before: threading.Thread | None) -> None:
        if before is not None:
            before.join(self._config.start_timeout_s)
        try:
            work()
        except CheckpointError as exc:
            self._error = exc
        except Exception as exc:
            self._error = ConfigurationError(f"preparing for saves failed: {type(exc).__name__}: {exc}")
            self._error.__cause__ = exc
        ends = ENDING in str(self._error)  # which needs nothing prepared
        if self._error is not None and not ends and not self._run.client.closed:
            log.warning("safehold: preparing for saves failed: %s", self._error)


def leaves_of(tensors: list[TensorLeaf]) -> Leaves:
    """Return what a restore has bound as leaves: enough to know the arena's size and who holds what, without objects."""
    by_name = {leaf.spec.name: leaf for leaf in tensors}
    return Leaves(tensors=[by_name[name] for name in sorted(by_name)])


def headroom_bytes(leaves: Leaves) -> int:
    """Bytes that optimizers which have not stepped yet will need for their states: known for the common families, else nothing."""
    extra = 0
    stateful = {leaf.spec.name for leaf in leaves.tensors if ".state." in leaf.spec.name}
    for name, optimizer in leaves.optimizers:
        if any(entry.startswith(f"{name}.state.") for entry in stateful):
            continue
        kind = type(optimizer).__name__.lower()
        copies = (
            2
            if "adam" in kind or "lamb" in kind
            else 1
            if any(g.get("momentum") for g in optimizer.param_groups)
            else 0
        )
        for group in optimizer.param_groups:
            for param in group["params"]:
                local: Callable[[], Any] | None = getattr(param, "to_local", None)
                tensor = local() if local is not None else param
                extra += copies * tensor.numel() * tensor.element_size() + 64 * copies
    return extra


def quietly(prepare: Callable[[], None]) -> None:
    """Prepare where nobody has asked for it; what stands in the way is raised by the save that needs it."""
    try:
        prepare()
    except Exception as exc:
        log.warning("safehold: preparing for saves failed: %s", exc, exc_info=not isinstance(exc, CheckpointError))


def encode_objects(leaves: Leaves) -> dict[str, bytes]:
    """Return the encoded objects of a state by name."""
    return {leaf.spec.name: objects.encode(leaf.value, name=leaf.spec.name) for leaf in leaves.objects}
