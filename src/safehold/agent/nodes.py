"""The other nodes of a job, as one session reaches them: messages by index, in order, told in the dispatcher.

Invariants: a job on one node has none of this, and opens no port. What cannot be sent is dropped here, since the network tells that the
node is lost, and whoever waits for it hears of that. What comes malformed is dropped and told as an event: it is no honest agent's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import msgspec

from safehold.agent import messages as m
from safehold.agent import words as w
from safehold.agent.means import Spawn, in_thread
from safehold.agent.net.seam import Listeners, Network, Provider
from safehold.errors import CheckpointError, ConfigurationError
from safehold.events import EventStream

Post = Callable[[Callable[[], None]], None]


class MeetingNetwork(Network, Protocol):
    """A network that listens before it knows where the others are."""

    @property
    def address(self) -> Any:
        """Where it listens."""
        ...

    def meet(self, addresses: dict[str, Any]) -> None:
        """Learn where the others are, by name."""
        ...


Reply = Callable[[bytes | CheckpointError], None]
AskDisk = Callable[[bytes, Reply], None]


@runtime_checkable
class ServingNetwork(Protocol):
    """A network by which others can ask questions and read files."""

    def answer_calls(self, kind: str, handler: Callable[[str, bytes, Reply], None]) -> None:
        """Let other nodes ask questions of a kind."""
        ...

    def provide(self, kind: str, provider: Provider) -> None:
        """Let other nodes read bytes of a kind."""
        ...


MakeNetwork = Callable[[m.Hello, Listeners], MeetingNetwork]


class Nodes:
    """See the module.

    Args:
        hello: The hello of this node's first rank.
        make: Makes the network.
        watched: The nodes whose loss matters here.
        heard: Takes (node, message) in the dispatcher; raises `msgspec.DecodeError` at what makes no sense.
        lost: Told in the dispatcher that a node is dead or cannot be reached: (node, why).
        back: Told that it is back.
        post: Runs a function in the dispatcher.
        spawn: Has the network closed beside it.
    """

    def __init__(
        self,
        hello: m.Hello,
        *,
        make: MakeNetwork,
        watched: list[int],
        heard: Callable[[int, Any], None],
        lost: Callable[[int, CheckpointError], None],
        back: Callable[[int], None],
        post: Post,
        events: EventStream,
        spawn: Spawn = in_thread,
    ) -> None:
        world = hello.world
        self._names = world.node_names
        self._index = {name: index for index, name in enumerate(world.node_names)}
        self._heard, self._events, self._spawn = heard, events, spawn
        self._closed = False
        self._met: list[str] = []
        self._watched = [world.node_names[node] for node in watched]

        def told(work: Callable[[], None]) -> None:
            post(lambda: None if self._closed else work())

        self._told = told
        self.network = make(
            hello,
            Listeners(
                on_message=lambda name, data: told(lambda: self._take(name, data)),
                on_lost=lambda name, error: told(lambda: lost(self._index[name], error)),
                on_back=lambda name: told(lambda: back(self._index[name])),
            ),
        )
        self.addresses: list[str] = []
        if hello.addresses:
            self.meet(hello.addresses)

    def serve_disk(self, root: str, ask: AskDisk) -> None:
        """Let the other nodes use this node's disk: `ask` carries out a question, `root` is the run directory."""
        network = self.network
        if isinstance(network, ServingNetwork):
            from safehold.agent.flash_files import provider

            network.answer_calls("tier", lambda name, question, reply: self._told(lambda: ask(question, reply)))
            network.provide("flash", provider(root))

    @property
    def address(self) -> str:
        """Where this node listens."""
        return str(self.network.address)

    def meet(self, addresses: list[str]) -> None:
        """Learn where the nodes are, by index.

        Raises:
            ConfigurationError: They are no addresses, or not one for each node.
        """
        if addresses == self._met:
            return  # each rank tells the same
        from safehold.agent.net.addresses import Address

        if len(addresses) != len(self._names):
            raise ConfigurationError(f"{len(addresses)} addresses were given for {len(self._names)} nodes")
        parsed = {name: Address.parse(text) for name, text in zip(self._names, addresses, strict=True)}
        self.network.meet(parsed)
        self.addresses = self._met = list(addresses)
        for name in self._watched:
            self.network.watch(name)

    def send(self, node: int, message: msgspec.Struct) -> None:
        """Tell a node, if it can be reached; before the nodes have met, nobody can, and nobody waits for a word."""
        if not self._met:
            return
        try:
            self.network.send(self._names[node], w.encode(message))
        except CheckpointError as exc:
            kind = type(message).__name__
            self._events.emit("tell", "failed", error=f"{kind} to node {self._names[node]}: {exc}")

    def _take(self, name: str, data: bytes) -> None:
        try:
            self._heard(self._index[name], w.decode(data))
        except msgspec.DecodeError as exc:
            self._events.emit("heard", "failed", error=f"node {name} told what makes no sense: {exc}")

    def close(self) -> None:
        """Stop."""
        self._closed = True
        self._spawn("network-close", self.network.close)  # which may take seconds
