"""ls, show, cat, diff, agents: what is shown, to people and to programs."""

from __future__ import annotations

import io
import json
import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from run_dirs import PerRank, RunDir, Typed, default_tensors, flip

import safehold as package
from safehold.format import paths, records
from safehold.host.process import start_ticks
from safehold.pipeline import ledger
from safehold.types import CommitId

LS_FIELDS = {
    "step", "incarnation", "attempt", "status", "created_s", "created", "world_size", "num_nodes", "total_bytes", "stored_bytes",
    "metrics", "final", "pinned", "leased", "quarantined", "not_here", "reason",
}  # fmt: skip


def test_ls(run: RunDir, safehold):
    run.save(9_900, metrics={"loss": float("nan"), "acc": 0.5})
    run.save(10_000, final=True)
    ledger.put_pin(run.tier, 9_900, clock=run)
    ledger.put_quarantine(run.tier, CommitId(10_000, 1, 0), incarnation=1, reason="bad", clock=run)
    listed = safehold("ls", run.root, "--json").json
    assert [entry["step"] for entry in listed] == [10_000, 9_900]
    assert all(set(entry) == LS_FIELDS for entry in listed)
    assert listed[1]["metrics"] == {"loss": "NaN", "acc": 0.5} and listed[1]["pinned"]
    assert listed[0]["final"] and listed[0]["quarantined"] and listed[0]["reason"] == "bad"
    assert listed[0]["status"] == "committed" and listed[0]["created"].endswith("Z")
    text = safehold("ls", run.root)
    assert text.code == 0 and text.err == ""
    lines = text.out.splitlines()
    assert lines[0].split() == ["STEP", "CREATED", "SIZE", "RANKS", "INC", "NOTES"]
    assert "final quarantined (bad)" in lines[1] and "pinned acc=0.5 loss=nan" in lines[2]


def test_ls_of_an_empty_run(run: RunDir, safehold):
    run.open()
    done = safehold("ls", run.root)
    assert (done.code, done.out, done.err) == (0, "", "no checkpoints\n")
    assert safehold("ls", run.root, "--json").json == []


def test_ls_all_says_why_attempts_do_not_count(run: RunDir, safehold):
    for step in (10, 20, 30):
        run.save(step)
    run.save(30, attempt=1)
    run.open(up_to_step=30)
    run.open()
    run.save(25, incarnation=2)
    run.save(40, publish=False)
    ledger.uncommit(run.tier, 10, incarnation=3, reason="safehold rm", clock=run)
    flip(run.path(CommitId(20, 1, 0), "manifest.json"))
    listed = safehold("ls", run.root, "--all", "--json").json
    assert [(e["step"], e["attempt"], e["status"]) for e in listed] == [
        (40, 0, "uncommitted"),
        (30, 1, "committed"),
        (30, 0, "abandoned"),
        (25, 0, "abandoned"),
        (20, 0, "damaged"),
        (10, 0, "deleted"),
    ]
    assert all(entry["reason"] for entry in listed if entry["status"] != "committed")
    assert "DAMAGED" in safehold("ls", run.root).out


def test_show_run(run: RunDir, safehold):
    run.save(10)
    run.open()
    run.save(20)
    facts = safehold("show", run.root, "--json").json
    assert facts["run_id"] == run.run_id and facts["steps"] == [20, 10] and len(facts["incarnations"]) == 2
    out = safehold("show", run.root).out
    assert run.run_id in out and "2 (20, 10)" in out


def test_show_checkpoint(run: RunDir, safehold):
    run.save(10, world_size=3, ranks_per_node=2, aliases={"head": "model.emb.weight"})
    facts = safehold("show", run.root, 10, "--json").json
    assert facts["world_size"] == 3 and len(facts["nodes"]) == 2 and facts["num_objects"] == 3
    leaves = {leaf["name"]: leaf for leaf in facts["leaves"]}
    assert leaves["model.emb.weight"]["shape"] == [7, 6] and leaves["head"]["target"] == "model.emb.weight"
    text = safehold("show", run.root, "latest", "--leaves").out
    assert "bfloat16" in text and "[7, 6]" in text and "-> model.emb.weight" in text
    assert "model.emb.weight" not in safehold("show", run.root, 10).out


