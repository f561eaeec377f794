"""What an agent holds in memory of checkpoints that are on no storage: documents, shares of its own ranks, copies for other nodes.

A *share* is what one node has of a save: its record, its objects, and an *image* for each of its ranks: the rank's packs, laid end to end.
The images of the own share are the arenas; those of copies are memory of their own, used again for the next save of the same size.

Invariants: used from any thread, under one lock, and nothing waits under it. A share counts once its record is here and all that the record
names has come and matches its checksums; a copy is made only of what its own node has sent. The image of an arena is gone before the
arena is given to a trainer to write. What is found under a path is what a tier would have there, so that one reader does for both.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from safehold.errors import ChecksumError, IntegrityError, StorageFullError, TornFileError
from safehold.format import crc, document, paths, records
from safehold.format.records import NodeRecord
from safehold.host import memfd
from safehold.policy.memory_belief import MAX_TOLD, HeldTold
from safehold.types import CommitId

MAX_DOCUMENT_BYTES = 1 << 30
PLANS_KEPT = 4
ROOM_WAIT_S = 5.0


@dataclass(slots=True)
class Image:
    """The packs of one rank, end to end, from `offset` of `fd`, which is this image's own.

    Attributes:
        arena_id: Of the arena that it is; -1 for a copy.
        writers: How many transfers into it are under way.
        pieces: Offset -> (size, CRC32) of what came of a copy.
        packs: (offset, size) of each pack inside the image.
    """

    fd: int
    size_bytes: int
    arena_id: int = -1
    writers: int = 0
    pieces: dict[int, tuple[int, int]] = field(default_factory=dict)
    packs: list[tuple[int, int]] = field(default_factory=list)

    def crc_of_all(self) -> int | None:
        """Return the CRC32 of all bytes, if they came without gap or overlap."""
        end, found = 0, []
        for offset, (size, value) in sorted(self.pieces.items()):
            if offset != end:
                return None
            end += size
            found.append((value, size))
        if end != self.size_bytes:
            return None
        return crc.combine([value for value, _ in found], [size for _, size in found])


@dataclass(slots=True)
class Share:
    """What one node has of a save; see the module. `files`: name of a pack -> (rank, offset, size) in the rank's image."""

    images: dict[int, Image] = field(default_factory=dict)
    record: bytes = b""
    objects: bytes = b""
    whole: bool = False
    files: dict[str, tuple[int, int, int]] = field(default_factory=dict)

    def seal(self, decoded: NodeRecord) -> None:
        """It is whole: learn where its packs are."""
        self.files.clear()
        for image in self.images.values():
            image.packs.clear()
        ends = dict.fromkeys(self.images, 0)
        for pack in sorted(decoded.packs, key=lambda pack: (pack.rank, pack.part)):
            start = ends[pack.rank]
            self.files[pack.file] = (pack.rank, start, pack.size_bytes)
            self.images[pack.rank].packs.append((start, pack.size_bytes))
            ends[pack.rank] = start + pack.size_bytes
        self.whole = True


@dataclass(slots=True)
class _Documents:
    """The manifest of a checkpoint, and who believed it last."""

    run_id: str
    manifest: bytes
    plan_digest: str
    nodes: tuple[int, ...]
    believed_by: int


@dataclass(frozen=True, slots=True)
class Found:
    """Bytes under a path: `size_bytes` from `offset` of `fd`, which is the finder's now, or `data`."""

    fd: int = -1
    offset: int = 0
    size_bytes: int = 0
    data: bytes = b""


Key = tuple[CommitId, int]


