"""What torchrun starts in `test_faults_survival`: `restarted.py RUN`.

In the launcher's first round it saves a step, and rank 1 ends by SIGKILL; in the second it restores, and says from where.
"""

from __future__ import annotations

import os
import signal
import sys

import torch
import torch.distributed as dist

import safehold

torch.set_num_threads(1)
dist.init_process_group("gloo")
state = {"weight": torch.zeros(1000), "step": 0}
ckpt = safehold.Checkpointer(sys.argv[1])
start = ckpt.restore(state)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    state["weight"] += 7
    ckpt.save(5, state).wait(30)
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()  # the launcher ends this rank
assert ckpt.last_restore is not None
total = state["weight"].sum().item()
os.write(
    1, f"rank {dist.get_rank()} restored {start} from {ckpt.last_restore.source}: {total:g}\n".encode()
)  # in one piece
ckpt.close()
dist.destroy_process_group()
