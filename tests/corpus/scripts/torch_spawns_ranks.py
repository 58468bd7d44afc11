# A script that starts its own ranks, as it would without a launcher.
#> [run]
#> long = true
#> lines = ["own rank 0 of 2 sum 1.0", "own rank 1 of 2 sum 1.0"]
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def rank_main(rank, world, port):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", str(port)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    print(f"own rank {rank} of {world} sum {total.item()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    mp.spawn(rank_main, args=(2, port), nprocs=2)
