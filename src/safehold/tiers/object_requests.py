"""Requests to an object store: what is used of obstore, and how often and how long a request is tried.

Invariants: an exclusive put is never repeated unless it is sure that it had no effect; every repetition ends at a
deadline. What must not live here: what the objects mean.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar

from safehold.clock import Clock
from safehold.errors import CheckpointError, ConfigurationError
from safehold.tiers.object_errors import Failure, to_error, understand

T = TypeVar("T")

FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 5.0
INSTALL_HINT = "pip install 'safehold[object-stores]'"


class Store(Protocol):
    """What is used of a store of obstore; fakes wrap one."""

    def put(self, path: str, file: Any, **options: Any) -> Any:
        """Write an object: `mode="create"` only if there is none, `use_multipart=True` in parts."""
        ...

    def get(self, path: str, **options: Any) -> Any:
        """Begin to read an object."""
        ...

    def head(self, path: str) -> Any:
        """Return size, e_tag and time of an object."""
        ...

    def delete(self, paths: Sequence[str]) -> Any:
        """Delete objects."""
        ...

    def list(self, prefix: str | None = None, **options: Any) -> Any:
        """Iterate over chunks of all objects below a prefix."""
        ...

    def list_with_delimiter(self, prefix: str | None = None) -> Any:
        """Return objects and prefixes right below a prefix."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long requests may take.

    Attributes:
        request_timeout_s: One request, from its beginning to the end of its answer.
        request_retry_s: For how long a request that failed for now is made again, with growing random pauses.
    """

    request_timeout_s: float = 60.0
    request_retry_s: float = 60.0

    @property
    def longest_s(self) -> float:
        """Upper bound for one request and all its repetitions."""
        return self.request_timeout_s + self.request_retry_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Stores:
    """The two ways to one bucket.

    Attributes:
        steady: Repeats requests that may be repeated.
        once: Makes each request once.
    """

    steady: Store
    once: Store


def open_stores(scheme: str, bucket: str, prefix: str, patience: Patience) -> Stores:
    """Return a client of a bucket; sends nothing yet. All settings but bucket and prefix come from the environment.

    Raises:
        ConfigurationError: obstore is not installed, or a setting is wrong.
    """
    try:
        from obstore import store as kinds
    except ImportError as exc:
        raise ConfigurationError(f"{scheme}:// needs the package obstore", hint=INSTALL_HINT) from exc
    kind: Any = {"s3": kinds.S3Store, "gs": kinds.GCSStore, "az": kinds.AzureStore}[scheme]

    def client(retry_s: float) -> Store:
        return kind(  # type: ignore[no-any-return]
            bucket,
            prefix=prefix or None,
            config={"timeout": f"{round(1000 * patience.request_timeout_s)}ms"},
            retry_config={
                "max_retries": 1000 if retry_s > 0 else 0,
                "retry_timeout": timedelta(seconds=retry_s),
                "backoff": {
                    "init_backoff": timedelta(seconds=FIRST_PAUSE_S),
                    "max_backoff": timedelta(seconds=MAX_PAUSE_S),
                    "base": 2,
                },
            },
        )

    try:
        return Stores(steady=client(patience.request_retry_s), once=client(0.0))
    except Exception as exc:
        failure = understand(exc)
    hint = "check the variables of the store (AWS_..., GOOGLE_..., AZURE_...)"
    raise ConfigurationError(f"{scheme}://{bucket} cannot be opened: {failure.text}", hint=hint)


class Requests:
    """Makes requests, repeats them where that is allowed, and translates what goes wrong.

    Args:
        patience: How long.
        tier: The tier's name, for messages.
        clock: Time.
    """

    def __init__(self, patience: Patience, *, tier: str, clock: Clock) -> None:
        self.patience = patience
        self._tier = tier
        self._clock = clock
        self._random = random.Random()

    def run(
        self,
        doing: str,
        path: str,
        action: Callable[[], T],
        *,
        again: Callable[[Failure], bool] = lambda failure: failure.passes,
    ) -> T:
        """Run `action`, again while `again` allows it for what went wrong and there is time.

        Raises:
            CheckpointError: See `object_errors`.
            FileNotFoundError: The store said so.
            FileExistsError: The store said so.
        """
        begun = self._clock.monotonic()
        pauses = self.pauses()
        while True:
            try:
                return action()
            except Exception as exc:
                if not is_foreign(exc):
                    raise
                failure = understand(exc)
            pause = next(pauses)
            tried_s = self._clock.monotonic() - begun
            if not again(failure) or tried_s + pause > self.patience.request_retry_s:
                raise to_error(failure, doing, tier=self._tier, path=path, tried_s=tried_s)
            self._clock.sleep(pause)

    def translate(self, exc: Exception, doing: str, path: str) -> CheckpointError | OSError:
        """Return what an error of obstore means to the caller."""
        return to_error(understand(exc), doing, tier=self._tier, path=path)

    def pauses(self) -> Iterator[float]:
        """Yield growing pauses with jitter, without end."""
        pause = FIRST_PAUSE_S
        while True:
            yield pause * self._random.uniform(0.5, 1.0)
            pause = min(2 * pause, MAX_PAUSE_S)


def is_foreign(exc: Exception) -> bool:
    """Whether an error comes from obstore (which also raises plain `OSError` and `ValueError`)."""
    return type(exc).__module__.startswith("obstore") or type(exc) in (FileNotFoundError, OSError, ValueError)
