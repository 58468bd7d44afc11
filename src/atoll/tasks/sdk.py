"""SkyPilot's Python SDK: its calls give a request id, and ``get`` gives the result.

There is no server, so a call has done its work when it returns, and raises itself what SkyPilot's ``get`` would raise.
"""

from __future__ import annotations

import codecs
import enum
import re
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from atoll.core.errors import UsageError
from atoll.core.validation import checks_arguments
from atoll.providers import registry
from atoll.tasks import api, clusters, lifecycle
from atoll.tasks.dag import Dag
from atoll.tasks.jobs import Job
from atoll.tasks.lifecycle import Say, silent
from atoll.tasks.listing import cluster_row, job_row, resources_text, waiting_row
from atoll.tasks.logs import RUN_LOG
from atoll.tasks.spec import ClusterSpec, ClusterStatus, JobStatus

if TYPE_CHECKING:
    from atoll.tasks.rows import JobRow
    from atoll.tasks.task import Task

__all__ = [
    "ClusterHandle",
    "LaunchedJob",
    "Record",
    "RequestId",
    "StatusRefreshMode",
    "autostop",
    "cancel",
    "cost_report",
    "down",
    "download_logs",
    "exec",
    "get",
    "job_status",
    "launch",
    "list_accelerators",
    "queue",
    "start",
    "status",
    "stop",
    "stream_and_get",
    "tail_logs",
]

_MOST_REQUESTS = 10_000
_LATE_S = 5.0
_requests: dict[str, RequestId] = {}  # of this process, the latest


class StatusRefreshMode(enum.Enum):
    """How thoroughly SkyPilot's ``status`` asks clouds; here every call looks."""

    NONE = "NONE"
    AUTO = "AUTO"
    FORCE = "FORCE"


class RequestId(str):
    """The id of a call that was made, as text; ``sky.get`` gives its result.

    Attributes:
        result: of the call.
        lines: what the call had to tell.
    """

    result: Any
    lines: Sequence[str]

    @classmethod
    def of(cls, result: Any, lines: Sequence[str] = ()) -> RequestId:
        """A new one for a call that is done."""
        return cls()._done(result, lines)

    def __new__(cls, *_: object, **__: object) -> RequestId:
        return super().__new__(cls, uuid.uuid4())

    def _done(self, result: Any, lines: Sequence[str]) -> RequestId:
        self.result, self.lines = result, lines
        _requests[str(self)] = self
        while len(_requests) > _MOST_REQUESTS:  # a script that asks for the status for days
            del _requests[next(iter(_requests))]
        return self

    def __iter__(self) -> Iterator[str]:
        raise UsageError("this is the id of a request: sky.get(request_id) gives its result")


class LaunchedJob(RequestId, Job):
    """What ``launch`` and ``exec`` give: a request id whose result is ``(job_id, handle)``, and the ``Job`` itself."""

    def __init__(self, cluster: str, id: int) -> None:
        Job.__init__(self, cluster, id)


