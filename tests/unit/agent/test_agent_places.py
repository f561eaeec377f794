"""Whether all nodes see one run directory: the lead's questions, and every way in which the answers may come or not."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
from agent_fakes import FakeClock, FakeFlusher

from safehold.agent import fetching, places
from safehold.agent import words as w
from safehold.agent.places import Places
from safehold.config import Config
from safehold.errors import (
    CheckpointError,
    ConfigurationError,
    DeadlineError,
    RankLostError,
    StorageError,
    StorageReadOnlyError,
)
from safehold.testing.fake_tier import FakeTier
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

    def ask_second(self) -> FakeFlusher:
        copier = FakeFlusher()
        self.errors: list[CheckpointError | None] = []
        self.places.second_place(copier, self.errors.append, 5.0)  # type: ignore[arg-type]
        return copier

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


def test_a_directory_that_a_node_sees_and_cannot_write_to_is_found(lead: Lead) -> None:
    class ReadOnly(FlashTier):
        def put(self, path: str, data: Any, **_: Any) -> None:
            raise StorageReadOnlyError("read-only file system", path=path)

        def get(self, path: str, **_: Any) -> bytes:
            return b"content"

    flusher = FakeFlusher({"place": lambda arguments: places.carry_out(ReadOnly("/run"), arguments)})
    lead.put()
    word = w.SeeFile(1, ".tmp-where-1", b"content")
    with pytest.raises(StorageReadOnlyError) as caught:
        places.look(flusher, word, 2, Config(), lambda saw: None)  # type: ignore[arg-type]
    assert caught.value.path == ".tmp-where-1-2", "each node tries a file of its own"
    lead.say(2, False, caught.value)
    ((_, error),) = lead.verdicts
    assert isinstance(error, StorageReadOnlyError) and error.node == "y"


def test_the_time_that_the_lead_s_flusher_takes_is_not_the_others(lead: Lead) -> None:
    assert lead.places.next_deadline() is None
    lead.clock.now += 4.9
    lead.put()
    lead.clock.now += 4.9
    lead.places.tick()
    assert not lead.verdicts
    lead.say(0, True)
    lead.say(2, True)
    assert lead.verdicts == [(False, None)]


def test_a_disk_of_the_lead_that_hangs_is_the_lead_s(lead: Lead) -> None:
    lead.flusher.answer(
        "place", None, DeadlineError("place: no answer", hint="a new flusher is started for the next save")
    )
    ((_, error),) = lead.verdicts
    assert (
        isinstance(error, DeadlineError)
        and error.node == "lead"
        and "small file in the run directory within 5 s" in error.message
    )
    assert "on that node" in str(error.hint) and "next save" not in str(error.hint) and not lead.told


def test_a_question_that_nobody_waits_for_any_more_leaves_no_file(lead: Lead) -> None:
    lead.places.stop()
    assert isinstance(lead.verdicts[0][1], RankLostError) and len(lead.deleted) == 1
    lead.put()  # it comes after its deletion
    assert len(lead.deleted) == 2 and len(set(lead.deleted)) == 1 and not lead.told
    lead.places.stop()
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
        places.look(flusher, word, 2, Config(), told.append)  # type: ignore[arg-type]
        flusher.answer("place", value, error)
    assert [(saw.number, saw.sees, bool(saw.error)) for saw in told] == [
        (3, True, False),
        (3, False, False),
        (3, False, True),
    ]


def test_the_file_is_a_temporary_of_ours_that_no_list_shows(tmp_path: Path) -> None:
    tier, other = FlashTier(tmp_path / "run"), FlashTier(tmp_path / "other")
    arguments: dict[str, Any] = {"do": "put", "name": ".tmp-where-1", "content": b"content"}
    see = {**arguments, "do": "see", "own": ".tmp-where-1-2", "blind": True}
    assert places.carry_out(tier, arguments)
    assert tier.list("") == []
    assert places.carry_out(FlashTier(tmp_path / "run"), see)
    assert not places.carry_out(FlashTier(tmp_path / "run"), {**see, "content": b"of another job"})
    assert not places.carry_out(other, see) and not list((tmp_path / "other").iterdir())
    assert places.carry_out(tier, {**arguments, "do": "delete"})
    assert not list((tmp_path / "run").iterdir())
    for name in ("run.json", ".tmp-x/../../y", "checkpoints/.tmp-1"):
        with pytest.raises(ConfigurationError):
            places.carry_out(tier, {**arguments, "name": name})


def test_the_second_place_is_asked_for_on_all_nodes_by_the_process_that_copies() -> None:
    lead = Lead("shared")
    copier = lead.ask_second()
    copier.answer("remote_place", True)
    assert [(node, word.is_remote) for node, word in lead.told] == [(0, True), (2, True)]  # type: ignore[union-attr]
    lead.say(0, True)
    assert not lead.errors
    lead.say(2, True)
    assert lead.errors == [None] and not lead.flusher.log
    assert [arguments["do"] for _, arguments in copier.log] == ["put", "delete"]


def test_a_node_that_cannot_use_the_second_place_is_named() -> None:
    for sees, error, kind, words in (
        (False, None, ConfigurationError, "node y sees another directory at the remote than node lead"),
        (False, StorageReadOnlyError("writing a file failed"), StorageReadOnlyError, "writing a file failed"),
        (False, StorageError("no answer"), StorageError, "no answer"),
    ):
        lead = Lead()
        lead.ask_second().answer("remote_place", True)
        lead.say(0, True)
        lead.say(2, sees, error)
        (found,) = lead.errors
        assert type(found) is kind and found.node == "y" and words in found.message
        assert fetching.refuses(found) == (kind is not StorageError)


def test_one_node_asks_nobody_about_its_second_place() -> None:
    lead = Lead(names=("lead",))
    assert not lead.ask_second().log and lead.errors == [None]


def test_a_node_tries_to_write_to_the_second_place_and_leaves_nothing(tmp_path: Path) -> None:
    word = w.SeeFile(3, ".tmp-where-1", b"content", is_remote=True)
    flusher, told = FakeFlusher(), list[w.Saw]()
    places.look(flusher, word, 2, Config(), told.append)  # type: ignore[arg-type]
    ((operation, arguments),) = flusher.log
    assert operation == "remote_place"
    tier, other = FlashTier(tmp_path / "there"), FlashTier(tmp_path / "other")
    places.carry_out(tier, {**arguments, "do": "put"})
    assert places.carry_out(FlashTier(tmp_path / "there"), arguments) and not places.carry_out(other, arguments)
    assert [path.name for path in (tmp_path / "there").iterdir()] == [".tmp-where-1"]
    broken = FakeTier(FlashTier(tmp_path / "there"))
    broken.fail("put", error=OSError(errno.EROFS, "read-only"))
    with pytest.raises(StorageReadOnlyError):
        places.carry_out(broken, arguments)
    places.look(None, word, 2, Config(), told.append)
    assert told[-1].error is not None and "without the second place" in str(told[-1].error)
