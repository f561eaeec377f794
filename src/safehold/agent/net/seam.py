"""What sessions use of the network, and nothing of how it is made: `peers.Peers` is the real one, `testing.fake_network` the fake.

Invariants: messages from one node to another arrive in the order of their `send`, each once, or are lost for good, and then the sender is
told (`on_lost`). No call of `send` waits. Every other wait has a deadline. What is received is not believed: payloads are opaque here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from safehold.errors import CheckpointError

MAX_MESSAGE_BYTES = 15 << 20
"""Bytes of one control message; what is larger goes as bulk."""

OnMessage = Callable[[str, bytes], None]
OnLost = Callable[[str, CheckpointError], None]
OnBack = Callable[[str], None]
OnSuperseded = Callable[[str, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Listeners:
    """What a node is told. Called one at a time, from a thread of the network: they hand over and return, and must not raise.

    Attributes:
        on_message: A control message came (from which node, payload).
        on_lost: A node has not answered for the peer timeout (node, why): everything that was sent to it and not acknowledged is given
            up, and `send` refuses it until it is back. Once for each loss.
        on_back: A node that was lost answers again.
        on_superseded: A node refuses this one since it knows a newer incarnation (node, that incarnation). Once for each.
    """

    on_message: OnMessage
    on_lost: OnLost
    on_back: OnBack
    on_superseded: OnSuperseded = lambda node, incarnation: None


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Bytes that a provider lets others read.

    Attributes:
        fd: A file or a memfd. The network owns it from here on and closes it; a provider gives a duplicate of what it keeps. Its
            position may be changed.
        offset: Where the bytes begin in it.
        size: How many there are.
        version: Changes when the bytes do, so that nobody joins halves of two; any short ASCII text without quotes.
    """

    fd: int
    offset: int
    size: int
    version: str = "0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming:
    """Bytes that a node wants to write: `size` of them at `offset` of something of `total` bytes.

    Attributes:
        node: Who writes.
        name: Under which name, checked in general (no `..`, no NUL, length); what it means is for the sink to check.
        offset: Where the bytes begin in what is written.
        size: How many come.
        total: How many there will be in all.
    """

    node: str
    name: str
    offset: int
    size: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Landing:
    """Where a sink wants bytes: a view of exactly their size, or a descriptor and an offset.

    Attributes:
        view: Writable and contiguous; filled in place. None: `fd` is used.
        fd: Written at `offset`; stays the sink's, and open until `done` or `failed` was called.
        offset: Where the bytes begin in `fd`.
        done: All came; gets their CRC32. Called once, unless `failed` is, before the writer hears of it; a `CheckpointError` reaches
            the writer as it is.
        failed: They did not all come (cut, too slow, the network was closed); what was filled so far is worthless. Called once.
    """

    view: memoryview | None = None
    fd: int = -1
    offset: int = 0
    done: Callable[[int], None]
    failed: Callable[[CheckpointError], None]


Provider = Callable[[str, str], Source | None]
"""(reading node, name) -> what it may read; None if there is no such thing for it. A `CheckpointError` reaches the reader as it is."""

Sink = Callable[[Incoming], Landing | None]
"""What comes -> where to; None if it is not wanted. A `CheckpointError` reaches the writer as it is."""


class Network(Protocol):
    """One node's end of the network; all calls from any thread."""

    @property
    def node(self) -> str:
        """Name of this node."""
        ...

    def send(self, node: str, payload: bytes) -> None:
        """Send a control message; never waits. To oneself it comes the same way, without a network.

        Raises:
            AgentUnavailableError: The node is lost, or too much waits for it already. Nothing was sent.
            ConfigurationError: No such node, too large a message, or the network is closed.
        """
        ...

    def broadcast(self, payload: bytes, nodes: Iterable[str] | None = None) -> dict[str, CheckpointError]:
        """Send to all nodes but this one (or to `nodes`); returns those it could not be sent to, and why."""
        ...

    def watch(self, node: str) -> None:
        """From now on tell if the node is lost, though nothing is sent to it. Who was sent to is watched anyway."""
        ...

    def read_into(self, node: str, kind: str, name: str, offset: int, view: memoryview, *, deadline_s: float) -> int:
        """Fill `view` with bytes of another node, from `offset` on; returns their CRC32.

        Args:
            node: Who has them.
            kind: Of provider.
            name: For the provider.
            offset: First byte.
            view: Writable, contiguous; its size says how many. Undefined where the call raises.
            deadline_s: Seconds that the call may take in all.

        Raises:
            AgentUnavailableError: The node cannot be reached, or refuses.
            DeadlineError: Not finished in time.
            IntegrityError: There are no such bytes, or they changed while they were read.
        """
        ...

    def write_from(
        self, node: str, kind: str, name: str, offset: int, view: memoryview, *, total: int, deadline_s: float
    ) -> int:
        """Write `view` to another node, at `offset` of something of `total` bytes; returns the CRC32, which the other side has found too.

        Raises:
            AgentUnavailableError: The node cannot be reached, or refuses.
            DeadlineError: Not finished in time.
            IntegrityError: The other side has received something else.
        """
        ...

    def provide(self, kind: str, provider: Provider) -> None:
        """Let other nodes read; called from threads of the network."""
        ...

    def accept(self, kind: str, sink: Sink) -> None:
        """Let other nodes write; called from threads of the network."""
        ...

    def set_incarnation(self, incarnation: int) -> None:
        """Speak, and be spoken to, as this incarnation from now on; also what already waits to be sent."""
        ...

    def close(self) -> None:
        """Stop, within some seconds; what was not sent is dropped, and no listener is called any more."""
        ...
