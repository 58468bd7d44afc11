"""What a client asks of a cluster, on the machine where its supervisor runs; also as a program, so over ssh.

``python -m atoll.tasks.control OP`` takes a JSON object on standard input, ``{"cluster": NAME, ...}``, and answers
``{"value": ...}`` or ``{"error": KIND, "message": ...}`` on standard output. ``follow`` answers with the log's bytes,
and at its end with the job's status on standard error; its exit code says the same. Standard library only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import re
import select
import shutil
import sqlite3
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from signal import SIGTERM
from typing import Any

from atoll.core.errors import AtollError, ConfigError, ProvisionError
from atoll.core.exit_codes import ExitCode
from atoll.core.paths import atoll_home, user_name
from atoll.core.validation import command_line
from atoll.tasks import record, remains, supervisor
from atoll.tasks.clusters import is_stopped
from atoll.tasks.environment import check_size, task_id
from atoll.tasks.logs import RUN_LOG, Follower, follow_log, only_rank
from atoll.tasks.rows import JobRow
from atoll.tasks.spec import ClusterSpec, ClusterStatus, JobSpec, JobStatus, is_name
from atoll.tasks.store import STORE, NoRoom, Store, put_variables

Write = Callable[[bytes], object]

_END_S = 30.0  # cancelled jobs end in this time
_ALIVE_S = 1.0  # whoever follows a job looks so often whether its supervisor lives
_IDLE_S = 15.0  # a supervisor that does nothing about a new job for so long is named
NOTE = "note: "  # what a line on standard error begins with that is for the user while they wait
_BROKEN = 120  # the program's exit code where it failed


class NothingLeft(AtollError, LookupError):
    """The cluster's folder was removed from the machine that supervises it."""