def test_one_of_something_is_said_as_one(run: RunDir, safehold):
    run.save(10, {"w": np.ones(2)}, {"n": 1}, world_size=1)
    out = safehold("show", run.root, 10).out
    assert "of 1 rank on 1 node\n" in out and "1 tensor, 1 object\n" in out


@pytest.mark.parametrize("direct", [True, False])
def test_timings_of_a_save_are_shown(tmp_path, safehold, monkeypatch, direct):
    """What the node records hold of a save by an agent, and of one without."""
    monkeypatch.setenv("SAFEHOLD_RUNTIME_DIR", str(tmp_path / "rt"))
    if direct:
        package.save(tmp_path / "run", {"w": np.ones(1000)}, step=3)
    else:
        with package.Checkpointer(tmp_path / "run") as ckpt:
            ckpt.save(3, {"w": np.ones(1000)}).wait()
    [node] = safehold("show", tmp_path / "run", 3, "--json").json["nodes"]
    names = ["stage_s", "allocate_s", "write_s", "sync_s", "recorded_s"]
    assert sorted(node["timings"]) == sorted(names) and all(value >= 0 for value in node["timings"].values())
    assert node["timings"]["recorded_s"] >= node["timings"]["write_s"] + node["timings"]["sync_s"]
    row = safehold("show", tmp_path / "run", 3).out.splitlines()[-1]
    shown = ", ".join(f"{name.removesuffix('_s')} {node['timings'][name]:.2f} s" for name in names)
    assert row.endswith(shown)


def test_names_are_shown_without_control_characters(run: RunDir, safehold):
    from safehold.format import names

    evil = names.join(("evil\x1b[31m\nname", "\u202eright"))
    run.save(10, {evil: np.ones(2)}, {}, metrics={"m\x1b]0;title\x07": 1.0})
    ledger.put_pin(run.tier, 10, note="note\x1b[2J", clock=run)
    for arguments in (
        ("ls", run.root), ("show", run.root, 10, "--leaves"), ("diff", run.root, 10, 10), ("rm", run.root, 10),
        ("cat", run.root, 10, "no\x1b[1msuch"), ("ls", run.root / "no\x1b[1mrun"), ("verify", run.root),
    ):  # fmt: skip
        done = safehold(*arguments)
        assert not set(done.out + done.err) & {"\x1b", "\x07", "\u202e"}, arguments


def test_cat_npy_and_safetensors(run: RunDir, safehold, tmp_path):
    import safetensors.numpy
    import torch
    from safetensors.torch import load_file

    commit = run.save(10)
    state = default_tensors(10)
    out = tmp_path / "w.npy"
    assert safehold("cat", run.root, commit.step, "model.emb.weight", "-o", out).code == 0
    assert np.array_equal(np.load(out), state["model.emb.weight"])
    done = safehold("cat", run.root, 10, "optim.state.model.emb.weight.step")
    assert np.load(io.BytesIO(done.out.encode(errors="surrogateescape"))) == 10
    out = tmp_path / "b.safetensors"
    assert safehold("cat", run.root, "latest", "model.bias", "--format", "safetensors", "-o", out).code == 0
    bias = load_file(out)["model.bias"]
    assert bias.dtype == torch.bfloat16 and np.array_equal(bias.view(torch.uint16).numpy(), state["model.bias"].items)
    out = tmp_path / "e.safetensors"
    assert safehold("cat", run.root, 10, "model.empty", "--format", "safetensors", "-o", out).code == 0
    assert safetensors.numpy.load_file(out)["model.empty"].shape == (0, 3)
    assert sorted(os.listdir(tmp_path)) == ["b.safetensors", "e.safetensors", "run", "w.npy"]


def test_cat_into_a_directory_that_is_not_there(run: RunDir, safehold, tmp_path):
    run.save(10)
    done = safehold("cat", run.root, 10, "model.emb.weight", "-o", tmp_path / "none" / "x.npy")
    assert done.code == 2 and "there is no directory for the output" in done.err and str(tmp_path / "none") in done.err


def test_cat_takes_the_place_of_nothing_but_a_file(run: RunDir, safehold, tmp_path):
    run.save(10)
    link, real, pipe = tmp_path / "link.npy", tmp_path / "real.npy", tmp_path / "pipe"
    real.write_text("earlier")
    link.symlink_to(real.name)
    assert safehold("cat", run.root, 10, "model.emb.weight", "-o", link).code == 0
    wanted = default_tensors(10)["model.emb.weight"]
    assert link.is_symlink() and np.array_equal(np.load(real), wanted)
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(pipe.read_bytes)
        assert safehold("cat", run.root, 10, "model.emb.weight", "-o", pipe).code == 0
        assert np.array_equal(np.load(io.BytesIO(read.result(10.0))), wanted)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_without_a_stdout(run: RunDir):
    run.save(10)
    command = f"exec {sys.executable} -m safehold ls {run.root} --json >&-"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "Traceback" not in done.stderr


