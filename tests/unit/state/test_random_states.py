"""Random states: per rank, and derived where the number of ranks changed."""

from __future__ import annotations

import logging
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from safehold.errors import StateMismatchError
from safehold.state.collect import collect
from safehold.state.random_states import derived_seed, is_random_name, read_random_states, write_random_states
from safehold.state.rank_values import RankValues, value_for_rank
from safehold.state.values import to_plain
from safehold.types import ObjectSpec

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))
from state_checkpoint import MemoryCheckpoint


def draw() -> tuple[Any, ...]:
    normal = float(np.random.normal())
    return random.random(), random.gauss(0, 1), normal, torch.rand(2).tolist(), torch.randn(1).tolist()


def seed_all(seed: int) -> None:
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)


def test_every_rank_continues_its_own_streams() -> None:
    saved, expected = [], []
    for rank in range(2):
        seed_all(rank)
        draw()
        saved.append(collect({}, rank=rank, world_size=2))
        expected.append(draw())
    checkpoint = MemoryCheckpoint(saved)
    for rank in range(2):
        seed_all(99)
        checkpoint.restore({}, rank=rank, world_size=2)
        assert draw() == expected[rank]


def test_another_world_size_derives_the_same_streams_every_time(caplog: pytest.LogCaptureFixture) -> None:
    saved = []
    for rank in range(2):
        seed_all(rank)
        random.seed(7)
        saved.append(collect({}, rank=rank, world_size=2))
    checkpoint = MemoryCheckpoint(saved)
    random.seed(7)
    alike = random.random()
    drawn = []
    for attempt in range(2):
        for rank in range(3):
            seed_all(50 + attempt)
            with caplog.at_level(logging.WARNING, logger="safehold"):
                checkpoint.restore({}, rank=rank, world_size=3)
            drawn.append(draw())
    assert drawn[:3] == drawn[3:]
    assert all(values[0] == alike for values in drawn)
    assert len({str(values[2:]) for values in drawn[:3]}) == 3
    assert "safehold: random state torch: saved by 2 ranks, seeded anew for rank 1 of 3" in caplog.text
    assert "safehold: random state python: the same on all saved ranks" in caplog.text


def test_saved_without_or_asked_for_without() -> None:
    checkpoint = MemoryCheckpoint([collect({"a": 1}, rank=0, world_size=1, random_states=False)])
    seed_all(1)
    expected = draw()
    seed_all(1)
    checkpoint.restore({"a": 0})
    assert draw() == expected
    with_states = MemoryCheckpoint([collect({}, rank=0, world_size=1)])
    seed_all(1)
    binding = with_states.restore({}, random_states=False)
    assert draw() == expected
    assert len(binding.left_out) == 3 and binding.object_names == []


def test_a_generator_that_is_not_here_is_said_and_a_bad_state_is_named() -> None:
    said = write_random_states({"__safehold__.random.warp": 1, "other": 2}, rank=0, world_size=1)
    assert said == ["random state warp: saved, but there is no such generator in this process"]
    with pytest.raises(StateMismatchError, match=r"__safehold__\.random\.numpy"):
        write_random_states({"__safehold__.random.numpy": {"bit_generator": "MT19937"}}, rank=0, world_size=1)


def test_names() -> None:
    assert is_random_name("__safehold__.random.torch")
    assert not is_random_name("random.torch") and not is_random_name("__safehold__.other")
    assert all(map(is_random_name, read_random_states()))


def test_derived_seeds_depend_on_everything() -> None:
    saved = to_plain(read_random_states()["__safehold__.random.torch"], name="x")
    seeds = {
        derived_seed(source, state, rank=rank, world_size=world)
        for source in ("torch", "numpy")
        for state in (saved, 1)
        for rank in (0, 1)
        for world in (2, 3)
    }
    assert len(seeds) == 16 and all(0 <= seed < 2**63 for seed in seeds)


# Which rank's value an object gets.


def pick(policy: Any, values: dict[int, Any], *, rank: int = 0, world_size: int = 3, saved_world_size: int = 2) -> Any:
    return value_for_rank(
        ObjectSpec(name="o", policy=policy),
        {holder: repr(value) for holder, value in values.items()},
        values.__getitem__,
        rank=rank,
        world_size=world_size,
        saved_world_size=saved_world_size,
    )


@pytest.mark.parametrize("policy", ["same", "refuse", "first", "derive", "merge"])
def test_the_same_world_size_gives_every_rank_its_own(policy: str) -> None:
    assert pick(policy, {0: "a", 1: "b"}, rank=1, world_size=2) == "b"


def test_policies_on_another_world_size() -> None:
    assert pick("same", {0: "a", 1: "a"}, rank=2) == "a"
    assert pick("same", {1: "a"}, rank=0, world_size=2) == "a"
    assert pick("first", {1: "b", 0: "a"}, rank=2) == "a"
    assert pick("merge", {0: "a", 1: "b"}) == RankValues(values={0: "a", 1: "b"}, equal=False)
    assert pick("derive", {0: "a", 1: "a"}).equal
    for policy, values in (("same", {0: "a", 1: "b"}), ("refuse", {0: "a", 1: "a"})):
        with pytest.raises(StateMismatchError, match=r"^o: .*0, 1 of 2") as caught:
            pick(policy, values, rank=2)
        assert "PerRank" in str(caught.value.hint)


def test_groups_are_merged_by_parameter() -> None:
    one = {"groups": [{"params": ["a"], "values": {"lr": 1.0}}]}
    two = {"groups": [{"params": ["b"], "values": {"lr": 1.0}}]}
    merged = pick("groups", {0: one, 1: two, 2: one}, world_size=3, saved_world_size=3)
    assert [group["params"] for group in merged["groups"]] == [["a", "b"]]
    clash = {"groups": [{"params": ["a"], "values": {"lr": 2.0}}]}
    with pytest.raises(StateMismatchError, match=r"^o: .*\ba\b.*lr"):
        pick("groups", {0: one, 1: clash})


def test_ranks_that_join_a_single_one_draw_other_numbers() -> None:
    """One saved rank tells nothing about whether ranks are to be alike; masks of dropout must not be."""
    seed_all(3)
    checkpoint = MemoryCheckpoint([collect({}, rank=0, world_size=1)])
    alone = draw()
    drawn = []
    for rank in range(3):
        seed_all(50)
        checkpoint.restore({}, rank=rank, world_size=3)
        drawn.append(draw())
    assert drawn[0] == alone
    assert len({str(values) for values in drawn}) == 3
