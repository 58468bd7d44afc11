"""``atoll train --infra X``: the run is a job of a cluster of its own; the events in its log feed the live panel."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import posixpath
import re
import secrets
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.cli import shown
from atoll.cli.output import CopyProgress, spinner
from atoll.core.errors import AtollError, ConfigError
from atoll.core.paths import current_folder
from atoll.core.validation import command_line
from atoll.providers import registry
from atoll.providers.base import DEFAULT, NodeRequest
from atoll.tasks.logs import prefix_of
from atoll.tasks.spec import ClusterSpec, ClusterStatus, JobSpec, JobStatus, Restarts

if TYPE_CHECKING:
    from atoll.tasks.jobs import Job
    from atoll.train.events import Event
    from atoll.train.recipe.load import Loaded

_NAME = re.compile(r"train-[0-9a-f]{6}")
_RANK = re.compile(rb"rank=(\d+)")
_SAVE_S = 600.0  # ranks have as long to save after Ctrl-C or a cancel
_EVENT, _RESULT = b'{"event": ', b'{"result": '  # how lines of the job's log begin that are no text


@dataclass(frozen=True)
class Training:
    """What a command line says of a run.

    Attributes:
        loaded: the recipe; ``recipe`` and ``overrides`` are how it was typed.
        nproc: ranks per node; None is one per GPU, otherwise one.
    """

    loaded: Loaded
    recipe: str | None
    overrides: list[str]
    infra: str = DEFAULT
    nodes: int = 1
    nproc: int | None = None
    gpus: str | None = None
    resume: bool = True
    allow_changes: bool = False


def is_training(cluster: str) -> bool:
    """Was a cluster made by ``atoll train``?"""
    return _NAME.fullmatch(cluster) is not None


@dataclass
class TrainJob:
    """A run on other machines.

    Attributes:
        job: the job.
        result: the fields of ``TrainResult``, once the run has ended.
        began: set once the run has told where its folder is: from then on it saves when it is asked to stop.
    """

    job: Job
    result: dict[str, Any] | None = None
    began: threading.Event = field(default_factory=threading.Event)

    def follow(self, show: Callable[[Event], None], *, follow: bool = True) -> JobStatus:
        """Show the run from its start to its end; returns how the job stands then."""
        rest = b""

        def write(data: bytes) -> None:
            nonlocal rest
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                prefix = prefix_of(line) or b""
                if prefix and line.startswith(_RESULT, len(prefix)):
                    self.result = json.loads(line[len(prefix) :])["result"]
                else:
                    show(self._event_of(line, prefix))

        return self.job.follow(write, follow=follow)

    def _event_of(self, line: bytes, prefix: bytes) -> Event:
        """What a line of the job's log says."""
        from atoll.train.events import Note, RunStarted, decode

        text = line[len(prefix) :]
        if prefix and text.startswith(_EVENT):
            with contextlib.suppress(ValueError, KeyError, TypeError):  # printed by somebody else
                event = decode(json.loads(text))
                if isinstance(event, RunStarted):
                    self.began.set()
                return event
        found = _RANK.search(prefix)
        whose = f"rank {found[1].decode()}: " if found else ""
        return Note(whose + text.decode(errors="replace"))

    def ask_to_stop(self, reason: str) -> None:
        """Have the ranks save and end.

        Raises:
            ProvisionError: the cluster can't be reached.
        """
        self.job.cancel()

    def forget(self) -> None:
        """Nothing is left of the question."""

    def end(self) -> None:
        """End the ranks at once."""
        self.job.cancel(signal.SIGKILL)

    @property
    def num_hosts(self) -> int:
        """Hosts that the infra has."""
        from atoll.tasks import clusters

        return registry.of(clusters.load(self.job.cluster).allocation).num_nodes

    def come_back(self) -> str:
        """What to type to see the run again, and to end it."""
        return shown.to_see(self.job.cluster, [self.job.id])

    def take_down(self) -> None:
        """Remove the cluster, whose job has ended; its log is kept."""
        from atoll.tasks import clusters, lifecycle

        with contextlib.suppress(AtollError, OSError):  # whoever looks next does it
            if clusters.load(self.job.cluster).status is not ClusterStatus.DOWN:
                lifecycle.down(self.job.cluster)

    def fetch_line(self, output_dir: str) -> tuple[str, str, str]:
        """The head, what a person types to get the folder of the run here, and the folder it then is.

        Args:
            output_dir: on the hosts, relative to where the ranks started or absolute.
        """
        from atoll.tasks import clusters
        from atoll.tasks.nodes import plan_of

        cluster = clusters.load(self.job.cluster)
        plan = plan_of(cluster).nodes[0]
        there = posixpath.join(plan.workdir, output_dir)
        inside = posixpath.relpath(there, plan.workdir)
        here = posixpath.basename(there) if inside.startswith("../") else inside
        into = posixpath.dirname(here) or "."
        copy = registry.of(cluster.allocation).copy_line(plan, there, into)
        line = copy if into == "." else f"{command_line('mkdir', '-p', into)} && {copy}"
        return cluster.allocation.head.name, line, here


