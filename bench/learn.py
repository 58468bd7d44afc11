"""What a model learns: Atoll beside a peer, with equal hyperparameters, on the same tokens in the same order.

    python bench/learn.py                                    # on a CPU: beside a plain Llama of transformers, small
    python bench/learn.py --peer torchtitan --out gpu.json   # Llama 3.2 1B untied, on each GPU one run at a time
    python bench/learn.py --peer torchtitan --seeds 1 --optimizer muon --atoll-lr 1e-3     # AdamW's rate beside Muon's
    python bench/learn.py --peer float8 --seeds 1 --steps 500 --seq-len 4096 --batch 1     # Atoll's own 8-bit products
    python bench/learn.py --draw gpu.json cpu.json --picture docs/learning.png

Each side starts from its own initial weights, which is what is compared, with the rest of its defaults: AdamW (0.9,
0.95), weight decay 0.1, clipping at 1, linear warm-up and decay to 0 are set on both. The text is that of
examples/austen, tokenised once and repeated to the length of the run. Printed: the loss at some steps, the mean over
the seeds, the difference and the seeds' spread; beside TorchTitan also how long the GPU works until the mean of ten
steps is the peer's last. Exit 1 where Atoll ends above the peer by more than that spread.
TorchTitan 0.2.2 must be installed (`pip install torchtitan==0.2.2 torchao==0.17.0`).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np

NOVELS = Path(__file__).parents[1] / "examples" / "austen" / "data"
ON_GPU = ("torchtitan", "float8")  # peers that need one
ROLE = "ATOLL_BENCH_LEARN"  # in the environment of a run: who it is, and its setting as JSON

CPU = {
    "model": {"layers": 4, "dim": 192, "heads": 6, "kv_heads": 2, "hidden_dim": 512, "vocab_size": 2048},
    "seq_len": 128,
    "batch": 16,
    "steps": 120,
    "warmup": 12,
    "lr": 3e-3,
    "tokenizer": 2048,
}
GPU = {
    "model": {
        "layers": 16,
        "dim": 2048,
        "heads": 32,
        "kv_heads": 8,
        "hidden_dim": 8192,
        "vocab_size": 128_256,
        "rope_theta": 500_000.0,
        "rope_scaling": {"kind": "llama3", "factor": 8.0, "original_max_seq_len": 8192},  # as TorchTitan has it
    },
    "seq_len": 8192,
    "batch": 2,
    "steps": 200,
    "warmup": 20,
    "lr": 3e-4,
    "tokenizer": 8192,
}


# ------------------------------------------------------------------------------------------------------ the runs
def write_tokens(path: Path, setting: dict[str, Any]) -> None:
    """The novels as 16-bit token ids, repeated to the length of a run."""
    from atoll.train.data.tokenizer import train_bpe

    texts = [each.read_text() for each in sorted(NOVELS.glob("*.txt"))]
    tokenizer = train_bpe(texts, setting["tokenizer"])
    ids = np.concatenate([np.asarray(tokenizer.encode(text), dtype=np.uint16) for text in texts])
    np.resize(ids, setting["steps"] * setting["batch"] * setting["seq_len"] + 1).tofile(path)


def batches(setting: dict[str, Any]) -> Any:
    """Tokens and labels [B, S] of each step, as Atoll packs them."""
    import torch

    ids = torch.from_numpy(np.fromfile(setting["tokens"], dtype=np.uint16).astype(np.int64))
    shape = (setting["steps"], setting["batch"], setting["seq_len"])
    return zip(ids[:-1].view(shape), ids[1:].view(shape), strict=True)


def recipe(setting: dict[str, Any]) -> dict[str, Any]:
    data = {"path": setting["tokens"], "format": "bin", "shuffle": False, "isolate_documents": False}
    return {
        "name": "learn",
        "model": {"max_seq_len": setting["seq_len"], **setting["model"]},
        "data": {**data, "cache": str(Path(setting["folder"]) / "cache")},
        "train": {
            "steps": setting["steps"],
            "seq_len": setting["seq_len"],
            "global_batch": setting["batch"],
            "micro_batch": setting["batch"],
            "seed": setting["seed"],
            "recompute": "none",
            "output_dir": setting["folder"],
        },
        "optimizer": {"lr": setting["lr"], **setting.get("optimizer", {})},
        "schedule": {"kind": "linear", "warmup": setting["warmup"], "floor": 0.0},
        "checkpoint": {"at_end": False},
        "metrics": {"plot": False},
        "precision": setting.get("precision", {}),
    }


def be_atoll(setting: dict[str, Any]) -> list[float]:
    from atoll.train.metrics.journal import read
    from atoll.train.trainer import run

    run(recipe(setting))
    return [row["loss"] for row in read(Path(setting["folder"]) / "metrics.jsonl")]


def be_transformers(setting: dict[str, Any]) -> list[float]:
    """The loop that everybody writes; weight decay as the Trainer of transformers has it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from atoll.train.optim.schedule import Schedule
    from atoll.train.recipe.schema import ScheduleSection

    torch.manual_seed(setting["seed"])
    sizes = setting["model"]
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=sizes["vocab_size"],
            hidden_size=sizes["dim"],
            intermediate_size=sizes["hidden_dim"],
            num_hidden_layers=sizes["layers"],
            num_attention_heads=sizes["heads"],
            num_key_value_heads=sizes["kv_heads"],
            max_position_embeddings=setting["seq_len"],
            rms_norm_eps=1e-5,
            tie_word_embeddings=sizes.get("tied", False),
        )
    )
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=setting["lr"], betas=(0.9, 0.95), eps=1e-8)
    section = ScheduleSection(kind="linear", warmup=setting["warmup"], floor=0.0)
    schedule = Schedule(section, setting["steps"], setting["warmup"], 0)
    losses = []
    for step, (tokens, labels) in enumerate(batches(setting)):
        for group in optimizer.param_groups:
            group["lr"] = setting["lr"] * schedule.factor(step + 1)
        logits = model(input_ids=tokens).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def be_torchtitan(setting: dict[str, Any]) -> None:
    """TorchTitan's own trainer with a model of this size and our tokens; its losses stand in what it prints."""
    options = {
        "model.name": "llama3",
        "model.flavor": "learn",
        "training.seq_len": setting["seq_len"],
        "training.local_batch_size": setting["batch"],
        "training.steps": setting["steps"],
        "optimizer.lr": setting["lr"],
        "lr_scheduler.warmup_steps": setting["warmup"],
        "activation_checkpoint.mode": "none",
        "metrics.log_freq": 1,
        "debug.seed": setting["seed"],
        "job.dump_folder": setting["folder"],
    }
    sys.argv[1:] = ["--compile.enable", "--metrics.no_enable_tensorboard"]
    sys.argv += [word for key, value in options.items() for word in (f"--{key}", str(value))]
    # It reads the command line as it is imported.
    import torchtitan.models.llama3 as llama3
    from torch.utils.data import IterableDataset
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.train import Trainer, main

    class Tokens(IterableDataset[Any]):
        def __iter__(self) -> Any:
            for tokens, labels in batches(setting):
                yield from (({"input": row}, label) for row, label in zip(tokens, labels, strict=True))

    def dataloader(dp_world_size: int, dp_rank: int, **_: Any) -> Any:
        return ParallelAwareDataloader(Tokens(), dp_rank, dp_world_size, batch_size=setting["batch"])

    sizes = setting["model"]
    llama3.llama3_args["learn"] = llama3.TransformerModelArgs(
        dim=sizes["dim"],
        n_layers=sizes["layers"],
        n_heads=sizes["heads"],
        n_kv_heads=sizes["kv_heads"],
        ffn_dim_multiplier=(sizes["hidden_dim"] + 0.5) / int(8 * sizes["dim"] / 3),
        multiple_of=64,
        vocab_size=sizes["vocab_size"],
        rope_theta=sizes["rope_theta"],
    )
    llama3.build_text_dataloader = dataloader
    llama3.build_hf_tokenizer = lambda job_config: None
    main(Trainer)


