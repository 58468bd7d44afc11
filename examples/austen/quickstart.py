"""Train a small language model on the six novels of Jane Austen, on two nodes of this machine.

    python examples/austen/quickstart.py            # two nodes, about a minute and a half on two CPU cores
    python examples/austen/quickstart.py --nodes 4 --steps 2000

The function `train` runs once on every rank. Only `provider=` of the pool would change on other hardware.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from display import Display, save_curve
from novels import Vocabulary, join_lines, read_novels, split

import atoll as sky


SEQ_LEN, BATCH = 64, 16  # one optimizer step sees 16 windows of 64 tokens, over all ranks


@sky.compute
def train(tokens: Any, held_out: Any, vocab_size: int, options: dict[str, Any]) -> dict[str, Any]:
    """Train on this rank's share of ``tokens``; all ranks end with the same parameters."""
    import hashlib
    import resource
    import tempfile
    import time

    import torch
    import torch.distributed as dist
    from model import GPT, Windows, learning_rate, next_token_loss
    from torch.nn.parallel import DistributedDataParallel as DDP
    from torch.utils.data import DataLoader, Subset

    info = sky.instance_info()
    steps = options["steps"]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(options["seed"])

    gpt = GPT(vocab_size, SEQ_LEN).to(device)
    model = DDP(gpt) if dist.is_initialized() else gpt
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    windows = Windows(tokens, SEQ_LEN)
    sampler = sky.DistributedSampler(windows, shuffle=True, seed=options["seed"], drop_last=True)
    loader = DataLoader(windows, batch_size=BATCH // info.world_size, sampler=sampler, drop_last=True)
    unseen = Windows(held_out, SEQ_LEN)
    unseen = sky.shard(Subset(unseen, range(0, len(unseen), 6)))  # this rank's share of every sixth held-out window

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        epoch = 0
        while True:
            sampler.set_epoch(epoch)
            yield from loader
            epoch += 1

    @torch.no_grad()
    def held_out_loss() -> float:
        """Over the held-out text of all ranks: the sum of the losses divided by the number of tokens."""
        total = torch.zeros(2, device=device)
        for inputs, targets in DataLoader(unseen, batch_size=64):
            inputs, targets = inputs.to(device), targets.to(device)
            total += torch.stack(
                [next_token_loss(gpt(inputs), targets) * targets.numel(), total.new_tensor(targets.numel())]
            )
        if dist.is_initialized():
            dist.all_reduce(total)
        return float(total[0] / total[1])

    started = time.perf_counter()
    for step, (inputs, targets) in zip(range(1, steps + 1), batches(), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, options["peak_lr"])
        loss = next_token_loss(model(inputs.to(device)), targets.to(device))
        optimizer.zero_grad()
        loss.backward()  # DDP averages the gradients over the ranks meanwhile
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        metrics = {
            "step": step,
            "loss": loss.item(),
            "tokens_per_s": targets.numel() / (time.perf_counter() - started),
            "memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        if step % max(1, steps // 10) == 0 or step == steps:
            metrics["held_out"] = held_out_loss()
        sky.report(metrics)
        started = time.perf_counter()

    if info.is_head:
        with tempfile.TemporaryDirectory() as folder:
            torch.save(gpt.state_dict(), f"{folder}/model.pt")
            sky.report({"step": steps}, checkpoint=f"{folder}/model.pt")  # kept by the pool, also if this rank dies now
    parameters = b"".join(parameter.detach().cpu().numpy().tobytes() for parameter in gpt.parameters())
    return {"rank": info.rank, "node": info.node, "parameters": hashlib.sha256(parameters).hexdigest()}


def main() -> int:
    """Prepare the text, train on the pool, show what came out."""
    args = parse_arguments()
    if missing := [name for name in ("torch", "matplotlib") if importlib.util.find_spec(name) is None]:
        sys.exit(f'This example needs {" and ".join(missing)}. Install with: pip install "atoll[train]"')
    import torch
    from model import GPT

    novels = read_novels()
    parts = [split(join_lines(text)) for text in novels.values()]
    vocabulary = Vocabulary("".join(first + rest for first, rest in parts))
    tokens, held_out = (
        torch.tensor([token for part in parts for token in vocabulary.encode(part[which])]) for which in (0, 1)
    )
    print(
        f"{len(novels)} novels: {sum(map(len, novels.values())):,} characters, {len(tokens) + len(held_out):,} tokens"
    )

    options = {"steps": args.steps, "peak_lr": 4e-3, "seed": args.seed}
    args.out.mkdir(parents=True, exist_ok=True)
    display = Display(args.steps)
    with (
        display,
        sky.ComputePool(nodes=args.nodes, env={"OMP_NUM_THREADS": "1"}, logs="quiet", on_event=display) as pool,
    ):
        results = train(tokens, held_out, len(vocabulary), options) @ pool
        shutil.copy(results.checkpoint, args.out / "model.pt")

    curve = display.curve
    save_curve(curve, args.out / "loss.png", f"Six novels on {args.nodes} nodes")
    model = GPT(len(vocabulary), SEQ_LEN)
    model.load_state_dict(torch.load(args.out / "model.pt", map_location="cpu"))
    prompt = vocabulary.encode(args.prompt)
    written = vocabulary.decode(model.generate(prompt, num_tokens=160, seed=args.seed))

    first, last, unseen = curve.train[1], curve.smoothed(20)[-1][1], curve.held_out[args.steps]
    print(f"\nloss {first:.3f} -> {last:.3f}, on text it never saw {unseen:.3f}")
    equal = len({result["parameters"] for result in results}) == 1
    print(f"{len(results)} ranks hold {'equal' if equal else 'DIFFERENT'} parameters")
    print(f"curve: {args.out / 'loss.png'}   checkpoint: {args.out / 'model.pt'}\n\nThe model goes on from a prompt:\n")
    for paragraph in filter(str.strip, written.split("\n\n")):
        print(textwrap.fill(paragraph, 88, initial_indent="    ", subsequent_indent="    ") + "\n")
    print(f"Next: python {sys.argv[0]} --steps 2000, or --nodes 4; then read {Path(__file__).with_name('README.md')}")
    return 0 if equal else 1


def parse_arguments() -> argparse.Namespace:
    """The options of the command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=2, help="nodes to start on this machine")
    parser.add_argument(
        "--steps", type=int, default=700, help=f"optimizer steps of {BATCH * SEQ_LEN:,} tokens over all ranks"
    )
    parser.add_argument("--seed", type=int, default=0, help="decides initial weights, data order and the sample")
    parser.add_argument("--prompt", default="Elizabeth was", help="what the sample begins with")
    parser.add_argument("--out", type=Path, default=Path("outputs/austen"), help="folder for the curve and the model")
    args = parser.parse_args()
    if args.nodes < 1 or args.steps < 1:
        parser.error("--nodes and --steps must be at least 1")
    if BATCH % args.nodes:
        parser.error(f"--nodes {args.nodes} does not divide the batch of {BATCH} windows evenly; use 1, 2, 4, 8 or 16")
    return args


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("stopped")
