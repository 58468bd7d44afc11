"""What ``atoll launch ENTRYPOINT --flags`` means: the tasks of a file, or one of a command, with the flags applied."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from atoll.core.errors import ConfigError
from atoll.core.validation import nearest
from atoll.tasks.resources import Resources, check_changes
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


# Flags of the command by name, as text or what they were parsed to, None where not given; they win over the file.
Flags = Mapping[str, Any]


def _variables(flags: Flags) -> Given:
    """The variables that the flags give."""
    return Given(
        gather("--env", flags.get("env") or (), flags.get("env_file") or (), os.environ),
        gather("--secret", flags.get("secret") or (), flags.get("secret_file") or (), os.environ),
    )


def _task_changes(flags: Flags) -> dict[str, Any]:
    """Keys of the task that the flags change."""
    git = {"url": flags.get("git_url"), "ref": flags.get("git_ref")}
    git = {key: value for key, value in git.items() if value is not None}
    if git and flags.get("workdir") is not None:
        raise ConfigError("--workdir and --git-url both say where the workdir comes from: give one of them")
    changes = {"name": flags.get("name"), "num_nodes": flags.get("num_nodes"), "workdir": git or flags.get("workdir")}
    return check(TaskSection, changes, _FLAGS)


def _node_changes(flags: Flags) -> dict[str, Any]:
    """Keys of the resources that the flags change; None, which a flag says as ``none``, takes one away."""
    said = {key: value for key, value in flags.items() if key in Resources.model_fields and value is not None}
    none = {key for key, value in said.items() if isinstance(value, str) and value.strip().lower() == "none"}
    none |= {key for key in ("accelerators",) if is_none(said.get(key))}
    return check_changes({key: None if key in none else value for key, value in said.items()}, _FLAGS)


def load_entrypoint(entrypoint: str, flags: Flags) -> list[Task]:
    """The tasks of a file, where ``entrypoint`` names one by its ``.yaml``; else the command it is, as a task.

    Raises:
        ConfigError: a task file that is not there, or what it or a flag says cannot be.
    """
    path = Path(entrypoint.strip()).expanduser()
    if path.suffix.lower() in _SUFFIXES and (path.is_file() or not any(map(str.isspace, entrypoint.strip()))):
        return load_tasks(path, flags)
    return [load_command(entrypoint, flags)]


def load_command(command: str, flags: Flags) -> Task:
    """A task that runs ``command``."""
    if not command.strip():
        raise ConfigError("there is nothing to run: give a task file, or a command such as 'echo hi'")
    return _load({"run": command}, Document("the command"), flags)


def load_tasks(path: str | Path, flags: Flags) -> list[Task]:
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
        task = _load(*documents[0], flags)
        task.name = task.name or pipeline
        return [task]
    # A name on the command line is the pipeline's: its tasks keep their own.
    pipeline = flags.get("name") or pipeline
    tasks = [_load(config, each, {**flags, "name": None}) for config, each in documents]
    for index, task in enumerate(tasks):
        task.name = task.name or (f"{pipeline}-{index}" if pipeline else None)
    return tasks


def _load(config: Any, document: Document, flags: Flags) -> Task:
    return Task.from_document(config, document, _variables(flags), _task_changes(flags), _node_changes(flags))


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
