"""Paths inside a run directory, written and read in one place.

Invariants: every path is relative, with `/`, and made of numbers and digests only: nothing that was read from a file
becomes part of one. Parsers accept exactly what is written here and answer None to all else, so that backups,
temporaries and foreign files are never taken for ours.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from safehold.types import CommitId

RUN_JSON: Final = "run.json"
INCARNATIONS: Final = "incarnations"
PLANS: Final = "plans"
CHECKPOINTS: Final = "checkpoints"
QUARANTINES: Final = "quarantine"
PINS: Final = "pins"
LEASES: Final = "leases"
REPLICATIONS: Final = "replication"
MANIFEST: Final = "manifest.json"

MAX_NUMBER: Final = 2**63 - 1
"""Largest step, incarnation, attempt, rank or node that a path can hold."""

_DIGEST = re.compile(r"[0-9a-f]{64}")
_READER = re.compile(r"[0-9a-f]{32}")
_ATTEMPT = re.compile(r"([0-9]{1,19})-([0-9]{1,19})")
_PACK = re.compile(r"([0-9]{5,19})-([0-9]{5,19})\.([0-9]{1,19})\.safetensors")
_NODE_RECORD = re.compile(r"node-([0-9]{5,19})\.json")
_NODE_OBJECTS = re.compile(r"node-([0-9]{5,19})\.objects")
_REDUNDANCY_RECORD = re.compile(r"redundancy-([0-9]{5,19})\.json")
_REDUNDANCY_SHARE = re.compile(r"redundancy-([0-9]{5,19})\.([0-9]{1,19})")
_TOMBSTONE = re.compile(r"tombstone-([0-9]{1,19})\.json")
_QUARANTINE = re.compile(r"([0-9]{9,19})-([0-9]{1,19})-([0-9]{1,19})\.json")
_REPLICATION = re.compile(r"([0-9]{9,19})-([0-9]{1,19})-([0-9]{1,19})\.([0-9]{1,19})\.json")
_REPLICATION_SHARE = re.compile(_REPLICATION.pattern.removesuffix(r"\.json") + r"\.node-([0-9]{5,19})\.json")
_PIN = re.compile(r"([0-9]{9,19})\.json")
_LEASE = re.compile(r"([0-9]{9,19})-([0-9a-f]{32})\.json")
_INCARNATION = re.compile(r"([0-9]{1,19})\.json")
_STEP = re.compile(r"[0-9]{9,19}")


def incarnation(number: int) -> str:
    """Return the path of an incarnation's file."""
    return f"{INCARNATIONS}/{_check(number)}.json"


def parse_incarnation(name: str) -> int | None:
    """Read the number from the file name of an incarnation."""
    return _one(_INCARNATION.fullmatch(name), 1)


def plan(digest: str) -> str:
    """Return the path of a plan by its digest (64 hex digits).

    Raises:
        ValueError: `digest` is not one.
    """
    if not _DIGEST.fullmatch(digest):
        raise ValueError("a plan's digest is 64 lower-case hex digits")
    return f"{PLANS}/{digest}"


def parse_plan(name: str) -> str | None:
    """Read the digest from the file name of a plan."""
    return name if _DIGEST.fullmatch(name) else None


def step_dir(step: int) -> str:
    """Return the directory of all attempts at a step."""
    return f"{CHECKPOINTS}/{_check(step):09d}"


def parse_step_dir(name: str) -> int | None:
    """Read the step from the last component of `step_dir`."""
    return _number(name, 9) if _STEP.fullmatch(name) else None


def checkpoint_dir(commit: CommitId) -> str:
    """Return the directory of one attempt at a step."""
    return f"{step_dir(commit.step)}/{attempt_dir(commit.incarnation, commit.attempt)}"


def attempt_dir(incarnation: int, attempt: int) -> str:
    """Return the last component of `checkpoint_dir`."""
    return f"{_check(incarnation)}-{_check(attempt)}"


