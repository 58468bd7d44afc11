"""Best practice 1, always set the epoch in the sampler: without it every epoch repeats the first order."""

from where import accelerator, provider

import atoll as sky


@sky.compute
def orders(epochs):
    sampler = sky.DistributedSampler(range(20), shuffle=True)
    seen = []
    # >>> the guide
    for epoch in range(epochs):
        sampler.set_epoch(epoch)  # Ensures proper shuffling
    # <<<
        seen.append(list(sampler))
    return seen


@sky.compute
def orders_without(epochs):
    sampler = sky.DistributedSampler(range(20), shuffle=True)
    return [list(sampler) for _ in range(epochs)]


with sky.ComputePool(provider=provider, nodes=2, accelerator=accelerator) as pool:
    results = orders(3) @ pool
    without = orders_without(3) @ pool

for epoch in range(3):
    print(f"epoch {epoch}, rank 0: {results[0][epoch]}   without set_epoch: {without[0][epoch]}")
