"""Reads single leaves of a checkpoint, as NumPy bytes or decoded objects, without a framework.

Invariants: no byte is handed out whose checksum block was not verified on the way. Only the blocks that a leaf touches
are read. Works on a read-only directory, and for any dtype: an array of bytes has one more dim, the item.

Must not live here: state, torch.
"""

from __future__ import annotations

import math
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from safehold.errors import ChecksumError, StepNotFoundError, TornFileError
from safehold.format import crc, document, dtypes, names, objects, objects_file
from safehold.pipeline.catalog import Checkpoint
from safehold.policy import resharding
from safehold.tiers.base import PackReader, Tier
from safehold.types import ObjectSpec, Rect, TensorSpec

Bytes = npt.NDArray[np.uint8]

MAX_READ_BYTES = 256 << 20
"""A stored piece is read in parts of about this size."""


class LeafReader:
    """Reads leaves of one checkpoint; keeps its packs open until `close`. Not thread-safe.

    Args:
        tier: Where the run directory is.
        checkpoint: The checkpoint, as `Catalog.load` gives it.
        direct: Read past the page cache where that is possible.
    """

    def __init__(self, tier: Tier, checkpoint: Checkpoint, *, direct: bool = True) -> None:
        self.checkpoint = checkpoint
        self._tier = tier
        self._direct = direct
        self._index = resharding.PlanIndex(checkpoint.plan)
        self._packs = checkpoint.packs()
        self._open: dict[tuple[int, int], tuple[PackReader, npt.NDArray[np.uint32]]] = {}
        self._objects: dict[int, objects_file.ObjectsFile] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all packs."""
        opened, self._open = self._open, {}
        for reader, _ in opened.values():
            reader.close()

    def tensor_spec(self, name: str) -> TensorSpec | None:
        """Return what a tensor leaf (or an alias of one) is; None if the checkpoint has no tensor of that name."""
        leaf = self._index.leaf_of.get(name)
        return None if leaf is None else self.checkpoint.plan.leaves[leaf]

    def object_specs(self, name: str) -> dict[int, ObjectSpec]:
        """Return rank -> spec of an object leaf; empty if no rank has it."""
        found: dict[int, ObjectSpec] = {}
        known: dict[int, ObjectSpec | None] = {}
        for rank, specs in enumerate(self.checkpoint.plan.objects):
            if id(specs) not in known:
                known[id(specs)] = next((spec for spec in specs if spec.name == name), None)
            if (spec := known[id(specs)]) is not None:
                found[rank] = spec
        return found

    def read_bytes(self, name: str, rect: Rect | None = None) -> Bytes:
        """Read a tensor leaf, or a rectangle of it, whatever pieces it is stored in.

        Args:
            name: The leaf's FQN, or an alias.
            rect: Global coordinates; None: the whole leaf.

        Returns:
            The items' bytes as stored (little endian), of shape (*sizes, itemsize).

        Raises:
            StepNotFoundError: The checkpoint has no such tensor.
            IntegrityError: What is stored does not verify; the file, the key and the block are named.
        """
        spec = self.tensor_spec(name)
        if spec is None:
            raise self._no_leaf(name)
        wanted = rect if rect is not None else Rect.whole(spec.shape)
        itemsize = dtypes.itemsize(spec.dtype)
        out: Bytes = np.empty((*wanted.sizes, itemsize), dtype=np.uint8)
        if not out.size:
            return out
        for transfer in resharding.transfers(self._index, [(name, wanted)]):
            for part in split_rect(transfer.part, itemsize, MAX_READ_BYTES):
                self._copy(spec, transfer, part, wanted, itemsize, out)
        return out

    def object_digests(self, name: str) -> dict[int, str]:
        """Return rank -> digest of an object's bytes; empty if no rank has it."""
        return {
            rank: self._objects_of(self.checkpoint.plan.nodes[rank]).digest(rank, name)
            for rank in self.object_specs(name)
        }

    def read_object(self, name: str, rank: int | None = None) -> Any:
        """Read and decode an object leaf.

        Args:
            name: The leaf's FQN.
            rank: Whose; None: anybody's, if all ranks have the same bytes.

        Raises:
            StepNotFoundError: The checkpoint has no such object, that rank has none, or ranks differ and `rank` is
                None.
            IntegrityError: What is stored does not verify.
        """
        digests = self.object_digests(name)
        if not digests:
            raise self._no_leaf(name)
        if rank is None:
            if len(set(digests.values())) > 1:
                raise StepNotFoundError(
                    f"the ranks have different values of {names.display(name)}",
                    step=self.checkpoint.commit.step,
                    hint=f"name one of {names.numbered('rank', sorted(digests))}",
                )
            rank = min(digests)
        if rank not in digests:
            raise StepNotFoundError(
                f"rank {rank} has no {names.display(name)}",
                step=self.checkpoint.commit.step,
                rank=rank,
                hint=f"of {names.numbered('rank', sorted(digests))} it is there",
            )
        return objects.decode(self._objects_of(self.checkpoint.plan.nodes[rank]).get(rank, name))

    def _copy(
        self,
        spec: TensorSpec,
        transfer: resharding.Transfer,
        part: Rect,
        wanted: Rect,
        itemsize: int,
        out: Bytes,
    ) -> None:
        """Copy a part of a stored piece into its place in `out`."""
        piece = transfer.piece
        narrowed = resharding.Transfer(0, transfer.rank, transfer.pack, transfer.offset, piece, part)
        start, stop = resharding.byte_range(narrowed, itemsize)
        data = self._verified(transfer.rank, transfer.pack, start, stop, spec.name)
        strides = [itemsize * math.prod(piece.sizes[dim + 1 :]) for dim in range(len(piece.sizes))]
        source = np.lib.stride_tricks.as_strided(
            data, shape=(*part.sizes, itemsize), strides=(*strides, 1), writeable=False
        )
        place = tuple(
            slice(at - base, at - base + size)
            for at, base, size in zip(part.offsets, wanted.offsets, part.sizes, strict=True)
        )
        out[place] = source

    def _verified(self, rank: int, part: int, start: int, stop: int, name: str) -> Bytes:
        """Read [start, stop) of a pack, and verify every block that it touches."""
        reader, checksums = self._pack(rank, part)
        first, last = start // crc.BLOCK_BYTES, (stop - 1) // crc.BLOCK_BYTES
        begin = first * crc.BLOCK_BYTES
        end = min((last + 1) * crc.BLOCK_BYTES, self._packs[rank, part].size_bytes)
        data: Bytes = np.empty(end - begin, dtype=np.uint8)
        view = memoryview(data)  # type: ignore[arg-type]
        reader.read_into(begin, view)
        wrong = np.flatnonzero(crc.crc_blocks(view) != checksums[first : last + 1])
        if len(wrong):
            raise ChecksumError(
                f"block {first + int(wrong[0])} does not match its checksum; it has bytes of {names.display(name)}",
                step=self.checkpoint.commit.step,
                rank=rank,
                tier=self._tier.name,
                path=self.checkpoint.pack_path(rank, part),
                hint="`safehold verify` names all that is damaged; another step may be whole",
            )
        return data[start - begin : stop - begin]

    def _pack(self, rank: int, part: int) -> tuple[PackReader, npt.NDArray[np.uint32]]:
        found = self._open.get((rank, part))
        if found is not None:
            return found
        record = self._packs[rank, part]
        path = self.checkpoint.pack_path(rank, part)
        try:
            reader = self._tier.open_pack(path, direct=self._direct)
        except FileNotFoundError as exc:
            raise self._torn("the file is missing", path, rank) from exc
        if reader.size_bytes != record.size_bytes:
            reader.close()
            text = f"has {reader.size_bytes} bytes, the node record says {record.size_bytes}"
            raise self._torn(text, path, rank)
        self._open[rank, part] = reader, crc.decode_crcs(record.block_crcs)
        return self._open[rank, part]

    def _objects_of(self, node: int) -> objects_file.ObjectsFile:
        if node not in self._objects:
            record = self.checkpoint.records[node]
            path = self.checkpoint.objects_path(node)
            try:
                data = self._tier.get(path, limit_bytes=record.objects_size_bytes)
            except FileNotFoundError as exc:
                raise self._torn("the file is missing", path, None) from exc
            if len(data) != record.objects_size_bytes or document.digest(data) != record.objects_blake3:
                raise ChecksumError(
                    "the objects do not match the size and checksum of the node record",
                    path=path,
                    step=self.checkpoint.commit.step,
                    tier=self._tier.name,
                )
            self._objects[node] = objects_file.parse(data, path=path)
        return self._objects[node]

    def _torn(self, text: str, path: str, rank: int | None) -> TornFileError:
        return TornFileError(text, path=path, step=self.checkpoint.commit.step, rank=rank, tier=self._tier.name)

    def _no_leaf(self, name: str) -> StepNotFoundError:
        plan = self.checkpoint.plan
        known = {spec.name for spec in plan.leaves} | {alias for alias, _ in plan.aliases}
        known |= {spec.name for specs in set(plan.objects) for spec in specs}
        last = name.rsplit(".", 1)[-1]
        close = sorted(other for other in known if other.startswith(name) or other.endswith(last))[:3]
        hint = "close: " + ", ".join(names.display(other) for other in close) if close else "`safehold show --leaves`"
        return StepNotFoundError(
            f"the checkpoint has no leaf {names.display(name)}", step=self.checkpoint.commit.step, hint=hint
        )


