"""What is submitted to Slurm: the script of the job that holds nodes, and the options of ``sbatch``."""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from atoll.agent import keeper
from atoll.core.errors import ConfigError
from atoll.providers.base import NodeRequest
from atoll.providers.slurm.answers import Gpus
from atoll.providers.ssh.hosts import KEEPER_FOLDER, STEP_OPTIONS

# A job in which nothing has run for so long is cancelled: whoever submitted it was killed. Packages may be installed
# before a pool's agents start; in a cluster's the watcher runs, from its launch to its end.
_UNUSED_S = 900.0
_SCRIPT = """#!/bin/sh
trap ': > "{place}$SLURM_JOB_ID/{notice}"' USR1
trap : TERM
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \\
    --kill-on-bad-exit=0 --input=none {options} \\
    {python} -I -S -c {keeper} "{place}$SLURM_JOB_ID" {unused_s:g} {folder}/"$SLURM_JOB_ID.again" &
while kill -0 $! 2>/dev/null; do wait $!; done
"""
# The job is one of ours by these; what is asked for in another way would be something else.
_OURS = {
    **dict.fromkeys(("nodes", "N"), "say --num-nodes"),
    **dict.fromkeys(("output", "o", "error", "e"), "`atoll logs CLUSTER` shows what jobs print"),
    **dict.fromkeys(("array", "a"), "a sweep runs inside one allocation: --sweep"),
    **dict.fromkeys(("signal", "requeue", "no-requeue"), "say requeue = true, or job_recovery in the task"),
    **dict.fromkeys(("ntasks", "n", "ntasks-per-node", "wrap", "no-kill", "k", "parsable"), "Atoll says it itself"),
}


def script(python: str, folder: str) -> str:
    """What the job runs: a keeper on each node. ``folder``: where it may write, and every node sees it."""
    return _SCRIPT.format(
        options=STEP_OPTIONS,
        python=shlex.quote(python),
        keeper=shlex.quote(inspect.getsource(keeper)),
        place=KEEPER_FOLDER,
        notice=keeper.NOTICE,
        unused_s=_UNUSED_S,
        folder=shlex.quote(folder),
    )


def task_options(request: NodeRequest) -> list[str]:
    """Options that a task gives for its job: ``config: {slurm: {sbatch_options: {time: "1:00:00"}}}``.

    Raises:
        ConfigError: they are no options, or such as are Atoll's to give.
    """
    config: Mapping[str, Any] = request.resources.get("config", {}).get("slurm") or {}
    for key in config:
        if key != "sbatch_options":
            raise ConfigError(f"config.slurm.{key} has no effect here: expected sbatch_options")
    given = config.get("sbatch_options") or {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"config.slurm.sbatch_options={given!r}: expected options such as {{time: '1:00:00'}}")
    words = []
    for key, value in given.items():
        if value is False:
            continue
        if not re.fullmatch(r"[a-z][a-z0-9-]*", str(key)) or isinstance(value, (list, Mapping)):
            raise ConfigError(f"config.slurm.sbatch_options: {key}: {value!r}: expected options of sbatch, as in time")
        words.append(f"--{key}" if value in (None, True, "") else f"--{key}={value}")
    check_options(words, "config.slurm.sbatch_options")
    return words


def check_options(words: Sequence[str], where: str) -> None:
    """Refuse options of ``sbatch`` that are Atoll's to give.

    Raises:
        ConfigError: one is.
    """
    for word in words:
        found = re.match(r"--([a-z][a-z0-9-]*)|-([A-Za-z])", word)
        name = (found[1] or found[2]) if found else None
        if name in _OURS:
            raise ConfigError(f"{where}: {word} can't be given: {_OURS[name]}")


def resource_options(request: NodeRequest, gpus: Gpus | None, given: Sequence[str]) -> list[str]:
    """Options for what is asked of each node, beside those ``given``; GPUs get their share of the node's cores."""
    words: list[str] = []
    if gpus is not None:
        words.append(f"--gres=gpu:{gpus.gres}:{gpus.count}" if gpus.gres else f"--gres=gpu:{gpus.count}")
    cpus = re.match(r"\d+", request.cpus or "")
    if cpus:
        words.append(f"--cpus-per-task={cpus[0]}")
    elif gpus is not None and not any(word.startswith(("-c", "--cpus", "--exclusive")) for word in given):
        words.append(f"--cpus-per-task={gpus.cores}")
    memory = re.match(r"(\d+)", request.memory or "")
    return [*words, f"--mem={memory[1]}G"] if memory else words


def seconds_of(limit: str) -> float | None:
    """A time limit as Slurm takes it (``90``, ``1:30:00``, ``1-12``); None where it is none, which Slurm says."""
    days, dash, rest = limit.rpartition("-")
    try:
        parts = [float(part) for part in rest.split(":")]
        if dash:
            parts = [24 * float(days) + parts[0], *parts[1:]]
        elif len(parts) < 3:  # minutes first
            parts = [0.0, *parts]
    except ValueError:
        return None
    return sum(part * unit for part, unit in zip(parts, (3600.0, 60.0, 1.0), strict=False))
