"""The agent's loop. One thread, no locks: it starts, watches and ends processes.

On the driver's machine ranks have a channel to the driver; elsewhere their frames and output go through the agent.

It ends, and everything below it, when the driver closes the channel or dies, however that dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from atoll.agent.child import Child, exit_fields, raise_descriptor_limit
from atoll.agent.leases import Leases
from atoll.agent.namespace import Sandbox, enter_sandbox
from atoll.agent.process_tree import (
    PR_SET_CHILD_SUBREAPER,
    TICK_S,
    OomCounter,
    activity,
    kill_tree,
    outer_pid,
    prctl,
    reap_orphans,
)
from atoll.agent.rank_io import CHANNEL_FD, CONTROL_FD, Output
from atoll.wire import frames
from atoll.wire.channel import Channel
from atoll.wire.event_loop import EventLoop
from atoll.wire.frames import RawFrame, WireError, close_all, pack

_LOG_BACKLOG_BYTES = 8 << 20  # more than this waiting for the driver, and ranks wait before they print on
_LEAVE_S = 1.0  # what a rank gets to end by itself when the pool goes down
_ANSWER_S = 0.5  # a rank that runs Python answers within this long, on a busy machine too
_LOOK_S = 0.01
_TREE_S = 0.05
_REMINDERS_S = (0.05, 0.5)
_CLOSED_S = 0.2  # a rank whose channel is closed gets this long to end by itself: it is probably about to
_WROTE = "wrote into its channel to Atoll (descriptor 3)"
_GOODBYES = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_LEASE_S, _LEASE_RETRY_S = 5.0, 0.1  # who has GPUs and dies has given them back by then


class DriverGone(Exception):
    """The driver closed its end, died, or said goodbye."""


class Agent:
    """One node's processes."""

    def __init__(
        self, channel: socket.socket, driver_pidfd: int, sandbox: Sandbox | None = None, proc_fd: int = -1
    ) -> None:
        self._proc_fd = proc_fd
        self._loop = EventLoop()
        self._driver = Channel(channel, self._loop, self._handle, self._driver_gone)
        self._logs_paused = self._leaving = False
        self._children: dict[int, Child] = {}
        self._waiting: list[tuple[int, dict[str, Any], Sequence[int]]] | None = None  # for GPUs, to be started
        self._setup: dict[str, Any] = {}
        self._asked: set[int] = set()  # calls whose stacks are being collected
        self._oom = OomCounter()
        self._sandbox = sandbox
        self._leases = Leases()
        self._env: dict[str, str] = {}  # what every process gets
        if driver_pidfd >= 0:
            self._loop.watch(driver_pidfd, self._driver_gone)
        signal.signal(signal.SIGCHLD, lambda *_: self._loop.post(self._reap_orphans))
        for number in _GOODBYES:  # seen to by the loop: never in the middle of something
            signal.signal(number, lambda *_: self._loop.post(self._signalled))

    def run(self) -> None:
        """Serve until the driver goes."""
        try:
            own = {} if self._sandbox is None else {"place": self._sandbox.report}
            self._tell(frames.AGENT, fields={"version": frames.VERSION, "pid": os.getpid(), **own})
            while True:
                self._loop.turn(TICK_S if self._children else None)
                self._oom.tick()
                if self._logs_paused and self._driver.num_bytes < _LOG_BACKLOG_BYTES // 2:
                    self._logs_paused = False
                    for child in self._children.values():
                        self._watch_outputs(child)
        except DriverGone:
            pass
        finally:
            self._end()

    # -- the driver's side ------------------------------------------------------------------------------------

    def _tell(self, kind: int, number: int = 0, call: int = 0, fields: dict[str, Any] | None = None) -> None:
        self._driver.send(pack(kind, number, call, fields))

    def _driver_gone(self, *_: object) -> None:
        raise DriverGone

    def _handle(self, frame: RawFrame) -> None:
        if frame.kind in frames.TO_RANK:
            child = self._children.get(frame.rank)
            if child is None or child.channel is None:  # it died and the driver does not know yet
                close_all(frame.fds)
            else:
                child.channel.send(frame.data, frame.fds)
            return
        fields = frame.parsed().meta
        match frame.kind:
            case frames.SETUP:
                self._set_up(fields)
            case frames.START if self._waiting is not None:
                self._waiting.append((frame.rank, fields, frame.fds))
            case frames.START:
                self._start(frame.rank, fields, frame.fds)
            case frames.CANCEL:
                for child in self._chosen(frame.rank):
                    child.cancel(frame.call)
            case frames.KILL:
                for child in self._chosen(frame.rank):
                    child.kill(fields.get("fault"))
            case frames.TERM:
                for child in self._chosen(frame.rank):
                    self._terminate(child, **fields)
            case frames.LEASE:
                why = self._lease(fields)
                self._tell(frames.LEASED, fields={"round": fields["round"], "gpus": self._leases.gpus, "why": why})
            case frames.STACKS:
                self._look(frame.call, self._chosen(*fields["ranks"]))
            case frames.SHUTDOWN:
                self._say_goodbye(fields["busy"])

    def _chosen(self, *numbers: int) -> list[Child]:
        """Those of these numbers that run, or all for ``frames.EVERY``."""
        return [each for number, each in self._children.items() if number in numbers or frames.EVERY in numbers]

    def _set_up(self, setup: dict[str, Any]) -> None:
        self._setup = setup
        if self._sandbox is None:
            os.makedirs(setup["tmp_dir"], mode=0o700, exist_ok=True)
            folder = os.open(setup["tmp_dir"], os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        else:
            folder = self._sandbox.folder
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)  # as long as we live: it tells that the folder is in use
        if setup.get("ttl_s"):
            self._loop.after(setup["ttl_s"], lambda: self._leave(f"its ttl of {setup['ttl_s']:g} s is over"))
        if (request := setup.get("lease")) is not None:
            self._waiting = []
            self._lease_and_start(request, time.monotonic() + _LEASE_S)

    def _leave(self, why: str) -> None:
        self._tell(frames.AGENT, fields={"ended": why})
        raise DriverGone

    def _signalled(self) -> None:
        # A task may well say `pkill python`, and its node must outlive that.
        if not self._setup.get("task"):
            self._say_goodbye()

    def _say_goodbye(self, busy: Sequence[int] = ()) -> None:
        """Let idle ranks run their exit handlers; the loop ends when all are gone or time is up."""
        for child in list(self._children.values()):
            child.leave()
            if child.number in busy:
                child.kill()
        self._loop.after(_LEAVE_S, self._driver_gone)
        self._leaving = True
        self._leave_if_empty()

    def _leave_if_empty(self) -> None:
        if self._leaving and not self._children:
            raise DriverGone

    # -- GPUs -------------------------------------------------------------------------------------------------

    def _lease_and_start(self, request: dict[str, Any], deadline: float) -> None:
        """Lease the ranks' GPUs, which somebody who is just ending may still have, and start them."""
        why = self._lease(request)
        if why is not None:
            if time.monotonic() > deadline:
                self._leave(why)
            self._loop.after(_LEASE_RETRY_S, lambda: self._lease_and_start(request, deadline))
            return
        self._env["CUDA_VISIBLE_DEVICES"] = ",".join(self._leases.gpus)
        waiting, self._waiting = self._waiting or [], None
        for start in waiting:
            self._start(*start)

    def _lease(self, request: Mapping[str, Any]) -> str | None:
        """Lease GPUs in place of those that are leased; returns why it can't."""
        try:
            held_by = self._leases.lease([gpu for gpu, _ in request["gpus"]], request["count"], request["holder"])
        except OSError as error:
            return f"GPUs can't be leased: {error}"
        if len(self._leases.gpus) == request["count"]:
            return None
        names = dict(request["gpus"])
        held = "; ".join(f"{names[gpu]} is held by {holder}" for gpu, holder in held_by.items())
        return f"{request['count']} of {len(names)} GPUs requested, {len(names) - len(held_by)} free: {held}"

    # -- processes --------------------------------------------------------------------------------------------

    def _start(self, number: int, spec: dict[str, Any], fds: Sequence[int]) -> None:
        if number in self._children:
            close_all(fds)
            return
        spec["env"] |= self._env
        try:
            child = Child(number, spec, self._setup, self._sandbox, fds)
        except OSError as error:
            self._tell(frames.EXIT, number, fields=exit_fields(127, [str(error)]))
            return
        self._children[number] = child
        pid = outer_pid(self._proc_fd, child.pid) if child.is_rank else child.pid
        self._tell(frames.STARTED, number, fields={"pid": pid})
        if child.sock is not None:
            relay, ended = functools.partial(self._relay, child), functools.partial(self._channel_ended, child)
            child.channel = Channel(child.sock, self._loop, relay, ended)
        self._loop.watch(child.pidfd, lambda *_: self._root_ended(child))
        if not self._logs_paused:
            self._watch_outputs(child)

    def _relay(self, child: Child, frame: RawFrame) -> None:
        if frame.kind not in frames.FROM_RANK or frame.rank != child.number:
            close_all(frame.fds)
            self._expel(child, _WROTE)
            return
        if frame.kind in (frames.RESULT, frames.ERROR):
            self._drain_outputs(child)  # what the call printed is shown before it returns
        self._driver.send(frame.data, frame.fds)

    def _channel_ended(self, child: Child, error: Exception | None) -> None:
        if isinstance(error, WireError):  # the user's code wrote into our descriptor
            self._expel(child, _WROTE)
        elif not child.killed:  # nothing more can come from it, so it has to go
            self._loop.after(_CLOSED_S, lambda: self._expel(child, "closed its channel to Atoll (descriptor 3)"))

    def _expel(self, child: Child, why: str) -> None:
        """End a rank that can't be talked to any more."""
        if self._children.get(child.number) is child:
            child.kill(why)

    def _look(self, call: int, asked: Sequence[Child]) -> None:
        """Tell the driver where ranks of a call are, and what their processes do."""
        if call in self._asked:  # the last answer is still being collected
            return
        self._asked.add(call)
        for child in asked:
            child.look()
        deadline = time.monotonic() + _ANSWER_S

        def collect() -> None:
            alive = [child for child in asked if self._children.get(child.number) is child]
            answered = [child.has_answered() for child in alive]
            if not all(answered) and time.monotonic() < deadline:
                self._loop.after(_LOOK_S, collect)
                return
            self._asked.discard(call)
            seen = activity([child.pid for child in alive])
            ranks = {str(child.number): {**seen[child.pid], **(child.sight or {})} for child in alive}
            self._tell(frames.STACKS, call=call, fields={"ranks": ranks})

        self._loop.after(_LOOK_S, collect)

    def _terminate(self, child: Child, signal: int, whole: bool) -> None:
        def remind() -> None:
            if self._children.get(child.number) is child:
                child.remind()

        child.terminate(signal, whole)
        for delay_s in _REMINDERS_S if whole else ():
            self._loop.after(delay_s, remind)

    def _root_ended(self, child: Child) -> None:
        self._loop.unwatch(child.pidfd)
        if child.channel is not None:  # the last frames it sent still count: a result, say
            child.channel.drain()
        child.end_rest()
        self._finish(child)

    def _finish(self, child: Child) -> None:
        if child.may_continue():
            self._loop.after(_TREE_S, lambda: self._finish(child))
            return
        code = child.reap()
        self._drain_outputs(child)
        del self._children[child.number]
        for output in child.outputs:
            self._loop.unwatch(output.reader)
        self._tell(frames.EXIT, child.number, fields=child.exit_fields(code, self._oom))
        child.close()
        self._reap_orphans()
        self._leave_if_empty()

    def _reap_orphans(self) -> None:
        reap_orphans(child.pid for child in self._children.values())

    # -- output -----------------------------------------------------------------------------------------------

    def _watch_outputs(self, child: Child) -> None:
        for output in child.outputs:
            self._loop.watch(output.reader, functools.partial(self._read_output, child, output))

    def _read_output(self, child: Child, output: Output, _readable: bool, _writable: bool) -> None:
        data = output.read()
        if data:
            self._log(child, output, data)
        elif data is not None:
            self._loop.unwatch(output.reader)

    def _drain_outputs(self, child: Child) -> None:
        for output in child.outputs:
            for data in output.drain():
                self._log(child, output, data)

    def _log(self, child: Child, output: Output, data: bytes) -> None:
        """Send the driver what was printed. Where it does not keep up, who prints has to wait."""
        self._driver.send(pack(frames.LOG, child.number, 0, None, [data], flags=int(output.is_stderr)))
        if self._driver.num_bytes > _LOG_BACKLOG_BYTES and not self._logs_paused:
            self._logs_paused = True
            for each in self._children.values():
                for stream in each.outputs:
                    self._loop.unwatch(stream.reader)

    # -- the end ----------------------------------------------------------------------------------------------

    def _end(self) -> None:
        if self._setup:
            kill_tree(os.getpid(), f"ATOLL_POOL_TAG={self._setup['tag']}.{self._setup['node']}")
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
        # Last, when nobody can write there any more.
        if self._sandbox is not None:
            self._sandbox.remove()
        elif self._setup:
            shutil.rmtree(self._setup["tmp_dir"], ignore_errors=True)


def main() -> None:
    """Entry: ``agent CHANNEL_FD DRIVER_PIDFD [PROC_FD]``; the last is ``/proc`` as it is outside of its namespace."""
    channel_fd, pidfd, *proc_fd = map(int, sys.argv[1:])
    raise_descriptor_limit()
    # Low descriptors are what ranks get theirs on; nothing of the agent's own may sit there.
    reserved = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    while reserved <= max(CHANNEL_FD, CONTROL_FD):
        reserved = os.dup(reserved)
    channel = socket.socket(fileno=_moved(channel_fd))
    if os.getpid() != 1:
        prctl(PR_SET_CHILD_SUBREAPER, 1)
    driver = _moved(pidfd) if pidfd >= 0 else -1
    Agent(channel, driver, enter_sandbox(), *map(_moved, proc_fd)).run()


def _moved(fd: int) -> int:
    """The same descriptor above those that ranks use, close-on-exec."""
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(fd)
    return moved
