"""What must hold in a world after every event, and at its end.

| invariant | looked at |
| --- | --- |
| a manifest is written once: never two contents for one attempt | when written (`storage`) |
| a believed checkpoint has all its packs, durable, with exactly what its ranks had staged | when belief changes |
| what a rank was told to be durable is believed at that moment, whoever told it | when told |
| what was told to be durable stays, unless retention, a later attempt, or a rollback took its place | when belief changes |
| every save has a verdict by its deadline, on every rank | always |
| what memory offers to a restore is exactly the checkpoint | when offered |
| ranks restore the same step, never one older than what was told to be durable | when restored, when offered |
| arenas are free once no save holds them, and what a restore was lent; sessions' memory is bounded | at the end, and now and then |
| documents that a rank is handed are those of storage | when handed |
| nobody speaks malformed, no handler fails | always |
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Any

from safehold.agent import messages as m
from safehold.agent.flusher_client import ANSWER_SLACK_S
from safehold.errors import from_wire
from safehold.format import document, paths, records
from safehold.format.records import Incarnation, Manifest
from safehold.pipeline.bundle import unpack
from safehold.policy import belief
from safehold.policy.belief import AttemptView, Listing
from safehold.testing.world.footprint import footprint
from safehold.testing.world.memory import Block
from safehold.testing.world.storage import Pack
from safehold.testing.world.trainer import Handle, Trainer, content_of
from safehold.types import CommitId

if TYPE_CHECKING:
    from safehold.testing.world.world import World

FOOTPRINT_EVERY = 50000
SAVES_REMEMBERED = 4096
REPLACED_KEPT = 4096
ROLLED_BACK = "restored step "


class Checks:
    """See the module.

    Attributes:
        told: Commits that any rank was told to be durable and that nothing has taken the place of, and when.
        verdicts: How many saves of ranks became what.
        whole: Saves that every rank was told to be durable: when the first rank began, and when the last was told.
    """

    def __init__(self, world: World) -> None:
        self._world, self._timeline = world, world.timeline
        self.told: dict[CommitId, float] = {}
        self.verdicts: dict[str, int] = {"durable": 0, "failed": 0, "skipped": 0}
        self._replaced: dict[CommitId, None] = {}
        self._version = -1
        self._listing = Listing()
        self._incarnations: dict[int, tuple[bytes, Incarnation]] = {}
        self.believed: list[CommitId] = []
        self._whole: set[CommitId] = set()
        self._durable: dict[tuple[int, CommitId], set[int]] = {}
        self.whole: list[tuple[float, float]] = []
        self._began: dict[tuple[int, CommitId], float] = {}
        self._deadlines: list[tuple[float, int, Trainer, Handle]] = []
        self._count = 0
        self._handed: Block | None = None
        config = world.setting.wire
        flush_s, slack_s = config["flush_timeout_s"], 2 * ANSWER_SLACK_S
        one_s = config["begin_timeout_s"] + config["stage_timeout_s"] + 3 * flush_s + slack_s
        self.limit_s = 2 * one_s + config["peer_timeout_s"] + config["start_timeout_s"] + 5.0
        self.largest = 0

    # -- what happens ------------------------------------------------------------------------------------------------------

    def after_event(self) -> None:
        """Look at what may have changed."""
        if self._version != self._world.storage.version:
            self._look()
        now = self._timeline.now
        while self._deadlines and self._deadlines[0][0] <= now:
            self._expire(*heapq.heappop(self._deadlines)[2:])
        if self._timeline.num_events % FOOTPRINT_EVERY == 0:
            self.check_memory()

    def begun(self, trainer: Trainer, handle: Handle) -> None:
        """A rank saves."""
        self._count += 1
        heapq.heappush(self._deadlines, (handle.begun_at + self.limit_s, self._count, trainer, handle))
        key = (trainer.job.number, CommitId(handle.step, handle.incarnation, handle.attempt))
        self._began.setdefault(key, self._timeline.now)

    def staged(self, trainer: Trainer, handle: Handle) -> None:
        """A rank has staged."""

    def verdict(self, trainer: Trainer, handle: Handle) -> None:
        """A rank knows what became of a save."""
        commit = CommitId(handle.step, handle.incarnation, handle.attempt)
        self.verdicts[handle.state] += 1
        if handle.state != "durable":
            return
        if self._version != self._world.storage.version:
            self._look()
        if commit not in self.told and commit not in self._replaced:
            self._timeline.note("durable", f"{commit} told to {trainer.process.name}")
            self.told[commit] = self._timeline.now
            if not self._stands(commit):
                raise self._timeline.violation(f"{commit} was told to be durable, and is not believed")
        ranks = self._durable.setdefault((trainer.job.number, commit), set())
        ranks.add(trainer.rank)
        if len(ranks) == self._world.setting.world_size:
            self.whole.append((self._began.pop((trainer.job.number, commit)), self._timeline.now))
            del self._durable[trainer.job.number, commit]

    def heard(self, trainer: Trainer, reply: Any) -> None:
        """A rank was told something."""
        wire = getattr(reply, "error", None)
        if wire:
            text = str(wire.get("message", ""))
            if "the agent cannot carry out" in text or "and the agent failed" in text or "planning failed" in text:
                raise self._timeline.violation(f"{trainer.process.name} was told of a fault: {from_wire(wire)}")

    def offered(self, trainer: Trainer, offer: m.RestoreOffer) -> None:
        """A rank is offered a checkpoint."""
        newest = max(
            (commit for commit in self.believed if self.told.get(commit, self._timeline.now) < trainer.asked_at),
            default=None,
        )
        if offer.step is None:
            if newest is not None:
                raise self._timeline.violation(f"nothing was offered, and {newest} was told to be durable")
            return
        commit = CommitId(offer.step, offer.incarnation, offer.attempt)
        if newest is not None and commit < newest and trainer.job.restore_step is None:
            raise self._timeline.violation(f"{commit} was offered, and {newest} was told to be durable before")
        if trainer.line is None:
            return
        for arena in trainer.line.agent.pool.holding(commit):
            found = self._world.shared.arenas[arena.fd].content
            if arena.rank in offer.memory and found != content_of(
                offer.incarnation, offer.step, offer.attempt, arena.rank
            ):
                raise self._timeline.violation(f"memory of rank {arena.rank} is offered as {commit}, and holds {found}")

    def documents(self, offer: m.RestoreOffer, block: Block) -> None:
        """A rank is handed the documents of what it was offered; those of a node once."""
        if block is self._handed or offer.documents is None:
            return
        self._handed = block
        if (len(block.view), document.digest(block.view)) != offer.documents:
            raise self._timeline.violation(f"other documents are handed out than were offered for step {offer.step}")
        for path, data in unpack(block.view).items():
            if self._world.storage.files.get(path, data) != data:  # unless it was deleted meanwhile
                raise self._timeline.violation(f"{path} is handed out, and is not what is on storage")

    def num_whole_since(self, when: float) -> int:
        """Return how many saves that began after `when` every rank was told to be durable."""
        return sum(began >= when for began, _ in self.whole)

    # -- verdicts ------------------------------------------------------------------------------------------------------------

    def _expire(self, trainer: Trainer, handle: Handle) -> None:
        if handle.state != "open" or not trainer.process.alive:
            return
        process = trainer.process
        agent = trainer.line.agent.process if trainer.line is not None else process
        if process.stopped or agent.stopped or trainer.machine.stopped:
            again_s = 10.0
        else:  # it gets back the time in which its node stood still
            again_s = handle.begun_at + self.limit_s + self._stopped_s(trainer) - handle.extra_s - self._timeline.now
        if again_s > 1e-6:
            self._count += 1
            heapq.heappush(self._deadlines, (self._timeline.now + again_s, self._count, trainer, handle))
            return
        raise self._timeline.violation(
            f"{process.name} has no verdict on step {handle.step}, attempt {handle.attempt}, after {self.limit_s:g} s"
        )

    def _stopped_s(self, trainer: Trainer) -> float:
        line = trainer.line
        return trainer.process.stopped_s + (line.agent.process.stopped_s if line is not None else 0.0)

    # -- belief ------------------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        storage = self._world.storage
        self._version = storage.version
        self._listing = listing = self._take()
        self.believed = belief.believed(listing)
        for commit in self.believed:
            if commit not in self._whole:
                self._check_bytes(commit)
                self._whole.add(commit)
        for commit in [commit for commit in self.told if commit not in self.believed]:
            if not self._stands(commit):
                raise self._timeline.violation(f"{commit} was told to be durable, and nothing has taken its place")
            self._replaced[commit] = None
            del self.told[commit]
        self._forget()

    def _take(self) -> Listing:
        storage = self._world.storage
        incarnations: dict[int, Incarnation] = {}
        for entry in storage.entries(paths.INCARNATIONS):
            path = f"{paths.INCARNATIONS}/{entry.name}"
            data = storage.get(path)
            number = paths.parse_incarnation(entry.name)
            if number is not None and isinstance(data, bytes):
                if self._incarnations.get(number, (b"",))[0] != data:
                    self._incarnations[number] = data, records.decode_incarnation(data, path=path)
                incarnations[number] = self._incarnations[number][1]
        attempts: dict[CommitId, AttemptView] = {}
        for above in storage.entries(paths.CHECKPOINTS):
            step = paths.parse_step_dir(above.name)
            for entry in storage.entries(f"{paths.CHECKPOINTS}/{above.name}"):
                found = paths.parse_attempt_dir(entry.name)
                if step is not None and found is not None:
                    commit = CommitId(step, *found)
                    attempts[commit] = self._view(commit)
        return Listing(incarnations=incarnations, attempts=attempts)

    def _view(self, commit: CommitId) -> AttemptView:
        storage, directory = self._world.storage, paths.checkpoint_dir(commit)
        stones = []
        has_manifest = f"{directory}/{paths.MANIFEST}" in storage.files
        for name in storage.names(directory):
            if paths.parse_tombstone(name) is not None:
                data = storage.get(f"{directory}/{name}")
                assert isinstance(data, bytes)
                stones.append(records.decode_tombstone(data, path=name))
        return AttemptView(has_manifest=has_manifest, tombstones=stones)

    def _manifest(self, commit: CommitId) -> Manifest:
        path = f"{paths.checkpoint_dir(commit)}/{paths.MANIFEST}"
        data = self._world.storage.get(path)
        assert isinstance(data, bytes)
        return records.decode_manifest(data, path=path)

    def _check_bytes(self, commit: CommitId) -> None:
        """A checkpoint is believed: its bytes must be there."""
        storage, directory = self._world.storage, paths.checkpoint_dir(commit)
        ranks = set()
        for ref in self._manifest(commit).nodes:
            path = f"{directory}/{paths.node_record(ref.node)}"
            data = storage.files.get(path)
            if not isinstance(data, bytes):
                raise self._timeline.violation(f"{commit} is believed, and {path} is not there")
            for pack in records.decode_node_record(data, path=path).packs:
                found = storage.files.get(f"{directory}/{pack.file}")
                wanted = content_of(commit.incarnation, commit.step, commit.attempt, pack.rank)
                if not isinstance(found, Pack) or not found.durable or found.content != wanted:
                    raise self._timeline.violation(
                        f"{commit} is believed, and the pack of rank {pack.rank} is {found!r}"
                    )
                ranks.add(pack.rank)
        if ranks != set(range(self._world.setting.world_size)):
            raise self._timeline.violation(f"{commit} is believed, and has packs of ranks {sorted(ranks)} only")

    def _stands(self, commit: CommitId) -> bool:
        """Whether a commit is believed, or something has rightly taken its place."""
        if commit in self.believed:
            return True
        if any(other.step == commit.step and other > commit for other in self.believed):
            return True
        for number, record in self._listing.incarnations.items():
            back_to = _rolled_back_to(record)
            if number > commit.incarnation and back_to is not None and back_to < commit.step:
                return True
        return sum(other.step > commit.step for other in self.believed) >= self._world.setting.keep_last

    def _forget(self) -> None:
        """Forget what is so old that nothing more will be checked about it."""
        while len(self._replaced) > REPLACED_KEPT:
            del self._replaced[next(iter(self._replaced))]
        self._whole &= set(self._listing.attempts)

    # -- memory ------------------------------------------------------------------------------------------------------------

    def check_memory(self, *, everywhere: bool = False) -> None:
        """What agents keep is bounded."""
        setting = self._world.setting
        begun = min(self._count // setting.world_size, SAVES_REMEMBERED)
        bound = 600 + 60 * setting.ranks_per_node + 20 * setting.world_size + 4 * begun
        agents = self._world.agents()
        for agent in agents if everywhere else agents[:1] + agents[-1:]:
            found, name = footprint(agent), agent.process.name
            self.largest = max(self.largest, found)
            if found > bound * max(1, agent.num_sessions):
                raise self._timeline.violation(f"{name} keeps {found} things in {agent.num_sessions} sessions")
            if agent.num_idle_sessions > 1:
                raise self._timeline.violation(f"{name} keeps {agent.num_idle_sessions} sessions without ranks")

    def unrest(self) -> str | None:
        """Say what is still under way although no rank makes a step any more; None if all is at rest."""
        job = self._world.job
        assert job is not None
        if any(trainer.handles for trainer in job.trainers):
            return "a save has no verdict"
        for agent in self._world.agents():
            name, busy = agent.process.name, [arena.rank for arena in agent.pool.all_arenas() if arena.busy]
            if busy:
                return f"{name}: the arenas of ranks {busy} are not freed"
            if agent.current is not None and agent.current.num_open:
                return f"{name}: {agent.current.num_open} saves are not over"
            if agent.pool.lent_bytes:
                return f"{name}: {agent.pool.lent_bytes} bytes are lent to a restore that is over"
        return None

    def at_end(self) -> None:
        """The faults have ended, and saves succeed again."""
        self.check_memory(everywhere=True)
        unrest = self.unrest()
        if unrest is not None:
            raise self._timeline.violation(f"{unrest}, although nothing happens any more")
        for agent in self._world.agents():
            if not agent.has_trainers:
                raise self._timeline.violation(f"{agent.process.name} has no trainers, and does not leave")


def _rolled_back_to(record: Incarnation) -> int | None:
    """Return the step that an incarnation went back to, if it did."""
    if not record.reason.startswith(ROLLED_BACK):
        return None
    return int(record.reason.removeprefix(ROLLED_BACK))
