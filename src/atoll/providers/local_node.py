"""An agent on this machine, in namespaces of its own where the kernel gives them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from atoll.agent import orphans
from atoll.agent.namespace import VARIABLE
from atoll.agent.process_tree import kill_tree
from atoll.core.errors import death_reason
from atoll.providers.base import Boot
from atoll.providers.network import entering

# The agent needs to find its interpreter's libraries; the user's variables go to ranks, not through its environment.
_AGENT_ENV = ("PATH", "LD_LIBRARY_PATH")
_NAMESPACES = ("pid", "mnt", "uts", "net")
SOURCE_ROOT = str(Path(__file__).resolve().parents[2])
_BOOT = f"import sys; sys.path.insert(0, {SOURCE_ROOT!r}); from atoll.agent.node import main; main()"
_REASON_S = 1.0  # a channel ends before its agent can be asked how that ended: what is below it ends in between
_END_S = 2.0  # an agent whose channel is closed gets this long to end its ranks and remove its files


@dataclass(frozen=True, slots=True)
class NodePlace:
    """What a task's node should have for itself. What the kernel refuses is shared, and the agent says so.

    Attributes:
        hostname: its host name, which resolves to its address inside.
        home: its ``HOME``.
        tmp: an existing folder that only this node uses; its agent removes it. A folder in it is seen as ``/tmp``
            where a mount namespace can be had, else it is just ``TMPDIR``.
        peers: address and host name of every node of the cluster, for ``/etc/hosts``.
        network: path of a network namespace, or None: the machine's own.
        resolv_conf: text of ``/etc/resolv.conf`` in that namespace, or None: as on the machine.
        visible: paths that stay visible though they lie below ``/tmp``, as ``home`` does; with ``/tmp``, all of it.
        readable: such paths that can't be written to.
        mounts: what is seen elsewhere, too: path of a file or folder, and where; nothing is made there outside.
        notes: lines that the agent is to repeat among its own.
    """

    hostname: str
    home: str
    tmp: str
    peers: tuple[tuple[str, str], ...]
    network: str | None = None
    resolv_conf: str | None = None
    visible: tuple[str, ...] = ()
    readable: tuple[str, ...] = ()
    mounts: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()


def start_agent(boot: Boot, place: NodePlace | None, mark: str) -> LocalNode:
    """Start an agent; its channel is one end of a socket pair, so nothing listens anywhere.

    ``mark``: a variable that all it starts has, as ``NAME=VALUE``: should it be killed, these are ended by that.
    """
    ours, theirs = socket.socketpair()
    pidfd = os.pidfd_open(os.getpid())
    env = {name: os.environ[name] for name in _AGENT_ENV if name in os.environ}
    if boot.owner:
        env[orphans.VARIABLE] = boot.owner
    with contextlib.ExitStack() as failed, contextlib.ExitStack() as given:
        failed.callback(ours.close)
        given.callback(theirs.close)
        given.callback(os.close, pidfd)
        proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
        given.callback(os.close, proc)
        said = None
        if place is None:
            prefix = _namespace()
        else:
            own = isolation().command
            prefix = (*(entering(place.network) if place.network and own else ()), *own)
            env[VARIABLE] = _placed(place)
            said = failed.enter_context(open(os.memfd_create("atoll-agent"), "r+b"))
        process = subprocess.Popen(
            [*prefix, *(boot.agent or agent_command()), str(theirs.fileno()), str(pidfd), str(proc)],
            pass_fds=(theirs.fileno(), pidfd, proc),
            stdin=subprocess.DEVNULL,
            stderr=said,
            start_new_session=True,
            env=env,
        )
        failed.pop_all()
    return LocalNode(ours, process, said, mark, None if place is None else place.tmp)


def agent_command() -> list[str]:
    """How an agent is started on this machine. It needs nothing but the standard library."""
    return [sys.executable, "-I", "-S", "-c", _BOOT]


class LocalNode:
    """A running agent on this machine. What a task's agent says on its standard error is in the file ``said``."""

    def __init__(
        self,
        channel: socket.socket,
        process: subprocess.Popen[bytes],
        said: BinaryIO | None,
        mark: str,
        tmp: str | None,
    ) -> None:
        self.channel = channel
        self.process = process
        self._said = said
        self._mark, self._tmp = mark, tmp

    def listen(self, on_silence: Callable[[float, str], object]) -> None:
        """It is never silent: its channel ends with its agent."""

    @property
    def reason(self) -> str | None:
        """How its agent ended, or None while that lives."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self.process.wait(_REASON_S)
            if code < 0:
                return f"its agent was {death_reason(None, -code, False)}"
            last = self._last_line()
            return f"its agent {death_reason(code, None, False)}" + (f" ({last})" if last else "")
        return None

    def _last_line(self) -> str:
        if self._said is None or self._said.closed:
            return ""
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else ""

    def stop(self) -> None:
        """End the agent by force, and with it everything in its namespace and its temporary files."""
        with contextlib.suppress(OSError):
            self.channel.shutdown(socket.SHUT_RDWR)  # who reads it at this moment sees its end
        self.channel.close()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self._said is not None:
            self._said.close()
        if self._tmp and os.path.exists(self._tmp):  # the agent removes it last: it was killed
            kill_tree(None, self._mark)
            shutil.rmtree(self._tmp, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Isolation:
    """How a node's agent gets namespaces of its own.

    Attributes:
        command: what its command starts with; empty where it gets none.
        refused: why something stays shared, or None where nothing does.
    """

    command: tuple[str, ...]
    refused: str | None


def isolation() -> Isolation:
    """What this kernel gives a task's node: its own processes, host name and mounts, or the last two, or nothing."""
    if os.environ.get("ATOLL_PID_NAMESPACE") == "0":
        return Isolation((), "ATOLL_PID_NAMESPACE=0")
    return _probed_isolation()