def test_cat_json(run: RunDir, safehold):
    tensors = {
        "f": np.array([1.5, np.inf, np.nan]), "c": np.array([1 + 2j], np.complex64),
        "b": Typed("bfloat16", np.array([0x3F80, 0xC000], np.uint16)), "t": np.array([True, False]),
        "f8": Typed("float8_e5m2", np.array([1], np.uint8)),
    }  # fmt: skip
    run.save(10, tensors, {"o": {1: (2, b"x"), "s": {3}, "big": 2**80, "nan": float("nan")}, "own": PerRank((1, 2))})

    def values(name: str, *options: str):
        return json.loads(safehold("cat", run.root, 10, name, "--format", "json", *options).out)

    assert values("f")["values"] == [1.5, "Infinity", "NaN"] and values("f")["shape"] == [3]
    assert values("c")["values"] == [[1.0, 2.0]] and values("b")["values"] == [1.0, -2.0]
    assert values("t")["values"] == [True, False]
    assert values("own", "--rank", "1") == 2
    found = values("o")
    assert found["$type"] == "dict" and [2**80] in [pair[1:] for pair in found["value"]]
    assert [1, {"$type": "tuple", "value": [2, {"$type": "bytes", "value": "eA=="}]}] in found["value"]
    for arguments, words in (
        (("f8", "--format", "json"), "safetensors"), (("f8",), "safetensors"), (("own",), "different values"),
        (("o", "--format", "npy"), "no tensor"), (("f", "--rank", "1"), "same for all ranks"), (("nope",), "no leaf"),
    ):  # fmt: skip
        done = safehold("cat", run.root, 10, *arguments)
        assert done.code in (2, 4) and words in done.err and not done.out


def test_cat_of_a_damaged_leaf_writes_nothing(run: RunDir, safehold, tmp_path):
    commit = run.save(10, world_size=1)
    flip(run.path(commit, "00000-00000.0.safetensors"), 100)
    out = tmp_path / "out.npy"
    out.write_text("earlier")
    done = safehold("cat", run.root, 10, "model.emb.weight", "-o", out)
    assert done.code == 6 and "block 0" in done.err and "verify" in done.err
    assert out.read_text() == "earlier" and sorted(os.listdir(tmp_path)) == ["out.npy", "run"]
    assert safehold("cat", run.root, 10, "sched", "-o", tmp_path / "no" / "dir").code == 2


def test_diff(run: RunDir, safehold):
    run.save(10, {"a": np.ones(3), "b": np.ones(3)}, {})
    run.save(20, {"a": np.ones(3), "b": np.zeros(3), "c": np.ones(1)}, {}, world_size=3)
    found = safehold("diff", run.root, 10, "latest", "--json").json
    assert found["added"] == ["c"] and found["changed"] == [{"name": "b", "what": "content", "before": "", "after": ""}]
    assert found["num_same"] == 1 and not found["same"]
    done = safehold("diff", run.root, 10, 20)
    assert done.code == 0 and "1 added, 0 removed, 1 changed, 1 the same" in done.out
    assert safehold("diff", run.root, 10, 20, "--exit-code").code == 1
    assert safehold("diff", run.root, 10, 10, "--exit-code").code == 0


