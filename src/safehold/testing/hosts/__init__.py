"""Several hosts on one machine, for tests and demonstrations: Linux namespaces that are joined by two networks.

    with Hosts(4, zygote=zygote) as hosts, run_job(hosts, 1, "train.py", [str(hosts.shared)]) as job:
        job.until("step 8")
        job.kill_host(2)

Each host has a `compute` and a `storage` network, a host name, processes, /dev/shm, a runtime directory and a flash of its own. The rest of
the file system is the machine's, `Hosts.shared` is a directory for all. Needs root and iproute2. docs/testing.md has more.
"""

from __future__ import annotations

from safehold.testing.hosts.hosts import FLASH, RUNTIME, Host, Hosts
from safehold.testing.hosts.job import Job, run_job
from safehold.testing.hosts.processes import HostProcess, HostsUnavailableError, Zygote
from safehold.testing.hosts.proxy import Proxy
from safehold.testing.hosts.timeline import Timeline, tell

__all__ = [
    "FLASH",
    "Host",
    "HostProcess",
    "Hosts",
    "HostsUnavailableError",
    "Job",
    "Proxy",
    "RUNTIME",
    "Timeline",
    "Zygote",
    "run_job",
    "tell",
]
