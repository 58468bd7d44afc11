"""SkyPilot's Python SDK: scripts in its style run with ``import atoll as sky``."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.pools import eventually

import atoll as sky
from atoll.tasks import sdk

LAUNCH = """
import atoll as sky

task = sky.Task(name="hello", setup="echo set up", run="echo $GREETING from $SKYPILOT_NODE_RANK", num_nodes=2)
task.update_envs({"GREETING": "hi"})
task.set_resources(sky.Resources(cpus="1+", accelerators="L4:1"))
request_id = sky.launch(task, cluster_name="c", idle_minutes_to_autostop=30, down=True)
job_id, handle = sky.stream_and_get(request_id)
print("job", job_id, handle, handle.launched_nodes, "." in handle.head_ip)
print("code", sky.tail_logs(cluster_name="c", job_id=job_id, follow=True))

request_id = sky.exec(sky.Task(run="echo again; exit 4"), cluster_name="c")
print("request", len(request_id), request_id == sky.RequestId.__str__(request_id))
job_id, _ = sky.get(str(request_id))
for line in sky.tail_logs("c", job_id, follow=True, preload_content=False):
    if line is not None:
        print("line", line, end="")

for cluster in sky.get(sky.status(cluster_names=["c", "other"])):
    print("cluster", cluster["name"], cluster["status"] == sky.ClusterStatus.UP, cluster["autostop"], cluster.to_down)
for job in sky.get(sky.queue("c")):
    print("job", job["job_id"], job["job_name"], job["status"].value)
print("statuses", sky.get(sky.job_status("c", [1, 2, 3])))
sleeper, _ = sky.get(sky.exec(sky.Task(run="sleep 60"), "c"))
sky.get(sky.cancel("c", job_ids=[sleeper]))
print("cancelled", sky.tail_logs("c", sleeper, follow=True))
sky.get(sky.autostop("c", idle_minutes=5))
sky.get(sky.stop("c"))
try:
    sky.get(sky.exec(sky.Task(run="true"), "c"))
except sky.exceptions.ClusterNotUpError as error:
    print("not up", error)
sky.get(sky.start("c"))
sky.get(sky.down("c"))
print("left", sky.get(sky.status()))
try:
    sky.get(sky.down("other"))
except sky.exceptions.ClusterDoesNotExist as error:
    print("unknown", error)
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ATOLL_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


