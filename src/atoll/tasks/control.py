"""What a client asks of a cluster, on the machine where its supervisor runs; also as a program, so over ssh.

Only the supervisor changes jobs: it is asked on its socket, and started where a job waits for one. What there is to
read is read from the cluster's files, whether a supervisor runs or not.

``python -m atoll.tasks.control CLUSTER`` answers requests of ``protocol`` until its input ends. Standard library only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import os
import re
import shutil
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from signal import SIGTERM
from typing import Any

from atoll.core.errors import AtollError, ConfigError
from atoll.core.paths import user_name
from atoll.core.validation import command_line
from atoll.tasks import reaper, record, supervisor
from atoll.tasks.client import (
    Client,
    OnEvent,
    SocketStream,
    StallReporter,
    StreamLost,
    Write,
    state_of_supervisor,
    stopped_supervisor,
    tell,
)
from atoll.tasks.environment import check_size
from atoll.tasks.logs import RUN_LOG, Follower, only_rank
from atoll.tasks.protocol import PREAMBLE, VERSION, NothingLeft, answer, arguments, encode, error_message
from atoll.tasks.rows import EventRow, JobRow
from atoll.tasks.spec import ClusterSpec, ClusterStatus, JobSpec, JobStatus, is_name
from atoll.tasks.store import STORE, Store
from atoll.wire import frames

_END_S = 30.0  # cancelled jobs end in this time
_CLUSTERS_S = 120.0  # and the clusters of those that have some
_BROKEN = 120  # the program's exit code where whoever asked is gone
_ANSWER_S = 60.0
_TRIES = 5
_READ_BYTES = 1 << 18


class LocalControl:
    """What can be asked of the cluster in ``folder``. Everything may raise ``AtollError``.

    Args:
        folder: the cluster's.
        note: called with a line for whoever waits.
        hang_up: a descriptor whose hang-up ends what is waited for.
    """

    def __init__(
        self,
        folder: Path,
        note: Callable[[str], object] = lambda line: tell(f"note: {line}"),
        hang_up: int | None = None,
    ) -> None:
        self._folder = folder
        self._note = note
        self._hang_up = hang_up
        self._client = Client(functools.partial(SocketStream, folder), f"the supervisor of cluster {folder.name}")

    def create(self, cluster: ClusterSpec, *, anew: bool) -> list[int]:
        """Writes the cluster's record; ``anew``: after what still ran here has ended, jobs that are returned."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        ended = self.end() if anew else []
        with contextlib.suppress(LookupError, ConfigError):
            have = record.load(self._folder)
            if have.created_s == cluster.created_s:  # whoever asks doesn't know what the supervisor wrote
                cluster = dataclasses.replace(cluster, setup_done=have.setup_done)
        record.save(self._folder, cluster)
        supervisor.watch(self._folder, alone=cluster.allocation.is_rented)
        return ended

    def submit(self, spec: JobSpec, secrets: Mapping[str, str]) -> int:
        """Adds a job, once for its key; returns its number.

        Raises:
            ConfigError: the cluster is not up, or has less than the job wants.
            ProvisionError: its supervisor could not be started.
        """
        cluster = record.load(self._folder)
        record.check_owner(self._folder)
        _check(spec, cluster)
        check_size(spec, secrets)
        number: int = self.ask_supervisor("add", spec, secrets, user_name())
        return number

    def cancel(self, job_ids: Sequence[int] | None, number: int = SIGTERM) -> list[int]:
        """Asks for the end of these jobs, or of all; returns those that had not ended.

        Their processes get the signal ``number``, and end within the time that their job gives them for it.
        """
        with Store(self._folder) as store:
            if not store.jobs(limit=1, unfinished=True):
                return []
        ended: list[int] = self.ask_supervisor("cancel", None if job_ids is None else [*job_ids], number)
        return ended

    def ask_supervisor(self, operation: str, *args: Any) -> Any:
        """Asks for something that may be asked twice: a supervisor that ends at that moment has not done it."""

        def give_up(waited_s: float) -> None:
            stopped = stopped_supervisor(self._folder)
            if stopped is not None or waited_s > _ANSWER_S:
                why = stopped or state_of_supervisor(self._folder)
                raise AtollError(f"cluster {self._folder.name} does not answer; {why}")

        for _ in range(_TRIES):
            with contextlib.suppress(StreamLost):
                return self._client.ask(operation, args, {}, give_up)
        log = self._folder / supervisor.LOG
        raise AtollError(f"supervisors of cluster {self._folder.name} end before they answer; see {log}")

    def queue(self) -> list[JobRow]:
        """Every job, newest first."""
        return self._rows(Store.jobs)

    def job(self, job_id: int | None) -> JobRow:
        """One job; None is the newest.

        Raises:
            LookupError: there is none.
        """
        found = self._rows(lambda store: store.jobs(limit=1) if job_id is None else [store.job(job_id)])
        if not found:
            raise LookupError(f"cluster {self._folder.name} has had no job yet")
        return found[0]

    def events(self, job_id: int, after: int = 0) -> list[EventRow]:
        """What happened to a job since event number ``after``."""
        with Store(self._folder) as store:
            self._resume(store)
            return store.events(job_id, after)

    def resume(self) -> None:
        """Has jobs whose supervisor is gone seen to by a new one."""
        if (self._folder / STORE).exists():
            with Store(self._folder) as store:
                self._resume(store)

    def _resume(self, store: Store) -> bool:
        """Has jobs whose supervisor is gone seen to by a new one; False where none runs, nor can be started."""
        try:
            supervisor.resume(self._folder, store)
        except AtollError:  # what there is can be read all the same
            return supervisor.is_running(self._folder)
        return True

    def _rows(self, read: Callable[[Store], list[JobRow]]) -> list[JobRow]:
        """Rows of jobs. One that was begun has failed where no supervisor runs, and none can be started."""
        with Store(self._folder) as store:
            is_supervised = self._resume(store)
            return [row if is_supervised else _failed(row) for row in read(store)]

    def follow(
        self,
        job_id: int,
        write: Write,
        on_event: OnEvent | None = None,
        *,
        follow: bool = True,
        tail: int = 0,
        rank: int | None = None,
        start: int = 0,
        skip_bytes: int = 0,
        after: int = 0,
        hang_up: int | None = None,
    ) -> JobStatus:
        """Writes a job's log, until the job has ended or, where it waits for other nodes, its supervisor is elsewhere.

        Args:
            job_id: which job.
            write: gets the bytes, whole lines mostly.
            on_event: gets each event of the job, as soon as the log has what led to it.
            follow: go on until the job has ended; else write what there is.
            tail: begin with the last so many lines; 0 is with the first.
            rank: only lines of this rank.
            start: begin at this byte of the log, where ``tail`` does not say it,
            skip_bytes: and behind so many bytes of what would be written from there.
            after: the number of the last event that is known.
            hang_up: a descriptor whose hang-up ends it with ``BrokenPipeError``.

        Returns:
            The job's status.

        Raises:
            LookupError: there is no such job.
            ConfigError: it has no such rank.
        """
        job = self._rows(lambda store: [store.job(job_id)])[0]
        only = _only(job, rank)
        path = self._folder / "jobs" / str(job_id) / RUN_LOG
        if job.started_s is not None and not path.exists():
            write(f"atoll: the log of job {job_id} is gone: somebody removed {path}\n".encode(errors="replace"))
        with Follower(path, write, only) as follower:
            start = follower.position_of_tail(tail) if tail else start
        seen = FollowPosition(write, on_event, skip_bytes, after)
        how = {"start": start, "rank": rank, "several": _num_ranks(job) > 1}
        status = job.status
        while follow and not status.ended and supervisor.belongs_here(self._folder):
            args = (job_id, seen.write, None if on_event is None else seen.on_event)
            look = StallReporter(self._folder, job, self._note).look
            try:
                end = self._hang_up if hang_up is None else hang_up
                status = self._client.ask("follow", args, {**how, **seen.so_far}, look, hang_up=end)
            except StreamLost:
                status = self.job(job_id).status
        with Follower(path, seen.write, only) as follower:
            follower.skip(start, seen.num_bytes)
            follower.drain()
        for event in self.events(job_id, seen.after) if on_event is not None else ():
            seen.on_event(event)
        return status

    def wait(self, job_id: int, limit_s: float | None = None) -> JobStatus:
        """Waits until a job has ended, so many seconds at most, or as ``follow``; returns where it stands then."""
        began = time.monotonic()
        while not (status := self.job(job_id).status).ended and supervisor.belongs_here(self._folder):
            left_s = None if limit_s is None else limit_s - (time.monotonic() - began)
            if left_s is not None and left_s <= 0:
                break
            with contextlib.suppress(TimeoutError, StreamLost):
                args, look = (job_id, None, None), lambda waited_s: None
                self._client.ask("follow", args, {}, look, hang_up=self._hang_up, limit_s=left_s)
        return status

    def position_of_tail(self, job_id: int, num_lines: int, rank: int | None = None) -> int:
        """Where in a job's log the last so many lines begin: what ``start`` of ``follow`` is to be."""
        with Store(self._folder) as store:
            only = _only(store.job(job_id), rank)
        with Follower(self._folder / "jobs" / str(job_id) / RUN_LOG, lambda data: None, only) as follower:
            return follower.position_of_tail(num_lines)

    def cluster(self) -> ClusterSpec:
        """The cluster's record."""
        return record.load(self._folder)

    def change(self, /, **fields: Any) -> ClusterSpec:
        """Changes fields of the record. A cluster that is stopped or taken down has its jobs cancelled first."""
        changed = ClusterSpec.from_json({**self.cluster().to_json(), **fields})
        fields = {name: getattr(changed, name) for name in fields}
        if fields.get("status", ClusterStatus.UP) != ClusterStatus.UP:
            self._end_jobs()
            if fields["status"] == ClusterStatus.STOPPED:
                self._end_remains()
        return record.change(self._folder, **fields)

    def remove_nodes(self) -> tuple[list[int], list[str]]:
        """Cancels the jobs, ends what still runs of them, and removes the nodes' files. Logs stay.

        Returns:
            the jobs that had not ended, and a line for each host that nobody could look at.

        Raises:
            AtollError: something can't be ended.
        """
        if not supervisor.is_running(self._folder):  # on a full disk the store can't be opened before
            remove_tree(self._folder / "nodes")
        ended = self._end_jobs()
        lines = self._end_remains()
        remove_tree(self._folder / "nodes")
        return ended, lines

    def end(self) -> list[int]:
        """End the jobs, whatever is wrong; a supervisor that does not end in time is killed. Returns the jobs ended.

        Raises:
            AtollError: it can't be killed.
        """
        ended: list[int] = []
        with contextlib.suppress(AtollError):  # the store may be what is wrong
            if (self._folder / STORE).exists():
                with Store(self._folder) as store:
                    ended = [job.id for job in store.jobs(unfinished=True)]
                self.cancel(None)
            self._wait_until_idle()
        if not supervisor.kill(self._folder):
            raise AtollError(
                f"the supervisor of cluster {self._folder.name} can't be ended, and its jobs may continue; "
                f"{state_of_supervisor(self._folder)}"
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
            return reaper.end_all(self._folder)
        finally:
            os.close(lock)

    def _end_jobs(self) -> list[int]:
        ended = self.cancel(None)
        if not self._wait_until_idle():
            raise AtollError(
                f"jobs of cluster {self._folder.name} did not end in time after they were cancelled; "
                f"{state_of_supervisor(self._folder)}"
            )
        return ended

    def _wait_until_idle(self) -> bool:
        """Has the supervisor ended, within what its jobs have to end and a while more?"""
        deadline = time.monotonic() + _END_S
        if (self._folder / STORE).exists():
            with Store(self._folder) as store:
                specs = [job.spec for job in store.jobs(unfinished=True)]
                deadline += max((each.grace_s or 0.0 for each in specs), default=0.0)
                deadline += _CLUSTERS_S if any(each.managed is not None for each in specs) else 0.0
        while supervisor.is_running(self._folder):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True


class FollowPosition:
    """What of a job's log and events was handed on, which a follower that begins again leaves out."""

    def __init__(self, write: Write, on_event: OnEvent | None, num_bytes: int = 0, after: int = 0) -> None:
        self.num_bytes = num_bytes
        self.after = after
        self._write = write
        self._on_event = on_event

    @property
    def so_far(self) -> dict[str, int]:
        """The arguments of ``follow`` that leave it out."""
        return {"skip_bytes": self.num_bytes, "after": self.after}

    def write(self, data: bytes) -> None:
        """Hands on bytes of the log."""
        self.num_bytes += len(data)
        self._write(data)

    def on_event(self, event: EventRow) -> None:
        """Hands on an event."""
        self.after = event.seq
        if self._on_event is not None:
            self._on_event(event)


def _failed(row: JobRow) -> JobRow:
    """The row of a job whose supervisor is gone."""
    if row.status.ended or row.status is JobStatus.PENDING:
        return row
    reason = "its supervisor was killed, or the machine restarted"
    return dataclasses.replace(row, status=JobStatus.FAILED_DRIVER, reason=reason, ended_s=time.time())


def _check(spec: JobSpec, cluster: ClusterSpec) -> None:
    name, launch = cluster.name, ("atoll", "launch", "-c", cluster.name)
    if cluster.status is ClusterStatus.DOWN:
        raise ConfigError(f"cluster {name} is down: create it again with `{command_line(*launch, 'TASK')}`")
    if cluster.status is ClusterStatus.STOPPED:
        raise ConfigError(f"cluster {name} is stopped: restart it with `{command_line('atoll', 'start', name)}`")
    if spec.managed is not None:  # it has clusters of its own
        return
    if spec.num_nodes > cluster.num_nodes:
        raise ConfigError(
            f"the job needs {spec.num_nodes} nodes and cluster {name} has {cluster.num_nodes}: ask for less, or resize "
            f"it with `{command_line(*launch, '--num-nodes', spec.num_nodes, 'TASK')}`"
        )
    if spec.num_accelerators > cluster.num_accelerators:
        raise ConfigError(
            f"the job needs {spec.num_accelerators} accelerators per node and cluster {name} has "
            f"{cluster.num_accelerators}: request less, or resize it with "
            f"`{command_line(*launch, '--gpus', f'{spec.accelerator}:{spec.num_accelerators}', 'TASK')}`"
        )


def _num_ranks(job: JobRow) -> int:
    return job.spec.num_nodes * (job.spec.num_processes if job.spec.command is not None else 1)


def _only(job: JobRow, rank: int | None) -> re.Pattern[bytes] | None:
    if rank is None:
        return None
    if not 0 <= rank < (num := _num_ranks(job)):
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


OPERATIONS = frozenset(  # these methods of LocalControl, which RemoteControl has, too
    {
        *("create", "submit", "cancel", "queue", "job", "events", "follow", "wait", "position_of_tail", "cluster"),
        *("change", "remove_nodes", "end"),
    }
)


_NOTHING: dict[str, list[Any]] = {
    "queue": [],
    "cancel": [],
    "remove_nodes": [[], []],
}  # what these answer where the folder was removed


def _answer(name: str, control: LocalControl, folder: Path, message: Mapping[str, Any]) -> bytes:
    try:
        operation = str(message.get("op"))
        if not is_name(name):
            raise ConfigError(f"cluster {name!r}: not a valid cluster name")
        if operation not in OPERATIONS:
            raise ConfigError(f"operation {operation!r} is not known: is Atoll older there than here?")
        if operation not in ("create", "end") and not (folder / record.RECORD).exists():
            why = (
                f"nothing is left of cluster {name} on its head: {folder} was removed there, with its jobs and "
                f"their logs. `{command_line('atoll', 'launch', '-c', name, 'TASK')}` creates it again, "
                f"{record.removes(name)}"
            )
            if operation == "queue":
                _send(answer(note=why))
            if operation in _NOTHING:
                return answer(value=_NOTHING[operation])
            raise NothingLeft(why)
        args, kwargs = arguments(message, _send)
        return answer(value=encode(getattr(control, operation)(*args, **kwargs)))
    except BrokenPipeError:
        raise
    except (AtollError, LookupError) as error:
        return error_message(error)
    except (OSError, sqlite3.Error) as error:
        return error_message(AtollError(_trouble(error, folder)))


def _trouble(error: OSError | sqlite3.Error, folder: Path) -> str:
    """What can't be read or written there, why, and what helps."""
    what = f"{getattr(error, 'filename', None) or folder}: {getattr(error, 'strerror', None) or error}"
    is_full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "disk is full" in str(error)
    return f"{what}: free some space there" if is_full else what


def _send(data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(1, view) :]


def _requests() -> Iterator[dict[str, Any]]:
    """What is asked on standard input, until that ends.

    Raises:
        WireError: something has read of it before.
    """
    begin = b""
    while len(begin) < len(PREAMBLE) and (data := os.read(0, len(PREAMBLE) - len(begin))):
        begin += data
        if not PREAMBLE.startswith(begin):
            raise frames.WireError(
                "the request arrived damaged: does something in ~/.bashrc there read standard input?"
            )
    parser = frames.Parser()
    while data := os.read(0, _READ_BYTES):
        for frame in parser.feed(data):
            yield frame.parsed().meta


def main(arguments: Sequence[str]) -> int:
    """Entry of the program, whose argument is the name of a cluster; returns its exit code."""
    (name,) = arguments
    folder = record.folder_of(name)
    control = LocalControl(folder, lambda line: _send(answer(note=line)), hang_up=1)
    try:
        _send(answer(version=VERSION))
        try:
            for message in _requests():
                _send(_answer(name, control, folder, message))
        except frames.WireError as error:
            _send(error_message(error))
    except BrokenPipeError:  # whoever asked is gone
        return _BROKEN
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