class Held:
    """See the module.

    Args:
        room_bytes: Returns how many bytes copies may take together; asked from any thread.
    """

    def __init__(self, room_bytes: Callable[[], int]) -> None:
        self._room_bytes = room_bytes
        self._lock = threading.Condition(threading.RLock())
        self._accepted: CommitId | None = None
        self._documents: dict[CommitId, _Documents] = {}
        self._plans: dict[str, bytes] = {}
        self._shares: dict[Key, Share] = {}
        self._free: list[Image] = []
        self._cache: dict[str, bytes] = {}
        self._doubtful: set[CommitId] = set()

    @property
    def total_bytes(self) -> int:
        """Bytes of the images of copies, those that wait to be used again included."""
        with self._lock:
            return self._total()

    def _total(self) -> int:
        copies = [image for share in self._shares.values() for image in share.images.values() if image.arena_id < 0]
        return sum(image.size_bytes for image in (*copies, *self._free))

    # -- copies that come ------------------------------------------------------------------------------------------------

    def land(self, commit: CommitId, node: int, rank: int, total: int) -> tuple[int, Image]:
        """Return a descriptor for a part of an image that comes, which `landed` closes, and the image.

        Raises:
            StorageFullError: There is no room.
        """
        with self._lock:
            self._drop([other for other in self._doubtful if other != commit])
            share = self._shares.setdefault((commit, node), Share())
            image = share.images.get(rank)
            if share.whole or (image is not None and image.size_bytes != total):
                raise TornFileError(
                    f"the copy of rank {rank} is here, or comes in two sizes", step=commit.step, rank=rank
                )
            if image is None:
                self._drop_stale(commit, node)
                image = self._new_image(total, commit, rank)
                share = self._shares.setdefault(
                    (commit, node), share
                )  # while it was waited for, things may have changed
                fresh, image = image, share.images.setdefault(rank, image)
                if image is not fresh:
                    self._free.append(fresh)
            image.writers += 1
            return os.dup(image.fd), image

    def _drop_stale(self, commit: CommitId, node: int) -> None:
        """Of a node that sends a new copy, older ones go that were never committed, as far as is known here."""
        known = {*self._documents, self._accepted, commit}
        self._drop_shares([key for key in self._shares if key[1] == node and key[0] not in known])

    def _new_image(self, size: int, commit: CommitId, rank: int) -> Image:
        """Take memory for a copy; waits a while for the word that lets the one before the last go, which may come later than the copy."""
        until = time.monotonic() + ROOM_WAIT_S
        while True:
            for image in self._free:
                if image.size_bytes == size:
                    self._free.remove(image)
                    return Image(image.fd, size)
            room = self._room_bytes()
            while self._free and self._total() + size > room:
                os.close(self._free.pop(0).fd)
            taken = self._total()
            if taken + size <= room:
                return Image(memfd.create(size, f"copy-{rank}", alignable=True), size)
            if not self._lock.wait(until - time.monotonic()):
                break
        text = f"the copy of rank {rank} takes {size:,} bytes; {taken:,} of the {room:,} bytes for copies are taken"
        hint = "raise memory_budget_bytes, or use more nodes or fewer copies; saves to storage go on"
        raise StorageFullError(text, step=commit.step, rank=rank, tier="memory", hint=hint)

    def landed(self, fd: int, image: Image, offset: int, size: int, value: int | None) -> None:
        """A part of an image has come, with this CRC32; None: it did not."""
        os.close(fd)
        with self._lock:
            image.writers -= 1
            if value is not None:
                image.pieces[offset] = (size, value)

    def finish(self, commit: CommitId, node: int, record: bytes, objects: bytes) -> None:
        """All of a copy has come: compare it with its record, from when on it counts.

        Raises:
            IntegrityError: It is not what the record says.
        """
        decoded = _decoded(record, commit, node)
        with self._lock:
            share = self._shares.get((commit, node))
            if share is None:
                raise TornFileError("the copy was given up meanwhile", step=commit.step)
            _check(share, decoded, commit, node, objects)
            share.record, share.objects = record, objects
            share.seal(decoded)

    # -- the own share, and documents ------------------------------------------------------------------------------------

    def put_own(self, commit: CommitId, node: int, record: bytes, objects: bytes, images: dict[int, Image]) -> None:
        """Take the share of this node; the images are this object's from here on."""
        decoded = _decoded(record, commit, node)
        share = Share(images=images, record=record, objects=objects)
        share.seal(decoded)
        with self._lock:
            self._drop_share((commit, node))
            self._shares[commit, node] = share

    def put_plan(self, digest: str, data: bytes) -> None:
        """Take a plan, whose digest was compared."""
        with self._lock:
            self._plans[digest] = data
            used = {entry.plan_digest for entry in self._documents.values()} | {digest}
            spare = [known for known in self._plans if known not in used]
            for known in spare[: max(0, len(self._plans) - PLANS_KEPT)]:
                del self._plans[known]

    def has_plan(self, digest: str) -> bool:
        """Whether a plan is here."""
        with self._lock:
            return digest in self._plans

    def put_manifest(self, commit: CommitId, manifest: bytes, *, run_id: str, believed_by: int) -> None:
        """Take a manifest: from here on this node knows of the commit.

        Raises:
            IntegrityError: It is none, or of another checkpoint.
        """
        decoded = records.decode_manifest(manifest, path=f"{paths.checkpoint_dir(commit)}/{paths.MANIFEST}")
        if decoded.commit != commit or decoded.run_id != run_id:
            raise IntegrityError("a manifest of another checkpoint came", step=commit.step)
        nodes = tuple(ref.node for ref in decoded.nodes)
        with self._lock:
            self._documents[commit] = _Documents(run_id, manifest, decoded.plan_digest, nodes, believed_by)

    def manifest(self, commit: CommitId) -> bytes | None:
        """Return a manifest, if it is here."""
        with self._lock:
            found = self._documents.get(commit)
            return found.manifest if found is not None else None

    # -- what goes -------------------------------------------------------------------------------------------------------

    def drop(self, commit: CommitId) -> None:
        """Forget a checkpoint."""
        with self._lock:
            self._drop({commit})

    def doubt(self, commit: CommitId) -> None:
        """It is not known whether a checkpoint is committed: it stays until a later one comes, and no older one goes for it."""
        with self._lock:
            self._doubtful.add(commit)

    def drop_up_to(self, step: int, *, but: CommitId | None = None) -> None:
        """A newer checkpoint is durable: forget those up to a step."""
        with self._lock:
            self._cache.clear()
            self._drop({commit for commit in self._commits() if commit.step <= step and commit != but})

    def accept(self, commit: CommitId | None, incarnation: int) -> None:
        """A new incarnation believes this checkpoint, and no other that is here."""
        with self._lock:
            self._accepted = commit
            self._doubtful.clear()  # what is believed is in doubt no more
            self._drop({found for found in self._commits() if found != commit})
            if commit is not None and commit in self._documents:
                self._documents[commit].believed_by = incarnation
            self._cache.clear()

    def forget_arena(self, arena_id: int) -> None:
        """An arena is let go, or given to a trainer: what lies in it is no image any more."""
        with self._lock:
            for key, share in list(self._shares.items()):
                if any(image.arena_id == arena_id for image in share.images.values()):
                    self._drop_share(key)

    def close(self) -> None:
        """Free everything."""
        with self._lock:
            self._drop(self._commits())
            self._empty_free()

    def trim(self) -> None:
        """Give the memory back that waits to be used again."""
        with self._lock:
            self._empty_free()

    def _empty_free(self) -> None:
        while self._free:
            os.close(self._free.pop().fd)

    def _commits(self) -> set[CommitId]:
        return {commit for commit, _ in self._shares} | set(self._documents)

    def _drop(self, commits: Collection[CommitId]) -> None:
        for commit in commits:
            self._documents.pop(commit, None)
            self._doubtful.discard(commit)
        self._drop_shares([key for key in self._shares if key[0] in commits])

    def _drop_shares(self, keys: Collection[Key]) -> None:
        for key in keys:
            self._drop_share(key)
        self._lock.notify_all()

    def _drop_share(self, key: Key) -> None:
        share = self._shares.pop(key, None)
        for image in share.images.values() if share is not None else ():
            if image.arena_id < 0 and not image.writers:
                self._free.append(image)
            else:  # what is still written to must not become another's
                os.close(image.fd)

    # -- what is asked for -----------------------------------------------------------------------------------------------

    def told(self) -> list[HeldTold]:
        """Return what this node can tell of the checkpoints that it holds, newest first."""
        with self._lock:
            found = []
            for commit in sorted(self._commits(), reverse=True)[:MAX_TOLD]:
                known = self._documents.get(commit)
                shares = {node: share for (at, node), share in self._shares.items() if at == commit and share.whole}
                run_id = known.run_id if known is not None else _run_id_of(commit, shares)
                knows = known is not None and known.plan_digest in self._plans
                found.append(
                    HeldTold(
                        commit=commit,
                        run_id=run_id,
                        manifest=document.digest(known.manifest) if known is not None and knows else "",
                        manifest_bytes=len(known.manifest) if known is not None else 0,
                        believed_by=known.believed_by if known is not None else 0,
                        nodes=known.nodes if known is not None else (),
                        shares=tuple(sorted(shares)),
                    )
                )
            return found

    def ranks(self, commit: CommitId) -> dict[int, bool]:
        """Return the ranks whose packs of a checkpoint are here, and whether nobody but this agent could write to them since they came."""
        with self._lock:
            found: dict[int, bool] = {}
            for (at, _), share in self._shares.items():
                for rank, image in share.images.items() if at == commit and share.whole else ():
                    found[rank] = found.get(rank, False) or image.arena_id < 0
            return found

    def arenas(self, commit: CommitId) -> list[tuple[int, list[tuple[int, int]]]]:
        """Return the arenas of this node's own share of a checkpoint: (id, packs)."""
        with self._lock:
            own = [share for (at, _), share in self._shares.items() if at == commit and share.whole]
            return [
                (image.arena_id, list(image.packs))
                for share in own
                for image in share.images.values()
                if image.arena_id >= 0
            ]

    def block_crcs(self, commit: CommitId, rank: int) -> list[str] | None:
        """Return the encoded checksums of the blocks of a rank's packs, by part."""
        with self._lock:
            for (at, node), share in self._shares.items():
                if at == commit and share.whole and rank in share.images:
                    packs = _decoded(share.record, commit, node).packs
                    return [pack.block_crcs for pack in sorted(packs, key=lambda p: p.part) if pack.rank == rank]
            return None

    def image(self, commit: CommitId, rank: int) -> Image | None:
        """Return a duplicate of a rank's image, whose descriptor the caller closes; a copy where there is one."""
        with self._lock:
            best: Image | None = None
            for (at, _), share in self._shares.items():
                image = share.images.get(rank) if at == commit and share.whole else None
                if image is not None and (best is None or image.arena_id < 0):
                    best = image
            if best is None:
                return None
            return Image(os.dup(best.fd), best.size_bytes, best.arena_id, packs=list(best.packs))

    def find(self, path: str) -> Found | None:
        """Return what a tier would have under a path; a descriptor in it is the caller's."""
        with self._lock:
            if (data := self._cache.get(path)) is not None:
                return Found(data=data)
            if path.startswith(paths.PLANS + "/"):
                plan = self._plans.get(path[len(paths.PLANS) + 1 :])
                return Found(data=plan) if plan is not None else None
            for commit in self._commits():
                prefix = paths.checkpoint_dir(commit) + "/"
                if path.startswith(prefix):
                    return self._find_in(commit, path[len(prefix) :])
            return None

    def _find_in(self, commit: CommitId, name: str) -> Found | None:
        if name == paths.MANIFEST:
            known = self._documents.get(commit)
            return Found(data=known.manifest) if known is not None else None
        for (at, node), share in self._shares.items():
            if at != commit or not share.whole:
                continue
            if name == paths.node_record(node):
                return Found(data=share.record)
            if name == paths.node_objects(node):
                return Found(data=share.objects)
            if name in share.files:
                rank, offset, size = share.files[name]
                return Found(os.dup(share.images[rank].fd), offset, size)
        return None

    def cache(self, path: str, data: bytes) -> None:
        """Keep a document of another node's for the other ranks of this one, until the next incarnation."""
        with self._lock:
            self._cache[path] = data

    def facts(self) -> dict[str, Any]:
        """What `safehold agents` shows: the newest step that is in memory only, and node -> step of the copies held for others."""
        with self._lock:
            newest = max(self._documents, default=None)
            return {
                "only_step": newest.step if newest is not None else None,
                "copies": {
                    str(node): commit.step for (commit, node), share in sorted(self._shares.items()) if _is_copy(share)
                },
                "copies_bytes": self._total(),
            }


