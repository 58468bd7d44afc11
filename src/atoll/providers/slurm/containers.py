"""Images that a task's scripts run in, with what the cluster has for that: Apptainer, or Slurm's plugin pyxis.

The agent stays outside: what it starts is wrapped in a command that runs it in the container, as the same user, with
the same environment, home and ``/tmp``.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from atoll.core.errors import ConfigError
from atoll.providers.base import NodePlan
from atoll.providers.gpus import VISIBLE

# Which there is; the first wins.
FIND = (
    "command -v apptainer || command -v singularity || "
    "{ srun --help 2>&1 | grep -q -e --container-image && echo pyxis; } || true"
)
_DOCKER = "docker:"
# A step gets the GPUs of the whole job; those that are leased are given again inside.
_PYXIS = (
    f'ATOLL_GPUS="${VISIBLE}"; export ATOLL_GPUS; '
    f'exec {{srun}} sh -c \'export {VISIBLE}="$ATOLL_GPUS"; exec "$@"\' sh "$@"'
)


def image_of(image_id: Any, tool: str, infra: str) -> str:
    """An image as the tool that the cluster has takes it.

    Args:
        image_id: as a task says it: ``docker:IMAGE``, or the path of a file that the nodes see.
        tool: what ``FIND`` printed.
        infra: for messages.

    Raises:
        ConfigError: it is none, or there is no such tool.
    """
    if not isinstance(image_id, str) or not image_id.startswith((_DOCKER, "/")):
        raise ConfigError(
            f"image_id={image_id!r}: on {infra} expected docker:IMAGE, as in docker:ubuntu:24.04, or a path as in "
            "/shared/image.sif"
        )
    if not tool:
        raise ConfigError(
            f"image_id={image_id!r}: {infra} runs no containers: its login node has neither apptainer nor pyxis "
            "(`srun --container-image`). Leave image_id out, or have one of them installed"
        )
    name = image_id.removeprefix(_DOCKER).removeprefix("//")
    if image_id.startswith("/"):
        return image_id
    if tool != "pyxis":
        return f"docker://{name}"
    registry, slash, rest = name.partition("/")  # which it wants apart: nvcr.io#nvidia/pytorch:24.10-py3
    return f"{registry}#{rest}" if slash and ("." in registry or ":" in registry) else name


def wrapper(image: str, tool: str, node: NodePlan, step: Sequence[str]) -> tuple[str, ...]:
    """What comes before a command on a node so that it runs in the image; ``step``: ``srun`` with a step's options."""
    shared = [node.folder] if not node.folder.startswith(f"{node.home}/") else []
    if tool == "pyxis":
        mounts = ",".join(f"{path}:{path}" for path in (node.home, "/tmp", *shared))
        srun = shlex.join([*step, f"--container-image={image}", f"--container-mounts={mounts}"])
        return "sh", "-c", _PYXIS.format(srun=f'{srun} --container-workdir="$PWD"'), "sh"
    binds = [word for path in ("/tmp", *shared) for word in ("--bind", path)]
    return tool, "exec", *(["--nv"] if node.num_accelerators else []), *binds, image
