"""What ``atoll launch ENTRYPOINT --flags`` means: the tasks of a file, or one of a command, with the flags applied."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

from atoll.core.errors import ConfigError
from atoll.core.validation import nearest
from atoll.tasks.resources import check_changes
from atoll.tasks.schema import Document, Section, check, one_of, read_documents
from atoll.tasks.spec import is_none
from atoll.tasks.task import Name, Task, TaskSection
from atoll.tasks.variables import Given, gather

_FLAGS = Document("")
_SUFFIXES = (".yaml", ".yml")


class _Header(Section):
    """What may come before the tasks of a pipeline."""

    name: Name | None = None
    execution: Annotated[str | None, one_of("serial", "parallel")] = None
    primary_tasks: Any = None
    termination_delay: Any = None
    inter_connection: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """Flags of the command, as text or what they were parsed to; they win over the file. None: not given.

    A flag of the nodes (``cpus`` and what follows it) that says ``none`` takes the file's wish away.
    """

    name: str | None = None
    workdir: str | None = None
    git_url: str | None = None
    git_ref: str | None = None
    num_nodes: int | None = None
    env: Sequence[str] = ()
    env_file: Sequence[str] = ()
    secret: Sequence[str] = ()
    secret_file: Sequence[str] = ()
    cpus: str | None = None
    memory: str | None = None
    accelerators: str | None = None
    infra: str | None = None
    cloud: str | None = None
    region: str | None = None
    zone: str | None = None
    instance_type: str | None = None
    use_spot: bool | None = None
    image_id: str | None = None
    disk_size: str | int | None = None
    disk_tier: str | None = None
    network_tier: str | None = None
    local_disk: str | None = None
    ports: Sequence[str] = ()
    priority: int | None = None
    job_recovery: str | None = None

    def given(self, environ: Mapping[str, str]) -> Given:
        """The variables that the flags give; ``environ`` is the caller's environment."""
        return Given(
            gather("--env", self.env, self.env_file, environ),
            gather("--secret", self.secret, self.secret_file, environ),
        )

    def of_task(self) -> dict[str, Any]:
        """Keys of the task that change."""
        git = {"url": self.git_url, "ref": self.git_ref}
        git = {key: value for key, value in git.items() if value is not None}
        if git and self.workdir is not None:
            raise ConfigError("--workdir and --git-url both say where the workdir comes from: give one of them")
        flags = {"name": self.name, "num_nodes": self.num_nodes, "workdir": git or self.workdir}
        return check(TaskSection, flags, _FLAGS)

    def of_nodes(self) -> dict[str, Any]:
        """Keys of the resources that change; None takes one away."""
        names = [each.name for each in fields(self)]
        flags = {key: getattr(self, key) for key in names[names.index("cpus") :]}
        said = {key: value for key, value in flags.items() if value is not None and value != ()}
        none = {key for key, value in said.items() if isinstance(value, str) and value.strip().lower() == "none"}
        none |= {key for key in ("accelerators",) if is_none(said.get(key))}
        return check_changes({key: None if key in none else value for key, value in said.items()}, _FLAGS)


def load_entrypoint(entrypoint: str, overrides: Overrides) -> list[Task]:
    """The tasks of a file, where ``entrypoint`` names one by its ``.yaml``; else the command it is, as a task.

    Raises:
        ConfigError: a task file that is not there, or what it or a flag says cannot be.
    """
    path = Path(entrypoint.strip()).expanduser()
    if path.suffix.lower() in _SUFFIXES and (path.is_file() or not any(map(str.isspace, entrypoint.strip()))):
        return load_tasks(path, overrides=overrides)
    return [load_command(entrypoint, overrides)]


def load_command(command: str, overrides: Overrides) -> Task:
    """A task that runs ``command``."""
    if not command.strip():
        raise ConfigError("there is nothing to run: give a task file, or a command such as 'echo hi'")
    return _load({"run": command}, Document("the command"), overrides)


def load_tasks(path: str | Path, *, overrides: Overrides) -> list[Task]:
    """The tasks of a file, in order; several documents are a pipeline, which may begin with a header.

    Raises:
        ConfigError: what the file or a flag says cannot be; the message names the line or the flag.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(_missing(file, str(path)))
    documents = read_documents(file, str(path))
    if not documents:
        raise ConfigError(f"{path} is empty: a task file says at least what to run, as in `run: echo hi`")
    pipeline = None
    first, document = documents[0]
    if (
        len(documents) > 1
        and isinstance(first, dict)
        and "name" in first
        and first.keys() <= _Header.model_fields.keys()
    ):
        header = check(_Header, first, document)
        if header.get("execution") == "parallel":
            why = "this version runs the tasks of a file one after the other (serial) only"
            raise document.error("execution", why=why)
        pipeline = header.get("name")
        del documents[0]
    if len(documents) == 1:
        task = _load(*documents[0], overrides)
        task.name = task.name or pipeline
        return [task]
    # A name on the command line is the pipeline's: its tasks keep their own.
    pipeline = overrides.name or pipeline
    tasks = [_load(config, each, replace(overrides, name=None)) for config, each in documents]
    for index, task in enumerate(tasks):
        task.name = task.name or (f"{pipeline}-{index}" if pipeline else None)
    return tasks


def _load(config: Any, document: Document, overrides: Overrides) -> Task:
    return Task.from_document(config, document, overrides.given(os.environ), overrides.of_task(), overrides.of_nodes())


def _missing(file: Path, shown: str) -> str:
    """What to say about a task file that is not there: what lies near it."""
    if file.is_dir():
        return f"{shown} is a folder: expected a task file"
    if file.is_symlink() and not file.exists():
        return f"{shown} is a broken link to {os.readlink(file)}"
    if file.exists():
        return f"{shown} is a pipe, a socket or a device: expected a task file"
    folder = file.parent
    if not folder.is_dir():
        return f"{shown}: there is no folder {folder}"
    others = sorted(each.name for each in folder.iterdir() if each.suffix.lower() in _SUFFIXES)
    near = nearest(file.name, others, os.path.dirname(shown)) or (
        f": {folder} holds {', '.join(others[:8])}" if others else ""
    )
    return f"there is no file {shown}{near}"
