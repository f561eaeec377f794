"""What a save gives back: its states, and who is told what went wrong, once."""

from __future__ import annotations

import itertools
import logging
import threading
import time

import pytest

from safehold.config import Config
from safehold.errors import (
    AgentUnavailableError,
    CheckpointError,
    ConfigurationError,
    DeadlineError,
    RankLostError,
    SkippedError,
    StateMismatchError,
    StorageError,
    SupersededError,
    from_wire,
)
from safehold.trainer.failures import Failures, interrupted
from safehold.trainer.handles import SaveHandle

FORWARD = {
    "staging": {"staging", "staged", "durable", "failed", "skipped"},
    "staged": {"staged", "durable", "failed", "skipped"},
    "durable": set(),
    "failed": set(),
    "skipped": set(),
}


def handle_in(state: str) -> SaveHandle:
    handle = SaveHandle(10, 0, flush_timeout_s=0.05)
    if state != "staging":
        handle._advance(state, error=StorageError("x") if state in ("failed", "skipped") else None)  # type: ignore[arg-type]
    return handle


@pytest.mark.parametrize(("state", "following"), list(itertools.product(FORWARD, FORWARD)))
def test_it_moves_forward_only(state: str, following: str) -> None:
    handle = handle_in(state)
    error = StorageError("y") if following == "failed" else None
    before = handle.error
    moved = handle._advance(following, error=error, bytes=7)  # type: ignore[arg-type]
    assert moved == (following in FORWARD[state])
    assert handle.state == (following if moved else state)
    assert handle.error is (error if moved else before)
    assert handle.figures.bytes == 7, "figures are taken in any case"


def test_skipped_is_no_failure() -> None:
    handle = SaveHandle(10, 0, flush_timeout_s=0.05)
    handle._advance("failed", error=SkippedError("busy"))
    assert handle.state == "skipped" and not handle.failed
    with pytest.raises(SkippedError):
        handle.wait()


def test_staged_stays_true() -> None:
    handle = SaveHandle(10, 0, flush_timeout_s=0.05)
    assert not handle.staged
    handle._advance("staged")
    handle._advance("failed", error=StorageError("x"))
    assert handle.staged and handle.failed and not handle.durable
    with pytest.raises(StorageError):
        handle.wait_staged()


def test_waits_and_their_limits() -> None:
    handle = SaveHandle(10, 0, flush_timeout_s=0.05)
    for wait in (handle.wait, handle.wait_staged, lambda: handle.wait(tier="memory")):
        begun = time.monotonic()
        with pytest.raises(DeadlineError, match=r"0\.05 s"):
            wait()
        assert time.monotonic() - begun < 0.5
    handle._advance("staged")
    handle.wait(tier="memory")
    handle.wait_staged(0.0)
    begun = time.monotonic()
    with pytest.raises(DeadlineError, match="durable"):
        handle.wait(0.1)
    assert 0.09 < time.monotonic() - begun < 0.19, "the limit counts once"
    threading.Timer(0.02, handle._advance, ["durable"]).start()
    handle.wait(5.0, tier="flash")
    assert handle.durable and "durable" in repr(handle)
    with pytest.raises(ConfigurationError, match="flash"):
        handle.wait(tier="tape")