def parse_attempt_dir(name: str) -> tuple[int, int] | None:
    """Read (incarnation, attempt) from the last component of `checkpoint_dir`."""
    match = _ATTEMPT.fullmatch(name)
    numbers = _all(match, (1, 1))
    return None if numbers is None else (numbers[0], numbers[1])


def pack(node: int, rank: int, part: int) -> str:
    """Return the file name of a pack: node, rank, and which of the rank's packs it is."""
    return f"{_check(node):05d}-{_check(rank):05d}.{_check(part)}.safetensors"


def parse_pack(name: str) -> tuple[int, int, int] | None:
    """Read (node, rank, part) from the file name of a pack."""
    numbers = _all(_PACK.fullmatch(name), (5, 5, 1))
    return None if numbers is None else (numbers[0], numbers[1], numbers[2])


def parse_checkpoint_dir(directory: str) -> CommitId | None:
    """Read the commit from the directory of an attempt."""
    top, _, rest = directory.partition("/")
    step, numbers = parse_step_dir(rest.partition("/")[0]), parse_attempt_dir(rest.partition("/")[2])
    return CommitId(step, *numbers) if top == CHECKPOINTS and step is not None and numbers is not None else None


def node_of(name: str) -> int | None:
    """Return which node wrote a file of a checkpoint, by the file's name; None for what is no node's own."""
    found = parse_pack(name)
    if found is not None:
        return found[0]
    record = parse_node_record(name)
    return record if record is not None else parse_node_objects(name)


def is_file(path: str) -> bool:
    """Whether this is the path of a file that this library writes into a run directory."""
    if path == RUN_JSON:
        return True
    directory, _, name = path.rpartition("/")
    parsers: dict[str, Callable[[str], object]] = {
        INCARNATIONS: parse_incarnation,
        PLANS: parse_plan,
        QUARANTINES: parse_quarantine,
        PINS: parse_pin,
        LEASES: parse_lease,
        REPLICATIONS: parse_replication,
    }
    if directory in parsers:
        return parsers[directory](name) is not None
    known = name == MANIFEST or node_of(name) is not None or is_redundancy(name) or parse_tombstone(name) is not None
    return known and parse_checkpoint_dir(directory) is not None


def node_record(node: int) -> str:
    """Return the file name of a node's record."""
    return f"node-{_check(node):05d}.json"


def parse_node_record(name: str) -> int | None:
    """Read the node from the file name of its record."""
    return _one(_NODE_RECORD.fullmatch(name), 5)


def node_objects(node: int) -> str:
    """Return the file name of the objects of a node's ranks."""
    return f"node-{_check(node):05d}.objects"


def parse_node_objects(name: str) -> int | None:
    """Read the node from the file name of its objects."""
    return _one(_NODE_OBJECTS.fullmatch(name), 5)


def redundancy_record(node: int) -> str:
    """Return the file name of a node's record of the redundancy that it holds for its set."""
    return f"redundancy-{_check(node):05d}.json"


def parse_redundancy_record(name: str) -> int | None:
    """Read the node from the file name of its redundancy record."""
    return _one(_REDUNDANCY_RECORD.fullmatch(name), 5)


def redundancy_share(node: int, row: int) -> str:
    """Return the file name of a share: the node that holds it, and which of its parity rows or copies it is."""
    return f"redundancy-{_check(node):05d}.{_check(row)}"


def parse_redundancy_share(name: str) -> tuple[int, int] | None:
    """Read (node, row) from the file name of a share."""
    numbers = _all(_REDUNDANCY_SHARE.fullmatch(name), (5, 1))
    return None if numbers is None else (numbers[0], numbers[1])


def is_redundancy(name: str) -> bool:
    """Whether a file name is one of `redundancy_record` or `redundancy_share`."""
    return parse_redundancy_record(name) is not None or parse_redundancy_share(name) is not None


