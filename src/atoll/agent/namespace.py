"""What a task's node has for itself: host name, hosts file, ``/tmp``. Applied by the agent, before it serves.

Each part may be refused by the kernel; it is shared with the machine then, and the agent's first frame says so.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import socket
from collections.abc import Callable, Mapping
from typing import Any

from atoll.agent.bind_mounts import Overmounts

VARIABLE = "ATOLL_PLACE"  # how an agent is told of it: its command line shows in everybody's `pkill -f`
_TITLE = b"atoll-agent"
_TMP = "/tmp"
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_libc = ctypes.CDLL(None, use_errno=True)
# For nodes that see the machine's processes: the real program, kept to the sessions of this node.
_NARROWED = """#!/bin/sh
pids=$(grep -lFxze '{tag}' /proc/[0-9]*/environ 2>/dev/null | tr -dc '0-9\\n' | paste -sd, -)
exec '{program}' -s "$(ps -o sess= -p "$pids" | sort -u | tr -d ' ' | paste -sd, -)" "$@"
"""
# For root on a machine without sudo: setups written for cloud machines use it before every command.
_SUDO = """#!/bin/sh
while :; do
    case "$1" in
        --) shift; break ;;
        -u*|-g*|--user*|--group*)
            echo "sudo: $1: this machine has no sudo, and what stands in for it runs commands as root only" >&2
            exit 1 ;;
        -*) shift ;;
        *) break ;;
    esac
