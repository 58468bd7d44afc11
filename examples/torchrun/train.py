"""Trains a small GPT on Jane Austen's novels with DistributedDataParallel, under torchrun or anything that speaks like it.

Stopped at any moment and started again it goes on from its last checkpoint and ends at the same weights: the learning
rate and the order of the data are functions of the step, and the batch is cut out of the same global batch whatever
the number of ranks.
"""

import argparse
import math
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from model import GPT


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(__file__).resolve().parent.parent / "austen/data")
    parser.add_argument("--out", type=Path, default=Path("checkpoints"), help="folder of the checkpoint")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16, help="sequences a step, over all ranks")
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=50)
    return parser.parse_args()


def read(folder: Path) -> torch.Tensor:
    files = sorted(folder.glob("*.txt"))
    if not files:
        raise SystemExit(f"--data {folder}: no *.txt there")
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def learning_rate(step: int, args: argparse.Namespace) -> float:
    warmup = max(1, args.steps // 20)
    if step < warmup:
        return args.lr * (step + 1) / warmup
    return args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(1, args.steps - warmup))))


def batch(text: torch.Tensor, step: int, args: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of a step's global batch: tokens and targets, both B S."""
    order = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
    starts = torch.randint(len(text) - args.seq_len, (args.batch,), generator=order)
    ours = starts[dist.get_rank() :: dist.get_world_size()]
    rows = torch.stack([text[start : start + args.seq_len + 1] for start in ours])
    return rows[:, :-1].long(), rows[:, 1:].long()


def save(path: Path, state: dict) -> None:
    """Whole or not at all, also when the power fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".tmp")
    with open(aside, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def load(path: Path) -> dict | None:
    """Rank 0's checkpoint, on every rank: the nodes need not share a folder."""
    box = [torch.load(path, map_location="cpu", weights_only=True) if dist.get_rank() == 0 and path.exists() else None]
    dist.broadcast_object_list(box)
    return box[0]


def main() -> None:
    args = arguments()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    train(args, device)
    dist.barrier()  # no rank's connections go away under another
    dist.destroy_process_group()
    sys.stdout.flush()
    # Gloo's threads outlive the group, and now and then one aborts an interpreter that is being taken down around it.
    os._exit(0)


def train(args: argparse.Namespace, device: torch.device) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    if args.batch % world:
        raise SystemExit(f"--batch {args.batch} does not divide by {world} ranks")
    text = read(args.data)

    torch.manual_seed(args.seed)
    model = GPT(args.layers, args.dim, args.heads, args.seq_len).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    checkpoint, first = args.out / "checkpoint.pt", 0
    state = load(checkpoint)
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    ddp = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    if rank == 0:
        size = sum(parameter.numel() for parameter in model.parameters())
        print(f"{size / 1e6:.2f}M parameters, {len(text):,} bytes of text, {world} ranks on {device.type}", flush=True)
        print(f"resumed at step {first}" if first else "from the beginning", flush=True)
        if first >= args.steps:
            print(f"nothing to do: step {first} of {args.steps} is done; more --steps, or --out elsewhere", flush=True)

    began, seen = time.perf_counter(), 0
    for step in range(first, args.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        tokens, targets = (part.to(device, non_blocking=True) for part in batch(text, step, args))
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = ddp(tokens, targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

        done, seen = step + 1, seen + args.batch * args.seq_len
        if done % args.log_every == 0 or done == args.steps:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                speed = seen / (time.perf_counter() - began)
                print(f"step {done}/{args.steps}  loss {mean.item() / world:.4f}  {speed:,.0f} tokens/s", flush=True)
                began, seen = time.perf_counter(), 0
        if rank == 0 and (done % args.save_every == 0 or done == args.steps):
            save(checkpoint, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": done})

    if rank == 0:
        print(model.continue_text("It is a truth universally ", 120), flush=True)


if __name__ == "__main__":
    main()
