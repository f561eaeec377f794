"""What a session hears: the lead's words, and of other nodes that they are lost or back.

Invariants: used from the dispatcher thread only; nothing here waits. What makes no sense from where it came changes nothing. Where this
node and its lead have lost each other, both end by themselves what was in flight between them, and tell each other again once they are
back: so nothing waits for news that was lost on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from safehold.agent import messages as m
from safehold.agent import places
from safehold.agent import words as w
from safehold.agent.node_save import Peer
from safehold.errors import CheckpointError, ConfigurationError, RankLostError, SkippedError
from safehold.events import EventStream
from safehold.policy import commit as protocol
from safehold.types import CommitId

if TYPE_CHECKING:
    from safehold.agent.session import Session


class Hearing:
    """See the module.

    Args:
        here: The session.
        on_opened: Told of an incarnation that a lead elsewhere has opened: (session, the committed steps).
        settle_old: Has the job before settle what it has in flight here: (session, then, seconds).
    """

    def __init__(
        self,
        here: Session,
        *,
        on_opened: Callable[[Session, list[int]], None],
        settle_old: Callable[[Session, Callable[[], None], float], None],
        events: EventStream,
    ) -> None:
        self._here, self._on_opened, self._settle_old, self._events = here, on_opened, settle_old, events
        self._joining: list[tuple[Peer, m.JoinRun]] = []
        self._given_up: list[tuple[int, int]] = []

    def join(self, peer: Peer, message: m.JoinRun) -> None:
        """A rank came with the incarnation that rank 0 opened; with a lead elsewhere, its word is waited for."""
        if self._here.incarnation not in (0, message.incarnation):
            text = f"this session is incarnation {self._here.incarnation}, not {message.incarnation}"
            raise ConfigurationError(text, rank=peer.rank)
        if self._here.follower is None:
            self._here.opened(message.run_id, message.incarnation, None)
        elif self._here.saves is None:  # the lead's word is on its way
            if self._here.follower.lost is not None:
                raise self._here.follower.lost_error()
            self._joining.append((peer, message))
            return
        peer.reply(m.Done(message.id))

    # -- the lead's word -------------------------------------------------------------------------------------------------

    def hear(self, word: w.Word) -> None:
        """Take a word of the lead.

        Raises:
            msgspec.DecodeError: It is none.
        """
        match word:
            case w.Committed() if word.incarnation == self._here.incarnation:
                if not word.in_memory:
                    self._here.guard.committed()
                self._here.committed(word.step, word.attempt, in_memory=word.in_memory)
            case w.HoldManifest():
                self._here.memory.hold_manifest(word)
            case w.MakeParity():
                self._here.memory.make_parity(word)
            case w.Abandoned() if word.incarnation == self._here.incarnation:
                self._here.abandoned(word)
            case w.Committed() | w.Abandoned():
                pass  # of an incarnation that is over
            case w.Opened():
                self._opened_elsewhere(word)
            case w.SettleOld():
                self._settle(word)
            case w.SeeFile():
                here = self._here
                process = here.copier if word.is_remote else here.flusher
                places.look(process, word, here.node, here.config, lambda saw: here.send(here.lead_node, saw))
            case w.Placed() if word.again and self._here.saves is not None:
                pass  # it has come, or the run was opened before
            case w.Placed():
                self._here.placed(local_flash=word.local_flash)
            case w.Protect() if word.incarnation == self._here.incarnation:
                self._here.guard.protect(word)
            case w.ProtectionOver():
                self._here.guard.over(word)
                for peer in self._here.peers.values():
                    peer.reply(m.Protected(word.step, word.done))
            case w.Protect():
                pass
            case w.PartWanted():
                self._here.up.part(word, self._here.parts.get(word.rank, word.digest))
            case w.LeavesSettled():
                self._tell_ranks(m.Settled(word.settlement))
            case w.Announce():
                self._here.node_control.announce(word.step)
                if self._here.follower is not None:
                    self._here.follower.announced(word.step)
            case w.DropAnnounced():
                if self._here.saves is not None:
                    self._here.saves.drop_announced(dropped())
            case w.TellAgain():
                self._tell_again()
            case w.PassOn():
                self._here.passing.dealt(word)
            case w.ToRank():
                self._to_rank(word)
            case w.Copying() | w.Copy() | w.StopCopying():
                if self._here.copying is not None:
                    self._here.copying.hear(word)
            case w.Replicated() if word.incarnation == self._here.incarnation:
                self._tell_ranks(m.Durable(word.step, word.attempt, "remote", word.figures))
            case w.LeftOut() if word.incarnation == self._here.incarnation:
                self._tell_ranks(m.LeftOut(word.step, word.attempt, word.reason))
            case w.Replicated() | w.LeftOut():
                pass  # of an incarnation that is over
            case w.ToAll():
                self._here.tell_all(word.text)
            case _:
                raise msgspec.ValidationError(f"{type(word).__name__} is no word of a lead")

    def _settle(self, word: w.SettleOld) -> None:
        here = self._here
        settled = lambda: here.send(here.lead_node, w.SettledHere(word.number, here.memory.told()))  # noqa: E731
        ready = lambda: places.when_ready(here.flusher, here.config, settled)  # noqa: E731 - it is needed next
        self._settle_old(here, ready, word.deadline_s)

    def _tell_ranks(self, message: m.Settled | m.Durable | m.LeftOut) -> None:
        for peer in list(self._here.peers.values()):
            peer.reply(message)

    def _opened_elsewhere(self, word: w.Opened) -> None:
        if self._here.ended_by or word.incarnation <= self._here.incarnation:
            return
        self._here.opened(word.run_id, word.incarnation, word.steps, word.memory)
        self._on_opened(self._here, word.steps)
        joining, self._joining = self._joining, []
        for peer, message in joining:
            if message.incarnation == word.incarnation:
                peer.reply(m.Done(message.id))
            else:
                text = f"the lead has opened incarnation {word.incarnation}, not {message.incarnation}"
                peer.refuse(message.id, ConfigurationError(text, rank=peer.rank))

    def _to_rank(self, word: w.ToRank) -> None:
        assert self._here.follower is not None
        for peer, reply in self._here.follower.answered(word):
            if isinstance(reply, m.RestoreOffer):
                self._here.passing.documents.offered(reply)
            self._answer(peer, reply)

    def _answer(self, peer: Peer, reply: Any) -> None:
        if isinstance(reply, m.RestoreOffer) and reply.step is not None:
            held = self._here.memory.here(CommitId(reply.step, reply.incarnation, reply.attempt))
            memory = sorted(found.rank for found in held)
            verified = sorted(found.rank for found in held if found.verified)
            reply = msgspec.structs.replace(reply, memory=memory, verified=verified)
        peer.reply(reply)

    def placed(self, *, local_flash: bool) -> None:
        """It is known whether checkpoints are on disks of the nodes' own, which redundancy is for."""
        self._here.guard.placed(local_flash=local_flash)
        if self._here.head is not None:
            self._here.head.protector.placed(local_flash=local_flash)

    def tell_lead(self, report: w.Report) -> None:
        """Tell the lead, which may be on this node."""
        here = self._here
        if here.head is not None:
            here.head.report(here.node, report)
        else:
            here.send(here.lead_node, report)

    # -- other nodes -----------------------------------------------------------------------------------------------------

    def heard(self, node: int, message: Any) -> None:
        """Another node told something.

        Raises:
            msgspec.DecodeError: It makes no sense from there.
        """
        if isinstance(message, w.Chunks | w.DocumentsTold):
            self._here.passing.heard(node, message)
        elif isinstance(message, w.CopyNeeds):
            self._here.memory.ward_needs(node, message.size_bytes)
        elif self._here.head is not None and isinstance(message, w.Report):
            self._here.head.report(node, message)
        elif self._here.follower is not None and node == self._here.lead_node:
            if isinstance(message, w.Came):
                self._lead_lost(RankLostError("another one came in its place", node=self._here.world.node_names[node]))
                self._here.follower.lead_back()
            else:
                self.hear(message)
        else:
            raise msgspec.ValidationError(f"{type(message).__name__} is not for this node")

    def tell_others_came(self) -> None:
        """Tell that this agent came in the place of another: what that one had in flight is lost, and who waits for it hears of it."""
        others = range(len(self._here.world.node_names)) if self._here.head is not None else [self._here.lead_node]
        for node in others:
            if node != self._here.node:
                self._here.send(node, w.Came())

    def node_lost(self, node: int, why: CheckpointError) -> None:
        """Another node is dead or cannot be reached."""
        self._events.emit("node_lost", node=self._here.world.node_names[node], error=str(why))
        self._here.passing.node_lost(node)
        self._tell_losing(node, why)
        if self._here.head is not None:
            self._here.head.node_lost(node)
        elif node == self._here.lead_node:
            self._lead_lost(why)

    def _tell_losing(self, node: int, why: CheckpointError) -> None:
        """Tell the ranks, which may be in the middle of a start and wait for each other, not for their agents."""
        name = self._here.world.node_names[node]
        text = f"node {name} was lost while the run was being opened: {why.message}"
        error = RankLostError(text, node=name, hint="see whether that node and its agent live, and start the job again")
        for peer in list(self._here.peers.values()):
            peer.reply(m.NodeLost(error.to_wire()))

    def _lead_lost(self, why: CheckpointError) -> None:
        """Nobody decides any more about what is in flight here."""
        assert self._here.follower is not None
        self._here.guard.stop()
        self._here.follower.lead_lost(why)
        if self._here.copying is not None:
            self._here.copying.stop()
        error = self._here.follower.lost_error()
        joining, self._joining = self._joining, []
        for peer, message in joining:
            peer.refuse(message.id, error)
        for peer, begin in self._here.saves.take_held() if self._here.saves is not None else ():
            peer.refuse(begin.id, error)
        self.give_up()

    def give_up(self) -> None:
        """While the lead is lost: what is in flight here is given up, and may be committed all the same."""
        here = self._here
        if here.follower is None or here.follower.lost is None or here.saves is None:
            return
        error = here.follower.lost_error()
        for step, attempt in here.saves.open_saves():
            self._given_up.append((step, attempt))
            wire = {**error.to_wire(), "step": step}
            here.abandoned(w.Abandoned(here.incarnation, step, attempt, wire, in_doubt=True))

    def node_back(self, node: int) -> None:
        """It can be reached again."""
        if self._here.head is not None:
            self._here.head.node_back(node)
        elif self._here.follower is not None and node == self._here.lead_node:
            self._here.follower.lead_back()
            given_up, self._given_up = self._given_up, []
            for step, attempt in given_up:
                name = self._here.world.node_names[self._here.node]
                error = RankLostError("the node had lost its lead, and gave the save up", step=step, node=name)
                event = protocol.NodeFailed(step=step, attempt=attempt, node=self._here.node, error=error)
                self._here.up.event(event, self._here.incarnation)
            self._tell_what_is_open()  # what was said meanwhile was dropped

    def _tell_again(self) -> None:
        """The lead had lost this node: whatever was on its way to either is told once more, or ends."""
        follower = self._here.follower
        assert follower is not None
        lost = follower.lost
        name = self._here.world.node_names[self._here.node]
        follower.lead_lost(lost or RankLostError("it had lost this node for a while", node=name))
        if lost is None:  # else it can speak to us, and we cannot answer yet
            follower.lead_back()
            self._tell_what_is_open()

    def _tell_what_is_open(self) -> None:
        here = self._here
        for rank in here.local_ranks:
            event = protocol.RankBack(rank=rank) if rank in here.peers else protocol.RankGone(rank=rank)
            here.up.event(event, here.incarnation)
        if here.saves is not None:
            here.saves.tell_again()
        if len(here.undeclared) == len(here.local_ranks):
            here.up.undeclared(here.undeclared)


def dropped() -> CheckpointError:
    """What the saves of an announcement fail with that not all ranks followed."""
    text = "not all ranks could follow the announcement of this save by time"
    return SkippedError(text, hint="it is announced again, further ahead")