class Record(dict[str, Any]):
    """A cluster or a job in a list: a mapping whose keys are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no {name!r}: there are {', '.join(self)}") from None


@dataclass(frozen=True)
class ClusterHandle:
    """A cluster, as ``launch`` hands it on.

    Attributes:
        cluster_name: its name.
        infra: where it is.
        launched_nodes: how many nodes it has.
        launched_resources: of each node, ``1x (L4:4)``.
    """

    cluster_name: str
    infra: str
    launched_nodes: int
    launched_resources: str

    @classmethod
    def of(cls, cluster: ClusterSpec) -> ClusterHandle:
        """The handle of a cluster."""
        resources = resources_text(1, cluster.accelerator, cluster.num_accelerators, cluster.simulated)
        return cls(cluster.name, cluster.infra, cluster.num_nodes, resources)

    @classmethod
    def named(cls, cluster_name: str) -> ClusterHandle:
        """The handle of the cluster of this name."""
        return cls.of(clusters.load(cluster_name))

    @property
    def head_ip(self) -> str:
        """The address of its head, as other clusters reach it."""
        return clusters.head_address(clusters.load(self.cluster_name))

    def __str__(self) -> str:
        each = self.launched_resources.removeprefix("1x ")
        return f"{self.cluster_name} ({self.infra}, {self.launched_nodes} × {each})"


# ---------------------------------------------------------------------------------------------------- requests
@checks_arguments
def get(request_id: str) -> Any:
    """The result of a request: ``(job_id, handle)`` of ``launch`` and ``exec``, a list of ``status`` and ``queue``, …

    Raises:
        UsageError: it is no request of this process.
    """
    found = request_id if isinstance(request_id, RequestId) else _requests.get(request_id)
    if found is None:
        raise UsageError(
            f"get(): {request_id!r:.60} is no request of this process: sky.launch(task) and the other calls give one"
        )
    return found.result


@checks_arguments
def stream_and_get(
    request_id: str,
    log_path: str | None = None,
    tail: int | None = None,
    follow: bool = True,
    output_stream: Any = None,
) -> Any:
    """``get``, after the request's lines were written to ``output_stream``, a text stream, or to standard output.

    Raises:
        UsageError: it is no request of this process.
    """
    result = get(request_id)
    lines = _requests[str(request_id)].lines
    write = writer("stream_and_get", output_stream)
    for line in lines[-tail:] if tail else lines:
        write(f"{line}\n".encode())
    return result


class Lines(list[str]):
    """What a call tells, kept for ``stream_and_get`` and handed on.

    A call may wait for nodes for hours, so after a few seconds what it told last, and tells from then on, goes to
    standard error, unless somebody gets its lines.
    """

    def __init__(self, on_line: Say) -> None:
        super().__init__()
        self._on_line, self._is_late, self._lock = on_line, False, threading.Lock()
        self._timer = threading.Timer(_LATE_S, self._begin_to_tell)
        self._timer.daemon = True

    def __enter__(self) -> Lines:
        if self._on_line is silent:
            self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def __call__(self, line: str) -> None:
        with self._lock:
            self.append(line)
            if self._is_late:
                print(f"atoll: {line}", file=sys.stderr, flush=True)
        self._on_line(line)

    def _begin_to_tell(self) -> None:
        with self._lock:
            self._is_late = True
            for line in self[-1:]:
                print(f"atoll: {line}", file=sys.stderr, flush=True)


# -------------------------------------------------------------------------------------------------- jobs begin
@checks_arguments
def launch(
    task: Task | Dag,
    cluster_name: str | None = None,
    retry_until_up: bool = False,
    idle_minutes_to_autostop: int | None = None,
    wait_for: Any = None,
    dryrun: bool = False,
    down: bool = False,
    backend: Any = None,
    optimize_target: Any = None,
    no_setup: bool = False,
    clone_disk_from: str | None = None,
    fast: bool = False,
    resize: bool = False,
    *,
    infra: str | None = None,
    simulate: bool = True,
    strict: bool = False,
    on_line: Say = silent,
) -> LaunchedJob:
    """Start a task on a cluster, which is made, reused or resized for it.

    Args:
        task: a ``sky.Task``, or a ``sky.Dag`` of one.
        cluster_name: of the cluster; a new name by default.
        idle_minutes_to_autostop: stop the cluster after this many minutes without a job.
        down: remove it instead of stopping it; without minutes, right after its last job.
        dryrun: only decide where it would run; the result is ``(None, None)``.
        no_setup: skip the task's setup.
        fast: skip setup if the cluster is up and already set up.
        infra: where: ``local`` (the default), ``ssh/NAME``, ``slurm/NAME``, …
        simulate: run on CPU what requests accelerators that this machine lacks.
        strict: a script ends at its first command that fails.
        on_line: called with each line that ``atoll launch`` would print.
        retry_until_up, wait_for, backend, optimize_target, clone_disk_from, resize: SkyPilot's, without effect.

    Returns:
        the job, which outlives this process; its request's result is ``(job_id, handle)``.

    Raises:
        ConfigError: the task, the name or the infra can't work, or the cluster is too small and busy.
    """
    task = _single("launch", task)
    how: dict[str, Any] = {"infra": infra, "no_setup": no_setup, "fast": fast, "simulate": simulate, "strict": strict}
    how |= {"idle_minutes_to_autostop": idle_minutes_to_autostop, "down": down}
    with Lines(on_line) as lines:
        if dryrun:
            return _planned(api.plan(task, cluster_name, **how, on_line=lines), lines)
        return _launched(api.launch(task, cluster_name, **how, on_line=lines), lines)


@checks_arguments
def exec(
    task: Task | Dag,
    cluster_name: str,
    dryrun: bool = False,
    down: bool = False,
    backend: Any = None,
    *,
    strict: bool = False,
    on_line: Say = silent,
) -> LaunchedJob:
    """Start a task on a cluster that is up: copies its workdir, skips its setup and file_mounts.

    Args:
        task: a ``sky.Task``, or a ``sky.Dag`` of one.
        cluster_name: of the cluster.
        dryrun: only check that it would run; the result is ``(None, None)``.
        down: remove the cluster after its last job.
        strict, on_line: as in ``launch``.
        backend: SkyPilot's, without effect.

    Raises:
        UnknownCluster: there is no such cluster.
        ConfigError: the cluster is not up, or has less than the task needs.
    """
    task = _single("exec", task)
    with Lines(on_line) as lines:
        if dryrun:
            return _planned(api.plan(task, cluster_name, as_it_is=True, strict=strict, on_line=lines), lines)
        job = api.exec(task, cluster_name, strict=strict, on_line=lines)
    if down:
        api.autostop(cluster_name, 0, down=True)
    return _launched(job, lines)


def _single(call: str, task: Task | Dag) -> Task:
    if not isinstance(task, Dag):
        return task
    if len(task.tasks) != 1:
        raise UsageError(f"sky.{call}(): a Dag of {len(task.tasks)} tasks: sky.jobs.launch(dag) runs one after another")
    only: Task = task.tasks[0]
    return only


def _planned(cluster_name: str, lines: Sequence[str]) -> LaunchedJob:
    request = LaunchedJob(cluster_name, 0)
    request._done((None, None), lines)
    return request


def _launched(job: Job, lines: Sequence[str]) -> LaunchedJob:
    request = LaunchedJob(job.cluster, job.id)
    request._done((job.id, ClusterHandle.named(job.cluster)), lines)
    return request


# ---------------------------------------------------------------------------------------------- what there is
@checks_arguments
def status(
    cluster_names: str | Sequence[str] | None = None,
    refresh: Any = StatusRefreshMode.NONE,
    all_users: bool = False,
    *,
    all: bool = False,
) -> RequestId:
    """Clusters, as ``Record``: ``name``, ``status``, ``infra``, ``handle``, ``launched_at``, ``autostop``, …

    A cluster whose launch waits for nodes has the status INIT, and a ``reason``.

    Args:
        cluster_names: names or patterns; those that no cluster has are left out. By default all that are not down.
        all: also those that are down.
        refresh, all_users: SkyPilot's, without effect: every call looks.

    Raises:
        AtollError: the record of a cluster is damaged.
    """
    given = [cluster_names] if isinstance(cluster_names, str) else cluster_names
    waiting = [Record(waiting_row(each), status=ClusterStatus.INIT) for each in api.waiting_launches(given)]
    found = [_cluster(each) for each in _found(given) if all or each.status is not ClusterStatus.DOWN]
    return RequestId.of([*waiting, *found])


def _found(names: Sequence[str] | None) -> list[ClusterSpec]:
    if names is None:
        return api.status(all=True)
    found: list[ClusterSpec] = []
    for name in names:
        try:
            found += [each for each in api.status(name) if each not in found]
        except clusters.UnknownCluster:
            continue
    return found


def _cluster(cluster: ClusterSpec) -> Record:
    row = cluster_row(cluster, None)
    del row["num_unfinished_jobs"]
    cloud, *place = cluster.infra.split("/")
    return Record(
        **{**row, "status": cluster.status},
        handle=ClusterHandle.of(cluster),
        cloud=cloud,
        region="/".join(place) or None,
        nodes=cluster.num_nodes,
        resources_str=resources_text(
            cluster.num_nodes, cluster.accelerator, cluster.num_accelerators, cluster.simulated
        ),
        autostop=-1 if cluster.autostop_minutes is None else cluster.autostop_minutes,
        to_down=cluster.autodown,
    )


@checks_arguments
def cost_report(days: int | None = None) -> RequestId:
    """What rented clusters that are up have cost so far, as ``Record``.

    ``name``, ``status``, ``infra``, ``launched_at``, ``duration`` in seconds, ``num_nodes``, ``resources_str``,
    ``hourly_cost`` and ``total_cost`` in US dollars, both None where no price is known.

    Args:
        days: only those that were launched in so many days.

    Raises:
        AtollError: the record of a cluster is damaged.
    """
    now, found = time.time(), []
    for cluster in api.status():
        rented = cluster.allocation
        seconds = now - rented.since_s
        if cluster.status is ClusterStatus.UP and rented.is_rented and (days is None or seconds < 86400 * days):
            row = {"duration": int(seconds), "hourly_cost": rented.hourly_cost, "total_cost": rented.spent}
            found.append(Record(_cluster(cluster), launched_at=rented.since_s, **row))
    return RequestId.of(found)


@checks_arguments
def list_accelerators(
    gpus_only: bool = True,
    name_filter: str | None = None,
    quantity_filter: int | None = None,
    clouds: str | Sequence[str] | None = None,
) -> RequestId:
    """What clouds rent: ``{name: [Record, …]}``, of each name and count the cheapest machine of each cloud.

    ``accelerator_name``, ``accelerator_count``, ``cloud``, ``instance_type``, ``region``, ``price``, ``spot_price``.

    Args:
        name_filter: a regular expression that names have to contain.
        quantity_filter: only so many of a machine.
        clouds: ``aws``, or a list of some.
        gpus_only: SkyPilot's, without effect: only accelerators are listed.

    Raises:
        ConfigError: no cloud is named, or there is no such cloud.
        ProvisionError: prices can't be had.
    """
    if not clouds:
        raise UsageError("list_accelerators(): name clouds, as in clouds='aws' or clouds=['aws', 'gcp']")
    try:
        fits = re.compile(name_filter or "").search
    except re.error as error:
        raise UsageError(
            f"list_accelerators(): name_filter={name_filter!r} is no regular expression: {error}"
        ) from None
    found: dict[str, list[Record]] = {}
    for cloud in [clouds] if isinstance(clouds, str) else clouds:
        rented = (row for row in registry.resolve(cloud.lower()).gpu_rows()[0] if "price" in row)
        for row in rented:
            name, count = row["name"], row["count"]
            if fits(name) and quantity_filter in (None, count):
                kind = {"accelerator_name": name, "accelerator_count": count, "cloud": cloud}
                rest = {key: row[key] for key in ("instance_type", "region", "price", "spot_price")}
                found.setdefault(name, []).append(Record({**kind, **rest}))
    return RequestId.of(found)


@checks_arguments
def queue(cluster_name: str, skip_finished: bool = False, all_users: bool = False) -> RequestId:
    """The jobs of a cluster, the newest first, as ``Record``: ``job_id``, ``job_name``, ``status``, ``reason``, …

    Args:
        cluster_name: the cluster.
        skip_finished: only unfinished jobs.
        all_users: SkyPilot's, without effect: jobs of all users are listed.

    Raises:
        UnknownCluster: there is no such cluster.
    """
    rows = api.queue(cluster_name, skip_finished=skip_finished)
    return RequestId.of([job_record(cluster_name, row) for row in rows])


def job_record(cluster_name: str, row: JobRow) -> Record:
    """A job in a list."""
    spec = row.spec
    return Record(
        **{**job_row(row), "status": row.status},
        id=row.id,
        username=row.user,
        resources=resources_text(spec.num_nodes, spec.accelerator, spec.num_accelerators, spec.simulated),
        log_path=str(clusters.folder_of(cluster_name) / "jobs" / str(row.id) / RUN_LOG),
    )


@checks_arguments
def job_status(cluster_name: str, job_ids: Sequence[int] | None = None) -> RequestId:
    """``{job_id: JobStatus}`` of these jobs, by default of the newest; None for a job that does not exist.

    Raises:
        UnknownCluster: there is no such cluster, or it has no job yet.
    """
    if job_ids is None:
        job = api.job(cluster_name)
        return RequestId.of({job.id: job.status})
    statuses: dict[int, JobStatus] = {row.id: row.status for row in api.queue(cluster_name)}
    return RequestId.of({job_id: statuses.get(job_id) for job_id in job_ids})


# ------------------------------------------------------------------------------------------------------- logs
@checks_arguments
def tail_logs(
    cluster_name: str,
    job_id: int | None = None,
    follow: bool = True,
    tail: int = 0,
    output_stream: Any = None,
    *,
    rank: int | None = None,
    preload_content: bool = True,
) -> Any:
    """Write a job's log, the newest job's by default.

    Args:
        cluster_name, job_id: the job.
        follow: wait for the end.
        tail: only the last lines, 0 for all.
        output_stream: a text stream, or a function that takes bytes; standard output by default.
        rank: only what this rank wrote.
        preload_content: False gives an iterator over the log's lines, as they come, and writes nothing.

    Returns:
        the job's status as an exit code, 0, 100, 101 or 103: succeeded, failed, not finished, cancelled; or the
        iterator.

    Raises:
        UnknownCluster: there is no such cluster or job.
    """
    if not preload_content:
        return job_lines(api.job(cluster_name, job_id), follow, tail, rank)
    write = writer("tail_logs", output_stream)
    return api.job(cluster_name, job_id).follow(write, follow=follow, tail=tail, rank=rank).exit_code


def writer(call: str, output_stream: Any) -> Callable[[bytes], object]:
    """Writes bytes of a log to a text stream, or is the function that was given."""
    stream = sys.stdout if output_stream is None else output_stream
    if callable(stream):
        return stream  # type: ignore[no-any-return] # whatever it returns
    if not hasattr(stream, "write"):
        raise UsageError(f"{call}(): output_stream={stream!r:.60}: expected a text stream, or a function of bytes")
    text = codecs.getincrementaldecoder("utf-8")(errors="replace")  # a block may end inside a character

    def write(data: bytes) -> None:
        stream.write(text.decode(data))
        stream.flush()

    return write


def job_lines(job: Job, follow: bool, tail: int, rank: int | None = None) -> Iterator[str]:
    """The lines of its log, as they come."""
    rest = b""
    for piece in job.pieces(follow=follow, tail=tail, rank=rank):
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace") + "\n"
    if rest:
        yield rest.decode(errors="replace")


@checks_arguments
def download_logs(cluster_name: str, job_ids: Sequence[int] | None = None) -> dict[int, str]:
    """Copy the log files of jobs to ``./sky_logs/CLUSTER/JOB``, by default of the newest; the folder of each.

    Raises:
        UnknownCluster: there is no such cluster or job.
    """
    wanted = [api.job(cluster_name).id] if job_ids is None else [int(each) for each in job_ids]
    return {job_id: str(api.sync_down_logs(cluster_name, job_id)) for job_id in wanted}


# ------------------------------------------------------------------------------------------------ what ends them
@checks_arguments
def cancel(
    cluster_name: str, all: bool = False, all_users: bool = False, job_ids: Sequence[int] | None = None
) -> RequestId:
    """Cancel jobs: ``all`` unfinished ones, those given, or the newest unfinished one. The result: their numbers.

    Args:
        cluster_name: the cluster.
        all, all_users: every unfinished job.
        job_ids: these; later jobs of a pipeline are cancelled with an earlier one.

    Raises:
        UnknownCluster: there is no such cluster or job.
    """
    return RequestId.of(api.cancel(cluster_name, job_ids, all=all or all_users))


@checks_arguments
def stop(cluster_name: str, purge: bool = False, *, on_line: Say = silent) -> RequestId:
    """Stop a cluster: ends its jobs, keeps its nodes' files. The result: the jobs that were ended.

    Args:
        cluster_name: the cluster.
        purge: SkyPilot's, without effect.
        on_line: called with a line that says what this waits for.

    Raises:
        UnknownCluster: there is none, or it is down.
    """
    with Lines(on_line) as lines:
        return RequestId.of(lifecycle.stop(cluster_name, on_line=lines), lines)


@checks_arguments
def start(
    cluster_name: str,
    idle_minutes_to_autostop: int | None = None,
    wait_for: Any = None,
    retry_until_up: bool = False,
    down: bool = False,
    force: bool = False,
    *,
    on_line: Say = silent,
) -> RequestId:
    """Restart a stopped cluster. The result: its ``ClusterHandle``.

    Args:
        cluster_name: the cluster.
        idle_minutes_to_autostop, down: as in ``launch``.
        on_line: called with a line that says what this waits for.
        wait_for, retry_until_up, force: SkyPilot's, without effect.

    Raises:
        UnknownCluster: there is none, or it is down.
        ConfigError: it gave its nodes back when it was stopped.
    """
    with Lines(on_line) as lines:
        cluster = lifecycle.start(cluster_name, on_line=lines)
    if idle_minutes_to_autostop is not None or down:
        api.autostop(cluster_name, idle_minutes_to_autostop or 0, down=down)
    return RequestId.of(ClusterHandle.of(cluster), lines)


@checks_arguments
def down(cluster_name: str, purge: bool = False, *, on_line: Say = silent) -> RequestId:
    """Remove a cluster: ends its jobs, deletes its nodes' files, keeps its jobs' logs. The result: the jobs ended.

    Args:
        cluster_name: the cluster.
        purge: remove the record and the logs of its jobs from its head, too, and kill a supervisor that does not end.
        on_line: called with a line that says what this waits for.

    Raises:
        UnknownCluster: there is none.
    """
    with Lines(on_line) as lines:
        return RequestId.of(lifecycle.down(cluster_name, purge=purge, on_line=lines), lines)


@checks_arguments
def autostop(cluster_name: str, idle_minutes: int, wait_for: Any = None, down: bool = False) -> RequestId:
    """Stop a cluster, or remove it (``down``), once no job has run for ``idle_minutes``; never if negative.

    Args:
        cluster_name: the cluster.
        idle_minutes: how long.
        wait_for: SkyPilot's, without effect: jobs are waited for.
        down: remove it.

    Raises:
        UnknownCluster: there is no such cluster, or it is down.
    """
    api.autostop(cluster_name, idle_minutes, down=down)
    return RequestId.of(None)
