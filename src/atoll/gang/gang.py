"""The shell of a gang: feeds what happens to its state machine and performs what that decides.

One thread reads every channel, but for the rank whose answer a caller waits for: that one reads itself. Calls are sent
from whichever thread makes them. Under ``_lock`` only the state machine runs, sockets that don't block are used, and
what a local rank printed goes to its log file; code of the user's, and what takes a while, runs elsewhere.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import select
import socket
import struct
import sys
import termios
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from fcntl import ioctl
from typing import Any

from atoll.agent.rank_io import Output, last_lines
from atoll.core import events
from atoll.core.errors import AtollError, PoolClosed, ProvisionError, name_ranks
from atoll.gang import messages as m
from atoll.gang.call import Call
from atoll.gang.members import GangSpec, node_setup, rank_start
from atoll.gang.nodes import NodeChannel, Nodes
from atoll.gang.notifier import Audience
from atoll.gang.remote_ranks import OneUseArena, RankFiles
from atoll.gang.state import GangState
from atoll.providers.base import Node
from atoll.providers.upkeep import Upkeep
from atoll.wire import frames
from atoll.wire.channel import Channel, Sender, said_of_end
from atoll.wire.event_loop import LONGEST_S, READ, WRITE, EventLoop
from atoll.wire.frames import Frame, RawFrame, WireError, close_all, pack
from atoll.wire.payloads import Arena
from atoll.worker.folder_locks import hold_folder

_UNWIND_S = 0.3  # what a running call gets to unwind when the pool goes down
_LEAVE_S = 1.5  # agents get this long to end, of which they give their ranks a second; then their channels close
_RANK_FIELD, _RANK_AT = struct.Struct("<I"), 8
_NOTHING = bytes(4)  # what lies in a pipe, by FIONREAD


class RankChannel(Sender):
    """This side of what connects a rank on this machine: its channel, and what it prints.

    Attributes:
        waiting: the call whose caller reads the channel itself, and then closes it too.
        poll: waits until there is something to read, or for ``wake_fd``.
    """

    def __init__(
        self, rank: int, sock: socket.socket, loop: EventLoop, lock: contextlib.AbstractContextManager[object]
    ) -> None:
        super().__init__(sock, loop, lock)
        self.rank = rank
        self.fd = sock.fileno()
        self.outputs: list[Output] = []
        self.waiting: Call | None = None
        self.wake_fd = -1
        self._poll = select.poll()
        self.poll = self._poll.poll

    def prepare_poll(self) -> bool:
        """Get ready for a caller that reads it, as few ranks of a large pool have; False if no descriptor is left."""
        with contextlib.suppress(OSError):
            self.wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._poll.register(self.sock, select.POLLIN)
            self._poll.register(self.wake_fd, select.POLLIN)
        return self.wake_fd >= 0

    def close(self) -> None:
        """Close all of it, and descriptors that nobody took."""
        super().close()
        wake_fd, self.wake_fd = self.wake_fd, -1
        if wake_fd >= 0:
            os.close(wake_fd)
        self.sock.close()
        for output in self.outputs:
            output.close()


class Gang:
    """Ranks on nodes. ``submit`` a call; its sink hears what comes of it."""

    def __init__(self, spec: GangSpec, audience: Audience) -> None:
        self.spec = spec
        self.audience = audience
        self.nodes = Nodes(spec, self._adopt)
        self.arena = OneUseArena() if self.nodes.are_remote else Arena()
        self.node_of = [plan.node for plan in spec.plan.nodes for _ in range(plan.num_ranks)]
        self.world_size = len(self.node_of)
        self.state = GangState(
            self.node_of,
            [node.deaf_s for node in self.nodes.channels],
            path=spec.path,
            log_dir=spec.log_dir,
            hang_timeout_s=spec.hang_timeout_s,
            start_timeout_s=spec.start_timeout_s,
            wants_events=audience.wants_events,
        )
        self._pid = os.getpid()
        self._held: int | None = None  # the folder of its logs
        self._upkeep: Upkeep | None = None
        self._log_files = RankFiles(spec.log_dir) if self.nodes.are_remote else None  # local agents write them
        self._to_start: set[int] = set()  # nodes that were lost, once they are released
        self._channels: dict[int, RankChannel] = {}  # of ranks on this machine
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._events: deque[m.Event] = deque()
        self._actions: Iterator[m.Action] = iter(())  # those that are still to be performed
        self._is_handling = self._leaving = self._may_be_full = False
        self._sleeps_until = -math.inf
        self._loop = EventLoop()
        self._reader = threading.Thread(target=self._read, name=f"atoll-{spec.pool_id}", daemon=True)
        self._performers: dict[type, Callable[[Any], object]] = {
            m.SendCall: self._send_call,
            m.Send: lambda a: self._to_rank(a.rank, pack(a.kind, a.rank, a.number, a.fields)),
            m.Interrupt: lambda a: self._to_agent(a.rank, pack(frames.CANCEL, a.rank, a.number)),
            m.Kill: lambda a: self._to_agent(a.rank, pack(frames.KILL, a.rank, 0, a.fault and {"fault": a.fault})),
            m.Spawn: self._spawn,
            m.AskStacks: lambda a: self.nodes.channels[a.node].send(
                pack(frames.STACKS, 0, a.number, {"ranks": a.ranks})
            ),
            m.HangUp: lambda a: self.nodes.channels[a.node].hang_up(),
            m.StartNode: lambda a: self._to_start.add(a.node),
            m.Started: lambda a: a.call.sink.started(a.call.ranks),
            m.Deliver: self._deliver,
            m.Returned: lambda a: a.call.sink.returned(a.call.results),
            m.Resolve: self._resolve,
            m.Emit: lambda a: audience.event(a.event),
            m.ShowLog: self._show_log,
            m.FlushLog: lambda a: audience.flush(a.rank),
            m.Note: lambda a: audience.note(a.text, a.rank),
            m.CloseFiles: lambda a: close_all(a.fds),
            m.Changed: lambda _: self._changed.notify_all(),
        }

    # -- life -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start every node and wait until each rank is ready; on any failure release all and raise."""
        started = time.monotonic()
        try:
            with contextlib.suppress(OSError):  # a full disk
                os.makedirs(self.spec.log_dir, mode=0o700, exist_ok=True)
                self._held = hold_folder(self.spec.log_dir)
            self._upkeep = Upkeep(self.spec.provider, self.spec.plan.allocation)
            self.nodes.start_all()
            self._reader.start()
            self._wait_ready(started + self.spec.start_timeout_s)
        except BaseException:
            self.stop()
            raise
        took, num_nodes = time.monotonic() - started, len(self.spec.plan.nodes)
        self.audience.event(
            events.PoolStarted(pool_id=self.spec.pool_id, nodes=num_nodes, world_size=self.world_size, took_s=took)
        )

    def _wait_ready(self, deadline: float) -> None:
        with self._changed:
            while missing := self.state.missing:
                if self.state.broken is not None:
                    raise self.state.broken
                left = deadline - time.monotonic()
                if left <= 0:
                    raise ProvisionError(
                        f"{name_ranks(missing)} did not come up within {self.spec.start_timeout_s:g} s; "
                        f"their output is in {self.spec.log_dir}"
                    )
                self._changed.wait(left)

    def stop(self) -> None:
        """Fail what runs, end every rank, release every node. Safe to call twice, and from any thread."""
        if os.getpid() != self._pid:  # a forked child's copy: the pool is its parent's
            return
        if threading.current_thread() is self._reader:  # the garbage collector's: can't await itself
            threading.Thread(target=self.stop, name="atoll-stop").start()
            return
        with self._changed:
            first = not self.state.closing
            self.handle(m.Close(unwind=first))
            deadline = time.monotonic() + (_UNWIND_S if first else 0.0)
            while self.state.running and self._reader.is_alive() and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            self.handle(m.EndCalls())
            busy = self.state.busy
            for node in self.nodes.channels:
                node.send(pack(frames.SHUTDOWN, meta={"busy": busy}))
            self._leaving = True
        self._loop.wake()
        self.nodes.end(_LEAVE_S, self._join)
        if first:
            self._close()

    def _join(self, timeout_s: float) -> bool:
        if self._reader.is_alive():
            self._reader.join(timeout_s)
        return not self._reader.is_alive()

    def _close(self) -> None:
        with self._lock:
            for rank in list(self._channels):
                self._close_channel(rank)
        self._loop.close()
        self.arena.close()
        if self._log_files is not None:
            self._log_files.close()
        if self._held is not None:
            os.close(self._held)
        if self._upkeep is not None:
            self._upkeep.end()
        allocation = self.spec.plan.allocation
        try:
            self.spec.provider.release(allocation, keep_disks=False)
        except AtollError as error:  # what can't be reached now ends by itself
            if allocation.is_rented:
                print(f"atoll: machines of {allocation.infra} were not given back: {error}", file=sys.stderr)
        self.audience.event(events.PoolStopped(pool_id=self.spec.pool_id))
        self.audience.close()

    @property
    def usable(self) -> bool:
        """Can calls be made?"""
        return self.state.refusal is None

    # -- the state machine ------------------------------------------------------------------------------------------

    def handle(self, event: m.Event) -> None:
        """Have the state machine decide about an event, and perform what it says, in its order."""
        try:
            with self._lock:
                self._events.append(event)
                if self._is_handling:  # in the middle of another event, by a signal handler: that goes on with this one
                    return
                self._is_handling = True
                try:
                    while True:
                        for action in self._actions:
                            self._performers[type(action)](action)
                        if not self._events:
                            break
                        self._actions = iter(self.state.handle(self._events.popleft(), time.monotonic()))
                finally:
                    self._is_handling = False
        except BaseException as error:
            if isinstance(event, m.Submit):  # Ctrl-C between two lines: its ranks may count as busy and not know it
                self.handle(m.Cancel(event.call, error))
            elif isinstance(event, Frame):  # what it left undone may be another caller's
                self.handle(m.TimerFired())
            raise
        if self.state.next_due < self._sleeps_until:
            self._loop.wake()

    def read_answer(self, call: Call, timeout_s: float | None) -> float | None:
        """Read what the call's only rank sends in the thread that waits for it, where nothing else depends on that.

        Passing an answer from one thread to another costs more than all else of a call. Returns once there is one, or
        where the reader has to do it, with the seconds that are left.
        """
        if os.getpid() != self._pid:  # a forked child's copy: what it reads, its parent would miss
            return timeout_s
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        channel = None
        try:
            with self._lock:
                if len(call.ranks) != 1 or self.state.queue or self._is_handling:
                    return timeout_s
                found = self._channels.get(call.ranks[0])
                if found is None or found.fd not in self._loop.watched:
                    return timeout_s
                if found.waiting is not None or found.num_bytes or not (found.wake_fd >= 0 or found.prepare_poll()):
                    return timeout_s
                channel = found
                self._loop.modify(channel.fd, 0)
                channel.waiting, call.reader = call, threading.get_ident()
            while not (call.done or call.streaming):
                if deadline_s is not None:
                    timeout_s = max(0.0, deadline_s - time.monotonic())
                for fd, _ in channel.poll(None if timeout_s is None else timeout_s * 1e3):
                    if fd == channel.wake_fd:
                        os.eventfd_read(fd)
                with self._lock:
                    is_open = self._channels.get(channel.rank) is channel and channel.fd in self._loop.watched
                    if not is_open or timeout_s == 0.0:
                        break
                    self._read_rank(channel, True, False)
        finally:  # the reader reads the rank again
            interrupt: BaseException | None = None
            while channel is not None:
                try:
                    with self._lock:
                        channel.waiting, call.reader = None, 0
                        if self._channels.get(channel.rank) is not channel:
                            channel.close()
                        elif channel.fd in self._loop.watched:
                            self._loop.modify(channel.fd, READ | WRITE if channel.num_bytes else READ)
                    break
                except BaseException as error:  # Ctrl-C in the middle of it: once more
                    if interrupt is not None:
                        raise
                    interrupt = error
            if interrupt is not None:
                raise interrupt
        return timeout_s

    def _send_call(self, action: m.SendCall) -> None:
        request, header = action.call.request, action.header
        parts, fds = request.arguments.inline, tuple[int, ...]()
        if header.function_payload is not None:
            parts = [*request.function.encoded.inline, *parts]
        if header.arguments.get("file") or header.function_payload is not None:
            used = request.encoded if header.function_payload is not None else (request.arguments,)
            fds = tuple(encoded.segment.fd for encoded in used if encoded.segment is not None)
        data = header.to_wire(action.call.number, parts, len(fds))
        for rank in action.ranks:
            _RANK_FIELD.pack_into(data, _RANK_AT, rank)
            channel = self._channels.get(rank)
            if channel is None or channel.num_bytes or fds:
                try:
                    self._to_rank(rank, bytes(data), fds)
                except OSError as error:  # there is no descriptor left
                    self._events.append(m.Cancel(action.call, error))
                continue
            try:
                sent = channel.sock.send(data)
            except BlockingIOError:
                sent = 0
            except OSError:  # it is gone; its agent will say so
                continue
            if sent < len(data):
                self._to_rank(rank, bytes(data[sent:]))

    def _to_rank(self, rank: int, data: bytes, fds: Sequence[int] = ()) -> None:
        if self.nodes.are_remote:
            self.nodes.channels[self.node_of[rank]].send(data, fds)
        elif (channel := self._channels.get(rank)) is not None:
            channel.send(data, tuple(map(os.dup, fds)))

    def _to_agent(self, rank: int, data: bytes) -> None:
        self.nodes.channels[self.node_of[rank]].send(data)

    def _spawn(self, action: m.Spawn) -> None:
        rank, node = action.rank, self.nodes.channels[self.node_of[action.rank]]
        start = rank_start(self.spec, rank, self.node_of)
        if self.nodes.are_remote:
            node.send(pack(frames.START, rank, 0, start))
            return
        self._drop_channel(rank)
        log = os.path.join(self.spec.log_dir, f"rank{rank}")
        try:
            with contextlib.ExitStack() as given, contextlib.ExitStack() as failed:
                ours, theirs = socket.socketpair()
                given.callback(theirs.close)
                channel = RankChannel(rank, ours, self._loop, self._lock)
                failed.callback(channel.close)
                fds = [theirs.fileno()]
                for path, is_stderr in ((f"{log}.out", False), (f"{log}.err", True)):
                    output, writer = Output.piped(path, is_stderr)
                    channel.outputs.append(output)
                    given.callback(os.close, writer)
                    fds.append(writer)
                node.send(pack(frames.START, rank, 0, start, num_fds=len(fds)), fds)
                failed.pop_all()
        except OSError as error:
            self._events.append(m.Broken(ProvisionError(f"rank {rank} could not be started: {error}")))
            return
        self._channels[rank] = channel
        self._loop.watch(channel.fd, functools.partial(self._read_rank, channel))
        for output in channel.outputs:
            self._loop.watch(output.reader, functools.partial(self._read_output, channel, output))

    def _deliver(self, action: m.Deliver) -> None:
        try:
            action.call.sink.frame(action.frame, action.frame.rank, action.node)
        except Exception as error:  # noqa: BLE001 - out of descriptors or memory, say
            self._events.append(m.Cancel(action.call, error))
        if action.call.reader and action.call.reader != threading.get_ident():
            self._wake_caller(action.call)

    def _resolve(self, action: m.Resolve) -> None:
        call = action.call
        if call.request.arguments.segment is not None or call.request.function.encoded.segment is not None:
            call.request.release(self.arena if action.reuse else None)
        try:
            call.sink.done(call.results, call.failures, action.error)
        except Exception as problem:  # noqa: BLE001 - as above: whoever waits has to hear of it
            call.sink.done({}, [], AtollError(f"the call ended, and its results could not be taken: {problem}"))
        if call.reader and call.reader != threading.get_ident():
            self._wake_caller(call)

    def _wake_caller(self, call: Call) -> None:
        """Have the caller that reads its rank's channel see that another thread heard of its end."""
        for channel in self._channels.values():
            if channel.waiting is call:
                os.eventfd_write(channel.wake_fd, 1)

    def _show_log(self, action: m.ShowLog) -> None:
        frame, self._may_be_full = action.frame, True
        self.audience.log(action.call, frame.rank, bool(frame.flags), bytes(frame.rest))

    # -- nodes ------------------------------------------------------------------------------------------------------

    def _adopt(self, node: NodeChannel, handle: Node) -> bool:
        """Talk to a node that was started; False where the gang has come to its end meanwhile."""
        with self._lock:
            if self.state.closing:
                return False
            handle.listen(lambda _silent_s, line: self.audience.note(line))
            frame, lost = functools.partial(self._on_agent_frame, node), functools.partial(self._node_lost, node)
            node.open(handle, Channel(handle.channel, self._loop, frame, lost, self._lock))
            node.send(pack(frames.SETUP, meta=node_setup(self.spec, node.plan)))
            self.handle(m.NodeUp(node.plan.node))
        return True

    def _node_lost(self, node: NodeChannel, error: OSError | WireError | None) -> None:
        """A node's channel ended, and its ranks with it."""
        number, reason = node.plan.node, said_of_end(error)
        with self._lock:
            if (handle := node.detach()) is None:  # the pool has released it meanwhile
                return
            for rank in [rank for rank in self._channels if self.node_of[rank] == number]:
                self._drop_channel(rank)
            self.handle(m.NodeUnreachable(number))

        def replace() -> None:
            gone = not self.state.closing  # nobody asks how a node ended that was told to, which takes up to a second
            self.handle(m.NodeGone(number, (handle.reason if gone else None) or reason))
            self.nodes.release(node, handle, gone=gone)
            if number in self._to_start and not self.state.closing:
                self._to_start.discard(number)
                try:
                    self.nodes.start(node)
                except Exception as error:  # noqa: BLE001 - whatever a provider raises ends the pool with its reason
                    why = f"node {number} was lost and could not be started again: {error}"
                    self.handle(m.Broken(PoolClosed(why)))

        self.nodes.in_background(replace)

    # -- reading ----------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # without a reader everybody would wait for ever
            self.handle(m.Broken(PoolClosed(f"the pool's reader failed: {type(error).__name__}: {error}")))
            raise

    def _serve(self) -> None:
        state, poll, watched = self.state, self._loop.poll, self._loop.watched
        while not (self._leaving and all(node.handle is None for node in self.nodes.channels)):
            if self._may_be_full:
                while self.audience.is_full():
                    self._fire_timers()
                self._may_be_full = False
            self._sleeps_until = math.inf  # who sets a timer from here on wakes this thread
            due = self._sleeps_until = state.next_due
            ready = poll(None if due == math.inf else min(max(0.0, due - time.monotonic()), LONGEST_S))
            self._sleeps_until = -math.inf
            for fd, events_ in ready:
                if (callback := watched.get(fd)) is not None:
                    callback(events_ & ~WRITE != 0, events_ & WRITE != 0)
            if state.next_due <= time.monotonic():
                self._fire_timers()

    def _fire_timers(self) -> None:
        if time.monotonic() >= self.state.next_due:
            self.handle(m.TimerFired())

    def _read_rank(self, channel: RankChannel, readable: bool, writable: bool, *, is_last: bool = False) -> bool:
        """Take what there is to read from a rank; False where there is nothing more."""
        with self._lock:  # the reader and a caller that waits may both come here
            if writable:
                channel.flush()
            if not readable:
                return False
            try:
                received = channel.parser.receive(channel.sock)
                for frame in received or ():
                    if frame.rank != channel.rank or frame.kind not in frames.FROM_RANK:
                        raise WireError("no frame of this rank's")
                    if frame.kind == frames.RESULT or frame.kind == frames.ERROR:
                        for output in channel.outputs:  # what the call printed is shown before it returns
                            if ioctl(output.reader, termios.FIONREAD, _NOTHING) != _NOTHING:
                                self._drain_outputs(channel)
                    self.handle(frame)
            except BlockingIOError:
                return False
            except OSError:
                received = None
            except WireError:
                self._loop.unwatch(channel.fd)
                self.handle(m.ChannelBroken(channel.rank))
                return False
            if received is None and not is_last:
                self._loop.unwatch(channel.fd)
                self.handle(m.ChannelClosed(channel.rank))
            return received is not None

    def _read_output(self, channel: RankChannel, output: Output, _readable: bool, _writable: bool) -> None:
        with self._lock:
            if self._channels.get(channel.rank) is not channel:  # it was closed in this very round
                return
            data = output.read()
            if data:
                self._log(channel.rank, output, data)
            elif data is not None:
                self._loop.unwatch(output.reader)

    def _drain_outputs(self, channel: RankChannel) -> None:
        for output in channel.outputs:
            for data in output.drain():
                self._log(channel.rank, output, data)

    def _log(self, rank: int, output: Output, data: bytes) -> None:
        self.handle(Frame(frames.LOG, rank, 0, {}, memoryview(data), (), int(output.is_stderr)))

    def _drop_channel(self, rank: int) -> list[str]:
        """Close the channel of a rank that is gone, after what lies there: a result, say. Returns its last lines."""
        channel = self._channels.get(rank)
        if channel is None:
            return []
        while self._read_rank(channel, True, False, is_last=True):
            pass
        self._drain_outputs(channel)
        for fd in (channel.fd, *(output.reader for output in channel.outputs)):
            self._loop.unwatch(fd)
        self._close_channel(rank)
        return last_lines(channel.outputs)

    def _close_channel(self, rank: int) -> None:
        channel = self._channels.pop(rank)
        if channel.waiting is None:
            channel.close()
        else:  # its caller closes it: a descriptor that is closed under a poll may be another file's by then
            os.eventfd_write(channel.wake_fd, 1)

    def _on_agent_frame(self, node: NodeChannel, raw: RawFrame) -> None:
        if not 0 <= raw.rank < self.world_size:
            self._node_lost(node, WireError(f"it has no rank {raw.rank}"))
            return
        try:
            frame = raw.parsed()
        except WireError:  # bytes of the user's that look like a frame: its rank can't be trusted
            close_all(raw.fds)
            self.handle(m.ChannelBroken(raw.rank))
            return
        number = node.plan.node
        match frame.kind:
            case frames.AGENT:
                self.handle(m.AgentSaid(number, frame.meta))
            case frames.STACKS:
                seen = {int(rank): each for rank, each in frame.meta["ranks"].items()}
                self.handle(m.StacksSeen(number, frame.call, seen))
            case frames.EXIT:
                if tail := self._drop_channel(frame.rank):
                    frame.meta["tail"] = tail
                self.handle(frame)
            case _:
                if frame.kind == frames.LOG and self._log_files is not None:
                    self._log_files.write(frame.rank, bool(frame.flags), bytes(frame.rest))
                self.handle(frame)
