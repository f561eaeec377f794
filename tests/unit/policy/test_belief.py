"""Which checkpoints exist. Many jobs in one directory, at random, are in tests/property/test_policy_belief.py."""

from __future__ import annotations

from safehold.format.records import Incarnation, Tombstone
from safehold.policy.belief import (
    AttemptView,
    Listing,
    accepted_for_new,
    believed,
    combine,
    debris,
    is_void,
    shadowed,
)
from safehold.types import CommitId

GRACE_S = 100.0


def commit(step, incarnation=1, attempt=0):
    return CommitId(step, incarnation, attempt)


def incarnation(number, *accepted, created_s=1000.0):
    return Incarnation(run_id="r", number=number, token="t", accepted=tuple(sorted(accepted)), created_s=created_s)


def stone(of, by, created_s=1000.0):
    return Tombstone(commit=of, incarnation=by, created_s=created_s)


def listing(incarnations, attempts, stones=()):
    """`attempts`: commit -> has a manifest."""
    return Listing(
        incarnations={one.number: one for one in incarnations},
        attempts={
            which: AttemptView(has_manifest=whole, tombstones=tuple(s for s in stones if s.commit == which))
            for which, whole in attempts.items()
        },
    )


def swept(found, own=None, live=(), now_s=1000.0 + GRACE_S, set_aside=False):
    own = found.newest if own is None else own
    return debris(found, own_incarnation=own, live=live, now_s=now_s, grace_s=GRACE_S, set_aside=set_aside)


def test_half_written_attempts_are_no_checkpoints():
    found = listing([incarnation(1)], {commit(10): True, commit(20): False})
    assert believed(found) == [commit(10)]


def test_nothing_is_believed_without_an_incarnation():
    found = listing([], {commit(10): True})
    assert believed(found) == [] and found.newest is None
    assert swept(found, own=1) == []


def test_a_process_that_wakes_up_late_adds_nothing():
    found = listing(
        [incarnation(1), incarnation(2, commit(10))], {commit(10): True, commit(99, 1): True, commit(12, 2): True}
    )
    assert believed(found) == [commit(12, 2), commit(10)]
    # What it left is whole and may be wanted: it goes only when asked for, and once the newest has stood for a while.
    assert swept(found) == []
    assert swept(found, now_s=1001.0, set_aside=True) == []
    assert swept(found, set_aside=True) == [commit(99, 1)]


def test_two_jobs_in_one_directory():
    """The older keeps saving and deleting; neither counts, and it finds out."""
    old, new = incarnation(1), incarnation(2, commit(10), commit(20))
    attempts = {commit(10): True, commit(20): True, commit(30, 1): True, commit(30, 2): True}
    stones = [stone(commit(10), 1), stone(commit(30, 2), 1)]
    found = listing([old, new], attempts, stones)
    assert believed(found) == [commit(30, 2), commit(20), commit(10)]
    assert swept(found, own=1) == []


def test_rolling_back_lists_only_what_came_before():
    before = listing([incarnation(1)], {commit(step): True for step in (10, 20, 30)})
    assert accepted_for_new(before, up_to_step=20) == [commit(20), commit(10)]
    assert accepted_for_new(before, exclude=[commit(30)]) == [commit(20), commit(10)]
    after = listing([incarnation(1), incarnation(2, commit(10), commit(20))], {commit(s): True for s in (10, 20, 30)})
    assert believed(after) == [commit(20), commit(10)]


def test_only_the_newest_incarnation_says_what_counts():
    chain = [incarnation(1), incarnation(2, commit(10)), incarnation(3)]
    assert believed(listing(chain, {commit(10): True, commit(20, 2): True})) == []


def test_of_one_step_the_highest_attempt_counts():
    made = {commit(10, 1, 0): True, commit(10, 1, 1): True, commit(10, 2, 0): True, commit(10, 2, 1): False}
    found = listing([incarnation(2, commit(10, 1, 0), commit(10, 1, 1))], made)
    assert believed(found) == [commit(10, 2, 0)]
    assert shadowed(found) == [commit(10, 1, 1), commit(10, 1, 0)]
    # Deleting only the one that counts would bring an older one back.
    without = listing([incarnation(2, commit(10, 1, 0), commit(10, 1, 1))], made, [stone(commit(10, 2, 0), 2)])
    assert believed(without) == [commit(10, 1, 1)]
    assert accepted_for_new(found, exclude=[commit(10, 2, 0)]) == [commit(10, 1, 1)]


