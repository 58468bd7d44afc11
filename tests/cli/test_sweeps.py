"""``--sweep``: one job a value, so many at once, and one table of results; on real local nodes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.pools import SOURCE_ROOT, eventually

from atoll.cli.shown import sweep_rows
from atoll.tasks import clusters, lifecycle
from atoll.tasks.control import LocalControl
from atoll.tasks.jobs import Job
from atoll.tasks.spec import JobSpec, JobStatus
from atoll.tasks.store import Store
from atoll.tasks.transitions import SetStatus
from local_cluster import LocalCluster

RUN = "from atoll.cli.main import main; main()"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A state folder for one test; clusters that it leaves up are taken down."""
    monkeypatch.setenv("ATOLL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("PYTHONPATH", SOURCE_ROOT)
    monkeypatch.chdir(tmp_path)
    yield tmp_path / "home"
    for name in clusters.all_names():
        lifecycle.down(name)


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that all nodes and this test see: not below /tmp, of which each node has its own."""
    folder = Path(tempfile.mkdtemp(prefix="atoll-test-", dir="/var/tmp"))
    yield folder
    shutil.rmtree(folder)


def start(*words: str) -> subprocess.Popen[str]:
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    return subprocess.Popen([sys.executable, "-c", RUN, *words], text=True, **streams)  # type: ignore[call-overload]


def atoll(*words: str, code: int = 0) -> str:
    """What it wrote to standard output."""
    process = start(*words)
    out, err = process.communicate(timeout=90)
    assert process.returncode == code, out + err
    assert "Traceback" not in err
    return out


def most_at_once(folder: Path) -> int:
    """How many jobs ran at the same time at most, from the times that they left behind."""
    spans = [tuple(map(float, path.read_text().split())) for path in folder.iterdir()]
    return max(sum(begin <= at < end for begin, end in spans) for at, _ in spans)


@pytest.mark.long
def test_never_more_jobs_at_once_than_parallel_says_and_a_failing_one_stops_no_other(shared):
    spans, begun = shared / "spans", shared / "begun"
    spans.mkdir()
    begun.mkdir()
    # The first waits for the second, however slowly it starts; a third would have time to come beside them.
    task = (
        f"begin=$(date +%s.%N); touch {begun}/$SKYPILOT_JOB_RANK; "
        f"until [ -e {begun}/0 ] && [ -e {begun}/1 ]; do sleep 0.02; done; sleep 0.3; "
        f"echo $begin $(date +%s.%N) > {spans}/$SKYPILOT_JOB_RANK-$SKYPILOT_NODE_RANK; "
        "test $SKYPILOT_NODE_RANK = 1 && test $A$B = y2 && exit 7; "
        """echo '{"score": "'$A$B-$SKYPILOT_JOB_RANK/$SKYPILOT_NUM_JOBS'"}'"""
    )
    words = ("--num-nodes", "2", "--sweep", "A=x,y,z", "--sweep", "B=1,2", "--parallel", "2", "-o", "json")
    rows = json.loads(atoll("launch", "-c", "t", *words, task, code=100))
    assert [row["labels"] for row in rows] == [{"A": a, "B": b} for a in "xyz" for b in "12"]
    assert [row["status"] for row in rows] == ["SUCCEEDED"] * 3 + ["FAILED"] + ["SUCCEEDED"] * 2
    assert [row["exit_code"] for row in rows] == [0, 0, 0, 7, 0, 0]
    assert rows[5]["result"] == {"score": "z2-5/6"}
    assert len({row["group"] for row in rows}) == 1
    # Both nodes of a job begin and end about together: two jobs are four spans.
    assert 2 <= most_at_once(spans) <= 4
    heads = shared / "heads"
    heads.mkdir()
    for path in spans.glob("*-0"):
        path.rename(heads / path.name)
    assert most_at_once(heads) == 2


@pytest.mark.long
def test_one_after_the_other_by_default_on_a_cluster_with_gpus_for_all(shared):
    spans = shared / "spans"
    spans.mkdir()
    task = f"begin=$(date +%s.%N); sleep 0.1; echo $begin $(date +%s.%N) > {spans}/$SKYPILOT_JOB_RANK"
    out = atoll("launch", "-c", "t", "--gpus", "L4:1", "--sweep", "LR=0.1,0.01,0.001", task)
    assert most_at_once(spans) == 1
    table = out[out.index("JOB ") :].splitlines()
    assert table[0].split() == ["JOB", "LR", "STATUS", "EXIT", "SECONDS", "RESULT"]
    assert [line.split()[:4] for line in table[1:4]] == [
        ["1", "0.1", "SUCCEEDED", "0"],
        ["2", "0.01", "SUCCEEDED", "0"],
        ["3", "0.001", "SUCCEEDED", "0"],
    ]


def test_ctrl_c_only_detaches_and_cancel_ends_all_that_are_left():
    process = start("launch", "-c", "t", "--sweep", "N=1,2,3", "--parallel", "2", "test $N = 1 || sleep 300")
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("job 1 (N=1): SUCCEEDED"):
            break
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 101
    assert "The jobs are still running" in out
    assert "atoll cancel t 1 2 3" in out

    def statuses() -> list[str]:
        return [row["status"] for row in json.loads(atoll("queue", "t", "-o", "json"))]

    eventually(lambda: statuses() == ["RUNNING", "RUNNING", "SUCCEEDED"], "the others run", 40)
    atoll("cancel", "t", "-a")
    eventually(lambda: statuses() == ["CANCELLED", "CANCELLED", "SUCCEEDED"], "they end", 40)


@pytest.mark.long
def test_a_sweep_that_is_cancelled_exits_as_such(shared):
    words = ("launch", "-c", "t", "--sweep", "N=1,2", f"touch {shared}/up; sleep 300")
    process = start(*words)
    eventually((shared / "up").exists, "the first runs", 40)
    atoll("cancel", "t", "--all")
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 103
    assert out.count("CANCELLED") >= 2


def test_a_sweep_of_a_task_file_with_envs_that_it_overrides():
    Path("task.yaml").write_text("envs: {LR: 1, KEEP: same}\nrun: |\n  echo $LR $KEEP\n")
    rows = json.loads(atoll("launch", "-c", "t", "task.yaml", "--sweep", "LR=08,1.50", "-o", "json"))
    assert [row["result"] for row in rows] == ["08 same", "1.50 same"]
    assert os.listdir(clusters.folder_of("t") / "jobs") != []


def test_the_table_of_a_sweep_asks_for_all_its_jobs_at_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = LocalCluster.make(home)
    with Store(cluster.folder) as store:
        for _ in range(50):
            job_id = store.add(JobSpec(run="true", group="s"), task_id_for=str, user="ada")
            store.apply(job_id, [SetStatus(JobStatus.SUCCEEDED)], 1.0)
    questions = []
    for name in ("job", "queue"):
        asked = getattr(LocalControl, name)
        monkeypatch.setattr(LocalControl, name, lambda *a, asked=asked: questions.append(a) or asked(*a))
    jobs = [Job("train", job_id + 1) for job_id in range(50)]
    assert len(sweep_rows(jobs)) == 50
    assert len(questions) == 1
