"""``atoll train --infra ssh/NAME``: the current folder goes to the hosts, the ranks start in it, results stay there."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import posixpath
import re
import shlex
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from atoll.core.errors import ConfigError, ProvisionError
from atoll.core.paths import current_folder, user_name
from atoll.core.validation import command_line
from atoll.providers.accelerators import AcceleratorSpec
from atoll.providers.base import AcceleratorsLacking, NodeRequest, Plan, Provider
from atoll.providers.registry import resolve


@dataclass
class TrainHosts:
    """The hosts of one run.

    Attributes:
        provider: for the pool; ``plan``: what it has.
        folder: on each of them, where the ranks start.
        output_dir: the folder of the run there, once it is known.
    """

    provider: Provider
    plan: Plan
    folder: str
    output_dir: str | None

    def ask_to_stop(self, reason: str) -> None:
        """Make the file that rank 0 looks for.

        Raises:
            ProvisionError: the head can't be reached.
        """
        from atoll.train.stopping import STOP_FILE

        assert self.output_dir is not None
        path = posixpath.join(self.output_dir, STOP_FILE)
        head = self.provider.remote(self.plan.nodes[0])
        try:  # never seen without its reason
            head.check(
                f"cat > {shlex.quote(path)}.tmp && mv {shlex.quote(path)}.tmp {shlex.quote(path)}", reason.encode()
            )
        finally:
            head.close()

    def forget(self) -> None:
        """The run takes the file away itself, or the next one does."""

    @property
    def num_hosts(self) -> int:
        """As many nodes as there can be."""
        return self.provider.num_nodes

    @property
    def head(self) -> str:
        """The host of rank 0."""
        return self.plan.nodes[0].host

    def fetch_line(self, output_dir: str) -> tuple[str, str]:
        """What a person types to get the folder of a run here, and the folder it then is.

        Args:
            output_dir: on the hosts, relative to where the ranks started or absolute.
        """
        there = posixpath.join(self.folder, output_dir)
        inside = posixpath.relpath(there, self.folder)
        here = posixpath.basename(there) if inside.startswith("../") else inside
        into = posixpath.dirname(here) or "."
        copy = self.provider.copy_line(self.plan.nodes[0], there, into)
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

    provider = resolve(infra)
    wanted = None if gpus is None else AcceleratorSpec.parse(gpus)
    request = NodeRequest(
        num_nodes=nodes,
        accelerators=None if wanted is None else ((wanted.name, wanted.count),),
        workers_per_node="auto",
    )
    try:
        plan = provider.plan(request)
    except AcceleratorsLacking as error:
        raise ConfigError(f"--gpus {gpus} {error.why}; leave --gpus out to use what is there") from None
    source = Path(current_folder())
    _refuse_all_files(source)
    places = [posixpath.join(node.folder, "runs", _name_of(source)) for node in plan.nodes]
    if len(set(places)) > 1:
        raise ProvisionError(f"the hosts keep files in different places: {', '.join(sorted(set(places)))}")
    send_folder(source, provider, plan.nodes, places[0], leave_out=output_dir, say=say)
    known = posixpath.join(places[0], output_dir) if resume else None
    return TrainHosts(provider, plan, places[0], known)


def train_requirements() -> list[str]:
    """What ranks of a recipe need, as this Atoll declares it; installed on the hosts where they lack it."""
    found = importlib.metadata.requires("atoll") or []
    wanted = []
    for text in found:
        requirement, _, marker = text.partition(";")
        if not marker or re.search(r"extra\s*==\s*['\"]train['\"]", marker):
            wanted.append(requirement.strip())
    return wanted


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
