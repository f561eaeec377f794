"""What the agents of one job say to each other: reports of the nodes to the lead, and the lead's words to the nodes.

Invariants: every message is one tagged msgpack map. What concerns saves names its incarnation, so that news of an older one is known as
such. Events of the commit protocol travel as they are (`EventTold`). Between two agents messages arrive in order and once, or the other
is told to be lost; that is the network's business. A lead alone on its node says and hears all of this without a network.
"""

from __future__ import annotations

from typing import Any

import msgspec

from safehold.agent.held_words import HeldHere as HeldHere
from safehold.agent.held_words import HoldManifest as HoldManifest
from safehold.agent.held_words import HoldsManifest as HoldsManifest
from safehold.agent.held_words import MakeParity as MakeParity
from safehold.agent.held_words import MemoryBegins as MemoryBegins
from safehold.agent.held_words import ShareKept as ShareKept
from safehold.errors import CheckpointError, from_wire
from safehold.policy import commit as protocol
from safehold.policy.memory_belief import HeldTold
from safehold.types import CommitId

EVENTS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        protocol.Begun,
        protocol.Staged,
        protocol.RankFailed,
        protocol.NodeRecorded,
        protocol.NodeFailed,
        protocol.RankGone,
        protocol.RankBack,
    )
}
PART_CHUNK_BYTES = 4 << 20

# ---- reports: a node to the lead ----


class EventTold(msgspec.Struct, tag="event", frozen=True):
    """An event of the commit protocol: the name of its class, and its fields."""

    incarnation: int
    kind: str
    fields: msgspec.Raw


class Compared(msgspec.Struct, tag="compared", frozen=True):
    """CRC32 of the ranges that a node's ranks agree about in a save, by rank (the lowest that has the range) and key.

    Comes before the node's `NodeRecorded`.
    """

    incarnation: int
    step: int
    attempt: int
    crcs: dict[int, dict[str, int]]


class PartTold(msgspec.Struct, tag="part", frozen=True):
    """A piece of a rank's encoded part, which the lead asked for; `total` 0: it is not here any more."""

    rank: int
    digest: str
    offset: int
    total: int
    data: bytes


class RanksAsk(msgspec.Struct, tag="ranks_ask", frozen=True):
    """A request of trainers that the lead answers, to the first of them: an encoded `RestoreAsk` or `Vote`."""

    ranks: list[int]
    request: bytes


class RankBegins(msgspec.Struct, tag="rank_begins", frozen=True):
    """A rank has asked to save a step; told where saves are announced by time."""

    step: int
    rank: int


class Undeclared(msgspec.Struct, tag="undeclared", frozen=True):
    """Which undeclared leaves a node's ranks hold: [ranks that hold alike, leaves as in `messages.Register`]."""

    groups: list[tuple[list[int], list[tuple[str, str, list[int], str]]]]


class StepsSeen(msgspec.Struct, tag="steps", frozen=True):
    """The last step that each rank of a node is known to have reached."""

    steps: dict[int, int]


class SettledHere(msgspec.Struct, tag="settled_here", frozen=True):
    """The job before has finished, or given up, what it had in flight on this node; answers `SettleOld`."""

    number: int
    held: list[HeldTold] = []


class Saw(msgspec.Struct, tag="saw", frozen=True):
    """Whether this node sees the lead's file in the run directory; answers `SeeFile`."""

    number: int
    sees: bool
    error: dict[str, Any] | None = None


class Copied(msgspec.Struct, tag="copied", frozen=True):
    """A node has copied its share of a replication, or failed to; answers `Copy`."""

    key: str
    sent_bytes: int = 0
    kept_bytes: int = 0
    error: dict[str, Any] | None = None


class Wants(msgspec.Struct, tag="wants", frozen=True):
    """The chunks that the ranks of a node want in a round of a restore (`policy.passing_on`); comes before their last `planned`."""

    round: int
    num_chunks: int
    chunks: bytes


class Came(msgspec.Struct, tag="came", frozen=True):
    """Another agent came in the place of one that died: what that one had in flight is lost."""


