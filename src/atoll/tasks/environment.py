"""The variables of a job's processes: SkyPilot's names and formats for scripts, torchrun's beside them for commands.

Standard library only.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from atoll.core.errors import ConfigError
from atoll.core.secrets import secret_parts
from atoll.providers.gpus import VISIBLE
from atoll.tasks.spec import ClusterSpec, JobSpec
from atoll.tasks.transitions import Phase

OF_PLACE = ("HOME", "TMPDIR")  # what a node says about these holds, whatever else was said
_LINE_BY_LINE = {"PYTHONUNBUFFERED": "1"}  # a log that follows its program


@dataclass(frozen=True, slots=True)
class Task:
    """What all processes of one job have in common.

    Attributes:
        spec, cluster: the job and where it runs.
        job_id, task_id, user: as in the job's row.
        addresses: of every node of the cluster, head first.
        secrets: variables that no record shows.
        nodes: of the cluster, that ``run`` runs on, by their rank.
    """

    spec: JobSpec
    cluster: ClusterSpec
    job_id: int
    task_id: str
    user: str
    addresses: Sequence[str]
    secrets: Mapping[str, str]
    nodes: Sequence[int]


def task_id(cluster: str, job_id: int, now: datetime) -> str:
    """``sky-2026-11-28-05-30-00-123456_train_3``: stays the same when the job is started again."""
    return f"sky-{now:%Y-%m-%d-%H-%M-%S-%f}_{cluster}_{job_id}"


def managed_task_id(name: str | None, job_id: int, now: datetime) -> str:
    """``sky-managed-2026-11-28-05-30-00-123456_train_3``: the same on every cluster that the job has."""
    return f"sky-managed-{now:%Y-%m-%d-%H-%M-%S-%f}_{name or 'job'}_{job_id}"


def script_environment(task: Task, phase: Phase, node: int, place: Mapping[str, str]) -> dict[str, str]:
    """Variables of ``setup`` or ``run`` on one node; ``place`` is what the node itself adds."""
    ours = _setup_variables(task, node) if phase == "setup" else _run_variables(task, node)
    return _layered(task, place, _LINE_BY_LINE, ours)


def command_environment(
    task: Task, node: int, process: int, place: Mapping[str, str], *, master_port: int, restarts: int, cores: int
) -> dict[str, str]:
    """Variables of one process of a ``command`` job: those of ``run``, and every one that ``torchrun`` sets.

    Args:
        task: the job.
        node, process: which of its processes; ``process`` counts from 0 on its node.
        place: what the node itself adds.
        master_port: where rank 0 will listen.
        restarts: how often the job was started again.
        cores: of the node's machine, which all ranks there share.
    """
    spec = task.spec
    at = task.nodes.index(node)
    rank, world = at * spec.num_processes + process, spec.num_nodes * spec.num_processes
    ours: dict[str, str | int] = {
        "RANK": rank,
        "LOCAL_RANK": process,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": spec.num_processes,
        "GROUP_RANK": at,
        "GROUP_WORLD_SIZE": spec.num_nodes,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world,
        "ROLE_NAME": "default",
        "MASTER_ADDR": task.addresses[task.nodes[0]],
        "MASTER_PORT": master_port,
        "TORCHELASTIC_RESTART_COUNT": restarts,
        "TORCHELASTIC_MAX_RESTARTS": spec.restarts.on_errors,
        "TORCHELASTIC_RUN_ID": spec.run_id or task.task_id,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    defaults = {**_LINE_BY_LINE, "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    if spec.num_processes > 1 or (task.cluster.allocation.shares_machine and spec.num_nodes > 1):
        there = world if task.cluster.allocation.shares_machine else spec.num_processes
        defaults["OMP_NUM_THREADS"] = str(max(1, cores // there))  # else each of them takes every core
    return _layered(task, place, defaults, {**_run_variables(task, node), **_texts(ours)})


def _layered(
    task: Task, place: Mapping[str, str], defaults: Mapping[str, str], ours: Mapping[str, str]
) -> dict[str, str]:
    """Later wins: what we would have, the caller's, the node's, the user's, and last what is a fact."""
    spec = task.spec
    facts = {name: place[name] for name in (*OF_PLACE, VISIBLE) if name in place}
    if spec.inherit_env:  # a home and a /tmp as the caller has them
        for name in OF_PLACE:
            facts.pop(name, None)
        place = {name: value for name, value in place.items() if name not in OF_PLACE}
    elif "HOME" in place:  # torch would keep what it compiles in the node's /tmp, which ends with the job
        defaults = {**defaults, "TORCHINDUCTOR_CACHE_DIR": os.path.join(place["HOME"], ".cache", "torchinductor")}
    return {**defaults, **spec.base_env, **place, **spec.env, **task.secrets, **facts, **ours}


def _common_variables(task: Task) -> dict[str, str]:
    cloud, _, region = task.cluster.infra.partition("/")
    info = {"cluster_name": task.cluster.name, "cloud": cloud, "region": region or None, "zone": None}
    variables = {
        "SKYPILOT_TASK_ID": task.task_id,
        "SKYPILOT_CLUSTER_INFO": json.dumps(info),
        "SKYPILOT_USER": task.user,
    }
    if (earlier := task.spec.env.get("SKYPILOT_TASK_IDS")) is not None:  # of the tasks before it in a pipeline
        variables["SKYPILOT_TASK_IDS"] = "\n".join([*earlier.split(), task.task_id])
    if task.spec.group is not None:
        variables["SKYPILOT_JOB_RANK"] = str(task.spec.rank_in_group)
        variables["SKYPILOT_NUM_JOBS"] = str(task.spec.num_in_group)
    return variables


