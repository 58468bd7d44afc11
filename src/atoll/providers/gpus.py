"""The NVIDIA GPUs of this machine that this process may use, read without importing any framework."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from atoll.core.paths import user_name
from atoll.providers.accelerators import canonical_gpu_name

VISIBLE = "CUDA_VISIBLE_DEVICES"
# What parse_line reads the answer to; asked on ssh hosts too.
QUERY = ["--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits"]
# A driver in trouble answers late or never; without persistence mode a healthy one takes seconds.
_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU of this machine.

    Attributes:
        index: its index as ``nvidia-smi`` counts (PCI bus order).
        uuid: its UUID, which ``CUDA_VISIBLE_DEVICES`` takes too.
        name: canonical name, e.g. ``"H100"``.
        memory_gb: its memory in GiB.
        mig: profile of the slice that this is of a card, e.g. ``"3g.40gb"``; empty for a whole one.
    """

    index: int
    uuid: str
    name: str
    memory_gb: float
    mig: str = ""

    @property
    def device(self) -> str:
        """What ``CUDA_VISIBLE_DEVICES`` calls it."""
        return self.uuid or str(self.index)

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.name})" + (f", slice {self.mig}" if self.mig else "")


@dataclass(frozen=True, slots=True)
class GpuReport:
    """GPUs of this machine that this process may use, in the order of ``CUDA_VISIBLE_DEVICES``.

    Attributes:
        gpus: the GPUs.
        reason: why there is none, or None where there is one.
    """

    gpus: tuple[Gpu, ...]
    reason: str | None


# What was found, by (the nvidia-smi that answered, CUDA_VISIBLE_DEVICES).
_reports: dict[tuple[str | None, str | None], GpuReport] = {}


def local_gpus() -> tuple[Gpu, ...]:
    """GPUs of this machine that ``CUDA_VISIBLE_DEVICES`` leaves to this process; empty where there is none."""
    return gpu_report().gpus


def gpu_report() -> GpuReport:
    """The same with the reason where there is none. Asked once per process and value of ``CUDA_VISIBLE_DEVICES``."""
    return machine_gpus(os.environ.get(VISIBLE))


def machine_gpus(visible: str | None) -> GpuReport:
    """GPUs of this machine that a value of ``CUDA_VISIBLE_DEVICES`` leaves; all of them for None."""
    program = shutil.which("nvidia-smi")
    key = (program, visible)
    if key not in _reports:
        _reports[key] = _look(program, visible)
    return _reports[key]


def _look(program: str | None, visible: str | None) -> GpuReport:
    if visible is not None and not _entries(visible):
        return GpuReport((), f"{VISIBLE}={visible!r} hides every GPU")
    if program is None:
        return GpuReport((), "nvidia-smi is not on PATH")
    answer = _ask([program, *QUERY])
    if isinstance(answer, GpuReport):
        return answer
    gpus = tuple(gpu for gpu in map(parse_line, answer.splitlines()) if gpu is not None)
    if not gpus:
        return GpuReport((), f"nvidia-smi lists no GPU: {answer.strip() or 'no output'}")
    if visible is not None and "MIG-" in visible and isinstance(slices := _ask([program, "-L"]), str):
        gpus += tuple(_slices(gpus, slices))
    chosen = gpus if visible is None else visible_gpus(gpus, visible)
    return GpuReport(chosen, None if chosen else f"{VISIBLE}={visible!r} matches no GPU of this machine")


def local_slices() -> tuple[Gpu, ...]:
    """MIG slices of this machine's GPUs that ``CUDA_VISIBLE_DEVICES`` leaves: those it names, or all of such a card."""
    gpus = local_gpus()
    if named := tuple(gpu for gpu in gpus if gpu.mig):
        return named
    program = shutil.which("nvidia-smi")
    answer = _ask([program, "-L"]) if program and gpus else ""
    return tuple(_slices(gpus, answer)) if isinstance(answer, str) else ()


