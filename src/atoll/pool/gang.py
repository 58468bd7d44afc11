"""A gang of ranks seen from the driver: starts nodes, sends calls, notices what fails, and stops everything.

One reader thread takes every frame; calls are sent from whichever thread makes them. ``_lock`` guards all state.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

from atoll.core import events
from atoll.core.errors import (
    AtollError,
    CallTimeout,
    NodeLost,
    PoolClosed,
    ProvisionError,
    WorkerDied,
    name_ranks,
)
from atoll.pool.agent.procs import kill_tree
from atoll.pool.hangs import Hang, HangWatch
from atoll.pool.job import Failure, Job
from atoll.pool.logs import LogRouter
from atoll.pool.members import GangSpec, NodeState, RankState, agent_command, node_setup
from atoll.pool.outgoing import call_frames
from atoll.pool.remote import OneUseArena, RankFiles, is_remote
from atoll.pool.scheduler import Scheduler
from atoll.pool.timers import Timer, Timers
from atoll.providers.base import Node
from atoll.providers.remote import RemoteHandle, RemotePlan, RemoteProvider
from atoll.wire import frames
from atoll.wire.frames import Frame, Parser, RawFrame, WireError, pack, receive, send_all
from atoll.wire.poller import Poller
from atoll.wire.segments import Arena

_SOFT_STOP_S = 0.15  # after a failure the other ranks get this long to end by themselves,
_HARD_STOP_S = 0.45  # and are killed after this long
_GIVE_UP_S = 0.9  # the call ends by now, whatever still has to die
_UNWIND_S = 0.3  # what a running call gets to unwind when the pool goes down
_DEAF_S = 10.0  # an agent that has not answered for so long is given up
_MAX_EARLY_DEATHS = 3
_FORCE_S = 3.0  # ending one node by force takes no longer than this
_LEAVE_S = 1.5  # agents get this long to end, of which they give their ranks a second; then their channels close
Watcher = Callable[[events.Event], object]


class Gang:
    """Ranks on nodes. ``submit`` a job; its sink hears what comes of it."""

    def __init__(self, spec: GangSpec, logs: LogRouter, on_event: Watcher | None = None) -> None:
        self.spec = spec
        self._remote = is_remote(spec.plan)
        self.arena = OneUseArena() if self._remote else Arena()
        self._log_files = RankFiles(spec.log_dir) if self._remote else None  # local agents write them themselves
        self.logs = logs
        self._on_event = on_event
        self.world_size = spec.plan.world_size
        self.ranks: list[RankState] = []
        self.nodes = [NodeState(plan) for plan in spec.plan.nodes]
        for node in spec.plan.nodes:
            for _ in range(node.num_ranks):
                self.ranks.append(RankState(len(self.ranks), node.node))
        self.log_job: Callable[[Job | None, int, bool, bytes], bool] | None = None
        self._scheduler: Scheduler[Job] = Scheduler(self.world_size)
        self._jobs: dict[int, Job] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._closing = False
        self._given_up = False  # it did not start
        self._broken: BaseException | None = None
        self._timers = Timers()
        self._hangs = HangWatch(spec.hang_timeout_s)
        self._hang_round: Timer | None = None
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poller: Poller[NodeState | None] = Poller()
        self._poller.watch(self._wake, None)
        self._pid = os.getpid()
        self._reader: threading.Thread | None = None
        self._reviver: threading.Thread | None = None
        self._releasing: list[threading.Thread] = []  # nodes of other machines that were lost or have ended

    # -- life -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start every node and wait until each rank is ready; on any failure release all and raise."""
        started = time.monotonic()
        try:
            self._start_nodes()
            self._reader = threading.Thread(target=self._read, name=f"atoll-{self.spec.pool_id}", daemon=True)
            self._reader.start()
            self._wait_ready(started + self.spec.start_timeout_s)
        except BaseException:
            self.stop()
            raise
        took = time.monotonic() - started
        self._tell(
            events.PoolStarted(
                pool_id=self.spec.pool_id, nodes=len(self.nodes), world_size=self.world_size, took_s=took
            )
        )

    def _start_nodes(self) -> None:
        """Nodes of this machine one by one, which takes milliseconds; others all at once."""

        def start(node: NodeState) -> None:
            try:
                self._start_node(node)
            except Exception as error:
                raise ProvisionError(
                    f"node {node.plan.node} of {len(self.nodes)} could not be started on "
                    f"{self.spec.provider.name}: {error}",
                    node=node.plan.node,
                ) from error

        if not self._remote:
            for node in self.nodes:
                start(node)
            return
        with ThreadPoolExecutor(len(self.nodes), thread_name_prefix="atoll-start") as threads:
            futures = [threads.submit(start, node) for node in self.nodes]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                self._given_up = True  # those that are still to come are stopped as they come
                self._abandon()
                raise

    def _abandon(self) -> None:
        if self._remote:
            cast("RemoteProvider", self.spec.provider).abandon(self.spec.plan.nodes)

    def _start_node(self, state: NodeState) -> None:
        handle = self.spec.provider.start(state.plan, agent_command(self.spec.source_root))
        with self._lock:
            wanted = not self._closing and not self._given_up
            if wanted:
                self._adopt(state, handle)
        if not wanted:
            handle.stop()

    def _adopt(self, state: NodeState, handle: Node) -> None:
        state.handle, state.parser, state.ended = handle, Parser(), None
        state.silent, state.asked_s = None, 0.0
        if isinstance(state.plan, RemotePlan):
            cast("RemoteHandle", handle).listen(self.logs.note)
        with state.send_lock:
            send_all(handle.channel, pack(frames.SETUP, meta=node_setup(self.spec, state.plan, self.ranks)))
        self._poller.watch(handle.channel.fileno(), state)
        self._poke()

    def _wait_ready(self, deadline: float) -> None:
        with self._changed:
            while not all(state.ready for state in self.ranks):
                if self._broken is not None:
                    raise self._broken
                left = deadline - time.monotonic()
                if left <= 0:
                    missing = [state.rank for state in self.ranks if not state.ready]
                    raise ProvisionError(
                        f"{name_ranks(missing)} did not come up within {self.spec.start_timeout_s:g} s; "
                        f"their output is in {self.spec.log_dir}"
                    )
                self._changed.wait(left)

    def stop(self) -> None:
        """Fail what runs, end every rank, release every node. Safe to call twice, and from any thread."""
        if os.getpid() != self._pid:  # a forked child's copy: the pool is its parent's
            return
        if threading.current_thread() is self._reader:  # a callback's, or the garbage collector's: can't await itself
            threading.Thread(target=self.stop, name="atoll-stop").start()
            return
        with self._lock:
            first = not self._closing
            self._closing = True
            closed = self._broken or PoolClosed("the pool was shut down before the call finished")
            for job in self._scheduler.drain():
                self._end(job, job.error or closed)
            for job in self._jobs.values():
                job.error = job.error or (None if job.failures else closed)
            if first:
                self._let_end()
            for job in list(self._jobs.values()):
                self._end(job, job.error)
        for node in self.nodes:
            self._send(node, pack(frames.SHUTDOWN))
        if self._reviver is not None:
            self._abandon()
            self._reviver.join(_LEAVE_S)
        if self._reader is not None:
            self._poke()
            self._reader.join(_LEAVE_S)
            if self._reader.is_alive():  # an agent that does not answer: end its channel from this side
                handles = [node.handle for node in self.nodes if node.handle is not None]
                for lost in handles:
                    with contextlib.suppress(OSError):
                        lost.channel.shutdown(socket.SHUT_RDWR)
                self._reader.join(_FORCE_S * (1 + len(handles)))
        for node in self.nodes:
            handle, node.handle = node.handle, None
            if handle is not None:
                handle.stop()
        for releasing in self._releasing:
            releasing.join(_FORCE_S)
        if first:
            self._poller.close()
            with self._lock:
                os.close(self._wake)
                self._wake = -1
            self.arena.close()
            if self._log_files is not None:
                self._log_files.close()
            self._tell(events.PoolStopped(pool_id=self.spec.pool_id))

    def _let_end(self) -> None:
        """Running calls get a moment to unwind: `finally` blocks of theirs, and of generators, are run."""
        for job in self._jobs.values():
            self._order(job, frames.CANCEL)
        deadline = time.monotonic() + _UNWIND_S
        while self._jobs and self._reader is not None and self._reader.is_alive() and time.monotonic() < deadline:
            self._changed.wait(deadline - time.monotonic())

    @property
    def in_reader(self) -> bool:
        """Is this the thread that takes answers, as in a callback? It must not wait for one."""
        return threading.current_thread() is self._reader

    @property
    def usable(self) -> bool:
        """Can calls be made?"""
        return not self._closing and self._broken is None

    # -- calls ----------------------------------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """Queue a call; its sink hears the rest."""
        with self._lock:
            if self._broken is not None or self._closing:
                self._release(job, reusable=True)
                raise self._broken or PoolClosed(
                    "the pool is shut down; make the call inside its `with` block, or call .up() first"
                )
            self._scheduler.add(job)
            self._dispatch()

    def cancel(self, job: Job, error: BaseException) -> None:
        """Stop a call wherever it is; it ends with this error within a second."""
        with self._lock:
            if job.done:
                return
            job.error = job.error or error
            if self._scheduler.remove(job):
                self._end(job, job.error)
            else:
                self._stop_ranks(job, soft_s=0.0)

    def credit(self, job: Job, rank: int, num: int) -> None:
        """Let a streaming rank produce that many values more."""
        self._to_rank(job, rank, frames.CREDIT, {"n": num})

    def close_stream(self, job: Job, rank: int) -> None:
        """The consumer wants no more: the rank's generator is closed."""
        self._to_rank(job, rank, frames.CLOSE)

    def _to_rank(self, job: Job, rank: int, kind: int, meta: dict[str, Any] | None = None) -> None:
        with self._lock:
            if not job.done and rank not in job.ended:
                self._send(self._node_of(rank), pack(kind, rank, job.number, meta))

    def _dispatch(self) -> None:
        while (started := self._scheduler.next()) is not None:
            try:
                self._start_job(*started)
            except BaseException as error:  # Ctrl-C between two lines: its ranks count as busy and may not know it
                self.cancel(started[0], error)
                raise

    def _start_job(self, job: Job, ranks: tuple[int, ...]) -> None:
        job.begin(next(self._numbers), ranks)
        self._jobs[job.number] = job
        for node, data, fds in call_frames(job, self.ranks):
            self._send(self.nodes[node], data, fds)
        job.sink.started(ranks)
        if job.request.timeout_s is not None:
            number, limit = job.number, job.request.timeout_s
            job.timers.append(self._after(limit, lambda: self._timed_out(job, number, limit)))
        if self._on_event is not None:
            self._tell(events.CallStarted(job_id=job.request.job_id, ranks=ranks))
        if self._hang_round is None:
            self._hang_round = self._after(self._hangs.period_s, self._look_for_hangs)

    def _send(self, node: NodeState, data: bytes | bytearray, fds: Sequence[int] = ()) -> None:
        handle = node.handle
        if handle is None:
            return
        try:
            with node.send_lock:
                send_all(handle.channel, data, fds)
        except OSError:
            pass  # a lost node is noticed by the reader

    def _node_of(self, rank: int) -> NodeState:
        return self.nodes[self.ranks[rank].node]

    # -- the end of a call ------------------------------------------------------------------------------------------

    def _rank_ended(self, job: Job, rank: int) -> None:
        """The rank is through with the job: settle what that decides."""
        job.ended.add(rank)
        if job.wants_group and rank not in job.wants_group and not job.no_group:
            job.no_group = True
            for waiting in job.wants_group:
                if waiting not in job.ended:
                    self._send(self._node_of(waiting), pack(frames.GROUP, waiting, job.number, {"go": 0}))
        if not job.unfinished:
            self._end(job, job.error)

    def _fail(self, job: Job, failure: Failure) -> None:
        job.failures.append(failure)
        if len(job.failures) == 1 and job.unfinished:
            self._stop_ranks(job, soft_s=_SOFT_STOP_S)

    def _stop_ranks(self, job: Job, *, soft_s: float) -> None:
        """Ask ranks that still run the call to stop, then kill them; the call ends within a second."""
        if job.stopping:
            return
        job.stopping = True
        for delay_s, action in (
            (soft_s, lambda: self._order(job, frames.CANCEL)),
            (soft_s + _HARD_STOP_S - _SOFT_STOP_S, lambda: self._order(job, frames.KILL)),
            (_GIVE_UP_S, lambda: self._end(job, job.error)),
        ):
            job.timers.append(self._after(delay_s, action))
        number = job.number
        self._after(max(map(self._deaf_s, self.nodes)), lambda: self._lose_deaf(job, number))

    def _lose_deaf(self, job: Job, number: int) -> None:
        """A rank that was to be killed long ago still counts as running: its agent does not hear us."""
        if job.number == number:
            for rank in job.unfinished:
                if self._scheduler.running.get(rank) is job:
                    node = self._node_of(rank)
                    self._lose(node, f"its agent did not stop rank {rank} within {self._deaf_s(node):g} s")

    @staticmethod
    def _deaf_s(node: NodeState) -> float:
        """How long an agent may owe an answer: over a connection that may be lost, longer than it may be."""
        return _DEAF_S + (node.plan.grace_s if isinstance(node.plan, RemotePlan) else 0.0)

    def _lose(self, node: NodeState, reason: str) -> None:
        """Give a node up that no longer answers; the reader sees the end of its channel."""
        if node.handle is not None and not self._closing:
            node.silent = reason
            with contextlib.suppress(OSError):
                node.handle.channel.shutdown(socket.SHUT_RDWR)

    def _order(self, job: Job, kind: int) -> None:
        for rank in job.unfinished:
            # A result that crosses the order on its way does not save the rank.
            self.ranks[rank].spent |= kind == frames.KILL
            self._send(self._node_of(rank), pack(kind, rank, job.number))

    def _end(self, job: Job, error: BaseException | None) -> None:
        if job.done:
            return
        self._jobs.pop(job.number, None)
        for timer in job.timers:
            self._timers.take_back(timer)
        job.timers.clear()
        if error is None and job.failures and self._retry(job):
            return
        job.done = True
        self._release(job, reusable=not (job.kept or job.failures or error is not None))
        if self._on_event is not None:
            failed = str(error or (job.failures[0].error if job.failures else "") or "") or None
            if failed is None and job.failures:
                failed = f"rank {job.failures[0].rank} raised"
            took = time.monotonic() - job.started_s
            self._tell(events.CallFinished(job_id=job.request.job_id, took_s=took, error=failed))
        try:
            job.sink.done(job.results, job.failures, error)
        except Exception as problem:  # noqa: BLE001 - out of descriptors or memory, say: whoever waits has to hear of it
            job.sink.done({}, [], AtollError(f"the call ended, and its results could not be taken: {problem}"))
        self._changed.notify_all()

    def _release(self, job: Job, *, reusable: bool) -> None:
        """Let go of the memory files that its arguments and function lie in."""
        for encoded in (job.request.arguments, job.request.function.encoded):
            segment, encoded.segment = encoded.segment, None
            if segment is None:
                continue
            if reusable:
                self.arena.give_back(segment)
            else:
                segment.close()

    def _retry(self, job: Job) -> bool:
        """A call that lost a rank is started again as a whole, if it may be."""
        deaths = [failure for failure in job.failures if failure.is_death]
        if not deaths or job.attempt >= job.request.retries or job.streaming or not self.usable:
            return False
        job.attempt += 1
        for frame in (*job.results.values(), *(f.frame for f in job.failures if f.frame is not None)):
            for fd in frame.fds:
                os.close(fd)
        reason = str(deaths[0].error).partition("\n")[0]
        self._tell(events.CallRetried(job_id=job.request.job_id, attempt=job.attempt, reason=reason))
        self.logs.note(f"{job.request.name}: {reason}; starting again, {job.attempt} of {job.request.retries} retries")
        self._scheduler.add(job, first=True)
        self._dispatch()
        return True

    def _timed_out(self, job: Job, number: int, limit: float) -> None:
        if self._jobs.get(number) is job:
            self.cancel(job, CallTimeout(limit, job.unfinished))

    # -- hangs ------------------------------------------------------------------------------------------------------

    def _look_for_hangs(self) -> None:
        """Ask for the stacks of every call that runs since the last round; one timer for all, none while idle."""
        period = self._hangs.period_s
        old = time.monotonic() - period
        for job in self._jobs.values():
            if job.started_s <= old and not job.stopping:
                for node in {self.ranks[rank].node for rank in job.unfinished}:
                    self._ask_stacks(self.nodes[node], job)
        blocked = self._scheduler.waiting
        if blocked is not None and self._jobs and all(job.streaming for job in self._jobs.values()):
            self._warn_of_streams(blocked)
        self._hang_round = self._after(period, self._look_for_hangs) if self._jobs else None

    def _ask_stacks(self, node: NodeState, job: Job) -> None:
        now = time.monotonic()
        node.asked_s = node.asked_s or now
        if now - node.asked_s > self._deaf_s(node):
            self._lose(node, f"its agent has not answered for {now - node.asked_s:.0f} s")
        else:
            self._send(node, pack(frames.STACKS, 0, job.number))

    def _warn_of_streams(self, blocked: Job) -> None:
        """A call waits for ranks that only stream: whoever made it may be the one who should read the streams."""
        if not blocked.warned:
            blocked.warned = True
            streams = ", ".join(sorted({job.request.name for job in self._jobs.values()}))
            self.logs.note(
                f"{blocked.request.name} waits for a free rank while {streams} is being streamed: read that stream to "
                f"its end or close() it, or give the pool more ranks"
            )

    def _on_stacks(self, frame: Frame) -> None:
        job = self._jobs.get(frame.call)
        if job is None or job.stopping:
            return
        stacks = {int(rank): text for rank, text in frame.meta["stacks"].items()}
        hang = self._hangs.seen(job, stacks, {rank: self.ranks[rank].main_thread for rank in stacks})
        if hang is None:
            return
        if hang.error is not None:
            job.error = hang.error
            self._order(job, frames.KILL)
            self._stop_ranks(job, soft_s=0.0)
        else:
            self._warn_of(job, hang)

    def _warn_of(self, job: Job, hang: Hang) -> None:
        job.warned = True
        self._tell(
            events.HangSuspected(
                job_id=job.request.job_id, ranks=hang.ranks, silent_s=hang.silent_s, stacks=hang.stacks
            )
        )
        text = "\n".join(f"rank {rank}:\n{stack}" for rank, stack in hang.stacks.items())
        self.logs.note(f"{name_ranks(hang.ranks)} made no progress for {hang.silent_s:.0f} s{hang.why}\n{text}")

    # -- frames -----------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # without a reader everybody would wait for ever
            self._break(PoolClosed(f"the pool's reader failed: {type(error).__name__}: {error}"))
            raise

    def _serve(self) -> None:
        while True:
            for node, _, _ in self._poller.wait(self._next_timer()):
                if node is None:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wake)
                else:
                    self._read_node(node)
            self._run_timers()
            with self._lock:
                if self._closing and not any(self._watched(node) for node in self.nodes):
                    return

    def _watched(self, node: NodeState) -> bool:
        return node.handle is not None and node.handle.channel.fileno() in self._poller

    def _read_node(self, node: NodeState) -> None:
        assert node.handle is not None
        reason = "its agent ended"
        try:
            data, fds = receive(node.handle.channel)
            received = node.parser.feed(data, fds) if data else []
        except (OSError, WireError) as error:
            data, received, reason = b"", [], f"its channel broke: {error}"
        if not data:
            self._node_lost(node, reason)
            return
        with self._lock:
            for raw in received:
                try:
                    frame = raw.parsed()
                except WireError as error:  # bytes of the user's that look like a frame: its rank can't be trusted
                    self._bad_frame(raw, error)
                else:
                    self._on_frame(node, frame)

    def _bad_frame(self, raw: RawFrame, error: WireError) -> None:
        for fd in raw.fds:
            os.close(fd)
        if not 0 <= raw.rank < self.world_size:
            raise error
        state = self.ranks[raw.rank]
        job = self._scheduler.running.get(raw.rank)
        if job is not None and not job.done and raw.rank not in job.ended:
            died = WorkerDied(rank=raw.rank, node=state.node, reason=f"wrote into its channel to Atoll: {error}")
            self._fail(job, Failure(raw.rank, state.node, error=died))
        self._send(self._node_of(raw.rank), pack(frames.KILL, raw.rank))

    def _on_frame(self, node: NodeState, frame: Frame) -> None:
        job = self._jobs.get(frame.call) if frame.call else None
        match frame.kind:
            case frames.RESULT | frames.ERROR:
                self._on_result(job, frame)
            case frames.LOG:
                self._on_log(job, frame)
            case frames.VALUE | frames.STREAM if job is not None and job.stopping:
                for fd in frame.fds:  # nobody takes values of a call that failed; what it reported still counts
                    os.close(fd)
            case frames.VALUE | frames.STREAM | frames.REPORT if job is not None:
                job.saw(frame.rank)
                job.streaming = job.streaming or frame.kind == frames.STREAM
                try:
                    job.sink.frame(frame, frame.rank, node.plan.node)
                except BaseException as error:  # noqa: BLE001 - what a report's pickle runs here is the user's
                    self.cancel(job, error)
            case frames.WANT_GROUP if job is not None:
                self._on_want_group(job, frame.rank)
            case frames.HELLO:
                self._on_hello(frame)
            case frames.EXIT:
                self._on_exit(node, frame)
            case frames.STACKS:
                node.asked_s = 0.0
                self._on_stacks(frame)
            case frames.AGENT:
                self._on_agent(node, frame)
            case _:
                for fd in frame.fds:
                    os.close(fd)

    def _on_result(self, job: Job | None, frame: Frame) -> None:
        state = self.ranks[frame.rank]
        state.has_torch = bool(frame.flags & frames.HAS_TORCH)
        self.logs.flush(frame.rank)
        if state.spent or frame.flags & frames.SPENT:  # it ends, and a fresh one is started when it has
            state.ready, state.spent = False, True
            self._scheduler.lost(frame.rank)
        else:
            self._scheduler.free(frame.rank)
        if job is None or frame.rank in job.ended:
            for fd in frame.fds:
                os.close(fd)
        else:
            for line in frame.meta.get("notes", ()):
                self.logs.note(line, frame.rank)
            job.kept = job.kept or bool(frame.flags & frames.KEPT)
            if frame.kind == frames.RESULT:
                job.results[frame.rank] = frame
                if job.streaming:
                    job.sink.returned(job.results)
            elif not frame.meta.get("cancelled"):
                self._fail(job, Failure(frame.rank, state.node, frame=frame))
            elif not job.failures and job.error is None:
                job.error = AtollError(f"rank {frame.rank} stopped without being asked to")
            self._rank_ended(job, frame.rank)
        self._dispatch()

    def _on_log(self, job: Job | None, frame: Frame) -> None:
        data = bytes(frame.rest)
        if job is not None:
            job.saw(frame.rank)
        if self._log_files is not None:
            self._log_files.write(frame.rank, bool(frame.flags), data)
        if self.log_job is None or not self.log_job(job, frame.rank, bool(frame.flags), data):
            self.logs.feed(frame.rank, bool(frame.flags), data)

    def _on_want_group(self, job: Job, rank: int) -> None:
        job.wants_group.add(rank)
        if job.no_group or (job.ended - job.wants_group):
            job.no_group = True
            self._send(self._node_of(rank), pack(frames.GROUP, rank, job.number, {"go": 0}))
        elif len(job.wants_group) == len(job.ranks):
            job.wants_group.clear()  # a decorated function may ask again
            for member in job.ranks:
                self._send(self._node_of(member), pack(frames.GROUP, member, job.number, {"go": 1}))

    def _on_hello(self, frame: Frame) -> None:
        state = self.ranks[frame.rank]
        state.pid, state.port = frame.meta["pid"], frame.meta["port"]
        state.main_thread = frame.meta["main_thread"]
        state.ready, state.spent, state.has_torch = True, False, False
        state.sent, state.path = set(), self.spec.path
        self._node_of(state.rank).restarts = 0
        self._tell(events.RankStarted(rank=state.rank, node=state.node, pid=state.pid, restarts=state.starts))
        state.starts += 1
        self._scheduler.free(frame.rank)
        self._changed.notify_all()
        self._dispatch()

    def _on_exit(self, node: NodeState, frame: Frame) -> None:
        state = self.ranks[frame.rank]
        meta = frame.meta
        self.logs.flush(frame.rank)
        job = self._scheduler.running.get(frame.rank)
        came_up, state.ready = state.ready or state.spent, False
        self._scheduler.lost(frame.rank)
        died = WorkerDied(
            rank=frame.rank,
            node=state.node,
            exit_code=meta["exit_code"],
            signal=meta["signal"],
            oom=meta["oom"],
            log_tail=meta["tail"],
            reason=meta.get("fault"),
        )
        spent, state.spent = state.spent, False
        if not meta["killed"] and not spent and not self._closing:
            self._tell(events.RankDied(rank=frame.rank, node=state.node, reason=died.reason))
        state.early_deaths = 0 if came_up else state.early_deaths + 1
        if job is not None and not job.done and frame.rank not in job.ended:
            if not (meta["killed"] and job.stopping):  # its agent may have ended it for reasons of its own
                self._fail(job, Failure(frame.rank, state.node, error=died))
            self._rank_ended(job, frame.rank)
        if state.early_deaths >= (_MAX_EARLY_DEATHS if state.starts else 1):
            self._break(ProvisionError(f"a rank could not be started: {died}", node=state.node))
        elif not self._closing:
            self._send(node, pack(frames.SPAWN, frame.rank))
            self._expect([state])

    def _expect(self, ranks: Sequence[RankState]) -> None:
        """Ranks were started again: they come up in time, or the pool ends saying so."""
        seen = [(state, state.starts) for state in ranks]

        def check() -> None:
            late = [state.rank for state, starts in seen if not state.ready and state.starts == starts]
            if late and not self._closing:
                limit = self.spec.start_timeout_s
                self._break(
                    PoolClosed(f"{name_ranks(late)} did not come up again within {limit:g} s; see {self.spec.log_dir}")
                )

        self._after(self.spec.start_timeout_s, check)

    def _on_agent(self, node: NodeState, frame: Frame) -> None:
        if "ended" in frame.meta:
            node.ended = frame.meta["ended"]
        elif frame.meta["version"] != frames.VERSION:
            self._break(
                ProvisionError(
                    f"node {node.plan.node} speaks wire version {frame.meta['version']}, this driver "
                    f"{frames.VERSION}: install the same Atoll on both",
                    node=node.plan.node,
                )
            )

    # -- nodes that go away -----------------------------------------------------------------------------------------

    def _node_lost(self, node: NodeState, reason: str) -> None:
        with self._lock:
            handle, node.handle = node.handle, None
            assert handle is not None
            self._poller.unwatch(handle.channel.fileno())
            node.parser.close()
            reason = node.ended or node.silent or handle.reason or reason
            ranks = [state for state in self.ranks if state.node == node.plan.node]
            came_up = all(state.starts for state in ranks)
            lost = NodeLost(node.plan.node, reason)
            closing = self._closing
            if node.ended is not None and not closing:
                self._break(PoolClosed(f"node {node.plan.node} ended: {reason}"))
            elif not came_up and not closing:
                number = node.plan.node
                self._break(ProvisionError(f"node {number} ended while it started: {reason}", node=number))
            for state in ranks:
                job = self._scheduler.running.get(state.rank)
                state.ready = False
                self._scheduler.lost(state.rank)
                if job is not None and not job.done and state.rank not in job.ended:
                    self._fail(job, Failure(state.rank, state.node, error=lost))
                    self._rank_ended(job, state.rank)
        if self._remote:  # logging out takes its time, and others wait for what comes over here
            self._releasing = [thread for thread in self._releasing if thread.is_alive()]
            self._releasing.append(threading.Thread(target=handle.stop, name="atoll-release", daemon=True))
            self._releasing[-1].start()
        else:
            handle.stop()
            if not closing or os.path.exists(self.spec.tmp_dir(node.plan)):  # it did not end by itself
                self._sweep(node)
        if not closing and self._broken is None:
            self._reviver = threading.Thread(target=self._revive, args=(node,), name="atoll-revive", daemon=True)
            self._reviver.start()

    def _sweep(self, node: NodeState) -> None:
        """An agent on this machine that was killed can't clean up after itself: its processes and files go here."""
        kill_tree(None, self.spec.node_tag(node.plan))
        shutil.rmtree(self.spec.tmp_dir(node.plan), ignore_errors=True)

    def _revive(self, node: NodeState) -> None:
        node.restarts += 1
        try:
            if self._closing:
                return
            if node.restarts > _MAX_EARLY_DEATHS:
                raise NodeLost(node.plan.node, f"{node.restarts} times in a row before a rank came up")
            self._start_node(node)
            with self._lock:
                self._expect([state for state in self.ranks if state.node == node.plan.node])
        except Exception as error:  # noqa: BLE001 - whatever a provider raises ends the pool with its reason
            self._break(PoolClosed(f"node {node.plan.node} was lost and could not be started again: {error}"))

    def _break(self, error: BaseException) -> None:
        """The pool can't go on: fail everything with this error."""
        with self._lock:
            self._broken = self._broken or error
            for job in [*self._jobs.values(), *self._scheduler.drain()]:
                if not job.failures:
                    job.error = job.error or error
                self._end(job, job.error)
            self._changed.notify_all()

    # -- timers and events --------------------------------------------------------------------------------------------

    def _after(self, delay_s: float, action: Callable[[], None]) -> Timer:
        with self._lock:
            timer, soonest = self._timers.add(delay_s, action)
        if soonest and threading.current_thread() is not self._reader:
            self._poke()
        return timer

    def _poke(self) -> None:
        with self._lock:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def _next_timer(self) -> float | None:
        with self._lock:
            return self._timers.next_s()

    def _run_timers(self) -> None:
        while True:
            with self._lock:  # taken anew for each, so that callers get their turn
                action = self._timers.due()
                if action is None:
                    return
                action()

    def _tell(self, event: events.Event) -> None:
        if self._on_event is not None:
            self._on_event(event)
