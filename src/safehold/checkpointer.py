"""The one object that a training loop holds."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from safehold.agent.messages import Durable
from safehold.agent.plugins import install_listener
from safehold.cli import config_source
from safehold.config import Config
from safehold.errors import CheckpointError, ConfigurationError, RankInterruptedError
from safehold.events import EventStream
from safehold.pipeline.exchange import membership
from safehold.pipeline.maintenance import keep_to_wire
from safehold.policy.cadence import Every, due_by_steps, parse_every
from safehold.policy.retention import Best, Keep, as_keep
from safehold.state.collect import preload
from safehold.state.leaves import RestoreOptions
from safehold.tiers.open import place
from safehold.trainer.connection import Run, leave, open_flash, open_run
from safehold.trainer.failures import Failures
from safehold.trainer.handles import SaveHandle, SaveOptions, wait_all
from safehold.trainer.metrics import metric_values
from safehold.trainer.overdue import Overdue
from safehold.trainer.preparing import quietly
from safehold.trainer.remote import resolve
from safehold.trainer.restorer import Restorer, RestoreReport
from safehold.trainer.saver import Saver
from safehold.trainer.steps import check_order, step_number
from safehold.trainer.terminal import IN_MEMORY_ONLY, NOT_AWAITED, end_program, restore_progress
from safehold.types import Store

log = logging.getLogger("safehold")


class Checkpointer:
    """Saves and restores the state of one training run.

    The constructor is collective: every rank of the job makes it, with the same arguments. Nothing after it is: ranks never wait for each
    other in a save. It starts the run's agent on this node if none runs, and opens a new incarnation of the run.

    Args:
        path: The run directory, a path or a URL (`file://`, `s3://bucket/prefix`, `gs://`, `az://`); made if absent.
            What is there is never overwritten.
        every: When `step` saves: steps (`500`), or a time (`"20min"`, `"2h"`); None: never by itself.
        keep: How many of the newest checkpoints stay (an int), or `safehold.Keep(last=3, every_steps=..., every_hours=..., best=...)`.
        overlap: Copy parameters and optimizer states beside the next forward and backward; needs every optimizer of the state
            hooked, which is done at the first save, and fails that save by name where it cannot be.
        random_states: Save and restore Python's, NumPy's and torch's random states, per rank.
        store: A key-value store with `set`, `get` and `check`; None: that of torch.distributed or of the launcher.
        rank: Only with `store`: this rank.
        world_size: Only with `store`: the number of ranks.
        settings: Fields of `safehold.Config`; they win over the environment (`SAFEHOLD_<FIELD>`) and over `safehold.toml`.

    Raises:
        ConfigurationError: An argument is wrong, ranks disagree, or the directory is no run directory.
        AgentUnavailableError: The agent could not be started.
        StorageError: The run directory cannot be used.
        DeadlineError: A rank did not take part.

    Calls come from one thread, and never from a signal handler: it may have interrupted one that holds a lock. Let the handler set a flag
    that the training loop looks at.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        every: str | int | None = None,
        keep: int | Keep = 3,
        overlap: bool = False,
        random_states: bool = True,
        store: Store | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        **settings: Any,
    ) -> None:
        self.path = place(path)
        self.config: Config = resolve(
            config_source.build(Config, config_source.load(Config, arguments=settings)), self.path
        )
        self.events = EventStream("trainer")
        install_listener(self.events)
        self._every: Every = parse_every(every)
        self._keep = as_keep(keep)
        self._overlap = overlap
        member = membership(store, rank, world_size)
        self.rank, self.world_size = member.rank, member.world_size
        self._failures = Failures(self.config)
        self._saver: Saver | None = None
        self._closed = False
        self._pid = os.getpid()
        self._previous_step: int | None = None
        self._last_saved: int | None = None
        self._newest: int | None = None
        self._announced = (0, 0)
        self._prepared = False
        self._unhook: Callable[[], None] | None = None
        self._hooked: tuple[int, ...] = ()
        self.last_restore: RestoreReport | None = None
        self._overdue = Overdue(self._every.seconds, self.config, self._failures)
        with self.events.span("open", rank=self.rank):
            self._run: Run = open_run(
                self.path,
                member,
                self.config,
                keep=keep_to_wire(self._keep),
                every_seconds=self._every.seconds or 0.0,
                notify=self._notify,
                lost=self._lost,
            )
        try:
            self._set_up(random_states)
        except BaseException:
            self._run.client.close(linger=True)
            raise
        self._newest = self._run.newest_step
        if self.rank == 0:
            for note in self._run.notes:
                log.info("safehold: %s", note)
            for warning in self._run.warnings:
                log.warning("safehold: %s", warning)
        atexit.register(self._at_exit)

    def _set_up(self, random_states: bool) -> None:
        preload()
        self._saver = Saver(
            self._run,
            rank=self.rank,
            world_size=self.world_size,
            config=self.config,
            failures=self._failures,
            events=self.events,
            random_states=random_states,
        )
        self._restorer = Restorer(
            self._run,
            open_flash(self._run, self.path, self.config),
            rank=self.rank,
            world_size=self.world_size,
            config=self.config,
            events=self.events,
            random_states=random_states,
            progress=restore_progress() if self.rank == 0 else None,
        )

    # -- facts -----------------------------------------------------------------------------------------------------------------

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self._run.run_id

    @property
    def incarnation(self) -> int:
        """Number of this start of the job; a restore of an older step counts it up."""
        return self._run.client.incarnation

    @property
    def num_failed(self) -> int:
        """Saves that failed since the constructor."""
        return self._failures.num_failed

    # -- saving ------------------------------------------------------------------------------------------------------------------

    def step(self, step: int, state: Any, *, metrics: dict[str, float] | None = None) -> SaveHandle | None:
        """Tell that `step` is complete, and save if a save is due.

        Costs microseconds when none is. Call it once per training step, on every rank, with the number of completed steps.

        Returns:
            The save's handle, or None if none was due.

        Raises:
            CheckpointError: A failure of an earlier save in the background, once; see `Config.on_failure`.
        """
        step = self._check(step)
        client = self._run.client
        self._overdue.look(client, step)
        self._failures.raise_pending()
        due = due_by_steps(self._every, self._previous_step, step, self._last_saved)
        announced = False
        node_control = client.node_control  # None while another agent is looked for
        if not due and self._every.seconds is not None and node_control is not None:
            announced = self._follow_announcement(node_control.announcement, step)
        self._previous_step = step
        if announced:
            # Told once the save has begun: a rank that is seen behind an announced step has passed it.
            try:
                return self._save(step, state, metrics or {}, SaveOptions(announced=True, overlap=self._overlap))
            finally:
                self._tell_progress(step)
        self._tell_progress(step)
        if due:
            return self._save(step, state, metrics or {}, SaveOptions(overlap=self._overlap))
        if not self._prepared and self._every:
            quietly(lambda: self.prepare(state, wait=False))
        return None

    def _tell_progress(self, step: int) -> None:
        control = self._run.client.control
        if control is not None:
            control.set_progress(step=step)

    def _follow_announcement(self, announcement: Any, step: int) -> bool:
        """Whether the lead's announcement is for this step: the first at or after it, and it was not passed before it was made."""
        made = (self._run.client.generation, announcement.seq)  # another agent counts from the start
        if announcement.step is None or made == self._announced:
            return False
        if step < announcement.step:
            return False
        self._announced = made
        return self._previous_step is None or self._previous_step < announcement.step

    def save(
        self,
        step: int,
        state: Any,
        *,
        metrics: dict[str, float] | None = None,
        final: bool = False,
        overwrite: bool = False,
        flush: bool = False,
    ) -> SaveHandle:
        """Save now, on every rank.

        Args:
            step: Names the checkpoint.
            state: What to save: a dict of modules, optimizers, schedulers, data loaders, tensors, arrays, plain values, and
                dicts and lists of these. On return it may be changed (with `overlap`: as far as the hooked optimizers guard it).
            metrics: For retention (`Keep(best=...)`); kept with the checkpoint.
            final: The last save of a finished training: always kept, and `close` waits for it.
            overwrite: Replace a checkpoint of this step that is committed already.
            flush: With `flush_every`: flush this one to storage, whichever it is.

        Returns:
            The handle. Nothing is durable yet: `handle.wait()` waits until it is.

        Raises:
            UnsupportedStateError: A leaf cannot be saved; its name and type are in the message.
            StateMismatchError: Ranks disagree about a leaf.
            CheckpointError: A failure of an earlier save in the background, once (with `final` this one has begun all the same);
                or of this one, where it is known at once.
        """
        step = self._check(step)
        if not final:
            self._failures.raise_pending()
        options = SaveOptions(final=final, overwrite=overwrite, flush=flush, overlap=self._overlap)
        handle = self._save(step, state, metrics or {}, options)
        if final:  # there is no later one that could make up for it
            self._failures.raise_pending()
        return handle

    def _save(
        self,
        step: int,
        state: Any,
        metrics: dict[str, float],
        options: SaveOptions,
    ) -> SaveHandle:
        assert self._saver is not None
        with self._saver.alone():
            if not options.overwrite:
                in_flight = [handle.step for handle in self._saver.open_handles()]
                newest = max(in_flight, default=None) if self._newest is None else max([self._newest, *in_flight])
                check_order(step, newest, path=self.path, rank=self.rank)
            if self._overlap:
                self._hook(state)
            self._prepared = True
            handle = self._saver.save(step, state, options, metrics=metric_values(metrics, step))
            self._last_saved = step
            return handle

    def prepare(self, state: Any, *, wait: bool = True) -> None:
        """Do ahead what the first save would have to: lay out the state, get host memory populated and pinned, settle who holds what.

        `restore` does it too. Safe to leave out; the first save then takes longer.

        Args:
            state: As for `save`.
            wait: Return when it is done, rather than at once.
        """
        self._check(0)
        assert self._saver is not None
        self._prepared = True
        if self._overlap:
            self._hook(state)
        self._saver.prepare(state, wait=wait)

    def _hook(self, state: Any) -> None:
        """Have every optimizer of the state wait for the copy before it steps."""
        from safehold.pipeline.optimizer_hooks import hook_optimizers

        assert self._saver is not None
        optimizers = self._saver.collect(state).optimizers
        key = tuple(id(optimizer) for _, optimizer in optimizers)
        if key == self._hooked and self._unhook is not None:
            return
        if self._unhook is not None:
            self._unhook()
        self._unhook = hook_optimizers(optimizers, self._saver.before_optimizer_step)
        self._hooked = key

    # -- restoring ---------------------------------------------------------------------------------------------------------------

    def restore(
        self,
        state: Any,
        step: int | None = None,
        *,
        partial: bool | Sequence[str] | None = None,
        rename: dict[str, str] | Callable[[str], str] | None = None,
        cast: bool = False,
    ) -> int | None:
        """Put a checkpoint into `state`, in place, on every rank; all ranks restore the same step.

        Any world size, mesh and placement. Every byte is verified before it reaches a tensor. A checkpoint that does not verify is left out
        with a warning and the next older one taken (not with `step`); later saves then continue from there.

        Args:
            state: As for `save`; modules and optimizers are filled in place, plain values of dicts are replaced.
            step: This step and no other; newer ones are set aside: they stay on storage, unused. None: the newest good one.
            partial: Let leaves be missing or unexpected, and optimizers and objects with `state_dict` be of another class
                than was saved: all (True), or those whose names match a glob pattern or one of several. A class of yours
                that you renamed or derived anew is let in by the name of its object: `partial="schedule"`.
            rename: Saved name, or beginning of names -> name in `state`; or a function of saved names. An entry whose old and
                new names the checkpoint both lacks is refused; one whose new name is there already is of no use, and harmless.
            cast: Allow another dtype in `state` than was saved.

        Returns:
            The step restored; None only if the run has no checkpoint at all.

        Raises:
            StateMismatchError: State and checkpoint do not fit; one error lists everything, and nothing was overwritten.
            ConfigurationError: `rename` speaks of what is not in the checkpoint.
            StepNotFoundError: `step` is not there, or none of the checkpoints can be used.
            IntegrityError: `step` does not verify.
            DeadlineError: A rank did not take part, or storage stalled.
        """
        self._check(0)
        wanted = None if step is None else step_number(step, self.rank)
        self._failures.raise_pending()
        assert self._saver is not None
        self._saver.finish_staging()
        options = RestoreOptions(partial=partial, rename=rename, cast=cast)
        report = self._restorer.restore(state, wanted, options)
        self.last_restore = report
        self._saver.forget_bindings()
        self._saver.restored(report.tier if report is not None else "")
        if report is not None:
            if self._newest is not None and report.step < self._newest and self.rank == 0:
                log.warning(
                    "safehold: went back to step %d; later steps up to %d are set aside: kept on storage, not used any more",
                    report.step,
                    self._newest,
                )
            self._newest = report.step
            self._last_saved = self._previous_step = report.step
            self._tell_progress(report.step)
            if self.rank == 0:
                log.info("safehold: %s", report)
        if report is not None and not self._overlap:
            self._prepared, saver, bound = True, self._saver, self._restorer.take_bound()
            quietly(lambda: saver.prepare_restored(bound))
        elif not self._prepared and (self._every or report is not None):
            quietly(lambda: self.prepare(state, wait=False))
        return report.step if report is not None else None

    # -- the end -----------------------------------------------------------------------------------------------------------------

    def wait(self, timeout_s: float | None = None, *, remote: bool = False) -> None:
        """Wait until everything that was staged is durable (drain); `remote`: and the newest is complete at the second place.

        Raises:
            CheckpointError: A save failed.
            DeadlineError: It was not durable, or replicated, in time.
        """
        self._check_process()
        assert self._saver is not None
        started = time.monotonic()
        late = wait_all(self._saver.open_handles(), self.config.flush_timeout_s if timeout_s is None else timeout_s)
        if remote and late is None:
            left_s = None if timeout_s is None else max(0.0, started + timeout_s - time.monotonic())
            late = self._saver.remote.wait(self.config.remote_timeout_s if left_s is None else left_s)
        self._failures.raise_pending(always=True)
        if late is not None:
            raise late

    def close(self, timeout_s: float | None = None, *, remote: bool = False) -> None:
        """Drain and leave: returns when everything staged is durable. The agent leaves too, once all ranks have closed.

        Args:
            timeout_s: None: the flush deadline, and with `remote` then `remote_timeout_s`.
            remote: Wait also until the newest is complete at the second place; else the agent stays for that.

        Raises:
            CheckpointError: A save failed, now or earlier, and nobody was told.
            DeadlineError: Something was not durable in time.
        """
        self._close(timeout_s, linger=False, remote=remote)

    def _close(self, timeout_s: float | None, *, linger: bool, remote: bool = False) -> None:
        """Drain and leave; with `linger` the agent and its memory wait for a restart."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        deadline = time.monotonic() + (self.config.flush_timeout_s if timeout_s is None else timeout_s)
        try:
            self.wait(timeout_s, remote=remote)
        finally:
            left_s = self.config.flush_timeout_s if remote else max(0.0, deadline - time.monotonic())
            self._leave(left_s, linger=linger)

    def _leave(self, timeout_s: float, *, linger: bool) -> None:
        if self._unhook is not None:
            self._unhook()
            self._unhook = None
        if self._saver is not None and self._saver.newest_tier == "memory":  # it would go with the agents
            linger = True
            if self.rank == 0:
                log.warning("safehold: step %s %s", self._newest, IN_MEMORY_ONLY)
        try:
            if self._saver is not None:
                self._saver.close(timeout_s)
        finally:
            self._restorer.close()
            leave(self._run, self.config, timeout_s, linger=linger)

    def __enter__(self) -> Checkpointer:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; an error that is under way is not replaced by one of `close`."""
        if kind is None:
            self.close()
            return
        try:
            self._close(None, linger=True)
        except CheckpointError as exc:
            log.error("safehold: while closing after %s: %s", kind.__name__, exc)
        except KeyboardInterrupt:
            if not issubclass(kind, KeyboardInterrupt):
                raise
            log.warning("safehold: interrupted again: %s", NOT_AWAITED)

    def _at_exit(self) -> None:
        """The program ends without `close`: drain, and fail loudly if that fails."""
        if self._closed or os.getpid() != self._pid:
            return
        # Else the program ends by an error of its own, with its own code.
        is_normal = getattr(sys, "last_value", None) is None
        try:
            self._close(None, linger=not is_normal)
        except CheckpointError as exc:
            if is_normal:
                end_program(f"the last saves are not all durable: {exc}", exc.exit_code)
            log.error("safehold: the last saves are not all durable: %s", exc)
        except KeyboardInterrupt:
            if is_normal:
                end_program(f"interrupted: {NOT_AWAITED}", RankInterruptedError.exit_code)
            log.warning("safehold: interrupted: %s", NOT_AWAITED)

    # -- inside ------------------------------------------------------------------------------------------------------------------

    def _check(self, step: Any) -> int:
        if self._closed:
            raise ConfigurationError("this Checkpointer is closed", rank=self.rank)
        self._check_process()
        return step_number(step, self.rank)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ConfigurationError("a forked child cannot use its parent's Checkpointer", rank=self.rank)

    def _notify(self, reply: Any) -> None:
        if isinstance(reply, Durable):
            self._newest = max(reply.step, self._newest or 0)
        if self._saver is not None:
            self._saver.notify(reply)

    def _lost(self, why: str) -> None:
        if self._saver is not None:
            self._saver.lost(why)


__all__ = ["Best", "Checkpointer", "Keep"]
