"""Drives whole saves through the real pipeline on any tier: the calls that flusher and lead make, in their order.

    promises = Promises()
    job = Job(tier, promises)
    job.open()
    job.save(10, version=1)
    check(tier, promises)           # what is there is what was promised

`Promises` keeps what was begun and what was acknowledged, so that `check` can say of any survivor what it lacks.
"""

from __future__ import annotations

import copy
import mmap
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

import msgspec
import numpy as np

from safehold.clock import SystemClock, new_token
from safehold.config import Config
from safehold.errors import CheckpointError, StorageFullError
from safehold.events import EventStream
from safehold.format import objects, paths
from safehold.format import plan as plans
from safehold.pipeline import maintenance, sweep
from safehold.pipeline.catalog import Catalog, find_restore_candidate
from safehold.pipeline.direct_load import load_tree
from safehold.pipeline.flush import FlushJob, StagedWord, flush_rank
from safehold.pipeline.layout import Planner
from safehold.pipeline.verify import verify
from safehold.policy import belief, settlement
from safehold.policy.coverage import check as check_coverage
from safehold.policy.retention import Keep
from safehold.state.collect import collect
from safehold.state.declare import PerRank
from safehold.testing.crash_model import Survival
from safehold.testing.disk_faults import Op
from safehold.testing.fake_disk import FakeDisk
from safehold.tiers.base import TEMPORARY_PREFIX, Tier
from safehold.tiers.flash import FlashTier
from safehold.types import CommitId

T = TypeVar("T")
Scenario = Callable[[Tier, "Promises"], None]
EVENTS = EventStream("flusher")


def state_of(version: int, rank: int = 0) -> dict[str, Any]:
    """A small state that differs in every leaf between versions."""
    rng = np.random.default_rng(version)
    return {
        "model": {"w": rng.normal(size=(40, 30)), "b": rng.integers(-9, 9, size=(7,), dtype=np.int16)},
        "empty": np.zeros((0, 4), np.float32),
        "scalar": np.array(version, np.int64),
        "step": version,
        "rng": PerRank(f"rank {rank} at {version}", policy="first"),
    }


def loaded_state(version: int) -> dict[str, Any]:
    """What a load without a template gives of it."""
    return state_of(version) | {"rng": f"rank 0 at {version}"}


def equal(found: Any, wanted: Any) -> bool:
    """Whether two states have the same structure, dtypes and bytes."""
    if isinstance(wanted, dict):
        return (
            isinstance(found, dict)
            and found.keys() == wanted.keys()
            and all(equal(found[k], wanted[k]) for k in wanted)
        )
    if isinstance(wanted, list | tuple):
        return type(found) is type(wanted) and len(found) == len(wanted) and all(map(equal, found, wanted))
    if isinstance(wanted, np.ndarray):
        same = isinstance(found, np.ndarray) and found.dtype == wanted.dtype and found.shape == wanted.shape
        return same and found.tobytes() == wanted.tobytes()
    return type(found) is type(wanted) and found == wanted


@dataclass(frozen=True)
class Share:
    """What one rank gives to a save."""

    packs: tuple[tuple[int, int], ...]
    arena: memoryview
    part: bytes
    digest: str
    objects: dict[str, bytes]


@lru_cache(maxsize=64)
def shares_of(version: int, world_size: int = 2, pack_size_bytes: int = 1 << 40) -> tuple[Share, ...]:
    """Plan and stage the state of all ranks."""
    planners = [
        Planner(rank, world_size, pack_size_bytes=pack_size_bytes, split_bytes=4096) for rank in range(world_size)
    ]
    leaves = [
        collect(state_of(version, rank), rank=rank, world_size=world_size, random_states=False)
        for rank in range(world_size)
    ]
    settled = settlement.settle(
        {rank: planner.undeclared(planner.layout(leaves[rank])) for rank, planner in enumerate(planners)}
    )
    out = []
    for rank, planner in enumerate(planners):
        planner.settlement = settled
        layout = planner.layout(leaves[rank])
        arena = memoryview(mmap.mmap(-1, max(4096, layout.pack_bytes)))
        for offset, data in layout.headers:
            arena[offset : offset + len(data)] = data
        for item in layout.items:
            arena[item.offset : item.offset + item.nbytes] = np.ascontiguousarray(item.view).tobytes()
        encoded = {leaf.spec.name: objects.encode(leaf.value, name=leaf.spec.name) for leaf in leaves[rank].objects}
        out.append(Share(layout.packs, arena, layout.part, layout.digest, encoded))
    return tuple(out)


