"""What a gang is started from, and what its agents are told to start."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.core.errors import ConfigError
from atoll.providers.base import NodePlan, Plan, Provider
from atoll.providers.gpus import VISIBLE, lease_wish, visible_gpus

_INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"
SOURCE_ROOT = str(Path(__file__).resolve().parents[2])
"""The folder that Atoll is imported from."""

_BOOT = "import sys; sys.path.insert(0, {root!r}); from {module} import main; main()"
_REMOTE_BOOT = "import sys; sys.path[:0] = {path!r}; from atoll.worker.call_loop import main; main()"
_STARTING_S = 60.0  # a folder younger than this may be one whose agent has yet to lock it


@dataclass(frozen=True, slots=True)
class GangSpec:
    """Everything a gang is started from."""

    provider: Provider
    plan: Plan
    pool_id: str
    python: str
    env: Mapping[str, str]
    path: tuple[str, ...]
    cwd: str
    log_dir: str
    job_dir: str
    tmp_root: str
    hang_timeout_s: float | None = None
    ttl_s: float | None = None
    start_timeout_s: float = 60.0
    name: str | None = None

    def tmp_dir(self, plan: NodePlan) -> str:
        """The folder of a node's temporary files; it goes with the node."""
        root = plan.tmp if plan.is_elsewhere else self.tmp_root
        return os.path.join(root, f"atoll-{self.pool_id}-n{plan.node}")

    def node_tag(self, plan: NodePlan) -> str:
        """What every process of a node has in its environment."""
        return f"ATOLL_POOL_TAG={self.pool_id}.{plan.node}"


def sweep_stale(tmp_root: str) -> None:
    """Remove folders of nodes whose agents were killed together with their drivers: nobody was left to do it.

    An agent holds a lock on its folder as long as it lives.
    """
    for path in glob.glob(os.path.join(glob.escape(tmp_root), "atoll-????????-n*")):
        with contextlib.suppress(OSError):
            if time.time() - os.stat(path).st_mtime < _STARTING_S or os.stat(path).st_uid != os.getuid():
                continue
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(fd)


def node_setup(spec: GangSpec, plan: NodePlan) -> dict[str, Any]:
    """What an agent is told first: the body of its SETUP frame."""
    lease = _lease(spec, plan, _node_env(spec, plan).get(VISIBLE)) if plan.gpus else None
    tmp_dir = spec.tmp_dir(plan)
    return {"node": plan.node, "tag": spec.pool_id, "tmp_dir": tmp_dir, "ttl_s": spec.ttl_s, "lease": lease}


def rank_start(spec: GangSpec, rank: int, node_of: Sequence[int]) -> dict[str, Any]:
    """What an agent starts a rank from: the body of its START frame."""
    plan = spec.plan.nodes[node_of[rank]]
    if plan.is_elsewhere:
        python, cwd, boot = plan.python, plan.home, _REMOTE_BOOT.format(path=plan.import_path)
    else:
        python, cwd = spec.python, spec.cwd
        boot = _BOOT.format(root=SOURCE_ROOT, module="atoll.worker.call_loop")
    local, size = node_of[:rank].count(plan.node), node_of.count(plan.node)
    env = {**_node_env(spec, plan), **_rank_env(spec, plan, rank, local, size)}
    return {"argv": [python, "-c", boot], "env": env, "cwd": cwd, "channel": True}


def _node_env(spec: GangSpec, plan: NodePlan) -> dict[str, str]:
    return {**(plan.base_env if plan.is_elsewhere else {}), **spec.env, **plan.env}


def _lease(spec: GangSpec, plan: NodePlan, visible: str | None) -> dict[str, Any]:
    """What an agent leases before it starts ranks: some of the plan's GPUs that ``CUDA_VISIBLE_DEVICES`` leaves."""
    gpus = plan.gpus if visible is None else tuple(gpu for gpu in plan.gpus if gpu in visible_gpus(plan.gpus, visible))
    if len(gpus) < plan.num_accelerators:
        raise ConfigError(
            f"{VISIBLE}={visible!r} leaves {len(gpus)} of its GPUs, and {plan.num_accelerators} are requested"
        )
    return lease_wish(gpus, plan.num_accelerators, f"pool {spec.name or spec.pool_id}")


def _rank_env(spec: GangSpec, plan: NodePlan, rank: int, local_rank: int, local_world_size: int) -> dict[str, str]:
    setup: dict[str, Any] = {
        "rank": rank,
        "local_rank": local_rank,
        "node": plan.node,
        "addr": plan.addr,
        "head_addr": spec.plan.nodes[0].addr,
        "world_size": spec.plan.world_size,
        "local_world_size": local_world_size,
        "total_nodes": len(spec.plan.nodes),
        "peers": [node.addr for node in spec.plan.nodes],
        "accelerator": plan.accelerator,
        "accelerators": plan.num_accelerators,
        "simulated": spec.plan.simulated,
        "pool_id": spec.pool_id,
        "path": list(spec.path),
        "job_dir": os.path.join(plan.folder, "jobs") if plan.is_elsewhere else spec.job_dir,
    }
    tmp = spec.env.get("TMPDIR")
    own = not plan.is_elsewhere and tmp == os.environ.get("TMPDIR")  # not what the user gave the pool
    kept = {}
    if tmp is None or own:
        tmp = spec.tmp_dir(plan)  # removed at the end
        if _INDUCTOR not in _node_env(spec, plan):  # or torch would keep what it compiles there
            kept[_INDUCTOR] = os.path.join(os.path.dirname(setup["job_dir"]), "compile")
    return {"ATOLL_SETUP": json.dumps(setup), "TMPDIR": tmp, "ATOLL_POOL_ID": spec.pool_id, **kept}
