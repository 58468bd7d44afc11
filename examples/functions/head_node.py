"""Head node coordination: one process of the call saves and prints.

The checkpoint goes to outputs/functions under the current folder, on the machine of the head node.
"""

from pathlib import Path

from where import accelerator, provider

folder = Path("outputs/functions")


def training_code():
    """A few steps of training: the model, the last epoch and the last loss."""
    import torch
    from torch.nn.parallel import DistributedDataParallel as DDP

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = DDP(torch.nn.Linear(8, 1, device=device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(20):
        inputs = torch.randn(64, 8, device=device)
        loss = (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.module, epoch, loss.item()


def save_checkpoint(model):
    """Write aside, then rename, so that nobody ever reads half a checkpoint."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), folder / "head_node.pt.part")
    path = (folder / "head_node.pt.part").rename(folder / "head_node.pt")
    print(f"{path}: {path.stat().st_size} bytes")


# >>> the guide
import atoll as sky  # changed: the name of the package

@sky.compute
def train():
    info = sky.instance_info()

    model, epoch, loss = training_code()  # changed: real training in place of the comment

    # Only head node saves checkpoint
    if info.is_head:
        save_checkpoint(model)
        print(f"Saved checkpoint from head node")

    # Only head node prints progress
    if info.is_head:
        print(f"Epoch {epoch}: loss={loss:.4f}")

    return {"node": info.node, "is_head": info.is_head}
# <<<


with sky.ComputePool(provider=provider, nodes=2, accelerator=accelerator) as pool:
    results = train() @ pool

print(*results, sep="\n")
