"""A job: all ranks add up their numbers by gloo."""

from __future__ import annotations

import datetime
import os
import socket
import sys

import torch
import torch.distributed as dist

from safehold.testing.hosts import tell

torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
number = torch.tensor([float(sys.argv[1]) * (dist.get_rank() + 1)])
dist.all_reduce(number)
dist.destroy_process_group()
tell("saved", 7)
local = f"local {os.environ['LOCAL_RANK']} of {os.environ['LOCAL_WORLD_SIZE']}, group {os.environ['GROUP_RANK']}"
print(f"{socket.gethostname()} {local}: sum {number.item()} {os.environ['EXTRA']}")
