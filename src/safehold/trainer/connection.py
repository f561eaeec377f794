"""How a trainer comes into a run: the exchange at start-up, its agent, the incarnation; and coming back when the agent died.

Invariants: `open_run` is the only collective. All ranks leave it with the same incarnation or the same error. Afterwards a lost agent is
replaced by whichever rank notices first, without talking to the others.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from safehold.agent import messages as m
from safehold.agent.client import AgentClient
from safehold.agent.net.addresses import way_to
from safehold.agent.protector import scheme_of
from safehold.agent.start import choose_slot
from safehold.clock import new_token
from safehold.config import Config
from safehold.errors import AgentUnavailableError, CheckpointError, ConfigurationError
from safehold.host.memfd import Mapping
from safehold.host.runtime import RunSlot
from safehold.pipeline.exchange import Exchange, node_name
from safehold.policy.memory_need import GENERATIONS
from safehold.policy.placement import Scheme, place
from safehold.tiers.base import Tier
from safehold.tiers.open import open_tier
from safehold.types import Membership

log = logging.getLogger("safehold")
ANSWER_SLACK_S = 5.0
COME_BACK_PAUSE_S = 1.0
DOMAIN_VARIABLE = "SAFEHOLD_DOMAIN"
"""Names what a node fails together with, larger domains first: `room-1/rack-7`."""
OWN_SETTINGS = ("runtime_dir", "storage_interface", "network_cert", "network_key", "network_ca")
"""Settings that may differ from node to node."""


@dataclass(slots=True, kw_only=True)
class Run:
    """A run that this rank has joined.

    Attributes:
        client: The connection to the agent.
        world: Who takes part.
        run_id: The run's id.
        newest_step: Newest checkpoint at start-up, None if there is none.
        notes: Sentences for the user, and `warnings` that cannot wait.
        arenas: Arenas mapped so far, by id, of the connection `arenas_of`; at most one for each generation.
        generations: How many arenas this rank has.
        retired: Arenas that others came in the place of, to be unmapped once nothing copies into them any more.
        reconnecting: Held by whoever looks for another agent.
    """

    client: AgentClient
    world: m.World
    run_id: str
    newest_step: int | None
    notes: list[str]
    warnings: list[str] = field(default_factory=list)
    arenas: dict[int, Mapping] = field(default_factory=dict)
    arenas_of: int = 0
    generations: int = 1
    retired: list[Mapping] = field(default_factory=list)
    reconnecting: threading.Lock = field(default_factory=threading.Lock)


def open_run(
    url: str,
    membership: Membership,
    config: Config,
    *,
    keep: dict[str, Any],
    every_seconds: float,
    notify: Callable[[m.Reply], None],
    lost: Callable[[str], None],
) -> Run:
    """Join a run; collective.

    Args:
        url: The run directory, absolute.
        membership: This rank, the world, the store.
        config: Settings, the same on all ranks.
        keep: Wire form of the retention rules.
        every_seconds: Interval of time-based saves, 0 for none.
        notify: Takes the agent's notifications.
        lost: Told when the agent is gone.

    Raises:
        CheckpointError: The same on all ranks.
    """
    exchange = Exchange(membership, "open", config.start_timeout_s)
    with exchange.telling():
        rank = membership.rank
        shared = {name: value for name, value in config.to_wire().items() if name not in OWN_SETTINGS}
        scheme = scheme_of(config)
        domain = os.environ.get(DOMAIN_VARIABLE, "")
        facts = {"node": node_name(), "url": url, "config": msgspec.msgpack.encode(shared), "domain": domain}
        gathered = exchange.gather("rank", facts)
        world = m.World(**exchange.decide("world", lambda: _world(gathered or [], membership, scheme)))
        slot = _slot(exchange, world, rank, url, config)
        client = AgentClient(
            url=url,
            slot=slot,
            rank=rank,
            config=config,
            keep=keep,
            every_seconds=every_seconds,
            notify=notify,
            lost=lost,
            listen=config.storage_interface or way_to(os.environ.get("MASTER_ADDR", "")),
        )
        error: CheckpointError | None = None
        try:
            client.connect(world, config.start_timeout_s)
        except CheckpointError as exc:
            error = exc
        try:
            exchange.agree("connected", error)
            if len(world.node_names) > 1:
                _meet(exchange, client, world, config)
            return _join(exchange, client, world, config)
        except BaseException:
            client.close(linger=True)
            raise


def _meet(exchange: Exchange, client: AgentClient, world: m.World, config: Config) -> None:
    """Tell the agents of all nodes where the others listen."""
    told = exchange.gather("address", client.address)

    def by_node() -> list[str]:
        assert told is not None
        return [told[min(ranks)] for ranks in world.ranks_by_node()]

    client.addresses = exchange.decide("addresses", by_node)
    error: CheckpointError | None = None
    try:
        client.request(m.Meet(0, client.addresses), m.Done, config.request_timeout_s, "where the other agents are")
    except CheckpointError as exc:
        error = exc
    exchange.agree("met", error)


def _join(exchange: Exchange, client: AgentClient, world: m.World, config: Config) -> Run:
    """Open the incarnation on rank 0, and have the others join it."""
    opened = exchange.decide("opened", lambda: _open(client, config), config.start_timeout_s + ANSWER_SLACK_S)
    client.run_id, client.incarnation = opened["run_id"], opened["incarnation"]
    client.local_flash = opened["local_flash"]
    error: CheckpointError | None = None
    if client.rank != 0:
        try:
            client.request(
                m.JoinRun(0, client.run_id, client.incarnation), m.Done, config.request_timeout_s, "joining the run"
            )
        except CheckpointError as exc:
            error = exc
    exchange.agree("joined", error)
    return Run(
        generations=GENERATIONS if config.flush_every > 1 else 1,
        client=client,
        world=world,
        run_id=client.run_id,
        newest_step=opened["newest_step"],
        notes=opened["notes"],
        warnings=opened["warnings"],
    )


def _world(gathered: list[dict[str, Any]], membership: Membership, scheme: Scheme | None) -> dict[str, Any]:
    nodes: dict[str, int] = {}
    node_of = [nodes.setdefault(entry["node"], len(nodes)) for entry in gathered]
    for rank, entry in enumerate(gathered):
        for what in ("url", "config"):
            if entry[what] != gathered[0][what]:
                shown = f": {entry[what]} and {gathered[0][what]}" if what == "url" else ""
                text = (
                    f"rank {rank} and rank 0 have different {'run directories' if what == 'url' else 'settings'}{shown}"
                )
                raise ConfigurationError(text, rank=rank, hint="give every rank the same arguments and environment")
    domains = [gathered[node_of.index(node)]["domain"] for node in range(len(nodes))]
    for rank, entry in enumerate(gathered):
        if entry["domain"] != domains[node_of[rank]]:
            text = f"ranks of node {entry['node']} name different failure domains: {entry['domain']!r} and {domains[node_of[rank]]!r}"
            raise ConfigurationError(
                text, rank=rank, hint=f"{DOMAIN_VARIABLE} is the node's, the same for all its ranks"
            )
    if scheme is not None:
        place(scheme, range(len(nodes)), {node: name for node, name in enumerate(domains) if name})
    return {
        "token": new_token(),
        "world_size": membership.world_size,
        "node_of": node_of,
        "node_names": list(nodes),
        "domains": domains,
    }


def _slot(exchange: Exchange, world: m.World, rank: int, url: str, config: Config) -> RunSlot:
    """The lowest rank of each node picks the agent's slot, the others follow."""
    node = world.node_of[rank]
    if rank == min(world.ranks_of(node)):
        try:
            slot = choose_slot(url, config)
        except CheckpointError as exc:
            exchange.put(f"slot/{node}", {"error": exc.to_wire()})
            raise
        exchange.put(f"slot/{node}", {"value": str(slot.directory)})
        return slot
    who = f"rank {min(world.ranks_of(node))}"
    slot = RunSlot(Path(exchange.opened(exchange.take(f"slot/{node}", who))))
    if not slot.directory.is_dir():
        text = (
            f"this rank and {who} are both on node {world.node_names[node]!r}, and do not see the same {slot.directory}"
        )
        hint = "hosts need different names (host name, or SAFEHOLD_NODE); ranks of one host need one runtime directory"
        raise ConfigurationError(text, rank=rank, hint=hint)
    return slot