class LocalControl:
    """What can be asked of the cluster in ``folder``. Everything may raise ``AtollError``.

    ``wait`` sleeps while a log is quiet; it may raise to stop.
    """

    def __init__(self, folder: Path, wait: Callable[[float], None] = time.sleep) -> None:
        self._folder = folder
        self._wait = wait

    def submit(self, spec: JobSpec, secrets: Mapping[str, str]) -> int:
        """Add a job; returns its number.

        Raises:
            ConfigError: the cluster is not up, or has less than the job wants.
            ProvisionError: its supervisor could not be started.
        """
        cluster = record.load(self._folder)
        record.check_owner(self._folder)
        _check(spec, cluster)
        check_size(spec, secrets)

        def begin(job_id: int) -> str:
            # Before the job can be seen: a supervisor that runs may start it at once.
            put_variables(self._folder, job_id, {**spec.variables(), "secrets": secrets})
            return task_id(cluster.name, job_id, datetime.now())

        with Store(self._folder) as store:
            job_id = store.add(spec, task_id_for=begin, user=user_name())
            try:
                supervisor.ensure(self._folder)
            except AtollError:
                store.ask_cancel([job_id])  # nobody would ever run it
                raise
        return job_id

    def cancel(self, job_ids: Sequence[int] | None, number: int = SIGTERM) -> list[int]:
        """Ask for the end of these jobs, or of all; returns those that had not ended.

        Their processes get the signal ``number``, and end within the time that their job gives them for it.
        """
        with Store(self._folder) as store:
            asked = store.ask_cancel(job_ids, number)
            supervisor.reconcile_store(store, self._folder)
        supervisor.wake(self._folder)
        return asked

    def queue(self) -> list[JobRow]:
        """Every job, newest first."""
        with Store(self._folder) as store:
            self._reconcile(store)
            return store.jobs()

    def job(self, job_id: int | None) -> JobRow:
        """One job; None is the newest.

        Raises:
            LookupError: there is none.
        """
        with Store(self._folder) as store:
            self._reconcile(store)
            if job_id is not None:
                return store.job(job_id)
            newest = store.jobs(limit=1)
        if not newest:
            raise LookupError(f"cluster {self._folder.name} has had no job yet")
        return newest[0]

    def follow(
        self,
        job_id: int,
        write: Write,
        *,
        follow: bool = True,
        tail: int = 0,
        rank: int | None = None,
        start: int = 0,
        skip_bytes: int = 0,
    ) -> JobStatus:
        """Write a job's log, until the job has ended.

        Args:
            job_id: which job.
            write: gets the bytes, whole lines mostly.
            follow: go on until the job has ended; else write what there is.
            tail: begin with the last so many lines; 0 is with the first.
            rank: only lines of this rank.
            start: begin at this byte of the log, where ``tail`` does not say it,
            skip_bytes: and behind so many bytes of what would be written from there.

        Returns:
            The job's status.

        Raises:
            LookupError: there is no such job.
            ConfigError: it has no such rank.
        """
        with Store(self._folder) as store:
            self._reconcile(store)
            watched = _Watched(store, self._folder, store.job(job_id))
            only = _only(watched.job, rank)
            path = self._folder / "jobs" / str(job_id) / RUN_LOG
            if watched.job.started_s is not None and not path.exists():
                write(f"atoll: the log of job {job_id} is gone: somebody removed {path}\n".encode(errors="replace"))
            with Follower(path, write, only) as follower:
                follower.skip(follower.position_of_tail(tail) if tail else start, skip_bytes)
                if follow:
                    follow_log(follower, watched.has_ended, self._wait)
                status = store.job(job_id).status  # before the last look: what led to it is in the log by then
                follower.drain()
            return status

    def _reconcile(self, store: Store) -> None:
        with contextlib.suppress(NoRoom):  # what there is can be read all the same
            supervisor.reconcile_store(store, self._folder)

    def position_of_tail(self, job_id: int, num_lines: int, rank: int | None = None) -> int:
        """Where in a job's log the last so many lines begin: what ``start`` of ``follow`` is to be."""
        with Store(self._folder) as store:
            only = _only(store.job(job_id), rank)
        with Follower(self._folder / "jobs" / str(job_id) / RUN_LOG, lambda data: None, only) as follower:
            return follower.position_of_tail(num_lines)

    def cluster(self) -> ClusterSpec:
        """The cluster's record."""
        return record.load(self._folder)

    def change(self, **fields: Any) -> ClusterSpec:
        """Change fields of the record. A cluster that is stopped or taken down has its jobs cancelled first."""
        if fields.get("status", ClusterStatus.UP) != ClusterStatus.UP:
            self._end_jobs()
            if fields["status"] == ClusterStatus.STOPPED:
                self._end_remains()
        return record.change(self._folder, **fields)

    def remove_nodes(self) -> list[str]:
        """Cancel the jobs, end what still runs of them, and remove the nodes' files. Logs stay.

        Returns:
            a line for each host on which nobody could look whether something runs.

        Raises:
            AtollError: something can't be ended.
        """
        if not supervisor.is_running(self._folder):  # on a full disk the store can't be opened before
            remove_tree(self._folder / "nodes")
        self._end_jobs()
        lines = self._end_remains()
        remove_tree(self._folder / "nodes")
        return lines

    def end(self) -> list[int]:
        """End the jobs, whatever is wrong; a supervisor that does not end in time is killed. Returns the jobs ended.

        Raises:
            AtollError: it can't be killed.
        """
        ended: list[int] = []
        with contextlib.suppress(AtollError):  # the store may be what is wrong
            if (self._folder / STORE).exists():
                ended = self.cancel(None)
            self._wait_until_idle()
        if not supervisor.kill(self._folder):
            raise AtollError(
                f"the supervisor of cluster {self._folder.name} can't be ended, and its jobs may go on; "
                f"{_supervisor_stands(self._folder)}"
            )
        if self._is_up():
            self._end_remains()
        return ended

    def _is_up(self) -> bool:
        with contextlib.suppress(AtollError, LookupError):
            return record.load(self._folder).status is not ClusterStatus.DOWN
        return False

    def _end_remains(self) -> list[str]:
        """End what is stopped, or hangs, of jobs that have ended."""
        lock = supervisor.open_lock(self._folder)
        try:
            if not record.take_lock(lock, supervisor.PROBE_S):
                raise AtollError(f"jobs of cluster {self._folder.name} were started just now: try again")
            return remains.end_all(self._folder)
        finally:
            os.close(lock)

    def _end_jobs(self) -> None:
        self.cancel(None)
        if not self._wait_until_idle():
            raise AtollError(
                f"jobs of cluster {self._folder.name} did not end in time after they were cancelled; "
                f"{_supervisor_stands(self._folder)}"
            )

    def _wait_until_idle(self) -> bool:
        """Has the supervisor ended, within what its jobs have to end and a while more?"""
        deadline = time.monotonic() + _END_S
        if (self._folder / STORE).exists():
            with Store(self._folder) as store:
                deadline += max((job.spec.grace_s or 0.0 for job in store.jobs(unfinished=True)), default=0.0)
        while supervisor.is_running(self._folder):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True


