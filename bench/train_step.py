"""A step of Atoll's loop against the same model in a plain PyTorch loop, in turn, on one rank.

    OMP_NUM_THREADS=1 python bench/train_step.py

Both train ``llama3_debug`` in float32 on the same number of the same kind of sequences. The plain loop does what a
script of thirty lines does: logits, cross entropy, backward, clip, AdamW; its batches are in memory. Atoll's step has
all of its own: reading and packing, the chunked loss, the check for what is not finite, metrics.jsonl. Printed are the
medians of all steps, and their ratio.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import torch
from torch.nn import functional as F

from atoll.train.data.loader import Loader
from atoll.train.data.packing import PackedDataset
from atoll.train.data.prepare import prepare
from atoll.train.events import Event, StepDone
from atoll.train.models.init import initialize
from atoll.train.models.registry import build
from atoll.train.objectives.pretrain import Pretrain
from atoll.train.outer import Counter
from atoll.train.recipe.load import load_recipe
from atoll.train.recipe.schema import Recipe
from atoll.train.trainer import run


def of_atoll(recipe: Recipe, folder: str, steps: int, device: torch.device) -> list[float]:
    """Seconds of each step, from the end of one to the end of the next."""
    ends: list[float] = []

    def report(event: Event) -> None:
        if isinstance(event, StepDone):
            ends.append(time.perf_counter())

    overrides = ["--train.output_dir", folder, "--train.steps", str(steps), "--checkpoint.at_end", "false"]
    run(recipe, [*overrides, "--metrics.plot", "false"], report=report)
    return [after - before for before, after in pairwise(ends)]


def of_plain_loop(recipe: Recipe, steps: int, device: torch.device) -> list[float]:
    prepared = prepare(recipe.data, seq_len=recipe.train.seq_len, progress=lambda _: None, note=lambda _: None)
    dataset = PackedDataset(prepared.train, recipe.train.seq_len)
    batch = recipe.train.global_batch
    loader = Loader(
        dataset,
        Pretrain(),
        Counter(),
        device=device,
        data_rank=0,
        data_size=1,
        global_batch=batch,
        micro_batch=batch,
    )
    batches = [next(loader).micro_batches[0] for _ in range(8)]
    loader.close()
    prepared.close()
    model = build(recipe.model, device=device)
    initialize(model, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    times = []
    for step in range(steps):
        started = time.perf_counter()
        each = batches[step % len(batches)]
        optimizer.zero_grad()
        logits = model(each.tokens, each.positions, each.documents)
        loss = F.cross_entropy(logits.flatten(0, 1), each.labels.flatten(), ignore_index=-100)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss.item()
        times.append(time.perf_counter() - started)
    return times[1:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20, help="of each turn")
    parser.add_argument("--turns", type=int, default=4)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    recipe = load_recipe(
        "llama3_debug", ["--train.micro_batch", "8", "--train.global_batch", "8", "--precision.compute", "fp32"]
    ).recipe
    ours: list[float] = []
    plain: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(args.turns):
            ours += of_atoll(recipe, str(Path(folder) / str(turn)), args.steps, device)[1:]
            plain += of_plain_loop(recipe, args.steps, device)
    mine, other = statistics.median(ours), statistics.median(plain)
    print(f"llama3_debug, fp32, {name}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    print(f"{'atoll':12} {mine * 1e3:8.1f} ms a step (from {min(ours) * 1e3:.1f} to {max(ours) * 1e3:.1f})")
    print(f"{'plain loop':12} {other * 1e3:8.1f} ms a step (from {min(plain) * 1e3:.1f} to {max(plain) * 1e3:.1f})")
    print(f"{'ratio':12} {mine / other:8.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
