"""Data sharding, with shuffle: the same seed gives the same parts again."""

import numpy as np
from where import accelerator, provider

import atoll as sky

x_full = np.arange(24)


@sky.compute
def split():
    # >>> the guide
    # Reproducible shuffled sharding
    x_local = sky.shard(x_full, shuffle=True, seed=42)
    # <<<
    return x_local


with sky.ComputePool(provider=provider, nodes=2, accelerator=accelerator) as pool:
    results = split() @ pool
    again = split() @ pool

for rank, (part, same) in enumerate(zip(results, again, strict=True)):
    print(f"rank {rank}: {part}, and again {same}")
