"""Every file of a run directory damaged, cut, swapped, stale, missing, replaced: found and named, or of no account.

Whatever happens to one file, `safehold.load` gives exactly the bytes of some committed step, or an error that names
the file; where the newest is hurt, an older one is used and the log says why.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from damaged_runs import KINDS, NEWEST, OF_THE_NEWEST, equal, expected, files, load, numpy_kind, tensors_of
from run_dirs import RunDir

import safehold
from safehold.errors import CheckpointError, IntegrityError, StepNotFoundError
from safehold.format import document, paths
from safehold.pipeline import ledger
from safehold.pipeline.catalog import Catalog, find_restore_candidate
from safehold.pipeline.verify import verify
from safehold.tiers.open import open_tier
from safehold.types import CommitId


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is missing here stays so."""
    for function in (Catalog.__init__, find_restore_candidate):
        monkeypatch.setitem(function.__kwdefaults__, "patience_s", 0.0)


def swap(file: Path, other: Path) -> None:
    if "another" in str(other):
        file.write_bytes(other.read_bytes())
        return
    data = file.read_bytes()
    file.write_bytes(other.read_bytes())
    other.write_bytes(data)


def to_directory(file: Path, other: Path) -> None:
    file.unlink()
    file.mkdir()
    (file / "inside").write_text("x")


def to_link(file: Path, other: Path) -> None:
    moved = file.with_name(f"moved-{file.name}")
    file.rename(moved)
    file.symlink_to(moved)


def edit(change: Callable[[bytes], bytes]) -> Callable[[Path, Path], None]:
    return lambda file, _: (file.write_bytes(change(file.read_bytes())), None)[1]


