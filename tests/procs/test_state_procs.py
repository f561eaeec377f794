"""Real gloo ranks of every parallel kind: what each rank reads rebuilds the true tensors, and restores into other kinds."""

from __future__ import annotations

import launch
import pytest

pytestmark = pytest.mark.procs

TIMEOUT_S = 110.0


@pytest.mark.parametrize(
    ("world_size", "pairs"),
    [
        pytest.param(2, [["ddp", "fsdp1_orig"], ["fsdp1_orig", "fsdp2"], ["fsdp2", "ddp"]], id="ddp, fsdp1, fsdp2"),
        pytest.param(2, [["fsdp1_flat", "fsdp1_orig"], ["fsdp1_whole", "fsdp1_flat"]], id="fsdp1 flat and whole"),
        pytest.param(3, [["fsdp2", "fsdp1_flat"], ["fsdp1_orig", "plain"]], id="uneven"),
        pytest.param(4, [["hsdp2", "fsdp1_hybrid"], ["fsdp1_hybrid", "hsdp2"]], id="replicated shards"),
        pytest.param(4, [["tp_fsdp2", "plain_pair"], ["plain_pair", "tp_fsdp2"]], id="tensor parallel and fsdp2"),
    ],
)
def test_round_trips(world_size: int, pairs: list[list[str]]) -> None:
    results = launch.run("state_workers:round_trips", world_size, {"pairs": pairs}, timeout_s=TIMEOUT_S)
    assert all(result == results[0] for result in results)


def test_unsharded_parameters_are_read_as_shards() -> None:
    assert launch.run("state_workers:unsharded", 2, timeout_s=TIMEOUT_S) == [["fsdp2", "fsdp1_grad_op"]] * 2


def test_pipeline_with_interleaved_chunks() -> None:
    first, second = launch.run("state_workers:pipeline", 2, timeout_s=TIMEOUT_S)
    assert first == second
    assert len(first) == 32


def test_uneven_experts_and_plain_local_state() -> None:
    assert launch.run("state_workers:experts", 3, timeout_s=TIMEOUT_S) == [6, 6, 6]


def test_every_pair_of_placements() -> None:
    assert len(set(launch.run("state_workers:placements", 4, timeout_s=TIMEOUT_S))) == 1
