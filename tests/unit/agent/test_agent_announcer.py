"""Saves by time: announced ahead of all ranks, judged by who began, dropped and announced again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from agent_fakes import FakeClock, Node

from safehold.agent import messages as m
from safehold.agent.announcer import Announcer
from safehold.errors import SkippedError
from safehold.host.control import NodeControl, RankControl


class Lead:
    """An announcer and two ranks' control words."""

    def __init__(self, every_seconds: float = 60.0) -> None:
        self.clock = FakeClock()
        self.node_control = NodeControl.create()
        self.controls = {rank: RankControl.create() for rank in (0, 1)}
        self.dropped = 0
        self.announcer = Announcer(
            world_size=2,
            every_seconds=every_seconds,
            steps=lambda: {rank: control.step for rank, control in self.controls.items() if control.beat_ns},
            announce=self.node_control.announce,
            clock=self.clock,
            drop=self._drop,
        )

    def _drop(self) -> None:
        self.dropped += 1
        self.announcer.abandoned(0)  # as the session does when the lead has given the save up

    def pass_(self, seconds: float, *steps: int) -> int | None:
        """Time passes and ranks get on; returns the announced step."""
        self.clock.now += seconds
        for rank, step in enumerate(steps):
            self.controls[rank].set_progress(step=step)
        self.announcer.tick()
        return self.node_control.announcement.step

    def close(self) -> None:
        self.node_control.close()
        for control in self.controls.values():
            control.close()


@pytest.fixture
def lead() -> Iterator[Lead]:
    lead = Lead()
    yield lead
    lead.close()


def test_nothing_before_the_interval_or_before_all_ranks_reported(lead: Lead) -> None:
    assert lead.pass_(30.0, 5) is None
    assert lead.pass_(31.0, 6) is None, "rank 1 has not reported a step"
    assert lead.pass_(1.0, 6, 7) == 9, "two steps behind the furthest rank"


def test_short_steps_are_announced_further_ahead(lead: Lead) -> None:
    for number in range(100):
        lead.pass_(0.05, number * 5, number * 5)
    assert lead.pass_(60.0, 500, 500) is not None
    assert lead.node_control.announcement.step - 500 >= 2


def test_without_an_interval_it_is_quiet() -> None:
    lead = Lead(every_seconds=0.0)
    assert lead.announcer.next_deadline() is None
    assert lead.pass_(1e6, 5, 5) is None
    lead.close()


def test_all_have_begun_and_the_interval_starts_again_at_the_commit(lead: Lead) -> None:
    assert lead.pass_(60.0, 5, 5) == 7
    lead.announcer.begun(7, 0)
    lead.pass_(1.0, 8, 6)
    assert lead.dropped == 0
    lead.announcer.begun(7, 1)
    lead.pass_(1.0, 8, 8)
    lead.pass_(20.0, 8, 8)
    lead.announcer.committed(7)
    assert lead.pass_(59.0, 9, 9) == 7
    assert lead.pass_(1.1, 9, 9) == 11 and lead.dropped == 0


def test_a_rank_that_passed_drops_it_and_it_is_announced_further_ahead_at_once(lead: Lead) -> None:
    assert lead.pass_(60.0, 5, 5) == 7
    lead.announcer.begun(7, 0)
    seq = lead.node_control.announcement.seq
    assert lead.pass_(1.0, 7, 8) == 12, "four steps ahead now"
    assert lead.dropped == 1 and lead.node_control.announcement.seq != seq
    assert lead.pass_(1.0, 20, 20) == 28 and lead.dropped == 2
    lead.announcer.begun(28, 0)
    lead.announcer.begun(30, 1)
    lead.pass_(1.0, 40, 40)
    assert lead.dropped == 2
    assert lead.pass_(60.0, 40, 40) in (42, 43), "the margin is small again"


@pytest.mark.parametrize("outcome", ["committed", "abandoned"])
def test_the_end_of_an_earlier_save_is_no_word_about_what_is_announced(lead: Lead, outcome: str) -> None:
    assert lead.pass_(60.0, 5, 5) == 7
    getattr(lead.announcer, outcome)(6)
    lead.announcer.begun(7, 0)
    assert lead.pass_(1.0, 7, 8) == 12 and lead.dropped == 1, "rank 0 does not wait for rank 1, which has passed it"
    getattr(lead.announcer, outcome)(12)
    assert lead.pass_(59.0, 20, 20) == 12 and lead.dropped == 1


def test_steps_in_strides_are_not_taken_for_passing(lead: Lead) -> None:
    """Ranks that tell every tenth step only: they begin at the first one at or behind the announced step, and tell it then."""
    assert lead.pass_(60.0, 10, 10) == 12
    lead.announcer.begun(20, 0)
    assert lead.pass_(1.0, 20, 10) == 12 and lead.dropped == 0
    lead.announcer.begun(20, 1)
    lead.pass_(1.0, 20, 20)
    assert lead.dropped == 0


def test_an_announcement_that_nobody_reaches_runs_out(lead: Lead) -> None:
    assert lead.pass_(60.0, 5, 5) == 7
    assert lead.pass_(599.0, 6, 6) == 7
    assert lead.pass_(2.0, 6, 6) == 10 and lead.dropped == 1


def test_it_looks_now_and_then_only(lead: Lead) -> None:
    lead.pass_(60.0, 5, 5)
    due = lead.announcer.next_deadline()
    assert due is not None and 0.0 < due - lead.clock.now <= 0.1


def test_a_dropped_save_is_given_up_quietly_by_those_who_began_it() -> None:
    node = Node(every_seconds=60.0)
    for control in node.controls:
        control.set_progress(step=5)
    node.tick(60.0)
    assert node.session.node_control.announcement.step == 7
    node.begin(0, 7, announced=True)
    node.controls[1].set_progress(step=9)
    node.tick(1.0)
    assert isinstance(node.failure(0), SkippedError) and "announced again" in str(node.failure(0))
    announced = node.session.node_control.announcement.step
    assert announced is not None and announced > 9
    node.flushed(0, error=SkippedError("cancelled"))
    for rank in (0, 1):
        node.begin(rank, announced, announced=True)
        node.controls[rank].set_progress(step=announced)
        node.stage(rank, announced)
        node.flushed(rank)
    node.record()
    node.publish()
    assert node.peers[0].last(m.Durable).step == announced


def test_a_dropped_save_that_waits_for_the_one_before_is_given_up_too() -> None:
    node = Node(every_seconds=60.0)
    for rank in (0, 1):
        node.controls[rank].set_progress(step=5)
    node.tick(59.0)
    for rank in (0, 1):
        node.begin(rank, 6)
    node.tick(1.0)
    request = node.begin(0, 7, announced=True, pump=False)
    assert node.reply_to(0, request) is None
    node.controls[1].set_progress(step=9)
    node.tick(1.0)
    assert isinstance(node.reply_to(0, request), m.Refused) and "announced again" in str(node.peers[0].refusal())


def test_a_save_that_the_user_asked_for_is_not_dropped() -> None:
    node = Node(every_seconds=60.0)
    for control in node.controls:
        control.set_progress(step=5)
    node.tick(60.0)
    node.begin(0, 8)
    for control in node.controls:
        control.set_progress(step=20)
    node.tick(1.0)
    assert not node.peers[0].of(m.SaveFailed)
