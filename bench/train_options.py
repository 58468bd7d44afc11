"""What an option of the trainer costs on a GPU: tokens/s of each of its values, in turn, beside the first one's.

    python bench/train_options.py documents                # attention kernels with documents apart, and no borders
    python bench/train_options.py documents --tokens 500   # documents of about 500 tokens
    python bench/train_options.py moments                  # AdamW's moments in fp32, in bf16 fused, in bf16 unfused
    python bench/train_options.py optimizers               # AdamW and Muon
    python bench/train_options.py moments -- --train.recompute none     # more options of `atoll train`

The text is Jane Austen's novels, cut into documents of about as many tokens as asked (1,900: a chapter). Printed for
each value: tokens/s a GPU (median of the steps after the first ten), GiB, the first and the last loss, and the ratio.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from train_vs_torchtitan import SEQ_LEN, Case, atoll, prepare

OPTIONS = {
    "documents": {
        "no borders": ["--data.isolate_documents", "false"],
        "apart, flex": ["--compile.attention", "flex"],
        "apart, dense mask": ["--compile.attention", "sdpa"],
    },
    "moments": {
        "fp32": [],
        "bf16, fused": ["--optimizer.moments", "bf16"],
        "bf16, unfused": ["--optimizer.moments", "bf16", "--optimizer.fused", "false"],
    },
    "optimizers": {"adamw": [], "muon": ["--optimizer.kind", "muon"]},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("option", choices=OPTIONS)
    parser.add_argument("--model", default="llama3_1b")
    parser.add_argument("--tokens", type=int, default=1900, help="of a document, about")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=2, help="sequences a GPU")
    parser.add_argument("--limit-s", type=float, default=150.0, help="of each run")
    own, _, more = " ".join(sys.argv[1:]).partition(" -- ")
    args = parser.parse_args(own.split())
    num_gpus = torch.cuda.device_count()
    if not num_gpus:
        sys.exit("this needs NVIDIA GPUs, and torch sees none")
    card = torch.cuda.get_device_name()
    print(f"{args.model}, {num_gpus} × {card}, torch {torch.__version__}, sequences of {SEQ_LEN}, {args.batch} a GPU,")
    print(f"documents of about {args.tokens} tokens {more}")
    first = float("nan")
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        data, tokenizer = prepare(folder, args.tokens)
        for number, (value, options) in enumerate(OPTIONS[args.option].items()):
            case = Case(args.model, ["--model.tied", "false", *options], "", [], gpus=num_gpus, batch=args.batch)
            found = atoll(case, more.split(), args.steps, data, tokenizer, folder, args.limit_s)
            if "error" in found:
                print(f"{value:20} failed:\n{found['error']}", flush=True)
                continue
            speed = found["tokens_per_s"]
            first = speed if number == 0 else first
            losses = f"{found['loss'][0]:.3f} → {found['loss'][1]:.3f}"
            row = f"{value:20} {speed:10,.0f} tok/s/GPU {found['gib']:6.1f} GiB  {speed / first:5.3f}×  {losses}"
            print(row, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
