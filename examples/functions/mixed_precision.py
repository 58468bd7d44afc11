"""Best practice 5, mixed precision. Without CUDA, torch says that it has nothing to scale, and computes as ever."""

import torch
from where import accelerator, provider

import atoll as sky


@sky.compute
def forward():
    from transformers import TrainingArguments

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, input = torch.nn.Linear(8, 2).to(device), torch.randn(4, 8, device=device)
    # >>> the guide
    # PyTorch
    scaler = torch.cuda.amp.GradScaler()
    with torch.cuda.amp.autocast():
        output = model(input)

    # changed: left out, Keras is not part of these examples yet
    # changed: left out, Keras is not part of these examples yet

    # HuggingFace
    args = TrainingArguments(fp16=torch.cuda.is_available())  # changed: runs without CUDA too, and is kept to be shown
    # <<<
    return {"scaler": scaler.is_enabled(), "dtype": str(output.dtype), "fp16": args.fp16}


with sky.ComputePool(provider=provider, nodes=2, accelerator=accelerator) as pool:
    results = forward() >> pool

print(results)