def _supervisor_stands(folder: Path) -> str:
    """Why a supervisor may not do what it should, and what to do."""
    if (stopped := _stopped(folder)) is not None:
        return stopped
    return f"its supervisor is process {supervisor.pid_of(folder)}, see {folder / supervisor.LOG}"


def _stopped(folder: Path) -> str | None:
    pid = supervisor.pid_of(folder)
    return f"its supervisor, process {pid}, is stopped: kill -CONT {pid}" if is_stopped(pid) else None


class _Watched:
    """A job whose end somebody waits for, and is told, on standard error, why nothing happens."""

    def __init__(self, store: Store, folder: Path, job: JobRow) -> None:
        self.job = job
        self._store = store
        self._folder = folder
        self._version = store.version()
        self._began = self._looked = time.monotonic()
        self._hindrance: str | None = None  # as of the last look
        self._told: str | None = None

    def has_ended(self) -> bool:
        now = time.monotonic()
        if now - self._looked > _ALIVE_S:
            self._looked = now
            supervisor.reconcile_store(self._store, self._folder)
            self._version = -1  # what this store writes itself does not count as a change
        if (version := self._store.version()) != self._version:
            self._version = version
            self.job = self._store.job(self.job.id)
            if self._looked == now and not self.job.status.ended:
                self._tell_hindrance(now)
        return self.job.status.ended

    def _tell_hindrance(self, now: float) -> None:
        """Say once what is found at two looks in a row: it may be over in an instant."""
        why = _stopped(self._folder)
        if why is None and (line := supervisor.last_line(self._folder)):
            why = f"its supervisor says, in {self._folder / supervisor.LOG}: {line}"
        if why is None and self.job.status is JobStatus.PENDING and not self.job.reason and now - self._began > _IDLE_S:
            why = _supervisor_stands(self._folder)
        if why is not None and why == self._hindrance != self._told:
            self._told = why
            sys.stderr.write(f"{NOTE}nothing is heard of job {self.job.id}: {why}\n")
            sys.stderr.flush()
        self._hindrance = why


def _check(spec: JobSpec, cluster: ClusterSpec) -> None:
    name, launch = cluster.name, ("atoll", "launch", "-c", cluster.name)
    if cluster.status is ClusterStatus.DOWN:
        raise ConfigError(f"cluster {name} is down: make it anew with `{command_line(*launch, 'TASK')}`")
    if cluster.status is ClusterStatus.STOPPED:
        raise ConfigError(f"cluster {name} is stopped: take it up again with `{command_line('atoll', 'start', name)}`")
    if spec.num_nodes > cluster.num_nodes:
        raise ConfigError(
            f"the job wants {spec.num_nodes} nodes and cluster {name} has {cluster.num_nodes}: ask for less, or resize "
            f"it with `{command_line(*launch, '--num-nodes', spec.num_nodes, 'TASK')}`"
        )
    if spec.num_accelerators > cluster.num_accelerators:
        raise ConfigError(
            f"the job wants {spec.num_accelerators} accelerators a node and cluster {name} has "
            f"{cluster.num_accelerators}: ask for less, or resize it with "
            f"`{command_line(*launch, '--gpus', f'{spec.accelerator}:{spec.num_accelerators}', 'TASK')}`"
        )


def _only(job: JobRow, rank: int | None) -> re.Pattern[bytes] | None:
    if rank is None:
        return None
    num = job.spec.num_nodes * (job.spec.num_processes if job.spec.command is not None else 1)
    if not 0 <= rank < num:
        has = "only rank 0" if num == 1 else f"ranks 0 to {num - 1}"
        raise ConfigError(f"rank {rank}: job {job.id} has {has}")
    return only_rank(rank, several=num > 1)


def remove_tree(folder: Path) -> None:
    """Remove a folder also where its owner may not write into parts of it."""

    def insist(function: Callable[..., Any], path: str, info: tuple[object, BaseException, object]) -> None:
        if isinstance(info[1], FileNotFoundError):  # a supervisor that ends removes files of its store, too
            return
        with contextlib.suppress(OSError):
            os.chmod(os.path.dirname(path), 0o700)
            os.chmod(path, 0o700)
        if function is os.open or function is os.scandir:
            shutil.rmtree(path, ignore_errors=True)
        else:
            function(path)

    if folder.exists():
        shutil.rmtree(folder, onerror=insist)


