"""Data sharding, DistributedSampler for PyTorch: a new order each epoch, and a part of it for each rank."""

from where import accelerator, provider

# >>> the guide
import atoll as sky  # changed: the name of the package
from torch.utils.data import DataLoader
# <<<

dataset = range(200)
seen = []


def train_step(batch):
    """Stands for training: takes down which samples this rank was given."""
    seen.extend(batch.tolist())


@sky.compute
def train(epochs):
    # >>> the guide
    sampler = sky.DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, sampler=sampler, batch_size=32)

    for epoch in range(epochs):
        sampler.set_epoch(epoch)  # Important for proper shuffling!
        for batch in loader:
            train_step(batch)
    # <<<
    return [seen[start : start + len(sampler)] for start in range(0, len(seen), len(sampler))]


with sky.ComputePool(provider=provider, nodes=2, accelerator=accelerator) as pool:
    results = train(epochs=3) @ pool

for epoch, parts in enumerate(zip(*results, strict=True)):
    for rank, part in enumerate(parts):
        print(f"epoch {epoch}, rank {rank}: {len(part)} samples, the first are {part[:8]}")
