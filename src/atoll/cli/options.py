"""The options that several commands share: one spelling, type and help text each."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from atoll.core.validation import MOST_NODES, MOST_PROCESSES, nearest

# Other spellings of options, of torchrun, SkyPilot and accelerate; every command accepts them, help shows one.
_SPELLINGS = {
    "num-nodes": "nodes",
    "nnodes": "nodes",
    "nproc": "nproc-per-node",
    "accelerators": "gpus",
    "dry-run": "dryrun",
    "detach-run": "detach",
}
_NUMBER = re.compile(r"[0-9]{1,18}")
# Of the click that this version of typer brings, or uses.
NoSuchOption: type[Exception] = vars(sys.modules[typer.BadParameter.__module__])["NoSuchOption"]


def normalized(name: str) -> str:
    """The spelling that help shows of an option's name: ``nodes`` of ``num_nodes``."""
    name = name.replace("_", "-")
    return _SPELLINGS.get(name, name)


def flags_of(command: Any) -> list[str]:
    """Every long flag that a command accepts, in all its spellings; hidden ones are left out."""
    params = [each for each in command.params if not getattr(each, "hidden", False)]
    flags = [flag for each in params for flag in (*each.opts, *each.secondary_opts) if flag.startswith("--")]
    return flags + [f"--{other}" for other, shown in _SPELLINGS.items() if f"--{normalized(shown)}" in flags]


class Command(TyperCommand):
    """A command that answers an unknown option with the nearest that it accepts, in any spelling."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Read the options."""
        try:
            return super().make_context(*args, **kwargs)
        except NoSuchOption as error:
            flag = vars(error)["option_name"]
            if near := nearest(flag, flags_of(self)):
                raise typer.BadParameter(f"unknown option {flag}{near}", ctx=vars(error)["ctx"]) from None
            raise


def parse_nodes(text: str | int) -> int:
    """A number of nodes; of torchrun's ``MIN:MAX`` the larger one."""
    least, colon, most = str(text).partition(":")
    numbers = [least, most] if colon else [least]
    if not all(map(_NUMBER.fullmatch, numbers)) or not 1 <= int(least) <= int(numbers[-1]) <= MOST_NODES:
        raise typer.BadParameter(f"{str(text)!r} is not a number from 1 to {MOST_NODES}")
    return int(numbers[-1])


def num_processes(text: str, num_gpus: int, num_cores: int | None, where: str) -> int:
    """Processes per node that ``--nproc-per-node`` asks for.

    Args:
        num_gpus: of each node.
        num_cores: of this machine; None where nodes are others.
        where: the infra, for messages.
    """
    if text == "auto":
        return max(1, num_gpus)
    if text == "cpu" and num_cores is not None:
        return num_cores
    if text == "gpu":
        if num_gpus:
            return num_gpus
        simulated = ", or --gpus L4:2 to simulate two" if num_cores is not None else ""
        raise typer.BadParameter(f"--nproc-per-node gpu: {where} has no GPU; give a number{simulated}")
    if not is_number(text) or not 0 < int(text) <= MOST_PROCESSES:
        raise typer.BadParameter(
            f"--nproc-per-node {text}: expected a number up to {MOST_PROCESSES}, gpu, auto, or cpu on local nodes"
        )
    return int(text)


def is_number(text: str) -> bool:
    """Is it a number in plain digits, and not thousands of them?"""
    return _NUMBER.fullmatch(text) is not None


def last_of(flag: str, values: Sequence[str] | None) -> str | None:
    """The value of an option that counts once, although it was given several times."""
    if not values:
        return None
    if len(set(values)) > 1:
        typer.echo(f"{flag} is given {len(values)} times: the last one counts, {flag} {values[-1]}", err=True)
    return values[-1]


# ------------------------------------------------------------------------------------------------- what a job needs
Nodes = Annotated[
    int | None,
    typer.Option("--nodes", parser=parse_nodes, metavar="N", help="Number of nodes (also --num-nodes, --nnodes)."),
]
Nproc = Annotated[
    str,
    typer.Option(
        "--nproc-per-node",
        metavar="N",
        help="Processes per node (also --nproc): a number, gpu (one per GPU), cpu (one per core), or auto (one per "
        "GPU, otherwise one).",
    ),
]
Gpus = Annotated[
    list[str] | None,
    typer.Option(
        "--gpus",
        metavar="NAME[:N]",
        help="GPUs per node (also --accelerators): L4, H100:8. Local ones can be simulated.",
    ),
]
NoSimulate = Annotated[bool, typer.Option("--no-simulate", help="Refuse GPUs that this machine lacks.")]
Infra = Annotated[
    str | None,
    typer.Option(
        "--infra", metavar="INFRA", help="Where nodes come from: local (the default), ssh/NAME, slurm/NAME, aws, gcp, …"
    ),
]
Env = Annotated[
    list[str] | None,
    typer.Option("--env", metavar="K=V", help="Set a variable: K=V, or K for its value in this shell."),
]
Secret = Annotated[
    list[str] | None, typer.Option("--secret", metavar="K=V", help="Like --env; logs and lists hide the value.")
]
Workdir = Annotated[
    str | None, typer.Option("--workdir", metavar="FOLDER", help="Folder to copy to every node and to start in.")
]
JobName = Annotated[str | None, typer.Option("--name", "-n", metavar="NAME", help="Name of the job.")]

# ---------------------------------------------------------------------------------------------- what a command does
Detach = Annotated[bool, typer.Option("--detach", "-d", help="Return as soon as the job or pipeline is submitted.")]
DryRun = Annotated[bool, typer.Option("--dryrun", help="Print what would be done; start nothing.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Accepted for compatibility; Atoll never prompts.")]
Follow = Annotated[bool, typer.Option("--follow/--no-follow", "-f", help="Wait for new lines until the job ends.")]
Tail = Annotated[int, typer.Option(min=0, max=10**9, help="Show only the last N lines; 0: all.", metavar="N")]
OnlyRank = Annotated[int | None, typer.Option("--rank", min=0, help="Show only the output of this rank.", metavar="R")]
OnlyStatus = Annotated[bool, typer.Option("--status", help="Print only the status.")]
SyncDown = Annotated[bool, typer.Option("--sync-down", "-s", help="Copy the log files here instead.")]
Output = Annotated[
    str,
    typer.Option("--output", "-o", metavar="FORMAT", help="table, or json: one document on standard output."),
]


def as_json(output: str) -> bool:
    """Does ``-o`` ask for JSON?"""
    if output not in ("table", "json"):
        raise typer.BadParameter(f"-o {output}: expected 'table' or 'json'")
    return output == "json"
