"""Loads a checkpoint without a template: everything, or the leaves that match, as plain values and full tensors."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Any

from safehold.config import Config
from safehold.errors import CoverageError, ManifestError, StateMismatchError
from safehold.format import paths
from safehold.pipeline.catalog import Checkpoint
from safehold.pipeline.restore import Reading
from safehold.pipeline.storage_thread import within
from safehold.pipeline.stored_objects import StoredObjects
from safehold.policy import coverage
from safehold.state.leaves import Destination, SavedIndex, TensorLeaf
from safehold.state.rebuild import Rebuild
from safehold.state.saved_tree import SavedTree, make_rename
from safehold.state.values import from_plain
from safehold.tiers.base import Tier
from safehold.types import TensorSpec


def saved_index(checkpoint: Checkpoint) -> SavedIndex:
    """Return what the state floor needs to know of a checkpoint."""
    tensors = {spec.name: spec for spec in checkpoint.plan.leaves}
    aliases = dict(checkpoint.plan.aliases)
    for name, target in aliases.items():
        spec = tensors[target]
        tensors[name] = TensorSpec(name=name, dtype=spec.dtype, shape=spec.shape, kind=spec.kind)
    found = {spec.name: spec for table in checkpoint.plan.objects for spec in table}
    return SavedIndex(tensors=tensors, objects=found, aliases=aliases)


def _check_coverage(checkpoint: Checkpoint) -> None:
    """Refuse a plan with a hole before memory is taken for what it claims to have."""
    try:
        coverage.check(checkpoint.plan)
    except CoverageError as exc:
        path = paths.plan(checkpoint.manifest.plan_digest)
        raise ManifestError(exc.message, path=path, step=checkpoint.commit.step) from exc


def load_tree(tier: Tier, checkpoint: Checkpoint, names: Sequence[str] | None, config: Config) -> Any:
    """Return nested dicts and lists of what was saved.

    Args:
        tier: Where it is.
        checkpoint: Its verified documents.
        names: A glob pattern over FQNs, or several; None: everything but what safehold itself has put there.
        config: Settings.

    Raises:
        StateMismatchError: No leaf matches one of the patterns.
        IntegrityError: Something does not verify.
        DeadlineError: Storage stalled.
    """
    _check_coverage(checkpoint)
    chosen = saved_index(checkpoint)
    if names is not None:
        chosen = _matching(chosen, [names] if isinstance(names, str) else names)
    rebuild = Rebuild(0)
    root = SavedTree(chosen, make_rename(None), []).root
    if not root.children:
        return {}
    finish = rebuild.plan(root)
    destinations = []
    for node, binding in rebuild.tensors:
        assert node.tensor is not None
        leaf = TensorLeaf(spec=node.tensor, pieces=binding.pieces, holders=binding.holders, memory=binding.memory)
        destinations.append(Destination(saved=node.tensor, leaf=leaf))
    stored = within(
        config.stall_timeout_s, "reading the objects", lambda: StoredObjects(tier, checkpoint), path=tier.url
    )
    Reading(
        tier,
        checkpoint,
        destinations,
        rank=0,
        memory=lambda _: None,
        num_threads=config.restore_threads,
        stall_s=config.stall_timeout_s,
    ).run()
    return finish(lambda name: from_plain(stored.first(name)))


def _matching(index: SavedIndex, patterns: Sequence[str]) -> SavedIndex:
    """Return what matches; a pattern that nothing matches is a slip of the pen."""
    found: set[str] = set()
    useless = []
    for pattern in patterns:
        matching = {name for name in (*index.tensors, *index.objects) if fnmatch.fnmatchcase(name, pattern)}
        found |= matching
        useless += [] if matching else [pattern]
    if useless or not patterns:
        text = f"no leaf matches {', '.join(useless) or 'no pattern'}"
        raise StateMismatchError(text, hint="'safehold show RUN STEP --leaves' lists the leaves")
    return SavedIndex(
        tensors={name: spec for name, spec in index.tensors.items() if name in found},
        objects={name: spec for name, spec in index.objects.items() if name in found},
        aliases=index.aliases,
    )
