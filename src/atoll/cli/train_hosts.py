"""``atoll train --infra ssh/NAME``: the current folder goes to the hosts, the ranks start in it, results stay there."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import posixpath
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from atoll.core.errors import ConfigError, ProvisionError
from atoll.core.paths import current_folder, user_name
from atoll.core.validation import command_line, nearest
from atoll.providers.accelerators import AcceleratorSpec
from atoll.providers.remote import RemotePlan
from atoll.providers.ssh.connection import connections
from atoll.providers.ssh.facts import python_command
from atoll.providers.ssh.hosts import Group, Target, declared_groups, find_group
from atoll.providers.ssh.provider import SSH, AcceleratorsLacking

# Never seen without its reason.
_WRITE = "import os, sys; p = sys.argv[1]; open(p + '.tmp', 'w').write(sys.argv[2]); os.replace(p + '.tmp', p)"


@dataclass
class TrainHosts:
    """The hosts of one run.

    Attributes:
        provider: for the pool.
        folder: on each of them, where the ranks start.
        output_dir: the folder of the run there, once it is known.
    """

    provider: SSH
    folder: str
    output_dir: str | None
    _plans: list[RemotePlan]
    _targets: tuple[Target, ...]

    def ask_to_stop(self, reason: str) -> None:
        """Make the file that rank 0 looks for.

        Raises:
            ProvisionError: the head can't be reached.
        """
        from atoll.train.stopping import STOP_FILE

        assert self.output_dir is not None
        path = posixpath.join(self.output_dir, STOP_FILE)
        head = connections.hold(self._targets[0])
        try:
            answer = head.run(python_command(self._plans[0].python, _WRITE, path, reason))
        finally:
            connections.release(self._targets[0])
        if answer.returncode != 0:
            raise ProvisionError(f"{self._targets[0]}: {path} could not be written")

    def forget(self) -> None:
        """The run takes the file away itself, or the next one does."""

    @property
    def num_hosts(self) -> int:
        """As many nodes as there can be."""
        return self.provider.num_nodes

    @property
    def head(self) -> str:
        """The host of rank 0."""
        return str(self._targets[0])

    def fetch_line(self, output_dir: str) -> tuple[str, str]:
        """What a person types to get the folder of a run here, and the folder it then is.

        Args:
            output_dir: on the hosts, relative to where the ranks started or absolute.
        """
        there = posixpath.join(self.folder, output_dir)
        inside = posixpath.relpath(there, self.folder)
        here = posixpath.basename(there) if inside.startswith("../") else inside
        target = self._targets[0]
        port = ["-P", str(target.port)] if target.port is not None else []
        options = [*port, *(option for option in target.options if option not in ("-p", str(target.port)))]
        into = posixpath.dirname(here) or "."
        copy = command_line("scp", "-r", *options, f"{target.host}:{there}", into)
        return (copy if into == "." else f"{command_line('mkdir', '-p', into)} && {copy}"), here


def make_ready(
    infra: str, nodes: int, gpus: str | None, output_dir: str, *, resume: bool, say: Callable[[str], object]
) -> TrainHosts:
    """Find the hosts and send them the current folder, as git would list it, without what runs wrote.

    Args:
        infra: ``ssh/NAME``.
        gpus: of each node; None for what is there.
        output_dir: of the recipe.
        resume: whether that is the folder of the run; else one beside it, which rank 0 chooses.
        say: called with a line for each thing the user should know.

    Raises:
        ConfigError: there are no such hosts, or too few, or one lacks the GPUs.
        ProvisionError: one can't be used.
    """
    from atoll.tasks.sync.host_disks import send_folder

    group = _group(infra, nodes)
    one = group.targets[0]
    provider = SSH(
        hosts=[str(target) for target in group.targets],
        key=one.key,
        jump=one.jump,
        python=one.python,
        grace_s=group.grace_s,
    )
    targets = provider.targets()[:nodes]
    wanted = None if gpus is None else AcceleratorSpec.parse(gpus)
    try:
        planned = provider.plan(nodes=nodes, accelerator=wanted, workers_per_node="auto")
    except AcceleratorsLacking as error:
        raise ConfigError(f"--gpus {gpus} {error.why}; leave --gpus out to use what is there") from None
    plans = [plan for plan in planned.nodes if isinstance(plan, RemotePlan)]
    source = Path(current_folder())
    _refuse_all_files(source)
    places = [posixpath.join(plan.folder, "runs", _name_of(source)) for plan in plans]
    if len(set(places)) > 1:
        raise ProvisionError(f"the hosts keep files in different places: {', '.join(sorted(set(places)))}")
    send_folder(source, targets, plans, places[0], leave_out=output_dir, say=say)
    known = posixpath.join(places[0], output_dir) if resume else None
    return TrainHosts(provider, places[0], known, plans, targets)


def train_requirements() -> list[str]:
    """What ranks of a recipe need, as this Atoll declares it; installed on the hosts where they lack it."""
    found = importlib.metadata.requires("atoll") or []
    wanted = []
    for text in found:
        requirement, _, marker = text.partition(";")
        if not marker or re.search(r"extra\s*==\s*['\"]train['\"]", marker):
            wanted.append(requirement.strip())
    return wanted


def _group(infra: str, nodes: int) -> Group:
    kind, _, name = infra.partition("/")
    if kind != "ssh" or not name:
        known = ["local", *(f"ssh/{each}" for each in declared_groups())]
        raise ConfigError(f"--infra {infra}: expected local or ssh/NAME{nearest(infra, known)}")
    group = find_group(name)
    if nodes > len(group.targets):
        hosts = ", ".join(map(str, group.targets))
        raise ConfigError(
            f"--num-nodes {nodes}: {infra} has {len(group.targets)} ({hosts}); declare more hosts, or take fewer nodes"
        )
    return group


def _refuse_all_files(source: Path) -> None:
    if source in (Path("/"), Path.home()):
        raise ConfigError(
            f"the current folder goes to the hosts, and this is {source}: start in the folder of your project"
        )


def _name_of(source: Path) -> str:
    """The same for the same folder of the same user and machine, so that the same command goes on."""
    who = f"{user_name()}@{socket.gethostname()}:{os.path.realpath(source)}"
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", source.name) or "run"
    return f"{plain}-{hashlib.sha256(who.encode()).hexdigest()[:8]}"
