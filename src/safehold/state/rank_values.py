"""Which rank's value of an object a rank gets back: the meaning of `safehold.types.RankPolicy`.

Invariants: pure functions of what was saved; every rank that asks with the same arguments gets the same answer. Values
are plain, as
`safehold.format.objects` decodes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from safehold.errors import StateMismatchError
from safehold.state import param_groups
from safehold.state.values import from_plain
from safehold.types import ObjectSpec

_MAX_NAMED_RANKS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RankValues:
    """The values of all saved ranks, given in place of one value where a function has to make one from all.

    Attributes:
        values: Saved rank -> decoded value, ranks ascending.
        equal: Whether they are all the same.
    """

    values: dict[int, Any]
    equal: bool


def value_for_rank(
    spec: ObjectSpec,
    digests: Mapping[int, str],
    decode: Callable[[int], Any],
    *,
    rank: int,
    world_size: int,
    saved_world_size: int,
) -> Any:
    """Return what `RestoreBinding.apply` (and `apply_random`) should be given for one object on one rank.

    Args:
        spec: The object as saved.
        digests: Saved rank -> digest of its bytes, for every rank that had the object; not empty.
        decode: Gives the decoded value of a saved rank; called once per distinct digest where that is enough.
        rank: The rank that asks.
        world_size: Number of ranks now.
        saved_world_size: Number of ranks that saved.

    Raises:
        StateMismatchError: The policy allows no value; names the object and ranks.
    """
    ranks = sorted(digests)
    distinct = {digest: holder for holder, digest in sorted(digests.items(), reverse=True)}
    if spec.policy == "groups":
        return _merged_groups(spec.name, [decode(holder) for holder in sorted(distinct.values())])
    if saved_world_size == world_size and rank in digests:
        return decode(rank)
    equal = len(distinct) == 1
    if spec.policy in ("derive", "merge"):
        by_digest = {digest: decode(holder) for digest, holder in distinct.items()}
        return RankValues(values={saved: by_digest[digests[saved]] for saved in ranks}, equal=equal)
    if spec.policy == "first" or (spec.policy == "same" and equal):
        return decode(ranks[0])
    raise _no_value(spec, digests, rank=rank, world_size=world_size, saved_world_size=saved_world_size)


def _merged_groups(name: str, values: list[Any]) -> Any:
    if len(values) == 1:
        return values[0]
    try:
        return param_groups.merge([from_plain(value) for value in values])
    except StateMismatchError as exc:
        raise StateMismatchError(f"{name}: {exc.message}", hint=exc.hint) from exc


def _no_value(
    spec: ObjectSpec, digests: Mapping[int, str], *, rank: int, world_size: int, saved_world_size: int
) -> StateMismatchError:
    named = ", ".join(map(str, sorted(digests)[:_MAX_NAMED_RANKS]))
    more = "" if len(digests) <= _MAX_NAMED_RANKS else f" and {len(digests) - _MAX_NAMED_RANKS} more"
    if spec.policy == "refuse":
        why = "is kept per rank and its policy refuses another number of ranks"
        hint = "resume with as many ranks, or declare PerRank with the policy first, derive or merge before the save"
    else:
        why = "was not declared and differs between the ranks"
        hint = "declare it with safehold.PerRank and a policy, or make it the same on all ranks"
    return StateMismatchError(
        f"{spec.name}: {why} that saved it ({named}{more} of {saved_world_size}); "
        f"there is no value for rank {rank} of {world_size}",
        rank=rank,
        hint=hint,
    )