def be(who: str, setting: dict[str, Any]) -> None:
    """One run of one side, in a process of its own."""
    if who == "torchtitan":
        be_torchtitan(setting)
        return
    if who == "float8":
        setting["precision"] = {"float8": "tensorwise"}
    losses = be_transformers(setting) if who == "transformers" else be_atoll(setting)
    Path(setting["folder"], "losses.json").write_text(json.dumps(losses))


# ------------------------------------------------------------------------------------------------ side by side
def losses_of(who: str, setting: dict[str, Any], gpu: str | None, limit_s: float) -> tuple[list[float], float]:
    """The loss of every step of a run that is started here, and its tokens/s (nan where it tells of none)."""
    Path(setting["folder"]).mkdir(parents=True)
    env = {**os.environ, ROLE: json.dumps([who, setting]), "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    env |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    if gpu is not None:
        env["CUDA_VISIBLE_DEVICES"] = gpu
    if who == "torchtitan":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        env |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, __file__]
    done = subprocess.run(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=limit_s, errors="replace"
    )
    if who == "torchtitan":
        plain = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
        found = [float(loss) for loss in re.findall(r"step:\s*\d+\s+loss:\s*([\d.]+)", plain)]
        speeds = [float(speed.replace(",", "")) for speed in re.findall(r"tps:\s*([\d,]+)", plain)]
    else:
        path = Path(setting["folder"], "losses.json")
        found = json.loads(path.read_text()) if path.exists() else []
        journal = Path(setting["folder"], "metrics.jsonl")
        lines = journal.read_text().splitlines() if journal.exists() else []
        speeds = [json.loads(line)["tokens_per_s"] for line in lines]
    if len(found) != setting["steps"]:
        tail = "\n".join(done.stdout.splitlines()[-25:])
        raise RuntimeError(f"{who}, seed {setting['seed']}: {len(found)} of {setting['steps']} steps\n{tail}")
    return found, float(np.median(speeds[10:])) if speeds else float("nan")


