"""What is looked at on every host before ranks start there, so that a failure is one line with its fix.

``probe`` runs on the host and tells what it is like; ``listen`` and ``reach`` try the port that ranks will meet at;
``judge`` compares what the hosts said, without I/O. Standard library only. As a program
(``python -m atoll.pool.preflight OP``) it reads a JSON argument and answers with a JSON line.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_SHM_BYTES = 256 << 20  # NCCL and data loaders ask for tens of megabytes a rank
_DISK_BYTES = 1 << 30
_CLOCK_S = 30.0
_BUSY_MB = 1024
_GPU_FIELDS = ("index", "name", "driver_version", "memory.used", "memory.total")
# The oldest driver a CUDA release runs on (NVIDIA's compatibility table, minor-version compatibility counted in).
_DRIVERS = {11: 450.80, 12: 525.60, 13: 580.0}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line for the user. ``fatal`` ones refuse the start."""

    host: str
    text: str
    fatal: bool

    def __str__(self) -> str:
        return f"{self.host}: {self.text}"


# ------------------------------------------------------------------------------------------------- on the host


def probe(python: str | None = None, folder: str | None = None, peer: str | None = None) -> dict[str, Any]:
    """What this host is like.

    Args:
        python: the ranks' interpreter; its torch is looked at without importing it.
        folder: where the ranks work; its disk is measured.
        peer: another host's address: tells which of ours it is reached from.
    """
    return {
        "time_s": time.time(),
        "hostname": socket.gethostname(),
        "shm_bytes": _free_bytes("/dev/shm"),
        "disk_bytes": _free_bytes(folder or os.path.expanduser("~")),
        "cpus": len(os.sched_getaffinity(0)),
        "gpus": _gpus(),
        "torch": _torch_of(python) if python else None,
        "route": _route_to(peer) if peer else None,
    }


def _free_bytes(path: str) -> int | None:
    while path not in ("", "/") and not os.path.exists(path):
        path = os.path.dirname(path)
    try:
        return shutil.disk_usage(path or "/").free
    except OSError:
        return None


def _gpus() -> list[dict[str, Any]]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [
        dict(zip(_GPU_FIELDS, (part.strip() for part in line.split(",")), strict=False))
        for line in answer.stdout.splitlines()
        if line.count(",") == len(_GPU_FIELDS) - 1
    ]
    return [
        {
            "index": row["index"],
            "name": row["name"],
            "driver": row["driver_version"],
            "used_mb": _number(row["memory.used"]),
        }
        for row in rows
    ]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _torch_of(python: str) -> str | None:
    """The version of an interpreter's torch, such as ``2.13.0+cu130``, from its metadata."""
    code = "from importlib.metadata import version; print(version('torch'))"
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        answer = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=20, check=False)
        return answer.stdout.strip() or None
    return None


def _route_to(peer: str) -> dict[str, str] | None:
    """Our address towards a peer, and the interface it belongs to."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.connect((peer, 9))  # sends nothing: only asks the routing table
            address = sock.getsockname()[0]
    except OSError:
        return None
    return {"address": address, "interface": _interface_of(address)}


def _interface_of(address: str) -> str:
    import fcntl
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _index, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(sock.fileno(), 0x8915, request)  # SIOCGIFADDR
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return ""


def listen(address: str, port: int, num_peers: int, wait_s: float) -> dict[str, Any]:
    """Take a connection from each peer at the port that ranks will meet at; 0 takes any. Prints it first."""
    seen = 0
    try:
        server = socket.create_server((address, port), backlog=num_peers + 1)
    except OSError as error:
        return {"error": f"{error.strerror or error}", "port": port}
    with server:
        server.settimeout(wait_s)
        print(json.dumps({"port": server.getsockname()[1]}), flush=True)
        deadline = time.monotonic() + wait_s
        with contextlib.suppress(OSError):
            while seen < num_peers and time.monotonic() < deadline:
                peer, _ = server.accept()
                peer.close()
                seen += 1
    return {"seen": seen}


def reach(address: str, port: int, wait_s: float) -> dict[str, Any]:
    """Can this host connect there?"""
    started = time.monotonic()
    try:
        with socket.create_connection((address, port), timeout=wait_s) as sock:
            ours = sock.getsockname()[0]
    except OSError as error:
        return {"error": str(error.strerror or error) or type(error).__name__}
    return {"ms": (time.monotonic() - started) * 1000, "from": ours}


_ALL_REDUCE = """
import datetime, os, sys, time
import torch, torch.distributed as dist
cuda = torch.cuda.is_available()
limit = datetime.timedelta(seconds=float(sys.argv[1]))
dist.init_process_group("nccl" if cuda else "gloo", timeout=limit)
x = torch.full((1 << 20,), float(dist.get_rank()), device="cuda" if cuda else "cpu")
dist.all_reduce(x)
x.fill_(float(dist.get_rank()))
if cuda: torch.cuda.synchronize()
began = time.monotonic()
dist.all_reduce(x)
total = float(x[0])
took = time.monotonic() - began
world = dist.get_world_size()
assert total == world * (world - 1) / 2, f"sum of ranks is {total}"
print(f"{took * 1000:.3f}")
dist.destroy_process_group()
"""


def all_reduce(
    python: str,
    rank: int,
    world_size: int,
    address: str,
    port: int,
    wait_s: float,
    env: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Take part in a sum of 4 MiB over all hosts, with the ranks' own torch: NCCL where there are GPUs, else Gloo.

    Returns ``ms`` of the second one, or ``error``, or ``skipped`` where the interpreter has no torch.
    """
    if _torch_of(python) is None:
        return {"skipped": "no torch"}
    own = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": address, "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    variables = {**os.environ, **{name: str(value) for name, value in own.items()}, **(env or {})}
    command = [python, "-c", _ALL_REDUCE, str(wait_s)]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=2 * wait_s, check=False, env=variables)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"error": f"{type(error).__name__}: no answer within {2 * wait_s:g} s"}
    if answer.returncode != 0:
        lines = [line for line in answer.stderr.splitlines() if line.strip()]
        return {"error": lines[-1][:300] if lines else f"exit code {answer.returncode}"}
    return {"ms": float(answer.stdout.split()[-1])}


