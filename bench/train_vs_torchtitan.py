"""Atoll beside TorchTitan on this machine's GPUs, in turn, on the same text and tokenizer.

    python bench/train_vs_torchtitan.py                       # every case that has its GPUs here
    python bench/train_vs_torchtitan.py --only "1B bf16" --turns 2
    python bench/train_vs_torchtitan.py --checkpoints         # Atoll alone: saving every 50 steps against never

Both compile block by block, keep fp32 master weights, recompute nothing and, on several GPUs, shard with FSDP2. They
read Jane Austen's novels cut into documents of about 1,900 tokens, packed; documents are apart where the case says so.
TorchTitan 0.2.2 must be installed (`pip install torchtitan==0.2.2 torchao==0.17.0`); where it is not, Atoll runs alone.

Printed: tokens/s a GPU (median of the steps after the first ten), the ratio, GiB, the loss of the first and the last
step, and the seconds from the command to the end of the first step: from the second turn on with a warm compile cache.
The two start from other weights and warm up in two steps: their losses say that both learn, not which learns better.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from atoll.train.metrics.journal import read

SEQ_LEN, WARM_UP = 8192, 10
NOVELS = Path(__file__).parents[1] / "examples" / "austen" / "data"
PEER = "ATOLL_BENCH_TORCHTITAN"  # in the environment of a process that is to be TorchTitan

_UNTIED = ["--model.tied", "false"]
_TOGETHER = ["--data.isolate_documents", "false"]
_FLOAT8 = ["--precision.float8", "tensorwise"]
_FLOAT8_PEER = ["--quantize.linear.float8.filter_fqns", "output", "--model.converters", "quantize.linear.float8"]
_GATHERED = ["--parallelism.fsdp_reshard_after_forward", "never"]  # as Atoll does where it fits
_FLOAT8_GATHER = [
    *_GATHERED,
    "--quantize.linear.float8.enable_fsdp_float8_all_gather",
    "--quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp",
]


@dataclass(frozen=True)
class Case:
    """One row of the table: options of ``atoll train``, and the peer's model, flavor and options."""

    model: str
    ours: list[str]
    flavor: str
    theirs: list[str]
    gpus: int = 1
    batch: int = 2  # sequences a GPU
    seq_len: int = SEQ_LEN
    peer_model: str = "llama3"
    context: int = 1


CASES = {
    "1B bf16": Case("llama3_1b", [*_UNTIED, *_TOGETHER], "1B", []),
    "1B bf16, documents apart": Case("llama3_1b", _UNTIED, "1B_flex", []),
    "1B fp8": Case("llama3_1b", [*_UNTIED, *_TOGETHER, *_FLOAT8], "1B", _FLOAT8_PEER),
    "Qwen3-0.6B bf16": Case("qwen3_0.6b", _TOGETHER, "0.6B", [], batch=4, seq_len=4096, peer_model="qwen3"),
    "3B bf16": Case("llama3_3b", [*_UNTIED, *_TOGETHER], "3B", _GATHERED, gpus=2, batch=1),
    "8B bf16": Case("llama3_8b", _TOGETHER, "8B", _GATHERED, gpus=2, batch=1),
    "8B fp8": Case("llama3_8b", [*_TOGETHER, *_FLOAT8], "8B", [*_FLOAT8_PEER, *_FLOAT8_GATHER], gpus=2, batch=1),
    "8B bf16, context 2": Case("llama3_8b", _TOGETHER, "8B", [], gpus=2, batch=1, seq_len=32_768, context=2),
}


def be_torchtitan() -> None:
    """TorchTitan's own trainer, with Llama 3.2's two small models, untied, beside its own."""
    import torchtitan.models.llama3 as llama3
    from torchtitan.train import Trainer, main

    shared: dict[str, Any] = {"n_kv_heads": 8, "multiple_of": 1024, "rope_theta": 500_000}
    sizes: dict[str, dict[str, Any]] = {
        "1B": {"dim": 2048, "n_layers": 16, "n_heads": 32, "ffn_dim_multiplier": 1.5, **shared},
        "3B": {"dim": 3072, "n_layers": 28, "n_heads": 24, **shared},
    }
    for name, size in sizes.items():
        llama3.llama3_args[name] = llama3.TransformerModelArgs(**size)
        llama3.llama3_args[f"{name}_flex"] = llama3.TransformerModelArgs(
            **size, attn_type="flex", attn_mask_type="block_causal"
        )
    main(Trainer)


