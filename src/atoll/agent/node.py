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
from collections.abc import Sequence
from typing import Any

from atoll.agent.command import Processes
from atoll.agent.leases import Leases
from atoll.agent.namespace import Place, take_place
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
from atoll.agent.rank import CHANNEL_FD, CONTROL_FD, Output, Rank, exit_meta, last_lines, raise_descriptor_limit
from atoll.wire import frames
from atoll.wire.channel import Channel
from atoll.wire.event_loop import EventLoop
from atoll.wire.frames import RawFrame, WireError, close_all, pack

_LOG_BACKLOG_BYTES = 8 << 20  # more than this waiting for the driver, and ranks wait before they print on
_LEAVE_S = 1.0  # what a rank gets to end by itself when the pool goes down
_ANSWER_S = 0.5  # a rank that runs Python answers within this long, on a busy machine too
_LOOK_S = 0.01
_CLOSED_S = 0.2  # a rank whose channel is closed gets this long to end by itself: it is probably about to
_WROTE = "wrote into its channel to Atoll (descriptor 3)"  # what user code did
_GOODBYES = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_LEASE_S, _LEASE_RETRY_S = 5.0, 0.1  # who has GPUs and dies has given them back by then


class DriverGone(Exception):
    """The driver closed its end, died, or said goodbye."""


