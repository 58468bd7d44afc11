"""Troubleshooting, process group not initialized: one function for many ranks, for one rank, and for no pool."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from where import accelerator, provider

import atoll as sky


class MyModel(torch.nn.Linear):
    """Any model will do; on the GPU where there is one."""

    def __init__(self):
        super().__init__(4, 1, device="cuda" if torch.cuda.is_available() else "cpu")


@sky.compute
def build():
    # >>> the guide
    import torch.distributed as dist

    if not dist.is_initialized():
        # Single-node fallback
        model = MyModel()
    else:
        model = DDP(MyModel())
    # <<<
    return type(model).__name__, [parameter.tolist() for parameter in model.parameters()]


with sky.ComputePool(provider=provider, nodes=2, accelerator=accelerator) as pool:
    results = build() @ pool
    one = build() >> pool
here = build.local()

print(f"on every rank of the pool: {[name for name, _ in results]}")
print(f"on one rank: {one[0]}")
print(f"outside the pool: {here[0]}")