def prepare(folder: Path, num_tokens: int = 1900) -> tuple[Path, Path]:
    """A folder with data.json, documents of about that many tokens, and one with a tokenizer; both sides read them."""
    from atoll.train.data.tokenizer import train_bpe

    text = "\n\n".join(path.read_text() for path in sorted(NOVELS.glob("*.txt")))
    size = 4 * num_tokens  # characters; of this tokenizer about four make a token
    parts = [text[at : at + size] for _ in range(4) for at in range(0, len(text), size)]
    data, tokenizer = folder / "data", folder / "tokenizer"
    data.mkdir()
    (data / "data.json").write_text("".join(json.dumps({"text": part}) + "\n" for part in parts))
    train_bpe([text], 8192).save(tokenizer)
    return data, tokenizer


def watched(
    command: list[str], log: Path, env: dict[str, str], limit_s: float, started: Callable[[str], bool]
) -> tuple[str, float]:
    """What a command printed, and the seconds until ``started`` says of that that the first step is done."""
    begun, first = time.monotonic(), float("nan")
    with (
        log.open("w") as file,
        subprocess.Popen(
            [sys.executable, *command], stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **env}
        ) as process,
    ):
        while process.poll() is None:
            if started(log.read_text(errors="replace")) and first != first:
                first = time.monotonic() - begun
            if time.monotonic() - begun > limit_s:
                process.terminate()
                break
            time.sleep(0.05)
    return log.read_text(errors="replace"), first


def _reason(text: str) -> str:
    """The lines of a log that tell why it ended: what was said before torchrun's own report, without C++ frames."""
    said = text.partition('Traceback (most recent call last):\n  File "<frozen runpy>')[0] or text
    return "\n".join([line for line in said.splitlines() if "frame #" not in line][-15:])


def atoll(
    case: Case, more: list[str], steps: int, data: Path, tokenizer: Path, folder: Path, limit_s: float
) -> dict[str, Any]:
    out = folder / f"atoll-{time.monotonic_ns()}"
    options = {
        "data.path": data / "data.json",
        "data.format": "jsonl",
        "data.tokenizer": tokenizer,
        "data.cache": folder / "cache",
        "train.steps": steps,
        "train.seq_len": case.seq_len,
        "model.max_seq_len": case.seq_len,
        "train.output_dir": out,
        "train.global_batch": case.gpus * case.batch // case.context,
        "train.micro_batch": case.batch,
        "train.recompute": "none",
        "parallel.shard": case.gpus // case.context,
        "parallel.context": case.context,
        "schedule.warmup": 2,
        "checkpoint.at_end": "false",
        "metrics.plot": "false",
    }
    command = ["-m", "atoll", "train", case.model, "--nproc", str(case.gpus)]
    command += [word for key, value in options.items() for word in (f"--{key}", str(value))]
    journal = out / "metrics.jsonl"
    times: dict[int, float] = {}  # when so many steps stood in the journal

    def started(_: str) -> bool:
        done = journal.read_text().count('"loss"') if journal.exists() else 0
        times.setdefault(done, time.monotonic())
        return done > 0

    text, first_s = watched(
        [*command, *case.ours, *more],
        folder / f"{out.name}.log",
        {},
        limit_s,
        started,
    )
    rows = read(journal) if journal.exists() else []
    if len(rows) < WARM_UP + 2:
        return {"error": _reason(text)}
    return {
        "tokens_per_s": statistics.median(row["tokens_per_s_per_gpu"] for row in rows[WARM_UP:]),
        "gib": rows[-1]["memory_bytes"] / 2**30,
        "loss": [rows[0]["loss"], rows[-1]["loss"]],
        "first_s": first_s,
        "times": times,
    }


def titan(case: Case, steps: int, data: Path, tokenizer: Path, folder: Path, limit_s: float) -> dict[str, Any]:
    options = {
        "model.name": case.peer_model,
        "model.flavor": case.flavor,
        "model.hf_assets_path": tokenizer,
        "training.seq_len": case.seq_len,
        "training.local_batch_size": case.batch,
        "training.steps": steps,
        "training.dataset": "c4_test",
        "training.dataset_path": data,
        "parallelism.context_parallel_degree": case.context,
        "activation_checkpoint.mode": "none",
        "lr_scheduler.warmup_steps": 2,
        "metrics.log_freq": 1,
        "debug.seed": 42,
        "job.dump_folder": folder / "titan",
    }
    command = ["-m", "torch.distributed.run", f"--nproc_per_node={case.gpus}", "--rdzv_backend=c10d"]
    command += ["--rdzv_endpoint=localhost:0", "--local-ranks-filter", "0", "--role", "rank", "--tee", "3", __file__]
    command += [word for key, value in options.items() for word in (f"--{key}", str(value))]
    command += ["--compile.enable", "--metrics.no_enable_tensorboard", *case.theirs]
    env = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    log = folder / f"titan-{time.monotonic_ns()}.log"
    text, first_s = watched(command, log, {**env, PEER: "1"}, limit_s, lambda text: "loss:" in text)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    rows = re.findall(r"step:\s*(\d+)\s+loss:\s*([\d.]+).*?memory:\s*([\d.]+)GiB.*?tps:\s*([\d,]+)", plain)
    if len(rows) < WARM_UP + 2:
        return {"error": _reason(plain)}
    return {
        "tokens_per_s": statistics.median(float(row[3].replace(",", "")) for row in rows[WARM_UP:]),
        "gib": float(rows[-1][2]),
        "loss": [float(rows[0][1]), float(rows[-1][1])],
        "first_s": first_s,
    }


