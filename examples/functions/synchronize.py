"""Best practice 3, synchronize before aggregation: the head reads what every rank has written before the barrier."""

import json
import tempfile
import time
from pathlib import Path

from where import accelerator, provider

import atoll as sky

shared = tempfile.TemporaryDirectory()  # on several machines: a folder that all of them see
folder = Path(shared.name)
totals = []


def aggregate_metrics():
    """Add up the files that are there."""
    totals.append(sum(json.loads(path.read_text())["samples"] for path in folder.glob("rank*.json")))


@sky.compute
def work():
    rank = sky.instance_info().rank
    time.sleep(rank * 0.5)  # ranks are never equally fast
    (folder / f"rank{rank}.json").write_text(json.dumps({"samples": 100 + rank}))
    # >>> the guide
    import torch.distributed as dist

    # Ensure all workers are done
    dist.barrier()

    # Aggregate results
    info = sky.instance_info()
    if info.is_head:
        aggregate_metrics()
    # <<<
    return totals


with sky.ComputePool(provider=provider, nodes=2, accelerator=accelerator) as pool:
    results = work() @ pool

shared.cleanup()
print(f"totals on each rank: {results}; 100 + 101 samples were written, the last of them half a second late")