def _is_copy(share: Share) -> bool:
    return share.whole and any(image.arena_id < 0 for image in share.images.values())


def _run_id_of(commit: CommitId, shares: dict[int, Share]) -> str:
    for node, share in shares.items():
        return _decoded(share.record, commit, node).run_id
    return ""


def _decoded(record: bytes, commit: CommitId, node: int) -> NodeRecord:
    return records.decode_node_record(record, path=f"{paths.checkpoint_dir(commit)}/{paths.node_record(node)}")


def _check(share: Share, decoded: NodeRecord, commit: CommitId, node: int, objects: bytes) -> None:
    """Compare what came with the record that came with it."""
    step = commit.step
    if decoded.commit != commit or decoded.node != node:
        raise TornFileError("the record of another save came", step=step)
    if len(objects) != decoded.objects_size_bytes or document.digest(objects) != decoded.objects_blake3:
        raise ChecksumError(f"the objects of node {node} did not come as they are", step=step)
    by_rank: dict[int, list[tuple[int, int]]] = {}
    for pack in sorted(decoded.packs, key=lambda pack: (pack.rank, pack.part)):
        by_rank.setdefault(pack.rank, []).append((pack.crc32, pack.size_bytes))
    if set(by_rank) != set(share.images):
        raise TornFileError(f"the copy of node {node} lacks packs of a rank", step=step)
    for rank, packs in by_rank.items():
        image = share.images[rank]
        wanted = crc.combine([value for value, _ in packs], [size for _, size in packs])
        if sum(size for _, size in packs) != image.size_bytes or image.crc_of_all() != wanted:
            text = f"the copy of rank {rank} does not match its checksums"
            raise ChecksumError(text, step=step, rank=rank, tier="memory")
