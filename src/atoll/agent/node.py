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
from collections.abc import Callable, Sequence
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
from atoll.agent.send_queue import Outbox
from atoll.wire import frames
from atoll.wire.frames import Parser, RawFrame, WireError, close_all, pack, receive
from atoll.wire.poller import Poller

_LOG_BACKLOG_BYTES = 8 << 20  # more than this waiting for the driver, and ranks wait before they print on
_LEAVE_S = 1.0  # what a rank gets to end by itself when the pool goes down
_ANSWER_S = 0.5  # a rank that runs Python answers within this long, on a busy machine too
_LOOK_S = 0.01
_CLOSED_S = 0.2  # a rank whose channel is closed gets this long to end by itself: it is probably about to
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
        self._driver = channel
        self._driver.setblocking(False)
        self._driver_fd = channel.fileno()
        self._parser = Parser()
        self._out = Outbox(channel)
        self._logs_paused = False
        self._ranks: dict[int, Rank] = {}
        self._specs: dict[int, dict[str, Any]] = {}
        self._to_spawn: dict[int, list[int]] | None = {}  # ranks that wait for GPUs, with their descriptors
        self._setup: dict[str, Any] = {}
        self._asked: set[int] = set()  # calls whose stacks are being collected
        self._oom = OomCounter()
        self._deadline: float | None = None
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._poller: Poller[Callable[[bool, bool], None]] = Poller()
        self._place = place
        self._processes = Processes(self, place, self._oom)
        self._leases = Leases()
        self.watch(channel, self._read_driver)
        if driver_pidfd >= 0:
            self.watch(driver_pidfd, self._driver_died)
        self._wake_read, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in _GOODBYES:  # seen by the loop through the wakeup pipe: never in the middle of something
            signal.signal(number, lambda *_: None)
        self.watch(self._wake_read, self._drain_wakeups)

    def run(self) -> None:
        """Serve until the driver goes."""
        try:
            placed = {} if self._place is None else {"place": self._place.report}
            self.tell(frames.AGENT, meta={"version": frames.VERSION, "pid": os.getpid(), **placed})
            while True:
                for callback, readable, writable in self._poller.wait(self._timeout()):
                    callback(readable, writable)
                self._run_timers()
        except DriverGone:
            pass
        finally:
            self._end()

    # -- the driver's side ------------------------------------------------------------------------------------

    def _read_driver(self, readable: bool, writable: bool) -> None:
        if writable:
            self._flush_driver()
        if not readable:
            return
        try:
            data, fds = receive(self._driver)
        except BlockingIOError:
            return
        except OSError as error:
            raise DriverGone from error
        if not data:
            raise DriverGone
        try:
            received = self._parser.feed(data, fds)
        except WireError as error:
            raise DriverGone from error
        for frame in received:
            self._handle(frame)

    def _handle(self, frame: RawFrame) -> None:
        rank = self._ranks.get(frame.rank)
        match frame.kind:
            case frames.CALL | frames.CREDIT | frames.CLOSE | frames.GROUP:
                if rank is None or rank.sock is None:  # it died and the driver does not know yet
                    close_all(frame.fds)
                    return
                self._to_rank(rank, frame.data, frame.fds)
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
            self._deadline = time.monotonic() + setup["ttl_s"]
        self._specs = {spec["rank"]: spec for spec in setup["ranks"]}
        self._start_ranks(time.monotonic() + _LEASE_S)

    def _start_ranks(self, deadline: float) -> None:
        """Leases the ranks' GPUs, which somebody who is just ending may still have, and starts them."""
        if (wish := self._setup.get("lease")) is not None:
            why = self._lease(wish)
            if why is not None and time.monotonic() < deadline:
                self.later(_LEASE_RETRY_S, lambda: self._start_ranks(deadline))
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
            self.watch(rank.sock, lambda readable, writable: self._rank_ready(rank, readable, writable))
        self.watch(rank.pidfd, lambda _readable, _writable: self._rank_died(rank))
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
                self.later(_LOOK_S, collect)
                return
            self._asked.discard(call)
            seen = activity([rank.pid for rank in alive])
            ranks = {str(rank.rank): {**seen[rank.pid], **(rank.sight or {})} for rank in alive}
            self.tell(frames.STACKS, call=call, meta={"ranks": ranks})

        self.later(_LOOK_S, collect)

    def _say_goodbye(self, busy: Sequence[int] = ()) -> None:
        """Let idle ranks run their exit handlers; the loop ends when all are gone or time is up."""
        for rank in list(self._ranks.values()):
            rank.leave()
            if rank.rank in busy:
                self._kill(rank)

        def give_up() -> None:
            raise DriverGone

        self.later(_LEAVE_S, give_up)
        self._setup["leaving"] = True
        self._leave_if_empty()

    def _leave_if_empty(self) -> None:
        if self._setup.get("leaving") and not self._ranks:
            raise DriverGone

    def _driver_died(self, _readable: bool, _writable: bool) -> None:
        raise DriverGone

    # -- the ranks' side --------------------------------------------------------------------------------------

    def _rank_ready(self, rank: Rank, readable: bool, writable: bool) -> None:
        if rank.rank not in self._ranks or self._ranks[rank.rank] is not rank:
            return
        if writable:
            self._flush_rank(rank)
        if not readable or rank.sock is None:
            return
        try:
            data, fds = receive(rank.sock)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        if not data:
            # Its channel is closed but it lives: nothing more can come from it, so it has to go.
            self.unwatch(rank.sock.fileno())
            if not rank.killed:
                why = "closed its channel to Atoll (descriptor 3)"
                self.later(_CLOSED_S, lambda: self._expel(rank, why))
            return
        self._relay(rank, data, fds)

    def _relay(self, rank: Rank, data: bytes, fds: list[int]) -> None:
        try:
            received = rank.parser.feed(data, fds)
        except WireError:  # the user's code wrote into our descriptor
            self._expel(rank, "wrote into its channel to Atoll (descriptor 3)")
            return
        for frame in received:
            if frame.kind not in frames.FROM_RANK or frame.rank != rank.rank:
                self._expel(rank, "wrote into its channel to Atoll (descriptor 3)")
                return
            if frame.kind in (frames.RESULT, frames.ERROR):
                self._drain_outputs(rank)  # what the call printed is shown before it returns
            self._send(frame.data, frame.fds)

    def _rank_died(self, rank: Rank) -> None:
        if self._ranks.get(rank.rank) is not rank:
            return
        # The last frames it sent still count: a result may lie in the channel of a process that is gone.
        with contextlib.suppress(OSError):
            while rank.sock is not None and (received := receive(rank.sock))[0]:
                self._relay(rank, *received)
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
            self.unwatch(fd)
        if rank.sock is not None:
            self.unwatch(rank.sock.fileno())

    def _to_rank(self, rank: Rank, data: bytes, fds: tuple[int, ...]) -> None:
        if rank.out.add(data, fds):  # else it waits its turn, and is sent when the rank reads
            self._flush_rank(rank)

    def _flush_rank(self, rank: Rank) -> None:
        try:
            rank.out.flush()
        except OSError:  # it is dying; its pidfd will say so
            rank.out.clear()
        if rank.sock is not None:
            self._poller.want_write(rank.sock.fileno(), bool(rank.out))

    # -- output -----------------------------------------------------------------------------------------------

    def _watch_outputs(self, rank: Rank) -> None:
        for output in rank.outputs:
            self.watch(output.reader, functools.partial(self._read_output, rank, output))

    def _read_output(self, rank: Rank, output: Output, _readable: bool, _writable: bool) -> None:
        if self._ranks.get(rank.rank) is not rank:  # it died in this very round of the loop: its pipes are closed
            return
        data = output.read()
        if data:
            self.log(rank.rank, output, data)
        elif data is not None:
            self.unwatch(output.reader)

    def _drain_outputs(self, rank: Rank) -> None:
        for output in rank.outputs:
            for data in output.drain():
                self.log(rank.rank, output, data)

    def log(self, rank: int, output: Output, data: bytes) -> None:
        """Send the driver what was printed. Where it does not keep up, who prints has to wait."""
        self._send(pack(frames.LOG, rank, 0, None, [data], flags=int(output.is_stderr)), ())
        if self._out.num_bytes > _LOG_BACKLOG_BYTES and not self._logs_paused:
            self._logs_paused = True
            for other in self._ranks.values():
                for stream in other.outputs:
                    self.unwatch(stream.reader)
            self._processes.pause()

    # -- sending to the driver ----------------------------------------------------------------------------------

    def tell(self, kind: int, rank: int = 0, call: int = 0, meta: dict[str, Any] | None = None) -> None:
        """Send the driver a frame."""
        self._send(pack(kind, rank, call, meta), ())

    def _send(self, data: bytes, fds: tuple[int, ...]) -> None:
        if self._out.add(data, fds):  # else it waits its turn, and is sent when the driver reads
            self._flush_driver()

    def _flush_driver(self) -> None:
        try:
            self._out.flush()
        except OSError as error:
            raise DriverGone from error
        self._poller.want_write(self._driver_fd, bool(self._out))
        if self._logs_paused and self._out.num_bytes < _LOG_BACKLOG_BYTES // 2:
            self._logs_paused = False
            for rank in self._ranks.values():
                self._watch_outputs(rank)
            self._processes.resume()

    # -- the loop's own business -----------------------------------------------------------------------------------

    def watch(self, source: socket.socket | int, callback: Callable[[bool, bool], None]) -> None:
        """Call back when it can be read."""
        self._poller.watch(source if isinstance(source, int) else source.fileno(), callback)

    def unwatch(self, source: int) -> None:
        """Forget a descriptor."""
        self._poller.unwatch(source)

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Do something after a while."""
        self._timers.append((time.monotonic() + delay_s, action))

    def _timeout(self) -> float | None:
        busy = len(self._processes) > 0 or len(self._ranks) > 0
        if not self._timers and self._deadline is None:
            return TICK_S if busy else None
        waits = [when for when, _ in self._timers]
        if self._deadline is not None:
            waits.append(self._deadline)
        left = max(0.0, min(waits) - time.monotonic())
        return min(left, TICK_S) if busy else left

    def _run_timers(self) -> None:
        if not self._timers and self._deadline is None:
            self._oom.tick()
            return
        now = time.monotonic()
        if self._timers:
            due = [action for when, action in self._timers if when <= now]
            self._timers = [entry for entry in self._timers if entry[0] > now]
            for action in due:
                action()
        if self._deadline is not None and now >= self._deadline:
            self._deadline = None
            self.tell(frames.AGENT, meta={"ended": f"its ttl of {self._setup['ttl_s']:g} s is over"})
            raise DriverGone
        self._oom.tick()

    def _drain_wakeups(self, _readable: bool, _writable: bool) -> None:
        signals = b""
        with contextlib.suppress(BlockingIOError):
            signals = os.read(self._wake_read, 4096)
        # A task may well say `pkill python`, and its node must outlive that.
        if any(number in signals for number in _GOODBYES) and not self._setup.get("task"):
            self._say_goodbye()
        self._reap_orphans()

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
