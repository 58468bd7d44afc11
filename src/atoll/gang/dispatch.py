"""The calls of a gang: queued, sent to ranks, stopped where they fail, started again, ended.

Every method but ``credit`` and ``close_stream`` is called with the gang's lock held.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from typing import Any

from atoll.core import events
from atoll.core.errors import AtollError, CallTimeout, PoolClosed
from atoll.gang.call import Failure, Job
from atoll.gang.call_frames import call_frames
from atoll.gang.members import RankState
from atoll.gang.nodes import Nodes
from atoll.gang.notifier import Audience
from atoll.gang.reader import Reader
from atoll.gang.scheduler import Scheduler
from atoll.wire import frames
from atoll.wire.frames import close_all, pack
from atoll.wire.payloads import Arena

_SOFT_STOP_S = 0.15  # after a failure the other ranks get this long to end by themselves,
_HARD_STOP_S = 0.45  # and are killed after this long
_GIVE_UP_S = 0.9  # the call ends by now, whatever still has to die


class Dispatch:
    """Which call runs where, and how it ends.

    Args:
        changed: notified when a call ends; its lock is the gang's.
        audience: hears of events, and lines for the user.

    Attributes:
        running: calls that run, by number.
        broken: what ended the gang, and every call from then on.
    """

    def __init__(
        self,
        ranks: Sequence[RankState],
        nodes: Nodes,
        reader: Reader,
        arena: Arena,
        changed: threading.Condition,
        audience: Audience,
    ) -> None:
        self.running: dict[int, Job] = {}
        self.broken: BaseException | None = None
        self._ranks = ranks
        self._nodes = nodes
        self._reader = reader
        self._arena = arena
        self._changed = changed
        self._audience = audience
        self._scheduler: Scheduler[Job] = Scheduler(len(ranks))
        self._numbers = itertools.count(1)

    @property
    def waiting(self) -> Job | None:
        """The call that will start next."""
        return self._scheduler.waiting

    def on_rank(self, rank: int) -> Job | None:
        """The call that a rank has not ended yet."""
        job = self._scheduler.running.get(rank)
        return None if job is None or job.done or rank in job.ended else job

    # -- starting -------------------------------------------------------------------------------------------------

    def add(self, job: Job) -> None:
        """Queue a call; its sink hears the rest."""
        self._scheduler.add(job)
        self.start()

    def free(self, rank: int) -> None:
        """A rank is ready for a call."""
        self._scheduler.free(rank)

    def lost(self, rank: int) -> None:
        """A rank is gone until it is freed again."""
        self._scheduler.lost(rank)

    def start(self) -> None:
        """Start what can be started now."""
        while (started := self._scheduler.next()) is not None:
            try:
                self._send_out(*started)
            except BaseException as error:  # Ctrl-C between two lines: its ranks count as busy and may not know it
                self.cancel(started[0], error)
                raise

    def _send_out(self, job: Job, ranks: tuple[int, ...]) -> None:
        job.begin(next(self._numbers), ranks)
        self.running[job.number] = job
        for node, data, fds in call_frames(job, self._ranks):
            self._nodes.send(self._nodes.states[node], data, fds)
        job.sink.started(ranks)
        if job.request.timeout_s is not None:
            number, limit = job.number, job.request.timeout_s
            job.timers.append(self._reader.after(limit, lambda: self._timed_out(job, number, limit)))
        if self._audience.wants_events:
            self._audience.event(events.CallStarted(job_id=job.request.job_id, ranks=ranks))

    # -- while it runs ----------------------------------------------------------------------------------------------

    def credit(self, job: Job, rank: int, num: int) -> None:
        """Let a streaming rank produce that many values more."""
        self._to_rank(job, rank, frames.CREDIT, {"num": num})

    def close_stream(self, job: Job, rank: int) -> None:
        """The consumer wants no more: the rank's generator is closed."""
        self._to_rank(job, rank, frames.CLOSE)

    def _to_rank(self, job: Job, rank: int, kind: int, meta: dict[str, Any] | None = None) -> None:
        with self._changed:
            if not job.done and rank not in job.ended:
                self._send(rank, kind, job, meta)

    def _send(self, rank: int, kind: int, job: Job, meta: dict[str, Any] | None = None) -> None:
        self._nodes.send(self._nodes.of(rank), pack(kind, rank, job.number, meta))

    def want_group(self, job: Job, rank: int) -> None:
        """A rank asks whether all of its call will make a process group."""
        self._answer_group(job, *job.ask_group(rank))

    def _answer_group(self, job: Job, ranks: Sequence[int], go: bool) -> None:
        for rank in ranks:
            self._send(rank, frames.GROUP, job, {"go": int(go)})

    # -- the end of a call ------------------------------------------------------------------------------------------

    def rank_ended(self, job: Job, rank: int) -> None:
        """The rank is through with the call: settle what that decides."""
        self._answer_group(job, job.end_rank(rank), False)
        if len(job.ended) == len(job.ranks):
            self._end(job, job.error)

    def rank_failed(self, job: Job, failure: Failure) -> None:
        """A rank raised, or is gone: the others are stopped."""
        job.failures.append(failure)
        if len(job.failures) == 1 and job.unfinished:
            self._stop_ranks(job, soft_s=_SOFT_STOP_S)

    def cancel(self, job: Job, error: BaseException) -> None:
        """Stop a call wherever it is; it ends with this error within a second."""
        if job.done:
            return
        job.error = job.error or error
        if self._scheduler.remove(job):
            self._end(job, job.error)
        else:
            self._stop_ranks(job, soft_s=0.0)

    def kill(self, job: Job, error: BaseException) -> None:
        """Stop a call whose ranks do not listen any more."""
        job.error = error
        self._order(job, frames.KILL)
        self._stop_ranks(job, soft_s=0.0)

    def _timed_out(self, job: Job, number: int, limit: float) -> None:
        if self.running.get(number) is job:
            self.cancel(job, CallTimeout(limit, job.unfinished))

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
            job.timers.append(self._reader.after(delay_s, action))
        number = job.number
        self._reader.after(max(map(self._nodes.deaf_s, self._nodes.states)), lambda: self._lose_deaf(job, number))

    def _lose_deaf(self, job: Job, number: int) -> None:
        """A rank that was to be killed long ago still counts as running: its agent does not hear us."""
        if job.number == number:
            for rank in job.unfinished:
                if self._scheduler.running.get(rank) is job:
                    node = self._nodes.of(rank)
                    late_s = self._nodes.deaf_s(node)
                    self._nodes.give_up(node, f"its agent did not stop rank {rank} within {late_s:g} s")

    def _order(self, job: Job, kind: int) -> None:
        for rank in job.unfinished:
            # A result that crosses the order on its way does not save the rank.
            self._ranks[rank].spent |= kind == frames.KILL
            self._send(rank, kind, job)

    def _end(self, job: Job, error: BaseException | None) -> None:
        if job.done:
            return
        self.running.pop(job.number, None)
        for timer in job.timers:
            self._reader.take_back(timer)
        job.timers.clear()
        if error is None and job.may_repeat and self.broken is None and not self._nodes.closing:
            self._repeat(job)
            return
        job.done = True
        job.request.release(None if job.kept or job.failures or error is not None else self._arena)
        if self._audience.wants_events:
            took = time.monotonic() - job.started_s
            self._audience.event(events.CallFinished(job_id=job.request.job_id, took_s=took, error=job.fault(error)))
        try:
            job.sink.done(job.results, job.failures, error)
        except Exception as problem:  # noqa: BLE001 - out of descriptors or memory, say: whoever waits has to hear of it
            job.sink.done({}, [], AtollError(f"the call ended, and its results could not be taken: {problem}"))
        self._changed.notify_all()

    def _repeat(self, job: Job) -> None:
        """A call that lost a rank is started again as a whole."""
        job.attempt += 1
        for frame in (*job.results.values(), *(f.frame for f in job.failures if f.frame is not None)):
            close_all(frame.fds)
        reason = next(str(failure.error) for failure in job.failures if failure.is_death).partition("\n")[0]
        if self._audience.wants_events:
            self._audience.event(events.CallRetried(job_id=job.request.job_id, attempt=job.attempt, reason=reason))
        self._audience.note(
            f"{job.request.name}: {reason}; starting again, {job.attempt} of {job.request.retries} retries"
        )
        job.begin(0, ())  # what the ranks sent is closed: nobody may take it where the repetition never starts
        self._scheduler.add(job, first=True)
        self.start()

    # -- the end of all ---------------------------------------------------------------------------------------------

    def break_off(self, error: BaseException) -> None:
        """The gang can't go on: every call, also of those to come, ends with this error."""
        self.broken = self.broken or error
        for job in [*self.running.values(), *self._scheduler.drain()]:
            if not job.failures:
                job.error = job.error or error
            self._end(job, job.error)
        self._changed.notify_all()

    def wind_up(self, unwind_s: float) -> None:
        """The gang goes down: running calls get a moment to unwind, so that ``finally`` blocks of theirs are run."""
        closed = self.broken or PoolClosed("the pool was shut down before the call finished")
        for job in self._scheduler.drain():
            self._end(job, job.error or closed)
        for job in self.running.values():
            job.error = job.error or (None if job.failures else closed)
            if unwind_s:
                self._order(job, frames.CANCEL)
        deadline = time.monotonic() + unwind_s
        while self.running and self._reader.alive and (left := deadline - time.monotonic()) > 0:
            self._changed.wait(left)
        for job in list(self.running.values()):
            self._end(job, job.error)
