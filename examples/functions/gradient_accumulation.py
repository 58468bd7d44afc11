"""Best practice 4, gradient accumulation: four small batches and one step are the same as one large batch."""

import torch
from stand_ins import paragraphs, word_counts
from where import accelerator, provider

import atoll as sky

texts, labels = paragraphs(512)
dataset = list(zip(word_counts(texts), torch.tensor(labels), strict=True))


class Classifier(torch.nn.Module):
    """Gives the loss of a batch, as the guide's model does."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(256, 2)

    def forward(self, batch):
        words, novels = (tensor.to(self.linear.weight.device) for tensor in batch)
        return torch.nn.functional.cross_entropy(self.linear(words), novels)


def setup(batch_size):
    """The model over all ranks, its optimizer, and this rank's batches."""
    from torch.nn.parallel import DistributedDataParallel as DDP
    from torch.utils.data import DataLoader

    model = DDP(Classifier().cuda() if torch.cuda.is_available() else Classifier())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(dataset, batch_size=batch_size, sampler=sky.DistributedSampler(dataset, shuffle=False))
    return model, optimizer, loader


@sky.compute
def accumulate():
    model, optimizer, loader = setup(batch_size=16)
    # >>> the guide
    accumulation_steps = 4

    for i, batch in enumerate(loader):
        loss = model(batch) / accumulation_steps
        loss.backward()

        if (i + 1) % accumulation_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
    # <<<
    return model.module.cpu().state_dict()


@sky.compute
def large_batches():
    model, optimizer, loader = setup(batch_size=64)
    for batch in loader:
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.module.cpu().state_dict()


with sky.ComputePool(provider=provider, nodes=2, accelerator=accelerator) as pool:
    results = accumulate() @ pool
    large = large_batches() @ pool

difference = (results[0]["linear.weight"] - large[0]["linear.weight"]).abs().max().item()
print(f"weights after 16 batches of 16 with a step every 4, and after 4 batches of 64: they differ by {difference:.1e}")
