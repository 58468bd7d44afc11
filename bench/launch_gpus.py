"""Tasks on a machine with GPUs: what they cost beside plain ``torchrun``, and whether the examples run whole.

    python bench/launch_gpus.py                 # two local nodes share the GPUs; 2 or more are needed

Each part prints what it found; a part that fails is told at the end, and the exit code is 1 then. All-reduce and the
training example run under ``torchrun`` and under Atoll in turn, on the same cards.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ATOLL = [sys.executable, "-c", "from atoll.cli.main import main; main()"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
ALL_REDUCE = """
import os, statistics, time, torch, torch.distributed as dist
local = int(os.environ["LOCAL_RANK"])
num = torch.cuda.device_count()
torch.cuda.set_device(local % num)
dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
x = torch.ones(1 << 28, device="cuda", dtype=torch.bfloat16)
took = []
for turn in range(25):
    dist.barrier()
    torch.cuda.synchronize()
    began = time.perf_counter()
    dist.all_reduce(x)
    torch.cuda.synchronize()
    if turn >= 5:
        took.append(time.perf_counter() - began)
size = x.numel() * 2
if rank == 0:
    print(f"busbw {2 * (world - 1) / world * size / statistics.median(took) / 1e9:.1f} GB/s over {world}", flush=True)
dist.destroy_process_group()
"""


def run(command: Sequence[str], *, limit_s: float = 300, **env: str) -> tuple[str, float]:
    """Output and seconds of a command; raises with its last lines where it fails."""
    started = time.perf_counter()
    done = subprocess.run(
        [*command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=limit_s, cwd=ROOT,
        env={**os.environ, **env},
    )  # fmt: skip
    took = time.perf_counter() - started
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command[-6:])} ended with {done.returncode}:\n{done.stdout[-3000:]}")
    return done.stdout, took


def tail(text: str, lines: int = 6) -> str:
    """The last lines, indented."""
    return "\n".join(f"    {line}" for line in text.strip().splitlines()[-lines:])


def all_reduce(folder: Path, num: int, turns: int) -> None:
    """Bus bandwidth of all GPUs, one node under torchrun, two local nodes under Atoll."""
    script = folder / "all_reduce.py"
    script.write_text(ALL_REDUCE)
    rates: dict[str, list[float]] = {"torchrun": [], "atoll run": []}
    seconds: dict[str, list[float]] = {"torchrun": [], "atoll run": []}
    for _ in range(turns):
        for name, command in (
            ("torchrun", [*TORCHRUN, "--standalone", "--nproc-per-node", str(num), str(script)]),
            ("atoll run", [*ATOLL, "run", "--nodes", "2", "--nproc", str(num // 2), str(script)]),
        ):
            text, took = run(command)
            found = re.search(r"busbw ([\d.]+) GB/s over (\d+)", text)
            assert found is not None, text
            assert int(found[2]) == num, text
            rates[name].append(float(found[1]))
            seconds[name].append(took)
    for name, values in rates.items():
        listed = ", ".join(f"{value:.0f}" for value in values)
        print(f"{name:10} all-reduce {statistics.median(values):6.1f} GB/s ({listed}), whole command "
              f"{statistics.median(seconds[name]):.1f} s")  # fmt: skip


def training(folder: Path, num: int) -> None:
    """The torchrun example: under torchrun, then as the task on two local nodes, both of its files."""
    text, took = run(
        [*TORCHRUN, "--standalone", "--nproc-per-node", str(num), "examples/torchrun/train.py", "--steps", "200",
         "--out", str(folder / "plain")]
    )  # fmt: skip
    print(f"torchrun, {num} GPUs, {took:.1f} s:\n{tail(text, 3)}")
    card = gpu_name()
    for name in ("train", "train-rdzv"):
        text, took = run(
            [*ATOLL, "launch", "-y", "-c", name, f"examples/torchrun/{name}.yaml", "--gpus", f"{card}:{num // 2}"]
        )
        print(f"atoll launch {name}.yaml, 2 nodes × {num // 2}, {took:.1f} s:\n{tail(text, 5)}")
        run([*ATOLL, "down", "-y", name])


def titan(num: int) -> None:
    """TorchTitan itself as a task on two local nodes."""
    text, took = run(
        [*ATOLL, "launch", "-y", "-c", "titan", "examples/torchtitan/task.yaml", "--gpus", f"{gpu_name()}:{num // 2}"],
        limit_s=400,
    )
    print(f"TorchTitan as a task, 2 nodes × {num // 2}, {took:.1f} s:\n{tail(text, 12)}")
    run([*ATOLL, "down", "-y", "titan"])


def accelerate(num: int) -> None:
    """accelerate's DDP and FSDP as tasks."""
    for name in ("ddp", "fsdp"):
        text, took = run(
            [
                *ATOLL,
                "launch",
                "-y",
                "-c",
                name,
                f"examples/accelerate/{name}.yaml",
                "--gpus",
                f"{gpu_name()}:{num // 2}",
            ]
        )
        print(f"accelerate {name}, 2 nodes × {num // 2}, {took:.1f} s:\n{tail(text, 5)}")
        run([*ATOLL, "down", "-y", name])


