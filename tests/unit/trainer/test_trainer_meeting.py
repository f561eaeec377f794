"""What ranks have to agree about when they meet, and what they are told where they do not."""

from __future__ import annotations

from typing import Any

import pytest

from safehold.agent.net.addresses import way_to
from safehold.config import Config
from safehold.errors import ConfigurationError
from safehold.policy.cadence import parse_every
from safehold.trainer import meeting
from safehold.types import Membership


def refused(*facts: dict[str, Any], nodes: str = "aabb") -> ConfigurationError:
    for node, fact in zip(nodes, facts, strict=False):
        fact["node"] = node
    with pytest.raises(ConfigurationError) as caught:
        meeting.world_of(list(facts), Membership(rank=0, world_size=len(facts), store=None), None)
    return caught.value


def of(url: str = "/run", same: dict[str, str] | None = None, **settings: Any) -> dict[str, Any]:
    return meeting.facts(url, Config(**settings), same or {})


def test_ranks_that_agree_make_a_world() -> None:
    facts = [
        of(storage_interface="eth0") | {"node": "a"},
        of(storage_interface="eth1", runtime_dir="/r") | {"node": "b"},
    ]
    world = meeting.world_of(facts, Membership(rank=0, world_size=2, store=None), None)
    assert world["node_names"] == ["a", "b"] and world["node_of"] == [0, 1] and len(world["token"]) >= 16


def test_a_setting_that_differs_is_named_with_both_values_and_who_has_them() -> None:
    error = refused(of(), of(), of(flush_threads=7), of(flush_threads=7))
    assert error.message == (
        "the ranks have different settings: flush_threads is 3 on ranks 0, 1 (node a), 7 on ranks 2, 3 (node b)"
    )
    assert error.rank == 2 and "safehold config show" in str(error.hint)


def test_the_arguments_that_are_no_settings_are_compared_as_well() -> None:
    every = [str(parse_every(value)) for value in ("20min", 500, None)]
    error = refused(*(of(same={"every": text, "keep": "Keep(last=3)"}) for text in every))
    assert (
        "every is 1200s on rank 0 (node a), 500 steps on rank 1 (node a), None on rank 2 (node b)"
        in error.message.replace("'", "")
    )
    assert "keep" not in error.message


def test_many_that_differ_are_counted() -> None:
    settings = {"flush_threads": 7, "restore_threads": 9, "flush_nice": 1, "lease_s": 60.0, "copies": 1}
    error = refused(of(), of(**settings))
    assert error.message.endswith("; and 2 more") and error.message.count(" is ") == 3
    error = refused(*(of(flush_threads=number) for number in range(1, 7)), nodes="abcdef")
    assert error.message.endswith("3 on rank 2 (node c), and 3 other values")


def test_what_may_be_a_secret_is_not_shown() -> None:
    error = refused(of(same={"api_token": "abc"}), of(same={"api_token": "xyz"}))
    assert "api_token (not shown)" in error.message and "on rank 1 (node a)" in error.message
    assert "abc" not in str(error) and "xyz" not in str(error)


def test_a_setting_that_only_one_version_knows_is_named() -> None:
    one, other = of(), of()
    del other["settings"]["lease_s"]
    assert "lease_s is 600.0 on rank 0 (node a), unknown on rank 1 (node a)" in refused(one, other).message


def test_run_directories_that_differ_are_named() -> None:
    error = refused(of("/run"), of("/run"), of("/other"))
    assert "/run on ranks 0, 1 (node a), /other on rank 2 (node b)" in error.message and error.rank == 2


# -- addresses -------------------------------------------------------------------------------------------------------------


def listens(address: str, given: str = "", launcher: str = "", network: str = "here") -> dict[str, str]:
    return {"address": address, "given": given, "launcher": launcher, "network": network}


def unreachable(*told: dict[str, str]) -> ConfigurationError:
    with pytest.raises(ConfigurationError) as caught:
        meeting.addresses(["a", "b"], told)
    return caught.value


def test_addresses_on_a_network_are_taken() -> None:
    told = [listens("10.0.0.1:4000"), listens("[fe80::1%eth0]:4001", given="eth0")]
    assert meeting.addresses(["a", "b"], told) == ["10.0.0.1:4000", "[fe80::1%eth0]:4001"]


@pytest.mark.parametrize("address", ["127.0.0.1:40", "127.0.1.1:40", "[::1]:40", "[::ffff:127.0.0.1]:40"])
def test_an_agent_that_nobody_else_reaches_is_refused_by_name(address: str) -> None:
    error = unreachable(listens("10.0.0.1:40"), listens(address, launcher="localhost"))
    assert error.node == "b" and f"the agent of node b listens at {address} (a loopback address)" in error.message
    assert "MASTER_ADDR=localhost leads there; set storage_interface" in str(error.hint)
    assert "MASTER_ADDR is not set there" in str(unreachable(listens(address), listens("10.0.0.1:40")).hint)


@pytest.mark.parametrize("given", ["0.0.0.0", "::"])
def test_an_address_that_means_any_is_no_address_to_connect_to(given: str) -> None:
    address = f"[{given}]:40" if ":" in given else f"{given}:40"
    error = unreachable(listens(address, given=given), listens("10.0.0.1:40"))
    assert error.node == "a" and "no address to connect to" in error.message and repr(given) in str(error.hint)


@pytest.mark.parametrize("given", ["lo", "localhost", "myself"])
def test_a_name_that_leads_to_loopback_is_not_meant(given: str) -> None:
    told = listens("127.0.0.1:40", given=given)
    assert repr(given) in str(unreachable(told, told).hint)


@pytest.mark.parametrize("given", ["127.0.0.1", "::1", "[::1]", "127.0.0.2"])
def test_a_loopback_address_that_is_given_as_such_is_taken_inside_one_network(given: str) -> None:
    one, other = listens("127.0.0.1:40", given=given), listens("127.0.0.1:41", given=given)
    assert meeting.addresses(["a", "b"], [one, other]) == ["127.0.0.1:40", "127.0.0.1:41"]
    assert "not all in one network namespace" in unreachable(one, other | {"network": "there"}).message


def test_what_the_launchers_own_host_name_leads_to_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    told = meeting.address_facts(f"{way_to('127.0.0.1')}:40", Config())
    assert told["launcher"] == "localhost" and "/" in told["network"]
    assert "MASTER_ADDR=localhost" in str(unreachable(told, told).hint)
    explicit = meeting.address_facts("127.0.0.1:40", Config(storage_interface="127.0.0.1"))
    assert meeting.addresses(["a", "b"], [explicit, explicit]) == ["127.0.0.1:40"] * 2