def test_pauses_add_up_from_any_thread() -> None:
    handle = SaveHandle(10, 0, flush_timeout_s=1.0)
    threads = [threading.Thread(target=lambda: [handle._add_pause(0.5) for _ in range(200)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert handle.figures.pause_s == 400.0


def test_an_error_seen_at_the_handle_is_not_raised_again() -> None:
    failures = Failures(Config())
    handle = SaveHandle(10, 0, flush_timeout_s=0.05)
    handle._on_raised = failures.forget
    error = StorageError("x")
    handle._advance("failed", error=error)
    failures.add(error)
    with pytest.raises(StorageError):
        handle.wait()
    failures.raise_pending(always=True)


# -- the policy of failures --------------------------------------------------------------------------------------------------

AGENT, DISK, SKIP = AgentUnavailableError("died"), StorageError("full"), SkippedError("busy")


@pytest.mark.parametrize(
    ("on_failure", "max_failures", "errors", "raised", "at_close"),
    [
        ("raise", 3, [], None, None),
        ("raise", 3, [DISK], DISK, DISK),
        ("raise", 3, [SKIP], None, None),
        ("raise", 3, [AGENT], None, AGENT),
        ("raise", 3, [AGENT, AGENT], None, AGENT),
        ("raise", 3, [AGENT, AGENT, AGENT], AGENT, AGENT),
        ("raise", 0, [AGENT] * 20, None, AGENT),
        ("raise", 3, [AGENT, DISK], DISK, DISK),  # what is mended does not hide what is not
        ("raise", 3, [DISK, AGENT], DISK, DISK),
        ("warn", 3, [DISK], None, DISK),
        ("warn", 3, [DISK, DISK, DISK], DISK, DISK),
        ("warn", 0, [DISK] * 20, None, DISK),
        ("warn", 3, [SKIP] * 5, None, None),
    ],
)
def test_what_is_raised_when(
    on_failure: str,
    max_failures: int,
    errors: list[CheckpointError],
    raised: CheckpointError | None,
    at_close: CheckpointError | None,
) -> None:
    def failures() -> Failures:
        made = Failures(Config(on_failure=on_failure, max_failures=max_failures))  # type: ignore[arg-type]
        for error in errors:
            made.add(error)
        return made

    def error_of(made: Failures, always: bool) -> CheckpointError | None:
        try:
            made.raise_pending(always=always)
        except CheckpointError as exc:
            return exc
        return None

    made = failures()
    assert made.num_failed == sum(error is not SKIP for error in errors)
    assert error_of(made, False) is raised
    if raised is not None:
        assert error_of(made, False) is None, "once"
    assert error_of(failures(), True) is at_close


def test_a_commit_forgets_what_was_only_a_warning() -> None:
    failures = Failures(Config(on_failure="warn", max_failures=2))
    failures.add(DISK)
    failures.committed()
    failures.raise_pending(always=True)
    failures.add(DISK)
    failures.raise_pending()
    assert failures.num_in_row == 1 and failures.num_failed == 2


def test_a_commit_does_not_hide_what_has_to_be_raised() -> None:
    failures = Failures(Config())
    failures.add(DISK)
    failures.committed()
    with pytest.raises(StorageError):
        failures.raise_pending()


def test_superseded_is_raised_at_every_call(caplog: pytest.LogCaptureFixture) -> None:
    failures = Failures(Config(on_failure="warn", max_failures=0))
    failures.superseded(SupersededError("newer"))
    for _ in range(3):
        with pytest.raises(SupersededError):
            failures.raise_pending()
    assert failures.num_failed == 0


def test_nothing_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    failures = Failures(Config(on_failure="warn"))
    with caplog.at_level(logging.WARNING, logger="safehold"):
        failures.add(SKIP)
        failures.add(DISK)
    assert "busy" in caplog.text and "full" in caplog.text


def test_nothing_is_told_twice(caplog: pytest.LogCaptureFixture) -> None:
    """What the next call raises is no warning too; what it does not raise is one."""
    failures = Failures(Config())
    newer = SupersededError("newer")
    with caplog.at_level(logging.INFO, logger="safehold"):
        failures.add(DISK)
        failures.add(StorageError("second"))
        failures.add(StorageError("in the call"), raised=True)
        failures.add(AGENT)
        failures.add(newer)
    said = {entry.args[0].message: entry.levelname for entry in caplog.records}  # type: ignore[index, union-attr]
    assert said == {"full": "INFO", "second": "WARNING", "in the call": "INFO", "died": "WARNING", "newer": "INFO"}
    assert failures.num_failed == 5
    for error in (newer, newer):
        with pytest.raises(SupersededError) as caught:
            failures.raise_pending()
        assert caught.value is error


def test_what_other_ranks_are_told_of_an_interrupted_save() -> None:
    error = interrupted(KeyboardInterrupt(), 7, 1)
    assert isinstance(error, RankLostError) and error.exit_code == 130 and (error.step, error.rank) == (7, 1)
    assert "rank 1 was interrupted (KeyboardInterrupt)" in str(error)
    assert from_wire(error.to_wire()).exit_code == 130
    assert isinstance(interrupted(ValueError("odd"), 7, 1), StateMismatchError)
