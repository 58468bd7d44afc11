"""MIG: a job of its own on each slice of one GPU. Where the card is not here, its slices are simulated."""

from stand_ins import paragraphs, word_counts
from where import provider

texts, novels = paragraphs(512)
words = word_counts(texts)


def train():
    """Train a classifier with this slice's own learning rate, apart from the others."""
    import torch
    import torch.distributed as dist

    rate = (0.01, 0.3)[sky.instance_info().rank]
    torch.manual_seed(0)
    model, labels = torch.nn.Linear(words.shape[1], 2), torch.tensor(novels)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for _ in range(50):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(words), labels)
        loss.backward()
        optimizer.step()
    return {"rate": rate, "loss": loss.item(), "group": dist.is_initialized()}


# >>> the guide
import atoll as sky  # changed: the name of the package

train = sky.compute(train)  # changed: which the guide leaves out
with sky.ComputePool(
    provider=provider,  # changed: from where.py
    accelerator=sky.Accelerator.NVIDIA.A100(mig="3g.40gb"),  # 2 workers per GPU
    image=sky.Image(pip=["torch"]),
) as pool:
    # Each worker gets its own MIG partition
    results = train() @ pool
# <<<

for rank, result in enumerate(results):
    print(f"slice {rank}: learning rate {result['rate']}, loss {result['loss']:.4f}")
