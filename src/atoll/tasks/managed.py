"""Managed jobs inside their supervisor: a task is run on clusters of its own, which are replaced when they are lost.

To the supervisor it is a job like others: of the controller's cluster, with a status, events and a log. ``recovery``
decides; here its actions are done, each in a thread: a launch, the copy of the task's log into the job's own, the end
of a cluster. What the machine knows is written down before it is acted on, and everything has a name that is known
before, so that a supervisor which comes after one that was killed continues with what is there. Standard library only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import site
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import Any, TypeVar

from atoll.core.errors import AtollError, ConfigError, ProvisionError
from atoll.core.paths import write_atomic
from atoll.providers import registry
from atoll.providers.base import DEFAULT, GONE, WORKDIR, AllocationState, NodeRequest
from atoll.tasks import clusters, environment, launches, lifecycle, record, remote_control
from atoll.tasks import recovery as r
from atoll.tasks import transitions as t
from atoll.tasks.causes import TAKEN_BACK
from atoll.tasks.control import LocalControl, remove_tree
from atoll.tasks.logs import RUN_LOG, JobLog
from atoll.tasks.requests import JobRequest, Options
from atoll.tasks.rows import EventRow, JobRow
from atoll.tasks.runner import Record, unexpected
from atoll.tasks.spec import LONGEST_NAME, ClusterSpec, JobSpec, JobStatus
from atoll.tasks.store import read_variables
from atoll.wire.event_loop import EventLoop

_STATE, _COPIED = "recovery.json", "copied"  # in the job's folder
_RETRY_S, _LONGEST_RETRY_S = 0.5, 10.0
_TAKEN = (128 + SIGTERM, 128 + SIGKILL)  # how processes end with their nodes, which may be known only afterwards
_IDLE_MINUTES = 60  # a cluster whose controller is gone for good ends by itself

A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class ManagedSpec:
    """What a managed job needs beside its ``JobSpec``, as that carries it.

    Attributes:
        choices: what would do, the preferred one first.
        files: the folder that the task's files were copied to, in the workdir of the controller's cluster.
        workdir: did the task bring one? It is called ``workdir`` there.
        mounts: of ``file_mounts`` the targets, with what they were copied to there, or with their URL; None is an
            empty folder.
    """

    choices: tuple[NodeRequest, ...]
    files: str
    workdir: bool = False
    mounts: Mapping[str, str | None] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ManagedSpec:
        """From what ``to_json`` gave."""
        return cls(**{**data, "choices": tuple(_request(each) for each in data["choices"])})


def _request(data: Mapping[str, Any]) -> NodeRequest:
    kinds = data["accelerators"]
    return NodeRequest(**{**data, "accelerators": None if kinds is None else tuple((name, num) for name, num in kinds)})


class MergedLog:
    """A job's log: lines of its own between copies of its tasks' logs, each continued at the same byte after a crash.

    A mark beside it says how long it was when something of our own came last, and how much of the task's log it had.
    """

    def __init__(self, folder: Path, secrets: set[str]) -> None:
        self._log = JobLog(folder, secrets)
        self._path, self._mark_path = folder / RUN_LOG, folder / _COPIED
        self._lock = threading.Lock()
        self._launch, self._size, self._copied = 0, 0, 0
        with contextlib.suppress(OSError, ValueError):
            self._launch, self._size, self._copied = map(int, self._mark_path.read_text().split())

    def position(self, launch: int) -> int:
        """How much of the log of the task's job of this launch was copied."""
        with self._lock:
            if launch != self._launch:
                self._launch = launch
                self._mark(self._length(), 0)
            return self._copied_now()

    def say(self, text: str) -> None:
        """A line of our own."""
        data = self._log.redactor.hide_text(text).encode(errors="replace") + b"\n"
        with self._lock:
            self._mark(self._length() + len(data), self._copied_now())
            self._log.copy(data)

    def copy(self, data: bytes) -> None:
        """Whole lines of the task's log, as they are."""
        with self._lock:
            self._log.copy(data)

    def close(self) -> None:
        """Nothing more comes."""
        self._log.close(time.monotonic())

    def _length(self) -> int:
        try:
            return os.stat(self._path).st_size
        except OSError:
            return 0

    def _copied_now(self) -> int:
        return self._copied + max(0, self._length() - self._size)

    def _mark(self, size: int, copied: int) -> None:
        self._size, self._copied = size, copied
        with contextlib.suppress(OSError):  # a full disk; its log is incomplete then, too
            self._mark_path.write_text(f"{self._launch} {size} {copied}")


