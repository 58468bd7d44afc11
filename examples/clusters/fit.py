"""Stands for your training script: fits a line by gradient descent, saves as it goes, resumes where it was.

Standard library only, so that it runs on any node. It prints its steps as JSON, which `atoll dashboard` draws and a sweep's
table shows.
"""

import json
import os
import random
import time
import tomllib
from pathlib import Path

config = tomllib.loads(Path(os.environ.get("CONFIG_FILE", "small.toml")).read_text())
rate = float(os.environ.get("LR", "0.1"))
rank, nodes = int(os.environ["SKYPILOT_NODE_RANK"]), int(os.environ["SKYPILOT_NUM_NODES"])
gpus = [uuid[:8] for uuid in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if uuid]
print(
    f"{os.environ['SKYPILOT_NUM_GPUS_PER_NODE']} GPUs asked for, {' and '.join(gpus) or 'none'} to be seen", flush=True
)

# The same folder after every restart of the job: its task id stays. Nodes may share a home: each has a file of its own.
saved = Path.home() / "checkpoints" / os.environ["SKYPILOT_TASK_ID"] / f"node{rank}.json"
step, slope, offset = json.loads(saved.read_text()) if saved.exists() else (0, 0.0, 0.0)
if step:
    print(f"resumed at step {step}", flush=True)

while step < config["steps"]:
    step += 1
    batch = random.Random(f"{step} {rank}")  # of the step's number, so that a resumed run is the same run
    points = [(x, 3.0 * x - 1.0 + batch.gauss(0, 0.05)) for x in (batch.uniform(-1, 1) for _ in range(config["batch"]))]
    errors = [slope * x + offset - y for x, y in points]
    slope -= rate * sum(2 * error * x for error, (x, _) in zip(errors, points)) / len(points)
    offset -= rate * sum(2 * error for error in errors) / len(points)
    loss = sum(error * error for error in errors) / len(points)
    if step % config["save_every"] == 0:
        saved.parent.mkdir(parents=True, exist_ok=True)
        saved.with_suffix(".new").write_text(json.dumps([step, slope, offset]))
        saved.with_suffix(".new").rename(saved)
    if rank == 0 and step % config["log_every"] == 0:
        print(json.dumps({"step": step, "loss": round(loss, 4), "lr": rate}), flush=True)
    time.sleep(config["step_s"])
