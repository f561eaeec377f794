"""What trainers and their agent say to each other over the private Unix socket.

Invariants: every message is one tagged msgpack map, bounded by the channel's frame limit; `id` pairs a request with its reply, and 0
marks a notification. What opens a connection has a line before it that every version understands (`safehold.agent.greeting`). File
descriptors travel beside the message, in the order that the docstrings give. No paths of storage and no code cross this border.
PROTOCOL counts up with every change that an older side would misunderstand.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from safehold._version import __version__
from safehold.agent import chunk_messages, greeting, held_messages
from safehold.agent.greeting import Greeting, OtherVersionError
from safehold.agent.world import World as World

PROTOCOL = 1


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """First message of a trainer. `incarnation` and `run_id` are set when it returns to a restarted agent.

    Attributes:
        listen: Where the agent listens for those of other nodes: an address or interface of this host; empty with one node.
        addresses: Where the agents of all nodes listen, once that is known: an agent in the place of another takes its address.
    """

    id: int
    protocol: int
    version: str
    rank: int
    pid: int
    world: World
    config: dict[str, Any]
    keep: dict[str, Any]
    every_seconds: float = 0.0
    incarnation: int = 0
    run_id: str = ""
    listen: str = ""
    addresses: list[str] = []
    local_flash: bool = False


class Welcome(msgspec.Struct, tag="welcome", frozen=True):
    """Reply to `Hello`. Descriptors: the rank's control words, their wake-up eventfd, the node's control words.

    `address`: where the agent listens for those of other nodes; empty with one node.
    """

    id: int
    version: str
    agent_pid: int
    address: str = ""


class Meet(msgspec.Struct, tag="meet", frozen=True):
    """Where the agents of all nodes listen, by node; replied to with `Done`."""

    id: int
    addresses: list[str]


class OpenRun(msgspec.Struct, tag="open_run", frozen=True):
    """Rank 0 asks the lead agent to settle older incarnations and to open the next one."""

    id: int


class RunOpened(msgspec.Struct, tag="run_opened", frozen=True):
    """The incarnation is open, on disks of the nodes' own if `local_flash`.

    `notes` and `warnings` are sentences for the user (direct I/O not available, another job was
    running, ...).
    """

    id: int
    run_id: str
    incarnation: int
    newest_step: int | None
    notes: list[str]
    warnings: list[str] = []
    local_flash: bool = False


class JoinRun(msgspec.Struct, tag="join_run", frozen=True):
    """Another rank tells its agent which incarnation rank 0 opened."""

    id: int
    run_id: str
    incarnation: int


class Done(msgspec.Struct, tag="done", frozen=True):
    """Reply without content."""

    id: int


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """Reply to a request that failed; `error` is `CheckpointError.to_wire()`."""

    id: int
    error: dict[str, Any]


class Register(msgspec.Struct, tag="register", frozen=True):
    """A rank says which undeclared leaves it holds: `leaves` is a list of [name, dtype, shape, kind].

    Once all ranks have said so, every rank gets a `Settled`. Replied to with `Done`, at once.
    """

    id: int
    leaves: list[tuple[str, str, list[int], str]]


class Prepare(msgspec.Struct, tag="prepare", frozen=True):
    """A rank asks for an arena of `arena_bytes`, near `numa_node` (-1: anywhere); the reply (`Prepared`) comes when its pages exist.

    With `other` for that of the other generation; the reply is `Done` where there is none, or it holds a checkpoint.
    """

    id: int
    arena_bytes: int
    numa_node: int = -1
    other: bool = False


class Prepared(msgspec.Struct, tag="prepared", frozen=True):
    """The pages exist. Descriptor: the arena; `arena_id` tells whether it is one that was mapped before."""

    id: int
    arena_id: int
    arena_bytes: int


class Settled(msgspec.Struct, tag="settled", frozen=True):
    """Notification: which ranks hold the same undeclared leaves; `settlement` is `policy.settlement`'s wire form.

    Leaves that the ranks contradict each other about (one name, two shapes) are not in it: either some ranks have not told of a change
    yet, or the save fails when its plan is made, naming leaf and ranks.
    """

    settlement: dict[str, Any]
    id: int = 0


class Begin(msgspec.Struct, tag="begin", frozen=True):
    """A rank starts a save. `part` is empty where this agent was sent it before.

    Attributes:
        packs: (arena offset, size) of each pack, in order.
        arena_bytes: Packs plus the area of ranges staged for comparison only.
        compare: (key, arena offset, nbytes) of the ranges whose CRC32 is compared between ranks.
        save_seq: Number of this save in the rank's control words.
        announced: True if it follows an announcement of the lead.
        beside_training: True if training goes on while the rank stages (`overlap=True`).
        in_memory: True if the save stays in memory, and is not flushed.
    """

    id: int
    step: int
    attempt: int
    part_digest: str
    part: bytes
    packs: list[tuple[int, int]]
    arena_bytes: int
    compare: list[tuple[str, int, int]]
    metrics: dict[str, float]
    save_seq: int = 0
    final: bool = False
    announced: bool = False
    overwrite: bool = False
    beside_training: bool = False
    numa_node: int = -1
    in_memory: bool = False


class Granted(msgspec.Struct, tag="granted", frozen=True):
    """The rank may stage. Descriptor: the arena, as with `Prepared`.

    If `arena_bytes` is less than was asked for, the arena is a ring that the rank stages through in waves.
    """

    id: int
    arena_id: int
    arena_bytes: int


class PartWanted(msgspec.Struct, tag="part_wanted", frozen=True):
    """The agent does not have the part with this digest (any more): begin again, and send it along."""

    id: int


class Skipped(msgspec.Struct, tag="skipped", frozen=True):
    """The overlap policy skips this save, on all ranks of the node; `reason` says for what."""

    id: int
    reason: str


class Staged(msgspec.Struct, tag="staged", frozen=True):
    """Everything is in the arena. `objects`: FQN -> encoded value; with `objects_fd` they are in the descriptor instead (msgpack map)."""

    id: int
    step: int
    attempt: int
    objects: dict[str, bytes]
    objects_fd: bool = False
    stage_s: float = 0.0


class StageFailed(msgspec.Struct, tag="stage_failed", frozen=True):
    """The rank could not stage; the save is abandoned everywhere."""

    id: int
    step: int
    attempt: int
    error: dict[str, Any]


class Durable(msgspec.Struct, tag="durable", frozen=True):
    """Notification: the save is committed and durable on `tier`."""

    step: int
    attempt: int
    tier: str
    figures: dict[str, float]
    id: int = 0


class LeftOut(msgspec.Struct, tag="left_out", frozen=True):
    """Notification: the save, which is durable, will not be replicated; `reason` says why."""

    step: int
    attempt: int
    reason: str
    id: int = 0


class SaveFailed(msgspec.Struct, tag="save_failed", frozen=True):
    """Notification: the save has failed; the error says so where it is not known whether it is committed."""

    step: int
    attempt: int
    error: dict[str, Any]
    id: int = 0


class Superseded(msgspec.Struct, tag="superseded", frozen=True):
    """Notification: another incarnation owns the run now."""

    incarnation: int
    id: int = 0


class Note(msgspec.Struct, tag="note", frozen=True):
    """Notification: a sentence that the user should see as a warning (trouble with retention), or with `info` as a fact."""

    text: str
    id: int = 0
    info: bool = False


class Protected(msgspec.Struct, tag="protected", frozen=True):
    """Notification: all nodes have made their redundancy of a checkpoint; or it stays without (`done` false), which a note explains."""

    step: int
    done: bool
    id: int = 0


class RestoreAsk(msgspec.Struct, tag="restore_ask", frozen=True):
    """A rank asks what to restore; the reply comes when all ranks of the node have asked for the same."""

    id: int
    step: int | None


class RestoreOffer(msgspec.Struct, tag="restore_offer", frozen=True):
    """What all ranks restore. `step` None: the run has no commit at all.

    Attributes:
        incarnation: With `step` and `attempt` the commit, and so the checkpoint's directory inside the run directory.
        manifest: The manifest's bytes; no rank reads them from storage.
        memory: Ranks whose arenas on this node still hold exactly this checkpoint.
        skipped: Sentences about newer checkpoints that could not be used.
        round: Of the restore; votes name it.
        verified: Those of `memory` whose bytes were compared with their checksums since anything could last write to them.
        holders: With node-local flash: at which node the files are that each node of the checkpoint wrote.
        fetched: It was brought back from the second place for this restore.
        tier: Where it is: `flash`, or `memory`: on no storage.
        in_memory_of: With `memory`: node of the save -> nodes that have its share; -1 -> those that have the plan.
    """

    id: int
    step: int | None
    incarnation: int = 0
    attempt: int = 0
    manifest: bytes = b""
    memory: list[int] = []
    skipped: list[str] = []
    round: int = 0
    verified: list[int] = []
    holders: dict[int, str] = {}
    fetched: bool = False
    tier: str = "flash"
    in_memory_of: dict[int, list[int]] = {}


class Vote(msgspec.Struct, tag="vote", frozen=True):
    """A rank's word in a restore: phase `planned` or `verified`.

    `error` None means yes. `bad_path` names the checkpoint's file that failed, so that it is quarantined and an older one is offered.
    With `planned` come the leaves that do not fit this rank's state; saved leaves that no rank has a place for are unexpected. So does
    `wants`: the chunks that are worth passing on (`policy.passing_on.encode`), of `num_chunks`. With `verified` come the bytes that were
    read from storage.
    """

    id: int
    round: int
    phase: str
    error: dict[str, Any] | None = None
    bad_path: str = ""
    missing: list[str] = []
    unexpected: list[str] = []
    mismatched: list[str] = []
    num_chunks: int = 0
    wants: bytes = b""
    storage_bytes: int = 0


class Verdict(msgspec.Struct, tag="verdict", frozen=True):
    """The outcome of a vote, the same for all: `go`, `again` (ask for the next offer) or `stop` with the lowest rank's error.

    `incarnation` is the one in force from here on (a restore of an older step opens a new one). `misfit`: missing, unexpected and
    mismatched leaves of all ranks together, with the outcome `stop`.
    """

    id: int
    outcome: str
    error: dict[str, Any] | None = None
    incarnation: int = 0
    misfit: tuple[list[str], list[str], list[str]] | None = None


class RestoreDone(msgspec.Struct, tag="restore_done", frozen=True):
    """A rank is through; frees what the agent held for the restore."""

    id: int
    step: int


class ProtectionAsk(msgspec.Struct, tag="protection_ask", frozen=True):
    """A rank that leaves waits until what is committed has its redundancy, or it is clear that it gets none; at most `timeout_s`."""

    id: int
    timeout_s: float


class Bye(msgspec.Struct, tag="bye", frozen=True):
    """An orderly end of the connection. `linger`: False asks the agent not to wait for a restart once all have left this way."""

    id: int
    linger: bool = True


class StatusAsk(msgspec.Struct, tag="status_ask", frozen=True):
    """What the command line asks; allowed without `Hello`."""

    id: int


class Status(msgspec.Struct, tag="status", frozen=True):
    """What the agent is doing, as plain values."""

    id: int
    facts: dict[str, Any]


Request = (
    Hello
    | Meet
    | OpenRun
    | JoinRun
    | Register
    | Prepare
    | Begin
    | Staged
    | StageFailed
    | RestoreAsk
    | held_messages.MemoryAsk
    | held_messages.HeldAsk
    | Vote
    | chunk_messages.CacheAsk
    | chunk_messages.ChunksAsk
    | chunk_messages.ChunksUsed
    | chunk_messages.ReadingOver
    | RestoreDone
    | ProtectionAsk
    | Bye
    | StatusAsk
)
Reply = (
    Welcome
    | RunOpened
    | Done
    | Refused
    | Prepared
    | Granted
    | PartWanted
    | Skipped
    | RestoreOffer
    | held_messages.MemorySource
    | held_messages.HeldBytes
    | chunk_messages.Cache
    | chunk_messages.ChunksToRead
    | chunk_messages.NodeRead
    | Verdict
    | Status
    | Settled
    | Durable
    | LeftOut
    | SaveFailed
    | Superseded
    | Protected
    | Note
)

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
M = TypeVar("M")


def encode(message: msgspec.Struct) -> bytes:
    """Return the bytes of a message."""
    data = _encoder.encode(message)
    if isinstance(message, Hello | StatusAsk):
        return greet(greeting.HELLO if isinstance(message, Hello) else greeting.STATUS).line() + data
    return data


def greet(word: str) -> Greeting:
    """Return who we are."""
    return Greeting(PROTOCOL, __version__, word)


def decode_request(data: bytes) -> Request:
    """Return a trainer's message.

    Raises:
        OtherVersionError: It cannot be read, and is of another version.
        msgspec.DecodeError: It is none.
    """
    return _decode(data, _requests)


def decode_reply(data: bytes) -> Reply:
    """Return an agent's message; errors as for `decode_request`."""
    return _decode(data, _replies)


def _decode(data: bytes, decoder: msgspec.msgpack.Decoder[M]) -> M:
    found, rest = greeting.split(data)
    if found is not None and (found.protocol != PROTOCOL or not rest):
        raise OtherVersionError(found)
    try:
        return decoder.decode(rest)
    except msgspec.DecodeError as exc:
        if found is not None and found.version != __version__:
            raise OtherVersionError(found) from exc
        raise