def _setup_variables(task: Task, node: int) -> dict[str, str]:
    return {
        **_common_variables(task),
        "SKYPILOT_NUM_NODES": str(task.spec.num_nodes),
        "SKYPILOT_SETUP_NODE_IPS": "\n".join(task.addresses),
        "SKYPILOT_SETUP_NODE_RANK": str(node),
        "SKYPILOT_SETUP_NUM_GPUS_PER_NODE": str(task.spec.num_accelerators),
    }


def _run_variables(task: Task, node: int) -> dict[str, str]:
    return {
        **_common_variables(task),
        "SKYPILOT_NUM_NODES": str(task.spec.num_nodes),
        "SKYPILOT_NODE_IPS": "\n".join(task.addresses[each] for each in task.nodes),
        "SKYPILOT_NODE_RANK": str(task.nodes.index(node)),
        "SKYPILOT_NUM_GPUS_PER_NODE": str(task.spec.num_accelerators),
        "SKYPILOT_INTERNAL_JOB_ID": str(task.job_id),
    }


def _texts(values: Mapping[str, str | int]) -> dict[str, str]:
    return {name: str(value) for name, value in values.items()}


# What bash reads before a script: it learns the variables and functions that an interactive shell has by then, also of
# what a setup wrote into ~/.bashrc. Not what the job itself sets, and by way of a file, as a start file may leave
# something that holds its pipes open.
_SHELL = """_atoll="$BASH_ENV.found"; unset -v BASH_ENV
if {condition}; then
    {{
        bash -ic 'unset -v "$@"; {{ export -p; declare -fp; }} >"$0"' "$_atoll" {names} </dev/null >/dev/null 2>&1 || :
    }} | {{
        read -rt {slow_s}; [ $? -le 128 ] ||
            echo "atoll: bash still reads its startup files such as ~/.bashrc after {slow_s} s, and the job waits" >&2
        read -r
    }} || :
    if [ -s "$_atoll" ]; then . "$_atoll"; else
        echo "atoll: bash did not finish its startup files such as ~/.bashrc, so nothing from them is set here" >&2
    fi
    rm -f -- "$_atoll"
fi
unset -v _atoll
"""
_SLOW_S = 5  # start files that take longer are told of
_OF_SHELL = ("PWD", "OLDPWD", "SHLVL", "SSH_CLIENT", "SSH_CONNECTION", "SSH_TTY")  # each shell's own
_OF_NODE = (*OF_PLACE, "CUDA_VISIBLE_DEVICES", "ATOLL_SIMULATED", "NCCL_HOSTID")


def shell_text(task: Task, place: Mapping[str, str], env: Iterable[str]) -> str:
    """What the bash of a process reads first; of the variables ``env`` those that the job or its node sets hold."""
    free = {*task.spec.base_env, *place}.difference(task.spec.env, task.secrets, _OF_NODE)
    names = sorted({*env, *_OF_SHELL} - free)
    condition = "[ -e ~/.bashrc ]" if task.cluster.allocation.shares_machine else "true"
    return _SHELL.format(condition=condition, slow_s=_SLOW_S, names=" ".join(map(shlex.quote, names)))


def script_arguments(strict: bool) -> list[str]:
    """The argument list that a script's path is appended to.

    The user's text is the whole file, so that the line numbers in Bash's messages are theirs, and ``pkill -f`` with a
    word of the script does not find its own shell.
    """
    return ["bash", "-e"] if strict else ["bash"]


_LONGEST_BYTES = 128 << 10  # the kernel's MAX_ARG_STRLEN: a variable, or an argument
_MOST_BYTES = 2_000_000  # of all, with a stack of the usual 8 MiB


def check_size(spec: JobSpec, secrets: Mapping[str, str]) -> None:
    """Refuse what the kernel would refuse of every program that the job starts.

    Raises:
        ConfigError: a variable or an argument is too long, or all are together.
    """
    texts = {f"variable {n}": f"{n}={value}" for n, value in {**spec.base_env, **spec.env, **secrets}.items()}
    texts |= {f"argument {at}": text for at, text in enumerate(spec.command or ())}
    sizes = {what: len(text.encode(errors="replace")) + 1 for what, text in texts.items()}
    for what, size in sizes.items():
        if size > _LONGEST_BYTES:
            raise ConfigError(
                f"{what} has {size} bytes, and Linux starts no program with more than {_LONGEST_BYTES}: give the job a "
                "file instead"
            )
    if sum(sizes.values()) > _MOST_BYTES:
        raise ConfigError(
            f"the job's variables and arguments have {sum(sizes.values())} bytes, and Linux starts no program with "
            f"more than {_MOST_BYTES}: give the job files instead"
        )


def hidden_values(spec: JobSpec, secrets: Mapping[str, str]) -> set[str]:
    """What logs hide: values of declared secrets, and those of all variables that look like one."""
    found: set[str] = set()
    for name, value in {**spec.base_env, **spec.env, **secrets}.items():
        found |= {value} if name in spec.secret_names else secret_parts(name, value)
    return found
