"""What a checkpoint costs: Atoll beside PyTorch's own asynchronous save, each in turn on this machine.

    python bench/train_checkpoint.py [--millions 50] [--rounds 5] [--folder DIR]

Two ranks with FSDP2 on the CPU hold so many million fp32 numbers, two thirds of them AdamW's. The stall is what the
training loop waits in the call; the total ends when the checkpoint is complete on the disk. Atoll's is also
checksummed, listed in a manifest and renamed into place. Both sync their files.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WORLD = 2
WIDTH = 1024


def state(millions: float) -> dict:
    """A sharded model and its AdamW moments."""
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    from atoll.train.checkpoint.checkpointer import optimizer_tensors

    layers = max(1, round(millions * 1e6 / 3 / WIDTH**2))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {**dict(model.named_parameters()), **optimizer_tensors(optimizer, names)}


def atoll_saver(folder: Path, tensors: dict) -> Callable[[int], tuple[float, float]]:
    """Saves with Atoll; gives stall and total."""
    import torch.distributed as dist

    from atoll.train.checkpoint.checkpointer import Checkpointer

    group = dist.new_group(backend="gloo")
    saver = Checkpointer(str(folder), group=group, keep=1, keep_best=False, asynchronous=True, note=print)

    def save(step: int) -> tuple[float, float]:
        saver.save(step, tensors, {"step": step, "keep": False})
        saved = saver.wait()
        assert saved is not None
        return saved.stall_s, saved.took_s

    return save


def dcp_saver(folder: Path, tensors: dict) -> Callable[[int], tuple[float, float]]:
    """Saves with torch.distributed.checkpoint.async_save; gives stall and total."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    group = dist.new_group(backend="gloo")

    def save(step: int) -> tuple[float, float]:
        started = time.perf_counter()
        saving: Any = dcp.async_save(tensors, checkpoint_id=folder / str(step), process_group=group)  # a Future
        stall_s = time.perf_counter() - started
        saving.result()
        took_s = time.perf_counter() - started
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder / str(step))
        return stall_s, took_s

    return save


def rank_main(system: str, folder: Path, millions: float, rounds: int) -> None:
    """What each rank runs; rank 0 prints its figures."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    tensors = state(millions)
    save = {"atoll": atoll_saver, "dcp": dcp_saver}[system](folder / "checkpoints", tensors)
    figures = []
    for step in range(rounds + 1):
        dist.barrier()
        figures.append(save(step))
    dist.barrier()
    if rank == 0:
        numbers = sum(tensor.numel() for tensor in tensors.values())
        print(json.dumps({"figures": figures, "numbers": numbers, "torch": torch.__version__}), flush=True)
    os._exit(0)  # no rank pulls the group from under the other


def measure(system: str, where: str | None, millions: float, rounds: int) -> dict:
    """Run one system on fresh ranks."""
    with tempfile.TemporaryDirectory(dir=where) as folder:
        command = [sys.executable, __file__, "--rank-of", system, "--folder", folder]
        command += ["--millions", str(millions), "--rounds", str(rounds)]
        ranks = [
            subprocess.Popen(
                command, env={**os.environ, "RANK": str(rank)}, stdout=subprocess.PIPE if rank == 0 else None
            )
            for rank in range(WORLD)
        ]
        output = ranks[0].communicate()[0]
        if any(rank.wait() for rank in ranks):
            raise SystemExit(f"{system}: a rank failed")
        return json.loads(output.splitlines()[-1])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=float, default=50, help="fp32 numbers, optimizer included")
    parser.add_argument("--rounds", type=int, default=5, help="saves that count, after a first one")
    parser.add_argument("--folder", help="on which disk (default: the temporary folder's)")
    parser.add_argument("--rank-of", choices=["atoll", "dcp"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        rank_main(arguments.rank_of, Path(arguments.folder), arguments.millions, arguments.rounds)
    results = {
        system: measure(system, arguments.folder, arguments.millions, arguments.rounds) for system in ("dcp", "atoll")
    }
    first = results["atoll"]
    print(
        f"{first['numbers'] / 1e6:.0f} million fp32 numbers on {WORLD} ranks (FSDP2, CPU), torch {first['torch']}, "
        f"Python {platform.python_version()}, {os.cpu_count()} cores; medians of {arguments.rounds}"
    )
    print(f"{'':24}{'Atoll':>10}{'DCP':>10}{'ratio':>8}")
    for column, what in enumerate(("stall", "total")):
        for label, rows in ((f"{what}, first save", slice(0, 1)), (what, slice(1, None))):
            ours, theirs = (
                statistics.median(row[column] for row in results[system]["figures"][rows]) * 1e3
                for system in ("atoll", "dcp")
            )
            print(f"{label:24}{ours:7.0f} ms{theirs:7.0f} ms{ours / theirs:8.2f}")


if __name__ == "__main__":
    main()
