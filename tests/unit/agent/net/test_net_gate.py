"""Who may speak, and what the others learn: nothing. And what is told of them: little."""

from __future__ import annotations

import pytest
from net_raw import Target, is_closed, receive
from net_world import Events

from safehold.agent.net.gate import MAX_TOLD, Gate, Refusals
from safehold.agent.net.wire import Refusal
from safehold.errors import ConfigurationError

ROUTES = [
    "GET /v1/health",
    "GET /v1/metrics",
    "GET /v1/data/pack/x",
    "PUT /v1/data/pack/x",
    "POST /v1/messages",
    "GET /",
    "GET /v1/../v1/health",
    "DELETE /v1/health",
]


@pytest.mark.parametrize("start", ROUTES)
@pytest.mark.parametrize(
    "token", [None, "", "Bearer", "Bearer ", "Bearer x", "Basic eDp4", "Bearer \xff", "bearer {}", "Bearer {}x"]
)
def test_without_the_token_nothing_is_answered(target: Target, start: str, token: str | None) -> None:
    given = token.format("0123456789abcdef0123456789abcdef") if token is not None else None
    answer = target.ask(target.head(start, Authorization=given, Content_Length="0"))
    assert (answer.status, answer.body) == (401, b"")
    assert set(answer.headers) <= {"Server", "WWW-Authenticate", "Content-Length", "Content-Type", "Date", "Connection"}
    assert answer.headers["Server"] == "safehold"
    assert target.events.refused() == ["token"]


def test_who_is_refused_has_to_connect_again() -> None:
    target = Target(header_timeout_s=30)
    for changes in ({"Authorization": "Bearer x"}, {"X_Safehold_Node": "z"}):
        with target.connect() as sock:
            sock.sendall(target.head("GET /v1/health", **changes))
            assert receive(sock).status in (401, 403)
            sock.settimeout(2)
            assert is_closed(sock)
    target.close()


def test_the_token_comes_first(target: Target) -> None:
    """A stranger does not learn whether it named the run, or a node."""
    wrong = {"X_Safehold_Run": "other", "X_Safehold_Node": "z", "X_Safehold_Incarnation": "0"}
    assert target.ask(target.head("GET /v1/health", Authorization="Bearer x", **wrong)).status == 401


@pytest.mark.parametrize(
    ("header", "value", "status", "reason"),
    [
        ("X_Safehold_Run", "other", 409, "run"),
        ("X_Safehold_Run", None, 409, "run"),
        ("X_Safehold_Incarnation", "0", 409, "incarnation"),
        ("X_Safehold_Incarnation", None, 400, "malformed"),
        ("X_Safehold_Incarnation", "-1", 400, "malformed"),
        ("X_Safehold_Incarnation", "\u0661", 400, "malformed"),
        ("X_Safehold_Incarnation", "9" * 40, 400, "malformed"),
        ("X_Safehold_Node", "z", 403, "node"),
        ("X_Safehold_Node", None, 400, "malformed"),
        ("X_Safehold_Node", "%FF", 403, "node"),
        ("X_Safehold_To", "a", 421, "to"),
    ],
)
def test_who_is_of_another_job_is_refused(
    target: Target, header: str, value: str | None, status: int, reason: str
) -> None:
    answer = target.ask(target.messages([b"x"], **{header: value}))
    assert (answer.status, answer.facts["reason"]) == (status, reason)
    assert target.events.refused() == [reason] and not target.log.messages


def test_a_stale_incarnation_hears_the_current_one(target: Target) -> None:
    target.peers.set_incarnation(7)
    answer = target.ask(target.head("GET /v1/health", X_Safehold_Incarnation="6"))
    assert (answer.status, answer.facts["current"]) == (409, 7)
    for incarnation in ("7", "8"):
        answer = target.ask(target.head("GET /v1/health", X_Safehold_Incarnation=incarnation))
        assert (answer.status, answer.facts["incarnation"]) == (200, 7)


def test_health_and_metrics(target: Target) -> None:
    assert target.ask(target.head("GET /v1/metrics")).body == b"safehold_saves 3\n"
    assert target.ask(target.head("GET /v1/health")).facts == {"incarnation": 1, "connections": 1}
    assert not target.events


def test_refusals_are_told_once_for_each_address_and_reason(target: Target) -> None:
    for _ in range(5):
        target.ask(target.head("GET /v1/health", Authorization="Bearer x"))
        target.ask(target.head("GET /v1/health", X_Safehold_Node="z"))
    assert target.events.refused() == ["token", "node"]
    assert target.peers.server.refusals.counts == {"token": 5, "node": 5}
    assert target.events[0].fields["address"] == "127.0.0.1"


def test_the_table_of_refusals_has_an_end() -> None:
    events = Events()
    refusals = Refusals(events.stream)
    for number in range(10 * MAX_TOLD):
        refusals.tell(f"10.0.{number // 256}.{number % 256}", "token", "")
    assert len(events) == MAX_TOLD + 1 and events[-1].fields["refused"] == "many"
    assert refusals.counts["token"] == 10 * MAX_TOLD and len(refusals._told) == MAX_TOLD + 1


@pytest.mark.parametrize(
    "token", ["", "short", "0123456789abcde", "0123456789 abcdef", "0123456789abcdé0", "0123456789abcdef\n"]
)
def test_a_token_that_is_none_is_refused(token: str) -> None:
    from net_world import make_peers

    from safehold.testing.network_suite import Log

    with pytest.raises(ConfigurationError, match="token"):
        make_peers("a", ["a"], Log(), token=token)


def test_names_are_compared_as_they_are() -> None:
    gate = Gate(node="b", token="t" * 16, run_id="r", incarnation=lambda: 1)
    gate.know(["knöten/1"])
    headers = {"Authorization": "Bearer " + "t" * 16, "X-Safehold-Run": "r", "X-Safehold-Incarnation": "1"}
    assert gate.admit(headers | {"X-Safehold-Node": "kn%C3%B6ten%2F1", "X-Safehold-To": "b"}) == "knöten/1"
    with pytest.raises(Refusal):
        gate.admit(headers | {"X-Safehold-Node": "knoten/1"})
