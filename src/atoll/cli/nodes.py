"""``atoll ssh`` and ``atoll cp``: into a cluster's nodes, and files to and from them. Imports are late."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from atoll.cli import options, shown
from atoll.cli.output import spinner
from atoll.core.errors import ConfigError, ProvisionError
from atoll.tasks.spec import ClusterSpec, node_name

if TYPE_CHECKING:
    from atoll.tasks.forwarding import Forward

# Of a running job's process, what a shell on its node gets too.
_OF_NODE = ("HOME", "TMPDIR", "HOSTNAME", "NCCL_HOSTID", "CUDA_VISIBLE_DEVICES", "ATOLL_SIMULATED")
_NAMESPACES = {"user": "-U", "mnt": "-m", "pid": "-p", "net": "-n", "uts": "-u", "ipc": "-i"}


def register(app: typer.Typer) -> None:
    """Add the commands to ``atoll``."""
    app.command("ssh")(ssh)
    app.command("cp")(cp)


def ssh(
    name: Annotated[str, typer.Argument(metavar="CLUSTER[/NODE]", help="The head by default; train/worker1.")],
    command: Annotated[
        list[str] | None, typer.Argument(metavar="COMMAND", help="After --: run this instead of a shell.")
    ] = None,
    forwards: Annotated[
        list[str] | None,
        typer.Option("-L", help="Forward a local PORT to the node.", metavar="PORT[:HOST:PORT]"),
    ] = None,
) -> None:
    """Open a shell on a node, or run a command there. Both run beside its job.

    \b
        atoll ssh train
        atoll ssh train/worker1 -- nvidia-smi
        atoll ssh train -- 'ls sky_workdir | wc -l'
        atoll ssh train -L 6006
    """
    from atoll.providers import registry
    from atoll.tasks.forwarding import Forward

    cluster, node = _node(name)
    wanted = [Forward.parse(each) for each in forwards or ()]
    words = list(command or ())
    if not cluster.allocation.shares_machine:
        tunnels = [part for each in wanted for part in ("-L", f"{each.port}:{each.host}:{each.host_port}")]
        line = words if len(words) < 2 else [shlex.join(words)]
        _become(registry.of(cluster.allocation).login_command(cluster.allocation, node, tunnels, line))
    from atoll.tasks import clusters

    home = clusters.node_home(cluster.name, node)
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    pid = _process_of(home)
    # A single word is the shell's to read, as with ssh: 'echo a | wc -c' is a command.
    shell = ["sh", "-c", *words] if len(words) == 1 else words or [os.environ.get("SHELL") or "bash"]
    env = {**os.environ, "HOME": str(home), **_environment(pid)}
    _forward(wanted, _enter(pid, only=("user", "net")))
    # Inside, the home is where it is outside; a namespace of mounts would otherwise begin at its root.
    _become([*_enter(pid), "bash", "-c", 'cd && exec "$@"', "atoll", *shell], env)


def cp(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="Path, or CLUSTER:PATH; CLUSTER/worker1:PATH for another node.")
    ],
    dest: Annotated[
        str, typer.Argument(metavar="DEST", help="The same; a relative path on a node counts from its home.")
    ],
    output: options.Output = "table",
) -> None:
    """Copy a file or a folder to or from a node.

    \b
        atoll cp train:sky_workdir/model.pt .
        atoll cp train/worker1:logs worker1-logs
        atoll cp data.txt train:data/
    """
    as_json = options.as_json(output)
    there, here = _remote(source), _remote(dest)
    if (there is None) == (here is None):
        raise ConfigError(f"cp {source} {dest}: expected one of the two on a node, as in train:sky_workdir/model.pt .")
    cluster, node, path = there or here or ("", 0, "")
    spec, number = _node(f"{cluster}/{node}")
    if not spec.allocation.shares_machine:
        path = _on_host(spec, number, path)
        if there:
            made = Path(dest, os.path.basename(path.rstrip("/"))) if Path(dest).is_dir() else Path(dest)
            copied = _copy_over(spec, number, path, dest, made, said=source)
        elif not Path(source).exists():
            raise ConfigError(f"{source}: there is no such file or folder")
        else:
            copied = _copy_over(spec, number, path, source, Path(source), said=dest, up=True)
    else:
        local, into = _on_node(spec, number, path), path.endswith("/")
        copied = _copy(local, Path(dest), source) if there else _copy(Path(source), local, source, into=into)
    if as_json:
        shown.print_json({"source": source, "dest": dest, "copied": copied})
    else:
        print(f"{source} → {dest}: {copied}")


# ----------------------------------------------------------------------------------------------------- inside
def _node(text: str) -> tuple[ClusterSpec, int]:
    """The cluster and node of ``train`` or ``train/worker1``."""
    from atoll.tasks import clusters

    name, _, node = text.partition("/")
    cluster = clusters.up_or_stopped(name)
    return cluster, clusters.node_of(cluster, node or node_name(0))


def _remote(text: str) -> tuple[str, str, str] | None:
    """Cluster, node and path of ``train/worker1:path``; None for a path of this machine."""
    where, colon, path = text.partition(":")
    if not colon or where in ("", ".", "..") or where.startswith(("/", "./", "../", "~")) or where.count("/") > 1:
        return None
    name, _, node = where.partition("/")
    return name, node or node_name(0), path


def _on_host(cluster: ClusterSpec, node: int, path: str) -> str:
    """Where a host has ``path``: its workdir is that of this cluster, whichever one ``~/sky_workdir`` is."""
    from atoll.providers.base import WORKDIR
    from atoll.tasks.sync import host_files

    first, slash, rest = path.removeprefix("~/").partition("/")
    return host_files.workdir_on(cluster, node) + slash + rest if first == WORKDIR else path


def _on_node(cluster: ClusterSpec, node: int, path: str) -> Path:
    """Where a local node has ``path``; it begins at the node's home."""
    from atoll.tasks import clusters
    from atoll.tasks.sync.receive import MOUNTS

    inner = path.removeprefix("~/") if path != "~" else ""
    if inner == "/tmp" or inner.startswith("/tmp/"):
        raise ConfigError(f"{path}: a node's /tmp goes with its job; have the job write below ~ what is to be copied")
    home = clusters.node_home(cluster.name, node)
    mounted = home / MOUNTS / inner.lstrip("/")
    return mounted if inner.startswith("/") and mounted.exists() else home / inner


