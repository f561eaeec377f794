"""What an agent asks of its copying process, on two directories."""

from __future__ import annotations

from pathlib import Path

import pytest
from replica_runs import believed, is_whole, save
from run_dirs import RunDir

from safehold.config import Config
from safehold.errors import ConfigurationError, StorageError
from safehold.events import EventStream
from safehold.format import paths
from safehold.pipeline import ledger, maintenance, replica_claim
from safehold.pipeline.remote_calls import RemoteCalls
from safehold.tiers.base import Tier
from safehold.tiers.open import open_tier
from safehold.types import CommitId


def wire(commit: CommitId) -> list[int]:
    return [commit.step, commit.incarnation, commit.attempt]


def calls_of(here: Tier, there: Tier) -> RemoteCalls:
    return RemoteCalls(here, there, Config(remote=there.url, remote_timeout_s=60.0, delete_grace_s=0), None)


def replicate(here: Tier, there: Tier, commit: CommitId, *, keep: int = 9, num_nodes: int = 1) -> None:
    lead = calls_of(here, there)
    begun = lead.operations["copy_begin"]({"key": "k", "commit": wire(commit)})
    assert not begun["complete"]
    asked = {"key": "k", "commit": begun["commit"], "claim": begun["claim"]}
    for node in range(num_nodes):
        share = [found for found in begun["nodes"] if found % num_nodes == node]
        calls_of(here, there).operations["copy_data"]({**asked, "node": node, "nodes": share})
    assert lead.operations["copy_finish"]({"key": "k", "keep": keep}) == {"problem": None}


@pytest.fixture
def there(tmp_path: Path) -> Tier:
    return open_tier(tmp_path / "there", name="remote")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    found = RunDir(tmp_path / "run")
    found.open()
    return found


def test_a_checkpoint_is_there_only_once_all_have_copied_and_the_lead_has_finished(run: RunDir, there: Tier) -> None:
    commit = save(run, 10)
    lead = calls_of(run.tier, there)
    begun = lead.operations["copy_begin"]({"key": "k", "commit": None})
    assert begun["commit"] == wire(commit) and begun["nodes"] == [0, 1] and begun["bytes"] > 0
    asked = {"key": "k", "commit": begun["commit"], "claim": begun["claim"], "node": 3, "nodes": [0, 1]}
    sent = calls_of(run.tier, there).operations["copy_data"](asked)
    assert sent["sent_bytes"] == begun["bytes"] and not believed(there)
    lead.operations["copy_leave"]({"key": "k"})
    again = lead.operations["copy_begin"]({"key": "k2", "commit": wire(commit)})
    more = {**asked, "key": "k2", "claim": again["claim"], "node": 0}
    assert calls_of(run.tier, there).operations["copy_data"](more)["sent_bytes"] == 0, (
        "what a node had noted is not sent again"
    )
    lead.operations["copy_finish"]({"key": "k2", "keep": 3})
    assert believed(there) == [10] and is_whole(there, commit)
    assert not there.list(paths.REPLICATIONS) and not replica_claim.unfinished(there)


def test_what_was_cancelled_commits_nothing(run: RunDir, there: Tier) -> None:
    save(run, 10)
    lead = calls_of(run.tier, there)
    begun = lead.operations["copy_begin"]({"key": "k", "commit": None})
    lead.cancel("k")
    with pytest.raises(Exception, match="cancelled"):
        lead.operations["copy_data"]({**begun, "key": "k", "node": 0})
    with pytest.raises(Exception, match="cancelled"):
        lead.operations["copy_finish"]({"key": "k", "keep": 3})
    assert not believed(there)


def test_an_empty_directory_becomes_that_of_the_run_there(run: RunDir, there: Tier, tmp_path: Path) -> None:
    for step in (10, 20):
        replicate(run.tier, there, save(run, step))
    new = open_tier(tmp_path / "new")
    seen = calls_of(new, there).operations["remote_look"]({})
    assert [entry[0] for entry in seen["held"]] == [20, 10] and "was empty" in seen["notes"][0]
    asked = {"token": "t", "up_to": None, "exclude": [], "reason": "start", "held": seen["held"]}
    opened = maintenance.open_run(new, Config(), asked, EventStream())
    assert (opened["run_id"], opened["incarnation"]) == (run.run_id, 2)
    assert (opened["steps"], opened["steps_afar"]) == ([], [10, 20])
    newer = calls_of(new, there).operations["remote_newer"]({"step": None, "bad": [], "tried": []})
    assert [entry[0] for entry in newer] == [20, 10]
    calls_of(new, there).operations["fetch"]({"commit": newer[0], "key": "f"})
    assert believed(new) == [20] and is_whole(new, CommitId(*newer[0]))
    found = maintenance.find(new, Config(), {"step": None, "exclude": []}, EventStream())
    assert found["commit"] == newer[0]


