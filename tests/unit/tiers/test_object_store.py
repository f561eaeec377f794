"""The tier of an object store, over a store in memory and over careless, slow and failing ones."""

from __future__ import annotations

import datetime
import sys
import time
from pathlib import Path

import pytest
from object_stores import BUSY, LOST, NO_CONNECTION, Wrapped, failing, tier_on
from obstore.exceptions import GenericError, PermissionDeniedError
from obstore.store import MemoryStore

from safehold.errors import (
    CheckpointError,
    ConfigurationError,
    StorageError,
    StorageFullError,
    StorageReadOnlyError,
    TornFileError,
)
from safehold.testing.tier_suite import MIB, TierSuite, pattern
from safehold.tiers.base import TEMPORARY_PREFIX, Tier
from safehold.tiers.object_requests import Patience
from safehold.tiers.object_store import ObjectStoreTier
from safehold.tiers.open import open_tier, place


class TestMemoryStore(TierSuite):
    def make_tier(self, directory: Path) -> Tier:
        return tier_on(MemoryStore())


class TestMemoryStoreInSmallParts(TierSuite):
    """Packs of many parts, most of them written before their turn."""

    def make_tier(self, directory: Path) -> Tier:
        return tier_on(MemoryStore(), part_bytes=64 << 10)


class TestCarelessStore(TierSuite):
    """A store that ignores conditions passes for a replica, and says what it is."""

    exclusive = False

    def make_tier(self, directory: Path) -> Tier:
        store = Wrapped()
        store.ignores_conditions = True
        return tier_on(store)


def test_a_careless_store_is_found_out_by_the_probe() -> None:
    store = Wrapped()
    store.ignores_conditions = True
    report = tier_on(store).probe()
    assert report.writable and not report.exclusive_create and "ignored a condition" in report.notes[0]


def test_a_store_without_conditions_is_found_out_by_the_probe() -> None:
    store = Wrapped()
    store.before = failing(GenericError(BUSY.format("501 Not Implemented", "NotImplemented")), kind="put")
    report = tier_on(store).probe()
    assert report.writable and not report.exclusive_create and "does not take conditions" in report.notes[0]
    assert not store.inner.list().collect()


def test_probe_of_a_store_that_may_not_be_written() -> None:
    store = Wrapped()
    store.before = failing(PermissionDeniedError("403 Forbidden"), kind="put", times=-1)
    with pytest.raises(StorageReadOnlyError, match="credentials"):
        tier_on(store).probe()


def test_put_is_one_request() -> None:
    store = Wrapped()
    tier = tier_on(store)
    tier.put("a/b.json", pattern(MIB))
    tier.put("a/c.json", b"x", exclusive=True)
    assert store.calls == [("put", "a/b.json"), ("put", "a/c.json")]


def test_an_exclusive_put_whose_answer_is_lost() -> None:
    """It is an error at once, never repeated by itself; the caller's repetition is refused, and a read tells whose it is."""
    store = Wrapped()
    store.after = failing(GenericError(LOST), kind="put")
    tier = tier_on(store)
    with pytest.raises(StorageError, match="the connection broke") as caught:
        tier.put("incarnations/1.json", b"mine", exclusive=True)
    assert caught.value.retry and "read it back" in str(caught.value)
    with pytest.raises(FileExistsError):
        tier.put("incarnations/1.json", b"mine", exclusive=True)
    assert tier.get("incarnations/1.json", limit_bytes=10) == b"mine"
    assert [kind for kind, _ in store.calls] == ["put", "put", "get"]


@pytest.mark.parametrize("text", [NO_CONNECTION, BUSY.format("503 Slow Down", "SlowDown")])
def test_an_exclusive_put_that_surely_had_no_effect_is_repeated(text: str) -> None:
    store = Wrapped()
    store.before = failing(GenericError(text), kind="put", times=2)
    tier_on(store).put("incarnations/1.json", b"mine", exclusive=True)
    assert len(store.calls) == 3


