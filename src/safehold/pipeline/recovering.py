"""Joined disks that give back the files of lost nodes, from the redundancy that other nodes hold.

Invariants: what is there and whole is read where it is; what is missing, or is not what the manifest vouches for, comes from verified
blocks of the other members of its redundancy set, and is compared with the lost node's record before anybody sees it. Nothing is
written. All nodes of the job have answered when something is called lost: one that cannot be reached is an error by name.

Must not live here: how bytes are given back (`pipeline.lost_node`), giving files back for good (`pipeline.rebuild`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

from safehold.errors import CheckpointError, IntegrityError, StorageError, TornFileError
from safehold.format import document, paths, records
from safehold.format.names import counted, numbered
from safehold.format.records import Manifest
from safehold.pipeline import joining
from safehold.pipeline.lost_node import LostNode, open_lost
from safehold.pipeline.placed import PlacedMembers
from safehold.policy.placement import MAX_COPIES, RedundancySet
from safehold.tiers.joined import JoinedTier
from safehold.types import CommitId


@dataclass(slots=True)
class _Survey:
    """One checkpoint, as it is spread over the nodes of this job.

    Attributes:
        manifest: Its manifest.
        at: Node of the checkpoint -> where its files are.
        redundant: Nodes of the checkpoint that have made redundancy.
        members: Their bytes.
        lost: What was asked for so far: a node, or why it cannot be given back.
    """

    manifest: Manifest
    at: dict[int, str]
    redundant: set[int]
    members: PlacedMembers
    lost: dict[int, LostNode | CheckpointError] = field(default_factory=dict)


class RecoveringTier(JoinedTier):
    """See the module; for reading one checkpoint at a time."""

    def __init__(self, joined: JoinedTier) -> None:
        others = {name: tier for name, tier in joined.members.items() if name != joined.node}
        super().__init__(joined.own, others, node=joined.node, guess=joined.guess)
        self._surveys: dict[CommitId, _Survey] = {}
        self._manifests: dict[CommitId, Manifest] = {}
        self._surveying = threading.RLock()

    def forget(self) -> None:
        """Look anew at what is where."""
        with self._surveying:
            surveys, self._surveys = self._surveys, {}
            self._manifests = {}
        for survey in surveys.values():
            survey.members.close()

    def close(self) -> None:
        """Close what was opened; the disks stay open."""
        self.forget()

    def get(self, path: str, *, limit_bytes: int, retry_s: float | None = None) -> bytes:
        """See `Tier`; node records and objects of nodes that are lost, too.

        Raises:
            TornFileError: The file is on no node, and there is not enough redundancy for it; the nodes are named.
        """
        directory, _, name = path.rpartition("/")
        commit, node = paths.parse_checkpoint_dir(directory), paths.node_of(name)
        if commit is None or node is None:
            return super().get(path, limit_bytes=limit_bytes, retry_s=retry_s)
        try:
            data = super().get(path, limit_bytes=limit_bytes, retry_s=retry_s)
        except (FileNotFoundError, IntegrityError) as exc:
            lost = self._lost_or(exc, commit, node)
            return _small(lost, name, limit_bytes)
        return data if self._fits(commit, node, name, data) else self._instead(commit, node, name, data, limit_bytes)

    def lost(self, manifest: Manifest, node: int) -> LostNode:
        """Return a node of a checkpoint as the others give it back, enough of which are there.

        Raises:
            TornFileError: Too much is lost; it is named.
            StorageError: What holds the redundancy cannot be read now.
        """
        with self._surveying:
            survey = self._survey(manifest)
            found = survey.lost.get(node)
            if found is None:
                found = self._open(survey, node)
                if not isinstance(found, StorageError):  # which may pass
                    survey.lost[node] = found
        if isinstance(found, LostNode):
            return found
        raise found

    def where(self, manifest: Manifest) -> dict[int, str]:
        """Return at which node the files are that each node of a checkpoint wrote; lost ones are not in it."""
        with self._surveying:
            return dict(self._survey(manifest).at)

    def gives(self, manifest: Manifest, names: Iterable[str]) -> set[str]:
        """Return those of a checkpoint's files that can be had although they are missing, or of a wrong size, where they were written."""
        found = set()
        for name in names:
            node = paths.node_of(name)
            if node is not None and self._can(manifest, node):
                found.add(name)
        return found

    def _can(self, manifest: Manifest, node: int) -> bool:
        try:
            self.lost(manifest, node)
        except IntegrityError:
            return False
        return True

    def _survey(self, manifest: Manifest) -> _Survey:
        commit = manifest.commit
        found = self._surveys.get(commit)
        if found is None:
            at, redundant = joining.spread(self, commit)
            members = PlacedMembers({node: self.members[name] for node, name in at.items()})
            found = self._surveys[commit] = _Survey(manifest, at, redundant, members)
        return found

    def _manifest(self, commit: CommitId) -> Manifest:
        with self._surveying:
            found = self._manifests.get(commit)
        if found is None:
            path = f"{paths.checkpoint_dir(commit)}/{paths.MANIFEST}"
            data = super().get(path, limit_bytes=document.max_file_bytes("manifest"), retry_s=0.0)
            found = records.decode_manifest(data, path=path)
            with self._surveying:
                self._manifests[commit] = found
        return found

    def _lost_of(self, commit: CommitId, node: int) -> LostNode | None:
        """Return a node that is lost, None where there is no checkpoint."""
        try:
            manifest = self._manifest(commit)
        except FileNotFoundError:
            return None
        return self.lost(manifest, node) if any(ref.node == node for ref in manifest.nodes) else None

    def _lost_or(self, cause: Exception, commit: CommitId, node: int) -> LostNode:
        """Return a node as `lost`; where it cannot be given back, and is there, what is wrong is the cause."""
        try:
            lost = self._lost_of(commit, node)
        except IntegrityError:
            if node not in self.where(self._manifest(commit)):
                raise
            lost = None
        if lost is None:
            raise cause
        return lost

    def _open(self, survey: _Survey, node: int) -> LostNode | CheckpointError:
        others = sorted(
            (other for other in survey.at if other != node), key=lambda other: other not in survey.redundant
        )
        if not survey.redundant:
            return _unprotected(survey.manifest, node, survey.at)
        try:
            lost = open_lost(survey.manifest, node, survey.members, others)
        except CheckpointError as exc:
            passes = isinstance(exc, StorageError)
            return exc if passes else _unprotected(survey.manifest, node, survey.at)
        try:
            lost.check()
        except CheckpointError as exc:
            return _too_much(survey.manifest, lost.of, survey.at, exc)
        return lost

    def _fits(self, commit: CommitId, node: int, name: str, data: bytes) -> bool:
        """Whether a small file is the one that the manifest, or its node's record, vouches for; True where nothing tells."""
        try:
            manifest = self._manifest(commit)
            ref = next((ref for ref in manifest.nodes if ref.node == node), None)
            if ref is None:
                return True
            if name == paths.node_record(node):
                return len(data) == ref.size_bytes and document.digest(data) == ref.blake3
            path = f"{paths.checkpoint_dir(commit)}/{paths.node_record(node)}"
            record = records.decode_node_record(self.get(path, limit_bytes=ref.size_bytes, retry_s=0.0), path=path)
        except (FileNotFoundError, CheckpointError):
            return True
        return name != paths.node_objects(node) or document.digest(data) == record.objects_blake3

    def _instead(self, commit: CommitId, node: int, name: str, damaged: bytes, limit_bytes: int) -> bytes:
        """Return what a damaged file should be; the file itself where nobody can tell, for its reader to refuse."""
        try:
            lost = self._lost_of(commit, node)
        except CheckpointError:
            return damaged
        return damaged if lost is None else _small(lost, name, limit_bytes)


