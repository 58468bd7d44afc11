"""From the command to the next step: a fresh start, and a resume from a checkpoint, as processes of their own.

    OMP_NUM_THREADS=1 python bench/train_resume.py

Each is `python -m atoll.train` on one rank, the data prepared before. Printed is the time from the start of the process
to its first line in metrics.jsonl, which includes importing torch (measured alone too).
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def seconds_to_next_step(folder: Path, steps: int) -> float:
    """Start a run that does ``steps`` in all, and wait for its first new line."""
    journal = folder / "metrics.jsonl"
    before = len(journal.read_text().splitlines()) if journal.exists() else 0
    command = [sys.executable, "-m", "atoll.train", "llama3_debug", "--train.output_dir", str(folder)]
    command += ["--train.steps", str(steps), "--schedule.warmup", "0", "--allow-changes", "--metrics.plot", "false"]
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while not journal.exists() or len(journal.read_text().splitlines()) <= before:
        if process.poll() is not None and process.returncode:
            assert process.stderr is not None
            sys.exit(process.stderr.read())
        time.sleep(0.005)
    took = time.perf_counter() - started
    process.communicate()
    return took


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    fresh, resumed, imports = [], [], []
    with tempfile.TemporaryDirectory() as text:
        seconds_to_next_step(Path(text) / "warm-up", 1)
        for turn in range(args.turns):
            folder = Path(text) / str(turn)
            fresh.append(seconds_to_next_step(folder, 2))
            resumed.append(seconds_to_next_step(folder, 4))
            started = time.perf_counter()
            subprocess.run([sys.executable, "-c", "import torch"], check=True)
            imports.append(time.perf_counter() - started)
    for label, times in (("import torch", imports), ("fresh start", fresh), ("resume", resumed)):
        print(f"{label:14} {statistics.median(times):6.2f} s (from {min(times):.2f} to {max(times):.2f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