done
[ $# -eq 0 ] || exec env "$@"
"""


class Sandbox:
    """What of a machine that others use too is a node's own.

    Attributes:
        report: what the agent says of it: which parts are the node's own, and why others are not.
        folder: descriptor of the node's folder for temporary files.
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._spec = spec
        self._tmp: str = spec["tmp"]
        scratch = os.path.join(_TMP, f".{os.path.basename(self._tmp)}-root")
        self._mounts = Overmounts(scratch, os.path.join(spec["home"], ".atoll-mounts", ".around"))
        # Opened while these names still mean the machine's folders. Through them no later mount is ever reached.
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        self._above = os.open(os.path.dirname(self._tmp), flags)
        self.folder = os.open(self._tmp, flags)
        notes: list[str] = list(spec["notes"])
        if spec["refused"] is not None:
            notes.append(f"shared with the machine: {spec['refused']}")
        own = {kind: os.readlink(f"/proc/self/ns/{kind}") != there for kind, there in spec["outside"].items()}
        # Without namespaces of our own these would change the machine's host name and mounts.
        named = own["uts"] and _try(notes, "its host name", self._name)
        if named and own["mnt"]:
            _try(notes, "its /etc/hosts", self._mount_hosts)
        if own["mnt"] and spec["resolv_conf"] is not None:
            _try(notes, "its /etc/resolv.conf", self._mount_resolv_conf)
        wanted = _TMP not in spec["visible"]  # else it is to be the machine's
        self._has_tmp = own["mnt"] and wanted and _try(notes, "its /tmp", self._mount_tmp)
        notes += (
            self._show_mounts() if own["mnt"] else [_elsewhere(each, "no mounts of its own") for _, each in self._shown]
        )
        self.report = {
            "pid_namespace": own["pid"],
            "hostname": named,
            "tmp": self._has_tmp,
            "network": own["net"],
            "notes": notes,
        }

    @property
    def tmp(self) -> str:
        """The node's folder for temporary files, as its processes see it."""
        return _TMP if self._has_tmp else self._tmp

    def programs(self, tag: str, path: str) -> str | None:
        """Folder of programs that go before those on ``path``, or None.

        Where processes are the machine's, ``pkill`` and ``pgrep`` that find only those with the tag. For root where
        there is no ``sudo``, one that just runs the command.
        """
        texts = {}
        if not self.report["pid_namespace"]:
            found = {name: shutil.which(name) for name in ("pkill", "pgrep")}
            texts = {name: _NARROWED.format(tag=tag, program=each) for name, each in found.items() if each}
        if os.geteuid() == 0 and shutil.which("sudo", path=path) is None:
            texts["sudo"] = _SUDO
        if not texts:
            return None
        folder = os.path.join(self.tmp, "atoll-bin")
        os.makedirs(folder, mode=0o700, exist_ok=True)
        for name, text in texts.items():
            program = os.path.join(folder, name)
            if not os.path.exists(program):
                with open(program, "w", encoding="utf-8") as file:
                    file.write(text)
                os.chmod(program, 0o700)
        return folder

    def remove(self) -> None:
        """Remove the temporary files. What was mounted on folders among them stays whole."""
        self._mounts.undo()
        shutil.rmtree(os.path.basename(self._tmp), ignore_errors=True, dir_fd=self._above)

    def _name(self) -> None:
        socket.sethostname(self._spec["hostname"])

    def _mount_hosts(self) -> None:
        peers = {name: addr for addr, name in self._spec["peers"]}
        lines = [f"{addr} {name}" for name, addr in peers.items()]
        lines += ["127.0.0.1 localhost", "::1 localhost ip6-localhost ip6-loopback"]
        with contextlib.suppress(OSError), open("/etc/hosts", encoding="utf-8", errors="surrogateescape") as hosts:
            # What else the machine's file says; names that stand above would be answered with two addresses.
            taken = {"localhost", *peers}
            lines += [line.rstrip() for line in hosts if not taken & set(line.partition("#")[0].split()[1:])]
        self._mount_text("hosts", "/etc/hosts", lines)

    def _mount_resolv_conf(self) -> None:
        self._mount_text("resolv.conf", "/etc/resolv.conf", self._spec["resolv_conf"].splitlines())

    @property
    def _shown(self) -> list[tuple[str, str]]:
        return [(source, target) for source, target in self._spec["mounts"]]

    def _show_mounts(self) -> list[str]:
        """Put a task's files where it wants them; returns a line for each that can't be there."""
        notes = []
        for source, target in self._shown:
            try:
                self._mounts.show(source, target)
            except OSError as error:
                notes.append(_elsewhere(target, error.strerror or str(error)))
        return notes

    def _mount_text(self, name: str, target: str, lines: list[str]) -> None:
        path = os.path.join(self._tmp, name)
        with open(path, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write("\n".join([*lines, ""]))
        os.chmod(path, 0o644)
        self._mounts.bind(path, target)

    def _mount_tmp(self) -> None:
        """See a folder in ours as ``/tmp``, and in it again, in folders of its own, what must stay visible."""
        own = os.path.join(self._tmp, "tmp")
        os.mkdir(own)
        os.chmod(own, 0o1777)  # package managers write there as users of their own
        before = len(self._mounts)
        with contextlib.ExitStack() as opened:
            held = []
            for path, writable in self._kept().items():
                held.append((path, os.open(path, os.O_PATH | os.O_CLOEXEC), writable))
                opened.callback(os.close, held[-1][1])
            try:
                self._mounts.bind(own, _TMP)
                for path, fd, writable in held:
                    self._mounts.bind_fd(fd, path, writable=writable)
            except OSError:
                self._mounts.undo(before)
                raise

    def _kept(self) -> dict[str, bool]:
        """Paths below ``/tmp`` that must be visible, in all spellings, outer ones first; and whether for writing."""
        found: dict[str, bool] = {}
        for writable, paths in ((False, self._spec["readable"]), (True, (self._spec["home"], *self._spec["visible"]))):
            for path in paths:
                for spelling in (os.path.abspath(path), os.path.realpath(path)):
                    if spelling.startswith(_TMP + "/") and os.path.exists(spelling):
                        found[spelling] = writable
        kept: dict[str, bool] = {}
        for path in sorted(found):
            above = max((each for each in kept if path.startswith(each + "/")), key=len, default=None)
            # What lies in another is seen there, and through its links.
            if above is None or (found[path] and not kept[above] and os.path.realpath(path) == path):
                kept[path] = found[path]
        return kept


def enter_sandbox() -> Sandbox | None:
    """Apply what this agent was started with; None where the node shares everything."""
    text = os.environ.pop(VARIABLE, None)
    if text is None:
        return None
    with contextlib.suppress(OSError):
        _hide_command_line()
    sandbox = Sandbox(json.loads(text))
    # What we may do in a user namespace of our own is not for the user's processes.
    _libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    return sandbox


def _try(notes: list[str], what: str, apply: Callable[[], None]) -> bool:
    try:
        apply()
    except OSError as error:
        notes.append(f"{what} is shared with the machine: {error}")
        return False
    return True


def _elsewhere(target: str, why: str) -> str:
    return f"file_mounts.{target}: it can't be shown there ({why}): it is at ~/.atoll-mounts{target}"


def _hide_command_line() -> None:
    """Have ``ps`` show nothing of where we lie: a user's ``pkill -f NAME`` would match a folder called so."""
    with open("/proc/self/comm", "wb") as name:
        name.write(_TITLE)
    with open("/proc/self/stat", "rb") as status:
        fields = status.read().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # where the kernel reads the command line: in our own memory
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, _TITLE, min(len(_TITLE), end - start - 1))