@dataclass
class Promises:
    """What was begun and what was acknowledged.

    Attributes:
        begun: Commits whose publishing was begun, and the version of their state: they may be visible.
        kept: Of those, the acknowledged ones that must be there until further notice.
        gone: Those that must not be believed any more.
    """

    begun: dict[CommitId, int] = field(default_factory=dict)
    kept: set[CommitId] = field(default_factory=set)
    gone: set[CommitId] = field(default_factory=set)


class Job:
    """One incarnation of a run: what its flusher is asked for, in order."""

    def __init__(
        self,
        tier: Tier,
        promises: Promises,
        *,
        keep: Keep | None = None,
        grace_s: float = 0.0,
        world_size: int = 2,
        pack_size_bytes: int = 1 << 40,
        token: str = "",
    ) -> None:
        self.tier, self.promises, self.keep = tier, promises, keep or Keep(last=3)
        self.config = Config(delete_grace_s=grace_s)
        self.world_size, self.pack_size_bytes, self.token = world_size, pack_size_bytes, token or new_token()
        self.incarnation = 0
        self.steps: list[int] = []
        self.given_up: set[CommitId] = set()
        self.plan: tuple[str, bytes] | None = None
        self._run_id = ""

    def node_of(self, rank: int) -> int:
        """The node that a rank is on."""
        return 0

    def disk_of(self, node: int) -> Tier:
        """Where a node keeps what it writes."""
        return self.tier

    # The phases of a save; variants with a bug replace one of them.

    def open(self, *, up_to: CommitId | None = None, exclude: tuple[CommitId, ...] = ()) -> None:
        """Open the next incarnation."""
        rejected = {c for c in self.promises.begun if c in exclude or (up_to is not None and c.step > up_to.step)}
        if up_to is not None:
            rejected |= {c for c in self.promises.begun if c.step == up_to.step and c != up_to}
        self.promises.kept -= rejected
        arguments = {
            "token": self.token,
            "up_to": None if up_to is None else wire(up_to),
            "exclude": [wire(commit) for commit in exclude],
            "reason": "test",
        }
        opened = maintenance.open_run(self.tier, self.config, arguments, EVENTS)
        self.incarnation, self.steps, self._run_id = opened["incarnation"], opened["steps"], opened["run_id"]
        self.promises.gone |= rejected

    def save(self, step: int, version: int, *, attempt: int = 0) -> CommitId:
        """Write a checkpoint, commit it, and apply retention."""
        commit = CommitId(step, self.incarnation, attempt)
        shares = shares_of(version, self.world_size, self.pack_size_bytes)
        packs = {rank: self.flush(commit, rank, share) for rank, share in enumerate(shares)}
        digest, size = self.store_plan(shares)
        nodes = []
        for node in sorted({self.node_of(rank) for rank in packs}):
            ranks = [rank for rank in packs if self.node_of(rank) == node]
            mine = {rank: shares[rank] for rank in ranks}
            written = self.record(commit, mine, [record for rank in ranks for record in packs[rank]], node)
            nodes.append({"node": node, **written})
        self.promises.begun[commit] = version
        self.publish(commit, digest, size, nodes)
        self.promises.kept = {kept for kept in self.promises.kept if kept.step != step} | {commit}
        return commit

    def flush(self, commit: CommitId, rank: int, share: Share) -> list[dict[str, Any]]:
        job = FlushJob(
            commit=commit,
            node=self.node_of(rank),
            rank=rank,
            packs=share.packs,
            compare=(),
            staged_total=len(share.arena),
            block_bytes=1 << 20,
            threads=1,
            rate_bytes_s=0,
            deadline_s=60.0,
        )
        word = StagedWord(lambda: len(share.arena), lambda *_: None)
        room = lambda exc: self.make_room(commit, share, exc)  # noqa: E731
        flushed = flush_rank(self.disk_of(job.node), job, share.arena, word, threading.Event(), make_room=room)
        return [msgspec.to_builtins(record) for record in flushed.packs]

    def make_room(self, commit: CommitId, share: Share, exc: StorageFullError) -> bool:
        arguments = {
            "commit": wire(commit),
            "packs": share.packs,
            "num_ranks": self.world_size,
            "keep": maintenance.keep_to_wire(self.keep),
            "incarnation": self.incarnation,
            "quota": "[EDQUOT]" in exc.message,
            "given_up": [wire(commit) for commit in self.given_up],
        }
        return maintenance.make_room(self.tier, self.config, arguments, EVENTS)

    def store_plan(self, shares: tuple[Share, ...]) -> tuple[str, int]:
        plan = plans.merge_parts([share.part for share in shares], [self.node_of(rank) for rank in range(len(shares))])
        check_coverage(plan)
        data = plans.encode_plan(plan)
        arguments = {"digest": plans.digest(data), "plan": data}
        maintenance.store_plan(self.tier, self.config, arguments, EVENTS)
        return plans.digest(data), len(data)

    def record(
        self, commit: CommitId, shares: dict[int, Share], packs: list[dict[str, Any]], node: int = 0
    ) -> dict[str, Any]:
        arguments = {
            "commit": wire(commit),
            "run_id": self._run_id,
            "node": node,
            "node_name": f"host{node}",
            "packs": packs,
            "objects": {rank: share.objects for rank, share in shares.items()},
            "part_digests": {rank: share.digest for rank, share in shares.items()},
            "timings": {},
        }
        return maintenance.record(self.disk_of(node), self.config, arguments, EVENTS)

    def publish(self, commit: CommitId, digest: str, size: int, nodes: list[dict[str, Any]]) -> None:
        arguments = {
            "commit": wire(commit),
            "run_id": self._run_id,
            "world_size": self.world_size,
            "nodes": nodes,
            "plan_digest": digest,
            "plan_size": size,
            "metrics": {"loss": 0.5},
            "final": False,
        }
        maintenance.publish(self.tier, self.config, arguments, EVENTS)

    def give_up(self, commit: CommitId) -> bool:
        """What follows a save that failed; returns whether it is certain that it does not count."""
        arguments = {"commit": wire(commit)}
        certain = commit not in self.promises.begun or maintenance.withdraw(self.tier, self.config, arguments, EVENTS)
        if certain:
            self.promises.gone.add(commit)
            try:
                maintenance.abandon(self.tier, self.config, arguments, EVENTS)
            except CheckpointError:
                self.given_up.add(commit)
        else:
            self.given_up.add(commit)
        return bool(certain)

    def retire(self) -> dict[str, Any]:
        """Apply the keep rule, as after each commit."""
        acknowledged = [wire(commit) for commit in self.promises.kept if commit.incarnation == self.incarnation]
        may_count = sorted({commit.step for commit in self.promises.begun.keys() - self.promises.gone})
        self.promises.kept = {kept for kept in self.promises.kept if kept.step in may_count[-self.keep.last :]}
        arguments = {
            "keep": maintenance.keep_to_wire(self.keep),
            "incarnation": self.incarnation,
            "acknowledged": acknowledged,
            "given_up": [wire(commit) for commit in self.given_up],
        }
        retired = maintenance.retire(self.tier, self.config, arguments, EVENTS)
        self.promises.gone |= {CommitId(*commit) for commit in retired["uncommitted"]}
        return retired

    def sweep(self, *live: CommitId) -> dict[str, Any]:
        """Sweep debris, as after the start."""
        arguments = {"incarnation": self.incarnation, "live": [wire(commit) for commit in live]}
        return maintenance.sweep_debris(self.tier, self.config, arguments, EVENTS)


