"""PyTorch, explicit decorator: the process group is there from the function's first line."""

from where import accelerator, provider

# >>> the guide
import atoll as sky  # changed: the name of the package

@sky.integrations.torch(backend="nccl")
@sky.compute
def train():
    import torch.distributed as dist
    # dist.is_initialized() is True
    return dist.is_initialized(), dist.get_backend(), dist.get_world_size()  # changed: something in place of the dots
# <<<


with sky.ComputePool(provider=provider, nodes=2, accelerator=accelerator) as pool:
    results = train() @ pool

for rank, (initialized, backend, world_size) in enumerate(results):
    print(f"rank {rank}: initialized {initialized}, backend {backend}, world size {world_size}")
