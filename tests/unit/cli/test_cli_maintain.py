"""verify, rm, pin, unpin, gc: they do what they say, refuse what would hurt, and leave nothing half done."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from run_dirs import RunDir, flip

from safehold.errors import StorageError
from safehold.format import paths
from safehold.host import runtime
from safehold.pipeline import ledger
from safehold.pipeline.catalog import Catalog, find_restore_candidate
from safehold.testing.fake_tier import FakeTier
from safehold.types import CommitId


def steps(run: RunDir) -> list[int]:
    return [view.commit.step for view in Catalog(run.tier).commits()]


def there(run: RunDir) -> list[int]:
    return sorted({commit.step for commit in Catalog(run.tier).listing().attempts})


def test_verify(run: RunDir, safehold):
    run.save(10)
    bad = run.save(20)
    assert safehold("verify", run.root).code == 0
    flip(run.path(bad, "00000-00000.0.safetensors"), 100)
    done = safehold("verify", run.root, "--all")
    assert done.code == 6 and "step 10: ok" in done.out and "step 20: 1 fault\n" in done.out
    assert done.out.endswith("verified 2 of 2 checkpoints, 1 damaged\n")
    assert "checkpoints/000000020/1-0/00000-00000.0.safetensors: block 0" in done.out
    assert done.err == "" and safehold("verify", run.root, 10).code == 0
    newest, older = safehold("verify", run.root, "--all", "--json").json
    assert older["ok"] and not newest["ok"] and newest["faults"][0]["block"] == 0 and newest["faults"][0]["rank"] == 0
    assert safehold("verify", run.root, 10, "--all").code == 2
    assert safehold("verify", run.root, 30).code == 4


def test_verify_says_how_many_it_read_and_how_to_read_the_others(run: RunDir, safehold):
    run.save(10)
    done = safehold("verify", run.root)
    assert done.out.endswith("verified 1 of 1 checkpoint\n") and done.err == ""
    run.save(20)
    done = safehold("verify", run.root)
    assert done.out.startswith("step 20: ok") and done.out.endswith("verified 1 of 2 checkpoints\n")
    assert done.err == f"hint: only the newest was read; 'safehold verify {run.root} --all' reads all\n"
    done = safehold("verify", run.root, "--all")
    assert done.out.endswith("verified 2 of 2 checkpoints, all whole\n") and done.err == ""
    for arguments in ((10,), ("latest",), ("--json",)):
        done = safehold("verify", run.root, *arguments)
        assert "verified" not in done.out and done.err == ""


def test_verify_marks_and_clears(run: RunDir, safehold):
    run.save(10)
    bad = run.save(20)
    file = run.path(bad, "00000-00000.0.safetensors")
    flip(file, 100)
    safehold("verify", run.root)
    assert not Catalog(run.tier).snapshot().quarantined
    assert safehold("verify", run.root, "--mark").code == 6
    assert "block 0" in Catalog(run.tier).snapshot().quarantined[bad].reason
    assert find_restore_candidate(run.tier, clock=run).checkpoint.commit.step == 10
    flip(file, 100)
    done = safehold("verify", run.root)
    assert done.code == 0 and "quarantined and whole" in done.err
    assert safehold("verify", run.root, "--mark").code == 0
    assert not Catalog(run.tier).snapshot().quarantined


def test_rm(run: RunDir, safehold):
    for step in (10, 20, 30):
        run.save(step)
    done = safehold("rm", run.root, 10, 20, 10, "--json")
    assert done.json == {"removed": [10, 20], "freed_bytes": 0}
    assert steps(run) == [30] and there(run) == [10, 20, 30]
    assert safehold("rm", run.root, 10).code == 4
    done = safehold("gc", run.root)
    assert "freed 0 B" in done.out and there(run) == [10, 20, 30]
    done = safehold("gc", run.root, "--grace-s", 0, "--dry-run")
    assert "would delete step 10, attempt 1-0" in done.out and there(run) == [10, 20, 30]
    assert len(safehold("gc", run.root, "--grace-s", 0, "--json").json["attempts"]) == 2
    assert there(run) == [30]


def test_damaged_redundancy_is_no_reason_for_a_quarantine(run: RunDir, safehold):
    commit = run.save(10)
    run.path(commit, paths.redundancy_record(0)).write_bytes(b"damaged")
    done = safehold("verify", run.root, "--mark", "--json")
    assert done.code == 6 and [fault["redundancy"] for fault in done.json[0]["faults"]] == [True]
    assert not Catalog(run.tier).snapshot().quarantined


@pytest.mark.parametrize("verb", ["rm", "pin", "unpin"])
@pytest.mark.parametrize("step", ["1_0", " 10", "latest", "+10", "1e1"])
def test_what_changes_a_checkpoint_wants_its_number(run: RunDir, safehold, verb: str, step: str):
    run.save(10)
    run.save(20)
    done = safehold(verb, run.root, step)
    assert done.code == 2 and "is no step; give a number" in done.err and steps(run) == [20, 10]


def test_rm_now(run: RunDir, safehold):
    run.save(10, attempt=0)
    run.save(10, attempt=1)
    run.save(20)
    found = safehold("rm", run.root, 10, "--now", "--json").json
    assert found["removed"] == [10] and found["freed_bytes"] > 0
    assert there(run) == [20] and steps(run) == [20]


def test_rm_refuses_pinned_ones_and_the_last_good_one(run: RunDir, safehold):
    for step in (10, 20, 30):
        run.save(step)
    assert safehold("pin", run.root, 10, "--note", "for the paper").code == 0
    done = safehold("rm", run.root, 10, 20, "--force")
    assert (
        done.code == 2 and "pinned (for the paper)" in done.err and "unpin" in done.err and steps(run) == [30, 20, 10]
    )
    assert safehold("unpin", run.root, 10).code == 0
    done = safehold("rm", run.root, 10, 20, 30)
    assert done.code == 2 and "no good checkpoint would be left" in done.err and steps(run) == [30, 20, 10]
    # What is left must be good: of the others one is damaged, one quarantined.
    run.path(CommitId(10, 1, 0), "00000-00000.0.safetensors").unlink()
    ledger.put_quarantine(run.tier, CommitId(20, 1, 0), incarnation=1, reason="x", clock=run)
    done = safehold("rm", run.root, 30)
    assert done.code == 2 and "quarantined" in done.err and "missing" in done.err and "--force" in done.err
    assert safehold("rm", run.root, 10).code == 0
    assert safehold("rm", run.root, 20, 30, "--force").code == 0
    assert steps(run) == []


def test_rm_of_a_damaged_one(run: RunDir, safehold):
    bad = run.save(10)
    run.save(20)
    flip(run.path(bad, "manifest.json"))
    assert safehold("rm", run.root, 10).code == 0 and steps(run) == [20]


def test_rm_beside_a_job_that_starts(run: RunDir, safehold, monkeypatch):
    """The new incarnation has seen the checkpoint and not the tombstone: it keeps it, and rm says so."""
    run.save(10)
    run.save(20)
    real = ledger.uncommit

    def late(*args, **options):
        run.open()
        return real(*args, **options)

    monkeypatch.setattr(ledger, "uncommit", late)
    done = safehold("rm", run.root, 10)
    assert done.code == 9 and "accepted the checkpoint again" in done.err and steps(run) == [20, 10]


def test_pin_and_unpin(run: RunDir, safehold):
    run.save(10)
    assert safehold("pin", run.root, 20).code == 4
    assert safehold("pin", run.root, 10, 20).code == 4 and not Catalog(run.tier).snapshot().pins
    assert safehold("pin", run.root, 10, "--json").json == {"pinned": [10]}
    assert safehold("pin", run.root, 10).out == "pinned 10\n"
    assert safehold("unpin", run.root, 20).code == 4
    assert safehold("unpin", run.root, 10, "--json").json == {"pinned": []}


def test_gc_spares_a_running_job(run: RunDir, safehold):
    dead = run.save(10, publish=False)
    run.open()
    run.save(20)
    live = run.save(30, publish=False)
    assert safehold("gc", run.root).code == 0
    assert not run.path(dead).exists() and run.path(live).exists()
    slot = runtime.open_slot(run.root)
    with slot.lock():
        done = safehold("gc", run.root, "--job-ended")
        assert done.code == 2 and "agent" in done.err and run.path(live).exists()
    assert safehold("gc", run.root, "--job-ended", "--dry-run").code == 0 and run.path(live).exists()
    assert safehold("gc", run.root, "--job-ended").code == 0 and not run.path(live).exists()
    assert steps(run) == [20]


@pytest.mark.parametrize("seconds", ["nan", "inf", "-1"])
def test_gc_refuses_a_grace_time_that_is_none(run: RunDir, safehold, seconds: str):
    assert safehold("gc", run.root, "--grace-s", seconds).code == 2


@pytest.mark.parametrize("elsewhere", [False, True])
def test_gc_finds_an_agent_in_another_slot_or_runtime_directory(
    run: RunDir, safehold, tmp_path, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
):
    run.open()
    live = run.save(30, publish=False)
    place = None
    if elsewhere:
        place = tmp_path / "other"
        place.mkdir(mode=0o700)
        monkeypatch.delenv("SAFEHOLD_RUNTIME_DIR", raising=False)
        (tmp_path / "usual").mkdir(mode=0o700)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "usual"))
        monkeypatch.setenv("SAFEHOLD_CONFIG", str(tmp_path / "settings.toml"))
        (tmp_path / "settings.toml").write_text(f'runtime_dir = "{place}"\n')
    slot = runtime.open_slot(f"{run.root}#3", directory=place)
    with slot.lock():
        info = runtime.AgentInfo(pid=1, start_ticks=1, version="1", run=str(run.root), started_s=1.0)
        slot.write_info(info)
        done = safehold("gc", run.root, "--job-ended")
        assert done.code == 2 and "agent" in done.err and run.path(live).exists()
        assert [entry["run"] for entry in safehold("agents", "--json").json] == [str(run.root)]
    assert safehold("gc", run.root, "--job-ended").code == 0 and not run.path(live).exists()


def snapshot_of(root) -> dict[str, tuple[int, int]]:
    return {str(f): (f.stat().st_mtime_ns, f.stat().st_size) for f in root.rglob("*")}


READING = [("ls",), ("ls", "--all"), ("show",), ("show", "10", "--leaves"), ("verify", "--all"), ("cat", "10", "sched"),
           ("diff", "10", "20"), ("gc", "--dry-run")]  # fmt: skip


@pytest.mark.parametrize("command", READING, ids=[" ".join(c) for c in READING])
def test_what_reads_writes_nothing(run: RunDir, safehold, command):
    run.save(10)
    run.save(20)
    before = snapshot_of(run.root)
    assert safehold(command[0], run.root, *command[1:]).code == 0
    assert snapshot_of(run.root) == before


def test_read_only_directory(run: RunDir, safehold, monkeypatch):
    """As root every mode is writable, so the storage refuses."""
    run.save(10)
    run.save(20)

    def read_only(text, **options):
        tier = FakeTier(run.tier)
        for kind in ("put", "delete", "delete_tree", "create_pack", "make_directory", "sweep_temporaries"):
            tier.fail(kind, times=-1, error=OSError(30, os.strerror(30)))
        return tier

    monkeypatch.setattr("safehold.cli.opening.open_tier", read_only)
    for command in READING:
        assert safehold(command[0], run.root, *command[1:]).code == 0
    for command in (("rm", "10"), ("pin", "10"), ("gc",)):
        done = safehold(command[0], run.root, *command[1:])
        assert done.code == 7 and "EROFS" in done.err and "Traceback" not in done.err
    assert steps(run) == [20, 10]


@pytest.mark.parametrize("error", [StorageError("boom"), KeyboardInterrupt()], ids=["fails", "Ctrl-C"])
def test_rm_cut_short_anywhere_leaves_a_whole_run(run: RunDir, safehold, monkeypatch, error):
    for step in (10, 20, 30):
        run.save(step)
    for at in range(0, 300, 3):
        left = [step for step in steps(run) if step < 30]  # one of the two may have gone already
        if not left:
            break
        tier = FakeTier(run.tier)
        tier.fail("*", at=at, error=error)
        monkeypatch.setattr("safehold.cli.opening.open_tier", lambda text, tier=tier, **options: tier)
        done = safehold("rm", run.root, *left, "--now")
        assert done.code in (0, 130 if isinstance(error, KeyboardInterrupt) else 7)
        assert steps(run)[0] == 30
        assert find_restore_candidate(run.tier, clock=run).checkpoint.commit.step == 30
    assert steps(run) == [30]


@pytest.mark.parametrize(
    ("number", "exit_code", "kind", "arguments"),
    [
        (signal.SIGINT, 130, "get", ["ls"]),
        (signal.SIGTERM, 143, "get", ["ls"]),
        (signal.SIGINT, 130, "read_into", ["verify", "--all"]),
        (signal.SIGINT, 130, "read_into", ["cat", "10", "model.emb.weight", "-o", "out.npy"]),
        (signal.SIGINT, 130, "delete_tree", ["gc"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_interrupted_for_real(run: RunDir, tmp_path, number, exit_code, kind, arguments):
    """What hangs in storage is ended by Ctrl-C with 130, by SIGTERM with 143; no traceback, and nothing half done."""
    run.save(10)
    run.save(20, publish=False)
    run.open()
    before = sorted(run.root.rglob("*"))
    code = (
        "import sys, safehold.cli.opening as o, safehold.testing.fake_tier as f, threading\n"
        "real = o.open_tier\n"
        "def slow(text, **options):\n"
        "    tier = f.FakeTier(real(text, **options)); tier.slow(sys.argv[1], 30.0)\n"
        "    act = tier._clock.sleep\n"
        "    def sleep(seconds): print('ready', file=sys.stderr, flush=True); act(seconds)\n"
        "    tier._clock = type('C', (), {'sleep': staticmethod(sleep)})()\n"
        "    return tier\n"
        "o.open_tier = slow\n"
        "from safehold.cli.main import main\n"
        "sys.exit(main(sys.argv[2:]))\n"
    )
    command = [sys.executable, "-c", code, kind, arguments[0], str(run.root), *arguments[1:]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        assert process.stderr is not None and process.stderr.readline() == "ready\n"
        process.send_signal(number)
        rest = process.stderr.read()
        assert process.wait(10) == exit_code and "Traceback" not in rest
    assert sorted(run.root.rglob("*")) == before and os.listdir(tmp_path) == ["run"]


def test_broken_pipe(run: RunDir):
    run.save(10)
    code = "import sys; from safehold.cli.main import main; sys.exit(main(sys.argv[1:]))"
    arguments = [sys.executable, "-c", code, "show", str(run.root), "10", "--json"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == "" and process.wait(30) == 141


def test_quarantine_path_is_only_shown(run: RunDir, safehold):
    commit = run.save(10)
    ledger.put_quarantine(run.tier, commit, incarnation=1, reason="r", path="../../etc/passwd", clock=run)
    assert safehold("ls", run.root).code == 0 and (run.root / paths.quarantine(commit)).is_file()


@pytest.mark.parametrize("command", [("verify",), ("diff", "10", "20")], ids=["bytes", "leaves"])
def test_progress_is_shown_on_a_terminal_only(run: RunDir, command):
    run.save(10)
    run.save(20)
    code = "import sys; from safehold.cli.main import main; sys.exit(main(sys.argv[1:]))"
    ours, theirs = os.openpty()
    try:
        arguments = [sys.executable, "-c", code, command[0], str(run.root), *command[1:]]
        done = subprocess.run(arguments, stdout=subprocess.PIPE, stderr=theirs, env={**os.environ, "TERM": "xterm"})
    finally:
        os.close(theirs)
    shown = os.read(ours, 1 << 16)
    os.close(ours)
    assert done.returncode == 0 and b"\x1b" in shown and b"Traceback" not in shown and b"\x1b" not in done.stdout