def compare(name: str, case: Case, args: argparse.Namespace, data: Path, tokenizer: Path, folder: Path) -> None:
    """Run one case on both sides, in turn, and print its rows."""
    speeds: dict[str, list[float]] = {"Atoll": [], "TorchTitan": []}
    for _ in range(args.turns):
        for who, seen in speeds.items():
            if who == "Atoll":
                found = atoll(case, [], args.steps, data, tokenizer, folder, args.limit_s)
            elif importlib.util.find_spec("torchtitan"):
                found = titan(case, args.steps, data, tokenizer, folder, args.limit_s)
            else:
                continue
            if "error" in found:
                print(f"{name:26} {who:10} failed:\n{found['error']}", flush=True)
                continue
            seen.append(found["tokens_per_s"])
            losses = f"{found['loss'][0]:.3f} → {found['loss'][1]:.3f}"
            shown = f"{seen[-1]:10,.0f} {found['gib']:7.1f} {found['first_s']:8.1f}  {losses}"
            print(f"{name:26} {who:10} {shown}", flush=True)
    if all(speeds.values()):
        ours, theirs = (statistics.median(seen) for seen in speeds.values())
        print(f"{name:26} {'ratio':10} {ours / theirs:10.3f}", flush=True)


def checkpoints(args: argparse.Namespace, data: Path, tokenizer: Path, folder: Path) -> None:
    """Print tokens/s of a run that saves asynchronously every 50 steps, before its first save and after it.

    What the first one costs, which also makes the memory that is copied to, is printed beside.
    """
    case = CASES["1B bf16, documents apart"]
    found = atoll(case, ["--checkpoint.every", "50", "--checkpoint.keep", "1"], 152, data, tokenizer, folder, 300)
    if "error" in found:
        print(f"checkpoints failed:\n{found['error']}", flush=True)
        return

    def took_s(first: int, last: int) -> float:
        at = [min(when for done, when in found["times"].items() if done >= step) for step in (first, last)]
        return float(at[1] - at[0])

    step_s, saving_s = took_s(WARM_UP, 50) / (50 - WARM_UP), took_s(51, 151) / 100
    tokens = case.batch * case.seq_len
    print(f"no checkpoints (steps {WARM_UP + 1} to 50)             {tokens / step_s:10,.0f} tokens/s")
    print(f"asynchronous, two of them (steps 52 to 151) {tokens / saving_s:10,.0f} tokens/s, {step_s / saving_s:.3f}")
    print(f"the first save takes {took_s(50, 51) - step_s:.2f} s", flush=True)


def main() -> int:
    if os.environ.pop(PEER, None):
        be_torchtitan()
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=CASES, nargs="+", default=list(CASES))
    parser.add_argument("--turns", type=int, default=1, help="runs of each side")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--limit-s", type=float, default=150.0, help="of each run")
    parser.add_argument("--checkpoints", action="store_true", help="only what asynchronous checkpoints cost")
    args = parser.parse_args()
    num_gpus = torch.cuda.device_count()
    if not num_gpus:
        sys.exit("this needs NVIDIA GPUs, and torch sees none")
    print(f"{num_gpus} × {torch.cuda.get_device_name()}, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        data, tokenizer = prepare(folder)
        if args.checkpoints:
            checkpoints(args, data, tokenizer, folder)
            return 0
        print(f"{'case':26} {'who':10} {'tok/s/GPU':>10} {'GiB':>7} {'first, s':>8}  loss")
        for name in args.only:
            if CASES[name].gpus > num_gpus:
                print(f"{name:26} needs {CASES[name].gpus} GPUs", flush=True)
            else:
                compare(name, CASES[name], args, data, tokenizer, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
