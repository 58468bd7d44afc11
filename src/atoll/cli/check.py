"""``atoll check`` and ``atoll gpus``: what can be used from here, and what is missing. Imports are late."""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from atoll.cli import options, shown
from atoll.cli.environment import environment
from atoll.core.errors import AtollError, ConfigError
from atoll.core.exit_codes import ExitCode
from atoll.tasks.spec import ClusterSpec

_TOOLS = {"bash": "tasks' scripts need it", "git": "a workdir's .gitignore needs it", "ssh": "ssh hosts need it"}


@dataclass(frozen=True, slots=True)
class _Finding:
    infra: str
    ok: bool
    text: str


def register(app: typer.Typer) -> None:
    """Add the commands to ``atoll``."""
    app.command("check")(check)
    app.command("gpus")(gpus)


def check(
    infras: Annotated[
        list[str] | None, typer.Argument(metavar="[INFRA]...", help="local or ssh/NAME; all declared by default.")
    ] = None,
    output: options.Output = "table",
) -> None:
    """Show what jobs can run on, and what is missing. Each line that begins with ✗ says how to get it.

    \b
        atoll check
        atoll check ssh/lab
        atoll check local ssh/lab -o json

    ssh hosts are logged in to, asked what they have, and looked at as before a job: driver, disk, clock, the way
    from each to the head, an all-reduce. The exit code is 100 where something can't be used.
    """
    from atoll.providers.ssh.hosts import declared_groups

    as_json = options.as_json(output)
    found = [] if infras else [_Finding("atoll", True, line) for line in environment()]
    for infra in infras or ["local", *(f"ssh/{name}" for name in declared_groups())]:
        if infra == "local":
            found += _local()
        elif infra.startswith("ssh/"):
            found += _ssh(infra)
        else:
            meant = f": did you mean ssh/{infra}?" if infra in declared_groups() else ""
            raise ConfigError(f"{infra}: no such infra{meant or '; this version knows local and ssh/NAME'}")
    if as_json:
        shown.print_json([asdict(each) for each in found])
    else:
        for each in found:
            print(f"{shown.paint('✓', '32') if each.ok else shown.paint('✗', '31')} {each.infra}: {each.text}")
        if not infras and not any(each.infra.startswith("ssh/") for each in found):
            print('no ssh hosts are declared: [ssh.lab] hosts = ["user@gpu-1"] in config.toml under ATOLL_HOME')
    if not all(each.ok for each in found):
        raise typer.Exit(ExitCode.FAILED)


def _local() -> list[_Finding]:
    from atoll.providers.gpus import gpu_report
    from atoll.providers.local import isolation
    from atoll.providers.network import Network, NetworkUnavailable

    missing = [
        _Finding("local", False, f"{tool} is missing, and {why}: apt-get install {tool}")
        for tool, why in _TOOLS.items()
        if shutil.which(tool) is None
    ]
    own = isolation()
    if own.refused is None:
        lines = ["nodes have processes, host name and /tmp of their own"]
    else:
        shared = "processes" if own.command else "processes, host name and /tmp"
        lines = [f"nodes share {shared} with this machine: {own.refused}"]
    try:
        Network.start().close()
        lines.append("clusters have networks of their own: equal ports don't meet")
    except NetworkUnavailable as error:
        lines.append(f"clusters share this machine's network, jobs with equal ports queue: {error}")
    report = gpu_report()
    names = ", ".join(f"{gpu.name} ({gpu.memory_gb:.0f} GB)" for gpu in report.gpus)
    lines.append(f"GPUs: {names}" if names else f"no GPU ({report.reason}); they are simulated")
    return [*missing, *(_Finding("local", True, line) for line in lines)]