def test_a_script_of_the_sdk_runs(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(LAUNCH)
    done = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout.splitlines()
    for line in (
        "Cluster c on local: 2 nodes, L4:1 per node, simulated",
        "job 1 c (local, 2 × (L4:1, simulated)) 2 True",
        "code 0",
        "request 36 True",
        "line     again",
        "cluster c True 30 True",
        "job 2 None FAILED",
        "job 1 hello SUCCEEDED",
        "statuses {1: <JobStatus.SUCCEEDED: 'SUCCEEDED'>, 2: <JobStatus.FAILED: 'FAILED'>, 3: None}",
        "cancelled 103",
        "not up cluster c is stopped; `atoll start c` restarts it",
        "left []",
    ):
        assert line in said, done.stdout
    assert any(line.endswith("hi from 1") for line in said)
    assert said[-1].startswith("unknown no cluster 'other'")


def test_a_launch_that_waits_says_so_before_its_request_is_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A cluster may be full for hours, and ``stream_and_get`` comes after that."""
    monkeypatch.setattr(sdk, "_LATE_S", 0.5)

    def launch(*_: object, on_line: Callable[[str], object], **__: object) -> object:
        on_line("Cluster c on slurm/lab: 1 node")
        on_line("waiting for slurm/lab: its nodes are busy")
        eventually(lambda: said.append(capsys.readouterr().err) or "busy" in "".join(said), "it is told")
        on_line("waiting for slurm/lab: other jobs come first")
        raise sky.ProvisionError("no nodes")

    said: list[str] = []
    monkeypatch.setattr(sdk.api, "launch", launch)
    with pytest.raises(sky.ProvisionError):
        sky.launch(sky.Task(run="true"), "c")
    said.append(capsys.readouterr().err)
    assert "".join(said).splitlines() == [
        "atoll: waiting for slurm/lab: its nodes are busy",
        "atoll: waiting for slurm/lab: other jobs come first",
    ]


def test_request_ids_are_text(monkeypatch: pytest.MonkeyPatch) -> None:
    request = sky.launch(sky.Task(run="true"), "c", dryrun=True)
    assert isinstance(request, str)
    assert f"{request}" == str(request) == request
    assert sky.get(f"{request}") == sky.get(request) == (None, None)
    assert sky.get(sky.status()) == []
    said = io.StringIO()
    assert sky.stream_and_get(request, output_stream=said) == (None, None)
    assert said.getvalue() == "Cluster c on local: 1 node, no accelerator\n"
    with pytest.raises(sky.UsageError, match=r"sky\.get\(request_id\) gives its result"):
        list(request)
    with pytest.raises(sky.UsageError, match="'x' is no request of this process"):
        sky.get("x")
    monkeypatch.setattr(sdk, "_MOST_REQUESTS", 1)
    kept = sky.status()
    with pytest.raises(sky.UsageError, match="is no request"):
        sky.get(str(request))
    assert sky.get(request) == (None, None)  # the id itself knows
    assert sky.get(str(kept)) == []


def test_a_task_is_changed_as_sdk_scripts_do() -> None:
    task = sky.Task.from_yaml_config({"run": "true", "resources": {"accelerators": "H100:8"}, "envs": {"A": 1}})
    task.set_file_mounts({"/tmp/a": "x"}).update_file_mounts({"/tmp/b": "y"})
    task.set_resources_override({"use_spot": True, "accelerators": "L4:4"})
    task.set_resources(task.resources.copy(cpus="8+"))
    assert task.to_yaml_config() == {
        "run": "true",
        "envs": {"A": "1"},
        "resources": {"accelerators": "L4:4", "cpus": "8+", "use_spot": True},
        "file_mounts": {"/tmp/a": "x", "/tmp/b": "y"},
    }
    again = sky.Task.from_yaml_config(task.to_yaml_config())
    assert again.to_yaml_config() == task.to_yaml_config()
    task.set_resources({sky.Resources(accelerators="H200:8"), sky.Resources(accelerators="H100:8")})
    either = [{"accelerators": "H100:8"}, {"accelerators": "H200:8"}]
    assert task.to_yaml_config()["resources"] == {"any_of": either}
    assert sky.Resources(cloud=sky.Local()).infra == sky.Resources("local").infra == "local"
    assert sky.Resources(sky.AWS(region="us-east-1"), use_spot=True).infra == "aws/us-east-1"
    assert sky.Resources(sky.GCP(), region="us-central1").infra == "gcp/us-central1"
    with pytest.raises(sky.ConfigError, match="acelerators"):
        task.resources.copy(acelerators="L4")


def test_tasks_of_a_dag() -> None:
    with sky.Dag() as dag:
        sky.Task(run="true")
    assert sky.get(sky.launch(dag, "c", dryrun=True)) == (None, None)
    with sky.Dag() as dag:
        first, second, third = (sky.Task(name, run="true") for name in ("a", "b", "c"))
        third >> first
    other = sky.Task(run="true")
    assert [task.name for task in dag.tasks] == ["b", "c", "a"]
    assert dag.tasks[0] is second
    with pytest.raises(sky.UsageError, match=r"a Dag of 3 tasks: sky\.jobs\.launch\(dag\)"):
        sky.launch(dag, "c")
    with pytest.raises(sky.UsageError, match="inside of"):
        other >> first
    with pytest.raises(sky.UsageError, match="is no task of this Dag"):
        dag.add_edge(other, first)


def test_calls_of_several_threads() -> None:
    def submit(number: int) -> int:
        task = sky.Task(run=f"echo number {number}", resources=sky.Resources(accelerators="L4:1"))
        return sky.get(sky.exec(task, cluster_name="c"))[0]

    sky.launch(sky.Task(run="true", resources=sky.Resources(accelerators="L4:4")), "c")
    with ThreadPoolExecutor(8) as threads:
        jobs = list(threads.map(submit, range(16)))
    assert sorted(jobs) == list(range(2, 18))
    for number, job in enumerate(jobs):
        assert f"number {number}\n" in "".join(sky.tail_logs("c", job, preload_content=False))
    sky.down("c")


def test_the_lines_of_a_log_are_left_in_the_middle() -> None:
    job = sky.launch(sky.Task(run="for i in 1 2 3; do echo line $i; done; sleep 60"), "c")
    lines = sky.tail_logs("c", job.id, preload_content=False)
    for line in lines:
        if "line 2" in line:
            break
    lines.close()  # ends the thread that reads
    pieces = job.pieces(idle_s=0.05)
    assert any(piece == b"" for piece in pieces)
    pieces.close()
    sky.down("c")


JOBS = """
import atoll as sky

task = sky.Task(name="managed", run="echo try $SKYPILOT_TASK_ID; exit $CODE", envs={"CODE": 0})
job_id, handle = sky.get(sky.jobs.launch(task, name="first"))
print("launched", job_id, handle.cluster_name)
print("code", sky.jobs.tail_logs(job_id=job_id, follow=True))
failing = sky.Task(run="exit 3")
ids, _ = sky.stream_and_get(sky.jobs.launch(failing, name="many", num_jobs=2))
print("many", ids, sky.jobs.tail_logs(job_id=ids[0], follow=True))
for line in sky.jobs.tail_logs(name="first", preload_content=False):
    print("line", line, end="")
sleeper, _ = sky.get(sky.jobs.launch(sky.Task(name="sleeper", run="sleep 100")))
sky.get(sky.jobs.cancel(job_ids=[sleeper]))
print("cancelled", sky.jobs.tail_logs(job_id=sleeper, follow=True))
with sky.Dag() as dag:
    sky.Task("one", run="echo 1") >> sky.Task("two", run="echo 2")
sky.get(sky.jobs.launch(dag))
print("pipeline", sky.jobs.tail_logs(name="two"))
for job in sky.get(sky.jobs.queue(refresh=False)):
    print("job", job["job_id"], job["job_name"], job["status"].value, job["recovery_count"])
"""


@pytest.mark.long  # tests/tasks/test_managed.py has what is below it
def test_managed_jobs(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(JOBS)
    done = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout.splitlines()
    assert {"launched 1 atoll-jobs", "code 0", "many [2, 3] 100", "cancelled 103", "pipeline 0"} <= {*said}, done.stdout
    assert [line for line in said if line.startswith("job ")] == [
        "job 6 two SUCCEEDED 0",
        "job 5 one SUCCEEDED 0",
        "job 4 sleeper CANCELLED 0",
        "job 3 many FAILED 0",
        "job 2 many FAILED 0",
        "job 1 first SUCCEEDED 0",
    ]
    assert any(line.startswith("line ") and " try sky-managed-" in line for line in said), done.stdout