def submit(asked: Training, say: Callable[[str], None]) -> TrainJob:
    """Launch a recipe as a job: the current folder goes to the hosts, the ranks start in it, results stay there.

    Args:
        say: called with a line for each thing the user should know.

    Raises:
        ConfigError: there are no such hosts, or too few, or one lacks the GPUs; the recipe can't be sent.
        ProvisionError: a host can't be used.
    """
    from atoll.tasks.launches import launch
    from atoll.tasks.requests import JobRequest, Options, accelerators_of, kept_files_in

    folder = Path(current_folder())
    flags = [*([] if asked.resume else ["--no-resume"]), *(["--allow-changes"] if asked.allow_changes else [])]
    words = [_sent_recipe(asked.recipe, folder), "--events", *flags, *asked.overrides]

    def make(cluster: ClusterSpec) -> tuple[JobSpec, Mapping[str, str]]:
        most = cluster.allocation.max_restarts
        return JobSpec(
            name=re.sub(r"[^a-zA-Z0-9]+", "-", asked.loaded.recipe.name).strip("-") or None,
            num_nodes=asked.nodes,
            command=("python3", "-u", "-m", "atoll.train", *words),
            num_processes=asked.nproc or max(1, cluster.num_accelerators),
            restarts=Restarts(on_lost_nodes=most if asked.resume else 0),  # a run that starts over would do so again
            workdir=True,
            save_s=_SAVE_S,
        ), {}

    request = JobRequest(
        resources=NodeRequest(
            num_nodes=asked.nodes,
            infra=asked.infra,
            accelerators=None if asked.gpus is None else accelerators_of(asked.gpus),
            files_in=kept_files_in(folder),
        ),
        make=make,
        workdir=str(folder),
        excluded=asked.loaded.recipe.train.output_dir,
        packages=_requirements(),
        name=asked.loaded.recipe.name,
    )
    how = Options(command="train", infra=asked.infra, down=True, say=say, progress=CopyProgress())
    with spinner(f"launching on {asked.infra}"):
        (job,) = launch([request], f"train-{secrets.token_hex(3)}", how)
    return TrainJob(job)


def _sent_recipe(recipe: str | None, folder: Path) -> str:
    """The recipe as hosts call it: a shipped one's name, or a file's path in the folder that they get."""
    recipe = recipe or os.environ["CONFIG_FILE"]
    path = Path(os.path.abspath(Path(folder, os.path.expanduser(recipe))))
    if not path.is_file():
        return recipe
    if not path.is_relative_to(os.path.abspath(folder)):
        raise ConfigError(
            f"{recipe} is outside the current folder, which is all that hosts get: start in a folder that has it"
        )
    return str(path.relative_to(os.path.abspath(folder)))


def _requirements() -> list[str]:
    """What ranks of a recipe need, as this Atoll declares it; installed on the hosts where they lack it."""
    wanted = []
    for text in importlib.metadata.requires("atoll") or []:
        requirement, _, marker = text.partition(";")
        if not marker or re.search(r"extra\s*==\s*['\"]train['\"]", marker):
            wanted.append(requirement.strip())
    return wanted
