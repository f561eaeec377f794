"""Whether all nodes see one run directory: the lead's questions, and every way in which the answers may come or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from agent_fakes import FakeClock, FakeFlusher

from safehold.agent import places
from safehold.agent import words as w
from safehold.agent.places import Places
from safehold.config import Config
from safehold.errors import CheckpointError, ConfigurationError, DeadlineError, RankLostError, StorageError
from safehold.tiers.flash import FlashTier


class Lead:
    """The lead of three nodes, in the middle."""

    def __init__(self, flash: str = "auto", names: tuple[str, ...] = ("x", "lead", "y")) -> None:
        self.flusher, self.clock = FakeFlusher(), FakeClock()
        self.told: list[tuple[int, w.Word]] = []
        self.verdicts: list[tuple[bool, CheckpointError | None]] = []
        self.places = Places(
            names=list(names),
            here=names.index("lead"),
            config=Config(flash=flash),  # type: ignore[arg-type]
            flusher=self.flusher,  # type: ignore[arg-type]
            tell=lambda node, word: self.told.append((node, word)),
            clock=self.clock,
        )

    def ask(self) -> None:
        self.places.decide(lambda local, error: self.verdicts.append((local, error)), 5.0)

    def put(self) -> None:
        self.flusher.answer("place", True)

    def say(self, node: int, sees: bool, error: CheckpointError | None = None, number: int = 1) -> None:
        self.places.saw(node, w.Saw(number, sees, None if error is None else error.to_wire()))

    @property
    def deleted(self) -> list[str]:
        return [arguments["name"] for operation, arguments in self.flusher.log if arguments["do"] == "delete"]


@pytest.fixture
def lead() -> Lead:
    found = Lead()
    found.ask()
    return found


def test_what_is_in_an_object_store_is_shared_and_said_to_be_there() -> None:
    for flash in ("auto", "shared"):
        found = Lead(flash)
        found.flusher.url = "s3://bucket/run"
        found.ask()
        assert found.verdicts == [(False, None)] and not found.flusher.log
    found = Lead("local")
    found.flusher.url = "s3://bucket/run"
    found.ask()
    [(local, error)] = found.verdicts
    assert not local and isinstance(error, ConfigurationError) and "is in an object store" in error.message
    assert places.note(False, 4, "s3://bucket/run") == "object store: 4 nodes share one run directory"
    assert places.note(False, 4, "/run") == "shared flash: 4 nodes see one run directory"


def test_nobody_is_asked_where_it_is_settled() -> None:
    for flash, names, local in (("shared", 3, False), ("local", 3, True), ("local", 1, False), ("auto", 1, False)):
        found = Lead(flash, ("x", "lead", "y") if names == 3 else ("lead",))
        found.ask()
        assert found.verdicts == [(local, None)] and not found.flusher.log


@pytest.mark.parametrize("sees", [True, False])
def test_all_or_none_decide(lead: Lead, sees: bool) -> None:
    assert not lead.told  # the file is not there yet
    lead.put()
    assert [node for node, _ in lead.told] == [0, 2]
    (_, asked), _ = lead.told
    assert isinstance(asked, w.SeeFile) and asked.name.startswith(".tmp-") and len(asked.content) > 15
    lead.say(0, sees)
    assert not lead.verdicts and not lead.deleted
    lead.say(2, sees)
    assert lead.verdicts == [(not sees, None)]
    assert lead.deleted == [asked.name]


def test_some_are_named(lead: Lead) -> None:
    lead.put()
    lead.say(0, True)
    lead.say(2, False)
    ((_, error),) = lead.verdicts
    assert isinstance(error, ConfigurationError) and error.node == "y"
    assert "of the other nodes x see the run directory of node lead, and y do not" in error.message
    assert lead.deleted


def test_a_node_whose_disk_fails_is_named(lead: Lead) -> None:
    lead.put()
    lead.say(2, False, StorageError("no answer"))
    ((_, error),) = lead.verdicts
    assert isinstance(error, StorageError) and error.node == "y" and lead.deleted
    lead.say(0, True)
    assert len(lead.verdicts) == 1


def test_a_disk_of_the_lead_that_fails_ends_it(lead: Lead) -> None:
    lead.flusher.answer("place", None, StorageError("full"))
    ((_, error),) = lead.verdicts
    assert isinstance(error, StorageError) and not lead.told


@pytest.mark.parametrize("put_before", [True, False])
def test_a_lost_node_is_named(lead: Lead, put_before: bool) -> None:
    if put_before:
        lead.put()
    lead.places.lost(0)
    ((_, error),) = lead.verdicts
    assert isinstance(error, RankLostError) and error.node == "x"
    lead.ask()
    lead.flusher.calls.clear()
    lead.places.back(0)


def test_a_node_that_was_lost_before_is_named_at_once() -> None:
    found = Lead()
    found.places.lost(2)
    found.ask()
    found.put()
    ((_, error),) = found.verdicts
    assert isinstance(error, RankLostError) and error.node == "y" and not found.told


def test_a_node_that_says_nothing_is_named_at_the_deadline(lead: Lead) -> None:
    lead.put()
    lead.say(0, True)
    assert lead.places.next_deadline() == lead.clock.monotonic() + 5.0
    lead.places.tick()
    assert not lead.verdicts
    lead.clock.now += 5.1
    lead.places.tick()
    ((_, error),) = lead.verdicts
    assert isinstance(error, DeadlineError) and error.node == "y" and "node y did not say" in error.message
    assert lead.places.next_deadline() is None


def test_answers_to_an_earlier_question_count_for_nothing(lead: Lead) -> None:
    lead.put()
    lead.say(0, True)
    lead.ask()  # rank 0 came again
    assert isinstance(lead.verdicts.pop()[1], RankLostError)
    lead.flusher.answer("place", True)
    for answer in list(lead.flusher.calls):
        answer[2](True, None)
    lead.say(0, False, number=2)
    lead.say(2, True, number=1)
    assert not lead.verdicts
    lead.say(2, False, number=2)
    assert lead.verdicts == [(True, None)]


def test_a_node_looks_and_says_what_it_saw() -> None:
    flusher, told = FakeFlusher(), list[w.Saw]()
    word = w.SeeFile(3, ".tmp-where-1", b"content")
    for value, error in ((True, None), (False, None), (None, StorageError("broken"))):
        places.look(flusher, word, Config(), told.append)  # type: ignore[arg-type]
        flusher.answer("place", value, error)
    assert [(saw.number, saw.sees, bool(saw.error)) for saw in told] == [
        (3, True, False),
        (3, False, False),
        (3, False, True),
    ]


def test_the_file_is_a_temporary_of_ours_that_no_list_shows(tmp_path: Path) -> None:
    tier, other = FlashTier(tmp_path / "run"), FlashTier(tmp_path / "other")
    arguments: dict[str, Any] = {"do": "put", "name": ".tmp-where-1", "content": b"content"}
    see = {**arguments, "do": "see"}
    assert places.carry_out(tier, arguments)
    assert tier.list("") == []
    assert places.carry_out(FlashTier(tmp_path / "run"), see)
    assert not places.carry_out(FlashTier(tmp_path / "run"), {**see, "content": b"of another job"})
    assert not places.carry_out(other, see)
    assert places.carry_out(tier, {**arguments, "do": "delete"})
    assert not list((tmp_path / "run").iterdir())
    for name in ("run.json", ".tmp-x/../../y", "checkpoints/.tmp-1"):
        with pytest.raises(ConfigurationError):
            places.carry_out(tier, {**arguments, "name": name})