def compare(peer: str, setting: dict[str, Any], seeds: int, folder: Path, limit_s: float) -> dict[str, Any]:
    import torch

    gpus: Queue[str | None] = Queue()
    for number in range(torch.cuda.device_count()) if peer in ON_GPU else ():
        gpus.put(str(number))
    if gpus.empty():
        gpus.put(None)
    setting["tokens"] = str(folder / "tokens.bin")
    write_tokens(Path(setting["tokens"]), setting)

    def one(who: str, seed: int) -> tuple[list[float], float]:
        gpu = gpus.get()
        try:
            return losses_of(who, {**setting, "seed": seed, "folder": str(folder / f"{who}-{seed}")}, gpu, limit_s)
        finally:
            gpus.put(gpu)
            print(f"{who}, seed {seed}: done", file=sys.stderr, flush=True)

    runs = [(who, seed) for seed in range(seeds) for who in ("atoll", peer)]
    pool = ThreadPoolExecutor(gpus.qsize())
    try:
        found = list(pool.map(lambda run: one(*run), runs))
    finally:
        pool.shutdown(cancel_futures=True)
    curves: dict[str, list[list[float]]] = {"atoll": [], peer: []}
    speeds: dict[str, list[float]] = {"atoll": [], peer: []}
    for (who, _), (losses, speed) in zip(runs, found, strict=True):
        curves[who].append(losses)
        speeds[who].append(speed)
    where = torch.cuda.get_device_name() if peer in ON_GPU else "CPU"
    return {
        "where": where,
        "torch": torch.__version__,
        "peer": peer,
        "setting": setting,
        "curves": curves,
        "speeds": speeds,
    }


def report(found: dict[str, Any]) -> bool:
    """Print the table; whether Atoll ends no higher than the peer, within the seeds' spread."""
    setting, peer = found["setting"], found["peer"]
    curves = {who: np.array(rows) for who, rows in found["curves"].items()}
    steps = setting["steps"]
    tokens = setting["batch"] * setting["seq_len"]
    print(f"{found['where']}, torch {found['torch']}, {setting['model']}")
    print(f"{steps} steps of {tokens:,} tokens, lr {setting['lr']:g}, warm-up {setting['warmup']}, linear to 0")
    at = [1, int(0.3 * steps) + 1, int(0.5 * steps) + 1, int(0.8 * steps) + 1, steps]
    last = steps // 10
    print(f"{'loss, mean of the seeds':28}" + "".join(f"{f'step {each}':>10}" for each in at) + f"  last {last}")
    for who, rows in curves.items():
        means = rows.mean(axis=0)
        shown = "".join(f"{means[each - 1]:10.3f}" for each in at)
        by_seed = ", ".join(f"{row[-last:].mean():.3f}" for row in rows)
        print(f"{who:28}{shown}  {means[-last:].mean():.3f} (by seed {by_seed})")
    ends = {who: rows[:, -last:].mean(axis=1) for who, rows in curves.items()}
    difference = ends["atoll"].mean() - ends[peer].mean()
    spread = max(np.ptp(each) for each in ends.values())
    ratio = ends["atoll"].mean() / ends[peer].mean()
    print(f"atoll ÷ {peer}: {ratio:.4f}; difference {difference:+.3f}, spread of the seeds {spread:.3f}")
    speeds = {who: float(np.mean(each)) for who, each in found.get("speeds", {}).items()}
    means = {who: np.convolve(rows.mean(axis=0), np.full(10, 0.1), "valid") for who, rows in curves.items()}
    reached = np.flatnonzero(means["atoll"] <= means[peer][-1])
    if len(reached) and all(speed > 0 for speed in speeds.values()) and speeds:
        ours, theirs = (int(reached[0]) + 10) * tokens / speeds["atoll"], steps * tokens / speeds[peer]
        print(f"to {peer}'s last loss: {ours:.1f} s of {theirs:.1f} s, {ours / theirs:.3f}×; tokens/s {speeds}")
    return bool(difference <= spread)


