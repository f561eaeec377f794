"""Odd places to run in: names of run directories, umasks, small /dev/shm, scripts without a main guard, forked children."""

from __future__ import annotations

import ctypes
import os
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from puppets import RankError, Rig, need, until

pytestmark = [pytest.mark.procs, pytest.mark.timeout(200)]

# An ordinary program: no main guard, no torch, no launcher.
PROGRAM = """
import sys
import numpy
import safehold
state = {"w": numpy.zeros(int(sys.argv[2])), "n": 0}
ckpt = safehold.Checkpointer(sys.argv[1], keep=1)
start = ckpt.restore(state) or 0
assert state["n"] == start and (state["w"] == start).all()
state["n"], state["w"] = start + 1, state["w"] + 1
ckpt.save(start + 1, state)
ckpt.close()
assert "torch" not in sys.modules
print("step", start + 1)
"""


def run_program(rig: Rig, *arguments: str, shell: str = "exec", cwd: Path | None = None, strip: bool = False) -> str:
    """Run the program as a shell would; returns what it printed."""
    script = rig.directory / "program.py"
    script.write_text(PROGRAM)
    command = f"{shell} {shlex.join([sys.executable, str(script), *arguments])}"
    done = subprocess.run(
        ["sh", "-c", command],
        env=rig.environment(),
        cwd=cwd or rig.directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=60,
        text=True,
        preexec_fn=_obey_modes if strip else None,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def _obey_modes() -> None:
    """Have the modes of files count for root too (CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH go)."""
    if os.getuid() == 0:
        libc = ctypes.CDLL(None, use_errno=True)
        for capability in (1, 2):
            if libc.prctl(24, capability, 0, 0, 0):
                raise OSError(ctypes.get_errno(), "prctl")


@pytest.mark.parametrize("umask", [0o777, 0o000], ids=["closes all", "closes nothing"])
def test_umasks(rig: Rig, umask: int) -> None:
    """What is made is private and usable."""
    for step in (1, 2):
        shell = f"umask {umask:03o}; exec"
        assert f"step {step}" in run_program(rig, str(rig.run), "1000", shell=shell, strip=True)
        until(lambda: not rig.slots(), "the end of the agent")
    assert rig.verified_steps() == [2]
    for top in (rig.run, rig.runtime):
        for path in (top, *top.rglob("*")):
            mode = stat.S_IMODE(path.lstat().st_mode)
            assert mode & 0o700 == (0o700 if path.is_dir() else 0o600), f"{path} has mode {mode:o}"
            if top == rig.run or path.is_dir():
                assert not mode & 0o077, f"{path} has mode {mode:o}"


@pytest.mark.root
def test_a_small_dev_shm(rig: Rig) -> None:
    """80 MB of state where /dev/shm has 64: host memory does not come from there."""
    need("unshare", "mount")
    shell = "exec unshare --mount sh -c 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec \"$@\"' sh"
    assert "step 1" in run_program(rig, str(rig.run), "10000000", shell=shell)
    assert "step 2" in run_program(rig, str(rig.run), "10000000", shell=shell)
    assert rig.verified_steps() == [2]


def test_names_of_run_directories(rig: Rig) -> None:
    place = rig.directory / "place"
    (place / "real").mkdir(parents=True)
    (place / "link").symlink_to("real")
    names = ["sp ace/ü.n.ï-é", "rel/../rel2/x", "link", "n" * 200, "#1%20;$HOME", f"file://{place}/u r l"]
    with rig.job(1, cwd=place) as job:
        job.all("build")
        for step, name in enumerate(names, 1):
            job.all("train", step, checkpoint=False)
            job.all("open", name)
            assert job[0].call("restore")["step"] is None
            job.all("train", step, checkpoint=False)
            job.all("evaluate", f"me.training.state['done'] = {step}")
            job.all("save", step, wait=True)
            job.all("close")
    spelled = [names[0], str(place / "rel2" / "x"), "real", *names[3:5], "u r l"]
    with rig.job(1, cwd=place) as job:
        for step, name in enumerate(spelled, 1):
            job.all("open", name)
            assert job[0].call("restore")["step"] == step, name
            job.all("close")
    made = ["sp ace", "rel2", "real", "link", "n" * 200, "#1%20;$HOME", "u r l"]
    assert sorted(path.name for path in place.iterdir()) == sorted(made)


def test_two_spellings_of_one_run_meet_at_one_agent(rig: Rig) -> None:
    link = rig.directory / "link"
    link.symlink_to(rig.run)
    rig.run.mkdir()
    with rig.job(1) as old, rig.job(1) as new:
        old.all("open", str(rig.run))
        new.all("open", str(link))
        assert len(rig.slots()) == 1
        with pytest.raises(RankError, match="SupersededError"):
            old.all("save", 1)
        new.all("save", 1, wait=True)
        new.all("close")


@pytest.mark.parametrize("what", ["a file", "a full directory", "no path"])
def test_places_that_are_no_run_directory(rig: Rig, what: str) -> None:
    if what == "a file":
        rig.run.write_text("precious")
        path = rig.run
    elif what == "a full directory":
        rig.run.mkdir()
        (rig.run / "thesis.tex").write_text("precious")
        path = rig.run
    else:
        path = Path("no such kind of place")
    with rig.job(2) as job:
        for result in job.each("open", str(path) if what != "no path" else "ftp://host/run", start_timeout_s=20):
            assert isinstance(result, RankError)
            assert result.name in ("ConfigurationError", "StorageError")
    if what == "a file":
        assert rig.run.read_text() == "precious"
    elif what == "a full directory":
        assert [entry.name for entry in rig.run.iterdir()] == ["thesis.tex"]


FORK = """
from torch.utils.data import DataLoader
data = list(range(64))
me.loading = DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context="fork", persistent_workers=True)
me.batches = iter(me.loading)
next(me.batches)
result = [worker.pid for worker in me.batches._workers]
"""

CHILD = """
import multiprocessing, signal
def child(queue):
    try:
        me.ckpt.save(99, me.training.state)
    except BaseException as exc:
        queue.put(f"{type(exc).__name__}: {exc}")
    me.ckpt.close()
queue = multiprocessing.get_context("fork").Queue()
worker = multiprocessing.get_context("fork").Process(target=child, args=(queue,))
worker.start()
result = queue.get(timeout=20)
worker.join(20)
assert worker.exitcode == 0, worker.exitcode
"""


def test_forked_children_do_the_parent_no_harm(rig: Rig) -> None:
    with rig.job(1) as job:
        job.all("open", str(rig.run))
        job.all("train", 1)
        job.all("save", 1, wait=True)
        workers = job[0].call("evaluate", FORK)
        job.all("save", 2, wait=True)
        assert "forked child" in job[0].call("evaluate", CHILD)
        job.all("evaluate", "result = sum(len(batch) for batch in me.batches)")
        job.all("save", 3, wait=True)
        assert rig.status()["session"]["connected"] == [0]
        job[0].kill()
        assert all(os.path.exists(f"/proc/{pid}") for pid in workers)  # and yet the agent sees at once that it is gone
        until(lambda: rig.status()["session"]["connected"] == [], "the trainer's end", timeout_s=3)
    assert rig.verified_steps() == [1, 2, 3]
