"""PyTorch, basic setup: DDP and a distributed sampler, without any decorator beside `@sky.compute`."""

import torch
from stand_ins import paragraphs, word_counts
from torch.utils.data import TensorDataset
from where import accelerator, provider

texts, labels = paragraphs(1024)
dataset = TensorDataset(word_counts(texts), torch.tensor(labels))
final_loss = float("nan")  # of the last step; train_step sets it


class MyModel(torch.nn.Module):
    """Tells from its words which of two novels a paragraph is from."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(256, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))

    def forward(self, words):  # (B, 256) -> (B, 2)
        return self.layers(words)


def train_step(model, batch):
    """One step of gradient descent. DDP averages the gradients over the ranks in `backward`."""
    global final_loss
    device = next(model.parameters()).device
    words, novels = (tensor.to(device) for tensor in batch)
    loss = torch.nn.functional.cross_entropy(model(words), novels)
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad = None
    final_loss = loss.item()


# >>> the guide
import atoll as sky  # changed: the name of the package

@sky.compute
def train(epochs: int) -> dict:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP
    from torch.utils.data import DataLoader

    info = sky.instance_info()

    # Model setup
    model = MyModel().cuda() if torch.cuda.is_available() else MyModel()  # changed: runs without CUDA too
    if dist.is_initialized():
        model = DDP(model)

    # Data loading with distributed sampler
    sampler = sky.DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, sampler=sampler, batch_size=64)

    # Training loop
    for epoch in range(epochs):
        sampler.set_epoch(epoch)  # Important!
        for batch in loader:
            train_step(model, batch)

    return {"node": info.node, "loss": final_loss}


# Launch on 2 nodes with A100 GPUs
with sky.ComputePool(
    provider=provider,  # changed: from where.py
    nodes=2,
    accelerator=accelerator,  # changed: from where.py
    image=sky.Image(pip=["torch"]),
) as pool:
    results = train(epochs=10) @ pool
# <<<

for result in results:
    print(f"node {result['node']}: loss of its last batch {result['loss']:.3f}; guessing would be 0.693")
