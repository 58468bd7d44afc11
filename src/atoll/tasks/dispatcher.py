"""What the supervisor does: starts each job when its turn comes, and ends when none is left. Standard library only."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import importlib
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Protocol

from atoll.agent import keeper
from atoll.core.errors import AtollError, ProvisionError
from atoll.providers.base import Allocation, AllocationState, Notice
from atoll.tasks import reaper, record, supervisor
from atoll.tasks.causes import TAKEN_BACK
from atoll.tasks.environment import managed_task_id, task_id
from atoll.tasks.logs import JobLog
from atoll.tasks.nodes import ClusterNodes, with_nodes_now
from atoll.tasks.ports import PortLocks
from atoll.tasks.rows import EventRow, JobRow
from atoll.tasks.runner import JobRunner, unexpected
from atoll.tasks.schedule import TURN, Turn, turns
from atoll.tasks.service import SOCKET, Service
from atoll.tasks.spec import ClusterSpec, ClusterStatus, JobSpec, JobStatus
from atoll.tasks.store import Store, put_variables
from atoll.tasks.transitions import Log, SetStatus
from atoll.wire.event_loop import EventLoop

_LOOK_S = 0.5  # its files and its nodes' networks are looked at so often
_PORT_S = 0.1  # a port that another cluster has is tried again
_RETRY_S = 1.0  # what could not be written is tried again
_FIRST_S = 5.0  # whoever started the supervisor asks for something within this time
_TAKEN_S = 20.0  # to save, where nodes are taken without notice: Slurm's KillWait is 30 s
_NODES_S = 5.0  # nodes that have still to come are looked for so often
_ASK_TRIES, _ASK_S = 3, 0.3
_GIVE_UP_S = 60.0  # and given up after so long, once no job is left
_STARTS = "supervisor.starts"  # in a cluster's folder: when supervisors began that have not begun a job yet
_END_WITH_NODES = {AllocationState.RELEASED: JobStatus.CANCELLED, AllocationState.LOST: JobStatus.FAILED}
_MOST_STARTS = 2  # a job that so many supervisors could not even begin has failed


class Runner(Protocol):
    """What runs one job: on nodes of the cluster, or where it is managed on clusters of its own."""

    job: JobRow
    nodes: tuple[int, ...]
    cancelled: bool

    @property
    def status(self) -> JobStatus:
        """Where the job stands."""

    @property
    def finished(self) -> bool:
        """Has the job ended, and is nothing left of it?"""

    def start(self) -> None:
        """Begin."""

    def cancel(self, why: str, number: int = ...) -> None:
        """End it before its time, beginning with this signal."""

    def leave(self) -> bool:
        """Leave it for the next supervisor, where it lives without this one: then it has finished here."""

    def leave_nodes(self, why: str, save_s: float, *, again: bool) -> None:
        """The nodes here are about to be taken: have it save within so long. ``again``: it goes on elsewhere."""

    def tell_fault(self, fault: str) -> None:
        """Say in its log, once, what its nodes have lost."""

    def close(self) -> None:
        """Give up what it holds; it has finished."""


class Dispatcher:
    """Runs the jobs of the cluster in ``folder``. Whoever makes one holds its supervisor's lock.

    ``first`` is the connection of whoever started the supervisor.

    Raises:
        AtollError: the store can't be used.
    """

    def __init__(self, folder: Path, store: Store, lock: int, first: socket.socket) -> None:
        self._folder = folder
        self._lock = lock
        self._store = store
        self._loop = EventLoop()
        self._nodes: ClusterNodes | None = None
        self._shape: ClusterSpec | None = None  # what `_nodes` were made for
        self._notes: list[str] = []
        self._runners: dict[int, Runner] = {}
        self._ports: dict[int, PortLocks] = {}
        self._owners: dict[int, int] = {}  # descriptors of processes whose end ends a job
        self._pending: dict[int, JobRow] = {}  # jobs that may be started, oldest first
        self._waiting: dict[int, str] = {}  # what each pending job was last said to wait for
        self._unwritten: list[tuple[int, Sequence[SetStatus | Log], float]] = []
        self._unwritten_since = self._retry_at = 0.0
        self.num_records = 0  # how often something was recorded
        self._look_at = 0.0
        self._changed = True  # look at once
        self._awaited_ports: set[tuple[tuple[int, ...], tuple[str, ...]]] = set()
        self._is_ending = False
        # Elsewhere its jobs are ended, never started: its nodes are not here, and come back with a supervisor.
        self._ending_reason = ""
        self._is_guest = not supervisor.belongs_here(folder)
        self._taken = ""  # why the cluster's nodes are taken
        self._is_renewed = False  # others come for them, and this process ends with those it has
        self._began = time.monotonic()
        self._starts = folder / _STARTS
        self._file = os.stat(store.path)
        self._unreachable = False  # nobody can ask for an end of the jobs that run
        self._reaper: threading.Thread | None = None
        self._fail_orphans()
        self._fail_untried()
        self._service = Service(folder, self, self._loop, first)

    def run(self) -> None:
        """Work until nothing is left to do."""
        signal.signal(signal.SIGTERM, lambda *_: self._loop.post(self._terminated))
        for job in self._store.jobs(newest_first=False, unfinished=True):
            self._accept(job)
        try:
            while not self._idle():
                self._loop.turn(self._timeout_s())
                self._clear_finished()
                self._look()
                self._service.push()
            self._forget_starts()
        finally:
            self._close()

    def join(self) -> None:
        """Wait until what an earlier supervisor left has ended, after ``run``."""
        if self._reaper is not None:
            self._reaper.join()

    # ------------------------------------------------------------------------------------------- the loop's business
    def _timeout_s(self) -> float:
        left_s = max(0.0, self._look_at - time.monotonic())
        return min(left_s, _PORT_S) if self._awaited_ports else left_s

    def _terminated(self) -> None:
        if keeper.VARIABLE not in os.environ:
            self._is_ending = self._changed = True
        elif not self._is_renewed:
            threading.Thread(target=self._ask_why, name="end", daemon=True).start()

    def _ask_why(self) -> None:
        """The nodes are taken, and this process with them: find out why. In a thread, as one may have to wait."""
        allocation = self._allocation_now() or Allocation(state=AllocationState.LOST, reason=TAKEN_BACK[0])
        self._loop.post(lambda: self._nodes_end(allocation))

    def _nodes_end(self, allocation: Allocation) -> None:
        """Ends the jobs, as their nodes end now: they go on elsewhere, are cancelled, or have failed."""
        self._changed = True
        self._ending_reason = allocation.reason or TAKEN_BACK[0]
        self._is_renewed |= allocation.state is AllocationState.PENDING
        if allocation.state is AllocationState.RELEASED:
            self._is_ending = True
        elif not self._taken:
            self._leave(Notice(self._ending_reason, _TAKEN_S), again=allocation.replaces_nodes)

    def _leave(self, notice: Notice, *, again: bool) -> None:
        """Has the jobs leave their nodes."""
        self._taken = notice.reason
        self._changed = True
        for runner in self._runners.values():
            runner.leave_nodes(notice.reason, notice.save_s, again=again)
        for job in [] if again else list(self._pending.values()):
            self._refuse(job, notice.reason)

    def _renew(self) -> None:
        """No job runs, and the nodes are lost or taken: get others, with which another supervisor begins."""
        if self._nodes is None:
            return
        self._is_renewed = True
        try:
            allocation = self._nodes.renew()
            if allocation.state is AllocationState.RELEASED:
                self._nodes_end(allocation)
        except ProvisionError as error:
            for job in list(self._pending.values()):
                self._refuse(job, f"{self._taken}, and there are no other nodes: {error}")

    def _clear_finished(self) -> None:
        for job_id, runner in list(self._runners.items()):
            if runner.finished:
                runner.close()
                del self._runners[job_id]
                self._forget(job_id)
                self._remove_files(runner.job)
                self._changed = True
                if runner.job.spec.managed is None and not runner.status.ended:
                    self._taken = self._taken or "a node was lost"
                    self._pending[job_id] = self._store.job(job_id)

    def _forget(self, job_id: int) -> None:
        if job_id in self._ports:
            self._ports.pop(job_id).free()
        if job_id in self._owners:
            owner = self._owners.pop(job_id)
            self._loop.unwatch(owner)
            os.close(owner)

    def _look(self) -> None:
        """Sees to what may have changed, and starts what may start."""
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + _LOOK_S
            self._check_files()
            for job_id, runner in self._runners.items():
                if self._nodes is not None and (fault := self._nodes.fault_of(job_id)) is not None:
                    runner.tell_fault(fault)
            if not self._taken and self._nodes is not None and (notice := self._nodes.notice()) is not None:
                self._leave(notice, again=True)
        self._write_again(now)
        if self._unreachable:
            self._changed = False
            return
        if not self._changed and not self._awaited_ports:
            return
        self._changed, self._awaited_ports = False, set()
        if self._is_ending:
            self._end_jobs()
        unwritten = {job_id for job_id, _, _ in self._unwritten}
        pending = [job for job_id, job in self._pending.items() if job_id not in unwritten]
        if self._taken:
            if self._pending and not self._runners and not self._unwritten and not self._is_renewed:
                self._renew()
        elif pending:
            self._start_some(pending)

    def _end_jobs(self) -> None:
        """Cancels jobs before their nodes go; those that are managed have others, and wait for the next supervisor."""
        self._pending = {job_id: job for job_id, job in self._pending.items() if job.spec.managed is None}
        running = [job_id for job_id, each in self._runners.items() if not each.leave() and not each.cancelled]
        if going := [*self._pending, *running]:
            self.cancel(going, signal.SIGTERM)

    def _check_files(self) -> None:
        """Ends the jobs where nobody can find the supervisor any more."""
        if self._unreachable or (why := self._files_gone()) is None:
            return
        self._unreachable = True
        _write_log(f"{why}: ending its jobs, and leaving")
        self._service.close(unlink=False)  # there may be another one's by now
        for runner in self._runners.values():
            if not runner.cancelled:
                runner.cancel(why)

    # ------------------------------------------------------------------------------------------- for the service
    def add(self, spec: JobSpec, secrets: Mapping[str, str], user: str) -> int:
        """Adds a job, once for its key; returns its number."""
        self._check_files()
        if self._unreachable:
            raise AtollError(f"the files of cluster {self._folder.name} were removed or replaced just now: try again")

        def begin(job_id: int) -> str:
            put_variables(self._folder, job_id, {**spec.variables(), "secrets": secrets})
            if spec.managed is not None:
                return managed_task_id(spec.name, job_id, datetime.now())
            return spec.task_id or task_id(self._folder.name, job_id, datetime.now())

        job_id = self._store.add(spec, task_id_for=begin, user=user)
        job = self._store.job(job_id)
        if job.status is JobStatus.PENDING and job_id not in self._pending and job_id not in self._runners:
            self._accept(job)
        return job_id

    def cancel(self, job_ids: list[int] | None, number: int) -> list[int]:
        """Ends these jobs, or all; returns those that had not ended. Their processes get the signal ``number``."""
        asked = self._store.ask_cancel(job_ids, number)
        self.num_records += 1
        for job_id in asked:
            if job_id in self._runners:
                self._cancel(self._runners[job_id].job, number)
            else:
                self._drop_pending(job_id)
        self._changed = True
        return asked

    def status(self, job_id: int) -> JobStatus:
        """Where a job stands."""
        if job_id in self._runners:
            return self._runners[job_id].status
        return JobStatus.PENDING if job_id in self._pending else self._store.job(job_id).status

    def events(self, job_id: int, after: int) -> list[EventRow]:
        """What happened to a job since an event."""
        return self._store.events(job_id, after)

    def _accept(self, job: JobRow) -> None:
        self._changed = True
        if self._watch_owner(job):
            self._pending[job.id] = job

    def _drop_pending(self, job_id: int) -> None:
        self._pending.pop(job_id, None)
        self._waiting.pop(job_id, None)
        self._forget(job_id)

    # ------------------------------------------------------------------------------------------- earlier supervisors
    def _fail_orphans(self) -> None:
        """Jobs that were begun by a supervisor that is no more have failed.

        A node's agent ends, and everything below it, when its driver does; what is stopped or hangs is ended here.
        """
        unfinished = self._store.jobs(newest_first=False, unfinished=True)
        orphans = [job for job in unfinished if job.status is not JobStatus.PENDING and job.spec.managed is None]
        if not orphans:
            return
        if self._replaces_nodes():
            for job in orphans:
                how = f"It goes on as attempt {job.restarts + 2}: its supervisor ended with the nodes"
                self._say(job.id, how)
                again = Log("restart", how, data=(("restarts", job.restarts + 1),))
                self._record(job.id, [again, SetStatus(JobStatus.PENDING, "its supervisor ended with the nodes")])
            return
        if self._end_with_nodes(self._allocation_now(), orphans):  # which their supervisor did not outlive
            return
        reason = "its supervisor was killed, or the machine restarted"
        if line := supervisor.last_line(self._folder):
            reason += f"; the supervisor's last message, in {self._folder / supervisor.LOG}: {line}"
        with contextlib.suppress(OSError, AtollError):  # the next job, which needs it, tells
            if left := reaper.end_here(self._folder):
                reason += f"; not even SIGKILL ends {', '.join(left)}"
        self._reaper = threading.Thread(target=reaper.end_left_on_hosts, args=(self._folder,), name="reaper")
        self._reaper.start()
        for job in orphans:
            self._refuse(job, reason)

    def _replaces_nodes(self) -> bool:
        """Do jobs go on where nodes were lost?"""
        try:
            return not self._is_guest and record.load(self._folder).allocation.replaces_nodes
        except (AtollError, LookupError):
            return False

    def _fail_untried(self) -> None:
        """Jobs that several supervisors in a row could not even begin have failed."""
        starts: list[float] = []
        with contextlib.suppress(OSError, ValueError):
            starts = [float(word) for word in self._starts.read_text().split()]
        if len(starts) >= _MOST_STARTS:
            why = f": {line}" if (line := supervisor.last_line(self._folder)) else ", killed by a signal perhaps"
            for job in self._store.jobs(newest_first=False, unfinished=True):
                if job.submitted_s <= starts[-_MOST_STARTS]:
                    self._refuse(
                        job,
                        f"its supervisor ended {_MOST_STARTS} times before it had begun the job{why}. More is in "
                        f"{self._folder / supervisor.LOG}; once the cause is gone, submit the job again",
                    )
        _write_log(f"{supervisor.STARTED} {time.strftime('%Y-%m-%d %H:%M:%S')}, pid {os.getpid()}")
        with contextlib.suppress(OSError):
            self._starts.write_text(" ".join(map(str, [*starts, time.time()][-_MOST_STARTS:])))

    def _forget_starts(self) -> None:
        """This supervisor has begun a job, or ends because none is left."""
        with contextlib.suppress(OSError):
            self._starts.unlink()

    def _files_gone(self) -> str | None:
        """Which of the files that others find us by was removed or replaced, as a clause."""
        try:
            same = os.path.samestat(os.stat(self._store.path), self._file)
        except OSError as error:  # else it is there, and can't be looked at just now
            same = error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
        if not same:
            return f"the job store {self._store.path} was removed or replaced"
        if os.fstat(self._lock).st_nlink == 0:
            return f"the supervisor's lock in {self._folder} was removed"
        return None if (self._folder / SOCKET).is_socket() else f"the supervisor's socket in {self._folder} was removed"

    def _cancel(self, job: JobRow, number: int) -> None:
        runner = self._runners[job.id]
        if runner.cancelled and number != signal.SIGKILL:
            return
        why = "cancelled"
        if self._is_ending:
            why = self._ending_reason or TAKEN_BACK[1]
        elif job.id in self._owners and _has_ended(self._owners[job.id]):
            why = f"the process that started it, {job.spec.owner_pid}, ended"
        runner.cancel(why, number)

    def _watch_owner(self, job: JobRow) -> bool:
        """End the job when the process it belongs to does; False where that has ended before, or can't be watched."""
        if job.spec.owner_pid is None or job.id in self._owners:
            return True
        try:
            owner = self._owners[job.id] = os.pidfd_open(job.spec.owner_pid)
        except ProcessLookupError:
            self.cancel([job.id], signal.SIGTERM)
            return False
        except OSError as error:
            self._refuse(job, f"the process that started it, {job.spec.owner_pid}, can't be watched: {error}")
            return False

        def ended(_readable: bool, _writable: bool) -> None:
            self._loop.unwatch(owner)
            self.cancel([job.id], signal.SIGTERM)

        self._loop.watch(owner, ended)
        return True

    # ------------------------------------------------------------------------------------------- starting jobs
    def _start_some(self, pending: Sequence[JobRow]) -> None:
        managed = [] if self._is_guest else [each for each in pending if each.spec.managed is not None]
        for job in filter(self._may_follow, managed):
            self._start_managed(job)
        pending = [each for each in pending if each.spec.managed is None]
        if not pending:
            return
        try:
            cluster = record.load(self._folder)
            if self._nodes is None:
                cluster = with_nodes_now(cluster, self._folder)
                if cluster.allocation.state is not AllocationState.READY:
                    if not self._end_with_nodes(cluster.allocation, pending):  # a supervisor comes with them
                        self._loop.after(_NODES_S, self._look_again, "nodes")
                        for job in pending:
                            self._wait(job, f"waiting for {cluster.infra}: {cluster.allocation.reason}")
                    return
            if self._is_guest:
                return
            nodes = self._nodes_of(cluster)
        except (AtollError, LookupError, OSError) as error:
            if not self._end_with_nodes(self._allocation_now(), pending):
                for job in pending:
                    self._refuse(job, str(error))
            return
        if nodes is None:
            ids = ", ".join(map(str, self._runners))
            for job in pending:
                self._wait(
                    job, f"waiting for the end of job {ids}: the cluster was changed or created again in the meantime"
                )
            return
        # One that has ended may not be gone yet.
        running = [(each.job, each.nodes) for each in self._runners.values() if each.job.spec.managed is None]
        for turn in turns(cluster, [job for job in pending if self._may_follow(job)], running):
            why = turn.why or self._start(turn, cluster, nodes)
            if why is not None:
                self._wait(turn.job, why)

    def _end_with_nodes(self, allocation: Allocation | None, jobs: Sequence[JobRow]) -> bool:
        """Are the cluster's nodes gone for good? Then these jobs have ended with them."""
        if allocation is None or (status := _END_WITH_NODES.get(allocation.state)) is None:
            return False
        for job in jobs:
            self._refuse(job, allocation.reason, status)
        return True

    def _allocation_now(self) -> Allocation | None:
        """As its provider says it is; None where that can't be asked."""
        for _ in range(_ASK_TRIES):  # what ends this job may end the question, too
            with contextlib.suppress(AtollError, LookupError, OSError):
                return with_nodes_now(record.load(self._folder), self._folder).allocation
            time.sleep(_ASK_S)
        return None

    def _look_again(self) -> None:
        self._changed = True

    def _wait(self, job: JobRow, why: str) -> None:
        if self._waiting.get(job.id) != why:
            self._waiting[job.id] = why
            self._say(job.id, why)
            self._record(job.id, [Log("waiting", why)])

    def _may_follow(self, job: JobRow) -> bool:
        """Has the job before it in its pipeline succeeded? Where that ended otherwise, this one is cancelled."""
        if job.spec.after is None:
            return True
        before = self._store.job(job.spec.after)
        name = f"job {before.id}, which comes before it"
        if not before.status.ended or before.id in self._runners:
            self._wait(job, f"waiting for {name}, to succeed")
        elif before.status is not JobStatus.SUCCEEDED:
            how = "was cancelled" if before.status is JobStatus.CANCELLED else "failed"
            self._refuse(job, f"{name}, {how}", JobStatus.CANCELLED)
        else:
            return True
        return False

    def _nodes_of(self, cluster: ClusterSpec) -> ClusterNodes | None:
        """Where the cluster's nodes come from; None while jobs still run on it as it was before it changed."""
        same = {"status": ClusterStatus.UP, "setup_done": (), "autostop_minutes": None, "autodown": False, "notes": ()}
        shape = dataclasses.replace(cluster, **same)  # type: ignore[arg-type]  # of as many types as fields
        if self._nodes is None or shape != self._shape:
            if self._runners:
                self._changed = True
                return None
            if self._nodes is not None:
                self._nodes.close()
                self._nodes = None
            nodes = ClusterNodes(cluster, self._folder)
            self._notes = nodes.open()
            self._nodes, self._shape = nodes, shape
        return self._nodes

    def _lock_ports(self, turn: Turn, cluster: ClusterSpec, nodes: ClusterNodes) -> str | None:
        job = turn.job
        if not job.spec.ports or not nodes.shared_networks:
            return None
        networks = tuple(nodes.shared_networks[node] for node in turn.nodes)
        if (job.spec.ports, networks) in self._awaited_ports:
            return f"{TURN}: jobs before it wait for its port"
        folder = self._folder.parent.parent / "ports"
        locks = PortLocks((folder / each for each in networks), f"job {job.id} of cluster {cluster.name}")
        held = locks.lock(job.spec.ports)
        if held is not None:
            self._awaited_ports.add((job.spec.ports, networks))  # nobody tells us when they are free
            return f"waiting for {held}"
        self._ports[job.id] = locks
        return None

    def _start(self, turn: Turn, cluster: ClusterSpec, nodes: ClusterNodes) -> str | None:
        """Start a job, unless it has to wait for a port: what it waits for, then."""
        job = turn.job
        try:
            if (why := self._lock_ports(turn, cluster, nodes)) is not None:
                return why
            lost = [event for event in self._store.events(job.id, 0) if event.kind == "lost"] if job.restarts else []
            where = (turn.nodes, cluster, nodes, self._folder)
            runner = JobRunner(job, *where, self._loop, self._record, self._notes, len(lost))
        except Exception as error:  # noqa: BLE001 - whatever is wrong with this job, the others go on
            self._forget(job.id)
            self._refuse(job, str(error) if isinstance(error, (AtollError, OSError, ValueError)) else unexpected(error))
            return None
        self._pending.pop(job.id)
        self._waiting.pop(job.id, None)
        self._runners[job.id] = runner
        self._forget_starts()
        runner.start()
        return None

    def _start_managed(self, job: JobRow) -> None:
        """Start or continue a job that has clusters of its own."""
        # By its name, as providers are found: launching imports what only some tasks need, and no bare host has.
        managed = importlib.import_module("atoll.tasks.managed")
        try:
            runner = managed.ManagedRunner(job, self._folder, self._loop, self._record)
        except (AtollError, OSError, ValueError) as error:
            self._refuse(job, str(error))
            return
        supervisor.guard(self._folder)
        self._pending.pop(job.id)
        self._waiting.pop(job.id, None)
        self._runners[job.id] = runner
        self._forget_starts()
        runner.start()

    def _remove_files(self, job: JobRow) -> None:
        """Remove the copy of a managed job's files, unless another one needs it."""
        if job.spec.managed is not None:
            others = [each.spec.managed for each in self._store.jobs(unfinished=True)]
            if job.spec.managed["files"] not in [each["files"] for each in others if each is not None]:
                importlib.import_module("atoll.tasks.managed").remove_files(self._folder, job)

    def _refuse(self, job: JobRow, reason: str, status: JobStatus = JobStatus.FAILED_DRIVER) -> None:
        how = "was cancelled" if status is JobStatus.CANCELLED else "failed"
        self._say(job.id, f"✗ Job {job.id} {how} (status: {status}): {reason.removesuffix('.')}.")
        self._record(job.id, [SetStatus(status, reason)])
        self._drop_pending(job.id)
        self._changed = True  # others may have waited for it

    def _say(self, job_id: int, text: str) -> None:
        log = JobLog(self._folder / "jobs" / str(job_id))
        log.say(text)
        log.close(time.monotonic())

    # ------------------------------------------------------------------------------------------- the store
    def _record(self, job_id: int, actions: Sequence[SetStatus | Log]) -> JobStatus:
        """Write what happened; what can't be written now, on a full disk say, is kept and tried again."""
        now_s = time.time()
        self.num_records += 1
        if self._unwritten:
            self._unwritten.append((job_id, actions, now_s))
            return self._runners[job_id].status if job_id in self._runners else JobStatus.PENDING
        try:
            status = self._store.apply(job_id, actions, now_s)
        except AtollError as error:
            _write_log(str(error))
            self._unwritten.append((job_id, actions, now_s))
            self._unwritten_since = time.monotonic()
            return self._runners[job_id].status if job_id in self._runners else JobStatus.PENDING
        self._note_setup(job_id, actions)
        return status

    def _write_again(self, now: float) -> None:
        if not self._unwritten or now < self._retry_at:
            return
        self._retry_at = now + _RETRY_S
        try:
            while self._unwritten:
                self._store.apply(*self._unwritten[0])
                del self._unwritten[0]
        except AtollError:
            if not self._runners and now - self._unwritten_since > _GIVE_UP_S:
                raise

    def _note_setup(self, job_id: int, actions: Sequence[SetStatus | Log]) -> None:
        """The first status after a setup tells that it succeeded, on every node."""
        spec = self._runners[job_id].job.spec if job_id in self._runners else None
        if spec is None or spec.setup is None or spec.managed is not None:
            return
        after = {each.status for each in actions if isinstance(each, SetStatus)}
        if after & {JobStatus.RUNNING, JobStatus.SUCCEEDED} and self._shape is not None:
            with contextlib.suppress(OSError, LookupError, AtollError):  # it only saves the next launch a setup
                record.change(self._folder, setup_done=tuple(range(self._shape.num_nodes)))

    # ------------------------------------------------------------------------------------------- the end
    def _idle(self) -> bool:
        if self._unreachable:
            return not self._runners
        waits = self._pending and not self._is_guest and not self._is_renewed
        if self._runners or waits or self._unwritten or self._changed:
            return False
        return not self._service.awaits_first or time.monotonic() > self._began + _FIRST_S

    def _close(self) -> None:
        """Gives everything up, the lock last. Whoever asks for something meanwhile asks the next supervisor."""
        if not self._unreachable:
            self._service.close(unlink=True)
        for job_id in [*self._ports, *self._owners]:
            self._forget(job_id)
        if self._nodes is not None:
            self._nodes.close()
        self._loop.close()


