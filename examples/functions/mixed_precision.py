"""Best practice 5, mixed precision. Without CUDA, torch says that it has nothing to scale, and computes as ever."""

import torch
from where import accelerator, provider

import atoll as sky


@sky.compute
def forward():
    import os

    os.environ["KERAS_BACKEND"] = "torch"
    import keras
    from transformers import TrainingArguments

    keras_model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, input = torch.nn.Linear(8, 2).to(device), torch.randn(4, 8, device=device)
    # >>> the guide
    # PyTorch
    scaler = torch.cuda.amp.GradScaler()
    with torch.cuda.amp.autocast():
        output = model(input)

    # Keras
    keras_model.compile("sgd", "mse", jit_compile=True)  # changed: a model of Keras, and what the dots stand for

    # HuggingFace
    args = TrainingArguments(fp16=torch.cuda.is_available())  # changed: runs without CUDA too, and is kept to be shown
    # <<<
    found = {"scaler": scaler.is_enabled(), "dtype": str(output.dtype), "fp16": args.fp16}
    return found | {"keras": keras_model.jit_compile}


with sky.ComputePool(provider=provider, nodes=2, accelerator=accelerator) as pool:
    results = forward() >> pool

print(results)