def _open(client: AgentClient, config: Config) -> dict[str, Any]:
    reply, _ = client.request(m.OpenRun(0), m.RunOpened, config.start_timeout_s, "opening the run")
    return {
        "run_id": reply.run_id,
        "incarnation": reply.incarnation,
        "newest_step": reply.newest_step,
        "local_flash": reply.local_flash,
        "notes": reply.notes,
        "warnings": reply.warnings,
    }


class Reconnector:
    """Brings a rank back to an agent, one attempt at a time."""

    def __init__(self, run: Run, config: Config) -> None:
        self._run, self._config = run, config
        self._told = 0

    def ensure(self) -> None:
        """Connect again if the agent was lost.

        Raises:
            CheckpointError: It cannot be had.
        """
        with self._run.reconnecting:
            if self._run.client.alive:
                return
            if self._told != self._run.client.generation:  # once for each agent, however often it is tried
                self._told = self._run.client.generation
                log.warning("safehold: the agent of this node is gone; starting another")
            self._run.client.reconnect(self._config.start_timeout_s)


def open_flash(run: Run, path: str, config: Config) -> Tier:
    """Return the run's tier, for reading: the run directory, or the union of the nodes' own disks."""
    own, client = open_tier(path, direct=config.direct_io), run.client
    if not client.local_flash:
        return own
    from safehold.agent import joined_flash
    from safehold.pipeline.recovering import RecoveringTier

    world = run.world
    node = world.node_of[client.rank]
    wire = joined_flash.to_wire(node=node, names=world.node_names, addresses=client.addresses, token=world.token)
    return RecoveringTier(joined_flash.join(own, path, wire, config))