class ManagedRunner:
    """Runs one managed job until none of its clusters is left; what ``JobRunner`` is to other jobs.

    Args:
        job: its row; one that has begun is continued.
        folder: of the controller's cluster.
        loop: the supervisor's.
        record: writes events and status into the store; says what the status is then.
    """

    def __init__(self, job: JobRow, folder: Path, loop: EventLoop, record_rows: Record) -> None:
        assert job.spec.managed is not None
        if sys.flags.no_site:  # a launch packs a package for hosts, and may fetch what a URL names
            site.main()
        values = read_variables(folder, job.id)
        self._secrets = values.get("secrets", {})
        spec = replace(job.spec, base_env=values.get("base_env", {}), env=values.get("env", {}))
        self.job = replace(job, spec=spec)
        self.nodes: tuple[int, ...] = ()
        self.cancelled = job.cancel_asked
        self._managed = ManagedSpec.from_json(job.spec.managed)
        self._cluster_folder = folder
        self._folder = folder / "jobs" / str(job.id)
        self._loop, self._record = loop, record_rows
        state = None
        with contextlib.suppress(FileNotFoundError):
            state = r.State.from_json(json.loads((self._folder / _STATE).read_bytes()))
        infras = [request.infra or DEFAULT for request in self._managed.choices]
        self._machine = r.RecoveryMachine(infras, spec.grace_s or 0.0, state, job.status)
        self._log = MergedLog(self._folder, environment.hidden_values(spec, self._secrets))
        self._aborted: set[int] = set()  # launches that are given up
        self._left = threading.Event()  # nothing is followed any more
        self._left_launch = 0  # up to this one

    # ------------------------------------------------------------------------------------------- for the supervisor
    @property
    def status(self) -> JobStatus:
        """Where the job stands."""
        return self._machine.status

    @property
    def finished(self) -> bool:
        """Has the job ended, or was it left for the next supervisor?"""
        return self._machine.done or self._left.is_set()

    def start(self) -> None:
        """Begin, or continue."""
        self._act(self._machine.start(time.time()))
        if self.cancelled:  # while no supervisor ran
            self._hear(t.CancelAsked())

    def cancel(self, why: str, number: int = SIGTERM) -> None:
        """End it before its time, beginning with this signal."""
        self.cancelled = True
        self._hear(t.CancelAsked(why, number))

    def leave(self) -> bool:
        """Leave it, its clusters and their jobs as they are, for the next supervisor."""
        self._left.set()
        return True

    def leave_nodes(self, why: str, save_s: float, *, again: bool) -> None:
        """Its clusters have nodes of their own; where the controller moves, it is continued there."""
        if again:
            self.leave()

    def tell_fault(self, fault: str) -> None:
        """It has no nodes here that could have one."""

    def close(self) -> None:
        """Give up its files."""
        self._log.close()
        if self._machine.done:
            for name in (_STATE, _COPIED):
                (self._folder / name).unlink(missing_ok=True)

    # ------------------------------------------------------------------------------------------- inputs and actions
    def _post(self, event: r.Input) -> None:
        """From a thread."""
        self._loop.post(lambda: self._hear(event))

    def _hear(self, event: r.Input) -> None:
        if not self.finished:
            self._act(self._machine.handle(event, time.time()))

    def _act(self, actions: Sequence[r.Action]) -> None:
        if actions:
            with contextlib.suppress(OSError):  # a full disk: whoever comes next begins from what was written last
                write_atomic(self._folder / _STATE, json.dumps(self._machine.state.to_json()).encode())
        rows: list[t.SetStatus | t.Log] = []
        for action in actions:
            match action:
                case t.Log():
                    rows.append(action)
                    if action.text:
                        self._log.say(action.text)
                case t.SetStatus():
                    rows.append(action)
                    if action.status.ended:
                        self._say_end(action)
                case _:
                    self._perform(action)
        if rows:
            self._record(self.job.id, rows)
        if (due := self._machine.deadline) is not None:
            self._loop.after(due - time.time(), lambda: self._hear(t.Tick()), f"job {self.job.id}: recovery")

    def _perform(self, action: r.Action) -> None:
        match action:
            case r.Launch():
                self._in_thread(self._launched, action, lambda why: r.LaunchFailed(action.launch, why))
            case r.Follow():
                self._in_thread(self._followed, action, lambda why: r.Ended(action.launch, "lost", why))
            case r.TakeDown():
                self._in_thread(self._taken_down, action, lambda why: r.DownFailed(action.cluster, why))
            case r.Cancel():  # where it can't be asked, the end of its cluster ends it
                self._in_thread(self._cancelled, action, lambda why: t.Tick())
            case r.Abort():
                self._aborted.add(action.launch)
            case r.Leave():
                self._left_launch = action.launch

    def _in_thread(self, work: Callable[[A], r.Input], action: A, failed: Callable[[str], r.Input]) -> None:
        """Do blocking work for an action, and hear what comes of it."""

        def run() -> None:
            try:
                event = work(action)
            except (AtollError, OSError) as error:
                event = failed(str(error))
            except Exception as error:  # noqa: BLE001 - whatever is wrong with this job, the others go on
                event = failed(unexpected(error))
            self._post(event)

        # A daemon: a supervisor that is asked to end does not wait, and the next one does it again.
        threading.Thread(target=run, daemon=True, name=f"job{self.job.id}").start()

    def _say_end(self, end: t.SetStatus) -> None:
        restarts = self._machine.state.num_restarts
        story = f" after {restarts} recover{'y' if restarts == 1 else 'ies'}" if restarts else ""
        if end.status is JobStatus.SUCCEEDED:
            self._log.say(f"✓ Managed job {self.job.id} finished{story} (status: SUCCEEDED).")
            return
        how = "was cancelled" if end.status is JobStatus.CANCELLED else "failed"
        why = f": {end.reason.removesuffix('.')}" if end.reason not in ("", "cancelled") else ""
        self._log.say(f"✗ Managed job {self.job.id} {how}{story} (status: {end.status}){why}.")

    # ------------------------------------------------------------------------------------------- clusters, in threads
    def cluster_name(self, number: int) -> str:
        """Of one of its clusters: the same for every supervisor."""
        end = f"-{self.job.id}-{(self.job.spec.key or '')[:4]}-{number}"
        return f"{(self.job.name or 'job')[: LONGEST_NAME - len(end)].rstrip('._-')}{end}"

    def _launched(self, action: r.Launch) -> r.Input:
        request, spec = self._managed.choices[action.choice], self.job.spec
        name, key = self.cluster_name(action.cluster), f"{spec.key}-{action.launch}"

        def say(line: str) -> None:
            if given_up():
                raise ProvisionError("it was given up")
            if line.startswith("waiting for"):
                self._post(r.Waits(action.launch, line))
            else:
                self._log.say(line)

        def given_up() -> bool:
            return action.launch in self._aborted

        def make(cluster: ClusterSpec) -> tuple[JobSpec, Mapping[str, str]]:
            errors = max(0, spec.restarts.on_errors - action.num_errors)
            restarts = replace(spec.restarts, on_errors=errors, on_lost_nodes=cluster.allocation.max_restarts)
            task = replace(spec, managed=None, after=None, task_id=self.job.task_id, key=key, restarts=restarts)
            return task, self._secrets

        root = files_of(self._cluster_folder, self._managed.files)
        copied = {
            target: path if path is None or "://" in path else str(root / path)
            for target, path in self._managed.mounts.items()
        }
        wanted = JobRequest(
            resources=request,
            make=make,
            workdir=str(root / "workdir") if self._managed.workdir else None,
            mounts={target: {"source": path} for target, path in copied.items()},
            name=self.job.name,
        )
        how = Options(
            command="jobs", infra=request.infra, simulate=request.simulate, idle_minutes=_IDLE_MINUTES, down=True,
            say=say, given_up=given_up,
        )  # fmt: skip
        try:
            have = clusters.find(name)
            # A supervisor before this one may have done it.
            if have is not None and have.is_there and (found := _job_of(have, key)) is not None:
                return r.Launched(action.launch, found)
            return r.Launched(action.launch, launches.launch([wanted], name, how)[0].id)
        except ConfigError as error:
            return r.LaunchFailed(action.launch, str(error), refused=True)

    def _followed(self, action: r.Follow) -> r.Input:
        """Copies the task's log until its job has ended, however often the connection is lost."""
        name, pause_s = self.cluster_name(action.cluster), _RETRY_S
        while True:
            try:
                cluster = clusters.load(name)
                control = _control_of(cluster)
                control.job(action.job_id)
                self._post(r.Heard(action.launch))
                start, pause_s = self._log.position(action.launch), _RETRY_S
                control.follow(action.job_id, self._copy, lambda event: self._moved(action, event), start=start)
                row, events = control.job(action.job_id), control.events(action.job_id)
                if row.status.ended:  # else its supervisor has gone to other nodes
                    return _ended(action.launch, cluster, row, events)
            except LookupError as error:
                return r.Ended(action.launch, "cancelled", f"cluster {name} was removed: {error}")
            except (AtollError, OSError) as error:
                state, said = _polled(name, pause_s)
                self._post(r.Unheard(action.launch, said or str(error), state))
            if self._left.wait(pause_s) or self._left_launch >= action.launch:
                return t.Tick()
            pause_s = min(2 * pause_s, _LONGEST_RETRY_S)

    def _copy(self, data: bytes) -> None:
        if self._left.is_set():
            raise ProvisionError("this supervisor ends")
        self._log.copy(data)

    def _moved(self, action: r.Follow, event: EventRow) -> None:
        if event.kind == "restart":
            self._post(r.Restarted(action.launch, int(event.data["restarts"])))
        elif event.kind == "waiting":
            self._post(r.Moved(action.launch, JobStatus.PENDING, event.text))
        elif event.kind == "status" and not (status := JobStatus(event.data["status"])).ended:
            self._post(r.Moved(action.launch, status, event.text))

    def _taken_down(self, action: r.TakeDown) -> r.Input:
        name = self.cluster_name(action.cluster)
        with contextlib.suppress(LookupError):  # it was never made, or somebody removed it
            lifecycle.down(name, purge=True)
            lifecycle.forget(name)
        return r.Down(action.cluster)

    def _cancelled(self, action: r.Cancel) -> r.Input:
        with contextlib.suppress(LookupError):
            _control_of(clusters.load(self.cluster_name(action.cluster))).cancel([action.job_id], action.signal)
        return t.Tick()


