# fully_shard over a device mesh, one process a rank, a sharded checkpoint.
#> [run]
#> flags = ["--nproc", "2"]
#> long = true
#> lines = ["0 holds 8 of 16", "1 holds 8 of 16", "restored True", "restored True"]
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False))
fully_shard(model[0], mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
weight = model[0].weight
print(dist.get_rank(), "holds", weight.to_local().numel(), "of", weight.numel())
before = weight.full_tensor().clone()
dcp.save({"model": model.state_dict()}, checkpoint_id="ckpt")
with torch.no_grad():
    weight.zero_()
state = {"model": model.state_dict()}
dcp.load(state, checkpoint_id="ckpt")
model.load_state_dict(state["model"])
print("restored", torch.equal(model[0].weight.full_tensor(), before))
dist.destroy_process_group()
