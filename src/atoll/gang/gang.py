"""A gang of ranks seen from the driver: sends calls, notices what fails, and stops everything.

One reader thread takes every frame; calls are sent from whichever thread makes them. ``_lock`` guards all state.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Sequence

from atoll.core import events
from atoll.core.errors import (
    AtollError,
    HangError,
    NodeLost,
    PoolClosed,
    ProvisionError,
    WorkerDied,
    name_ranks,
)
from atoll.gang.call import Failure, Job
from atoll.gang.dispatch import Dispatch
from atoll.gang.hangs import HangWatch, suspicion, unread_streams
from atoll.gang.members import GangSpec, NodeState, RankState
from atoll.gang.nodes import Nodes
from atoll.gang.notifier import Audience
from atoll.gang.reader import Reader
from atoll.gang.remote_ranks import OneUseArena, RankFiles, is_remote
from atoll.gang.timers import Timer
from atoll.providers.base import Node
from atoll.wire import frames
from atoll.wire.frames import Frame, RawFrame, WireError, close_all, pack
from atoll.wire.payloads import Arena
from atoll.worker.folder_locks import hold_folder

_UNWIND_S = 0.3  # what a running call gets to unwind when the pool goes down
_MAX_EARLY_DEATHS = 3  # of a rank that was up once, in a row


class Gang:
    """Ranks on nodes. ``submit`` a job; its sink hears what comes of it."""

    def __init__(self, spec: GangSpec, audience: Audience) -> None:
        self.spec = spec
        remote = is_remote(spec.plan)
        self.arena = OneUseArena() if remote else Arena()
        self._held: int | None = None  # the folder of its logs
        self._log_files = RankFiles(spec.log_dir) if remote else None  # local agents write them themselves
        self.audience = audience
        self.world_size = spec.plan.world_size
        self.ranks: list[RankState] = []
        for node in spec.plan.nodes:
            for _ in range(node.num_ranks):
                self.ranks.append(RankState(len(self.ranks), node.node))
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._hangs = HangWatch(spec.hang_timeout_s)
        self._hang_round: Timer | None = None
        self._reader = Reader(f"atoll-{spec.pool_id}", self._lock, self)
        self.nodes = Nodes(spec, self.ranks, self._lock, self._reader, audience.note)
        self._calls = Dispatch(self.ranks, self.nodes, self._reader, self.arena, self._changed, audience)
        self.credit, self.close_stream = self._calls.credit, self._calls.close_stream
        self._pid = os.getpid()

    # -- life -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start every node and wait until each rank is ready; on any failure release all and raise."""
        started = time.monotonic()
        try:
            self.nodes.start()
            self._reader.start()
            self._wait_ready(started + self.spec.start_timeout_s)
        except BaseException:
            self.stop()
            raise
        with contextlib.suppress(OSError):  # a full disk
            os.makedirs(self.spec.log_dir, mode=0o700, exist_ok=True)
            self._held = hold_folder(self.spec.log_dir)
        took, num_nodes = time.monotonic() - started, len(self.spec.plan.nodes)
        self._tell(
            events.PoolStarted(pool_id=self.spec.pool_id, nodes=num_nodes, world_size=self.world_size, took_s=took)
        )

    def _wait_ready(self, deadline: float) -> None:
        with self._changed:
            while not all(state.ready for state in self.ranks):
                if self._calls.broken is not None:
                    raise self._calls.broken
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
        if self._reader.is_current:  # the garbage collector's: can't await itself
            threading.Thread(target=self.stop, name="atoll-stop").start()
            return
        with self._lock:
            first = not self._closing
            self.nodes.closing = True
            self._calls.wind_up(_UNWIND_S if first else 0.0)
        self.nodes.end()
        if first:
            self._reader.close()
            self.arena.close()
            if self._log_files is not None:
                self._log_files.close()
            if self._held is not None:
                os.close(self._held)
            self._tell(events.PoolStopped(pool_id=self.spec.pool_id))
            self.audience.close()

    @property
    def _closing(self) -> bool:
        return self.nodes.closing

    @property
    def usable(self) -> bool:
        """Can calls be made?"""
        return not self._closing and self._calls.broken is None

    # -- calls ----------------------------------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """Queue a call; its sink hears the rest."""
        with self._lock:
            if not self.usable:
                job.request.release(self.arena)
                raise self._calls.broken or PoolClosed(
                    "the pool is shut down; make the call inside its `with` block, or call .up() first"
                )
            self._calls.add(job)
            if self._hang_round is None:
                self._hang_round = self._reader.after(self._hangs.period_s, self._look_for_hangs)

    def cancel(self, job: Job, error: BaseException) -> None:
        """Stop a call wherever it is; it ends with this error within a second."""
        with self._lock:
            self._calls.cancel(job, error)

    # -- hangs ------------------------------------------------------------------------------------------------------

    def _look_for_hangs(self) -> None:
        """Ask for the stacks of every call that runs since the last round; one timer for all, none while idle."""
        period, running = self._hangs.period_s, self._calls.running
        old = time.monotonic() - period
        for job in running.values():
            if job.started_s <= old and not job.stopping:
                for node in {self.ranks[rank].node for rank in job.unfinished}:
                    self.nodes.ask_stacks(self.nodes.states[node], job.number)
        line = unread_streams(self._calls.waiting, running.values())
        if line is not None:
            self.audience.note(line)
        busy = running or self._calls.waiting is not None
        self._hang_round = self._reader.after(period, self._look_for_hangs) if busy else None

    def _on_stacks(self, frame: Frame) -> None:
        job = self._calls.running.get(frame.call)
        if job is None or job.stopping:
            return
        hang = self._hangs.seen(
            job, {int(rank): {**seen, "pid": self.ranks[int(rank)].pid} for rank, seen in frame.meta["ranks"].items()}
        )
        if isinstance(hang, HangError):
            self._calls.kill(job, hang)
        elif hang is not None:
            self._tell(hang)
            self.audience.note(suspicion(hang))

    # -- frames: what the reader hears --------------------------------------------------------------------------------

    def failed(self, error: BaseException) -> None:
        """Without a reader everybody would wait for ever."""
        self._break(PoolClosed(f"the pool's reader failed: {type(error).__name__}: {error}"))

    def is_full(self) -> bool:
        """Has what came to be taken by the audience before more is read?"""
        return self.audience.is_full()

    def writable(self, node: NodeState) -> None:
        """A channel takes more of what waits for it."""
        with self._lock:
            self.nodes.flush(node)

    def take(self, node: NodeState, received: list[RawFrame]) -> None:
        """Frames of a node's."""
        for raw in received:
            try:
                frame = raw.parsed()
            except WireError as error:  # bytes of the user's that look like a frame: its rank can't be trusted
                self._bad_frame(raw, error)
            else:
                self._on_frame(node, frame)

    def _bad_frame(self, raw: RawFrame, error: WireError) -> None:
        close_all(raw.fds)
        if not 0 <= raw.rank < self.world_size:
            raise error
        state = self.ranks[raw.rank]
        job = self._calls.on_rank(raw.rank)
        if job is not None:
            died = WorkerDied(rank=raw.rank, node=state.node, reason=f"wrote into its channel to Atoll: {error}")
            self._calls.rank_failed(job, Failure(raw.rank, state.node, error=died))
        self.nodes.send(self.nodes.of(raw.rank), pack(frames.KILL, raw.rank))

    def _on_frame(self, node: NodeState, frame: Frame) -> None:
        job = self._calls.running.get(frame.call) if frame.call else None
        match frame.kind:
            case frames.RESULT | frames.ERROR:
                self._on_result(job, frame)
            case frames.LOG:
                self._on_log(job, frame)
            case frames.VALUE | frames.STREAM if job is not None and job.stopping:
                close_all(frame.fds)  # nobody takes values of a call that failed; what it reported still counts
            case frames.VALUE | frames.STREAM | frames.REPORT if job is not None:
                job.saw(frame.rank)
                job.streaming = job.streaming or frame.kind == frames.STREAM
                try:
                    job.sink.frame(frame, frame.rank, node.plan.node)
                except BaseException as error:  # noqa: BLE001 - what a report's pickle runs here is the user's
                    self.cancel(job, error)
            case frames.WANT_GROUP if job is not None:
                self._calls.want_group(job, frame.rank)
            case frames.HELLO:
                self._on_hello(frame)
            case frames.STARTED:
                self.ranks[frame.rank].pid = frame.meta["pid"]
            case frames.EXIT:
                self._on_exit(node, frame)
            case frames.STACKS:
                node.asked_s = 0.0
                self._on_stacks(frame)
            case frames.AGENT:
                self._on_agent(node, frame)
            case _:
                close_all(frame.fds)

    def _on_result(self, job: Job | None, frame: Frame) -> None:
        state = self.ranks[frame.rank]
        state.has_torch = bool(frame.flags & frames.HAS_TORCH)
        self.audience.flush(frame.rank)
        if state.spent or frame.flags & frames.SPENT:  # it ends, and a fresh one is started when it has
            state.ready, state.spent = False, True
            self._calls.lost(frame.rank)
        else:
            self._calls.free(frame.rank)
        if job is None or frame.rank in job.ended:
            close_all(frame.fds)
        else:
            for line in frame.meta.get("notes", ()):
                self.audience.note(line, frame.rank)
            job.kept = job.kept or bool(frame.flags & frames.KEPT)
            if frame.kind == frames.RESULT:
                job.results[frame.rank] = frame
                if job.streaming:
                    job.sink.returned(job.results)
            elif not frame.meta.get("cancelled"):
                self._calls.rank_failed(job, Failure(frame.rank, state.node, frame=frame))
            elif not job.failures and job.error is None:
                job.error = AtollError(f"rank {frame.rank} stopped without being asked to")
            self._calls.rank_ended(job, frame.rank)
        self._calls.start()

    def _on_log(self, job: Job | None, frame: Frame) -> None:
        data = bytes(frame.rest)
        if job is not None:
            job.saw(frame.rank)
        if self._log_files is not None:
            self._log_files.write(frame.rank, bool(frame.flags), data)
        self.audience.log(job, frame.rank, bool(frame.flags), data)

    def _on_hello(self, frame: Frame) -> None:
        state = self.ranks[frame.rank]
        state.port = frame.meta["port"]
        state.ready, state.spent, state.has_torch = True, False, False
        state.sent, state.path = {}, self.spec.path
        self.nodes.of(state.rank).restarts = 0
        self._tell(events.RankStarted(rank=state.rank, node=state.node, pid=state.pid, restarts=state.starts))
        state.starts += 1
        self._calls.free(frame.rank)
        self._changed.notify_all()
        self._calls.start()

    def _on_exit(self, node: NodeState, frame: Frame) -> None:
        state = self.ranks[frame.rank]
        meta = frame.meta
        self.audience.flush(frame.rank)
        job = self._calls.on_rank(frame.rank)
        came_up, state.ready = state.ready or state.spent, False
        self._calls.lost(frame.rank)
        died = WorkerDied(
            rank=frame.rank,
            node=state.node,
            exit_code=meta["exit_code"],
            signal=meta["signal"],
            oom=meta["oom"],
            log_tail=meta["tail"],
            reason=meta["fault"],
        )
        spent, state.spent = state.spent, False
        if not meta["killed"] and not spent and not self._closing:
            self._tell(events.RankDied(rank=frame.rank, node=state.node, reason=died.reason))
        state.early_deaths = 0 if came_up else state.early_deaths + 1
        if job is not None:
            if not (meta["killed"] and job.stopping):  # its agent may have ended it for reasons of its own
                self._calls.rank_failed(job, Failure(frame.rank, state.node, error=died))
            self._calls.rank_ended(job, frame.rank)
        if state.early_deaths >= (_MAX_EARLY_DEATHS if state.starts else 1):
            self._break(ProvisionError(f"a rank could not be started: {died}", node=state.node))
        elif not self._closing:
            self.nodes.send(node, pack(frames.SPAWN, frame.rank))
            self._expect([state])

    def _expect(self, ranks: Sequence[RankState]) -> None:
        """Ranks were started again: they come up in time, or the pool ends saying so."""
        with self._lock:
            seen = [(state, state.starts) for state in ranks]

        def check() -> None:
            late = [state.rank for state, starts in seen if not state.ready and state.starts == starts]
            if late and not self._closing:
                limit = self.spec.start_timeout_s
                self._break(
                    PoolClosed(f"{name_ranks(late)} did not come up again within {limit:g} s; see {self.spec.log_dir}")
                )

        self._reader.after(self.spec.start_timeout_s, check)

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

    def lost(self, node: NodeState, reason: str) -> None:
        """A node is gone, and its ranks with it; it is started again unless that means the end of the pool."""
        with self._lock:
            handle = self.nodes.detach(node)
            for state in self.nodes.ranks_of(node):
                state.ready = False
                if self._calls.on_rank(state.rank) is None:
                    self._calls.lost(state.rank)
        self.nodes.clean_up(lambda: self._clean_up(node, handle, reason))

    def _clean_up(self, node: NodeState, handle: Node, reason: str) -> None:
        """Fail what ran on a lost node, release it and start it again, which takes a while."""
        if not self._closing:  # nobody asks how a node ended that was told to
            reason = node.ended or node.silent or handle.reason or reason
        with self._lock:
            number, ranks, closing = node.plan.node, self.nodes.ranks_of(node), self._closing
            if not all(state.starts for state in ranks) and not closing:
                self._break(ProvisionError(f"node {number} ended while it started: {reason}", node=number))
            elif node.ended is not None and not closing:
                self._break(PoolClosed(f"node {number} ended: {reason}"))
            lost = NodeLost(number, reason)
            for state in ranks:
                job = self._calls.on_rank(state.rank)
                self._calls.lost(state.rank)
                if job is not None:
                    self._calls.rank_failed(job, Failure(state.rank, state.node, error=lost))
                    self._calls.rank_ended(job, state.rank)
        self.nodes.release(node, handle, gone=not closing)
        if not closing and self._calls.broken is None:
            self.nodes.revive(node, self._expect, self._break)

    def _break(self, error: BaseException) -> None:
        """The pool can't go on: fail everything with this error."""
        with self._lock:
            self._calls.break_off(error)

    def _tell(self, event: events.Event) -> None:
        self.audience.event(event)