class Agent:
    """One node's ranks, or a task's processes."""

    def __init__(
        self, channel: socket.socket, driver_pidfd: int, place: Place | None = None, proc_fd: int = -1
    ) -> None:
        self._proc_fd = proc_fd
        self.loop = EventLoop()
        self._driver = Channel(channel, self.loop, self._handle, self._driver_gone)
        self._logs_paused = False
        self._ranks: dict[int, Rank] = {}
        self._specs: dict[int, dict[str, Any]] = {}
        self._to_spawn: dict[int, list[int]] | None = {}  # ranks that wait for GPUs, with their descriptors
        self._setup: dict[str, Any] = {}
        self._asked: set[int] = set()  # calls whose stacks are being collected
        self._oom = OomCounter()
        self._place = place
        self._processes = Processes(self, place, self._oom)
        self._leases = Leases()
        if driver_pidfd >= 0:
            self.loop.watch(driver_pidfd, self._driver_gone)
        signal.signal(signal.SIGCHLD, lambda *_: self.loop.post(self._reap_orphans))
        for number in _GOODBYES:  # seen to by the loop: never in the middle of something
            signal.signal(number, lambda *_: self.loop.post(self._signalled))

    def run(self) -> None:
        """Serve until the driver goes."""
        try:
            placed = {} if self._place is None else {"place": self._place.report}
            self.tell(frames.AGENT, meta={"version": frames.VERSION, "pid": os.getpid(), **placed})
            while True:
                self.loop.turn(TICK_S if self._ranks or len(self._processes) else None)
                self._oom.tick()
                if self._logs_paused and self._driver.num_bytes < _LOG_BACKLOG_BYTES // 2:
                    self._resume_logs()
        except DriverGone:
            pass
        finally:
            self._end()

    # -- the driver's side ------------------------------------------------------------------------------------

    def _handle(self, frame: RawFrame) -> None:
        rank = self._ranks.get(frame.rank)
        match frame.kind:
            case frames.CALL | frames.CREDIT | frames.CLOSE | frames.GROUP:
                if rank is None or rank.channel is None:  # it died and the driver does not know yet
                    close_all(frame.fds)
                else:
                    rank.channel.send(frame.data, frame.fds)
            case frames.CANCEL if rank is not None:
                rank.cancel(frame.call)
            case frames.KILL if rank is not None:
                rank.fault = frame.parsed().meta.get("fault")
                rank.killed = rank.fault is None
                self._kill(rank)
            case frames.START:
                self._processes.start(frame.rank, frame.parsed().meta, self._setup)
            case frames.LEASE:
                wish = frame.parsed().meta
                why = self._lease(wish)
                self.tell(frames.LEASED, meta={"round": wish["round"], "gpus": self._leases.gpus, "why": why})
            case frames.TERM:
                self._processes.terminate(frame.rank, **frame.parsed().meta)
            case frames.KILL:
                for process in self._processes.chosen(frame.rank):
                    process.kill()
            case frames.STACKS:
                self._look(frame.call, frame.parsed().meta["ranks"])
            case frames.SETUP:
                self._set_up(frame.parsed().meta)
            case frames.SPAWN if self._to_spawn is not None:
                self._to_spawn[frame.rank] = list(frame.fds)
            case frames.SPAWN:
                self._spawn(frame.rank, list(frame.fds))
            case frames.SHUTDOWN:
                self._say_goodbye(frame.parsed().meta["busy"])

    def _set_up(self, setup: dict[str, Any]) -> None:
        self._setup = setup
        if self._place is None:
            os.makedirs(setup["tmp_dir"], mode=0o700, exist_ok=True)
            folder = os.open(setup["tmp_dir"], os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        else:
            folder = self._place.folder
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)  # as long as we live: it tells that the folder is in use
        os.chdir(setup["cwd"])
        if setup.get("ttl_s"):
            self.loop.after(setup["ttl_s"], self._outlived)
        self._specs = {spec["rank"]: spec for spec in setup["ranks"]}
        self._start_ranks(time.monotonic() + _LEASE_S)

    def _start_ranks(self, deadline: float) -> None:
        """Leases the ranks' GPUs, which somebody who is just ending may still have, and starts them."""
        if (wish := self._setup.get("lease")) is not None:
            why = self._lease(wish)
            if why is not None and time.monotonic() < deadline:
                self.loop.after(_LEASE_RETRY_S, lambda: self._start_ranks(deadline))
                return
            if why is not None:
                self.tell(frames.AGENT, meta={"ended": why})
                raise DriverGone
            self._setup["env"]["CUDA_VISIBLE_DEVICES"] = ",".join(self._leases.gpus)
        waiting, self._to_spawn = self._to_spawn or {}, None
        for number, fds in waiting.items():
            self._spawn(number, fds)

    def _lease(self, wish: dict[str, Any]) -> str | None:
        """Leases GPUs in place of those that are leased; returns why it can't."""
        try:
            taken = self._leases.lease([gpu for gpu, _ in wish["gpus"]], wish["count"], wish["holder"])
        except OSError as error:
            return f"GPUs can't be leased: {error}"
        if len(self._leases.gpus) == wish["count"]:
            return None
        names = dict(wish["gpus"])
        held = "; ".join(f"{names[gpu]} is held by {holder}" for gpu, holder in taken.items())
        return f"{wish['count']} of {len(names)} GPUs requested, {len(names) - len(taken)} free: {held}"

    def _spawn(self, number: int, fds: list[int]) -> None:
        if number in self._ranks:
            close_all(fds)
            return
        try:
            rank = Rank(self._specs[number], self._setup, fds)
        except OSError as error:
            self.tell(frames.EXIT, number, meta=exit_meta(127, [str(error)]))
            return
        self._ranks[number] = rank
        self.tell(frames.STARTED, number, meta={"pid": outer_pid(self._proc_fd, rank.pid)})
        if rank.sock is not None:
            rank.channel = Channel(
                rank.sock, self.loop, functools.partial(self._relay, rank), functools.partial(self._channel_ended, rank)
            )
        self.loop.watch(rank.pidfd, lambda *_: self._rank_died(rank))
        if not self._logs_paused:
            self._watch_outputs(rank)

    def _look(self, call: int, numbers: list[int]) -> None:
        """Tell the driver where ranks of a call are, and what their processes do."""
        if call in self._asked:  # the last answer is still being collected
            return
        self._asked.add(call)
        asked = [self._ranks[number] for number in numbers if number in self._ranks]
        for rank in asked:
            rank.look()
        deadline = time.monotonic() + _ANSWER_S

        def collect() -> None:
            alive = [rank for rank in asked if self._ranks.get(rank.rank) is rank]
            answered = [rank.has_answered() for rank in alive]
            if not all(answered) and time.monotonic() < deadline:
                self.loop.after(_LOOK_S, collect)
                return
            self._asked.discard(call)
            seen = activity([rank.pid for rank in alive])
            ranks = {str(rank.rank): {**seen[rank.pid], **(rank.sight or {})} for rank in alive}
            self.tell(frames.STACKS, call=call, meta={"ranks": ranks})

        self.loop.after(_LOOK_S, collect)

    def _say_goodbye(self, busy: Sequence[int] = ()) -> None:
        """Let idle ranks run their exit handlers; the loop ends when all are gone or time is up."""
        for rank in list(self._ranks.values()):
            rank.leave()
            if rank.rank in busy:
                self._kill(rank)

        def give_up() -> None:
            raise DriverGone

        self.loop.after(_LEAVE_S, give_up)
        self._setup["leaving"] = True
        self._leave_if_empty()

    def _leave_if_empty(self) -> None:
        if self._setup.get("leaving") and not self._ranks:
            raise DriverGone

    def _driver_gone(self, *_: object) -> None:
        raise DriverGone

    def _outlived(self) -> None:
        self.tell(frames.AGENT, meta={"ended": f"its ttl of {self._setup['ttl_s']:g} s is over"})
        raise DriverGone

    # -- the ranks' side --------------------------------------------------------------------------------------

    def _channel_ended(self, rank: Rank, error: Exception | None) -> None:
        if isinstance(error, WireError):
            self._expel(rank, _WROTE)
        elif not rank.killed:  # nothing more can come from it, so it has to go
            self.loop.after(_CLOSED_S, lambda: self._expel(rank, "closed its channel to Atoll (descriptor 3)"))

    def _relay(self, rank: Rank, frame: RawFrame) -> None:
        if frame.kind not in frames.FROM_RANK or frame.rank != rank.rank:
            close_all(frame.fds)
            self._expel(rank, _WROTE)
            return
        if frame.kind in (frames.RESULT, frames.ERROR):
            self._drain_outputs(rank)  # what the call printed is shown before it returns
        self._driver.send(frame.data, frame.fds)

    def _rank_died(self, rank: Rank) -> None:
        if self._ranks.get(rank.rank) is not rank:
            return
        if rank.channel is not None:  # the last frames it sent still count: a result, say
            rank.channel.drain()
        kill_tree(rank.pid, rank.tag)  # before it is reaped: its pid can't have become somebody else's
        _pid, status = os.waitpid(rank.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        self._drain_outputs(rank)
        del self._ranks[rank.rank]
        self._forget(rank)
        oom = code == -signal.SIGKILL and not rank.killed and rank.fault is None and self._oom.rose()
        meta = exit_meta(
            code, last_lines(rank.outputs) if rank.outputs else [], oom=oom, killed=rank.killed, fault=rank.fault
        )
        self.tell(frames.EXIT, rank.rank, meta=meta)
        rank.close()
        self._reap_orphans()
        self._leave_if_empty()

    def _expel(self, rank: Rank, why: str) -> None:
        """End a rank that can't be talked to any more."""
        if self._ranks.get(rank.rank) is rank:
            rank.fault = why
            self._kill(rank)

    def _kill(self, rank: Rank) -> None:
        kill_tree(rank.pid, rank.tag)

    def _forget(self, rank: Rank) -> None:
        for fd in (rank.pidfd, *(output.reader for output in rank.outputs)):
            self.loop.unwatch(fd)

    # -- output -----------------------------------------------------------------------------------------------

    def _watch_outputs(self, rank: Rank) -> None:
        for output in rank.outputs:
            self.loop.watch(output.reader, functools.partial(self._read_output, rank, output))

    def _read_output(self, rank: Rank, output: Output, _readable: bool, _writable: bool) -> None:
        data = output.read()
        if data:
            self.log(rank.rank, output, data)
        elif data is not None:
            self.loop.unwatch(output.reader)

    def _drain_outputs(self, rank: Rank) -> None:
        for output in rank.outputs:
            for data in output.drain():
                self.log(rank.rank, output, data)

    def log(self, rank: int, output: Output, data: bytes) -> None:
        """Send the driver what was printed. Where it does not keep up, who prints has to wait."""
        self._driver.send(pack(frames.LOG, rank, 0, None, [data], flags=int(output.is_stderr)))
        if self._driver.num_bytes > _LOG_BACKLOG_BYTES and not self._logs_paused:
            self._logs_paused = True
            for other in self._ranks.values():
                for stream in other.outputs:
                    self.loop.unwatch(stream.reader)
            self._processes.pause()

    # -- sending to the driver ----------------------------------------------------------------------------------

    def tell(self, kind: int, rank: int = 0, call: int = 0, meta: dict[str, Any] | None = None) -> None:
        """Send the driver a frame."""
        self._driver.send(pack(kind, rank, call, meta))

    def _resume_logs(self) -> None:
        self._logs_paused = False
        for rank in self._ranks.values():
            self._watch_outputs(rank)
        self._processes.resume()

    # -- the loop's own business -----------------------------------------------------------------------------------

    def _signalled(self) -> None:
        # A task may well say `pkill python`, and its node must outlive that.
        if not self._setup.get("task"):
            self._say_goodbye()

    def _reap_orphans(self) -> None:
        reap_orphans([*(rank.pid for rank in self._ranks.values()), *self._processes.pids])

    def _end(self) -> None:
        if self._setup:
            kill_tree(os.getpid(), f"ATOLL_POOL_TAG={self._setup['tag']}.{self._setup['node']}")
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
        # Last, when nobody can write there any more.
        if self._place is not None:
            self._place.remove()
        elif self._setup:
            shutil.rmtree(self._setup["tmp_dir"], ignore_errors=True)


def main() -> None:
    """Entry: ``agent CHANNEL_FD DRIVER_PIDFD [PROC_FD]``; the last is ``/proc`` as it is outside of its namespace."""
    channel_fd, pidfd, *proc_fd = map(int, sys.argv[1:])
    raise_descriptor_limit()
    # Low descriptors are what ranks get theirs on; nothing of the agent's own may sit there.
    taken = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    while taken <= max(CHANNEL_FD, CONTROL_FD):
        taken = os.dup(taken)
    channel = socket.socket(fileno=_moved(channel_fd))
    if os.getpid() != 1:
        prctl(PR_SET_CHILD_SUBREAPER, 1)
    driver = _moved(pidfd) if pidfd >= 0 else -1
    Agent(channel, driver, take_place(), *map(_moved, proc_fd)).run()


def _moved(fd: int) -> int:
    """The same descriptor above those that ranks use, close-on-exec."""
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(fd)
    return moved