class RedundancySource:
    """A pack as the redundancy of other nodes gives it back; see `pipeline.sources.Source`."""

    verified = True
    label = "redundancy"

    def __init__(self, tier: RecoveringTier, manifest: Manifest, node: int, file: str) -> None:
        self._tier, self._manifest, self._node, self._file = tier, manifest, node, file
        self.name = "redundancy"

    def read(self, offset: int, size_bytes: int, buffer: memoryview) -> memoryview:
        """See `Source`; every block of it has verified."""
        lost = self._tier.lost(self._manifest, self._node)
        self.name = "copy" if lost.of.num_data == 1 else "parity"
        target = buffer[:size_bytes]
        lost.read_range(self._file, offset, target)
        return target


def _small(lost: LostNode, name: str, limit_bytes: int) -> bytes:
    """Return a lost node's record or objects."""
    node = lost.record.node
    if name == paths.node_record(node):
        return lost.record_bytes
    size = next((file.size_bytes for file in lost.files if file.name == name), 0)
    if size > limit_bytes:
        text = f"the file has {size} bytes, more than {limit_bytes}"
        raise TornFileError(text, node=str(node), path=f"{lost.directory}/{name}")
    data = bytearray(size)
    lost.read_range(name, 0, memoryview(data))
    return bytes(data)


def _names(manifest: Manifest, nodes: Iterable[int]) -> str:
    named = [manifest.own_disks[node] if manifest.own_disks else str(node) for node in nodes]
    return ("node " if len(named) == 1 else "nodes ") + ", ".join(named[:8]) + (", ..." if len(named) > 8 else "")


def _unprotected(manifest: Manifest, node: int, at: dict[int, str]) -> CheckpointError:
    """Return the error for a node of whose files nobody holds redundancy."""
    gone = [ref.node for ref in manifest.nodes if ref.node not in at] or [node]
    text = f"the files of {_names(manifest, gone)} are lost, and no other node holds redundancy for {_names(manifest, [node])}"
    hint = f"start the job with {_names(manifest, gone)} as well; {_would_have(len(manifest.nodes), len(gone))}"
    return _torn(manifest, node, text, hint)


def _too_much(manifest: Manifest, of: RedundancySet, at: dict[int, str], cause: CheckpointError) -> CheckpointError:
    """Return the error for a set that has lost more than it has redundancy for."""
    gone = [node for node in of.members if node not in at]
    if len(gone) <= of.num_parity:  # then it is something else: redundancy that was not made, or is damaged
        return cause if not isinstance(cause, StorageError) else _torn(manifest, of.members[0], str(cause), cause.hint)
    text = (
        f"the files of {_names(manifest, gone)} are lost, {counted(len(gone), 'node')} of one redundancy set, of which "
        f"{of} survives the loss of {of.num_parity}"
    )
    return _torn(manifest, gone[0], text, _would_have(len(of.members), len(gone)))


def _would_have(num_nodes: int, num_lost: int) -> str:
    """Say which scheme would have kept what was lost."""
    if num_nodes - num_lost >= 2 and num_lost > 1:
        return f"parity='rs:{num_nodes - num_lost}+{num_lost}' would have kept them"
    if 1 <= num_lost <= MAX_COPIES and num_nodes > num_lost:
        return f"copies={num_lost} would have kept them"
    return "no redundancy survives that"


def _torn(manifest: Manifest, node: int, text: str, hint: str | None) -> TornFileError:
    name = manifest.own_disks[node] if manifest.own_disks else numbered("node", [node])
    commit = manifest.commit
    return TornFileError(text, step=commit.step, node=name, path=paths.checkpoint_dir(commit), tier="flash", hint=hint)