def _copy(source: Path, dest: Path, said: str, *, into: bool = False) -> str:
    """Copy a file or a folder, into ``dest`` where that is a folder; says what was copied."""
    if not source.exists():
        raise ConfigError(f"{said}: there is no such file or folder")
    if into or dest.is_dir():
        dest = dest / source.resolve().name
    try:
        dest.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, dest, symlinks=True, dirs_exist_ok=True)
        else:
            shutil.copy2(source, dest)
        return _size_of(dest)
    except (OSError, shutil.Error) as error:
        raise ConfigError(f"{said} can't be copied to {dest}: {error}") from None


def _copy_over(
    cluster: ClusterSpec, node: int, path: str, here: str, made: Path, *, said: str, up: bool = False
) -> str:
    """Copy from a node elsewhere, or ``up`` to it; ``made`` is the end on this machine. Says what was copied."""
    from atoll.providers import registry

    source, dest = (here, said) if up else (said, here)
    why = registry.of(cluster.allocation).copy(cluster.allocation, node, path, here, up=up)
    if why:
        raise ProvisionError(f"{source} can't be copied to {dest}: {why}")
    return _size_of(made)


def _size_of(path: Path) -> str:
    """``3 files`` of a folder, ``1 byte`` of a file."""
    num, what = (
        (sum(each.is_file() for each in path.rglob("*")), "file") if path.is_dir() else (path.stat().st_size, "byte")
    )
    return f"{num} {what}{'s' if num != 1 else ''}"


def _process_of(home: Path) -> int | None:
    """A process of a job that runs on the node with this home, or None."""
    wanted = f"HOME={home}".encode()
    for name in sorted((each for each in os.listdir("/proc") if each.isdigit()), key=int):
        with contextlib.suppress(OSError):  # gone, or somebody else's
            if int(name) != os.getpid() and wanted in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                return int(name)
    return None


def _environment(pid: int | None) -> dict[str, str]:
    """The variables of a job's process that say where it runs."""
    if pid is None:
        return {}
    pairs = (each.partition("=") for each in os.fsdecode(Path(f"/proc/{pid}/environ").read_bytes()).split("\0"))
    return {name: value for name, _, value in pairs if name in _OF_NODE or name.startswith("SKYPILOT_")}


def _enter(pid: int | None, only: Sequence[str] = tuple(_NAMESPACES)) -> list[str]:
    """The command that enters the namespaces of ``pid``; empty if it has none of its own, or they can't be entered."""
    nsenter = shutil.which("nsenter")
    if pid is None or nsenter is None:
        return []
    flags = [flag for kind, flag in _NAMESPACES.items() if kind in only and _differs(pid, kind)]
    if "-U" in flags:
        flags.append("--preserve-credentials")
    command = [nsenter, "-t", str(pid), *flags, "--"]
    if not flags or subprocess.run([*command, "true"], capture_output=True, stdin=subprocess.DEVNULL).returncode:
        return []
    return command


def _differs(pid: int, kind: str) -> bool:
    return os.readlink(f"/proc/{pid}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}")


def _forward(forwards: Sequence[Forward], enter: Sequence[str]) -> None:
    """Carry connections to ports here to the node, until this process, or what it becomes, has ended."""
    if not forwards:
        return
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(each.listen()) for each in forwards]
        triples = [
            text
            for each, listener in zip(forwards, listeners, strict=True)
            for text in (str(listener.fileno()), each.host, str(each.host_port))
        ]
        subprocess.Popen(
            [*enter, sys.executable, "-m", "atoll.tasks.forwarding", str(os.getpid()), *triples],
            stdin=subprocess.DEVNULL,
            pass_fds=[listener.fileno() for listener in listeners],
            start_new_session=True,  # Ctrl-C is the shell's
        )


def _become(command: list[str], env: Mapping[str, str] = os.environ) -> NoReturn:
    """Replace this process by a program."""
    sys.stdout.flush()
    spinner.make_room(b"\n")
    try:
        os.execvpe(command[0], command, env)
    except FileNotFoundError:
        raise ConfigError(f"{command[0]} is not installed on this machine") from None
