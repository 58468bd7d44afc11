"""Processes of a task: any command, spoken to by nothing but signals. Started, listened to and ended by the agent."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import shutil
import signal
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from atoll.agent.namespace import Place
from atoll.agent.orphans import VARIABLE
from atoll.agent.process_tree import OomCounter, alive, command_line, kill_tree, parents, state, tree
from atoll.agent.rank import Output, exit_meta, spawn, tail_lines
from atoll.wire import frames

if TYPE_CHECKING:
    from atoll.agent.node import Agent

_LOOK_S = 0.05
_MOST_LOOKS = 20  # at a tree that goes on forking
_STILL_S = 0.2
_NUM_TAIL_LINES = 150  # torchrun says a hundred more after the rank that failed
_REMINDERS_S = (0.05, 0.5)
_TOLD_S = 30.0  # a launcher takes a while to end after one of its processes
_KILLED_CODE = 128 + signal.SIGKILL  # how a shell says that its child was killed
# How launchers say that one of their processes was killed.
_SAYS_KILLED = re.compile(r"SIGKILL|\b[Kk]illed\b|exitcode\s*:?\s*-9\b")


class Process:
    """One running process: the root of a tree."""

    def __init__(self, number: int, spec: dict[str, Any], setup: dict[str, Any], place: Place | None) -> None:
        self.number = number
        self.killed = False
        self.terminated = False
        self._whole = True  # was all of its tree told to end?
        self._told: dict[int, bytes] = {}  # who was, and what it was at that moment
        self.tag = f"ATOLL_RANK_TAG={setup['tag']}.{number}"
        tmp = setup["tmp_dir"]
        node_tag = f"{setup['tag']}.{setup['node']}"
        self._env = {**spec["env"], "ATOLL_RANK_TAG": f"{setup['tag']}.{number}", "ATOLL_POOL_TAG": node_tag}
        if (owner := os.environ.get(VARIABLE)) is not None:
            self._env[VARIABLE] = owner
        if place is not None:
            if self._env.get("TMPDIR") == tmp:
                self._env["TMPDIR"] = place.tmp
            tmp = place.tmp
            path = self._env.get("PATH", os.defpath)
            if (programs := place.programs(f"ATOLL_POOL_TAG={node_tag}", path)) is not None:
                self._env["PATH"] = f"{programs}:{path}"
        argv = list(spec["argv"])
        if script := spec.get("script"):
            argv.append(self._write_script(tmp, script["name"], script["text"]))
        if text := spec.get("shell"):
            self._env["BASH_ENV"] = self._write_script(tmp, "shell", text)
        os.makedirs(spec["cwd"], exist_ok=True)
        os.chdir(spec["cwd"])
        try:
            self._spawn(argv)
        finally:
            os.chdir("/")

    def _write_script(self, tmp: str, name: str, text: str) -> str:
        folder = os.path.join(tmp, f"atoll-{self.number}")
        os.makedirs(folder, mode=0o700, exist_ok=True)
        path = os.path.join(folder, name)
        with open(path, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
        os.chmod(path, 0o700)
        return path

    def _spawn(self, argv: list[str]) -> None:
        program = shutil.which(argv[0], path=self._env.get("PATH", os.defpath))
        if program is None:
            raise FileNotFoundError(errno.ENOENT, "there is no such program on the node's PATH", argv[0])
        if os.getpid() != 1 and (setpriv := shutil.which("setpriv")):
            # As PID 1 of a namespace the kernel takes it down with the agent; else it has to be asked to.
            argv, program = ["setpriv", "--pdeathsig", "KILL", "--", *argv], setpriv
        with contextlib.ExitStack() as failed, contextlib.ExitStack() as given:
            self.output, writer = Output.piped(None, False)
            given.callback(os.close, writer)
            failed.callback(self.output.close)
            self.pid, self.pidfd = spawn(program, argv, self._env, (writer, writer), failed)
            failed.pop_all()

    def terminate(self, number: int, whole: bool) -> None:
        """A signal to all of its tree or, as torchrun does it, to its root; what is told has a while to end by itself.

        A root that saves first still needs its children: those of a data loader, say.
        """
        self.terminated, self._whole = True, whole
        if not whole:
            _signal_all([self.pid], signal.Signals(number))
            return
        # All are held still first: a child forked just after it was looked for would live on, untold.
        found: set[int] = set()
        for _ in range(_MOST_LOOKS):
            new = set(tree(self.pid, self.tag)) - found
            if not new:
                break
            _signal_all(new, signal.SIGSTOP)
            _wait_until_still(new)
            found |= new
        self._told = {pid: command_line(pid) for pid in found}
        _signal_all(found, signal.SIGTERM)
        _signal_all(found, signal.SIGCONT)

    def remind(self) -> None:
        """SIGTERM to those that the first may not have reached.

        A shell's child may lose it before it becomes another program; one that was just being forked may not have
        been seen. What somebody started who was told is his: he may need it to end well.
        """
        above = parents()
        here = {pid: command_line(pid) for pid in tree(self.pid, self.tag)}
        lost = [pid for pid in here if pid not in self._told and above.get(pid, (0, 0))[0] not in here]
        changed = [pid for pid, now in here.items() if self._told.get(pid, now) != now != b""]
        self._told.update({pid: here[pid] for pid in (*lost, *changed)})
        _signal_all((*lost, *changed), signal.SIGTERM)

    def end_rest(self) -> None:
        """SIGTERM to what is left of a tree whose root alone was told, once that has ended."""
        if self.terminated and not self._whole:
            _signal_all(set(tree(self.pid, self.tag)) - {self.pid}, signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to all of its tree."""
        self.killed = True
        kill_tree(self.pid, self.tag)

    def may_go_on(self) -> bool:
        """Has what its root left behind still time to end by itself?"""
        if not self.terminated or self.killed:
            return False
        return any(alive(pid) for pid in tree(self.pid, self.tag))

    def close(self) -> None:
        """Give up the descriptors of one that is gone."""
        self.output.close()
        os.close(self.pidfd)