def test_agents(safehold, tmp_path):
    from safehold.host import runtime

    done = safehold("agents")
    assert (done.code, done.out, done.err) == (0, "", "no agents\n")
    slot = runtime.open_slot(tmp_path / "run")
    slot.write_info(
        runtime.AgentInfo(pid=1234, start_ticks=1, version="9.9", run=str(tmp_path / "run"), started_s=1.7e9)
    )
    assert safehold("agents", "--json").json == []
    (entry,) = safehold("agents", "--all", "--json").json
    assert entry["pid"] == 1234 and not entry["alive"] and entry["run"] == str(tmp_path / "run")
    with slot.lock():
        (entry,) = safehold("agents", "--json").json
        assert entry["alive"]
        assert "9.9" in safehold("agents").out
        assert entry["control_group"] is entry["oom_score_adj"] is None, "that process is none of it"
        ticks = start_ticks(os.getpid())
        slot.write_info(
            runtime.AgentInfo(pid=os.getpid(), start_ticks=ticks, version="9.9", run="/run", started_s=1.7e9)
        )
        (entry,) = safehold("agents", "--json").json
        with open("/proc/self/oom_score_adj", encoding="ascii") as file:
            assert entry["oom_score_adj"] == int(file.read())
        assert entry["control_group"].startswith("/")
        head, row = safehold("agents").out.splitlines()
        assert (
            head.split()[-7:] == ["LIMIT", "OOM", "GROUP", "MEMORY", "RUN", "REMOTE", "LOG"]
            and entry["control_group"] in row
        )


def test_agents_show_the_last_protected_step(safehold, tmp_path, monkeypatch):
    from safehold.agent import start
    from safehold.errors import AgentUnavailableError
    from safehold.host import runtime

    slot = runtime.open_slot(tmp_path / "run")
    slot.write_info(runtime.AgentInfo(pid=1234, start_ticks=1, version="9.9", run="run", started_s=1.7e9))
    answers = [{"session": {"protected_step": 40}}, {"session": None}, AgentUnavailableError("it does not answer")]

    def ask(*_):
        found = answers[0]
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(start, "ask_status", ask)
    with slot.lock():
        assert safehold("agents", "--json").json[0]["protected_step"] == 40
        assert "PROTECTED" in safehold("agents").out and "step 40" in safehold("agents").out
        for _ in range(2):
            del answers[0]
            assert safehold("agents", "--json").json[0]["protected_step"] is None
            assert "PROTECTED" not in safehold("agents").out


def test_errors_for_people_and_for_programs(run: RunDir, safehold, tmp_path):
    run.save(10)
    done = safehold("show", run.root, 11)
    assert done.code == 4 and done.out == ""
    assert done.err.splitlines() == [
        "error: there is no such checkpoint",
        f"  where: step 11, path {run.tier.url}",
        "  hint: there is step 10",
    ]
    done = safehold("show", run.root, 11, "--json")
    assert done.code == 4 and done.out == ""
    assert json.loads(done.err)["error"] == {
        "class": "StepNotFoundError", "message": "there is no such checkpoint", "exit_code": 4, "retry": False, "step": 11,
        "path": run.tier.url, "hint": "there is step 10",
    }  # fmt: skip
    assert safehold("ls", tmp_path).code == 2
    assert "run.json" in safehold("ls", tmp_path).err
    assert "does not exist" in safehold("ls", tmp_path / "nothing").err
    assert safehold("ls", "ftp://host/x").code == 2
    assert safehold("ls", run.root / "run.json").code == 2
    assert safehold("nonsense").code == 2
    assert safehold("show", run.root, "10x").code == 2
    assert "Traceback" not in safehold("show", run.root, "10x").err


def test_url_and_path_are_the_same(run: RunDir, safehold):
    run.save(10)
    assert safehold("ls", run.tier.url, "--json").json == safehold("ls", run.root, "--json").json


def test_problems_are_warnings(run: RunDir, safehold):
    run.save(10)
    flip(run.root / "run.json")
    done = safehold("ls", run.root, "--json")
    assert done.code == 0 and [entry["step"] for entry in done.json] == [10]
    assert done.err.startswith("warning: run.json: ")


def test_newer_format_is_told(run: RunDir, safehold):
    commit = run.save(10)
    file = run.path(commit, "manifest.json")
    file.write_bytes(file.read_bytes().replace(b'"format":1', b'"format":7', 1))
    assert "NEWER" in safehold("ls", run.root).out and "format 7" in safehold("ls", run.root).out
    assert safehold("show", run.root, 10).code == 6
    info = records.decode_run((run.root / "run.json").read_bytes())
    (run.root / paths.RUN_JSON).write_bytes(records.encode_run(info).replace(b'"format":1', b'"format":7', 1))
    assert safehold("ls", run.root).code == 6


@pytest.mark.parametrize("value", ["latest", "10"])
def test_a_run_without_checkpoints(run: RunDir, safehold, value: str):
    run.save(10, publish=False)
    done = safehold("show", run.root, value)
    assert done.code == 4 and "never committed: 1 attempt, see" in done.err
