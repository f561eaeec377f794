"""All settings in one frozen object; read from files and environment at the edge only (`safehold.cli.config_source`).

Invariants: every field has a default, a unit in its name where it has one, and a docstring line; refusals happen at construction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from safehold.errors import ConfigurationError

OverlapPolicy = Literal["wait", "skip", "replace"]
OnFailure = Literal["raise", "warn"]
Flash = Literal["auto", "shared", "local"]
PassOn = Literal["auto", "off"]
MAX_THREADS = 256
MAX_SECONDS = 1e9
MAX_BYTES = 1 << 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Settings of a run; the same on every rank.

    Attributes:
        overlap_policy: What a save does while an earlier one still flushes: `wait` for it, `skip` this one, or `replace` the earlier.
        on_failure: A save that failed in the background is raised at the next call (`raise`) or only warned about (`warn`).
        max_failures: With `warn`: this many failed saves in a row are raised all the same. 0: never.
        flush_timeout_s: Seconds from the start of a save to durable; then it fails by name.
        begin_timeout_s: Seconds from the first rank's start of a save until all have started it; then it fails and names the late.
        stage_timeout_s: Seconds from there until all ranks have staged.
        start_timeout_s: Seconds for the constructor: agents up, ranks known to each other, older incarnations settled.
        request_timeout_s: Seconds for the agent to answer a small question.
        restore_timeout_s: Seconds for a whole restore, waiting for other ranks included.
        stall_timeout_s: Seconds without one byte of progress after which a read of a restore is given up.
        agent_linger_s: Seconds that an agent stays after its last trainer is gone, so that a restart finds it and its memory.
        flush_every: Of the saves, every so many-th is flushed to storage, and the first of each start of the job; the others stay in
            memory, with copies at other nodes. 1: all are flushed. See docs/memory.md.
        memory_copies: How many other nodes keep a copy of a save that stays in memory, where there are any; 0 to 3.
        memory_budget_bytes: Upper bound for the arenas of this node, within what is available when they are allocated; 0: 0.6 of that.
        pack_size_bytes: A rank's arena is split into packs of about this size.
        flush_threads: Threads that write one rank's packs.
        flush_block_bytes: Size of one write.
        flush_rate_bytes_s: Upper bound for a node's flush rate; 0: none.
        flush_busy_share: Share of the node's CPU time that flushes take at most while training leaves no core idle; 0: no limit.
        flush_nice: Niceness of what runs beside training: flushers, and threads of the agent that populate arenas; 0 to 19.
        restore_threads: Threads of one rank's restore; all but one of them read at a time, and the other verifies and copies.
        restore_pass_on: `auto`: bytes that several nodes want in a restore are read from storage once and passed on between their agents;
            `off`: every node reads all that it wants.
        restore_cache_bytes: Memory of a node for that, within its memory budget, and for as long as the restore takes.
        delete_grace_s: Seconds between un-committing a checkpoint and deleting its bytes.
        lease_s: Seconds that a reader's lease (`safehold.load`) outlives a reader that died; renewed every third of it. 1 to 86400.
        split_bytes: Replicated tensors of at least this size are split by rows among the ranks that hold them.
        runtime_dir: Where sockets and locks of the node's agents are; empty: chosen from the environment.
        flash: Whether all nodes see one run directory (`shared`) or each has a disk of its own under that path (`local`); `auto` finds out.
        copies: With node-local flash: so many whole copies of each checkpoint on other nodes; 0: none, 1 to 3.
        parity: With node-local flash: `xor:4` (any 1 of 4 nodes may be lost), `rs:4+2` (any 2 of 6), ...; empty: none.
        direct_io: Use direct I/O where the file system takes it.
        storage_interface: Where agents of several nodes listen and talk to each other: an IP address or host name of each node, or the
            name of a network interface; empty: the interface that leads to the launcher's host (`MASTER_ADDR`).
        network_port: The TCP port for that; 0: any that is free. Agents of several runs on one node need different ones.
        network_cert: PEM file with this node's certificate, for TLS between agents; empty: no TLS.
        network_key: PEM file with its key; empty: it is in `network_cert`.
        network_ca: PEM file with the CA whose certificates both sides have to show.
        network_check_names: Whether certificates have to name the address that they are reached at.
        remote: The second place, a path or URL, that each commit is copied to beside training; empty: none.
        remote_every: Copy each so-many-th commit; the final save always.
        remote_keep: How many of the newest checkpoints the second place keeps.
        remote_rate_bytes_s: Upper bound for what each node sends there; 0: none.
        remote_timeout_s: Seconds that one replication may take; the agents stay so long for one that is under way when
            their trainers are gone, and retention keeps a checkpoint so long that waits for its replication.
        peer_timeout_s: Seconds without an answer after which another node is taken to be lost.
    """

    overlap_policy: OverlapPolicy = "wait"
    on_failure: OnFailure = "raise"
    max_failures: int = 3
    flush_timeout_s: float = 600.0
    begin_timeout_s: float = 60.0
    stage_timeout_s: float = 300.0
    start_timeout_s: float = 120.0
    request_timeout_s: float = 60.0
    restore_timeout_s: float = 3600.0
    stall_timeout_s: float = 120.0
    agent_linger_s: float = 300.0
    flush_every: int = 1
    memory_copies: int = 1
    memory_budget_bytes: int = 0
    pack_size_bytes: int = 64 << 30
    flush_threads: int = 3
    flush_block_bytes: int = 8 << 20
    flush_rate_bytes_s: int = 0
    flush_busy_share: float = 0.05
    flush_nice: int = 19
    restore_threads: int = 3
    restore_pass_on: PassOn = "auto"
    restore_cache_bytes: int = 1 << 30
    delete_grace_s: float = 30.0
    lease_s: float = 600.0
    split_bytes: int = 4 << 20
    runtime_dir: str = ""
    flash: Flash = "auto"
    copies: int = 0
    parity: str = ""
    direct_io: bool = True
    storage_interface: str = ""
    network_port: int = 0
    network_cert: str = ""
    network_key: str = ""
    network_ca: str = ""
    network_check_names: bool = True
    remote: str = ""
    remote_every: int = 1
    remote_keep: int = 3
    remote_rate_bytes_s: int = 0
    remote_timeout_s: float = 3600.0
    peer_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        """Refuse what cannot work, naming the field."""
        for field in fields(self):
            _check(field.name, getattr(self, field.name), field.default)
        if self.overlap_policy not in ("wait", "skip", "replace"):
            raise ConfigurationError(f"overlap_policy must be wait, skip or replace, not {self.overlap_policy!r}")
        if self.on_failure not in ("raise", "warn"):
            raise ConfigurationError(f"on_failure must be raise or warn, not {self.on_failure!r}")
        if self.flash not in ("auto", "shared", "local"):
            raise ConfigurationError(f"flash must be auto, shared or local, not {self.flash!r}")
        if self.restore_pass_on not in ("auto", "off"):
            raise ConfigurationError(f"restore_pass_on must be auto or off, not {self.restore_pass_on!r}")
        if self.copies and self.parity:
            hint = "copies cost most and are quickest to read back, parity costs a fraction: choose one"
            text = f"copies={self.copies} and parity={self.parity!r} exclude each other"
            raise ConfigurationError(text, hint=hint)
        if not 1 <= self.flush_threads <= MAX_THREADS or not 1 <= self.restore_threads <= MAX_THREADS:
            raise ConfigurationError(f"flush_threads and restore_threads must be from 1 to {MAX_THREADS}")
        if self.flush_every < 1:
            raise ConfigurationError("flush_every must be at least 1")
        if not 0 <= self.memory_copies <= 3:
            raise ConfigurationError("memory_copies must be from 0 to 3")
        if self.max_failures < 0:
            raise ConfigurationError("max_failures must be at least 0")
        if not 1 << 20 <= self.flush_block_bytes <= 1 << 30 or self.flush_block_bytes % (1 << 20):
            raise ConfigurationError("flush_block_bytes must be a multiple of 1 MiB, at most 1 GiB")
        if self.pack_size_bytes < 1 << 20:
            raise ConfigurationError("pack_size_bytes must be at least 1 MiB")
        if not 1 <= self.lease_s <= 86400:
            raise ConfigurationError("lease_s must be from 1 to 86400")
        if not 0 <= self.flush_busy_share <= 1:
            raise ConfigurationError("flush_busy_share must be from 0 to 1")
        if not 0 <= self.network_port <= 65535:
            raise ConfigurationError("network_port must be a TCP port, or 0 for any that is free")
        if (self.network_key or self.network_ca) and not self.network_cert:
            raise ConfigurationError("network_key and network_ca are of no use without network_cert")
        if self.remote_every < 1 or self.remote_keep < 1:
            raise ConfigurationError("remote_every and remote_keep must be at least 1")
        if self.remote_timeout_s < 1:
            raise ConfigurationError("remote_timeout_s must be at least 1")
        if self.peer_timeout_s < 1:
            raise ConfigurationError("peer_timeout_s must be at least 1")
        if not 0 <= self.flush_nice <= 19:
            raise ConfigurationError("flush_nice must be from 0 to 19")

    def to_wire(self) -> dict[str, Any]:
        """Return a plain dict for the agent."""
        return asdict(self)

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Config:
        """Rebuild; unknown fields (from another version) are ignored."""
        known = {field.name for field in fields(cls)}
        return cls(**{key: value for key, value in wire.items() if key in known})


def _check(name: str, value: object, default: object) -> None:
    """Refuse a value of another type than the default's, or out of all reason."""
    if isinstance(default, float):
        what, fits = "a number", isinstance(value, int | float) and not isinstance(value, bool)
    else:
        what = {bool: "True or False", int: "an integer", str: "a text"}[type(default)]
        fits = type(value) is type(default)
    if not fits:
        raise ConfigurationError(f"{name} must be {what}, not {value!r}")
    if name.endswith(("_bytes", "_bytes_s")):
        if not 0 <= value <= MAX_BYTES:  # type: ignore[operator]
            raise ConfigurationError(f"{name} must be a number of bytes from 0 to 2**60, not {value!r}")
    elif name.endswith("_s") and not 0 <= value < MAX_SECONDS:  # type: ignore[operator]
        raise ConfigurationError(f"{name} must be a number of seconds from 0 to 1e9, not {value!r}")
