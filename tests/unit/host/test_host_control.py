"""Words in shared memory: whole, fenced, and of the save that they speak of."""

import os
import subprocess
import sys
import threading
import time

import pytest

from safehold.errors import AgentUnavailableError
from safehold.host import control, memfd
from safehold.host.control import NodeControl, RankControl


@pytest.fixture
def rank():
    block = RankControl.create()
    yield block
    block.close()


@pytest.fixture
def other(rank):
    block = RankControl.attach(*(os.dup(fd) for fd in rank.fds))
    yield block
    block.close()


def test_progress_is_seen_on_the_other_side(rank, other):
    assert other.beat_ns == 0
    rank.set_progress(step=7, phase=control.TRAINING)
    assert (other.step, other.phase) == (7, control.TRAINING)
    assert 0 < time.monotonic_ns() - other.beat_ns < 10**10


def test_staged_bytes_belong_to_a_save(rank, other):
    rank.begin_save(1)
    rank.advance_staged(4096)
    assert other.save_seq == 1
    assert other.staged_of(1) == 4096
    rank.begin_save(2)
    assert other.staged_of(1) is None
    assert other.staged_of(2) == 0
    assert other.wait_staged(1, 0, 5.0) is None


def test_large_arenas_and_long_runs_fit_the_words(rank, other):
    rank.begin_save(65536 + 5)
    rank.advance_staged((1 << 47) + 1)
    assert other.staged_of(65536 + 5) == (1 << 47) + 1
    assert other.save_seq == 65541


def test_waiting_for_staged_bytes(rank, other):
    rank.begin_save(1)
    assert other.wait_staged(1, 0, 0.01) == 0

    def stage():
        for count in range(1, 6):
            time.sleep(0.01)
            rank.advance_staged(count * 100)

    thread = threading.Thread(target=stage)
    thread.start()
    seen = 0
    while seen < 500:
        seen = other.wait_staged(1, seen, 5.0)
    thread.join()
    assert seen == 500


def test_waiting_for_flushed_bytes(rank, other):
    other.begin_flush(3)
    assert not rank.wait_flushed(3, 1, 0.01)
    other.advance_flushed(3, 10)
    assert rank.wait_flushed(3, 10, 1.0)
    assert not rank.wait_flushed(4, 10, 0.01)


def test_a_block_that_cannot_be_made_whole_leaves_no_descriptor(monkeypatch):
    def none_left(*_):
        raise OSError(24, "Too many open files")

    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(os, "eventfd", none_left)
    with pytest.raises(OSError, match="Too many"):
        RankControl.create()
    assert os.listdir("/proc/self/fd") == before


def test_a_block_of_another_layout_is_refused(rank):
    with pytest.raises(AgentUnavailableError, match="layout"):
        NodeControl.attach(os.dup(rank.block_fd))
    unsealed = os.memfd_create("x")
    os.ftruncate(unsealed, 4096)
    with pytest.raises(AgentUnavailableError):
        NodeControl.attach(unsealed)


def test_announcements():
    node = NodeControl.create()
    assert node.announcement == control.Announcement(0, None, 0)
    first = node.announce(0)
    assert node.announcement == control.Announcement(first, 0, 0)
    second = node.announce(10**12, kind=3)
    assert node.announcement == control.Announcement(second, 10**12, 3)
    node.announce(None)
    assert node.announcement.step is None and node.announcement.seq not in (first, second)
    for _ in range(70_000):
        node.announce(5)
    assert 0 < node.announcement.seq < 65536
    node.beat()
    assert node.agent_beat_ns > 0
    node.close()


READER = """
import sys
from safehold.host.control import RankControl
from safehold.host import memfd
block, wake, arena = map(int, sys.argv[1:])
control = RankControl.attach(block, wake)
view = memfd.Mapping(arena, writable=False).view
seen = 0
while seen < 200 * 4096:
    staged = control.wait_staged(1, seen, 20.0)
    assert staged is not None and staged > seen, staged
    assert bytes(view[seen:staged]) == b"".join(bytes([n % 251 + 1]) * 4096 for n in range(seen // 4096, staged // 4096))
    seen = staged
"""


def test_another_process_sees_the_bytes_that_the_word_speaks_of(rank):
    arena = memfd.create(200 * 4096, "test")
    with memfd.Mapping(arena) as mapping:
        rank.begin_save(1)
        fds = (*rank.fds, arena)
        with subprocess.Popen([sys.executable, "-c", READER, *map(str, fds)], pass_fds=fds) as reader:
            for number in range(200):
                mapping.view[number * 4096 : (number + 1) * 4096] = bytes([number % 251 + 1]) * 4096
                rank.advance_staged((number + 1) * 4096)
            assert reader.wait(30) == 0
    os.close(arena)
