"""A process that an agent started, with all below it. A rank is one with a channel for calls."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import resource
import shutil
import signal
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from atoll.agent.namespace import Sandbox
from atoll.agent.orphans import VARIABLE
from atoll.agent.process_tree import OomCounter, alive, command_line, kill_tree, stat_of, tree
from atoll.agent.rank_io import LEAVE, LOOK, Output, last_lines
from atoll.wire.channel import Channel
from atoll.wire.frames import close_all

_MOST_LOOKS = 20  # at a tree that keeps forking
_STILL_S = 0.2
_NUM_RANK_LINES = 20
_NUM_TAIL_LINES = 150  # torchrun says a hundred more after the rank that failed
_TOLD_S = 30.0  # a launcher takes a while to end after one of its processes
_KILLED_CODE = 128 + signal.SIGKILL  # how a shell says that its child was killed
# How launchers say that one of their processes was killed.
_SAYS_KILLED = re.compile(r"SIGKILL|\b[Kk]illed\b|exitcode\s*:?\s*-9\b")
# What processes of a node may have open; the agent itself takes all it can get, as it holds some for each of them.
_descriptor_limit: tuple[int, int] | None = None


class Child:
    """The root of a tree.

    Args:
        number: what the driver calls it.
        spec: the fields of its START frame.
        setup: those of the node's SETUP frame.
        sandbox: what the node has of its own.
        given: a rank's ends of its channel, standard output and error, where the driver has the others.

    Attributes:
        sock: a rank's channel, where its frames go through the agent, as ``channel``.
        outputs: what the agent reads; empty where the driver does.
        killed: the driver wanted it to end.
        fault: what it did that made its agent end it.
        sight: what it last said of itself, see ``look``.

    Raises:
        OSError: it could not be started.
    """

    def __init__(
        self,
        number: int,
        spec: Mapping[str, Any],
        setup: Mapping[str, Any],
        sandbox: Sandbox | None,
        given: Sequence[int],
    ) -> None:
        self.number = number
        self.is_rank = bool(spec.get("channel"))
        self.killed = False
        self.fault: str | None = None
        self.sight: dict[str, Any] | None = None
        self.sock: socket.socket | None = None
        self.channel: Channel | None = None
        self.outputs: list[Output] = []
        self.tag = f"ATOLL_RANK_TAG={setup['tag']}.{number}"
        self._terminated = False
        self._whole = True  # was the signal for all of its tree?
        self._signalled: dict[int, bytes] = {}  # who got it, and what it was at that moment
        self._owes_sight = False
        self._control: socket.socket | None = None
        with contextlib.ExitStack() as failed, contextlib.ExitStack() as ends:
            ends.callback(close_all, given)
            env = self._environment(spec, setup, sandbox)
            argv = list(spec["argv"])
            tmp = setup["tmp_dir"] if sandbox is None else sandbox.tmp
            if script := spec.get("script"):
                argv.append(self._write_script(tmp, script["name"], script["text"]))
            if text := spec.get("shell"):
                env["BASH_ENV"] = self._write_script(tmp, "shell", text)
            fds = self._connect(given, failed, ends)
            os.makedirs(spec["cwd"], exist_ok=True)
            os.chdir(spec["cwd"])
            try:
                self._spawn(argv, env, fds, failed)
            finally:
                os.chdir("/")
            failed.pop_all()

    # -- its start ------------------------------------------------------------------------------------------------

    def _environment(
        self, spec: Mapping[str, Any], setup: Mapping[str, Any], sandbox: Sandbox | None
    ) -> dict[str, str]:
        node_tag = f"{setup['tag']}.{setup['node']}"
        env = {**spec["env"], "ATOLL_RANK_TAG": f"{setup['tag']}.{self.number}", "ATOLL_POOL_TAG": node_tag}
        if (owner := os.environ.get(VARIABLE)) is not None:
            env[VARIABLE] = owner
        if sandbox is not None:
            if env.get("TMPDIR") == setup["tmp_dir"]:
                env["TMPDIR"] = sandbox.tmp
            path = env.get("PATH", os.defpath)
            if (programs := sandbox.programs(f"ATOLL_POOL_TAG={node_tag}", path)) is not None:
                env["PATH"] = f"{programs}:{path}"
        return env

    def _write_script(self, tmp: str, name: str, text: str) -> str:
        folder = os.path.join(tmp, f"atoll-{self.number}")
        os.makedirs(folder, mode=0o700, exist_ok=True)
        path = os.path.join(folder, name)
        with open(path, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
        os.chmod(path, 0o700)
        return path

    def _connect(
        self, given: Sequence[int], failed: contextlib.ExitStack, ends: contextlib.ExitStack
    ) -> tuple[int, ...]:
        """What it gets as descriptors 1, 2, …; ``ends`` closes our copies, ``failed`` the rest should it not start."""
        if not self.is_rank:
            writer = self._capture(False, failed, ends)
            return writer, writer
        self._control, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ends.callback(control.close)
        failed.callback(self._control.close)
        self._control.setblocking(False)
        if given:
            channel, out, err = given
        else:
            self.sock, theirs = socket.socketpair()
            ends.callback(theirs.close)
            failed.callback(self.sock.close)
            channel, out, err = theirs.fileno(), *(self._capture(each, failed, ends) for each in (False, True))
        return out, err, channel, control.fileno()

    def _capture(self, is_stderr: bool, failed: contextlib.ExitStack, ends: contextlib.ExitStack) -> int:
        output, writer = Output.piped(None, is_stderr)
        ends.callback(os.close, writer)
        failed.callback(output.close)
        self.outputs.append(output)
        return writer

    def _spawn(self, argv: list[str], env: dict[str, str], fds: Sequence[int], failed: contextlib.ExitStack) -> None:
        """Start it in a session of its own; it finds nothing on standard input."""
        program = shutil.which(argv[0], path=env.get("PATH", os.defpath))
        if program is None:
            raise FileNotFoundError(errno.ENOENT, "there is no such program on the node's PATH", argv[0])
        if os.getpid() != 1:  # as PID 1 of a namespace the kernel takes it down with the agent; else it has to be asked
            if self.is_rank:
                env["ATOLL_PDEATHSIG"] = "1"
            elif setpriv := shutil.which("setpriv"):
                argv, program = ["setpriv", "--pdeathsig", "KILL", "--", *argv], setpriv
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.pid = os.posix_spawn(
                program,
                argv,
                {os.fsencode(key): os.fsencode(value) for key, value in env.items()},
                file_actions=[(os.POSIX_SPAWN_DUP2, fd, at) for at, fd in enumerate((null, *fds))],
                setsid=True,
                setsigmask=[],
                # Python ignores some, and what the agent does with others is no concern of the user's code.
                setsigdef=[signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM, signal.SIGHUP],
            )
        finally:
            os.close(null)
        failed.callback(os.kill, self.pid, signal.SIGKILL)
        if _descriptor_limit is not None:  # not before: posix_spawn takes no descriptor beyond the limit
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(self.pid, resource.RLIMIT_NOFILE, _descriptor_limit)
        self.pidfd = os.pidfd_open(self.pid)

    # -- requests of a rank ---------------------------------------------------------------------------------------

    def cancel(self, call: int) -> None:
        """Raise in the rank's main thread if it still runs that call."""
        self._request(call.to_bytes(8))

    def leave(self) -> None:
        """Have the rank run its exit handlers and end."""
        self.killed = True
        self._request(LEAVE)

    def look(self) -> None:
        """Have the rank say where it is, as ``sight``; one that owes an answer is not asked again."""
        self.has_answered()
        self.sight = None
        self._owes_sight = self._owes_sight or self._request(LOOK)

    def has_answered(self) -> bool:
        """Has the answer come? It can't while native code holds the GIL, or the process is stopped."""
        with contextlib.suppress(OSError, ValueError):  # user code may write there, too
            if self._control is not None and (answer := self._control.recv(1 << 18)):
                self._owes_sight = False
                self.sight = json.loads(answer)
        return self.sight is not None

    def _request(self, request: bytes) -> bool:
        with contextlib.suppress(OSError):  # it is gone, or has not read for long
            return self._control is not None and bool(self._control.send(request))
        return False

    # -- its end --------------------------------------------------------------------------------------------------

    def terminate(self, number: int, whole: bool) -> None:
        """A signal to all of its tree or, as torchrun does it, to its root; what gets it has a while to end by itself.

        A root that saves first still needs its children: those of a data loader, say.
        """
        self._terminated, self._whole = True, whole
        if not whole:
            _signal_all([self.pid], signal.Signals(number))
            return
        # All are held still first: a child forked just after it was looked for would live on, missed.
        found: set[int] = set()
        for _ in range(_MOST_LOOKS):
            new = set(tree(self.pid, self.tag)) - found
            if not new:
                break
            _signal_all(new, signal.SIGSTOP)
            _wait_until_still(new)
            found |= new
        self._signalled = {pid: command_line(pid) for pid in found}
        _signal_all(found, signal.SIGTERM)
        _signal_all(found, signal.SIGCONT)

    def remind(self) -> None:
        """SIGTERM to those that the first may not have reached.

        A shell's child may lose it before it becomes another program; one that was just being forked may not have
        been seen. What was started by somebody who got it is his: he may need it to end well.
        """
        here = {pid: command_line(pid) for pid in tree(self.pid, self.tag)}
        missed = {pid: stat for pid in here if pid not in self._signalled and (stat := stat_of(pid)) is not None}
        lost = [pid for pid, stat in missed.items() if stat.parent not in here]
        changed = [pid for pid, now in here.items() if self._signalled.get(pid, now) != now != b""]
        self._signalled.update({pid: here[pid] for pid in (*lost, *changed)})
        _signal_all((*lost, *changed), signal.SIGTERM)

    def end_rest(self) -> None:
        """SIGTERM to what is left of a tree whose root alone got the signal, once that has ended."""
        if self._terminated and not self._whole:
            _signal_all(set(tree(self.pid, self.tag)) - {self.pid}, signal.SIGTERM)

    def kill(self, fault: str | None = None) -> None:
        """SIGKILL to all of its tree, for a fault of its own or because the driver wants it."""
        self.killed, self.fault = self.killed or fault is None, fault
        kill_tree(self.pid, self.tag)

    def may_continue(self) -> bool:
        """Has what its root left behind still time to end by itself?"""
        if not self._terminated or self.killed:
            return False
        return any(alive(pid) for pid in tree(self.pid, self.tag))

    def reap(self) -> int:
        """Kill what is left of it and reap it; returns its exit code, negative where a signal ended it."""
        kill_tree(self.pid, self.tag)  # before it is reaped: its pid can't have become somebody else's
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def exit_fields(self, code: int, oom: OomCounter) -> dict[str, Any]:
        """How it ended, as the EXIT frame says it; all its output was read."""
        tail = last_lines(self.outputs, _NUM_RANK_LINES if self.is_rank else _NUM_TAIL_LINES)
        return exit_fields(code, tail, self._was_oom(oom, code, tail), self.killed, self.fault)

    def _was_oom(self, oom: OomCounter, code: int, tail: list[str]) -> bool:
        """Did memory end it, or one of its tree whose end it says in its last lines?"""
        if self.killed or self._terminated or self.fault is not None or code == 0:
            return False
        if code in (-signal.SIGKILL, _KILLED_CODE):
            return oom.rose()
        return any(map(_SAYS_KILLED.search, tail)) and oom.rose_within(_TOLD_S)

    def close(self) -> None:
        """Close every descriptor of one that is gone."""
        if self.channel is not None:
            self.channel.close()
        for sock in (self.sock, self._control):
            if sock is not None:
                sock.close()
        for output in self.outputs:
            output.close()
        os.close(self.pidfd)


def exit_fields(
    code: int, tail: list[str], oom: bool = False, killed: bool = False, fault: str | None = None
) -> dict[str, Any]:
    """What an EXIT frame says of a process that ended with this code, a negative one being a signal's."""
    how = {"exit_code": code if code >= 0 else None, "signal": -code if code < 0 else None}
    return {**how, "oom": oom, "tail": tail, "killed": killed, "fault": fault}


def raise_descriptor_limit() -> None:
    """Let this process open as many files as it may."""
    global _descriptor_limit
    _descriptor_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_descriptor_limit[1], _descriptor_limit[1]))


def _signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _wait_until_still(pids: Iterable[int]) -> None:
    """One that is in the middle of a fork finishes that first."""
    deadline = time.monotonic() + _STILL_S
    while any(stat.state in "RS" for pid in pids if (stat := stat_of(pid))) and time.monotonic() < deadline:
        time.sleep(0.001)