@functools.cache
def _probed_isolation() -> Isolation:
    # The agent mounts and names the host itself, for which it keeps its rights over its own user namespace.
    whole, said = first_granted((*_OWN_PROCESSES, "--uts"), "--keep-caps")
    if whole:
        return Isolation(whole, None)
    part, _ = first_granted(("--mount", "--propagation", "slave", "--uts"), "--keep-caps")
    return Isolation(part, said)


def _namespace() -> tuple[str, ...]:
    """The command that gives an agent its own PID namespace, or nothing where the kernel refuses one.

    In a namespace the kernel itself kills everything below an agent that dies; elsewhere the agent is a subreaper
    and finds its processes in ``/proc``. ``ATOLL_PID_NAMESPACE=0`` chooses that by hand.
    """
    return () if os.environ.get("ATOLL_PID_NAMESPACE") == "0" else _probed()


@functools.cache
def _probed() -> tuple[str, ...]:
    return first_granted(_OWN_PROCESSES)[0]


# Mounts made on the machine later on, by an automounter say, still show up inside.
_OWN_PROCESSES = ("--pid", "--mount-proc", "--propagation", "slave", "--fork", "--kill-child=SIGKILL")
# As another user than root, a user namespace gives the right to make the others.
_AS_USER = ("--user", "--map-current-user")


def first_granted(options: tuple[str, ...], *as_user: str) -> tuple[tuple[str, ...], str]:
    """The ``unshare`` command with these options, for root or for a user; or nothing, and what the kernel said."""
    unshare = shutil.which("unshare")
    if unshare is None:
        return (), "unshare is not installed; it is part of util-linux"
    said = ""
    for command in ((unshare, *options), (unshare, *options, *_AS_USER, *as_user)):
        probe = subprocess.run(
            [*command, "true"], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False
        )
        if probe.returncode == 0:
            return command, ""
        said = probe.stderr.strip()
    return (), said or "unshare failed"


def _placed(place: NodePlace) -> str:
    """What an agent is told of its place. With it go our namespaces: those that differ from them are its own."""
    outside = {kind: os.readlink(f"/proc/self/ns/{kind}") for kind in _NAMESPACES}
    return json.dumps({**dataclasses.asdict(place), "outside": outside, "refused": isolation().refused})
