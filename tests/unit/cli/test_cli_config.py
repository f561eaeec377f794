"""Settings from file and environment: values, origins, and refusals that name the place."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

import pytest

from safehold.cli import config_source
from safehold.config import Config
from safehold.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class Sample:
    count: int = 1
    rate: float = 0.5
    wait_s: float = 1.0
    size_bytes: int = 10
    limit_bytes_s: int = 0
    flag: bool = True
    word: str = "w"
    mode: Literal["a", "b"] = "a"
    maybe_s: float | None = None
    name: str | None = None


def load(tmp_path, toml: str = "", env: dict[str, str] | None = None, **arguments):
    path = tmp_path / "s.toml"
    path.write_text(toml)
    return config_source.load(Sample, path=path, env=env or {}, arguments=arguments)


def test_later_origins_win(tmp_path):
    sources = load(
        tmp_path, "count = 2\nrate = 2\nword = 'file'", {"SAFEHOLD_COUNT": "3", "SAFEHOLD_WORD": "env"}, word="arg"
    )
    assert sources["count"] == (3, "environment SAFEHOLD_COUNT")
    assert sources["rate"] == (2.0, f"file {tmp_path / 's.toml'}")
    assert sources["word"] == ("arg", "argument")
    assert sources["flag"] == (True, "default")
    assert list(sources) == [field.name for field in fields(Sample)]
    assert config_source.build(Sample, sources) == Sample(count=3, rate=2.0, word="arg")


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("count", "12", 12), ("rate", "1e-3", 0.001), ("wait_s", "10min", 600.0), ("wait_s", "1.5 h", 5400.0),
        ("wait_s", "250ms", 0.25), ("wait_s", "7", 7.0), ("size_bytes", "64 MiB", 64 << 20), ("size_bytes", "1.5kB", 1500),
        ("limit_bytes_s", "2 GiB/s", 2 << 30), ("flag", "off", False), ("flag", "TRUE", True), ("mode", "b", "b"),
        ("maybe_s", "none", None), ("maybe_s", "3s", 3.0), ("name", "", None), ("name", "x", "x"), ("word", "", ""),
    ],
)  # fmt: skip
def test_values_from_the_environment(tmp_path, name: str, text: str, value):
    found, origin = load(tmp_path, env={f"SAFEHOLD_{name.upper()}": text})[name]
    assert found == value and type(found) is type(value) and origin.startswith("environment")


@pytest.mark.parametrize(
    ("name", "text"),
    [("count", "1.5"), ("count", "x"), ("count", "3 MiB"), ("flag", "maybe"), ("mode", "c"), ("wait_s", "5 MiB"), ("size_bytes", "5s"),
     ("size_bytes", "0.5"), ("rate", ""), ("count", "true")],
)  # fmt: skip
def test_wrong_values_name_the_variable(tmp_path, name: str, text: str):
    with pytest.raises(ConfigurationError, match=f"{name} must be") as caught:
        load(tmp_path, env={f"SAFEHOLD_{name.upper()}": text})
    assert f"SAFEHOLD_{name.upper()}" in caught.value.hint


@pytest.mark.parametrize(
    "toml", ["count = true", "count = 'x'", "flag = 1", "word = 3", "count = [1]", "wait_s = '1 parsec'"]
)
def test_wrong_values_name_the_file(tmp_path, toml: str):
    with pytest.raises(ConfigurationError, match="must be") as caught:
        load(tmp_path, toml)
    assert "s.toml" in caught.value.hint


def test_unknown_names(tmp_path):
    with pytest.raises(ConfigurationError, match="'cuont' in the file") as caught:
        load(tmp_path, "cuont = 1")
    assert "did you mean count?" in caught.value.hint
    with pytest.raises(ConfigurationError, match="SAFEHOLD_WAIT"):
        load(tmp_path, env={"SAFEHOLD_WAIT_": "1"})
    with pytest.raises(ConfigurationError, match="the arguments"):
        load(tmp_path, typo=1)
    assert load(tmp_path, env={"SAFEHOLD_LISTENER": "a:b", "SAFEHOLD_UNRELATED_THING": "1"})["count"][1] == "default"


def test_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert config_source.load(Sample, env={})["count"] == (1, "default")
    (tmp_path / "safehold.toml").write_text("count = 5")
    assert config_source.load(Sample, env={})["count"] == (5, "file safehold.toml")
    (tmp_path / "other.toml").write_text("count = 6")
    assert config_source.load(Sample, env={"SAFEHOLD_CONFIG": "other.toml"})["count"] == (6, "file other.toml")
    with pytest.raises(ConfigurationError, match="does not exist"):
        config_source.load(Sample, env={"SAFEHOLD_CONFIG": "gone.toml"})
    for bad in (b"count = ", b"\xff", b"x" * (2 << 20)):
        (tmp_path / "bad.toml").write_bytes(bad)
        with pytest.raises(ConfigurationError, match="settings file"):
            config_source.load(Sample, path="bad.toml", env={})
    with pytest.raises(ConfigurationError, match="cannot be read"):
        config_source.load(Sample, path=tmp_path, env={})


def test_a_refusal_of_the_settings_says_where_the_value_is_from():
    sources = config_source.load(Config, path=None, env={"SAFEHOLD_FLUSH_NICE": "77"})
    with pytest.raises(ConfigurationError, match="flush_nice") as caught:
        config_source.build(Config, sources)
    assert caught.value.hint == "flush_nice comes from environment SAFEHOLD_FLUSH_NICE"


def test_every_setting_can_come_from_the_environment(tmp_path):
    for field in fields(Config):
        default = field.default
        sources = config_source.load(Config, env={f"SAFEHOLD_{field.name.upper()}": str(default)})
        assert sources[field.name][0] == default, field.name
        assert config_source.build(Config, sources) == Config()


def test_config_show(safehold, tmp_path, monkeypatch):
    monkeypatch.delenv("SAFEHOLD_RUNTIME_DIR")
    (tmp_path / "safehold.toml").write_text("flush_threads = 4\n")
    monkeypatch.setenv("SAFEHOLD_FLUSH_RATE_BYTES_S", "512 MiB/s")
    found = safehold("config", "show", "--json").json
    assert list(found) == [field.name for field in fields(Config)]
    assert found["flush_threads"] == {"value": 4, "origin": "file safehold.toml"}
    assert found["flush_rate_bytes_s"] == {"value": 512 << 20, "origin": "environment SAFEHOLD_FLUSH_RATE_BYTES_S"}
    text = safehold("config", "show").out
    assert text.splitlines()[0].split() == ["SETTING", "VALUE", "ORIGIN"]
    (tmp_path / "safehold.toml").write_text("flush_treads = 4\n")
    done = safehold("config", "show")
    assert done.code == 2 and "did you mean flush_threads?" in done.err


def test_a_whole_config_among_the_settings_is_refused_with_the_way_it_goes():
    with pytest.raises(ConfigurationError, match="'config' is no setting") as caught:
        config_source.load(Config, arguments={"config": Config()})
    assert "keywords" in (caught.value.hint or "")
