# A tcp:// group, a store of its own beside it, and gloo groups of a part of the ranks.
#> [run]
#> flags = ["--nodes", "2", "--nproc", "2"]
#> long = true
#> lines = ["0 [0, 1] 1.0", "1 [0, 1] 1.0", "2 [2, 3] 5.0", "3 [2, 3] 5.0", "told by 0", "told by 0", "told by 0"]
import os
from datetime import timedelta

import torch
import torch.distributed as dist

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
dist.init_process_group("gloo", init_method=f"tcp://{host}:{port}", rank=rank, world_size=world)
pairs = [[0, 1], [2, 3]]
groups = [dist.new_group(pair) for pair in pairs]
mine = rank // 2
total = torch.tensor([float(rank)])
dist.all_reduce(total, group=groups[mine])
print(rank, pairs[mine], total.item())
store = dist.TCPStore(host, port + 1, world, is_master=rank == 0, timeout=timedelta(seconds=60))
if rank == 0:
    store.set("who", "0")
else:
    print("told by", store.get("who").decode())
dist.barrier()
dist.destroy_process_group()