@pytest.mark.parametrize(
    ("error", "expected", "hint"),
    [
        (PermissionDeniedError("... 403 Forbidden: <Error><Code>AccessDenied</Code></Error>"), StorageReadOnlyError, "credentials"),
        (GenericError("DeleteObjects request failed for key a: no. (code: AccessDenied)"), StorageReadOnlyError, "credentials"),
        (GenericError(BUSY.format("507 x", "QuotaExceeded")), StorageFullError, "quota"),
        (GenericError(BUSY.format("404 Not Found", "NoSuchBucket")), ConfigurationError, "make the bucket"),
        (GenericError(BUSY.format("301 Moved", "PermanentRedirect")), ConfigurationError, "region"),
        (GenericError("Error performing PUT http://x/ in 1us - HTTP error: builder error"), ConfigurationError, "AWS_ALLOW_HTTP"),
        (GenericError("PUT http://169.254.169.254/latest/api/token - error"), StorageReadOnlyError, "credentials"),
    ],
)  # fmt: skip
def test_permanent_failures_are_not_repeated(error: Exception, expected: type[CheckpointError], hint: str) -> None:
    store = Wrapped()
    store.before = failing(error, kind="put", times=-1)
    with pytest.raises(expected) as caught:
        tier_on(store).put("a/b.json", b"x")
    assert caught.value.tier == "remote" and caught.value.path == "memory://bucket/run/a/b.json"
    assert not caught.value.retry and hint in (caught.value.hint or "")
    assert len(store.calls) == 1


def test_transient_failures_are_repeated_until_the_deadline() -> None:
    store = Wrapped()
    store.before = failing(GenericError(LOST), kind="put", times=2)
    tier_on(store).put("a/b.json", b"x")
    assert len(store.calls) == 3
    store.before = failing(GenericError(LOST), kind="get", times=-1)
    begun = time.monotonic()
    with pytest.raises(StorageError, match="check the network"):
        tier_on(store).get("a/b.json", limit_bytes=10)
    assert time.monotonic() - begun < 2.0 and len(store.calls) > 5


def test_secrets_stay_out_of_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "SECRET-WORD")
    for text in (
        LOST,
        "something odd with SECRET-WORD at https://u:SECRET@h/?sig=SECRET",
        "<AWSAccessKeyId>SECRET</AWSAccessKeyId>x",
    ):
        store = Wrapped()
        store.before = failing(
            GenericError(text.replace("<AWSAccessKeyId>", "\n<AWSAccessKeyId>")), kind="put", times=-1
        )
        with pytest.raises(CheckpointError) as caught:
            tier_on(store, patience=Patience(request_retry_s=0.0)).put("a", b"x")
        seen: BaseException | None = caught.value
        while seen is not None:
            assert "SECRET" not in str(seen) + repr(seen)
            seen = seen.__cause__ or seen.__context__


def test_a_tree_is_deleted_manifest_first() -> None:
    """A tombstone must not go before the manifest that it un-commits, and packs go last."""
    store = Wrapped()
    tier = tier_on(store)
    names = ["00000-00000.0.safetensors", "manifest.json", "node-00000.json", "tombstone-2.json"]
    for name in names:
        tier.put(f"checkpoints/000000010/1-0/{name}", b"x")
    store.calls.clear()
    tier.delete_tree("checkpoints/000000010")
    at = "checkpoints/000000010/1-0/"
    assert [path for kind, path in store.calls if kind == "delete"] == [
        [f"{at}manifest.json"],
        [f"{at}node-00000.json", f"{at}tombstone-2.json"],
        [f"{at}00000-00000.0.safetensors"],
    ]


def test_a_delete_that_fails_half_way_leaves_no_checkpoint() -> None:
    store = Wrapped()
    tier = tier_on(store)
    for name in ("manifest.json", "tombstone-2.json"):
        tier.put(f"c/{name}", b"x")
    store.before = failing(PermissionDeniedError("403"), kind="delete", path=["c/tombstone-2.json"])  # type: ignore[arg-type]
    with pytest.raises(StorageReadOnlyError):
        tier.delete_tree("c")
    assert [entry.name for entry in tier.list("c")] == ["tombstone-2.json"]
    tier.delete_tree("c")
    assert tier.list("c") == []


def test_deletes_go_on_where_a_store_reports_what_is_absent() -> None:
    """GCS and Azure say so of each object that is gone, S3 does not."""

    class Telling(Wrapped):
        def delete(self, paths: list[str]) -> None:
            for path in paths:
                self.inner.head(path)
                self.inner.delete(path)

    tier = tier_on(Telling())
    for name in ("b", "c"):
        tier.put(f"d/{name}", b"x")
    tier._delete(["d/a", "d/b", "d/c"], "removing", "d")
    tier.delete("d/a")
    assert tier.list("d") == []


