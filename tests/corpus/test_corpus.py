"""Kinds of task files and scripts that people have, each with what it should do.

A case is a file below ``tasks`` or ``scripts``. Its lines that begin with ``#>`` are TOML and say what is expected:

- ``[[task]]``: attributes of each task that is read, or keys of its ``resources``; ``notes`` are all remarks on it.
- ``error``: how the message that refuses the file begins, after its name.
- ``[flags]``: ``Flags``. ``[files]``: files that lie where the command is typed.
- ``[run]``: it is run. ``flags`` of ``atoll run``, ``script`` with its arguments where it isn't the file's name alone,
  or the ``python`` that is called with it; its ``code``, ``lines`` that are printed (each so often as it is listed),
  text that is ``said`` somewhere or ``absent``, whether there is a ``traceback``.
  ``long``: too slow for every ``make test``.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from tests.cli.test_cluster_commands import home
from tests.pools import SOURCE_ROOT

from atoll.core.errors import ConfigError
from atoll.tasks.entrypoint import load_tasks
from atoll.tasks.task import Task

__all__ = ["home"]

FOLDER = Path(__file__).parent
ATOLL = ["-c", "from atoll.cli.main import main; main()"]


def expected(path: Path) -> dict[str, Any]:
    lines = [line.lstrip("\ufeff") for line in path.read_text(errors="replace").splitlines()]
    return tomllib.loads("\n".join(line[2:].removeprefix(" ") for line in lines if line.startswith("#>")))


def cases(pattern: str, key: str | None = None) -> list[Any]:
    """Files of the corpus, or those of them that say something under ``key``."""
    found = []
    for path in sorted(FOLDER.glob(pattern)):
        said = expected(path)
        if key is None or key in said:
            marks = [pytest.mark.long] if key and said[key].get("long") else []
            found.append(pytest.param(path, id=path.stem, marks=marks))
    return found


def attribute(task: Task, name: str) -> Any:
    if name == "notes":
        return task.notes_for("local")
    if name == "fixed_ports":
        return list(task.job(infra="local")[0].ports)
    if name == "choices":  # in the order of preference
        return [str(kind) for each in task.resources.choices() for kind in each.requested]
    if name == "mounts":
        return task.resolved_mounts()
    if name == "workdir":
        return task.resolved_workdir()
    value = getattr(task, name, getattr(task.resources, name, task.resources.config.get(name)))
    if dataclasses.is_dataclass(value):
        value = {key: plain(each) for key, each in dataclasses.asdict(value).items()}
    if isinstance(value, BaseModel):
        value = value.model_dump()
    return plain(value)


def plain(value: Any) -> Any:
    """As TOML writes it, which has no null."""
    return list(value) if isinstance(value, tuple) else "null" if value is None else value


def read(path: Path, said: dict[str, Any]) -> list[Task]:
    return load_tasks(path, said.get("flags", {}))


@pytest.mark.parametrize("path", cases("tasks/*.yaml"))
def test_a_task_file_is_read(path: Path) -> None:
    said = expected(path)
    if "error" in said:
        with pytest.raises(ConfigError) as caught:
            read(path, said)
        message = str(caught.value).removeprefix(str(path))
        assert message.startswith(said["error"]), message
        return
    tasks = read(path, said)
    assert len(tasks) == len(said["task"])
    for task, wanted in zip(tasks, said["task"], strict=True):
        wanted = {"notes": [], **wanted}
        got = {name: attribute(task, name) for name in wanted}
        got["notes"] = [line.removeprefix(f"{path}:") for line in got["notes"]]
        assert got == wanted


@pytest.mark.parametrize("path", cases("tasks/*.yaml", "run"))
def test_a_task_file_runs(path: Path, tmp_path: Path) -> None:
    said = expected(path)
    flags = [f"--{name}={value}" for name, values in said.get("flags", {}).items() for value in values]
    check(said, tmp_path, *ATOLL, "launch", "-c", "c", *flags, str(path))


@pytest.mark.parametrize("path", cases("scripts/*.py", "run"))
def test_a_script_runs(path: Path, tmp_path: Path) -> None:
    said = expected(path)
    (tmp_path / path.name).write_bytes(path.read_bytes())
    program = [] if said["run"].get("python") else [*ATOLL, "run", *said["run"].get("flags", [])]
    check(said, tmp_path, *program, *said["run"].get("script", [path.name]))


def check(said: dict[str, Any], folder: Path, *arguments: str) -> None:
    """Run Python in ``folder``: does it print and end as the case says?"""
    for name, text in said.get("files", {}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": SOURCE_ROOT},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=100,
    )
    out = done.stdout.decode(errors="replace")
    wanted = said["run"]
    assert done.returncode == wanted.get("code", 0), out
    assert "Traceback" not in out or wanted.get("traceback"), out
    printed = Counter(without_prefix(line) for line in out.splitlines())
    for text in wanted.get("said", []):
        assert text in out, out
    for line, times in Counter(wanted["lines"]).items():
        assert printed[line] == times, f"{line!r}, {times} times, in:\n{out}"
    for text in wanted.get("absent", []):
        assert text not in out, out


def without_prefix(line: str) -> str:
    """A line of a log without the node and rank before it."""
    return line.partition(") ")[2] if line.startswith("(") else line
