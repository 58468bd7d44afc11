"""Llama 3.1 8B on this machine's GPUs: Atoll beside TorchTitan, in turn, on the same text and tokenizer.

    python bench/train_8b.py                   # all GPUs, 20 steps of each
    python bench/train_8b.py --model llama3_1b --only bf16

Both shard with FSDP2, compile block by block, keep fp32 master weights, and read sequences of 8,192 tokens without
document borders. TorchTitan 0.2.2 must be installed (`pip install torchtitan==0.2.2 torchao==0.17.0`); it is left out
where it isn't, and the ratio with it. Printed: tokens/s a GPU (median of the steps after the first ten), GiB, the loss.
MFU divides by the card's dense bf16 peak, with causal attention counted half (51.5 GFLOP a token).
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
from pathlib import Path
from typing import Any

import torch

from atoll.train.metrics.flops import mfu, peak_flops
from atoll.train.metrics.journal import read
from atoll.train.models.registry import flops_per_token
from atoll.train.recipe.load import load_recipe

SEQ_LEN, WARM_UP = 8192, 10
NOVELS = Path(__file__).parents[1] / "examples" / "austen" / "data"

CASES: dict[str, dict[str, list[str]]] = {
    "bf16, recompute selective": {
        "atoll": ["--train.recompute", "selective"],
        "titan": ["--activation_checkpoint.mode", "selective", "--activation_checkpoint.selective_ac_option", "op"],
    },
    "bf16, recompute none": {"atoll": ["--train.recompute", "none"], "titan": ["--activation_checkpoint.mode", "none"]},
    "fp8 tensorwise, recompute selective": {
        "atoll": ["--train.recompute", "selective", "--precision.float8", "tensorwise"],
        "titan": [
            *("--activation_checkpoint.mode", "selective", "--activation_checkpoint.selective_ac_option", "op"),
            "--quantize.linear.float8.enable_fsdp_float8_all_gather",
            "--quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp",
            *("--quantize.linear.float8.filter_fqns", "output", "--model.converters", "quantize.linear.float8"),
        ],
    },
}


def prepare(folder: Path) -> tuple[Path, Path]:
    """A folder with data.json, and one with a tokenizer, which both sides read."""
    from atoll.train.data.tokenizer import load_tokenizer

    texts = [path.read_text() for path in sorted(NOVELS.glob("*.txt"))]
    paragraphs = [part for _ in range(4) for text in texts for part in text.split("\n\n\n") if part.strip()]
    data, tokenizer = folder / "data", folder / "tokenizer"
    data.mkdir()
    (data / "data.json").write_text("".join(json.dumps({"text": part}) + "\n" for part in paragraphs))
    load_tokenizer("bpe:8192", texts=lambda: iter(texts)).save(tokenizer)
    return data, tokenizer


def torchrun(arguments: list[str], num_gpus: int, log: Path, env: dict[str, str], limit_s: float) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={num_gpus}", "--rdzv_backend=c10d"]
    command += ["--rdzv_endpoint=localhost:0", *arguments]
    with log.open("w") as file:
        try:
            subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **env}, timeout=limit_s)
        except subprocess.TimeoutExpired:
            file.write(f"\nstopped after {limit_s:.0f} s\n")
    return log.read_text(errors="replace")


def _reason(text: str) -> str:
    """The lines of a log that tell why it ended: what was said before torchrun's own report."""
    said = text.partition('Traceback (most recent call last):\n  File "<frozen runpy>')[0] or text
    return "\n".join(said.splitlines()[-15:])


def atoll(
    args: argparse.Namespace, case: list[str], data: Path, tokenizer: Path, folder: Path, num_gpus: int
) -> dict[str, Any]:
    out = folder / f"atoll-{len(list(folder.iterdir()))}"
    arguments = ["-m", "atoll.train", args.model, "--data.path", str(data / "data.json"), "--data.format", "jsonl"]
    arguments += ["--data.tokenizer", str(tokenizer)]
    arguments += ["--train.steps", str(args.steps), "--train.seq_len", str(SEQ_LEN), "--train.output_dir", str(out)]
    arguments += ["--train.global_batch", str(num_gpus * args.batch), "--train.micro_batch", str(args.batch)]
    arguments += [
        "--parallel.shard",
        str(num_gpus),
        "--schedule.warmup",
        "2",
        "--checkpoint.at_end",
        "false",
        "--metrics.plot",
        "false",
        *case,
    ]
    text = torchrun(arguments, num_gpus, folder / f"{out.name}.log", {}, args.limit_s)
    rows = read(out / "metrics.jsonl")
    if len(rows) < WARM_UP + 2:
        return {"error": _reason(text)}
    return {
        "tokens_per_s": statistics.median(row["tokens_per_s_per_gpu"] for row in rows[WARM_UP:]),
        "gib": rows[-1]["memory_bytes"] / 2**30,
        "loss": [rows[0]["loss"], rows[-1]["loss"]],
    }


