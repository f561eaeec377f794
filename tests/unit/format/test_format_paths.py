"""Paths: exact both ways, so that backups, temporaries and foreign files are never taken for ours."""

from __future__ import annotations

import pytest

from safehold.format import paths
from safehold.types import CommitId

COMMIT = CommitId(10, 3, 0)


def test_the_layout_of_a_run_directory() -> None:
    assert paths.incarnation(3) == "incarnations/3.json"
    assert paths.plan("ab" * 32) == "plans/" + "ab" * 32
    assert paths.checkpoint_dir(COMMIT) == "checkpoints/000000010/3-0"
    assert paths.pack(0, 3, 0) == "00000-00003.0.safetensors"
    assert paths.node_record(0) == "node-00000.json"
    assert paths.node_objects(12) == "node-00012.objects"
    assert paths.redundancy_record(12) == "redundancy-00012.json"
    assert paths.redundancy_share(12, 1) == "redundancy-00012.1"
    assert paths.tombstone(3) == "tombstone-3.json"
    assert paths.quarantine(COMMIT) == "quarantine/000000010-3-0.json"
    assert paths.pin(10) == "pins/000000010.json"
    assert paths.lease(10, "0a" * 16) == f"leases/000000010-{'0a' * 16}.json"
    assert paths.replication(COMMIT, 2) == "replication/000000010-3-0.2.json"
    assert paths.parse_replication("000000010-3-0.2.json") == (COMMIT, 2)
    assert paths.parse_replication("000000010-3-0.02.json") is None
    assert paths.replication_share(COMMIT, 2, 7) == "replication/000000010-3-0.2.node-00007.json"
    assert paths.parse_replication_share("000000010-3-0.2.node-00007.json") == (COMMIT, 2, 7)
    assert paths.parse_replication("000000010-3-0.2.node-00007.json") is None


@pytest.mark.parametrize("step", [0, 10, 9900, 10000, 999_999_999, 1_000_000_000, 2**63 - 1])
def test_steps_come_back(step: int) -> None:
    commit = CommitId(step, 2, 1)
    directory, attempt = paths.checkpoint_dir(commit).split("/")[1:]
    assert (paths.parse_step_dir(directory), paths.parse_attempt_dir(attempt)) == (step, (2, 1))
    assert paths.parse_pin(paths.pin(step).split("/")[1]) == step
    assert paths.parse_quarantine(paths.quarantine(commit).split("/")[1]) == commit
    assert paths.parse_lease(paths.lease(step, "0a" * 16).split("/")[1]) == (step, "0a" * 16)


def test_files_come_back() -> None:
    assert paths.pack(1, 123456, 2) == "00001-123456.2.safetensors"
    assert paths.parse_node_record(paths.node_record(100_000)) == 100_000
    assert paths.parse_node_objects(paths.node_objects(7)) == 7
    assert paths.parse_redundancy_record(paths.redundancy_record(100_000)) == 100_000
    assert paths.parse_redundancy_share(paths.redundancy_share(7, 12)) == (7, 12)
    assert paths.is_redundancy("redundancy-00007.json") and paths.is_redundancy("redundancy-00007.0")
    assert paths.parse_tombstone(paths.tombstone(7)) == 7
    assert paths.parse_incarnation("7.json") == 7
    assert paths.parse_plan("0" * 64) == "0" * 64


@pytest.mark.parametrize(
    "name",
    [
        "", "10", "00000010", "0000000010", "000000010.backup", "000000010 ", "000000010\n", "-00000010",
        "+00000010", "00000001x",
        "٠٠٠٠٠٠٠١٠", "9" * 19, "9" * 30, ".000000010", "000000010/", "..", "latest",
    ],
)  # fmt: skip
def test_other_names_are_no_steps(name: str) -> None:
    assert paths.parse_step_dir(name) is None
    assert paths.parse_attempt_dir(name) is None
    assert paths.parse_pin(name + ".json") is None
    assert paths.parse_lease(f"{name}-{'0a' * 16}.json") is None


@pytest.mark.parametrize("name", ["3-0.tmp", "03-0", "3-00", "3--0", "3", "-0", "3-0\n", "3-0-1", "a-b", f"{2**63}-0"])
def test_other_names_are_no_attempts(name: str) -> None:
    assert paths.parse_attempt_dir(name) is None