class ProtectedHere(msgspec.Struct, tag="protected_here", frozen=True):
    """A node has done what `Protect` asked for, or could not; `node` is the one of the checkpoint."""

    number: int
    node: int
    num_bytes: int
    seconds: float
    error: dict[str, Any] | None = None


# ---- words: the lead to a node ----


class SettleOld(msgspec.Struct, tag="settle_old", frozen=True):
    """A new start of the job takes over: finish what the one before has in flight, within `deadline_s`."""

    number: int
    deadline_s: float


class SeeFile(msgspec.Struct, tag="see_file", frozen=True):
    """The lead has put a file of this name and content into the run directory: this node shall say whether it sees it.

    `is_remote`: into the second place, and this node shall try to write there, too.
    """

    number: int
    name: str
    content: bytes
    is_remote: bool = False


class Placed(msgspec.Struct, tag="placed", frozen=True):
    """How the run directory is to be used: as one directory, or as the union of the nodes' own disks.

    `again`: for who may have missed it.
    """

    local_flash: bool
    again: bool = False


class Opened(msgspec.Struct, tag="opened", frozen=True):
    """The run is open: its incarnation, the steps that are committed, and the checkpoint in memory that it believes."""

    run_id: str
    incarnation: int
    steps: list[int]
    memory: CommitId | None = None


class Committed(msgspec.Struct, tag="committed", frozen=True):
    """A save is durable; with `in_memory` in the memory of the nodes."""

    incarnation: int
    step: int
    attempt: int
    in_memory: bool = False


class Abandoned(msgspec.Struct, tag="abandoned", frozen=True):
    """A save is given up; `again`: told once more, to a node that spoke of it afterwards."""

    incarnation: int
    step: int
    attempt: int
    error: dict[str, Any]
    in_doubt: bool = False
    again: bool = False


class Protect(msgspec.Struct, tag="protect", frozen=True):
    """Make a node's share of the redundancy of a checkpoint, or with `rebuild` give its files back, on the node that is told.

    Attributes:
        number: Of the work, for the answer and for `ProtectionOver`.
        commit: Step, incarnation and attempt.
        node: Of the checkpoint.
        redundancy: Its set, as `redundancy_calls.set_to_wire`; with `rebuild` it is found beside the checkpoint.
        at: Where the files of the checkpoint's nodes are that are needed: their names.
        deadline_s: For the work.
    """

    number: int
    incarnation: int
    commit: list[int]
    node: int
    rebuild: bool
    redundancy: dict[str, Any]
    at: dict[int, str]
    deadline_s: float


class ProtectionOver(msgspec.Struct, tag="protection_over", frozen=True):
    """The work of this number is over, done or not; what is still at it gives up. `idle`: no other waits."""

    number: int
    incarnation: int
    step: int
    done: bool
    idle: bool


class PartWanted(msgspec.Struct, tag="part_wanted", frozen=True):
    """The lead has not got a part that a rank began a save with."""

    rank: int
    digest: str


class LeavesSettled(msgspec.Struct, tag="leaves_settled", frozen=True):
    """Who holds the undeclared leaves: `policy.settlement`'s wire form."""

    settlement: dict[str, Any]


class Announce(msgspec.Struct, tag="announce", frozen=True):
    """All ranks are asked to save at this step."""

    step: int


class DropAnnounced(msgspec.Struct, tag="drop_announced", frozen=True):
    """Not all ranks followed the announcement: give up the saves of those that did."""


class TellAgain(msgspec.Struct, tag="tell_again", frozen=True):
    """The node was lost to the lead, and is back: what either has told the other meanwhile may be lost. Tell what is in flight."""


class Copying(msgspec.Struct, tag="copying", frozen=True):
    """A replication is under way, or none is any more: nobody leaves while one is."""

    active: bool


class Copy(msgspec.Struct, tag="copy", frozen=True):
    """Copy the files of these nodes of a checkpoint to the second place.

    Attributes:
        key: Names the replication, for `Copied` and `StopCopying`.
        commit: Step, incarnation, attempt.
        claim: The encoded record of the claim that the lead has taken.
        nodes: Nodes of the checkpoint, as its manifest numbers them.
    """

    key: str
    commit: list[int]
    claim: bytes
    nodes: list[int]