def wire(commit: CommitId) -> list[int]:
    return [commit.step, commit.incarnation, commit.attempt]


def believed(tier: Tier) -> list[CommitId]:
    return belief.believed(Catalog(tier, patience_s=0.0).listing())


def check(tier: Tier, promises: Promises) -> list[CommitId]:
    """Assert that what is believed was written, verifies and loads, and that what was promised is there."""
    there = believed(tier)
    for commit in promises.kept:
        better = [c for c in there if c.step == commit.step and c > commit and c in promises.begun]
        assert commit in there or better, f"{commit} was acknowledged and is lost; believed: {there}"
    for commit in there:
        assert commit not in promises.gone, f"{commit} came back"
        assert commit in promises.begun, f"{commit} was never published"
        report = verify(tier, commit, threads=1)
        assert report.ok, f"{commit}: {[str(fault) for fault in report.faults]}"
    found = find_restore_candidate(tier, patience_s=0.0)
    assert not found.rejected
    if there:
        assert found.checkpoint is not None and found.checkpoint.commit == there[0]
        state = load_tree(tier, found.checkpoint, None, Config())
        assert equal(state, loaded_state(promises.begun[there[0]])), f"{there[0]} has other bytes"
    else:
        assert found.checkpoint is None
    return there


def debris(tree: dict[str, bytes], there: list[CommitId]) -> list[str]:
    """Return the paths in a run directory that no believed checkpoint and no record accounts for."""
    homes = tuple(f"{paths.checkpoint_dir(commit)}/" for commit in there)
    records = (paths.INCARNATIONS, paths.PLANS, paths.PINS, paths.QUARANTINES)
    odd = []
    for path in tree:
        top, depth = path.partition("/")[0], path.rstrip("/").count("/")
        ours = path == paths.RUN_JSON or top in records or (top == paths.CHECKPOINTS and depth < 2)
        if TEMPORARY_PREFIX in path or not (ours or path.startswith(homes)):
            odd.append(path)
    return odd


