"""Troubleshooting, NCCL timeout: seconds that a collective may take, whichever backend runs it."""

from where import accelerator, provider

import atoll as sky


@sky.compute
def total(value):
    # >>> the guide
    import os
    os.environ["NCCL_SOCKET_TIMEOUT"] = "600"
    os.environ["NCCL_DEBUG"] = "INFO"
    # <<<
    import torch
    import torch.distributed as dist

    tensor = torch.tensor([value * (sky.instance_info().rank + 1)])
    if torch.cuda.is_available():
        tensor = tensor.cuda()
    dist.all_reduce(tensor)
    return tensor.item()


with sky.ComputePool(provider=provider, nodes=2, accelerator=accelerator) as pool:
    results = total(10) @ pool

print(f"10 + 20 on each rank: {results}")