@pytest.mark.parametrize(
    "name",
    [
        "00000-00003.0.safetensors.tmp", "0-3.0.safetensors", "00000-00003.safetensors", "000000-00003.0.safetensors",
        "node-0.json", "node-000000.json", "node-00000.json~", "node-00000.objects2", "tombstone-03.json",
        "tombstone-.json", "03.json",
        "redundancy-0.json", "redundancy-00000.00", "redundancy-00000.", "redundancy-00000", "redundancy-00000.0.tmp",
        "redundancy-000000.0", "redundancy-00000.-1", "redundancy-00000.json~",
        "manifest.json", "F" * 64, "0" * 63, "0" * 65,
    ],
)  # fmt: skip
def test_other_names_are_no_files(name: str) -> None:
    for parse in (
        paths.parse_node_record,
        paths.parse_node_objects,
        paths.parse_tombstone,
        paths.parse_incarnation,
        paths.parse_plan,
        paths.parse_quarantine,
        paths.parse_redundancy_record,
        paths.parse_redundancy_share,
    ):
        assert parse(name) is None
    assert not paths.is_redundancy(name)


def test_only_numbers_and_digests_become_paths() -> None:
    for bad in (-1, 2**63):
        with pytest.raises(ValueError):
            paths.step_dir(bad)
    for bad in ("", "../../etc/passwd", "A" * 64, "0" * 64 + "\n"):
        with pytest.raises(ValueError):
            paths.plan(bad)


@pytest.mark.parametrize(
    "reader", ["", "0a", "0A" * 16, "0a" * 16 + "0", "../" * 10 + "aa", "0a" * 15 + "a\n", "0a" * 15 + "/a"]
)
def test_a_lease_is_named_by_hex_digits_only(reader: str) -> None:
    with pytest.raises(ValueError, match="32 lower-case hex digits"):
        paths.lease(10, reader)
    assert paths.parse_lease(f"000000010-{reader}.json") is None


def test_whose_file_it_is() -> None:
    assert paths.parse_pack(paths.pack(3, 17, 2)) == (3, 17, 2)
    for name in (
        "00003-00017.2.safetensors.bak",
        "3-17.2.safetensors",
        "00003-00017.02.safetensors",
        "000003-00017.2.safetensors",
    ):
        assert paths.parse_pack(name) is None and paths.node_of(name) is None
    assert {paths.node_of(name) for name in (paths.pack(3, 1, 0), paths.node_record(3), paths.node_objects(3))} == {3}
    assert paths.node_of(paths.MANIFEST) is None


def test_which_paths_are_files_of_a_run() -> None:
    commit = CommitId(10, 3, 1)
    directory = paths.checkpoint_dir(commit)
    assert paths.parse_checkpoint_dir(directory) == commit
    ours = [paths.RUN_JSON, paths.incarnation(4), paths.plan("a" * 64), paths.quarantine(commit), paths.pin(10)]
    ours += [paths.lease(10, "0a" * 16), paths.replication(commit, 2)]
    names = [paths.MANIFEST, paths.tombstone(4), paths.pack(0, 1, 0), paths.node_record(0), paths.node_objects(0)]
    names += [paths.redundancy_record(3), paths.redundancy_share(3, 1)]
    for path in (*ours, *(f"{directory}/{name}" for name in names)):
        assert paths.is_file(path), path
    strange = [
        "",
        "x",
        directory,
        f"{directory}/x",
        f"{directory}/sub/{paths.MANIFEST}",
        f"/{paths.RUN_JSON}",
        "plans/x",
    ]
    strange += [
        paths.MANIFEST,
        f"checkpoints/{paths.MANIFEST}",
        f"checkpoints/10/3-1/{paths.MANIFEST}",
        f"../{directory}/manifest.json",
    ]
    strange += [
        f"checkpoints/000000010/3-01/{paths.MANIFEST}",
        f"other/000000010/3-1/{paths.MANIFEST}",
        f".tmp-{paths.RUN_JSON}",
    ]
    for path in strange:
        assert not paths.is_file(path), path
    for path in ("", "checkpoints", "checkpoints/000000010", f"{directory}/x", "checkpoints/000000010/3-1/"):
        assert paths.parse_checkpoint_dir(path) is None