def _ask(command: list[str]) -> str | GpuReport:
    """What it prints, or why there is no GPU."""
    try:
        answer = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return GpuReport((), f"nvidia-smi did not answer within {_TIMEOUT_S:g} s")
    except OSError as error:
        return GpuReport((), f"nvidia-smi could not be started: {error}")
    if answer.returncode != 0:
        said = (answer.stderr.strip() or answer.stdout.strip() or "no output").splitlines()[-1]
        return GpuReport((), f"nvidia-smi failed with exit code {answer.returncode}: {said}")
    return answer.stdout


def _slices(gpus: Sequence[Gpu], listed: str) -> Iterator[Gpu]:
    """MIG slices, from ``nvidia-smi -L``, which lists them below their card."""
    card = None
    for line in listed.splitlines():
        if (found := re.search(r"UUID: (\S+?)\)", line)) is None:
            continue
        if not found[1].startswith("MIG-"):
            card = next((gpu for gpu in gpus if gpu.uuid == found[1]), None)
        elif card is not None:
            profile = re.search(r"MIG (\S+)", line)
            yield replace(card, uuid=found[1], mig=profile[1] if profile else "")


def parse_line(line: str) -> Gpu | None:
    """The GPU of one line that nvidia-smi answers ``QUERY`` with; None where it is none."""
    fields = [field.strip() for field in line.split(",")]
    if len(fields) != 4 or not fields[0].isdigit():
        return None
    index, uuid, name, memory_mib = fields
    try:
        memory_gb = round(float(memory_mib) / 1024, 1)
    except ValueError:  # "[N/A]" on cards that share the host's memory
        memory_gb = 0.0
    return Gpu(int(index), uuid, canonical_gpu_name(name), memory_gb)


def _entries(visible: str) -> list[str]:
    return [] if visible.strip() in ("", "-1", "NoDevFiles") else [part.strip() for part in visible.split(",")]


def visible_gpus(gpus: Sequence[Gpu], visible: str) -> tuple[Gpu, ...]:
    """CUDA's rule: indices or UUIDs (a unique beginning will do); the first that names nothing ends the list."""
    chosen: list[Gpu] = []
    for entry in _entries(visible):
        if entry.isascii() and entry.isdigit():
            number = entry.lstrip("0") or "0"  # of thousands of digits too, which int refuses
            found = [gpu for gpu in gpus if str(gpu.index) == number and not gpu.uuid.startswith("MIG-")]
        else:
            found = [gpu for gpu in gpus if entry.startswith(("GPU-", "MIG-")) and gpu.uuid.startswith(entry)]
        if len(found) != 1:
            break
        if found[0] in chosen:  # CUDA hides everything where a device is named twice
            return ()
        chosen.append(found[0])
    return tuple(chosen)


def gpu_row(gpu: Gpu, **more: object) -> dict[str, Any]:
    """A row of ``atoll gpus``."""
    return {"index": gpu.index, "uuid": gpu.uuid, "name": gpu.name, "memory_gb": gpu.memory_gb, **more}


def in_turn(gpus: tuple[Gpu, ...], node: int, count: int) -> tuple[Gpu, ...]:
    """The GPUs with a node's own share first: neighbours stay together, and nodes start out with different ones."""
    own = node * count % len(gpus) if gpus else 0
    return (*gpus[own:], *gpus[:own])


def bound_text(visible: str | None) -> str:
    """What follows a number of GPUs that a value of ``CUDA_VISIBLE_DEVICES`` bounds."""
    return "" if visible is None else f" that {VISIBLE}={visible!r} leaves"


def lease_wish(gpus: Sequence[Gpu], count: int, what: str) -> dict[str, Any]:
    """What an agent is told to lease ``count`` of these GPUs for ``what``, a job or pool of this process."""
    holder = f"{what} (pid {os.getpid()} on {socket.gethostname()}, user {user_name()})"
    return {"gpus": [[gpu.device, str(gpu)] for gpu in gpus], "count": count, "holder": holder}
