"""Settings refuse what cannot work when they are made, naming the field."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from safehold.config import Config
from safehold.errors import ConfigurationError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("flush_timeout_s", "5"),
        ("flush_timeout_s", True),
        ("flush_timeout_s", -1.0),
        ("flush_timeout_s", float("nan")),
        ("flush_timeout_s", float("inf")),
        ("flush_threads", 2.5),
        ("flush_threads", 0),
        ("flush_threads", 10_000),
        ("restore_threads", None),
        ("direct_io", "no"),
        ("max_failures", "x"),
        ("max_failures", -1),
        ("memory_budget_bytes", True),
        ("memory_budget_bytes", -1),
        ("flush_block_bytes", 1 << 60),
        ("flush_block_bytes", (1 << 20) + 1),
        ("flush_rate_bytes_s", 1.5),
        ("flush_busy_share", 1.1),
        ("flush_nice", 20),
        ("flash", "remote"),
        ("runtime_dir", 3),
        ("overlap_policy", "never"),
        ("on_failure", None),
        ("pack_size_bytes", 4096),
    ],
)
def test_what_cannot_work_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=name):
        Config(**{name: value})


def test_whole_numbers_will_do_for_seconds() -> None:
    assert Config(flush_timeout_s=5).flush_timeout_s == 5


def test_settings_survive_the_wire_and_unknown_ones_are_ignored() -> None:
    config = Config(flush_threads=3, runtime_dir="/run/x")
    assert Config.from_wire({**config.to_wire(), "of_another_version": 1}) == config


def test_every_setting_is_described() -> None:
    text = Config.__doc__ or ""
    assert [field.name for field in fields(Config) if f"        {field.name}: " not in text] == []