def test_without_an_answer_an_empty_directory_is_not_begun_anew(run: RunDir, tmp_path: Path) -> None:
    asked = {"token": "t", "up_to": None, "exclude": [], "reason": "start", "held": None}
    with pytest.raises(StorageError, match="gives no answer"):
        maintenance.open_run(open_tier(tmp_path / "new"), Config(), asked, EventStream())
    assert maintenance.open_run(run.tier, Config(), asked, EventStream())["incarnation"] == 2


def test_older_copies_go_on_to_count_after_a_restart(run: RunDir, there: Tier) -> None:
    commits = [save(run, step) for step in (10, 20, 30)]
    for commit in commits:
        replicate(run.tier, there, commit)
    ledger.uncommit(run.tier, 10, incarnation=1, reason="retention")  # its bytes are still here
    ledger.uncommit(run.tier, 20, incarnation=1, reason="retention")
    run.tier.delete_tree(paths.checkpoint_dir(commits[1]))
    held = calls_of(run.tier, there).operations["remote_look"]({})["held"]
    asked = {"token": "t", "up_to": None, "exclude": [], "reason": "start", "held": held}
    opened = maintenance.open_run(run.tier, Config(), asked, EventStream())
    assert opened["steps"] == [30] and believed(run.tier) == [30], "absent here, or being deleted, is nothing here"
    assert not any("not used" in note for note in opened["notes"])
    run.incarnation = opened["incarnation"]
    replicate(run.tier, there, save(run, 40))
    assert believed(there) == [40, 30, 20, 10]
    newer = calls_of(run.tier, there).operations["remote_newer"]
    assert [entry[0] for entry in newer({"step": 20, "bad": [], "tried": []})] == [20]
    assert [entry[0] for entry in newer({"step": 10, "bad": [], "tried": []})] == [10], "deleted here, and asked for"
    assert newer({"step": None, "bad": [], "tried": []}) == [], "what is here is newer than what was deleted"


def test_what_was_deleted_here_is_brought_back_where_nothing_else_can_be_used(run: RunDir, there: Tier) -> None:
    """Retention here is ahead of the copies: the only one is of a step that is being deleted here, and the newer ones are lost."""
    old = save(run, 10)
    replicate(run.tier, there, old)
    newer = save(run, 20)
    ledger.uncommit(run.tier, 10, incarnation=1, reason="retention")
    next((run.root / paths.checkpoint_dir(newer)).glob("*.safetensors")).unlink()
    look = {"step": None, "bad": [], "tried": []}
    found = calls_of(run.tier, there).operations["remote_newer"](look)
    assert [entry[0] for entry in found] == [10]
    held = calls_of(run.tier, there).operations["remote_look"]({})["held"]
    asked = {"token": "t", "up_to": None, "exclude": [], "reason": "start", "held": held}
    maintenance.open_run(run.tier, Config(), asked, EventStream())
    found = calls_of(run.tier, there).operations["remote_newer"](look)
    calls_of(run.tier, there).operations["fetch"]({"commit": found[0], "key": "f"})
    assert is_whole(run.tier, old)
    assert maintenance.find(run.tier, Config(), {"step": None, "exclude": []}, EventStream())["commit"] == found[0]


def test_another_runs_place_and_a_place_of_something_else_are_refused(run: RunDir, there: Tier, tmp_path: Path) -> None:
    other = RunDir(tmp_path / "other")
    other.open()
    with pytest.raises(ConfigurationError, match="another run"):
        calls_of(run.tier, other.tier).operations["remote_look"]({})
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "thesis.tex").write_text("")
    with pytest.raises(ConfigurationError, match="not empty"):
        calls_of(run.tier, there).operations["remote_look"]({})


def test_the_second_place_keeps_what_it_is_told_to(run: RunDir, there: Tier) -> None:
    for step in (10, 20, 30):
        replicate(run.tier, there, save(run, step), keep=2, num_nodes=2)
    assert believed(there) == [30, 20] and believed(run.tier) == [30, 20, 10]