def titan(
    args: argparse.Namespace, case: list[str], data: Path, tokenizer: Path, folder: Path, num_gpus: int
) -> dict[str, Any]:
    arguments = ["--local-ranks-filter", "0", "--role", "rank", "--tee", "3", "-m", "torchtitan.train"]
    arguments += ["--model.name", "llama3", "--model.flavor", "8B", "--training.seq_len", str(SEQ_LEN)]
    arguments += ["--training.local_batch_size", str(args.batch), "--training.steps", str(args.steps)]
    arguments += [
        "--compile.enable",
        "--metrics.log_freq",
        "1",
        "--metrics.no_enable_tensorboard",
        "--debug.seed",
        "42",
    ]
    arguments += ["--training.dataset", "c4_test", "--training.dataset_path", str(data)]
    arguments += ["--model.hf_assets_path", str(tokenizer), "--job.dump_folder", str(folder / "titan"), *case]
    env = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    text = torchrun(arguments, num_gpus, folder / f"titan-{len(list(folder.iterdir()))}.log", env, args.limit_s)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    steps = re.findall(r"step:\s*(\d+)\s+loss:\s*([\d.]+).*?memory:\s*([\d.]+)GiB.*?tps:\s*([\d,]+)", plain)
    if len(steps) < WARM_UP + 2:
        return {"error": _reason(plain)}
    return {
        "tokens_per_s": statistics.median(float(step[3].replace(",", "")) for step in steps[WARM_UP:]),
        "gib": float(steps[-1][2]),
        "loss": [float(steps[0][1]), float(steps[-1][1])],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="llama3_8b", help="a shipped recipe; TorchTitan runs 8B only")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=1, help="sequences a GPU")
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--limit-s", type=float, default=150.0, help="of each run")
    parser.add_argument("--no-titan", action="store_true")
    args = parser.parse_args()
    num_gpus = torch.cuda.device_count()
    if not num_gpus:
        sys.exit("this needs NVIDIA GPUs, and torch sees none")
    name = torch.cuda.get_device_name()
    section = load_recipe(args.model).recipe.model
    flops, peak = flops_per_token(section, SEQ_LEN), peak_flops(name, torch.bfloat16)
    peers = {"atoll": atoll}
    if importlib.util.find_spec("torchtitan") and args.model == "llama3_8b" and not args.no_titan:
        peers["titan"] = titan
    print(f"{args.model}, {num_gpus} × {name}, torch {torch.__version__}, sequences of {SEQ_LEN}, {args.batch} a GPU")
    print(f"{'case':38} {'who':6} {'tok/s/GPU':>10} {'MFU':>7} {'GiB':>6}  loss")
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        data, tokenizer = prepare(folder)
        for case, options in CASES.items():
            if args.only not in case:
                continue
            speeds = {}
            for who, run in peers.items():
                borders = ["--data.isolate_documents", "false"] if who == "atoll" else []
                found = run(args, [*borders, *options[who]], data, tokenizer, folder, num_gpus)
                if "error" in found:
                    print(f"{case:38} {who:6} failed:\n{found['error']}", flush=True)
                    continue
                speeds[who] = found["tokens_per_s"]
                share = mfu(found["tokens_per_s"], flops, peak) if "fp8" not in case else None
                shown = f"{share:7.1%}" if share else f"{'–':>7}"
                losses = f"{found['loss'][0]:.3f} → {found['loss'][1]:.3f}"
                print(f"{case:38} {who:6} {speeds[who]:10,.0f} {shown} {found['gib']:6.1f}  {losses}", flush=True)
            if len(speeds) == 2:
                print(f"{'':38} {'ratio':6} {speeds['atoll'] / speeds['titan']:10.3f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