def set_aside(tree: dict[str, bytes]) -> list[CommitId]:
    """Whole checkpoints, believed or not: what a rollback or an overwrite set aside stays until there is need of room."""
    found = []
    for path in tree:
        parts = path.split("/")
        if len(parts) == 4 and parts[3] == paths.MANIFEST:
            step, numbers = paths.parse_step_dir(parts[1]), paths.parse_attempt_dir(parts[2])
            assert step is not None and numbers is not None
            found.append(CommitId(step, *numbers))
    return found


class LaterClock(SystemClock):
    """Two hours ahead, so that temporaries are old."""

    def wall(self) -> float:
        return super().wall() + 7200.0


def go_on(disk: FakeDisk, promises: Promises) -> None:
    """Assert that the next incarnation sweeps what was left, saves, retires, and leaves nothing but what counts."""
    tier = FlashTier(disk.root, disk, clock=LaterClock())
    job = Job(tier, promises, keep=Keep(last=2))
    job.open()
    job.sweep()
    there = check(tier, promises)
    left = debris(disk.tree(), [*there, *set_aside(disk.tree())])
    assert not left, f"the next incarnation left {left}"
    top = max([commit.step for commit in promises.begun], default=0)
    job.save(top + 10, 90)
    job.retire()
    sweep.sweep(tier, incarnation=job.incarnation, live=(), grace_s=0.0, set_aside=True)
    there = check(tier, promises)
    assert there[0].step == top + 10
    left = debris(disk.tree(), there)
    assert not left, f"retention left {left}"


@dataclass(frozen=True)
class Moment:
    """What a power cut just after an operation would leave, and what was promised by then."""

    index: int
    op: str
    promises: Promises
    survivors: tuple[tuple[str, FakeDisk], ...]

    def __str__(self) -> str:
        return f"cut after operation {self.index}: {self.op}"


class RecordingDisk(FakeDisk):
    """A disk that notes after every operation that changes something what a power cut would leave of it."""

    def __init__(
        self,
        promises: Promises,
        survivals: tuple[tuple[int, Survival], ...],
        when: Callable[[Op], bool],
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.promises, self.survivals, self.when = promises, survivals, when
        self.moments: list[Moment] = []

    def _operate(self, kind: str, path: str, action: Callable[[], T], offset: int = 0, nbytes: int = 0) -> T:
        result = super()._operate(kind, path, action, offset, nbytes)
        op = Op(index=self.num_ops, kind=kind, path=path, offset=offset, nbytes=nbytes)
        if op.changes and self.when(op):
            with self._lock:
                left = tuple(
                    (f"{survival}, seed {seed}", self.crash(seed=1000 * seed + op.index, survival=survival))
                    for seed, survival in self.survivals
                )
                self._power = True
                self.moments.append(Moment(op.index, f"{kind} {path}", copy.deepcopy(self.promises), left))
        return result


def cut_everywhere(
    scenario: Scenario,
    survivals: tuple[tuple[int, Survival], ...] = ((0, "lost"), (0, "kept"), (1, "random")),
    *,
    make_tier: Callable[[FakeDisk], Tier] = lambda disk: FlashTier(disk.root, disk),
    when: Callable[[Op], bool] = lambda _: True,
    **options: Any,
) -> Iterator[Moment]:
    """Run a scenario once; give what a power cut after each of its operations would leave."""
    promises = Promises()
    disk = RecordingDisk(promises, survivals, when, **options)
    scenario(make_tier(disk), promises)
    yield from disk.moments
