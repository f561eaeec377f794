"""replicate, fetch, status: what they do, say, refuse, and leave when they are stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from run_dirs import RunDir, flip

from safehold.format import paths
from safehold.pipeline import ledger
from safehold.pipeline.catalog import Catalog, find_restore_candidate
from safehold.pipeline.verify import verify
from safehold.policy import belief
from safehold.tiers.open import open_tier


@pytest.fixture
def there(tmp_path: Path) -> Path:
    return tmp_path / "there"


def steps(root: Path) -> list[int]:
    return [commit.step for commit in belief.believed(Catalog(open_tier(root)).listing())]


def test_replicate_takes_the_newest(run: RunDir, there: Path, safehold):
    for step in (10, 20):
        run.save(step)
    done = safehold("replicate", run.root, "--to", there)
    assert done.code == 0 and done.err == "" and done.out.startswith("step 20: sent ")
    assert f"to file://{there}" in done.out and steps(there) == [20]
    assert safehold("replicate", run.root, "--to", there).out == "step 20: is there already\n"
    assert safehold("verify", there).code == 0
    assert "20" in safehold("ls", there).out


def test_replicate_steps_and_all(run: RunDir, there: Path, safehold):
    for step in (10, 20, 30):
        run.save(step)
    assert safehold("replicate", run.root, 10, "--to", there).code == 0 and steps(there) == [10]
    done = safehold("replicate", run.root, "--all", "--to", f"file://{there}", "--json")
    assert [entry["step"] for entry in done.json["checkpoints"]] == [30, 20] and steps(there) == [30, 20, 10]
    assert all(entry["sent_bytes"] > 0 and not entry["was_there"] for entry in done.json["checkpoints"])
    assert done.json["removed"] == [] and done.json["freed_bytes"] == 0
    assert safehold("replicate", run.root, 10, "--all", "--to", there).code == 2
    assert safehold("replicate", run.root, 40, "--to", there).code == 4


def test_replicate_keeps_what_it_is_told(run: RunDir, there: Path, safehold):
    for step in (10, 20, 30, 40):
        run.save(step)
    ledger.put_pin(run.tier, 10)
    done = safehold("replicate", run.root, "--all", "--keep", 2, "--to", there)
    assert done.code == 0 and steps(there) == [40, 30, 10]
    run.save(50)
    done = safehold("replicate", run.root, "--keep", 2, "--to", there, "--json")
    assert done.json["removed"] == [30] and steps(there) == [50, 40, 10] and steps(run.root) == [50, 40, 30, 20, 10]
    # What was asked for by name stays, for now.
    safehold("replicate", run.root, 20, "--keep", 1, "--to", there)
    assert steps(there) == [50, 20, 10]
    assert safehold("replicate", run.root, "--keep", 0, "--to", there).code == 2


def test_a_damaged_checkpoint_does_not_keep_the_others(run: RunDir, there: Path, safehold):
    run.save(10)
    bad = run.save(20)
    run.save(30)
    flip(run.path(bad, "00000-00000.0.safetensors"), 100)
    done = safehold("replicate", run.root, "--all", "--keep", 1, "--to", there)
    assert done.code == 0 and steps(there) == [30]
    done = safehold("replicate", run.root, "--all", "--to", there)
    assert done.code == 6 and "step 10: sent" in done.out and steps(there) == [30, 10]
    assert "checkpoints/000000020/1-0/00000-00000.0.safetensors" in done.err and "block 0" in done.err
    done = safehold("replicate", run.root, 20, "--to", there, "--json")
    assert done.code == 6 and '"class": "ChecksumError"' in done.err and done.out == ""


def test_another_run_is_refused(run: RunDir, there: Path, safehold):
    run.save(10)
    RunDir(there).save(10)
    for command in ("replicate", "status"):
        done = safehold(command, run.root, "--to", there)
        assert done.code == 2 and "another run" in done.err
    assert safehold("fetch", there, "--to", run.root).code == 2
    assert safehold("replicate", there / "nothing", "--to", run.root).code == 2
    assert safehold("replicate", run.root, "--to", run.root).code == 2


@pytest.mark.parametrize("rate", ["0", "-1", "fast", "10 parsecs", "1e9"])
def test_rates_that_make_no_sense(run: RunDir, there: Path, safehold, rate: str):
    run.save(10)
    done = safehold("replicate", run.root, "--to", there, "--rate", rate)
    assert done.code == 2 and not there.exists()


def test_a_rate_is_kept(run: RunDir, there: Path, safehold):
    run.save(10, {"w": np.zeros(60_000)}, world_size=1)
    began = time.monotonic()
    assert safehold("replicate", run.root, "--to", there, "--rate", "1MB/s").code == 0
    assert 0.45 < time.monotonic() - began < 20


def test_fetch(run: RunDir, there: Path, tmp_path: Path, safehold):
    for step in (10, 20):
        run.save(step)
    safehold("replicate", run.root, "--all", "--to", there)
    back = tmp_path / "back"
    done = safehold("fetch", there, 10, "--to", back)
    assert done.code == 0 and done.out.startswith("step 10: sent") and steps(back) == [10]
    found = find_restore_candidate(open_tier(back))
    assert found.checkpoint is not None and verify(open_tier(back), found.checkpoint.commit).ok
    assert safehold("fetch", there, "--to", back, "--json").json["checkpoints"][0]["step"] == 20
    assert steps(back) == [20, 10]
    assert safehold("fetch", there, 30, "--to", back).code == 4


def test_states_are_loaded_from_a_copy_and_go_on_from_a_fetched_one(there: Path, tmp_path: Path, safehold):
    import safehold as library

    state = {"w": np.arange(1000.0), "step": 7}
    library.save(tmp_path / "first", state, step=7)
    assert safehold("replicate", tmp_path / "first", "--to", there).code == 0
    loaded = library.load(there, {"w": np.zeros(1000), "step": 0})
    assert loaded["step"] == 7 and (loaded["w"] == state["w"]).all()
    assert safehold("fetch", there, "--to", tmp_path / "second").code == 0
    library.save(tmp_path / "second", state | {"step": 8}, step=8)
    assert steps(tmp_path / "second") == [8, 7]
    # It is the same run, so the copy takes what comes after.
    assert safehold("replicate", tmp_path / "second", "--to", there).code == 0 and steps(there) == [8, 7]
    assert library.load(there)["step"] == 8
    done = safehold("replicate", tmp_path / "first", "--to", there)
    assert done.code == 0 and "is there already" in done.out


def test_fetch_brings_back_what_was_deleted_and_takes_nothing_away(run: RunDir, there: Path, safehold):
    for step in (10, 20):
        run.save(step)
    safehold("replicate", run.root, "--all", "--to", there)
    assert safehold("rm", run.root, 10, "--now").code == 0 and steps(run.root) == [20]
    assert safehold("fetch", there, 10, "--to", run.root).code == 0 and steps(run.root) == [20, 10]
    run.open(up_to_step=10)
    done = safehold("fetch", there, 20, "--to", run.root)
    assert done.code == 9 and "does not list this checkpoint" in done.err and steps(run.root) == [10]


def test_status(run: RunDir, there: Path, safehold):
    first, second = run.save(10), run.save(20)
    done = safehold("status", run.root, "--to", there)
    assert done.code == 0 and "lag: nothing is there yet" in done.out and not there.exists()
    safehold("replicate", run.root, 10, "--to", there)
    done = safehold("status", run.root, "--to", there)
    assert "lag: 1 checkpoint, 10 steps, 1 min 0 s" in done.out
    value = safehold("status", run.root, "--to", there, "--json").json
    assert [(e["step"], e["here"], e["there"]) for e in value["checkpoints"]] == [(20, "yes", "no"), (10, "yes", "yes")]
    assert value["checkpoints"][1]["there_bytes"] == value["checkpoints"][1]["here_bytes"] > 0
    newest = value["checkpoints"][0]["total_bytes"]
    assert value["lag"] == {"steps": 10, "seconds": 60.0, "num_checkpoints": 1, "num_bytes": newest}
    assert value["run_id"] == run.run_id
    assert value["num_set_aside"] == 0
    safehold("replicate", run.root, "--to", there)
    assert "lag: none" in safehold("status", run.root, "--to", there).out
    (there / paths.checkpoint_dir(first) / "00000-00000.0.safetensors").unlink()
    flip(run.path(second, "manifest.json"), 200)
    value = safehold("status", run.root, "--to", there, "--json").json
    assert [(e["here"], e["there"]) for e in value["checkpoints"]] == [("damaged", "damaged"), ("yes", "damaged")]


def test_status_tells_what_only_the_second_place_has(run: RunDir, there: Path, safehold):
    for step in (10, 20):
        run.save(step)
    safehold("replicate", run.root, "--all", "--to", there)
    safehold("rm", run.root, 10, "--now")
    value = safehold("status", run.root, "--to", there, "--json").json
    assert [(e["step"], e["here"], e["there"]) for e in value["checkpoints"]] == [(20, "yes", "yes"), (10, "no", "yes")]
    run.open()
    run.save(30)
    safehold("replicate", run.root, "--to", there)
    done = safehold("status", run.root, "--to", there)
    assert "1 older there do not count any more" in done.err and "--set-aside" in done.err
    assert safehold("gc", there, "--set-aside", "--grace-s", 0).code == 0
    assert "do not count" not in safehold("status", run.root, "--to", there).err


def test_status_neither_counts_what_was_uncommitted_there_nor_calls_it_half_copied(run: RunDir, there: Path, safehold):
    for step in (10, 20):
        run.save(step)
    safehold("replicate", run.root, "--all", "--to", there)
    for step in (20, 10):
        ledger.uncommit(open_tier(there), step, incarnation=1, reason="test")
        value = safehold("status", run.root, "--to", there, "--json").json
        entry = next(entry for entry in value["checkpoints"] if entry["step"] == step)
        assert entry["there"] == "no" and entry["there_bytes"] > 0 and "un-committed there" in entry["reason"]
        assert value["lag"]["steps"] == (10 if step == 20 else None)
    assert "lag: nothing is there yet" in safehold("status", run.root, "--to", there).out


def test_the_lag_counts_from_what_the_run_has_let_go_and_the_second_place_still_has(run: RunDir, there: Path, safehold):
    for step in (10, 20):
        run.save(step)
    safehold("replicate", run.root, "--all", "--to", there)
    for step in (10, 20):
        ledger.uncommit(run.tier, step, incarnation=1, reason="retention")
    run.save(50)
    done = safehold("status", run.root, "--to", there)
    assert "lag: 1 checkpoint, 30 steps, 1 min 0 s" in done.out
    ledger.uncommit(run.tier, 50, incarnation=1, reason="test")
    ledger.uncommit(open_tier(there), 20, incarnation=1, reason="test")
    run.save(15)
    assert "lag: 1 checkpoint, 5 steps, 3 min 0 s" in safehold("status", run.root, "--to", there).out
    next((there / "checkpoints" / "000000010").rglob("*.safetensors")).unlink()
    done = safehold("status", run.root, "--to", there)
    assert "damaged" in done.out and "lag: nothing is there yet" in done.out


def test_what_was_rolled_back_is_no_part_of_the_lag(run: RunDir, there: Path, safehold):
    for step in (10, 20, 30):
        run.save(step)
        safehold("replicate", run.root, "--to", there)
    run.open(up_to_step=10)
    run.save(15)
    assert "lag: 1 checkpoint, 5 steps" in safehold("status", run.root, "--to", there).out


def test_half_copied_ones_that_were_deleted_here_are_swept(run: RunDir, there: Path, safehold):
    first = run.save(10)
    run.save(20)
    flip(max(run.path(first).glob("*.safetensors"), key=lambda f: f.name), 100)
    assert safehold("replicate", run.root, 10, "--to", there).code == 6
    assert (there / paths.checkpoint_dir(first)).exists()
    value = safehold("status", run.root, "--to", there, "--json").json
    assert value["checkpoints"][1]["there"] == "partial"
    ledger.uncommit(run.tier, 10, incarnation=1, reason="test")
    assert safehold("replicate", run.root, "--to", there).code == 0
    assert not (there / paths.checkpoint_dir(first)).exists() and not list((there / paths.REPLICATIONS).iterdir())


@pytest.mark.procs
def test_ctrl_c_leaves_nothing_half_done_and_is_taken_up_again(run: RunDir, there: Path):
    commit = run.save(10, {"w": np.random.default_rng(0).normal(size=4 << 20)}, world_size=4)
    command = [sys.executable, "-m", "safehold", "replicate", str(run.root), "--to", str(there)]
    child = subprocess.Popen([*command, "--rate", "20MB"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not list(there.glob("checkpoints/*/*/*.safetensors")) and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(child.pid, signal.SIGINT)
        out, err = child.communicate(timeout=30)
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
    assert child.returncode == 130 and err == "interrupted\n" and out == ""
    assert not (there / paths.checkpoint_dir(commit) / "manifest.json").exists()
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert verify(open_tier(there), commit).ok


@pytest.mark.procs
def test_a_killed_one_is_taken_up_by_the_next(run: RunDir, there: Path):
    commit = run.save(10, {"w": np.random.default_rng(0).normal(size=4 << 20)}, world_size=4)
    command = [sys.executable, "-m", "safehold", "replicate", str(run.root), "--to", str(there)]
    child = subprocess.Popen([*command, "--rate", "20MB"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not list(there.glob("checkpoints/*/*/*.safetensors")) and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        child.kill()
        child.wait()
    assert not (there / paths.checkpoint_dir(commit) / "manifest.json").exists()
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert verify(open_tier(there), commit).ok


def test_what_is_copied_is_leased_as_long_as_that_takes(run: RunDir, there: Path, safehold, monkeypatch):
    from safehold.pipeline import replicate as replicating

    run.save(10)
    seen: list[list[str]] = []
    copy = replicating.replicate

    def watching(source, target, commit, **more):
        seen.append([entry.name for entry in source.list(paths.LEASES)])
        return copy(source, target, commit, **more)

    monkeypatch.setattr(replicating, "replicate", watching)
    assert safehold("replicate", run.root, "--to", there).code == 0
    assert len(seen) == 1 and len(seen[0]) == 1 and seen[0][0].startswith("000000010-")
    assert run.tier.list(paths.LEASES) == []
    assert safehold("fetch", there, "--to", there.parent / "back").code == 0
    assert len(seen[1]) == 1 and open_tier(there).list(paths.LEASES) == []


def test_what_went_before_the_lease_was_there_is_not_copied(run: RunDir, there: Path, safehold, monkeypatch):
    from safehold.pipeline import leases

    run.save(10)
    monkeypatch.setattr(leases, "is_committed", lambda tier, commit: False)
    done = safehold("replicate", run.root, "--to", there)
    assert done.code == 4 and "un-committed before it could be read" in done.err and steps(there) == []
