"""A whole job in one process: nodes, agents, flushers, trainers, storage and network in virtual time, by a seed.

The agents' code is the real one (`AgentServer` and all below it, without its sockets), and so is what flushers do to the run directory
(`pipeline.maintenance`, the ledger, the catalog, the sweep). Modelled are: the network (by the contract of `agent.net.seam`), storage
(a tier in memory), packs (one small record each), arenas, control words, trainers, and the launcher.

    from safehold.testing.world import Setting, World

    with World(Setting(num_nodes=3, ranks_per_node=2), seed=7) as world:
        world.start_job()
        world.run(60.0)            # virtual seconds
        world.machines[1].die()
        world.run(600.0)
        world.finish()             # heals everything; saves have to succeed again

Whatever breaks an invariant (`checks`) raises `Violation`, which shows the seed and what happened before.
"""

from safehold.testing.world.setting import Setting
from safehold.testing.world.timeline import Violation
from safehold.testing.world.world import World

__all__ = ["Setting", "Violation", "World"]
