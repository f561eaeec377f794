"""Writes small, valid run directories through the real format and tier, for tests of everything that reads them.

    run = RunDir(tmp_path / "run")
    run.open()                      # incarnation 1
    run.save(10)                    # two ranks on two nodes, a few tensors and objects
    run.save(20, tensors={"w": np.ones((4, 3))}, world_size=3)

What a save writes is what agents write: packs, objects, node records, plan, manifest.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from safehold.format import crc, document, dtypes, objects, objects_file, pack, paths, plan, records
from safehold.pipeline import agreement, ledger
from safehold.tiers.base import Tier
from safehold.tiers.open import open_tier
from safehold.types import CommitId, ObjectSpec, Rect, TensorSpec


@dataclass(frozen=True)
class PerRank:
    """An object that each rank has its own value of."""

    values: tuple[Any, ...]


@dataclass(frozen=True)
class Typed:
    """A tensor of a dtype that NumPy lacks: its items as unsigned integers of the same size."""

    dtype: str
    items: np.ndarray
    kind: str = "torch"


def default_tensors(step: int) -> dict[str, Any]:
    """A model of a few leaves whose values depend on the step."""
    rng = np.random.default_rng(step)
    return {
        "model.emb.weight": rng.normal(size=(7, 6)).astype(np.float32),
        "model.bias": Typed("bfloat16", rng.integers(0, 2**16, size=(5,), dtype=np.uint16)),
        "model.empty": np.zeros((0, 3), np.float32),
        "optim.state.model.emb.weight.exp_avg": rng.normal(size=(7, 6)).astype(np.float32),
        "optim.state.model.emb.weight.step": np.array(step, np.int64),
    }


def default_objects(step: int, world_size: int) -> dict[str, Any]:
    return {
        "step": step,
        "sched": {"last_epoch": step, "lrs": [0.1, 0.2], "done": None},
        "rng": PerRank(tuple(f"rank {rank} at {step}" for rank in range(world_size))),
    }


@dataclass
class RunDir:
    """A run directory being written.

    Attributes:
        root: Where.
        tier: The tier that writes.
        incarnation: The open incarnation; `open` makes the next.
        now_s: Wall clock of what is written next; each save adds a minute.
    """

    root: Path
    tier: Tier = field(default=None)  # type: ignore[assignment]
    incarnation: int = 0
    now_s: float = 1_700_000_000.0

    def __post_init__(self) -> None:
        self.tier = self.tier or open_tier(self.root)

    # A clock, so that records have the time of the tests.
    def wall(self) -> float:
        return self.now_s

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    @property
    def run_id(self) -> str:
        return ledger.ensure_run(self.tier, clock=self).run_id

    def open(self, *, up_to_step: int | None = None, reason: str = "start") -> int:
        """Open the next incarnation, accepting what is believed up to a step."""
        accept = ledger.accept_all(up_to_step=up_to_step)
        opened = ledger.open_incarnation(
            self.tier, f"token-{self.incarnation + 1}-{self.now_s}", accept, reason, clock=self
        )
        self.incarnation = opened.record.number
        return self.incarnation

    def path(self, commit: CommitId, name: str = "") -> Path:
        return self.root / paths.checkpoint_dir(commit) / name

    def save(
        self,
        step: int,
        tensors: Mapping[str, Any] | None = None,
        objects_: Mapping[str, Any] | None = None,
        *,
        world_size: int = 2,
        ranks_per_node: int = 1,
        incarnation: int | None = None,
        attempt: int = 0,
        aliases: Mapping[str, str] | None = None,
        metrics: Mapping[str, float] | None = None,
        final: bool = False,
        pack_size_bytes: int = pack.PACK_SIZE_BYTES,
        publish: bool = True,
        rects: Callable[[TensorSpec, int, int], list[Rect]] | None = None,
    ) -> CommitId:
        """Write one checkpoint and commit it; `rects` says what of a leaf a rank writes."""
        if not self.incarnation:
            self.open()
        number = self.incarnation if incarnation is None else incarnation
        commit = CommitId(step, number, attempt)
        self.now_s += 60.0
        write_checkpoint(
            self.tier,
            commit,
            default_tensors(step) if tensors is None else tensors,
            default_objects(step, world_size) if objects_ is None else objects_,
            run_id=self.run_id,
            world_size=world_size,
            ranks_per_node=ranks_per_node,
            aliases=aliases or {},
            metrics=metrics or {},
            final=final,
            created_s=self.now_s,
            pack_size_bytes=pack_size_bytes,
            publish=publish,
            rects=rects or rows_of_rank,
        )
        return commit


def write_checkpoint(
    tier: Tier,
    commit: CommitId,
    tensors: Mapping[str, Any],
    objects_: Mapping[str, Any],
    *,
    run_id: str,
    world_size: int,
    ranks_per_node: int,
    aliases: Mapping[str, str],
    metrics: Mapping[str, float],
    final: bool,
    created_s: float,
    pack_size_bytes: int,
    publish: bool,
    rects: Callable[[TensorSpec, int, int], list[Rect]],
) -> records.Manifest:
    """Write all files of a checkpoint, the manifest last (if `publish`)."""
    specs, raw = _specs(tensors)
    nodes = [rank // ranks_per_node for rank in range(world_size)]
    object_specs = tuple(
        ObjectSpec(name=name, policy="refuse" if isinstance(value, PerRank) else "same")
        for name, value in sorted(objects_.items())
    )
    parts, packs = [], {node: [] for node in nodes}
    for rank in range(world_size):
        part, pack_records = _write_rank(
            tier, commit, nodes[rank], rank, world_size, specs, raw, object_specs, aliases, pack_size_bytes, rects
        )
        parts.append(plan.encode_part(part))
        packs[nodes[rank]] += pack_records
    plan_bytes = plan.encode_plan(plan.merge_parts(parts, nodes))
    ledger.put_plan(tier, plan.digest(plan_bytes), plan_bytes)
    node_records, record_bytes = {}, {}
    for node in packs:
        ranks = [rank for rank in range(world_size) if nodes[rank] == node]
        record = _write_objects(tier, commit, node, ranks, objects_, packs[node], run_id, parts)
        node_records[node], record_bytes[node] = record, records.encode_node_record(record)
        tier.put(f"{paths.checkpoint_dir(commit)}/{paths.node_record(node)}", record_bytes[node])
    tier.sync_tree(paths.checkpoint_dir(commit))
    manifest = compose_manifest(
        run_id=run_id,
        commit=commit,
        plan_bytes=plan_bytes,
        world_size=world_size,
        node_records=node_records,
        record_bytes=record_bytes,
        created_s=created_s,
        library="test",
        metrics=metrics,
        final=final,
    )
    if publish:
        path = f"{paths.checkpoint_dir(commit)}/{paths.MANIFEST}"
        tier.put(path, records.encode_manifest(manifest), exclusive=True)
    return manifest


def compose_manifest(
    *,
    run_id: str,
    commit: CommitId,
    plan_bytes: bytes,
    world_size: int,
    node_records: Mapping[int, records.NodeRecord],
    record_bytes: Mapping[int, bytes],
    created_s: float,
    library: str,
    metrics: Mapping[str, float] | None = None,
    final: bool = False,
    tags: Sequence[str] = (),
) -> records.Manifest:
    """Return the manifest that vouches for the given documents.

    Args:
        run_id: The run.
        commit: The checkpoint.
        plan_bytes: The plan as stored.
        world_size: Number of ranks.
        node_records: Node -> record.
        record_bytes: Node -> the same as stored.
        created_s: Wall clock, seconds since the epoch.
        library: Version that writes.
        metrics: The user's figures of this step.
        final: Whether it is the last save of its training.
        tags: The user's words.
    """
    total, checksum = agreement.totals([node_records[node] for node in sorted(node_records)])
    return records.Manifest(
        run_id=run_id,
        commit=commit,
        world_size=world_size,
        nodes=tuple(
            records.NodeRef(node=node, size_bytes=len(data), blake3=document.digest(data))
            for node, data in sorted(record_bytes.items())
        ),
        plan_digest=document.digest(plan_bytes),
        plan_size_bytes=len(plan_bytes),
        total_bytes=total,
        crc32=checksum,
        created_s=created_s,
        library=library,
        metrics=dict(metrics or {}),
        final=final,
        tags=tuple(tags),
    )


def _specs(tensors: Mapping[str, Any]) -> tuple[tuple[TensorSpec, ...], dict[str, np.ndarray]]:
    """Leaves sorted by name, and their items as bytes with one more dim."""
    specs, raw = [], {}
    for name, value in sorted(tensors.items()):
        typed = value if isinstance(value, Typed) else Typed(dtypes.from_numpy(value.dtype), value)
        items = typed.items if typed.items.flags.c_contiguous else np.ascontiguousarray(typed.items)
        specs.append(TensorSpec(name=name, dtype=typed.dtype, shape=items.shape, kind=typed.kind))  # type: ignore[arg-type]
        itemsize = dtypes.itemsize(typed.dtype)
        raw[name] = np.frombuffer(items.tobytes(), np.uint8).reshape((*items.shape, itemsize))
    return tuple(specs), raw


def rows_of_rank(spec: TensorSpec, rank: int, world_size: int) -> list[Rect]:
    """Tensors with rows are split by rows; others are written by one rank."""
    if not spec.shape or spec.shape[0] < 2:
        return [Rect.whole(spec.shape)] if zlib.crc32(spec.name.encode()) % world_size == rank else []
    per_rank = -(-spec.shape[0] // world_size)
    start = min(rank * per_rank, spec.shape[0])
    rows = min(per_rank, spec.shape[0] - start)
    rest = spec.shape[1:]
    return [Rect((start, *(0 for _ in rest)), (rows, *rest))] if rows else []


def _write_rank(
    tier: Tier,
    commit: CommitId,
    node: int,
    rank: int,
    world_size: int,
    specs: tuple[TensorSpec, ...],
    raw: dict[str, np.ndarray],
    object_specs: tuple[ObjectSpec, ...],
    aliases: Mapping[str, str],
    pack_size_bytes: int,
    rects: Callable[[TensorSpec, int, int], list[Rect]],
) -> tuple[plan.Part, list[records.PackRecord]]:
    pieces, leaf_of = [], []
    for number, spec in enumerate(specs):
        for rect in rects(spec, rank, world_size):
            pieces.append(pack.PieceIn(spec.name, spec.dtype, spec.shape, rect))
            leaf_of.append(number)
    layouts = pack.layout(pieces, pack_size_bytes=pack_size_bytes)
    arena = bytearray(layouts.size_bytes)
    for layout in layouts.packs:
        arena[layout.arena_offset : layout.arena_offset + len(layout.header)] = layout.header
    for placed in layouts.pieces:
        rect = pieces[placed.index].rect
        part = tuple(slice(o, o + n) for o, n in zip(rect.offsets, rect.sizes, strict=True))
        data = raw[pieces[placed.index].name][part].tobytes()
        arena[placed.arena_offset : placed.arena_offset + placed.nbytes] = data
    pack_records = []
    for number, layout in enumerate(layouts.packs):
        name = paths.pack(node, rank, number)
        data = memoryview(arena)[layout.arena_offset : layout.arena_offset + layout.size_bytes]
        writer = tier.create_pack(f"{paths.checkpoint_dir(commit)}/{name}", layout.size_bytes)
        writer.write_at(0, data)
        writer.finish()
        blocks = crc.crc_blocks(data)
        pack_records.append(
            records.PackRecord(
                file=name,
                rank=rank,
                part=number,
                size_bytes=layout.size_bytes,
                crc32=crc.combine_blocks(blocks, layout.size_bytes),
                block_crcs=crc.encode_crcs(blocks),
            )
        )
    dims = max((len(spec.shape) for spec in specs), default=0)
    placed_in_order = sorted(layouts.pieces, key=lambda p: p.index)
    columns = [pieces[p.index].rect for p in placed_in_order]
    part = plan.Part(
        rank=rank,
        world_size=world_size,
        leaves=specs,
        leaf=np.array([leaf_of[p.index] for p in placed_in_order], np.int32),
        offsets=np.array([r.offsets + (0,) * (dims - len(r.offsets)) for r in columns], np.int64).reshape(
            len(columns), dims
        ),
        sizes=np.array([r.sizes + (1,) * (dims - len(r.sizes)) for r in columns], np.int64).reshape(len(columns), dims),
        pack=np.array([p.pack for p in placed_in_order], np.int32),
        offset=np.array([p.offset for p in placed_in_order], np.int64),
        pack_sizes=tuple(layout.size_bytes for layout in layouts.packs),
        objects=object_specs,
        aliases=tuple(sorted(aliases.items())),
    )
    return part, pack_records


def _write_objects(
    tier: Tier,
    commit: CommitId,
    node: int,
    ranks: list[int],
    objects_: Mapping[str, Any],
    packs: list[records.PackRecord],
    run_id: str,
    parts: list[bytes],
) -> records.NodeRecord:
    data = b""
    if objects_:
        encoded = {
            rank: {
                name: objects.encode(value.values[rank] if isinstance(value, PerRank) else value, name=name)
                for name, value in sorted(objects_.items())
            }
            for rank in ranks
        }
        data = objects_file.encode_objects(encoded)
        tier.put(f"{paths.checkpoint_dir(commit)}/{paths.node_objects(node)}", data)
    return records.NodeRecord(
        run_id=run_id,
        node=node,
        node_name=f"host{node}",
        commit=commit,
        packs=tuple(packs),
        objects_size_bytes=len(data),
        objects_crc32=crc.crc(data) if data else 0,
        objects_blake3=document.digest(data) if data else "",
        part_digests={rank: document.digest(parts[rank]) for rank in ranks},
        timings={"flush": 0.1},
    )


def flip(path: Path, offset: int = -1, bit: int = 0) -> None:
    """Flip one bit of a file, counted from its end if negative."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(bytes(data))
