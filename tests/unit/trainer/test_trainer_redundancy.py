"""What a trainer has to do with redundancy: words that make sense, failure domains of its node, and a goodbye that waits."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from safehold.agent import messages as m
from safehold.config import Config
from safehold.errors import AgentUnavailableError, ConfigurationError
from safehold.policy.placement import parse_scheme
from safehold.trainer import connection, meeting
from safehold.types import Membership


def world(*domains: str, nodes: list[str] | None = None, scheme: Any = None) -> dict[str, Any]:
    facts = [
        {
            "node": (nodes or [f"n{rank}" for rank in range(len(domains))])[rank],
            "url": "/run",
            "settings": {},
            "domain": d,
        }
        for rank, d in enumerate(domains)
    ]
    return meeting.world_of(facts, Membership(rank=0, world_size=len(domains), store=None), scheme)


def test_domains_are_gathered_by_node() -> None:
    found = world("r1", "r1", "", nodes=["a", "a", "b"])
    assert found["node_names"] == ["a", "b"] and found["domains"] == ["r1", ""]
    assert m.World(**found).domains == ["r1", ""]


def test_ranks_of_a_node_that_name_different_domains_are_refused() -> None:
    with pytest.raises(
        ConfigurationError, match="ranks of node a name different failure domains: 'r2' and 'r1'"
    ) as caught:
        world("r1", "r2", nodes=["a", "a"])
    assert caught.value.rank == 1 and "SAFEHOLD_DOMAIN" in str(caught.value.hint)


def test_a_domain_that_is_no_name_is_refused_where_it_matters() -> None:
    assert world("a//b", "")["domains"] == ["a//b", ""]
    with pytest.raises(ConfigurationError, match="no failure domain"):
        world("a//b", "", scheme=parse_scheme(copies=1))


def test_settings_that_exclude_each_other_or_mean_nothing_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="exclude each other"):
        Config(copies=1, parity="xor:4")
    assert connection.scheme_of(Config()) is None and str(connection.scheme_of(Config(parity="rs:4+2"))) == "rs:4+2"
    for settings in ({"copies": 7}, {"copies": -1}, {"parity": "raid5"}):
        with pytest.raises(ConfigurationError):
            connection.scheme_of(Config(**settings))


class Client:
    """Notes what is asked."""

    def __init__(self, *, local_flash: bool = True, error: AgentUnavailableError | None = None) -> None:
        self.local_flash, self.error, self.said = local_flash, error, list[Any]()

    def request(self, message: Any, *_: Any) -> None:
        self.said.append(message)
        if self.error is not None:
            raise self.error

    def close(self, *, linger: bool) -> None:
        self.said.append(linger)


def test_who_leaves_in_order_waits_for_the_redundancy_of_the_last_checkpoint() -> None:
    def said(client: Client, config: Config, timeout_s: float = 5.0, *, linger: bool = False) -> list[Any]:
        connection.leave(SimpleNamespace(client=client), config, timeout_s, linger=linger)  # type: ignore[arg-type]
        return client.said

    assert said(Client(), Config(copies=1)) == [m.ProtectionAsk(0, 5.0), False]
    assert said(Client(), Config()) == [False]
    assert said(Client(local_flash=False), Config(parity="xor:4")) == [False]
    assert said(Client(), Config(copies=1), 0.0) == [False]
    assert said(Client(), Config(copies=1), linger=True) == [True]


def test_an_agent_that_died_meanwhile_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    client = Client(error=AgentUnavailableError("it is gone"))
    with caplog.at_level(logging.WARNING, logger="safehold"):
        connection.leave(SimpleNamespace(client=client), Config(copies=1), 5.0, linger=False)  # type: ignore[arg-type]
    assert client.said[-1] is False and "may have no redundancy: it is gone" in caplog.text
