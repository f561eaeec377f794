"""Who takes whose place, and who makes which share, after a restore."""

from __future__ import annotations

from itertools import combinations, permutations

import pytest

from safehold.policy.mending import mend
from safehold.policy.placement import RedundancySet, parse_scheme, place

SCHEME = parse_scheme(parity="rs:2+2")
assert SCHEME is not None
SAVED = ["a", "b", "c", "d"]
SETS = place(SCHEME, range(4)).sets


def where(*names: str) -> dict[int, str]:
    return {SAVED.index(name): name for name in names}


def test_nothing_is_to_be_done_where_nothing_is_missing() -> None:
    plan = mend(SCHEME, range(4), SAVED, where(*"abcd"), SETS, range(4), ["d", "a", "b", "c"], {})
    assert plan.rebuilds == {} and plan.shares == () and plan.at == {0: 1, 1: 2, 2: 3, 3: 0}


def test_a_node_of_the_same_name_or_place_comes_first_and_then_any() -> None:
    assert mend(SCHEME, range(4), SAVED, where(*"abc"), SETS, [0, 1, 2], list("abcd"), {}).rebuilds == {3: 3}
    assert mend(SCHEME, range(4), SAVED, where(*"cd"), SETS, [2, 3], list("bacd"), {}).rebuilds == {0: 1, 1: 0}
    assert mend(SCHEME, range(4), SAVED, where(*"ad"), SETS, [0, 3], list("axyd"), {}).rebuilds == {1: 1, 2: 2}
    assert mend(SCHEME, range(4), SAVED, where(*"cd"), SETS, [2, 3], ["c", "d", "x", "y"], {}).rebuilds == {0: 2, 1: 3}


def test_every_loss_has_another_node_in_its_place_and_all_who_lack_a_share_make_it() -> None:
    for lost in [chosen for count in (1, 2) for chosen in combinations(range(4), count)]:
        there = [node for node in range(4) if node not in lost]
        for order in permutations([SAVED[node] for node in there] + ["x", "y"][: len(lost)]):
            at = where(*(SAVED[node] for node in there))
            plan = mend(SCHEME, range(4), SAVED, at, SETS, there, list(order), {})
            assert set(plan.rebuilds) == set(lost) and sorted(plan.at.values()) == [0, 1, 2, 3]
            assert [node for node, _ in plan.shares] == list(lost) and {of for _, of in plan.shares} == set(SETS)
            assert all(order[plan.at[node]] == SAVED[node] for node in there)


def test_fewer_nodes_give_nothing_back() -> None:
    plan = mend(SCHEME, range(4), SAVED, where(*"abc"), SETS, [0, 1, 2], list("abc"), {})
    assert plan.left == (3,) and not plan.rebuilds and not plan.shares


def test_a_checkpoint_without_redundancy_gets_it_over_the_domains_of_where_it_lies() -> None:
    copies = parse_scheme(copies=1)
    assert copies is not None
    domains = {0: "rack-1", 1: "rack-1", 2: "rack-2", 3: "rack-2"}
    plan = mend(copies, range(4), SAVED, where(*"abcd"), [], [], ["c", "a", "b", "d"], domains)
    assert [node for node, _ in plan.shares] == [0, 1, 2, 3]
    for _, of in plan.shares:
        assert len({domains[plan.at[node]] for node in of.members}) == 2
    assert mend(copies, [0], ["a"], {0: "a"}, [], [], ["a"], {}).shares == ()


def test_sets_that_are_there_stay_as_they_are_made() -> None:
    half = RedundancySet(kind="copies", num_data=1, num_parity=1, members=(0, 1))
    plan = mend(SCHEME, range(4), SAVED, where(*"abcd"), [half], [0], SAVED, {})
    assert (1, half) in plan.shares and 0 not in dict(plan.shares)
    assert {of.members for node, of in plan.shares if node in (2, 3)} in ({(2, 3)}, {(3, 2)})


@pytest.mark.parametrize("at", [{}, {0: "gone"}])
def test_what_is_at_a_node_that_is_not_in_the_job_is_lost(at: dict[int, str]) -> None:
    assert mend(SCHEME, [0], ["a"], at, [], [], ["x"], {}).rebuilds == {0: 0}