def files_of(folder: Path, name: str) -> Path:
    """Where files of a managed job were copied to, by the controller's cluster of ``folder``."""
    allocation = record.load(folder).allocation
    if allocation.files == "homes":
        return clusters.node_home(folder.name, 0) / WORKDIR / name
    return Path(allocation.workdir or folder / WORKDIR, name)


def remove_files(folder: Path, job: JobRow) -> None:
    """Remove them, once the job has ended."""
    assert job.spec.managed is not None
    remove_tree(files_of(folder, job.spec.managed["files"]))


def _control_of(cluster: ClusterSpec) -> LocalControl | remote_control.RemoteControl:
    """Who answers for a cluster, without patience: whether it is lost is not decided there."""
    if cluster.allocation.supervised_here:
        return LocalControl(clusters.folder_of(cluster.name))
    return remote_control.control(cluster, patience_s=0.0)


def _job_of(cluster: ClusterSpec, key: str) -> int | None:
    """The job of a cluster that has this key."""
    rows = clusters.control_of(cluster).queue()
    return next((row.id for row in rows if row.spec.key == key), None)


def _polled(name: str, max_age_s: float = 0.0) -> tuple[AllocationState | None, str]:
    """What a cluster's provider says of it, or said so many seconds ago, and why; None where it says nothing."""
    try:
        allocation = clusters.load(name).allocation
        now = registry.of(allocation).poll(allocation, max_age_s=max_age_s)
    except (AtollError, OSError):
        return None, ""
    return now.state, now.reason