def leave(run: Run, config: Config, timeout_s: float, *, linger: bool) -> None:
    """Say goodbye to the agent; in order, once the last checkpoint has its redundancy, or the time is over."""
    client = run.client
    try:
        if not linger and client.local_flash and (config.copies or config.parity) and timeout_s > 0:
            ask = m.ProtectionAsk(0, timeout_s)
            client.request(ask, m.Done, timeout_s + ANSWER_SLACK_S, "the redundancy of the last checkpoint")
    except CheckpointError as exc:
        log.warning("safehold: the last checkpoint may have no redundancy: %s", exc)
    finally:
        client.close(linger=linger)


def map_arena(run: Run, arena_id: int, arena_bytes: int, fds: list[int]) -> Mapping:
    """Return the mapping of an arena, whose descriptor is in `fds`; one that is mapped already is not mapped again.

    Raises:
        AgentUnavailableError: There is no such descriptor, or it is no arena.
    """
    try:
        if run.arenas_of != run.client.generation:
            run.retired += run.arenas.values()
            run.arenas.clear()
            run.arenas_of = run.client.generation
        found = run.arenas.get(arena_id)
        if found is not None:
            return found
        if not fds:
            raise AgentUnavailableError("the agent sent no arena", rank=run.client.rank)
        mapping = Mapping(fds[0], arena_bytes)
        mapping.keep_from_children()
        if sum(other > arena_id for other in run.arenas) >= run.generations:  # ids count up: what speaks of it is late
            run.retired.append(mapping)
            return mapping
        while len(run.arenas) >= run.generations:
            run.retired.append(run.arenas.pop(min(run.arenas)))
        run.arenas[arena_id] = mapping
        return mapping
    finally:
        for fd in fds:
            os.close(fd)
