"""What an agent says of its own survival."""

from __future__ import annotations

import pytest

from safehold.policy.survival import notes

STEP = "/system.slice/slurmstepd.scope/job_12/step_0/user/task_0"


def test_nothing_where_the_agent_outlives_its_trainers() -> None:
    for group in ("/", "/user.slice/user-1000.slice/session-3.scope", "/user.slice/user@1000.service", "/anything"):
        assert notes(group=group, trainer_group=group) == []
    assert notes(group=STEP.replace("step_0", "step_1"), trainer_group=STEP) == [], "a step of its own"
    assert notes(group="/system.slice/agent.service", trainer_group="/system.slice/train.service") == []
    assert notes(group="/", trainer_group="", in_container=True) == [], "trainers in another container"
    assert notes(group="", trainer_group="") == []


@pytest.mark.parametrize(
    ("group", "in_container", "words"),
    [
        (STEP, False, ["Slurm step", "srun --overlap"]),
        ("/slurm/uid_1000/job_12/step_batch/task_0", False, ["Slurm step"]),
        ("/", True, ["container", "sidecar"]),
        ("/kubepods/pod1/abc", True, ["container"]),
        ("/system.slice/train.service", False, ["train.service stops", "unit of its own"]),
        ("/user.slice/user@1000.service/app.slice/train.service", False, ["train.service"]),
        ("/system.slice/train.service/inner", False, ["train.service"]),
    ],
)
def test_who_ends_with_the_trainers_says_so(group: str, in_container: bool, words: list[str]) -> None:
    [found] = notes(group=group, trainer_group=group, in_container=in_container)
    for word in (*words, "docs/survival.md"):
        assert word in found


def test_who_is_killed_together_says_so() -> None:
    together = {"kill_together": "/sys/fs/cgroup/job", "trainer_kill_together": "/sys/fs/cgroup/job"}
    [found] = notes(group="/job/a", trainer_group="/job/b", **together)
    assert "/sys/fs/cgroup/job/memory.oom.group" in found and "memory_budget_bytes" in found
    apart = {"kill_together": "/sys/fs/cgroup/a", "trainer_kill_together": "/sys/fs/cgroup/b"}
    assert notes(group="/a", trainer_group="/b", **apart) == []
    assert len(notes(group=STEP, trainer_group=STEP, **together)) == 2
