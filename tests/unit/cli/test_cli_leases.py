"""Readers' leases on the command line: shown by ls, heeded by rm and gc unless somebody knows better."""

from __future__ import annotations

from run_dirs import RunDir

from safehold.format import paths, records
from safehold.pipeline import ledger
from safehold.pipeline.catalog import Catalog
from safehold.types import CommitId


def put(run: RunDir, commit: CommitId, host: str = "node7") -> str:
    lease = records.Lease(
        commit=commit, reader="0a" * 16, host=host, pid=42, lease_s=600.0, renewals=0, created_s=run.now_s
    )
    path = paths.lease(commit.step, lease.reader)
    run.tier.put(path, records.encode_lease(lease))
    return path


def steps(run: RunDir) -> list[int]:
    return [view.commit.step for view in Catalog(run.tier).commits()]


def there(run: RunDir) -> list[int]:
    return sorted({commit.step for commit in Catalog(run.tier).listing().attempts})


def test_ls_shows_it(run: RunDir, safehold):
    old, new, gone = run.save(10), run.save(10, attempt=1), run.save(20)
    ledger.uncommit(run.tier, 20, incarnation=1, reason="x", clock=run)
    put(run, new)
    put(run, gone)
    assert [line.count("leased") for line in safehold("ls", run.root).out.splitlines()] == [0, 1]
    assert [entry["leased"] for entry in safehold("ls", run.root, "--json").json] == [True]
    found = safehold("ls", run.root, "--all", "--json").json
    assert {(e["step"], e["attempt"]): e["leased"] for e in found} == {(20, 0): True, (10, 1): True, (10, 0): False}
    assert old.attempt == 0


def test_rm_refuses_what_is_read_and_says_by_whom(run: RunDir, safehold):
    commit = run.save(10)
    run.save(20)
    path = put(run, commit, "evil\x1b[31mhost")
    done = safehold("rm", run.root, 10)
    assert done.code == 2 and steps(run) == [20, 10] and "\x1b" not in done.err
    assert "step 10" in done.err and "process 42 on evil" in done.err and path in done.err and "--force" in done.err
    assert safehold("rm", run.root, 20).code == 0, "the other one may go"


def test_rm_refuses_a_step_of_which_an_earlier_attempt_is_read(run: RunDir, safehold):
    old = run.save(10)
    run.save(10, attempt=1)
    run.save(20)
    put(run, old)
    assert safehold("rm", run.root, 10, "--now").code == 2 and there(run) == [10, 20]


def test_rm_names_a_lease_that_cannot_be_read(run: RunDir, safehold):
    run.save(10)
    run.save(20)
    path = put(run, CommitId(10, 1, 0))
    (run.root / path).write_bytes(b"x")
    done = safehold("rm", run.root, 10)
    assert done.code == 2 and "cannot be read" in done.err and path in done.err


def test_force_uncommits_and_leaves_the_bytes_to_the_reader(run: RunDir, safehold):
    commit = run.save(10)
    run.save(20)
    path = put(run, commit)
    assert safehold("rm", run.root, 10, "--force").code == 0
    assert steps(run) == [20] and there(run) == [10, 20]
    found = safehold("gc", run.root, "--grace-s", 0, "--json").json
    assert found["attempts"] == [] and found["files"] == [] and there(run) == [10, 20]
    dry = safehold("gc", run.root, "--grace-s", 0, "--ignore-leases", "--dry-run", "--json").json
    found = safehold("gc", run.root, "--grace-s", 0, "--ignore-leases", "--json").json
    assert found["files"] == dry["files"] == [path] and [e["step"] for e in found["attempts"]] == [10]
    assert there(run) == [20] and not (run.root / path).exists()


def test_force_and_now_delete_under_the_hands_of_the_reader(run: RunDir, safehold):
    commit = run.save(10)
    run.save(20)
    put(run, commit)
    assert safehold("rm", run.root, 10, "--force", "--now", "--json").json["freed_bytes"] > 0
    assert there(run) == [20]


def test_gc_takes_leases_that_are_on_nothing(run: RunDir, safehold):
    run.save(20)
    path = put(run, CommitId(10, 1, 0))
    assert safehold("gc", run.root, "--dry-run", "--json").json["files"] == [path]
    assert safehold("gc", run.root, "--json").json["files"] == [path]
    assert not (run.root / path).exists()
