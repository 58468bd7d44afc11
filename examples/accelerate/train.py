"""Trains a small Llama from transformers with Hugging Face accelerate: one process, DDP or FSDP, as the launcher says.

The model is built from a config and reads bytes, so nothing is downloaded.
"""

import argparse
import os
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(__file__).resolve().parent.parent / "austen/data")
    parser.add_argument("--out", type=Path, default=Path("checkpoints"), help="folder of the checkpoint")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=4, help="sequences a step, of each process")
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--log-every", type=int, default=20)
    return parser.parse_args()


def sequences(folder: Path, seq_len: int) -> TensorDataset:
    text = bytearray(b"".join(file.read_bytes() for file in sorted(folder.glob("*.txt"))))
    whole = torch.frombuffer(text, dtype=torch.uint8)[: len(text) // seq_len * seq_len]
    return TensorDataset(whole.view(-1, seq_len).long())


def tell(accelerator: Accelerator, line: str) -> None:
    if accelerator.is_main_process:  # Accelerator.print prints once a node
        print(line, flush=True)


def main() -> None:
    args = arguments()
    # Where there is no GPU, or a simulated one, accelerate has to be told, or each process trains by itself.
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=args.seq_len,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = DataLoader(sequences(args.data, args.seq_len), args.batch, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    kind = str(accelerator.distributed_type).rpartition(".")[2]
    tell(accelerator, f"{accelerator.num_processes} processes, {kind} on {accelerator.device.type}")
    if os.environ.get("ACCELERATE_USE_FSDP") == "true" and kind != "FSDP":
        tell(accelerator, "FSDP was asked for, and accelerate has it on GPUs only: each process keeps the whole model")

    began = time.perf_counter()
    for step, (tokens,) in zip(range(1, args.steps + 1), loader, strict=False):
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % args.log_every == 0:
            mean = accelerator.reduce(loss.detach(), "mean").item()
            speed = step * args.batch * args.seq_len * accelerator.num_processes / (time.perf_counter() - began)
            tell(accelerator, f"step {step}/{args.steps}  loss {mean:.4f}  {speed:,.0f} tokens/s")

    accelerator.save_state(str(args.out))
    tell(accelerator, f"saved in {args.out}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
