"""Environment variables: what every rank of a broadcast finds set, beside what `sky.instance_info()` says.

The guide has two tables here, the second for JAX, and no code, so all of this script is ours.
"""

import atoll as sky
from where import accelerator, provider

NAMES = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK",
         "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAX_LOCAL_DEVICE_COUNT")


@sky.compute
def variables() -> dict:
    import os

    return {name: os.environ[name] for name in NAMES}


with sky.ComputePool(provider=provider, nodes=2, accelerator=accelerator) as pool:
    results = variables() @ pool
    one = variables() >> pool

for name in NAMES:
    print(f"{name:23}", *(f"{result[name]:>15}" for result in results), f"   on one rank, with >>: {one[name]}")