def test_a_tombstone_holds_until_a_newer_incarnation_lists_the_checkpoint():
    of = commit(10)
    found = listing([incarnation(1)], {of: True}, [stone(of, 1)])
    assert believed(found) == [] and accepted_for_new(found) == []
    found = listing([incarnation(1), incarnation(2, of)], {of: True}, [stone(of, 1)])
    assert believed(found) == [of]
    assert swept(found) == []
    found = listing([incarnation(1), incarnation(2, of)], {of: True}, [stone(of, 1), stone(of, 2)])
    assert believed(found) == []
    found = listing([incarnation(1), incarnation(2, of), incarnation(3, of)], {of: True}, [stone(of, 2)])
    assert believed(found) == [of]


def test_tombstones_of_another_checkpoint_or_of_the_past_are_void():
    found = listing([incarnation(3)], {commit(10, 3): True})
    assert is_void(found, stone(commit(11, 3), 3), commit(10, 3))
    assert is_void(found, stone(commit(10, 3), 2), commit(10, 3))
    assert not is_void(found, stone(commit(10, 3), 3), commit(10, 3))
    # One by an incarnation whose file was not seen yet is respected.
    assert not is_void(found, stone(commit(10, 3), 4), commit(10, 3))


def test_what_is_deleted_goes_after_the_grace_time():
    of = commit(10)
    found = listing([incarnation(1)], {of: True, commit(20): True}, [stone(of, 1, created_s=1000.0)])
    assert swept(found, now_s=1099.0) == []
    assert swept(found, now_s=1100.0) == [of]
    assert swept(found, now_s=500.0) == []  # a clock behind the writer's


def test_a_sweep_cut_short_is_taken_up_again():
    """The manifest goes first, then the packs, the tombstones last: what is left is still debris, and never a checkpoint."""
    of = commit(10)
    left = listing([incarnation(1)], {of: False}, [stone(of, 1)])
    assert believed(left) == [] and swept(left, live=None) == [of]
    without_stone = listing([incarnation(2, of)], {of: False})
    assert believed(without_stone) == [] and swept(without_stone) == []


def test_attempts_that_are_alive_or_unknown_stay():
    found = listing(
        [incarnation(1), incarnation(2)],
        {commit(30, 2): False, commit(31, 2): False, commit(5, 3): False, commit(4, 1): False},
    )
    assert swept(found, live={commit(30, 2)}) == [commit(4, 1), commit(31, 2)]
    assert swept(found, live=None) == [commit(4, 1)]
    # A live attempt stays even with a tombstone: its manifest may be on its way.
    found = listing([incarnation(2)], {commit(30, 2): False}, [stone(commit(30, 2), 2)])
    assert swept(found, live={commit(30, 2)}) == []
    assert swept(found, live=()) == [commit(30, 2)]


def test_what_the_newest_lists_is_never_swept_for_a_missing_manifest():
    """A listing can lie for a while (NFS); the packs of an accepted checkpoint are not given up for it."""
    found = listing([incarnation(1), incarnation(2, commit(10))], {commit(10): False})
    assert believed(found) == [] and swept(found, now_s=1e12) == []


# ---- node-local disks ----


def test_a_manifest_counts_once_every_node_of_its_plan_has_it():
    whole, partial = commit(10), commit(20)
    disks = {
        0: listing([incarnation(1)], {whole: True, partial: True}),
        1: listing([incarnation(1)], {whole: True, partial: False}),
    }
    nodes_of = {whole: {0, 1}, partial: {0, 1}}
    assert believed(combine(disks, nodes_of, {0, 1})) == [whole]
    disks[1] = listing([incarnation(1)], {whole: True, partial: True})
    assert believed(combine(disks, nodes_of, {0, 1})) == [partial, whole]
    # A node that was lost takes its checkpoints along; a manifest that nobody can read counts nowhere.
    assert believed(combine({0: disks[0]}, nodes_of, {0})) == []
    assert believed(combine(disks, {}, {0, 1})) == []


def test_an_incarnation_counts_once_every_node_knows_it():
    of = commit(10)
    disks = {0: listing([incarnation(1), incarnation(2, of)], {of: True}), 1: listing([incarnation(1)], {of: True})}
    assert combine(disks, {of: {0, 1}}, {0, 1}).newest == 1
    disks[1] = listing([incarnation(1), incarnation(2, of)], {of: True})
    assert combine(disks, {of: {0, 1}}, {0, 1}).newest == 2


def test_one_nodes_tombstone_is_enough():
    of = commit(10)
    disks = {0: listing([incarnation(1)], {of: True}, [stone(of, 1)]), 1: listing([incarnation(1)], {of: True})}
    assert believed(combine(disks, {of: {0, 1}}, {0, 1})) == []