def _signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _wait_until_still(pids: Iterable[int]) -> None:
    """One that is in the middle of a fork finishes that first."""
    deadline = time.monotonic() + _STILL_S
    while any(state(pid) in (b"R", b"S") for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.001)


class Processes:
    """All processes of a node, by their numbers."""

    def __init__(self, loop: Agent, place: Place | None, oom: OomCounter) -> None:
        self._loop = loop
        self._place = place
        self._oom = oom
        self._running: dict[int, Process] = {}
        self._paused = False

    def __len__(self) -> int:
        return len(self._running)

    @property
    def pids(self) -> list[int]:
        """Of the roots."""
        return [process.pid for process in self._running.values()]

    def start(self, number: int, spec: dict[str, Any], setup: dict[str, Any]) -> None:
        """Start one, and say its pid, or why it couldn't be."""
        try:
            process = Process(number, spec, setup, self._place)
        except OSError as error:
            self._loop.tell(frames.EXIT, number, meta=exit_meta(127, [str(error)]))
            return
        self._running[number] = process
        self._loop.tell(frames.STARTED, number, meta={"pid": process.pid})
        self._loop.loop.watch(process.pidfd, lambda _readable, _writable: self._root_ended(process))
        if not self._paused:
            self._listen(process)

    def chosen(self, number: int) -> list[Process]:
        """The one with this number, or all for ``frames.EVERY``."""
        return [each for each in self._running.values() if number in (each.number, frames.EVERY)]

    def terminate(self, number: int, signal: int = signal.SIGTERM, whole: bool = True) -> None:
        """A signal to those with this number, and to their trees where ``whole`` says so."""
        for process in self.chosen(number):
            process.terminate(signal, whole)
            for delay_s in _REMINDERS_S if whole else ():
                self._loop.loop.after(delay_s, functools.partial(self._remind, process))

    def _remind(self, process: Process) -> None:
        if self._running.get(process.number) is process:
            process.remind()

    def pause(self) -> None:
        """Read no output until ``resume``: who prints has to wait."""
        self._paused = True
        for process in self._running.values():
            self._loop.loop.unwatch(process.output.reader)

    def resume(self) -> None:
        """Read output again."""
        self._paused = False
        for process in self._running.values():
            self._listen(process)

    def _listen(self, process: Process) -> None:
        self._loop.loop.watch(process.output.reader, lambda _readable, _writable: self._read(process))

    def _read(self, process: Process) -> None:
        data = process.output.read()
        if data:
            self._loop.log(process.number, process.output, data)
        elif data is not None:
            self._loop.loop.unwatch(process.output.reader)

    def _root_ended(self, process: Process) -> None:
        self._loop.loop.unwatch(process.pidfd)
        process.end_rest()
        self._finish(process)

    def _finish(self, process: Process) -> None:
        if process.may_go_on():
            self._loop.loop.after(_LOOK_S, lambda: self._finish(process))
            return
        kill_tree(process.pid, process.tag)  # before it is reaped: its pid can't have become somebody else's
        code = os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1])
        for data in process.output.drain():
            self._loop.log(process.number, process.output, data)
        del self._running[process.number]
        self._loop.loop.unwatch(process.output.reader)
        tail = tail_lines(process.output.tail, _NUM_TAIL_LINES)
        meta = exit_meta(code, tail, oom=self._was_oom(process, code, tail), killed=process.killed)
        self._loop.tell(frames.EXIT, process.number, meta=meta)
        process.close()

    def _was_oom(self, process: Process, code: int, tail: list[str]) -> bool:
        """Did memory end it, or one of its tree whose end it says in its last lines?"""
        if process.killed or process.terminated or code == 0:
            return False
        if code in (-signal.SIGKILL, _KILLED_CODE):
            return self._oom.rose()
        return any(map(_SAYS_KILLED.search, tail)) and self._oom.rose_within(_TOLD_S)
