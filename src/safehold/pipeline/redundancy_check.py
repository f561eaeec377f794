"""Reads the redundancy that lies beside a checkpoint and says what is wrong with it.

Invariants: nothing here writes. What is found is about the redundancy, never about the checkpoint, which may be whole without it. Which
other nodes hold what is not looked at: only this tier is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from safehold.errors import CheckpointError, FormatVersionError, IntegrityError, StorageError, TornFileError
from safehold.format import crc, document, names, paths, redundancy
from safehold.format.records import Manifest
from safehold.format.redundancy import RedundancyRecord, ShareRecord
from safehold.pipeline.block_work import make_buffer
from safehold.pipeline.redundancy import check_against
from safehold.tiers.base import PackReader, Tier

CHUNK_BLOCKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """One thing that is wrong; see `safehold.pipeline.findings.Fault`."""

    path: str
    message: str
    node: int
    block: int | None = None
    offset_bytes: int | None = None


class RedundancyCheck:
    """The redundancy of a checkpoint on one tier; the records are read at once, the shares by `run`.

    Attributes:
        num_bytes: Bytes that `run` reads.
        num_files: Files that were read.
        notes: What is odd and harmless.
    """

    def __init__(self, tier: Tier, manifest: Manifest) -> None:
        self.num_bytes = 0
        self.num_files = 0
        self.notes: list[str] = []
        self._tier, self._manifest = tier, manifest
        self._directory = paths.checkpoint_dir(manifest.commit)
        self._records: list[RedundancyRecord] = []
        self._damaged: list[Damage] = []
        listed = [entry.name for entry in tier.list(self._directory) if not entry.is_dir]
        nodes = [node for name in listed if (node := paths.parse_redundancy_record(name)) is not None]
        for node in nodes:
            self._read_record(node)
        claimed = {share.file for record in self._records for share in record.shares}
        for name in listed:
            share = paths.parse_redundancy_share(name)
            if share is not None and name not in claimed and share[0] not in {damage.node for damage in self._damaged}:
                text = "redundancy that was not finished, or of an earlier layout"
                self.notes.append(f"{self._directory}/{names.display(name)}: {text}")

    def run(self, read: Callable[[int], None], *, direct: bool = True) -> Iterator[Damage]:
        """Read all shares and yield what is wrong with them.

        Args:
            read: Told the bytes that were read, or would have been.
            direct: Read past the page cache where that is possible.
        """
        yield from self._damaged
        for record in self._records:
            for share in record.shares:
                if share.size_bytes:
                    yield from self._share(record.node, share, read, direct)

    def _read_record(self, node: int) -> None:
        path = f"{self._directory}/{paths.redundancy_record(node)}"
        try:
            data = self._tier.get(path, limit_bytes=document.max_file_bytes(redundancy.KIND))
            record, _ = redundancy.decode_redundancy(data, path=path)
            check_against(record, self._manifest, node, path=path)
        except FormatVersionError:
            raise
        except FileNotFoundError:
            return  # made anew meanwhile
        except (IntegrityError, StorageError) as exc:
            self._damaged.append(Damage(path=path, message=exc.message, node=node))
            return
        self.num_files += 1
        self.num_bytes += sum(share.size_bytes for share in record.shares)
        self._records.append(record)

    def _share(self, node: int, share: ShareRecord, read: Callable[[int], None], direct: bool) -> Iterator[Damage]:
        path = f"{self._directory}/{share.file}"
        text = ""
        try:
            reader = self._tier.open_pack(path, direct=direct)
        except FileNotFoundError:
            text = "the file is missing"
        except (IntegrityError, StorageError) as exc:
            text = exc.message
        if text:
            read(share.size_bytes)
            yield Damage(path=path, message=text, node=node)
            return
        try:
            if reader.size_bytes != share.size_bytes:
                text = f"has {reader.size_bytes} bytes, its record says {share.size_bytes}"
                yield Damage(path=path, message=text, node=node)
                read(share.size_bytes)
            else:
                yield from self._blocks(reader, node, share, read)
        finally:
            reader.close()
        self.num_files += 1

    def _blocks(
        self, reader: PackReader, node: int, share: ShareRecord, read: Callable[[int], None]
    ) -> Iterator[Damage]:
        wanted, buffer = crc.decode_crcs(share.block_crcs), make_buffer(CHUNK_BLOCKS)
        for offset in range(0, share.size_bytes, buffer.nbytes):
            part = buffer[: min(buffer.nbytes, share.size_bytes - offset)]
            first = offset // crc.BLOCK_BYTES
            error = _try_read(reader, offset, part)
            found = crc.crc_blocks(part)
            for number in range(len(found)):
                start = number * crc.BLOCK_BYTES
                if error is not None:
                    piece = part[start : start + crc.BLOCK_BYTES]
                    why = _try_read(reader, offset + start, piece)
                    if why is not None:
                        yield self._bad(node, share, first + number, why.message)
                        continue
                    found[number] = crc.crc(piece)
                if found[number] != wanted[first + number]:
                    text = f"checksum {found[number]:08x} instead of {wanted[first + number]:08x}"
                    yield self._bad(node, share, first + number, text)
            read(part.nbytes)

    def _bad(self, node: int, share: ShareRecord, block: int, text: str) -> Damage:
        start = block * crc.BLOCK_BYTES
        end = min(start + crc.BLOCK_BYTES, share.size_bytes)
        message = f"block {block} (bytes {start} to {end}): {text}"
        path = f"{self._directory}/{share.file}"
        return Damage(path=path, message=message, node=node, block=block, offset_bytes=start)


def _try_read(reader: PackReader, offset: int, buffer: memoryview) -> CheckpointError | None:
    try:
        reader.read_into(offset, buffer)
    except (StorageError, TornFileError) as exc:
        return exc
    return None