def draw(results: list[dict[str, Any]], path: str) -> None:
    from matplotlib.figure import Figure

    from atoll.train.metrics.plot import averaged

    figure = Figure(figsize=(5.2 * len(results), 4.0), dpi=140, layout="constrained", facecolor="white")
    for place, found in enumerate(results):
        axes = figure.add_subplot(1, len(results), place + 1)
        for (who, rows), color in zip(found["curves"].items(), ("#2563a8", "#d1495b"), strict=True):
            means = [averaged(np.arange(1.0, len(row) + 1), np.array(row), 40) for row in rows]
            steps, curves = means[0][0], np.array([losses for _, losses in means])
            axes.fill_between(steps, curves.min(axis=0), curves.max(axis=0), color=color, alpha=0.2, linewidth=0)
            label = "bf16" if who == "atoll" and found["peer"] == "float8" else who
            label += f", {len(rows)} seeds" if len(rows) > 1 else ""
            axes.plot(steps, curves.mean(axis=0), color=color, linewidth=1.4, label=label)
        title = found["where"] if found["peer"] == "float8" else f"beside {found['peer']}, {found['where']}"
        axes.set(xlabel="step", ylabel="loss (nats per token)", title=title)
        axes.grid(alpha=0.22, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.savefig(path)


def main() -> int:
    if ROLE in os.environ:
        be(*json.loads(os.environ.pop(ROLE)))
        return 0
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peer", choices=("transformers", *ON_GPU), default="transformers")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="120 on a CPU, 200 on a GPU")
    parser.add_argument("--batch", type=int, help="sequences a step; 16 on a CPU, 2 on a GPU")
    parser.add_argument("--seq-len", type=int, help="tokens of a sequence; 128 on a CPU, 8,192 on a GPU")
    parser.add_argument("--scheme", help="of Atoll's initial weights; the default is what is compared")
    parser.add_argument("--optimizer", default="adamw", help="Atoll's")
    parser.add_argument("--atoll-lr", type=float, help="Atoll's [optimizer] lr, where it is not to be the peer's")
    parser.add_argument("--tied", action="store_true", help="the head shares the embedding's weight")
    parser.add_argument("--out", help="write settings and curves here, as JSON")
    parser.add_argument("--draw", nargs="+", metavar="JSON", help="draw what --out wrote")
    parser.add_argument("--picture", default="learning.png")
    parser.add_argument("--limit-s", type=float, default=1800.0, help="of each run")
    args = parser.parse_args()
    if args.draw:
        draw([json.loads(Path(each).read_text()) for each in args.draw], args.picture)
        return 0
    setting: dict[str, Any] = dict(GPU if args.peer in ON_GPU else CPU)
    setting["model"] = {**setting["model"], "tied": args.tied, "init_scheme": args.scheme}
    for name in ("steps", "batch", "seq_len"):
        setting[name] = getattr(args, name) or setting[name]
    setting["optimizer"] = {"kind": args.optimizer, "lr": args.atoll_lr or setting["lr"]}
    with tempfile.TemporaryDirectory() as folder:
        found = compare(args.peer, setting, args.seeds, Path(folder), args.limit_s)
    if args.out:
        Path(args.out).write_text(json.dumps(found))
    return 0 if report(found) else 1


if __name__ == "__main__":
    sys.exit(main())
