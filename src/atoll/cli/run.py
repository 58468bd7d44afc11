"""``atoll run``: what ``torchrun`` does, on any infra. Imports are late."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import secrets as secrets_module
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from atoll.cli import shown
from atoll.core.errors import AtollError, ConfigError
from atoll.core.hints import nearest
from atoll.pool.interpreters import user_python
from atoll.tasks.spec import ClusterSpec, JobSpec, Restarts

# torchrun's flags that have nothing left to say here, and why; each is accepted and answered with one line.
_MET = "Atoll gives ranks their rendezvous itself"
_KEPT = "the output of every rank is shown and kept; `atoll logs` has it"
_NOT_NEEDED = {
    "rdzv-backend": _MET,
    "rdzv-endpoint": _MET,
    "rdzv-conf": _MET,
    "node-rank": _MET,
    "master-addr": _MET,
    "local-addr": _MET,
    "monitor-interval": "the end of a rank is noticed at once",
    "start-method": "ranks are started by exec",
    "event-log-handler": "events are in the job's store",
    "role": "every rank has the role `default`",
    "log-dir": _KEPT,
    "redirects": _KEPT,
    "tee": _KEPT,
    "logs-specs": _KEPT,
    "duplicate-stdout-filters": _KEPT,
    "duplicate-stderr-filters": _KEPT,
    "numa-binding": "ranks are not bound to cores",
    "signals-to-handle": "SIGINT, SIGTERM and SIGHUP end the ranks",
    "shutdown-timeout": "ranks get 2 s between SIGTERM and SIGKILL",
}
_SHORT = {"-r": "redirects", "-t": "tee"}


class RunCommand(TyperCommand):
    """Options end at the script: what follows is the script's own. Knows whether ``--`` stood before it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take torchrun's flags that are not needed out, then read what is left."""
        flags = {name for param in self.params if getattr(param, "is_flag", False) for name in param.opts}
        own, notes = [], []
        waiting = iter(args)
        script: list[str] = []
        for word in waiting:
            name, equals, value = word.partition("=")
            plain = _SHORT.get(name, name.removeprefix("--").replace("_", "-"))
            if word == "--" or not word.startswith("-"):
                script = [word, *waiting]
            elif plain in _NOT_NEEDED and name.startswith("-"):
                value = value if equals else next(waiting, "")
                notes.append(f"--{plain} {value} is not needed: {_NOT_NEEDED[plain]}")
            else:
                own += [word] if equals or name in flags else [word, *itertools.islice(waiting, 1)]
        ctx.meta["atoll.notes"] = notes
        ctx.meta["atoll.command"] = script[:1] == ["--"]
        return super().parse_args(ctx, [*own, *script])


def register(app: typer.Typer) -> None:
    """Add the command to ``atoll``."""
    settings = {"allow_interspersed_args": False, "allow_extra_args": True}
    app.command("run", cls=RunCommand, context_settings=settings)(run)


def run(
    context: typer.Context,
    script: Annotated[
        list[str] | None, typer.Argument(help="A script and its arguments; or after -- any command, once a node.")
    ] = None,
    nodes: Annotated[
        str, typer.Option("--nodes", "--num-nodes", "--nnodes", "--num_nodes", help="Nodes, as many as that.")
    ] = "1",
    nproc: Annotated[
        str,
        typer.Option(
            "--nproc-per-node", "--nproc_per_node", "--nproc", help="Ranks a node: a number, gpu, cpu, or auto."
        ),
    ] = "auto",
    infra: Annotated[str, typer.Option(help="Where: local, or ssh/NAME.")] = "local",
    gpus: Annotated[
        str | None, typer.Option("--gpus", "--accelerators", help="Of each node: L4:2. Simulated where there are none.")
    ] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module, as in `python -m`.")] = False,
    no_python: Annotated[
        bool, typer.Option("--no-python", "--no_python", help="SCRIPT is a program of its own.")
    ] = False,
    run_path: Annotated[bool, typer.Option("--run-path", "--run_path", hidden=True)] = False,
    standalone: Annotated[bool, typer.Option("--standalone", hidden=True)] = False,
    virtual_local_rank: Annotated[
        bool, typer.Option("--virtual-local-rank", "--virtual_local_rank", hidden=True)
    ] = False,
    max_restarts: Annotated[
        int, typer.Option("--max-restarts", "--max_restarts", min=0, help="Start all ranks again so often.")
    ] = 0,
    rdzv_id: Annotated[str | None, typer.Option("--rdzv-id", "--rdzv_id", hidden=True)] = None,
    master_port: Annotated[
        int | None, typer.Option("--master-port", "--master_port", min=1, max=65535, help="Else a free one.")
    ] = None,
    local_ranks: Annotated[
        str | None, typer.Option("--local-ranks-filter", "--local_ranks_filter", help="Show these only: 0,1.")
    ] = None,
    env: Annotated[list[str] | None, typer.Option("--env", help="K=V, or K to pass yours on.")] = None,
    secret: Annotated[list[str] | None, typer.Option("--secret", help="The same, never shown.")] = None,
    workdir: Annotated[
        str | None, typer.Option("--workdir", help="Folder that goes to ssh hosts; the current one by default.")
    ] = None,
) -> None:
    """Run a script on every rank, as torchrun does, on any infra. Ctrl-C ends the ranks.

    \b
        atoll run --nodes 2 --nproc 2 train.py --lr 0.1
        atoll run --infra ssh/lab --nodes 2 --nproc gpu train.py
        atoll run --nodes 2 -m package.train
        atoll run --nodes 4 -- bash -c 'echo node $SKYPILOT_NODE_RANK'
    """
    words = [*(script or ()), *context.args]
    if not words:
        raise typer.BadParameter("name a script: atoll run --nodes 2 train.py; or a command after --")
    if virtual_local_rank:
        raise ConfigError(
            "--virtual-local-rank is not supported: ranks see all GPUs of their node, and LOCAL_RANK is theirs"
        )
    for line in context.meta.get("atoll.notes", ()):
        shown.note(f"atoll: {line}")
    once_a_node = context.meta["atoll.command"]
    if once_a_node:
        kind = "command"
    elif run_path:
        kind = "script"
    else:
        kind = "program" if no_python else "module" if module else "script"
    wish = _Wish(kind, words, _num_nodes(nodes), "1" if once_a_node else nproc, infra, gpus, workdir)
    prepared = wish.prepare()
    variables, secrets = _variables(env, secret)
    spec = dataclasses.replace(
        prepared.spec,
        env=variables,
        restarts=Restarts(on_errors=max_restarts, on_lost_nodes=max_restarts),
        run_id=rdzv_id,
        master_port=master_port,
        owner_pid=os.getpid(),
    )
    raise typer.Exit(_run(prepared.cluster, spec, secrets, _ranks(local_ranks, spec)))


def _num_nodes(text: str) -> int:
    least, colon, most = text.partition(":")
    if not least.isdigit() or int(least) < 1 or (colon and not most.isdigit()):
        raise ConfigError(f"--nodes {text}: expected a number, 1 or more")
    if colon and most != least:
        shown.note(f"atoll: --nodes {text}: a run has a fixed size here, {most} nodes are used")
    return int(most) if colon else int(least)


def _variables(env: Sequence[str] | None, secret: Sequence[str] | None) -> tuple[dict[str, str], dict[str, str]]:
    from atoll.tasks.variables import gather

    return gather("--env", env or (), (), os.environ), gather("--secret", secret or (), (), os.environ)


def _ranks(text: str | None, spec: JobSpec) -> int | None:
    if text is None:
        return None
    if not text.isdigit() or int(text) >= spec.num_processes * spec.num_nodes:
        raise ConfigError(f"--local-ranks-filter {text}: expected one rank, 0 to {spec.num_processes - 1}")
    return int(text)


@dataclasses.dataclass(frozen=True)
class _Prepared:
    cluster: ClusterSpec
    spec: JobSpec


@dataclasses.dataclass(frozen=True)
class _Wish:
    """What is to be run, and where."""

    kind: str  # script, module, program, command
    words: Sequence[str]
    num_nodes: int
    nproc: str
    infra: str
    gpus: str | None
    workdir: str | None

    def prepare(self) -> _Prepared:
        """The cluster it will run on, and the job. On ssh hosts the workdir is sent there.

        Raises:
            ConfigError, ProvisionError: it can't be run.
        """
        from atoll.providers.accelerators import AcceleratorSpec
        from atoll.tasks import clusters
        from atoll.tasks.clusters import Wish

        local = self.infra == "local"
        if local and self.kind == "script":
            _check_script(self.words[0])
        accelerator = AcceleratorSpec.parse(self.gpus)
        wanted = ((accelerator.name, accelerator.count),) if accelerator is not None else ()
        wish = Wish(num_nodes=self.num_nodes, infra=self.infra, accelerators=wanted)
        name = f"run-{secrets_module.token_hex(3)}"
        decision = clusters.decide(name, None, wish)
        for line in decision.lines:
            shown.note(f"atoll: {line}")
        cluster, base = decision.cluster, dict(os.environ) if local else {}
        python = user_python() if local else str(cluster.ssh.get("python") or "python3")
        before = {"script": [python, "-u"], "module": [python, "-u", "-m"]}.get(self.kind, [])
        num_gpus = cluster.num_accelerators or (_num_local_gpus() // self.num_nodes if local else 0)
        spec = JobSpec(
            name=None,
            num_nodes=self.num_nodes,
            command=(*before, *self.words),
            num_processes=_num_processes(self.nproc, num_gpus),
            accelerator=cluster.accelerator,
            num_accelerators=cluster.num_accelerators,
            simulated=cluster.simulated,
            workdir=not local,
            inherit_env=local,
            base_env=base,
            cwd=os.getcwd() if local else None,
        )
        return _Prepared(cluster, spec)


def _check_script(path: str) -> None:
    if not os.path.isfile(path):
        folder = os.path.dirname(path) or "."
        near = nearest(os.path.basename(path), os.listdir(folder)) if os.path.isdir(folder) else ""
        raise ConfigError(f"{path}: no such script{near}; a module is run with -m, any command after --")


def _num_local_gpus() -> int:
    from atoll.providers.gpus import local_gpus

    return len(local_gpus())


def _num_processes(text: str, num_gpus: int) -> int:
    if text == "auto":
        return max(1, num_gpus)
    if text == "cpu":
        return len(os.sched_getaffinity(0))
    if text == "gpu":
        if not num_gpus:
            raise ConfigError("--nproc-per-node gpu: no GPU here; give a number, or --gpus L4:2 to simulate two")
        return num_gpus
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"--nproc-per-node {text}: expected a number, gpu, cpu or auto")
    return int(text)


def _run(cluster: ClusterSpec, spec: JobSpec, secrets: Mapping[str, str], rank: int | None) -> int:
    """Run the job on a cluster of its own, show it, and leave nothing but its log."""
    from atoll.tasks import api, clusters

    with clusters.locked(cluster.name):
        clusters.save(cluster)
        job = api.Job(cluster.name, clusters.control_of(cluster).submit(spec, secrets))
    writer = shown.LogWriter(sys.stdout)
    try:
        try:
            status = job.follow(writer, rank=rank)
        except KeyboardInterrupt:
            job.cancel()
            status = job.follow(writer, tail=1)
        writer.close()
    finally:
        with contextlib.suppress(AtollError):
            clusters.down(cluster.name)
    if status.exit_code:
        shown.note(f"atoll: the whole log: atoll logs {cluster.name}")
    return status.exit_code