def _ended(launch: int, cluster: ClusterSpec, row: JobRow, events: Sequence[EventRow]) -> r.Ended:
    """How a task's job ended: by itself, by somebody's wish, or with its nodes."""
    causes = [event for event in events if event.kind in ("failed", "lost", "taken", "timeout", "cancel")]
    errors = [each for each in causes if each.kind == "failed"]
    counted = sum(each.data.get("exit_code") not in row.spec.restarts.on_exit_codes for each in errors)
    if row.status is JobStatus.SUCCEEDED:
        return r.Ended(launch, "succeeded")
    if row.status is JobStatus.CANCELLED and row.reason not in TAKEN_BACK:
        why = "it was cancelled" if row.reason in ("", "cancelled") else row.reason
        return r.Ended(launch, "cancelled", f"{why} (on cluster {cluster.name})")
    if row.status is JobStatus.FAILED_SETUP:
        return r.Ended(launch, "failed_setup", row.reason, row.exit_code)
    state, said = _polled(cluster.name)
    is_gone = state in GONE and row.exit_code in _TAKEN
    if row.status is JobStatus.FAILED and causes and causes[-1].kind in ("failed", "timeout") and not is_gone:
        return r.Ended(launch, "failed", row.reason, row.exit_code)
    if causes and causes[-1].kind == "taken" and state is AllocationState.READY:
        state = None  # not for long: nothing is begun there
    reason = row.reason if said in row.reason else f"{said} ({row.reason})"
    return r.Ended(launch, "lost", reason, None, state, counted)
