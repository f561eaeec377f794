"""When a reader's lease ends, as one observer sees it; the clock is a number."""

from __future__ import annotations

import pytest

from safehold.policy.leases import LeaseWatch, Sighting


def look(watch: LeaseWatch, now_s: float, took_s: float = 0.0, **contents: str) -> set[str]:
    seen = {name: Sighting(content=content, lease_s=600.0) for name, content in contents.items()}
    return watch.observe(seen, began_s=now_s, ended_s=now_s + took_s)


@pytest.mark.parametrize("started_s", [0.0, -5.0, 1e9])
def test_a_lease_counts_until_it_has_not_changed_for_as_long_as_it_says(started_s: float) -> None:
    watch = LeaseWatch()
    assert look(watch, started_s, a="0") == set()
    assert look(watch, started_s + 599, a="0") == set()
    assert look(watch, started_s + 600, a="0") == {"a"}
    assert look(watch, started_s + 601, a="0") == {"a"}, "it stays so"


def test_a_renewal_makes_it_count_anew() -> None:
    watch = LeaseWatch()
    look(watch, 0, a="0", b="0")
    assert look(watch, 599, a="1", b="0") == set()
    assert look(watch, 1198, a="1", b="0") == {"b"}
    assert look(watch, 1199, a="1", b="1") == {"a"}, "b has woken up"


def test_two_looks_far_apart_are_enough_and_one_is_not() -> None:
    watch = LeaseWatch()
    assert look(watch, 1e6, a="0") == set()
    assert look(watch, 2e6, a="0") == {"a"}
    assert look(LeaseWatch(), 2e6, a="0") == set()


def test_a_slow_look_makes_no_lease_shorter() -> None:
    watch = LeaseWatch()
    assert look(watch, 0, took_s=300, a="0") == set()
    assert look(watch, 899, took_s=300, a="0") == set(), "it may have been renewed until 300"
    assert look(watch, 900, a="0") == {"a"}


def test_what_is_gone_is_forgotten() -> None:
    watch = LeaseWatch()
    look(watch, 0, a="0", b="0")
    assert look(watch, 700) == set() and not watch._unchanged
    assert look(watch, 800, a="0") == set(), "another one of that name"


def test_each_lease_has_a_length_of_its_own() -> None:
    watch = LeaseWatch()
    seen = {"short": Sighting(content="0", lease_s=1.0), "long": Sighting(content="0", lease_s=86400.0)}
    watch.observe(seen, began_s=0, ended_s=0)
    assert watch.observe(seen, began_s=2, ended_s=2) == {"short"}
    assert watch.observe(seen, began_s=86400, ended_s=86400) == {"short", "long"}
