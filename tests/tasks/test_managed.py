"""Managed jobs on real clusters: whatever of them is killed, the job goes on, and at its end nothing is left."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.pools import eventually

import atoll as sky
import leaks
from atoll.agent.process_tree import command_line
from atoll.core.errors import ConfigError, ProvisionError
from atoll.providers import registry
from atoll.tasks import clusters, controllers, lifecycle, managed_api, supervisor
from atoll.tasks.jobs import Job
from atoll.tasks.spec import JobStatus

INFRAS = Path(__file__).parents[1] / "providers" / "infras"
# Writes what it sees, and goes on after what an earlier attempt has done, as training does.
TRAIN = """
n=$(ls $SHARED | grep -c '^step'); echo resuming from step $n
echo $SKYPILOT_TASK_ID >> $SHARED/ids
touch $SHARED/step$n
until [ -e $SHARED/go ]; do sleep 0.05; done
exit ${CODE:-0}
"""


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that all clusters see, as a file system of a cluster or a bucket is."""
    folder = Path(tempfile.mkdtemp(prefix="atoll-", dir="/var/tmp"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def controller(home: Path) -> Iterator[None]:
    home.mkdir(exist_ok=True)
    yield
    for name in controllers.used():
        lifecycle.purge(name, print)
    eventually(lambda: not clusters.all_names(), "no cluster is left", 30)
    registry._registered.clear()


def launch(run: str = TRAIN, shared: Path | None = None, envs: dict[str, str] | None = None, **more: Any) -> Job:
    how = {key: more.pop(key) for key in ("infra", "num_jobs", "name") if key in more}
    envs = {**(envs or {}), **({"SHARED": str(shared)} if shared else {})}
    return managed_api.launch(sky.Task(run=run, envs=envs, **more), **how)[0]


def steps(job: Job, shared: Path, number: int) -> None:
    """Wait until this attempt runs, and its first line has come: a node that is killed takes what it has not sent."""
    eventually((shared / f"step{number - 1}").exists, f"attempt {number} runs", 60)
    eventually(lambda: f"resuming from step {number - 1}\n" in job.logs(), "its first line", 60)


def task_cluster() -> str:
    """The cluster that the newest attempt runs on."""
    eventually(lambda: len(clusters.all_names()) == 2, "one cluster beside the controller's", 30)
    (name,) = set(clusters.all_names()) - set(controllers.used())
    return name


def supervisor_of(name: str) -> int:
    pid = supervisor.pid_of(clusters.folder_of(name))
    assert pid is not None
    return pid


def new_controller(before: int) -> None:
    folder = clusters.folder_of(controllers.HERE)
    eventually(lambda: supervisor.pid_of(folder) not in (None, before), "a new controller", 20)


def kill_agents(name: str) -> None:
    for pid in leaks.descendants(supervisor_of(name)):
        if command_line(pid).startswith(b"atoll-agent"):
            os.kill(pid, signal.SIGKILL)


def finish(job: Job, shared: Path, attempts: int) -> str:
    """Let it end; its log."""
    (shared / "go").touch()
    assert job.wait(60) is JobStatus.SUCCEEDED, job.logs()
    log = job.logs()
    for number in range(attempts):
        assert log.count(f"resuming from step {number}\n") == 1, log
    assert len(set((shared / "ids").read_text().split())) == 1
    assert set(clusters.all_names()) == set(controllers.used()), "its clusters are gone"
    return log


# ------------------------------------------------------------------------------------------------------- what runs
@pytest.mark.long
def test_a_job_brings_its_files_as_they_were_and_leaves_nothing(home: Path, tmp_path: Path, shared: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "code").write_text("as submitted")
    (tmp_path / "data").write_text("mounted")
    task = sky.Task(
        name="files",
        workdir=str(work),
        file_mounts={"~/data": str(tmp_path / "data")},
        setup="echo set up > made",
        run="cat code ~/data made; echo; echo $WORD $SKYPILOT_TASK_ID; echo $MY_TOKEN; " + TRAIN,
        envs={"WORD": "hello", "SHARED": str(shared)},
        secrets={"MY_TOKEN": "very-secret-text"},
    )
    job = managed_api.launch(task)[0]
    steps(job, shared, 1)
    (work / "code").write_text("changed since")
    os.kill(supervisor_of(task_cluster()), signal.SIGKILL)
    steps(job, shared, 2)
    log = finish(job, shared, 2)
    assert "as submitted" in log
    assert "changed since" not in log
    assert "mounted" in log
    assert "set up" in log
    assert re.search(r"hello sky-managed-[\d-]+_files_1$", log, re.M)
    assert "****" in log
    row = job.row()
    assert (row.name, row.restarts, row.reason) == ("files", 1, "")
    assert row.task_id.startswith("sky-managed-")
    left = [str(path) for path in managed_folder(home).rglob("*") if path.is_file()]
    assert not [path for path in left if "job-" in path], left
    assert not [path for path in left if b"very-secret-text" in Path(path).read_bytes()], left


def managed_folder(home: Path) -> Path:
    return home / "clusters" / controllers.HERE


def test_a_failure_of_its_own_is_not_recovered(shared: Path) -> None:
    (shared / "go").touch()
    job = launch(shared=shared, envs={"CODE": "3"})
    assert job.wait(60) is JobStatus.FAILED
    assert (job.row().exit_code, job.row().restarts) == (3, 0)
    assert (shared / "ids").read_text().count("\n") == 1
    log = job.logs()
    assert "✗ Managed job 1 failed (status: FAILED): rank 0 on head exited with code 3" in log
    assert not set(clusters.all_names()) - {controllers.HERE}


@pytest.mark.long
def test_job_recovery_of_the_task_is_honoured(shared: Path) -> None:
    run = 'n=$(wc -l < $SHARED/ids || echo 0); echo >> $SHARED/ids; [ "$n" = 2 ] || exit $CODE'
    job = launch(run, shared, {"CODE": "42"}, resources={"job_recovery": {"recover_on_exit_codes": [42]}})
    assert job.wait(60) is JobStatus.SUCCEEDED, job.logs()
    (shared / "ids").unlink()
    job = launch(run, shared, {"CODE": "3"}, resources={"job_recovery": {"max_restarts_on_errors": 1}})
    assert job.wait(60) is JobStatus.FAILED
    assert (shared / "ids").read_text().count("\n") == 2


@pytest.mark.long
def test_what_can_not_be_had_is_said_at_once(home: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean"):
        launch("true", infra="locl")
    task = sky.Task(run="true", resources={"accelerators": "H100:8"})
    with pytest.raises(ConfigError, match=r"H100:8 can.t be had"):
        managed_api.launch(task, simulate=False)
    assert not clusters.all_names()
    launch("true").wait(60)
    with pytest.raises(sky.AtollError, match=r"^there is no managed job 9; `atoll jobs queue` lists those there are$"):
        managed_api.job(9)


# ------------------------------------------------------------------------------------------------ what is killed
@pytest.mark.long
def test_a_lost_node_is_replaced_on_its_cluster(shared: Path) -> None:
    job = launch(shared=shared)
    steps(job, shared, 1)
    kill_agents(task_cluster())
    steps(job, shared, 2)
    log = finish(job, shared, 2)
    assert "Restarting in 1 s (restart 1)" in log
    assert "finished after 1 recovery" in log
    assert job.row().restarts == 1


@pytest.mark.long
def test_the_supervisor_of_the_task_is_killed(shared: Path) -> None:
    job = launch(shared=shared)
    steps(job, shared, 1)
    os.kill(supervisor_of(task_cluster()), signal.SIGKILL)
    steps(job, shared, 2)
    log = finish(job, shared, 2)
    assert "Attempt 1 on local ended after" in log
    assert "its supervisor was killed" in log
    assert "Attempt 2: launching on local." in log


def test_the_controller_is_killed_and_continues_with_what_is_there(shared: Path) -> None:
    run = "for i in $(seq 40); do echo line $i; sleep 0.05; done; " + TRAIN
    job = launch(run, shared)
    cluster = task_cluster()
    for _ in range(3):
        time.sleep(0.4)
        before = supervisor_of(controllers.HERE)
        os.kill(before, signal.SIGKILL)  # nobody looks: its guard starts it again
        new_controller(before)
    steps(job, shared, 1)
    assert task_cluster() == cluster
    log = finish(job, shared, 1)
    assert [int(n) for n in re.findall(r"line (\d+)$", log, re.M)] == list(range(1, 41)), "no line twice, none lost"
    assert "The controller was started again, and continues." in log
    assert job.row().restarts == 0


@pytest.mark.long
def test_a_controller_that_is_asked_to_end_leaves_the_job_as_it_is(shared: Path) -> None:
    job = launch(shared=shared)
    steps(job, shared, 1)
    before = supervisor_of(controllers.HERE)
    os.kill(before, signal.SIGTERM)
    new_controller(before)
    finish(job, shared, 1)


@pytest.mark.long
def test_everything_is_killed_at_once(shared: Path) -> None:
    job = launch(shared=shared)
    steps(job, shared, 1)
    name = task_cluster()
    pids = [supervisor_of(controllers.HERE), supervisor_of(name), *leaks.descendants(supervisor_of(name))]
    guards = [each for each in map(int, filter(str.isdigit, os.listdir("/proc"))) if is_guard(each)]
    for pid in (*guards, *pids):
        with contextlib.suppress(ProcessLookupError):  # an agent's children end with it
            os.kill(pid, signal.SIGKILL)
    time.sleep(0.5)
    assert not job.status.ended  # whoever looks has it continued
    steps(job, shared, 2)
    finish(job, shared, 2)
    for left in Path(tempfile.gettempdir()).glob("atoll-*-n*"):  # a launch would remove it, once it is a minute old
        shutil.rmtree(left)


def is_guard(pid: int) -> bool:
    folder = os.fsencode(clusters.folder_of(controllers.HERE))
    words = command_line(pid).split(b"\0")
    return folder in words and any(b"guard" in word for word in words)


# ----------------------------------------------------------------------------------------- what somebody asks for
@pytest.mark.long
def test_a_cluster_that_is_taken_down_by_hand_is_a_cancel(shared: Path) -> None:
    job = launch(shared=shared)
    steps(job, shared, 1)
    name = task_cluster()
    lifecycle.down(name)
    assert job.wait(60) is JobStatus.CANCELLED
    assert f"it was cancelled (on cluster {name})" in job.row().reason
    job = launch(shared=shared)
    steps(job, shared, 2)
    lifecycle.purge(task_cluster(), print)
    assert job.wait(60) is JobStatus.CANCELLED


@pytest.mark.long
def test_a_cancel_ends_the_task_in_its_own_time_and_takes_the_cluster_down(shared: Path) -> None:
    job = launch(f"trap 'sleep 1; touch $SHARED/saved; exit 0' TERM; {TRAIN}", shared)
    steps(job, shared, 1)
    assert managed_api.cancel([job.id]) == [job.id]
    assert job.wait(60) is JobStatus.CANCELLED
    assert (shared / "saved").exists()
    assert not set(clusters.all_names()) - {controllers.HERE}
    assert managed_api.cancel(all=True) == []


@pytest.mark.long
def test_jobs_of_a_number_and_of_a_name(shared: Path) -> None:
    run = "echo rank $SKYPILOT_JOB_RANK of $SKYPILOT_NUM_JOBS"
    jobs = managed_api.launch(sky.Task(name="many", run=run), num_jobs=2)
    assert [job.wait(60) for job in jobs] == [JobStatus.SUCCEEDED] * 2
    for rank, job in enumerate(jobs):
        assert f"rank {rank} of 2" in job.logs()
    assert managed_api.job(name="many") == jobs[-1]
    assert [row.id for _, row in managed_api.queue()] == [2, 1]
    with pytest.raises(sky.UnknownCluster, match="no managed job is called 'none'"):
        managed_api.job(name="none")


@pytest.mark.long
def test_a_pipeline(shared: Path) -> None:
    first = sky.Task(name="first", run="touch $SHARED/first", envs={"SHARED": str(shared)})
    second = sky.Task(name="second", run="ls $SHARED; echo $SKYPILOT_TASK_IDS", envs={"SHARED": str(shared)})
    jobs = managed_api.launch([first, second])
    assert [job.wait(60) for job in jobs] == [JobStatus.SUCCEEDED] * 2
    assert "first" in jobs[1].logs()
    fails = sky.Task(name="fails", run="exit 1")
    jobs = managed_api.launch([fails, second])
    assert [job.wait(60) for job in jobs] == [JobStatus.FAILED, JobStatus.CANCELLED]


# -------------------------------------------------------------------------------- places that are late, lie or fail
Script = Callable[..., None]


@pytest.fixture
def fake(home: Path) -> Script:
    """Has the fake provider behave so from now on."""
    (home / "providers").mkdir(parents=True)
    shutil.copy(INFRAS / "fake.py", home / "providers")

    def behave(**how: object) -> None:
        (home / "fake.new").write_text(json.dumps(how))
        (home / "fake.new").rename(home / "providers" / "fake.json")

    return behave


def test_a_preempted_cluster_is_replaced_elsewhere(fake: Script, shared: Path) -> None:
    """With ``infra`` and ``any_of``, whose infras are the ones that count."""
    resources = {"infra": "fake", "any_of": [{"infra": "fake"}, {"infra": "local"}]}
    job = launch(shared=shared, resources=resources)
    steps(job, shared, 1)
    name = task_cluster()
    assert clusters.load(name).infra == "fake"
    fake(state="LOST", reason="the spot machine was taken back")
    kill_agents(name)
    steps(job, shared, 2)
    assert clusters.load(task_cluster()).infra == "local"
    log = finish(job, shared, 2)
    assert "Attempt 1 on fake ended after" in log
    assert "the spot machine was taken back" in log
    assert "Attempt 2: launching on local." in log


@pytest.mark.long
def test_what_a_probe_says_kills_no_healthy_job(fake: Script, shared: Path) -> None:
    job = launch(shared=shared, infra="fake")
    steps(job, shared, 1)
    fake(state="LOST", reason="so it says")
    before = supervisor_of(controllers.HERE)
    os.kill(before, signal.SIGKILL)
    new_controller(before)
    sky.status()  # believes it
    time.sleep(1)
    log = finish(job, shared, 1)
    assert "Attempt 2" not in log


def test_a_cancel_while_nodes_are_pending_and_the_reason_that_the_queue_shows(fake: Script) -> None:
    fake(state="PENDING", reason="behind 3 jobs")
    job = launch("true", infra="fake")
    eventually(lambda: "behind 3 jobs" in job.row().reason, "the reason is shown", 30)
    assert job.status is JobStatus.INIT
    job.cancel()
    assert job.wait(60) is JobStatus.CANCELLED


@pytest.mark.long
def test_a_place_that_has_nothing_is_passed_over(fake: Script, shared: Path) -> None:
    fake(state="LOST", reason="its quota is used up")
    job = launch("true", resources={"any_of": [{"infra": "fake"}, {"infra": "local"}]})
    assert job.wait(60) is JobStatus.SUCCEEDED
    assert "Attempt 1 came to nothing: fake gave no nodes: its quota is used up" in job.logs()


@pytest.mark.long
def test_a_launch_of_a_job_that_is_not_managed_passes_over_it_too(fake: Script) -> None:
    fake(state="LOST", reason="its quota is used up")
    said: list[str] = []
    task = sky.Task(run="true", resources={"infra": "local", "ordered": [{"infra": "fake"}, {"infra": "local"}]})
    job = sky.launch(task, "c", on_line=said.append)
    assert job.wait(60) is JobStatus.SUCCEEDED
    assert clusters.load("c").infra == "local"
    assert "fake failed, trying local: fake gave no nodes: its quota is used up" in said
    lifecycle.down("c")
    with pytest.raises(ProvisionError, match="its quota is used up"):
        sky.launch(sky.Task(run="true", resources={"ordered": [{"infra": "fake"}]}), "d")
    lifecycle.purge("c", print)


@pytest.mark.long
def test_a_notice_gives_the_task_time_to_save_and_it_goes_on_elsewhere(fake: Script, shared: Path) -> None:
    run = f"trap 'sleep 3; touch $SHARED/saved; exit 0' TERM; {TRAIN}"
    job = launch(run, shared, resources={"ordered": [{"infra": "fake"}, {"infra": "local"}]})
    steps(job, shared, 1)
    fake(notice="the spot machine is taken back in two minutes")
    eventually((shared / "saved").exists, "it saves", 30)
    steps(job, shared, 2)
    assert clusters.load(task_cluster()).infra == "local"
    assert "the spot machine is taken back in two minutes" in finish(job, shared, 2)


@pytest.mark.long
def test_what_was_given_back_by_somebody_is_cancelled(fake: Script, shared: Path) -> None:
    job = launch(shared=shared, infra="fake")
    steps(job, shared, 1)
    name = task_cluster()
    fake(state="RELEASED", reason="scancel", preempted="its nodes went away")
    os.kill(supervisor_of(name), signal.SIGKILL)
    assert job.wait(60) is JobStatus.CANCELLED, job.logs()
    assert (shared / "ids").read_text().count("\n") == 1


def test_it_imports_nothing_that_a_bare_host_lacks() -> None:
    source = str(Path(sky.__file__).parents[1])
    code = "import sys; sys.path.insert(0, sys.argv[1]); import atoll.tasks.managed; print(*sys.modules)"
    command = ["python3", "-I", "-S", "-c", code, source]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert not {"pydantic", "yaml", "fsspec", "typer"} & {name.partition(".")[0] for name in found}


@pytest.mark.parametrize(
    ("task", "how", "said"),
    [
        ([], {}, r"jobs.launch\(\) takes a sky.Task, not list"),
        (None, {}, "takes a sky.Task, not NoneType"),
        ("task.yaml", {}, r"write sky.jobs.launch\(sky.Task.from_yaml\('task.yaml'\)\)"),
        ([sky.Task(run="true"), 3], {}, "not int"),
        (sky.Task(run="true"), {"num_jobs": 0}, "num_jobs=0: expected at least 1"),
        (sky.Task(run="true", workdir="./nope"), {}, "^workdir ./nope: expected a folder"),
        (sky.Task(run="true"), {"controller": "locl"}, "^locl: no such infra: did you mean 'local'"),
    ],
)
def test_what_is_no_managed_job_is_said_at_once(home: Path, task: Any, how: dict[str, Any], said: str) -> None:
    with pytest.raises((ConfigError, sky.UsageError), match=said):
        managed_api.launch(task, **how)
    assert not clusters.all_names()
