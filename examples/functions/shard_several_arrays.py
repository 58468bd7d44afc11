"""Data sharding, multiple arrays: the same elements of each, so that what belongs together stays together."""

import numpy as np
from stand_ins import paragraphs
from where import accelerator, provider

import atoll as sky

x_full, labels = paragraphs(101 * 2)
y_full = np.array(labels)


@sky.compute
def split():
    # >>> the guide
    x_local, y_local = sky.shard(x_full, y_full, shuffle=True, seed=42)
    # <<<
    return x_local, y_local


with sky.ComputePool(provider=provider, nodes=2, accelerator=accelerator) as pool:
    results = split() @ pool

for rank, (texts, novels) in enumerate(results):
    print(f"rank {rank}: {len(texts)} paragraphs as a {type(texts).__name__}, {novels.sum()} of the second novel")
    print(f"        {novels[0]}: {texts[0][:80]} ...")