def _has_ended(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], 0)[0])


def _write_log(line: str) -> None:
    with contextlib.suppress(OSError):  # it may be on a disk that is full
        os.write(2, f"{line}\n".encode(errors="surrogateescape"))


# ----------------------------------------------------------------------------------------------------- the process
def main(folder_name: str, first: int) -> None:
    """Entry of the supervisor's process; ``first`` is the connection of whoever started it."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock = socket.socket(fileno=first)
    try:
        _run(Path(folder_name), sock)
    except AtollError as error:
        _write_log(str(error))
        _turn_away(sock, str(error))
        sys.exit(1)


def _run(folder: Path, first: socket.socket) -> None:
    lock = supervisor.open_lock(folder)
    if not record.take_lock(lock, supervisor.PROBE_S):  # somebody was faster
        _turn_away(first, "")
        return
    os.ftruncate(lock, 0)
    with contextlib.suppress(OSError):  # the disk may be full
        os.pwrite(lock, str(os.getpid()).encode(), 0)
    with Store(folder) as store:
        store.keep_reserve()
        dispatcher = Dispatcher(folder, store, lock, first)
        dispatcher.run()
    os.close(lock)  # so that the next supervisor can start meanwhile
    dispatcher.join()


def _turn_away(first: socket.socket, reason: str) -> None:
    with contextlib.suppress(OSError):  # who started us is gone
        first.sendall(supervisor.NO + reason.encode(errors="replace")[: supervisor.LONGEST_ERROR - 1])
