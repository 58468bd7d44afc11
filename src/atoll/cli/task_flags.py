"""Flags that say what a task is and needs, the same for every command that starts one. Imports are late."""

from __future__ import annotations

import functools
import inspect
import re
import shlex
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli import options, shown

if TYPE_CHECKING:
    from atoll.tasks.task import Task

_PLAIN_WORD = re.compile(r"""[^\s()<>|;&'"`\\]+|[|&;<>]+""")


@dataclass(frozen=True, slots=True)
class TaskFlags:
    """What a command line says of its task; None where it says nothing.

    Attributes:
        of_clouds: values of flags that only a cloud's machines know; the task's notes say so.
    """

    name: options.JobName = None
    workdir: options.Workdir = None
    git_url: Annotated[
        str | None, typer.Option("--git-url", help="Git repository to use as the workdir.", metavar="URL")
    ] = None
    git_ref: Annotated[str | None, typer.Option("--git-ref", help="Branch, tag or commit of the repository.")] = None
    infra: options.Infra = None
    num_nodes: options.Nodes = None
    accelerators: options.Gpus = None
    cpus: Annotated[str | None, typer.Option(metavar="N[+]", help="CPUs per node: 4, or 8+ for at least 8.")] = None
    memory: Annotated[
        str | None, typer.Option(metavar="GB[+]", help="Memory per node in GB: 32, or 32+ for at least 32.")
    ] = None
    use_spot: Annotated[bool | None, typer.Option("--use-spot/--no-use-spot", help="Spot machines (clouds).")] = None
    env: options.Env = None
    env_file: Annotated[
        list[str] | None, typer.Option("--env-file", metavar="FILE", help="Set the variables of a .env file.")
    ] = None
    secret: options.Secret = None
    secret_file: Annotated[
        list[str] | None,
        typer.Option("--secret-file", metavar="FILE", help="Like --env-file; logs and lists hide the values."),
    ] = None
    ports: Annotated[list[str] | None, typer.Option("--ports", metavar="PORT", help="Ports that the task serves.")] = (
        None
    )
    strict: Annotated[bool, typer.Option("--strict", help="Scripts end at the first command that fails (set -e).")] = (
        False
    )
    of_clouds: dict[str, Any] = field(default_factory=dict)


_OF_CLOUDS: dict[str, type] = {
    "instance_type": str,
    "cloud": str,
    "region": str,
    "zone": str,
    "image_id": str,
    "disk_size": str,
    "disk_tier": str,
    "network_tier": str,
    "local_disk": str,
    "priority": int,
    "job_recovery": str,
}
# SkyPilot's flags that nothing here has a meaning for: taken, and answered with one line.
_WITHOUT_MEANING: dict[str, type] = {
    "retry_until_up": bool,
    "async": bool,
    "resize": bool,
    "config": str,
    "clone_disk_from": str,
    "wait_for": str,
}
_SPELLINGS = {
    "instance_type": ("--instance-type", "-t"),
    "retry_until_up": ("--retry-until-up", "-r"),
    "async": ("--async/--no-async",),
}


def with_task_flags(command: Callable[..., None]) -> Callable[..., None]:
    """The command with every field of ``TaskFlags`` as an option of its own, in place of its parameter ``flags``."""
    hints = typing.get_type_hints(command, include_extras=True)
    parameters = [
        _parameter(name, each.default, hints[name])
        for name, each in inspect.signature(command).parameters.items()
        if name != "flags"
    ]
    flag_hints = typing.get_type_hints(TaskFlags, include_extras=True)
    visible = [each for each in fields(TaskFlags) if each.name != "of_clouds"]
    parameters += [_parameter(each.name, each.default, flag_hints[each.name]) for each in visible]
    parameters += [_hidden(name, kind) for name, kind in {**_OF_CLOUDS, **_WITHOUT_MEANING}.items()]

    @functools.wraps(command)
    def flagged(**values: Any) -> None:
        ignored = [name for name in _WITHOUT_MEANING if values.pop(f"hidden_{name}")]
        if ignored:
            flags = ", ".join(_spellings(name)[0].partition("/")[0] for name in ignored)
            shown.note(f"{flags} has no effect")
        of_clouds = {name: values.pop(f"hidden_{name}") for name in _OF_CLOUDS}
        command(
            flags=TaskFlags(**{each.name: values.pop(each.name) for each in visible}, of_clouds=of_clouds), **values
        )

    flagged.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined] # inspect's own protocol
    flagged.__annotations__ = {each.name: each.annotation for each in parameters}
    return flagged


def _parameter(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _hidden(name: str, kind: type) -> inspect.Parameter:
    option = typer.Option(*_spellings(name), hidden=True)
    annotation = Annotated[bool, option] if kind is bool else Annotated[kind | None, option]
    return _parameter(f"hidden_{name}", False if kind is bool else None, annotation)


def _spellings(name: str) -> tuple[str, ...]:
    return _SPELLINGS.get(name, (f"--{name.replace('_', '-')}",))


def tasks_of(entrypoint: Sequence[str], flags: TaskFlags) -> list[Task]:
    """The tasks that a command line means: a task file's documents, or one made of a command.

    Raises:
        ConfigError: the file or a flag can't work.
    """
    from atoll.tasks.entrypoint import load_entrypoint

    own = {each.name: getattr(flags, each.name) for each in fields(flags) if each.name != "of_clouds"}
    own["accelerators"] = options.last_of("--gpus", flags.accelerators)
    return load_entrypoint(as_typed(entrypoint), {**own, **flags.of_clouds})


def as_typed(words: Sequence[str]) -> str:
    """A command line again, of the words that a shell here made of it.

    One word is the line itself. Of several, those that would fall apart or fail on the node are quoted; ``$NAME``,
    ``*`` and operators that are words of their own (``"&&"``) are the node's shell's, as SkyPilot has it.
    """
    if len(words) == 1:
        return words[0]
    return " ".join(word if _PLAIN_WORD.fullmatch(word) else shlex.quote(word) for word in words)