# ------------------------------------------------------------------------------------------------- the verdict


def judge(probes: Mapping[str, Mapping[str, Any]], *, now_s: float) -> list[Finding]:
    """What is wrong with the hosts, by name; ``now_s`` is this machine's clock when they answered."""
    findings = []
    for host, seen in probes.items():
        findings += _judge_one(host, seen)
        skew = seen["time_s"] - now_s
        if abs(skew) > _CLOCK_S:
            text = f"its clock differs by {skew:+.0f} s, so file times mislead: sync it (timedatectl set-ntp true)"
            findings.append(Finding(host, text, False))
    versions = {host: seen["torch"] for host, seen in probes.items() if seen.get("torch")}
    if len({version.partition("+")[0] for version in versions.values()}) > 1:
        listed = ", ".join(f"{host} {version}" for host, version in versions.items())
        where = next(iter(versions))
        findings.append(Finding(where, f"hosts have different torch versions ({listed}): install one on all", True))
    return findings


def _judge_one(host: str, seen: Mapping[str, Any]) -> list[Finding]:
    findings = []
    shm, disk = seen.get("shm_bytes"), seen.get("disk_bytes")
    if shm is not None and shm < _SHM_BYTES:
        text = f"/dev/shm has {shm >> 20} MiB free, NCCL and data loaders want {_SHM_BYTES >> 20}"
        findings.append(
            Finding(host, f"{text}: mount -o remount,size=8G /dev/shm, or --shm-size for a container", False)
        )
    if disk is not None and disk < _DISK_BYTES:
        text = f"its disk has {disk >> 20} MiB free: remove something, or set another workdir"
        findings.append(Finding(host, text, disk < (16 << 20)))
    gpus = seen.get("gpus") or []
    busy = [gpu for gpu in gpus if gpu["used_mb"] > _BUSY_MB]
    if busy:
        listed = ", ".join(f"{gpu['index']} ({gpu['used_mb'] / 1024:.1f} GiB)" for gpu in busy)
        text = f"GPU {listed} in use by others: wait, ask them, or pick others with CUDA_VISIBLE_DEVICES"
        findings.append(Finding(host, text, False))
    torch = seen.get("torch") or ""
    if gpus and torch:
        findings += _judge_driver(host, torch, gpus[0]["driver"])
    return findings


def _judge_driver(host: str, torch: str, driver: str) -> list[Finding]:
    build = torch.partition("+")[2]
    if build == "cpu":
        text = f"torch {torch} is a CPU build though the host has GPUs: install a CUDA build there"
        return [Finding(host, text, False)]
    cuda = int(build[2:-1]) if build.startswith("cu") and build[2:].isdigit() else None
    needed = _DRIVERS.get(cuda) if cuda is not None else None
    have = _number(".".join(driver.split(".")[:2]))
    if needed is not None and 0 < have < needed:
        text = (
            f"torch {torch} needs driver {needed:g} or newer, it has {driver}: update it, or take an older CUDA's torch"
        )
        return [Finding(host, text, True)]
    return []


def unreachable(host: str, peer: str, address: str, port: int, ours: str | None, error: str) -> Finding:
    """A host that can't connect to the head's port."""
    text = (
        f"can't reach {peer} at {address}:{port} from {ours or 'its address'} ({error}): open TCP 1024-65535 between "
        f"the hosts (ranks listen on ports of their own choice), or name an interface both are on"
    )
    return Finding(host, text, True)


_OPS: dict[str, Callable[..., dict[str, Any]]] = {
    "probe": probe,
    "listen": listen,
    "reach": reach,
    "all_reduce": all_reduce,
}


def main(arguments: Sequence[str]) -> None:
    """Entry: ``preflight OP JSON``."""
    operation, payload = arguments
    print(json.dumps(_OPS[operation](**json.loads(payload))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
