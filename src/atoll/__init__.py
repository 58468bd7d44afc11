"""Atoll trains one model on any hardware you can reach. ``import atoll as sky``.

Names resolve lazily, so that ``import atoll`` stays fast and pulls in no framework.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # `typing` takes longer to import than all else up to the command's first line
if TYPE_CHECKING:
    from typing import Any

__version__ = "0.1.0"

# Public name -> module that holds it. One table, so that `__all__`, `dir()` and lookups can't drift apart.
_WHERE = {
    "AtollError": "atoll.core.errors",
    "CallTimeout": "atoll.core.errors",
    "ConfigError": "atoll.core.errors",
    "CheckpointError": "atoll.core.errors",
    "HangError": "atoll.core.errors",
    "NonFiniteError": "atoll.core.errors",
    "ImageError": "atoll.core.errors",
    "NeverDispatched": "atoll.core.errors",
    "NodeLost": "atoll.core.errors",
    "PoolClosed": "atoll.core.errors",
    "ProvisionError": "atoll.core.errors",
    "RemoteError": "atoll.core.errors",
    "RemoteTraceback": "atoll.core.errors",
    "SerializationError": "atoll.core.errors",
    "UsageError": "atoll.core.errors",
    "WorkerDied": "atoll.core.errors",
    "Accelerator": "atoll.providers.accelerators",
    "NVIDIA": "atoll.providers.accelerators",
    "AMD": "atoll.providers.accelerators",
    "Habana": "atoll.providers.accelerators",
    "TPU": "atoll.providers.accelerators",
    "Local": "atoll.providers.local",
    "SSH": "atoll.providers.ssh.provider",
    "Slurm": "atoll.providers.slurm.provider",
    "SkyPilot": "atoll.providers.skypilot.machines",
    **dict.fromkeys(
        ("AWS", "GCP", "Azure", "Kubernetes", "Nebius", "Lambda", "RunPod"), "atoll.providers.skypilot.provider"
    ),
    "Image": "atoll.images.image",
    "ComputePool": "atoll.functions.compute_pool",
    "CallFuture": "atoll.gang.futures",
    "RankResults": "atoll.gang.futures",
    "Stream": "atoll.gang.futures",
    "LogLine": "atoll.gang.log_router",
    "compute": "atoll.functions.compute",
    "gather": "atoll.functions.compute",
    "ComputeFunction": "atoll.functions.compute",
    "Pending": "atoll.functions.compute",
    "Group": "atoll.functions.compute",
    "result": "atoll.functions.named.detached",
    "named_pools": "atoll.functions.named.registry",
    "report": "atoll.functions.report",
    "latest_checkpoint": "atoll.functions.report",
    "DistributedSampler": "atoll.functions.sampler",
    "shard": "atoll.functions.data",
    "Task": "atoll.tasks.task",
    "Resources": "atoll.tasks.resources",
    "Dag": "atoll.tasks.dag",
    "Job": "atoll.tasks.jobs",
    **dict.fromkeys(
        ("launch", "exec", "get", "stream_and_get", "LaunchedJob", "RequestId", "ClusterHandle", "Record"),
        "atoll.tasks.sdk",
    ),
    **dict.fromkeys(
        ("status", "queue", "job_status", "tail_logs", "download_logs", "StatusRefreshMode"), "atoll.tasks.sdk"
    ),
    **dict.fromkeys(("list_accelerators", "cost_report"), "atoll.tasks.sdk"),
    **dict.fromkeys(("cancel", "stop", "start", "down", "autostop"), "atoll.tasks.sdk"),
    "UnknownCluster": "atoll.tasks.clusters",
    "ClusterNotUp": "atoll.tasks.clusters",
    "JobStatus": "atoll.tasks.spec",
    "ClusterStatus": "atoll.tasks.spec",
    "InstanceInfo": "atoll.functions.info",
    "instance_info": "atoll.functions.info",
    "strategy": "atoll.functions.integrations._tensorflow",
    "joblib_backend": "atoll.functions.joblib_backend",
}

__all__ = ["__version__", *sorted({*_WHERE, "integrations", "events", "exceptions", "jobs"})]


# Submodules that are part of the surface.
_MODULES = {
    "integrations": "atoll.functions.integrations",
    "events": "atoll.core.events",
    "exceptions": "atoll.tasks.exceptions",
    "jobs": "atoll.tasks.managed_sdk",
}

# What scripts of SkyPilot's SDK call beside that, and what does it here.
_ELSEWHERE = {
    "optimize": "sky.launch(task, dryrun=True) decides where it runs; `atoll launch --dryrun task.yaml` says the price",
    "Storage": "file_mounts={'/data': 's3://bucket/path'} of a task copies what a URL names",
    "endpoints": "`atoll ssh NAME -L PORT` reaches a port of a cluster's head, whose address is handle.head_ip",
    "serve": "sky.launch(task) runs a server as a job, `atoll ssh NAME -L PORT` reaches it",
    "client": "calls have done their work when they return; asyncio.to_thread(sky.launch, task) waits for one aside",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    module = _WHERE.get(name)
    if module is None:
        step = f": {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""  # else Python itself names the nearest one
        raise AttributeError(f"module 'atoll' has no attribute {name!r}{step}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