def recipe(folder: Path, num: int) -> None:
    """A recipe through the pool: ``atoll train`` on two local nodes."""
    text, took = run(
        [*ATOLL, "train", "examples/austen/austen.toml", "--nodes", "2", "--nproc", str(num // 2),
         "--train.steps", "60", "--train.micro_batch", "4", "--train.output_dir", str(folder / "austen"),
         "--metrics.plot", "false"]
    )  # fmt: skip
    print(f"atoll train, 2 nodes × {num // 2}, {took:.1f} s:\n{tail(text, 8)}")


LOOK = "import torch as t; print('sees', *(t.cuda.get_device_properties(i).uuid for i in range(t.cuda.device_count())))"
POOL = f"""
import sys, atoll as sky
def look():
    {LOOK}
with sky.ComputePool(accelerator=sys.argv[1]) as pool:
    pool.run(look)
"""


def leases() -> None:
    """Two jobs of one node, a second cluster and a pool compute on different cards, by the UUIDs that CUDA tells."""
    one = f"{gpu_name()}:1"
    hold = f'{sys.executable} -u -c "{LOOK}"; sleep 600'

    def seen(cluster: str, job: int) -> list[str]:
        deadline = time.monotonic() + 120
        while not (found := re.findall(r"sees ([-\w ]+)", run_log(cluster, job))):
            assert time.monotonic() < deadline, f"job {job} of cluster {cluster}: {run_log(cluster, job)}"
            time.sleep(0.2)
        return str(found[0]).split()

    def run_log(cluster: str, job: int) -> str:
        path = Path(os.environ["ATOLL_HOME"], "clusters", cluster, "jobs", str(job), "run.log")
        return path.read_text() if path.exists() else ""

    try:
        run([*ATOLL, "launch", "-d", "-c", "one", "--gpus", one.replace(":1", ":2"), "true"])
        for _ in range(2):
            run([*ATOLL, "exec", "-d", "one", "--gpus", one, hold])
        first, second = seen("one", 2), seen("one", 3)
        print(f"two jobs of a node: {first} and {second}")
        print(tail(run([*ATOLL, "gpus"])[0]))
        assert len({*first, *second}) == len(first) + len(second) == 2
        run([*ATOLL, "cancel", "-y", "one", "3"])
        run([*ATOLL, "launch", "-d", "-c", "two", "--gpus", one, hold])
        other = seen("two", 1)
        print(f"a job of another cluster beside the first: {other}")
        assert len({*other, *first}) == len(other) + 1 == 2
        run([*ATOLL, "cancel", "-y", "two", "1"])
        text, _ = run([sys.executable, "-c", POOL, one])
        (pool,) = re.findall(r"sees ([-\w ]+)", text)
        print(f"a pool beside the first: {pool.split()}")
        assert len({*pool.split(), *first}) == len(pool.split()) + 1 == 2
    finally:
        run([*ATOLL, "down", "-y", "one", "two"])


def gpu_name() -> str:
    """What Atoll calls this machine's cards."""
    text, _ = run([*ATOLL, "gpus"])
    return text.splitlines()[1].split()[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--only", default="leases,all_reduce,training,titan,accelerate,recipe")
    args = parser.parse_args()
    import torch

    num = torch.cuda.device_count() // 2 * 2
    if num < 2:
        sys.exit("bench/launch_gpus.py needs at least two GPUs")
    print(f"{num} × {torch.cuda.get_device_name(0)}, torch {torch.__version__}")
    failed = []
    with tempfile.TemporaryDirectory(prefix="gpus-") as text:
        folder = Path(text)
        os.environ["ATOLL_HOME"] = str(folder / "home")
        programs = folder / "bin"
        programs.mkdir()
        for name, module in (
            ("torchrun", "torch.distributed.run"),
            ("accelerate", "accelerate.commands.accelerate_cli"),
        ):
            if shutil.which(name) is None:
                (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
                (programs / name).chmod(0o755)
        os.environ["PATH"] = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        parts: dict[str, Callable[[], None]] = {
            "leases": leases,
            "all_reduce": lambda: all_reduce(folder, num, args.turns),
            "training": lambda: training(folder, num),
            "titan": lambda: titan(num),
            "accelerate": lambda: accelerate(num),
            "recipe": lambda: recipe(folder, num),
        }
        for name in args.only.split(","):
            print(f"--- {name}", flush=True)
            try:
                parts[name]()
            except (RuntimeError, AssertionError, subprocess.TimeoutExpired) as error:
                failed.append(name)
                print(f"FAILED: {error}", flush=True)
    print(f"failed: {', '.join(failed)}" if failed else "all parts passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
