"""How many cores are idle, from texts as the kernel writes them and from the kernel itself."""

from __future__ import annotations

import os

import pytest

from safehold.host.idle import KernelIdleCores

FIRST = """cpu  100 0 50 1000 20 0 5 0 0 0
cpu{a} 50 0 25 500 10 0 5 0 0 0
cpu{b} 50 0 25 500 10 0 0 0 0 0
intr 123 4
"""
# Both cores: 100 ticks; the first idle for 40 of them and waiting for 10, the second busy.
SECOND = """cpu  250 0 50 1040 30 0 5 0 0 0
cpu{a} 100 0 25 540 20 0 5 0 0 0
cpu{b} 150 0 25 500 10 0 0 0 0 0
intr 123 4
"""


def texts(monkeypatch: pytest.MonkeyPatch, cores: set[int], *found: str) -> KernelIdleCores:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores)
    left = [text.format(a=3, b=14) for text in found]
    return KernelIdleCores(lambda: left.pop(0))


def test_idle_and_waiting_count(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = texts(monkeypatch, {3, 14}, FIRST, SECOND)
    assert cores.num_cores == 2 and cores.sample() == pytest.approx(0.5)


def test_only_cores_that_this_process_may_use_count(monkeypatch: pytest.MonkeyPatch) -> None:
    assert texts(monkeypatch, {3}, FIRST, SECOND).sample() == pytest.approx(0.5)
    assert texts(monkeypatch, {14}, FIRST, SECOND).sample() == 0.0


@pytest.mark.parametrize("second", [FIRST, "", "cpu3 1 2\n", "cpux 1 2 3 4 5 6 7 8\n"])
def test_no_answer_where_the_kernel_has_none(monkeypatch: pytest.MonkeyPatch, second: str) -> None:
    assert texts(monkeypatch, {3, 14}, FIRST, second).sample() is None


def test_no_file_is_no_answer() -> None:
    def refuse() -> str:
        raise FileNotFoundError("/proc/stat")

    assert KernelIdleCores(refuse).sample() is None


def test_the_real_one_answers_within_what_there_is() -> None:
    cores = KernelIdleCores()
    deadline = os.times().elapsed + 5
    while (found := cores.sample()) is None and os.times().elapsed < deadline:
        pass
    assert found is not None and 0 <= found <= cores.num_cores
