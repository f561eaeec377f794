"""From the words on the command line to a run and its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from safehold.cli.output import warn
from safehold.cli.state import LATEST
from safehold.errors import StepNotFoundError
from safehold.format.names import counted, numbered
from safehold.format.records import RunInfo
from safehold.pipeline.catalog import Catalog, Checkpoint
from safehold.pipeline.snapshot import Snapshot
from safehold.policy import belief
from safehold.tiers.base import Tier
from safehold.tiers.open import open_tier
from safehold.types import CommitId


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRun:
    """A run that a command looks at.

    Attributes:
        tier: Where it is.
        info: Which run it is.
        catalog: Reads it.
        seen: What was in it when the command began.
    """

    tier: Tier
    info: RunInfo
    catalog: Catalog
    seen: Snapshot

    @property
    def believed(self) -> list[CommitId]:
        """The commits that count, newest first."""
        return belief.believed(self.seen.listing)

    def find(self, step: int | None) -> CommitId:
        """Return the commit of a step; None or `LATEST`: the newest.

        Raises:
            StepNotFoundError: There is no such checkpoint.
        """
        found = self.believed
        if not found:
            raise StepNotFoundError("the run has no checkpoint", path=self.tier.url, hint=self._uncommitted())
        if step is None or step == LATEST:
            return found[0]
        for commit in found:
            if commit.step == step:
                return commit
        steps = numbered("step", [commit.step for commit in found], 8)
        hint = f"there {'is' if len(found) == 1 else 'are'} {steps}"
        raise StepNotFoundError("there is no such checkpoint", step=step, path=self.tier.url, hint=hint)

    def load(self, step: int | None) -> Checkpoint:
        """Return the verified documents of a step's commit."""
        return self.catalog.load(self.find(step), run_id=self.info.run_id)

    def _uncommitted(self) -> str:
        attempts = len(self.seen.listing.attempts)
        if not attempts:
            return "nothing was saved"
        return f"never committed: {counted(attempts, 'attempt')}, see 'safehold ls --all'"


def open_run(text: str, *, quiet: bool = False) -> OpenRun:
    """Open a run directory for reading; what did not verify in it is told on stderr.

    Args:
        text: A path or URL.
        quiet: Do not tell.

    Raises:
        ConfigurationError: There is no run.
        StorageError: It cannot be read.
    """
    tier = open_tier(text)
    catalog = Catalog(tier, patience_s=0.2)
    info = catalog.require_run()
    seen = catalog.snapshot()
    for problem in () if quiet else seen.problems:
        where = f"{problem.path}: " if problem.path else ""
        warn(f"{where}{problem.message}")
    return OpenRun(tier=tier, info=info, catalog=catalog, seen=seen)