def typed(raw: Bytes, dtype: str) -> npt.NDArray[Any]:
    """View items' bytes as the dtype they are; unchanged where NumPy lacks it."""
    wanted = dtypes.numpy_dtype(dtype)
    if wanted is None or not wanted.itemsize:
        return raw
    return raw.view(wanted.newbyteorder("<") if wanted.byteorder == "=" else wanted)[..., 0]


def split_rect(rect: Rect, itemsize: int, limit_bytes: int) -> list[Rect]:
    """Cut a rectangle along its first dims into parts of at most about `limit_bytes`, in row-major order."""
    if rect.numel * itemsize <= limit_bytes or not rect.sizes:
        return [rect]
    dim = next((d for d, size in enumerate(rect.sizes) if size > 1), None)
    if dim is None:
        return [rect]
    row_bytes = rect.numel // rect.sizes[dim] * itemsize
    rows = max(1, limit_bytes // row_bytes)
    out = []
    for start in range(0, rect.sizes[dim], rows):
        offsets, sizes = list(rect.offsets), list(rect.sizes)
        offsets[dim] += start
        sizes[dim] = min(rows, rect.sizes[dim] - start)
        out.extend(split_rect(Rect(tuple(offsets), tuple(sizes)), itemsize, limit_bytes))
    return out
