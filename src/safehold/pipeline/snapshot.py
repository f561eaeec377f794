"""One look at a run directory: run, incarnations, attempts, tombstones, pins, quarantine records.

Invariants: nothing here writes. A document that does not verify never hides the others: it is put among `problems` and
the rest goes on, in the way that loses nothing: a damaged pin still pins, a damaged tombstone un-commits nothing, a
damaged manifest still keeps its checkpoint from being swept, a damaged (or lost) incarnation still counts as taken and
accepts what cannot contradict its own commits. What vanishes while being read was deleted, and counts as absent. What a newer
format version wrote is never worked around.

Must not live here: decisions (`safehold.policy.belief`), writes (`safehold.pipeline.ledger`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from safehold.errors import (
    CheckpointError,
    FormatVersionError,
    IntegrityError,
    ManifestError,
    StorageError,
    TornFileError,
)
from safehold.format import document, paths, records
from safehold.format.names import counted
from safehold.format.records import Incarnation, Pin, Quarantine, RunInfo, Tombstone
from safehold.pipeline import agreement
from safehold.policy import belief
from safehold.policy.belief import AttemptView, Listing
from safehold.tiers.base import Entry, Tier
from safehold.types import CommitId

MAX_LOOKS = 8
"""So many times a directory is read again because an incarnation was opened meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What was seen.

    Attributes:
        run: The run's identity; None where the directory is absent or holds neither `run.json` nor incarnations.
        listing: What the rules of belief need.
        newest: Highest incarnation number that is taken, damaged and foreign files included; 0 if none is.
        pins: Step -> pin. A pin whose file is damaged still pins.
        quarantined: Commit -> quarantine record, damaged ones included.
        files: Attempt -> name -> size of the files in its directory.
        problems: What did not verify, and why; for the user.
    """

    run: RunInfo | None
    listing: Listing
    newest: int
    pins: dict[int, Pin]
    quarantined: dict[CommitId, Quarantine]
    files: dict[CommitId, dict[str, int]]
    problems: tuple[CheckpointError, ...]


def take(tier: Tier) -> Snapshot:
    """Look at the whole run directory once.

    Raises:
        FormatVersionError: A newer library made this run.
        ManifestError: Nothing says which run this is, or `run.json` is that of another.
        StorageError: The tier cannot be read.
    """
    return _Look(tier).take()


def identify(tier: Tier) -> RunInfo | None:
    """Return the run's identity, or None where there is no `run.json` and no incarnation.

    A damaged or lost `run.json` is replaced by what all incarnation files say, if they agree.

    Raises:
        FormatVersionError: A newer library made this run.
        ManifestError: Neither `run.json` nor the incarnations say which run this is.
    """
    return _Look(tier).identify()


def newest_incarnation(tier: Tier) -> int:
    """Return the highest incarnation number that is taken, damaged and foreign files included; 0 if none is."""
    return max(_numbers(tier), default=0)


def inferred_incarnation(
    number: int, run_id: str, known: Mapping[int, Incarnation], attempts: Mapping[CommitId, AttemptView]
) -> Incarnation:
    """Return what a damaged incarnation file most likely said.

    It took over from the incarnation before it, and rolled back at most to below its own first commit: so it is taken
    to accept what was believed before it, up to there.
    """
    own = [commit.step for commit, view in attempts.items() if commit.incarnation == number and view.has_manifest]
    before = Listing(
        incarnations={n: record for n, record in known.items() if n < number},
        attempts={commit: view for commit, view in attempts.items() if commit.incarnation < number},
    )
    up_to = min(own) - 1 if own else None
    accepted = belief.accepted_for_new(before, up_to_step=up_to) if before.incarnations else []
    return Incarnation(
        run_id=run_id,
        number=number,
        token="",
        accepted=tuple(sorted(accepted)),
        created_s=0.0,
        reason="the file is damaged; what it accepts is inferred",
    )


def _numbers(tier: Tier) -> list[int]:
    found = [paths.parse_incarnation(entry.name) for entry in tier.list(paths.INCARNATIONS)]
    return sorted(number for number in found if number is not None)


class _Look:
    """Collects the parts of a snapshot and the problems met on the way."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._problems: list[CheckpointError] = []
        self._run_id: str | None = None
        self._files: dict[CommitId, dict[str, int]] = {}

    def take(self) -> Snapshot:
        run = self.identify()
        self._run_id = run.run_id if run is not None else None
        found, self._problems = self._problems, []
        for _ in range(MAX_LOOKS):
            numbers = _numbers(self._tier)
            known, damaged = self._incarnations(numbers)
            attempts = self._attempts()
            if _numbers(self._tier) == numbers:
                break
            # An incarnation opened meanwhile: what it settled, and whom it superseded, may have been seen only in part.
            self._problems, self._files = [], {}
        else:
            raise StorageError(
                f"the run directory changed {MAX_LOOKS} times while it was read",
                path=self._tier.url,
                tier=self._tier.name,
                hint="do several jobs start in this run directory, again and again?",
            )
        if run is not None and numbers and not known and not damaged:
            raise ManifestError(
                f"says run {run.run_id}, and none of the {counted(len(numbers), 'incarnation')} here belongs to it",
                path=paths.RUN_JSON,
                hint="it was copied from another run directory; delete it: the incarnations say which run this is",
            )
        damaged |= self._lost(attempts, max(numbers, default=0))
        for number in sorted(damaged):
            known[number] = inferred_incarnation(number, self._run_id or "", known, attempts)
        return Snapshot(
            run=run,
            listing=Listing(incarnations=known, attempts=attempts),
            newest=max((*numbers, *damaged), default=0),
            pins=self._pins(),
            quarantined=self._quarantined(),
            files=self._files,
            problems=(*found, *self._problems),
        )

    def identify(self) -> RunInfo | None:
        cause: CheckpointError | None = None
        try:
            return records.decode_run(self._get(paths.RUN_JSON, "run"), path=paths.RUN_JSON)
        except FormatVersionError:
            raise
        except FileNotFoundError:
            pass
        except IntegrityError as exc:
            cause = exc
        found: dict[str, RunInfo] = {}
        for number in _numbers(self._tier):
            path = paths.incarnation(number)
            try:
                record = records.decode_incarnation(self._get(path, "incarnation"), path=path)
            except (IntegrityError, FileNotFoundError):
                continue
            found.setdefault(record.run_id, RunInfo(run_id=record.run_id, created_s=record.created_s, library=""))
        if len(found) == 1:
            lost = TornFileError("the file is missing; the incarnations say which run this is", path=paths.RUN_JSON)
            self._problems.append(cause or lost)
            return next(iter(found.values()))
        if cause is None and not found:
            return None
        raise ManifestError(
            "cannot tell which run this is",
            path=paths.RUN_JSON,
            hint=f"its incarnations name {len(found)} runs; bring {paths.RUN_JSON} back from a copy of the directory",
        ) from cause

    def _incarnations(self, numbers: Sequence[int]) -> tuple[dict[int, Incarnation], set[int]]:
        known: dict[int, Incarnation] = {}
        damaged: set[int] = set()
        for number in numbers:
            path = paths.incarnation(number)
            try:
                record = records.decode_incarnation(self._get(path, "incarnation"), path=path)
                agreement.check_incarnation(record, number, path=path)
            except FormatVersionError:
                raise
            except FileNotFoundError:
                continue
            except IntegrityError as exc:
                self._problems.append(exc)
                damaged.add(number)
                continue
            if self._run_id is not None and record.run_id != self._run_id:
                self._problems.append(ManifestError(f"belongs to another run ({record.run_id})", path=path))
                continue
            known[number] = record
        return known, damaged

    def _lost(self, attempts: Mapping[CommitId, AttemptView], newest: int) -> set[int]:
        """Incarnations newer than all files, whose own file must have been there: they have committed in this run."""
        lost = set()
        for commit in sorted(commit for commit, view in attempts.items() if view.has_manifest):
            if commit.incarnation <= newest or commit.incarnation in lost or self._run_id is None:
                continue
            path = f"{paths.checkpoint_dir(commit)}/{paths.MANIFEST}"
            try:
                manifest = records.decode_manifest(self._get(path, "manifest"), path=path)
                agreement.check_manifest(manifest, commit=commit, run_id=self._run_id, path=path)
            except FormatVersionError:
                raise
            except (IntegrityError, FileNotFoundError):
                continue  # of another run, or damaged: it says nothing of ours
            lost.add(commit.incarnation)
            text = f"the file is missing, though incarnation {commit.incarnation} has committed step {commit.step}"
            self._problems.append(TornFileError(text, path=paths.incarnation(commit.incarnation)))
        return lost

    def _attempts(self) -> dict[CommitId, AttemptView]:
        attempts: dict[CommitId, AttemptView] = {}
        for step_entry in self._tier.list(paths.CHECKPOINTS):
            step = paths.parse_step_dir(step_entry.name)
            if step is None or not step_entry.is_dir:
                continue
            for entry in self._tier.list(paths.step_dir(step)):
                numbers = paths.parse_attempt_dir(entry.name)
                if numbers is None or not entry.is_dir:
                    continue
                commit = CommitId(step, *numbers)
                inside = self._tier.list(paths.checkpoint_dir(commit))
                self._files[commit] = {e.name: e.size_bytes for e in inside if not e.is_dir}
                attempts[commit] = AttemptView(
                    has_manifest=any(e.name == paths.MANIFEST for e in inside),  # whatever it is: damaged keeps, too
                    tombstones=self._tombstones(commit, inside),
                )
        return attempts

    def _tombstones(self, commit: CommitId, inside: Sequence[Entry]) -> list[Tombstone]:
        found = []
        for entry in inside:
            number = paths.parse_tombstone(entry.name)
            if number is None:
                continue
            path = f"{paths.checkpoint_dir(commit)}/{paths.tombstone(number)}"
            try:
                stone = records.decode_tombstone(self._get(path, "tombstone"), path=path)
            except FormatVersionError:
                raise
            except FileNotFoundError:
                continue
            except IntegrityError as exc:
                self._problems.append(exc)
                continue
            if stone.commit != commit or stone.incarnation != number:
                text = "is the tombstone of another checkpoint or incarnation"
                self._problems.append(ManifestError(text, path=path, step=commit.step))
                continue
            found.append(stone)
        return found

    def _pins(self) -> dict[int, Pin]:
        pins: dict[int, Pin] = {}
        for entry in self._tier.list(paths.PINS):
            step = paths.parse_pin(entry.name)
            if step is None:
                continue
            path = paths.pin(step)
            pins[step] = Pin(step=step, created_s=0.0, note="")
            try:
                record = records.decode_pin(self._get(path, "pin"), path=path)
                if record.step != step:
                    raise ManifestError(f"pins step {record.step}; it was swapped or copied", path=path, step=step)
                pins[step] = record
            except FileNotFoundError:
                del pins[step]
            except IntegrityError as exc:
                self._problems.append(exc)
        return pins

    def _quarantined(self) -> dict[CommitId, Quarantine]:
        found: dict[CommitId, Quarantine] = {}
        for entry in self._tier.list(paths.QUARANTINES):
            commit = paths.parse_quarantine(entry.name)
            if commit is None:
                continue
            path = paths.quarantine(commit)
            try:
                record = records.decode_quarantine(self._get(path, "quarantine"), path=path)
                if record.commit != commit:
                    raise ManifestError("is the record of another checkpoint", path=path, step=commit.step)
                found[commit] = record
            except FileNotFoundError:
                continue
            except IntegrityError as exc:
                self._problems.append(exc)
                reason = "the quarantine record is damaged"
                found[commit] = Quarantine(
                    commit=commit, incarnation=commit.incarnation, created_s=0.0, reason=reason, path=path
                )
        return found

    def _get(self, path: str, kind: str) -> bytes:
        return self._tier.get(path, limit_bytes=document.max_file_bytes(kind), retry_s=0.0)
