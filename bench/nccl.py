"""DDP over NCCL on this machine's GPUs: a 2-node local pool beside plain torchrun, in turn.

    python bench/nccl.py

Both train the same model on the same data with one process per GPU, and both time the same all-reduce. The ratio says
what running under Atoll costs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STEPS, WARM_UP, BATCH, WIDTH, DEPTH = 60, 10, 64, 4096, 8


def train(steps: int = STEPS) -> dict[str, Any]:
    """Train a stack of linear layers under DDP; the same function under Atoll and torchrun."""
    import hashlib

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    local_rank = int(os.environ["LOCAL_RANK"])
    torch.manual_seed(0)
    layers = [module for _ in range(DEPTH) for module in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU())]
    model = DistributedDataParallel(torch.nn.Sequential(*layers).cuda(), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator(device="cuda").manual_seed(dist.get_rank())
    x = torch.randn(BATCH, WIDTH, device="cuda", generator=generator)
    target = torch.tanh(x.roll(1, dims=1))
    losses, taken = [], []
    for _ in range(steps):
        started = time.perf_counter()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = torch.nn.functional.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - started)
    digest = hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())).hexdigest()
    return {
        "rank": dist.get_rank(),
        "world_size": dist.get_world_size(),
        "backend": dist.get_backend(),
        "device": torch.cuda.current_device(),
        "card": torch.cuda.get_device_name(),
        "uuid": str(torch.cuda.get_device_properties(local_rank).uuid),
        "loss_first": losses[0],
        "loss_last": losses[-1],
        "digest": digest,
        "step_ms": statistics.median(taken[WARM_UP:]) * 1e3,
        "all_reduce_gb_s": all_reduce(1 << 30),
    }


def all_reduce(size_bytes: int) -> float:
    """Bus bandwidth of an all-reduce in GB/s: 2 (n - 1) / n of the bytes cross the bus (NCCL's own definition)."""
    import torch
    import torch.distributed as dist

    buffer = torch.ones(size_bytes // 4, device="cuda")
    world = dist.get_world_size()
    taken = []
    for _ in range(15):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        dist.all_reduce(buffer)
        stop.record()
        torch.cuda.synchronize()
        taken.append(start.elapsed_time(stop) / 1e3)
        buffer.fill_(1.0)
    return size_bytes / 1e9 * 2 * (world - 1) / world / statistics.median(taken[5:])


def under_atoll() -> list[dict[str, Any]]:
    """Two local nodes, one process per GPU, the function undecorated."""
    import atoll as sky

    @sky.compute
    def run() -> dict[str, Any]:
        import torch.distributed as dist

        assert dist.is_initialized()
        return train()

    with sky.ComputePool(nodes=2) as pool:
        return list(run() @ pool)


def under_torchrun(num_gpus: int) -> list[dict[str, Any]]:
    """The same function under torchrun, one process per GPU."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_gpus}"),
            *(__file__, "--torchrun", folder),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"torchrun failed:\n{done.stderr[-3000:]}")
        return [json.loads(path.read_text()) for path in sorted(Path(folder).iterdir())]


def torchrun_rank(folder: str) -> None:
    """What each process of torchrun does."""
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    Path(folder, f"{dist.get_rank():04d}").write_text(json.dumps(train()))
    dist.destroy_process_group()


def main() -> None:
    """Run both in turn, check that the training is right, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torchrun", metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each")
    options = parser.parse_args()
    if options.torchrun:
        torchrun_rank(options.torchrun)
        return
    from atoll.providers.gpus import local_gpus

    gpus = local_gpus()
    if len(gpus) < 2:
        sys.exit(f"2 or more GPUs are needed, this machine has {len(gpus)}")
    num = len(gpus) - len(gpus) % 2
    rounds: dict[str, list[list[dict[str, Any]]]] = {"atoll": [], "torchrun": []}
    seconds: dict[str, list[float]] = {"atoll": [], "torchrun": []}
    for _ in range(options.rounds):  # in turn: clocks and caches warm up for both
        for name, run in (("atoll", under_atoll), ("torchrun", lambda: under_torchrun(num))):
            started = time.perf_counter()
            rounds[name].append(run())
            seconds[name].append(time.perf_counter() - started)
    for rows in (*rounds["atoll"], *rounds["torchrun"]):
        assert len(rows) == num, rows
        assert all(row["world_size"] == num for row in rows), rows
        assert {row["backend"] for row in rows} == {"nccl"}, rows
        assert len({row["uuid"] for row in rows}) == num, "two ranks share a GPU"
        assert len({row["digest"] for row in rows}) == 1, "parameters differ between ranks"
        assert rows[0]["loss_last"] < rows[0]["loss_first"], "the loss did not fall"
    equal = len({rows[0]["digest"] for name in rounds for rows in rounds[name]}) == 1
    card = rounds["atoll"][0][0]["card"]
    print(f"\n{num} × {card}, {time.strftime('%Y-%m-%d')}; ranks hold equal parameters in every run")
    print(f"parameters after {STEPS} steps {'equal' if equal else 'differ from'} torchrun's")
    print(f"median of {options.rounds} runs of each, in turn\n")
    print("| figure | Atoll, 2 local nodes | torchrun | Atoll ÷ torchrun |")
    print("|---|---|---|---|")
    for key, title in (("step_ms", "DDP step, ms"), ("all_reduce_gb_s", "all-reduce of 1 GiB, bus GB/s")):
        each = {name: [statistics.median(row[key] for row in rows) for rows in rounds[name]] for name in rounds}
        show(title, each)
    show("whole run, s", seconds)


def show(title: str, each: dict[str, list[float]]) -> None:
    """One row: medians, and what every run gave."""
    a, b = (statistics.median(each[name]) for name in ("atoll", "torchrun"))
    ours, peers = (", ".join(f"{value:.2f}" for value in each[name]) for name in ("atoll", "torchrun"))
    print(f"| {title} | {a:.2f} ({ours}) | {b:.2f} ({peers}) | {a / b:.3f} |")


if __name__ == "__main__":
    main()