DAMAGES: dict[str, Callable[[Path, Path], None]] = {
    "half": edit(lambda data: data[: len(data) // 2]),
    "one byte less": edit(lambda data: data[:-1]),
    "empty": edit(lambda data: b""),
    "one byte more": edit(lambda data: data + b"\n"),
    "zeros": edit(lambda data: bytes(len(data))),
    "foreign": edit(lambda data: b"PK\x03\x04 some archive"),
    "foreign of the same size": edit(lambda data: random.Random(1).randbytes(len(data))),
    "another kind": edit(lambda data: document.seal("other", {"a": 1})),
    "swapped": swap,
    "stale": lambda file, other: (file.write_bytes(other.read_bytes()), None)[1],
    "missing": lambda file, _: file.unlink(),
    "directory": to_directory,
    "link": to_link,
    "dangling link": lambda file, _: (file.unlink(), file.symlink_to("nowhere"), None)[2],
}


def judge(root: Path, kind: str, name: str, log: pytest.LogCaptureFixture, *also: str) -> None:
    """Assert what may follow from one hurt file (or two, if they were swapped)."""
    found, said = load(root, log)
    base = name.rpartition("/")[2]
    seen = (root / name).is_file() and not (root / name).is_symlink()  # links are not seen
    if isinstance(found, CheckpointError):
        assert kind == "run" and base in str(found), f"{kind}: {found}"
        return
    step = found["step"]
    assert step in (10, 20, 30, 40) and equal(found, expected(step)), f"{kind}: other bytes for step {step}"
    report = verify(open_tier(root), NEWEST, threads=1) if kind != "run" else None
    if kind in OF_THE_NEWEST:
        assert step == 10, f"{kind}: step {step} was used"  # 30 is un-committed, 20 quarantined
        assert report is not None and any(fault.path.endswith(name) for fault in report.faults), report
        if base == "manifest.json" and not seen and not (root / name).is_dir():
            return  # without a manifest there is no checkpoint, and nothing to say
        assert "step 40 cannot be used" in said and any(word in said for word in (base, *also)), said
        with pytest.raises(IntegrityError) as caught:
            safehold.load(root, step=40)
        assert any(word in str(caught.value) for word in (base, *also)) and caught.value.step == 40
    else:
        assert step == 40, f"{kind}: step {step} was used; {said}"
        if kind.startswith("incarnation") or kind in ("run", "pin", "quarantine", "tombstone"):
            absent = (
                not seen and not (root / name).is_dir() and kind in ("pin", "quarantine", "tombstone", "incarnation 1")
            )
            assert base in said or absent, f"{kind}: nothing was said"


@pytest.mark.parametrize("kind", KINDS)
def test_any_damage_is_named_or_of_no_account(
    original: Path, root: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    name, other = files(root)[kind]
    for damage, hurt in DAMAGES.items():
        copy = root.parent / damage / "run"
        shutil.copytree(root, copy)
        shutil.copytree(original.parent / "another", copy.parent / "another")
        hurt(copy / name, copy / other)
        try:
            judge(copy, kind, name, caplog, *([other.rpartition("/")[2]] if damage == "swapped" else []))
        except BaseException as exc:
            exc.add_note(f"damage: {damage}")
            raise


def flip_bits(root: Path, kind: str, caplog: pytest.LogCaptureFixture, num_places: int, seed: int) -> None:
    name, _ = files(root)[kind]
    data, rng = (root / name).read_bytes(), random.Random(f"{seed} {kind}")
    for offset in {0, len(data) - 1, *(rng.randrange(len(data)) for _ in range(num_places))}:
        hurt = bytearray(data)
        hurt[offset] ^= 1 << rng.randrange(8)
        (root / name).write_bytes(hurt)
        try:
            judge(root, kind, name, caplog)
        except BaseException as exc:
            exc.add_note(f"bit {hurt[offset] ^ data[offset]:#x} of byte {offset} of {len(data)}, seed {seed}")
            raise
    (root / name).write_bytes(data)
    assert safehold.load(root)["step"] == 40


@pytest.mark.parametrize("kind", KINDS)
def test_flipped_bits(root: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    flip_bits(root, kind, caplog, 6, 0)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_many_flipped_bits(root: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    for seed in range(1, 20):
        flip_bits(root, kind, caplog, 40, seed)


def test_the_whole_is_whole(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    found, said = load(root, caplog)
    assert equal(found, expected(40)) and not said
    assert equal(safehold.load(root, step=10), expected(10))
    assert equal(safehold.load(root, step=20), expected(20))
    with pytest.raises(StepNotFoundError):
        safehold.load(root, step=30)


def test_foreign_files_anywhere_do_no_harm(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    newest = root / paths.checkpoint_dir(NEWEST)
    for directory in (
        root,
        root / "incarnations",
        root / "plans",
        root / "checkpoints",
        root / "pins",
        newest,
        newest.parent,
    ):
        (directory / "notes.txt").write_text("mine")
        (directory / "00000-00099.0.safetensors.bak").write_bytes(b"x")
        (directory / ".tmp-12-ab").write_bytes(b"x")
        (directory / "999999999999999999999.json").write_bytes(b"x")
        (directory / "backup").mkdir()
    shutil.copytree(newest, newest.parent / "2-0.backup")
    shutil.copytree(newest.parent, root / "checkpoints" / "000000099.old")
    found, said = load(root, caplog)
    assert equal(found, expected(40)) and not said
    report = verify(open_tier(root), NEWEST)
    assert report.ok and report.notes


def test_a_whole_checkpoint_copied_under_another_name_is_not_taken_for_it(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(root / paths.checkpoint_dir(NEWEST), root / paths.checkpoint_dir(CommitId(50, 2, 0)))
    found, said = load(root, caplog)
    assert equal(found, expected(40)) and "step 50 cannot be used" in said and "manifest of step 40" in said


def test_all_incarnations_lost(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Never taken for an empty run."""
    shutil.rmtree(root / "incarnations")
    found, said = load(root, caplog)
    assert equal(found, expected(40)) and "incarnations/2.json" in said
    opened = ledger.open_incarnation(open_tier(root), "t")
    assert opened.record.number == 3 and CommitId(40, 2, 0) in opened.accepted


def test_the_newest_incarnation_lost(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    (root / "incarnations" / "2.json").unlink()
    found, said = load(root, caplog)
    assert equal(found, expected(40)) and "incarnations/2.json" in said
    opened = ledger.open_incarnation(open_tier(root), "t")
    assert opened.record.number == 3
    assert [commit.step for commit in opened.accepted] == [40, 20, 10]


def test_a_run_json_of_another_run_is_told_and_never_taken_for_an_empty_run(original: Path, root: Path) -> None:
    shutil.copy(original.parent / "another" / "run.json", root / "run.json")
    for action in (
        lambda: safehold.load(root),
        lambda: find_restore_candidate(open_tier(root)),
        lambda: ledger.open_incarnation(open_tier(root), "t"),
        lambda: safehold.save(root, {"a": 1}, step=99),
    ):
        with pytest.raises(IntegrityError) as caught:
            action()
        assert caught.value.path == "run.json" and caught.value.hint


def test_a_plan_that_several_share_heals_with_the_next_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = RunDir(tmp_path / "run")
    for step in (1, 2):
        run.save(step, numpy_kind(tensors_of(10)))
    (plan,) = (run.root / "plans").iterdir()
    plan.write_bytes(plan.read_bytes()[:-5])
    found, said = load(run.root, caplog)
    assert isinstance(found, CheckpointError) and plan.name in said
    run.open()
    run.save(3, numpy_kind(tensors_of(10)))
    assert [safehold.load(run.root, step=step)["step"] for step in (1, 2, 3)] == [1, 2, 3]
