# DDP from the environment, a DistributedSampler, a checkpoint of rank 0, a barrier.
#> [run]
#> flags = ["--nodes", "2"]
#> long = true
#> said = ["epoch 1 loss "]
#> lines = ["rank 0 of 2 gloo", "rank 1 of 2 gloo", "same weights: True", "same weights: True", "loaded step 1", "loaded step 1"]
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group(backend="gloo", init_method="env://")
    rank, world = dist.get_rank(), dist.get_world_size()
    print(f"rank {rank} of {world} {dist.get_backend()}")
    torch.manual_seed(rank)
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    sampler = DistributedSampler(data)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in DataLoader(data, batch_size=8, sampler=sampler):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
            torch.save({"step": epoch, "model": model.module.state_dict()}, "ckpt.pt")
    dist.barrier()
    print("loaded step", torch.load("ckpt.pt")["step"])
    weights = [torch.empty_like(model.module.weight) for _ in range(world)]
    dist.all_gather(weights, model.module.weight.data)
    print("same weights:", torch.equal(*weights))
    Path("done").touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
