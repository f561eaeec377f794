"""Stores in memory that fail, lie and ignore conditions on demand, and tiers on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from obstore.store import MemoryStore

from safehold.tiers.object_requests import Patience, Stores
from safehold.tiers.object_store import ObjectStoreTier

QUICK = Patience(request_timeout_s=1.0, request_retry_s=1.0)
BUSY = "Generic S3 error: Error performing PUT http://h/b in 1ms - Server returned non-2xx status code: {}: <Error><Code>{}</Code></Error>"
LOST = "Generic S3 error: Error performing PUT http://h/b?sig=SECRET - HTTP error: error sending request\n\nDebug source:\nkind: Request"
NO_CONNECTION = LOST.replace("kind: Request", "kind: Connect")


class Wrapped:
    """A store around one in memory that does as its hooks say; without hooks it behaves as what it wraps."""

    def __init__(self) -> None:
        self.inner = MemoryStore()
        self.calls: list[tuple[str, Any]] = []
        self.before: Callable[[str, Any], None] = lambda kind, path: None
        self.after: Callable[[str, Any], None] = lambda kind, path: None
        self.ignores_conditions = False

    def __getattr__(self, kind: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            path = args[0] if args else None
            self.calls.append((kind, path))
            self.before(kind, path)
            if self.ignores_conditions:
                options.pop("mode", None)
            result = getattr(self.inner, kind)(*args, **options)
            self.after(kind, path)
            return result

        return call


def tier_on(store: Any, **options: Any) -> ObjectStoreTier:
    options = {"patience": QUICK, **options}
    return ObjectStoreTier(Stores(steady=store, once=store), "memory://bucket/run", **options)


def failing(error: Exception, *, kind: str, times: int = 1, path: str | None = None) -> Callable[[str, Any], None]:
    left = [times]

    def act(called: str, at: Any) -> None:
        if called == kind and left[0] and (path is None or at == path):
            left[0] -= 1
            raise error

    return act


PART = 64 << 10


def small_parts(store: Any, **options: Any) -> ObjectStoreTier:
    return tier_on(store, part_bytes=PART, **options)