class StopCopying(msgspec.Struct, tag="stop_copying", frozen=True):
    """Give up what is copied under this key; `Copied` follows all the same."""

    key: str


class Replicated(msgspec.Struct, tag="replicated", frozen=True):
    """A save is complete at the second place, too."""

    incarnation: int
    step: int
    attempt: int
    figures: dict[str, float]


class LeftOut(msgspec.Struct, tag="left_out", frozen=True):
    """A save will not be replicated; `reason` says why."""

    incarnation: int
    step: int
    attempt: int
    reason: str


class PassOn(msgspec.Struct, tag="pass_on", frozen=True):
    """Who reads what for whom, as far as it concerns the node: [members as they are dealt chunks, encoded set of chunks]."""

    round: int
    num_chunks: int
    groups: list[tuple[list[int], bytes]]


class ToRank(msgspec.Struct, tag="to_rank", frozen=True):
    """An answer for a trainer: an encoded reply."""

    rank: int
    reply: bytes


class ToAll(msgspec.Struct, tag="to_all", frozen=True):
    """A sentence that all trainers of the node shall see as a warning."""

    text: str


# ---- between any two nodes ----


class Chunks(msgspec.Struct, tag="chunks", frozen=True):
    """What a node tells a neighbour of the chunks of a restore: which it has to give away ([number, size]), cannot give, has taken."""

    round: int
    here: list[tuple[int, int]] = []
    failed: list[int] = []
    taken: list[int] = []


class DocumentsTold(msgspec.Struct, tag="documents_told", frozen=True):
    """A node tells those below it in a restore that it has the documents with this digest, or will not have them."""

    digest: str
    here: bool


class CopyNeeds(msgspec.Struct, tag="copy_needs", frozen=True):
    """To a partner: how many bytes a copy of this node's share takes; with parity: its data in the stripes of the set."""

    size_bytes: int


Report = (
    EventTold
    | Compared
    | PartTold
    | RanksAsk
    | RankBegins
    | Undeclared
    | StepsSeen
    | SettledHere
    | Saw
    | Copied
    | Wants
    | MemoryBegins
    | HeldHere
    | ShareKept
    | HoldsManifest
    | Came
    | ProtectedHere
)
Word = (
    SettleOld
    | SeeFile
    | Placed
    | Opened
    | Committed
    | Abandoned
    | MakeParity
    | HoldManifest
    | Protect
    | ProtectionOver
    | PartWanted
    | LeavesSettled
    | Announce
    | DropAnnounced
    | TellAgain
    | Copying
    | Copy
    | StopCopying
    | Replicated
    | LeftOut
    | PassOn
    | ToRank
    | ToAll
)


def _to_wire(value: Any) -> Any:
    if isinstance(value, CheckpointError):
        return value.to_wire()
    raise TypeError(f"{type(value).__name__} cannot be told to another agent")


def _from_wire(kind: type, value: Any) -> Any:
    if kind is CheckpointError and isinstance(value, dict):
        return from_wire(value)
    raise ValueError(f"no {kind.__name__} can be made of what another agent told")


_encoder = msgspec.msgpack.Encoder(enc_hook=_to_wire)
Told = Report | Word | Chunks | CopyNeeds | DocumentsTold
_messages: msgspec.msgpack.Decoder[Told] = msgspec.msgpack.Decoder(Told)


def encode(message: msgspec.Struct) -> bytes:
    """Return the bytes of a message."""
    return _encoder.encode(message)


def decode(data: bytes) -> Told:
    """Return a message of another agent.

    Raises:
        msgspec.DecodeError: It is none.
    """
    return _messages.decode(data)


def event_told(event: Any, incarnation: int) -> EventTold:
    """Wrap an event of the commit protocol."""
    return EventTold(incarnation, type(event).__name__, msgspec.Raw(_encoder.encode(event)))


def event_of(told: EventTold) -> Any:
    """Return the event.

    Raises:
        msgspec.DecodeError: There is no such event, or its fields are not what they must be.
    """
    kind = EVENTS.get(told.kind)
    if kind is None:
        raise msgspec.ValidationError(f"no event {told.kind!r} is told between agents")
    return msgspec.msgpack.decode(told.fields, type=kind, dec_hook=_from_wire)
