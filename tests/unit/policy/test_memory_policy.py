"""What a new start believes of what lies in memory, who keeps whose copies, and what that takes."""

from __future__ import annotations

import itertools

import pytest

from safehold.errors import ConfigurationError
from safehold.policy.memory_belief import HeldTold, choose
from safehold.policy.memory_need import Need, partners
from safehold.policy.placement import Scheme, place, survives
from safehold.types import CommitId


def told(
    step: int,
    shares: tuple[int, ...],
    *,
    by: int = 3,
    knows: bool = True,
    run: str = "run",
    manifest: str = "m",
    nodes: tuple[int, ...] = (0, 1),
) -> HeldTold:
    return HeldTold(
        commit=CommitId(step, 3, 0),
        run_id=run,
        manifest=f"{manifest}{step}" if knows else "",
        believed_by=by if knows else 0,
        nodes=nodes if knows else (),
        shares=shares,
    )


def test_the_newest_whole_one_is_taken_and_newer_ones_are_explained() -> None:
    found, words = choose({0: [told(7, (0,)), told(6, (0,))], 1: [told(6, (1, 0))]}, run_id="run", before=3)
    assert found is not None
    assert (found.commit.step, found.manifest, found.knowers) == (6, "m6", (0, 1))
    assert found.holders == {0: (0, 1), 1: (1,)}
    assert len(words) == 1 and "step 7" in words[0] and "node 1" in words[0]


def test_one_node_that_knows_the_commit_is_enough_and_others_may_have_the_shares() -> None:
    found, _ = choose({0: [told(6, (0, 1), knows=False)], 1: [told(6, ())]}, run_id="run", before=3)
    assert found is not None and found.knowers == (1,) and found.holders == {0: (0,), 1: (0,)}


@pytest.mark.parametrize(
    "entry",
    [
        told(6, (0, 1), by=2),  # a start of the job between has not accepted it
        told(6, (0, 1), by=4),
        told(6, (0, 1), run="another"),
        told(6, (0, 1), knows=False),
        told(6, (0,)),
    ],
)
def test_what_is_not_believed_or_not_whole_is_not_used(entry: HeldTold) -> None:
    assert choose({0: [entry]}, run_id="run", before=3)[0] is None
    assert choose({}, run_id="run", before=3) == (None, ())


def test_copies_come_from_other_failure_domains() -> None:
    domains = ["rack-1", "rack-1", "rack-2", "rack-2"]
    found = partners(4, domains, 1)
    assert not found.warnings
    for node, keepers in found.of.items():
        assert len(keepers) == 1 and domains[keepers[0]] != domains[node]
        assert node in found.wards(keepers[0])


@pytest.mark.parametrize(("num_nodes", "copies"), [(2, 1), (3, 1), (5, 2), (6, 3), (2, 3)])
def test_partners_are_those_of_the_redundancy_sets(num_nodes: int, copies: int) -> None:
    found = partners(num_nodes, [], copies)
    layout = place(Scheme(kind="copies", num_data=1, num_parity=copies), range(num_nodes))
    for count in range(num_nodes + 1):
        for lost in itertools.combinations(range(num_nodes), count):
            whole = all(node not in lost or not set(found.of[node]) <= set(lost) for node in range(num_nodes))
            assert whole == survives(layout, lost)


def test_a_lone_node_and_no_copies_have_no_partners() -> None:
    assert partners(1, [], 1).of == {0: ()}
    assert partners(3, [], 0).of == {0: (), 1: (), 2: ()}
    with pytest.raises(ConfigurationError, match="failure domain"):
        partners(2, ["a//b", ""], 1)


def test_what_is_needed_is_counted_in_full_and_shown() -> None:
    need = Need(own_bytes=1000, num_ranks=8, wards={"n1": 900, "n3": 500})
    assert need.total_bytes == 2 * (1000 + 900 + 500)
    assert need.words() == (
        "2 x 1,000 bytes for 8 ranks + 2 x 900 for copies of node n1 + 2 x 500 for copies of node n3 = 4,800 bytes"
    )