def tombstone(incarnation: int) -> str:
    """Return the file name of the tombstone that an incarnation lays beside a manifest."""
    return f"tombstone-{_check(incarnation)}.json"


def parse_tombstone(name: str) -> int | None:
    """Read the incarnation from the file name of a tombstone."""
    return _one(_TOMBSTONE.fullmatch(name), 1)


def quarantine(commit: CommitId) -> str:
    """Return the path of the quarantine record of a checkpoint."""
    return f"{QUARANTINES}/{_check(commit.step):09d}-{attempt_dir(commit.incarnation, commit.attempt)}.json"


def parse_quarantine(name: str) -> CommitId | None:
    """Read the checkpoint from the file name of a quarantine record."""
    numbers = _all(_QUARANTINE.fullmatch(name), (9, 1, 1))
    return None if numbers is None else CommitId(*numbers)


def pin(step: int) -> str:
    """Return the path of the record that pins a step."""
    return f"{PINS}/{_check(step):09d}.json"


def parse_pin(name: str) -> int | None:
    """Read the step from the file name of a pin."""
    return _one(_PIN.fullmatch(name), 9)


def lease(step: int, reader: str) -> str:
    """Return the path of a reader's lease on a step; the reader's id has 32 hex digits.

    Raises:
        ValueError: `reader` is no such id.
    """
    if not _READER.fullmatch(reader):
        raise ValueError("a reader's id is 32 lower-case hex digits")
    return f"{LEASES}/{_check(step):09d}-{reader}.json"


def parse_lease(name: str) -> tuple[int, str] | None:
    """Read (step, reader's id) from the file name of a lease."""
    match = _LEASE.fullmatch(name)
    step = _number(match[1], 9) if match is not None else None
    return None if match is None or step is None else (step, match[2])


def replication(commit: CommitId, number: int) -> str:
    """Return the path of the record that a replication of a checkpoint keeps in the directory that it writes to."""
    attempt = attempt_dir(commit.incarnation, commit.attempt)
    return f"{REPLICATIONS}/{_check(commit.step):09d}-{attempt}.{_check(number)}.json"


def parse_replication(name: str) -> tuple[CommitId, int] | None:
    """Read the checkpoint and the number from the file name of a replication's record."""
    numbers = _all(_REPLICATION.fullmatch(name), (9, 1, 1, 1))
    return None if numbers is None else (CommitId(*numbers[:3]), numbers[3])


def replication_share(commit: CommitId, number: int, node: int) -> str:
    """Return the path of what one node of a job notes of a replication that several nodes carry out."""
    return f"{replication(commit, number).removesuffix('.json')}.node-{_check(node):05d}.json"


def parse_replication_share(name: str) -> tuple[CommitId, int, int] | None:
    """Read checkpoint, number and node from the file name of a node's note."""
    numbers = _all(_REPLICATION_SHARE.fullmatch(name), (9, 1, 1, 1, 5))
    return None if numbers is None else (CommitId(*numbers[:3]), numbers[3], numbers[4])


def _check(number: int) -> int:
    if not 0 <= number <= MAX_NUMBER:
        raise ValueError(f"{number} cannot be part of a path: it must lie between 0 and {MAX_NUMBER}")
    return int(number)


def _number(digits: str, width: int) -> int | None:
    """Read a number written with at least `width` digits; None where another spelling would be the exact one."""
    number = int(digits)
    return number if number <= MAX_NUMBER and digits == f"{number:0{width}d}" else None


def _all(match: re.Match[str] | None, widths: tuple[int, ...]) -> tuple[int, ...] | None:
    if match is None:
        return None
    found = []
    for digits, width in zip(match.groups(), widths, strict=True):
        number = _number(digits, width)
        if number is None:
            return None
        found.append(number)
    return tuple(found)


def _one(match: re.Match[str] | None, width: int) -> int | None:
    numbers = _all(match, (width,))
    return None if numbers is None else numbers[0]