def test_sweep_takes_old_temporaries_only() -> None:
    tier = tier_on(MemoryStore())
    tier.put(f"d/{TEMPORARY_PREFIX}1", b"x")
    tier.put(f"d/{TEMPORARY_PREFIX}2/inside", b"x")
    tier.put("d/kept", b"x")
    assert tier.sweep_temporaries("d") == ()
    assert tier.sweep_temporaries("d", older_than_s=0.0) == (f"{TEMPORARY_PREFIX}1", f"{TEMPORARY_PREFIX}2")
    assert tier.sweep_temporaries("d", older_than_s=0.0) == ()
    assert [entry.name for entry in tier.list("d")] == ["kept"]


def test_a_file_that_gives_more_or_less_than_it_has() -> None:
    class Body:
        def __init__(self) -> None:
            self.meta = {"size": 3}

        def bytes(self) -> bytes:
            return b"xx"

    store = Wrapped()
    store.get = lambda path: Body()  # type: ignore[attr-defined]
    with pytest.raises(TornFileError, match="3 bytes gave 2"):
        tier_on(store).get("a", limit_bytes=10)


def test_a_file_that_is_too_large_is_not_read() -> None:
    class Body:
        def __init__(self) -> None:
            self.meta = {"size": 1000}

        def bytes(self) -> bytes:
            raise AssertionError("read")

    store = Wrapped()
    store.get = lambda path: Body()  # type: ignore[attr-defined]
    with pytest.raises(TornFileError, match="larger"):
        tier_on(store).get("a", limit_bytes=999)


def test_reads_wait_for_what_is_not_seen_yet() -> None:
    store = Wrapped()
    store.inner.put("a", b"x")
    store.before = failing(FileNotFoundError("Object at location a not found"), kind="get", times=2)
    assert tier_on(store).get("a", limit_bytes=1, retry_s=5.0) == b"x"
    store.before = failing(FileNotFoundError("Object at location a not found"), kind="head")
    with pytest.raises(FileNotFoundError):
        tier_on(store).size("a")


def test_obstore_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigurationError, match="needs the package obstore") as caught:
        open_tier("s3://bucket/run")
    assert "safehold[object-stores]" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/", "s3://bucket"),
        ("S3://bucket/a/b/", "s3://bucket/a/b"),
        ("gs://bucket/a", "gs://bucket/a"),
        ("az://container/a", "az://container/a"),
    ],
)
def test_urls(given: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    assert place(given) == url
    tier = open_tier(given)
    assert isinstance(tier, ObjectStoreTier) and tier.url == url and tier.name == "remote"
    assert place(tier.url) == url


@pytest.mark.parametrize(
    "given",
    [
        "s3://",
        "s3:///a",
        "s3://KEY:SECRET@bucket/a",
        "s3://bucket?secret=SECRET",
        "s3://bucket/a?sig=SECRET",
        "s3://bucket/a#b",
        "s3://bucket/a%2fb",
        "s3://bucket/a//b",
        "s3://bucket/a/../b",
        "xyz://user:SECRET@host/a",
    ],
)
def test_urls_that_are_refused(given: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        open_tier(given)
    assert "SECRET" not in str(caught.value) and caught.value.hint


def test_a_path_object_is_no_url() -> None:
    with pytest.raises(ConfigurationError, match="drops one of two slashes"):
        open_tier(Path("s3://bucket/run"))


def test_a_setting_that_is_wrong_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ALLOW_HTTP", "perhaps")
    with pytest.raises(ConfigurationError, match="cannot be opened"):
        open_tier("s3://bucket/run")


def test_markers_of_folders_are_left_out() -> None:
    """obstore shows the object `c/10/` as `c/10`, in listings of that very directory."""
    store = Wrapped()
    tier = tier_on(store)
    tier.put("c/10/m.json", b"x")
    marker = {"path": "c/10", "size": 0, "last_modified": datetime.datetime.now(datetime.UTC)}
    inner = store.inner
    store.list = lambda prefix, **options: [*inner.list(prefix, **options), [marker]]  # type: ignore[attr-defined]
    store.list_with_delimiter = lambda prefix: {  # type: ignore[attr-defined]
        "common_prefixes": [],
        "objects": [*inner.list_with_delimiter(prefix)["objects"], marker],
    }
    assert [entry.name for entry in tier.list("c/10")] == ["m.json"]
    tier.delete_tree("c/10")
    assert tier.list("c/10") == []
