"""What is looked at on every host before ranks start there, so that a failure is one line with its fix.

``judge`` compares what the hosts said of themselves (``Facts.seen``), without I/O. ``listen`` and ``reach`` run on them
and try the port that ranks will meet at, ``all_reduce`` what ranks will do. Standard library only. As a program
(``python -m atoll.agent.preflight OP``) it reads a JSON argument and answers with a JSON line.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import select
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


def listen(address: str, port: int, num_peers: int, wait_s: float, asker: int | None = None) -> dict[str, Any]:
    """Take a connection from each peer at the port that ranks will meet at; 0 takes any.

    Prints it first. Returns how many came, and over which interface the last of them. The end of ``asker``, a
    descriptor, means that nobody waits for that any more.
    """
    seen, interface = 0, ""
    try:
        server = socket.create_server((address, port), backlog=num_peers + 1)
    except OSError as error:
        return {"error": f"{error.strerror or error}", "port": port}
    with server:
        print(json.dumps({"port": server.getsockname()[1]}), flush=True)
        deadline = time.monotonic() + wait_s
        watched = [server.fileno()] if asker is None else [server.fileno(), asker]
        while seen < num_peers and (left_s := deadline - time.monotonic()) > 0:
            ready = select.select(watched, [], [], left_s)[0]
            if asker in ready:
                break
            if ready:
                peer, _ = server.accept()
                with peer:
                    interface = _interface_of(peer.getsockname()[0])
                seen += 1
    return {"seen": seen, "interface": interface}


def reach(address: str, port: int, wait_s: float) -> dict[str, Any]:
    """Can this host connect there? From which address of its own, and which interface?"""
    started = time.monotonic()
    try:
        with socket.create_connection((address, port), timeout=wait_s) as sock:
            ours = sock.getsockname()[0]
    except OSError as error:
        return {"error": str(error.strerror or error) or type(error).__name__}
    return {"ms": (time.monotonic() - started) * 1000, "from": ours, "interface": _interface_of(ours)}


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

    Returns ``ms`` of the second one, or ``error``.
    """
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


def judge(hosts: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    """What is wrong with hosts, from what each said of itself, by name."""
    findings = []
    for host, seen in hosts.items():
        findings += _judge_one(host, seen)
        skew = seen.get("skew_s", 0.0)
        if abs(skew) > _CLOCK_S:
            text = f"its clock differs by {skew:+.0f} s, so file times mislead: sync it (timedatectl set-ntp true)"
            findings.append(Finding(host, text, False))
    versions = {host: seen["torch"] for host, seen in hosts.items() if seen.get("torch")}
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
    have = re.match(r"\d+\.\d+", driver)
    if needed is not None and have is not None and float(have[0]) < needed:
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
    "listen": functools.partial(listen, asker=0),
    "reach": reach,
    "all_reduce": all_reduce,
}


def main(arguments: Sequence[str]) -> None:
    """Entry: ``preflight OP JSON``."""
    operation, payload = arguments
    print(json.dumps(_OPS[operation](**json.loads(payload))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