def _ssh(infra: str) -> list[_Finding]:
    """What each host says of itself, and then what the preflight before a job finds."""
    from concurrent.futures import ThreadPoolExecutor

    from atoll.providers.ssh import facts
    from atoll.providers.ssh.connection import connections
    from atoll.providers.ssh.hosts import Target, find_group

    try:
        targets = find_group(infra.partition("/")[2]).targets
    except ConfigError as error:
        return [_Finding(infra, False, str(error).removeprefix(f"{infra}: "))]

    def look(target: Target) -> _Finding:
        try:
            with connections.used([target]) as (login,):
                host = facts.ask(login, ())
        except AtollError as error:
            return _Finding(infra, False, str(error))
        cards = ", ".join(gpu.name for gpu in host.gpus) or host.gpu_problem or "no GPU"
        version = ".".join(map(str, host.python))
        return _Finding(infra, True, f"{target}: Python {version}, {host.cpus} cores, {cards}, reached at {host.addr}")

    try:
        with ThreadPoolExecutor(len(targets)) as threads:
            found = list(threads.map(look, targets))
        if all(each.ok for each in found):
            found += _preflight(infra, len(targets))
    finally:
        connections.close_idle()
    return found


def _preflight(infra: str, num_hosts: int) -> list[_Finding]:
    from atoll.gang.host_checks import check_hosts
    from atoll.tasks.ssh_clusters import place
    from atoll.tasks.ssh_nodes import plans_of, provider_of

    said: list[str] = []
    try:
        cluster, _ = place(ClusterSpec(name="check", infra=infra, num_nodes=num_hosts), ())
        check_hosts(provider_of(cluster).targets(), plans_of(cluster), said.append)
        refused = []
    except AtollError as error:
        refused = [_Finding(infra, False, str(error))]
    return [*(_Finding(infra, True, line) for line in said), *refused]


def gpus(
    place: Annotated[str | None, typer.Argument(metavar="[INFRA]", help="local, or ssh/NAME.")] = None,
    infra: Annotated[str, typer.Option(help="The same as a flag.")] = "local",
    output: options.Output = "table",
) -> None:
    """Show the GPUs that jobs can use, and who holds them.

    \b
        atoll gpus
        atoll gpus ssh/lab
    """
    if place is not None and place != "local" and not place.startswith("ssh/"):
        raise typer.BadParameter(f"{place}: expected local or ssh/NAME")
    infra = place or infra
    as_json = options.as_json(output)
    rows = _remote_gpus(infra) if infra.startswith("ssh/") else _local_gpus(infra, as_json)
    if as_json:
        shown.print_json(rows)
    elif rows:
        titles = [title for title in ("host", "index", "name", "memory_gb", "uuid", "held_by") if title in rows[0]]
        shown.print_table(
            [title.upper() for title in titles],
            [["" if row[title] is None else str(row[title]) for title in titles] for row in rows],
        )


def _local_gpus(infra: str, quiet: bool) -> list[dict[str, Any]]:
    from atoll.agent.leases import holders
    from atoll.providers.gpus import gpu_report

    if infra != "local":
        raise ConfigError(f"--infra {infra}: this version knows local and ssh/NAME")
    report = gpu_report()
    if not report.gpus and not quiet:
        print(f"no GPU: {report.reason}")
    held = holders(gpu.device for gpu in report.gpus)
    return [{**_row(gpu), "held_by": held.get(gpu.device)} for gpu in report.gpus]


def _row(gpu: Any) -> dict[str, Any]:
    return {"index": gpu.index, "uuid": gpu.uuid, "name": gpu.name, "memory_gb": gpu.memory_gb}


def _remote_gpus(infra: str) -> list[dict[str, Any]]:
    from atoll.providers.ssh import facts
    from atoll.providers.ssh.connection import connections, on_each
    from atoll.providers.ssh.hosts import find_group

    targets = find_group(infra.partition("/")[2]).targets
    try:
        with connections.used(targets) as logins:
            said = on_each(logins, lambda connection: facts.ask(connection, ()))
    finally:
        connections.close_idle()
    for host in said:
        if not host.gpus:
            shown.note(f"{host.target}: {host.gpu_problem or 'no GPU'}")
    return [{"host": str(host.target), **_row(gpu)} for host in said for gpu in host.gpus]
