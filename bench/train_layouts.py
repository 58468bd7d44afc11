"""Every parallelism against one device: the same losses, over NCCL on GPUs and over Gloo on CPU.

    torchrun --nproc-per-node 4 bench/train_layouts.py             # GPUs, or CPU where there is none
    torchrun --nproc-per-node 4 bench/train_layouts.py --steps 20

Each rank first trains the debug model alone, then all train it together in each layout that divides their number, from
the same weights on the same batches. Printed are the losses, the largest relative difference and the time of a step
(which is no measure of speed: the model is tiny). Exit code 1 where a layout differs by more than 1e-4.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from atoll.core.errors import ConfigError
from atoll.train.batch import Batch
from atoll.train.engine import Engine
from atoll.train.models.init import initialize
from atoll.train.optim.build import build_optimizer
from atoll.train.parallel.layout import Layout, resolve
from atoll.train.parallel.mesh import make_mesh
from atoll.train.parallel.norm import GradientNorm
from atoll.train.parallel.plan import Plan
from atoll.train.recipe.load import load_recipe
from atoll.train.recipe.schema import Recipe
from atoll.train.world import World, join

TOLERANCE = 1e-4
SEQ_LEN, GLOBAL_BATCH = 256, 8

# Per number of ranks. -1 is what is left.
LAYOUTS: dict[str, dict[str, Any]] = {
    "DDP": {"replicate": -1},
    "FSDP2": {"shard": -1},
    "HSDP": {"replicate": 2, "shard": -1},
    "tensor": {"tensor": -1},
    "tensor, whole sequence": {"tensor": -1, "sequence_parallel": False},
    "context": {"context": -1},
    "GPipe": {"pipeline": -1, "pipeline_schedule": "gpipe"},
    "1F1B": {"pipeline": -1, "pipeline_schedule": "1f1b"},
    "interleaved 1F1B": {"pipeline": -1, "pipeline_schedule": "interleaved"},
    "zero bubble": {"pipeline": -1, "pipeline_schedule": "zero_bubble"},
    "zero bubble, V": {"pipeline": -1, "pipeline_schedule": "zbv"},
    "FSDP2 × tensor": {"shard": -1, "tensor": 2},
    "FSDP2 × context": {"shard": -1, "context": 2},
    "pipeline × FSDP2": {"pipeline": 2, "shard": -1},
    "pipeline × tensor": {"pipeline": 2, "tensor": -1},
    "tensor × context": {"tensor": 2, "context": -1},
    "DDP × tensor": {"replicate": -1, "tensor": 2},
}


def recipe_for(options: dict[str, Any], micro_batch: int, precision: str) -> Recipe:
    tree = load_recipe("llama3_debug").recipe.model_dump(mode="json", exclude_none=True)
    tree["parallel"] = options
    tree["train"] |= {"seq_len": SEQ_LEN, "global_batch": GLOBAL_BATCH, "micro_batch": micro_batch}
    tree["precision"] = {"compute": precision}
    tree["compile"] = {"enabled": False}
    return load_recipe(tree).recipe


def sequences(step: int, vocab_size: int, device: torch.device) -> Batch:
    """A step's packed sequences, ragged documents and some labels untrained; the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    shape = (GLOBAL_BATCH, SEQ_LEN)
    tokens = torch.randint(0, vocab_size, shape, generator=generator)
    # What comes next is a function of what was, so that there is something to learn.
    labels = (tokens * 7 + 3) % vocab_size
    labels[torch.rand(shape, generator=generator) < 0.1] = -100
    starts = torch.rand(shape, generator=generator) < 0.02
    starts[:, 0] = True
    index = torch.arange(SEQ_LEN).expand(shape)
    positions = index - torch.where(starts, index, 0).cummax(1).values
    return Batch(tokens, labels, positions, starts.long().cumsum(1) - 1).to(device)


def rows(batch: Batch, start: int, stop: int) -> Batch:
    return batch.map(lambda part: part[start:stop].contiguous())


def losses_of(recipe: Recipe, layout: Layout, world: World, steps: int) -> tuple[list[float], float]:
    """Losses per token, and the median time of a step."""
    mesh = make_mesh(layout, world.device)

    def fill(model: nn.Module) -> None:
        initialize(model, 1)

    engine = Engine(Plan(recipe, layout), mesh, fill)
    optimizer = build_optimizer(engine.weights.masters, recipe.optimizer)
    grad_norm = GradientNorm(engine.weights.masters, mesh)
    share, micro = GLOBAL_BATCH // layout.data, recipe.train.micro_batch
    losses, times = [], []
    for step in range(steps):
        batch = sequences(step, recipe.model.vocabulary, world.device)
        first = mesh.data_rank * share
        own = [rows(batch, first + at, first + at + micro) for at in range(0, share, micro)]
        started = time.perf_counter()
        total = engine.forward_backward(own).double() / layout.tensor
        dist.all_reduce(total)
        tokens = int((batch.labels != -100).sum())
        optimizer.step(grad_scale=grad_norm()[0].clamp(min=tokens))  # clipped at 1
        engine.weights.publish()
        losses.append(total.item() / tokens)
        times.append(time.perf_counter() - started)
    return losses, sorted(times)[len(times) // 2]


def alone(recipe: Recipe, world: World, steps: int) -> list[float]:
    """The same on one device, in a plain loop."""
    from atoll.train.models.registry import build

    model = build(
        recipe.model, device=world.device, dtype=torch.float64 if recipe.precision.compute == "fp64" else torch.float32
    )
    initialize(model, 1)
    optimizer = build_optimizer(dict(model.named_parameters()), recipe.optimizer)
    losses = []
    for step in range(steps):
        batch = sequences(step, recipe.model.vocabulary, world.device)
        optimizer.zero_grad()
        loss = model(batch.tokens, batch.positions, batch.documents, batch.labels)
        tokens = int((batch.labels != -100).sum())
        (loss / tokens).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item() / tokens)
    return losses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--precision", choices=["fp32", "fp64"], default="fp32")
    args = parser.parse_args()
    world = join(timeout_s=120)
    say = print if world.is_head else lambda *_, **__: None
    name = torch.cuda.get_device_name() if world.device.type == "cuda" else "CPU"
    expected = alone(recipe_for({}, GLOBAL_BATCH, args.precision), world, args.steps)
    say(
        f"{world.size} × {name}, torch {torch.__version__}, {args.precision}; alone: "
        f"{expected[0]:.6f} → {expected[-1]:.6f}"
    )
    say(f"{'layout':24} {'last loss':>10} {'step 1 differs':>15} {'any step':>10} {'ms a step':>10}")
    worst = 0.0
    for label, options in LAYOUTS.items():
        for micro_batch in (2, 1):
            recipe = recipe_for(options, micro_batch, args.precision)
            try:
                layout = resolve(recipe, world.size)
            except ConfigError as error:
                why = str(error)
                continue
            losses, step_s = losses_of(recipe, layout, world, args.steps)
            apart = [abs(own - right) / right for own, right in zip(losses, expected, strict=True)]
            worst = max(worst, *apart)
            say(f"{label:24} {losses[-1]:10.6f} {apart[0]:15.1e} {max(apart):10.1e} {step_s * 1e3:10.1f}", flush=True)
            break
        else:
            say(f"{label:24} not on {world.size} ranks: {why}")
    say(f"largest difference {worst:.1e}, allowed {TOLERANCE:.0e}")
    world.close()
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
