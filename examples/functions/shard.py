"""Data sharding, using `shard()`: each rank's own part of the data."""

from where import accelerator, provider

# >>> the guide
import atoll as sky  # changed: the name of the package

@sky.compute
def process_data(full_dataset):
    info = sky.instance_info()

    # Automatically get this worker's portion
    local_data = sky.shard(full_dataset)

    print(f"Node {info.node}: processing {len(local_data)} items")
    return sum(local_data)
# <<<


with sky.ComputePool(provider=provider, nodes=2, accelerator=accelerator) as pool:
    results = process_data(range(1001)) @ pool

print(f"{' + '.join(map(str, results))} = {sum(results)}; the whole is {sum(range(1001))}")
