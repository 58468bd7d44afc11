"""Whose turn it is, and that a cluster of thousands of jobs costs as much as there are, not its square."""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from atoll.cli.shown import print_jobs
from atoll.tasks import dispatcher, record, store
from atoll.tasks.dispatcher import Dispatcher
from atoll.tasks.rows import JobRow
from atoll.tasks.schedule import turns
from atoll.tasks.spec import ClusterSpec, JobSpec, JobStatus
from atoll.tasks.store import Store
from atoll.tasks.transitions import SetStatus
from local_cluster import LocalCluster

NUM = 60
KINDS = {
    "a sweep": {"group": "sweep", "parallel": 4},
    "with accelerators": {"num_accelerators": 1, "accelerator": "L4"},
    "a sweep with more at once than accelerators": {
        "group": "sweep",
        "parallel": 16,
        "num_accelerators": 1,
        "accelerator": "L4",
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_job_waits_for_does_not_change_with_every_other_job(kind: str) -> None:
    cluster = ClusterSpec("c", created_s=0.0, accelerator="L4", num_accelerators=4)
    spec = JobSpec(run="true", **KINDS[kind])
    pending = [JobRow(i, None, "", "ada", spec, JobStatus.PENDING, "", None, 0.0) for i in range(1, NUM + 1)]
    running: list[tuple[JobRow, tuple[int, ...]]] = []
    said: dict[int, str] = {}
    changes, most = 0, 0
    while pending or running:
        found = turns(cluster, pending, running)
        for turn in found:
            changes += turn.why is not None and said.get(turn.job.id) != turn.why
            said[turn.job.id] = turn.why or ""
        running += [(turn.job, turn.nodes) for turn in found if turn.why is None]
        pending = [turn.job for turn in found if turn.why is not None]
        most = max(most, len(running))
        running.pop(0)
    assert most == 4
    assert changes <= 3 * NUM


def placed(cluster: ClusterSpec, *wanted: tuple[int, int]) -> list[tuple[int, ...] | str]:
    """Where jobs of so many nodes and accelerators a node start, or what they wait for."""
    specs = [JobSpec(run="true", num_nodes=nodes, num_accelerators=each) for nodes, each in wanted]
    pending = [JobRow(i, None, "", "ada", spec, JobStatus.PENDING, "", None, 0.0) for i, spec in enumerate(specs, 1)]
    return [turn.why or turn.nodes for turn in turns(cluster, pending, [])]


def test_jobs_are_packed_over_nodes() -> None:
    two = ClusterSpec("c", num_nodes=2, accelerator="L4", num_accelerators=1)
    waits = "waiting for 1 × accelerator on 2 nodes: jobs 1, 2 have 2 of the cluster's 2"
    assert placed(two, (1, 1), (1, 1), (2, 1)) == [(0,), (1,), waits]
    assert placed(two, (2, 1), (1, 0), (1, 1))[:2] == [(0, 1), (0,)]
    four = ClusterSpec("c", num_nodes=4, accelerator="L4", num_accelerators=2)
    assert placed(four, *[(1, 1)] * 8) == [(0,), (1,), (2,), (3,)] * 2
    waits = "waiting for 2 × accelerator on 1 node: jobs 1, 2, 3 have 5 of the cluster's 8"
    assert placed(four, (1, 2), (2, 1), (1, 1), (1, 2), (1, 0)) == [(0,), (1, 2), (3,), waits, (0,)]
    assert placed(four, *[(1, 0)] * 4) == [(0,), (1,), (2,), (3,)]
    assert placed(four, (4, 2), (2, 0), (5, 0))[1:] == [(0, 1), (0, 1, 2, 3)]  # the last one is refused when it starts


class Ends:
    """A job that has ended at the next look."""

    status, deadline, cancelled, finished = JobStatus.SUCCEEDED, None, False, True

    def __init__(self, job: JobRow, nodes: tuple[int, ...], *_: object) -> None:
        self.job, self.nodes = job, nodes

    def start(self) -> None: ...
    def close(self) -> None: ...


class NoNodes:
    """Nodes of a cluster on which nothing is started."""

    shared_network, shared_networks = None, ()

    def open(self) -> list[str]:
        return []

    def notice(self) -> None: ...
    def fault_of(self, _job_id: int) -> None: ...
    def close(self) -> None: ...


def test_each_job_of_a_sweep_is_read_a_few_times_however_many_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed = 0

    def counted(columns: tuple[Any, ...]) -> JobRow:
        nonlocal parsed
        parsed += 1
        return row_of(columns)

    row_of = store._row
    monkeypatch.setattr(store, "_row", counted)
    monkeypatch.setattr(dispatcher, "JobRunner", Ends)
    monkeypatch.setattr(dispatcher, "ClusterNodes", lambda *_: NoNodes())
    folder = tmp_path / "clusters/c"
    folder.mkdir(parents=True)
    record.save(folder, ClusterSpec("c", created_s=0.0))
    lock = os.open(folder / "supervisor.lock", os.O_RDWR | os.O_CREAT)
    first, submitter = socket.socketpair()
    with Store(folder) as ours, first, submitter:
        dispatch = Dispatcher(folder, ours, lock, first)
        spec = JobSpec(run="true", group="sweep", parallel=2)
        for _ in range(NUM):  # submitted one by one, while the supervisor looks
            dispatch.add(spec, {}, "ada")
            dispatch._look()
        ended = 0
        while dispatch._runners:
            for job_id in dispatch._runners:
                ours.apply(job_id, [SetStatus(JobStatus.SUCCEEDED)], time.time())
                ended += 1
            dispatch._clear_finished()
            dispatch._look()
        num_events = sum(len(ours.events(job_id)) for job_id in range(1, NUM + 1))
        dispatch._close()
    os.close(lock)
    assert ended == NUM
    assert num_events <= 2 * NUM, "why it waits, and its end"
    assert parsed <= 5 * NUM


def test_a_sweep_leaves_as_many_events_and_lines_as_it_has_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATOLL_HOME", str(tmp_path))
    cluster = LocalCluster.make(tmp_path)
    jobs = [cluster.submit("true", group="sweep", parallel=4) for _ in range(12)]
    assert [cluster.follow(job)[0] for job in jobs] == [JobStatus.SUCCEEDED] * len(jobs)
    with Store(cluster.folder) as rows:
        kinds = [event.kind for job in jobs for event in rows.events(job)]
    assert kinds.count("waiting") <= len(jobs)
    assert len(kinds) <= 10 * len(jobs)
    assert sum(cluster.log(job).count("waiting") for job in jobs) <= len(jobs)


def test_the_queue_says_which_place_a_job_has(capsys: pytest.CaptureFixture[str]) -> None:
    spec = JobSpec(run="true", group="s", parallel=1)
    rows = [JobRow(i, None, "", "ada", spec, JobStatus.PENDING, "", None, 0.0) for i in range(4)]
    running = dataclasses.replace(rows[0], status=JobStatus.RUNNING)
    cluster = ClusterSpec("c", created_s=0.0)
    waiting = [dataclasses.replace(t.job, reason=t.why or "") for t in turns(cluster, rows[1:], [(running, (0,))])]
    print_jobs([*reversed(waiting), running])
    assert "waiting for its turn in the sweep, 1 at once (2 of 3 that wait)" in capsys.readouterr().out