# ------------------------------------------------------------------------------------------------- as a program


def _answer(operation: str, folder: Path, wish: Mapping[str, Any]) -> Any:
    control = LocalControl(folder)
    match operation:
        case "create":
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            ended = control.end() if wish["anew"] else []
            cluster = ClusterSpec.from_json(wish["spec"])
            with contextlib.suppress(LookupError, ConfigError):
                have = record.load(folder)
                if have.created_s == cluster.created_s:  # whoever asks doesn't know what the supervisor wrote
                    cluster = dataclasses.replace(cluster, setup_done=have.setup_done)
            record.save(folder, cluster)
            return ended
        case "submit":
            return control.submit(JobSpec.from_json({**wish["spec"], **wish["variables"]}), wish["secrets"])
        case "cancel":
            return control.cancel(wish["job_ids"], wish.get("signal", SIGTERM))
        case "queue":
            return [job.to_json() for job in control.queue()]
        case "job":
            return control.job(wish["job_id"]).to_json()
        case "cluster":
            return control.cluster().to_json()
        case "change":
            fields = ClusterSpec.from_json({**control.cluster().to_json(), **wish["fields"]})
            return control.change(**{name: getattr(fields, name) for name in wish["fields"]}).to_json()
        case "remove_nodes":
            return control.remove_nodes()
        case "position_of_tail":
            return control.position_of_tail(wish["job_id"], wish["tail"], wish["rank"])
        case "end":
            return control.end()
        case _:
            raise ConfigError(f"operation {operation!r} is not known: is Atoll older there than here?")


def _stream(folder: Path, wish: Mapping[str, Any]) -> int:
    reader = select.poll()
    reader.register(sys.stdout.fileno(), 0)  # hang-ups are always told

    def wait(for_s: float) -> None:
        if reader.poll(for_s * 1000):
            raise BrokenPipeError

    def write(data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(sys.stdout.fileno(), view) :]

    control = LocalControl(folder, wait)
    how = {name: wish[name] for name in ("follow", "rank", "start", "skip_bytes")}
    status = control.follow(wish["job_id"], write, **how)
    sys.stderr.write(json.dumps({"status": status}))
    return status.exit_code


def _wish(line: bytes) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        wish = json.loads(line)
        if isinstance(wish, dict) and "cluster" in wish:
            return wish
    raise AtollError("what it was asked arrived damaged: does something in ~/.bashrc there read standard input?")


def _trouble(error: OSError | sqlite3.Error, folder: Path) -> str:
    """What can't be read or written there, why, and what helps."""
    what = f"{getattr(error, 'filename', None) or folder}: {getattr(error, 'strerror', None) or error}"
    is_full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "disk is full" in str(error)
    return f"{what}: free some space there" if is_full else what


def main(arguments: Sequence[str]) -> int:
    """Entry of the program; returns its exit code."""
    (operation,), line = arguments, sys.stdin.buffer.readline()
    stream = sys.stderr if operation == "follow" else sys.stdout
    try:
        wish = _wish(line)
        name = str(wish["cluster"])
        if not is_name(name):
            raise ConfigError(f"cluster {name!r}: this is no name of a cluster")
        folder = atoll_home() / "clusters" / name
        if operation not in ("create", "end") and not (folder / record.RECORD).exists():
            raise NothingLeft(
                f"nothing is left of cluster {name} on its head: {folder} was removed there, with its jobs and their "
                f"logs. `{command_line('atoll', 'launch', '-c', name, 'TASK')}` makes it anew, {record.removes(name)}"
            )
        if operation == "follow":
            return _stream(folder, wish)
        answer = {"value": _answer(operation, folder, wish)}
        code = 0
    except BrokenPipeError:  # whoever asked is gone
        return _BROKEN
    except (AtollError, LookupError) as error:
        kinds = (
            kind.__name__ for kind in (NothingLeft, ConfigError, ProvisionError, LookupError) if isinstance(error, kind)
        )
        answer = {"error": next(kinds, "AtollError"), "message": str(error)}
        code = ExitCode.NOT_FOUND if isinstance(error, LookupError) else _BROKEN
    except (OSError, sqlite3.Error) as error:
        answer, code = {"error": "AtollError", "message": _trouble(error, folder)}, _BROKEN
    with contextlib.suppress(BrokenPipeError):
        stream.write(json.dumps(answer))
        stream.flush()
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
