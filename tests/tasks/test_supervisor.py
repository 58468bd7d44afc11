"""Jobs on real local nodes: what their processes get, how they fail, and that nothing is left of them."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import leaks
from atoll.agent.process_tree import command_line, stat_of
from atoll.core.errors import AtollError
from atoll.tasks import control, record, runner, supervisor
from atoll.tasks.dispatcher import Dispatcher
from atoll.tasks.nodes import ClusterNodes
from atoll.tasks.spec import JobSpec, JobStatus, Restarts
from atoll.tasks.store import Store, put_variables
from local_cluster import LocalCluster, descendants, processes_with, stop, until

SUCCEEDED, FAILED, CANCELLED = JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.CANCELLED


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ATOLL_HOME", str(tmp_path))
    return tmp_path


# ------------------------------------------------------------------------------------------------- what runs
def test_setup_then_run_on_two_nodes(home: Path) -> None:
    cluster = LocalCluster.make(home, num_nodes=2)
    job = cluster.submit(
        "cat mark; echo rank $SKYPILOT_NODE_RANK of $SKYPILOT_NUM_NODES in $PWD",
        setup="echo setup $SKYPILOT_SETUP_NODE_RANK; echo marked > mark",
        num_nodes=2,
        name="two",
    )
    status, log = cluster.follow(job)
    assert status is SUCCEEDED
    lines = log.splitlines()
    assert lines[-1] == "✓ Job finished (status: SUCCEEDED)."
    assert "Waiting for task resources on 2 nodes." in lines
    found = sorted(re.sub(r"pid=\d+", "pid=P", line) for line in lines if line.startswith("("))
    homes = [cluster.folder / "nodes" / str(node) / "home" / "sky_workdir" for node in range(2)]
    assert found == [
        "(head, rank=0, pid=P) marked",
        f"(head, rank=0, pid=P) rank 0 of 2 in {homes[0]}",
        "(setup pid=P, ip=127.0.0.1) setup 0",
        "(setup pid=P, ip=127.0.0.2) setup 1",
        "(worker1, rank=1, pid=P, ip=127.0.0.2) marked",
        f"(worker1, rank=1, pid=P, ip=127.0.0.2) rank 1 of 2 in {homes[1]}",
    ]
    kept = [path.name for path in (cluster.folder / "jobs" / str(job)).rglob("*.log")]
    assert kept == ["run.log"], "what it prints is kept once"
    cluster.wait_until_idle()
    row = cluster.control.job(job)
    assert (row.status, row.exit_code, row.name) == (SUCCEEDED, None, "two")
    assert re.fullmatch(r"sky-\d{4}(-\d\d){5}-\d{6}_train_1", row.task_id)
    assert cluster.control.cluster().setup_done == (0, 1)


def test_one_node_is_called_by_its_task(home: Path) -> None:
    cluster = LocalCluster.make(home)
    _, log = cluster.run("echo hello", name="greet", setup="echo prepared")
    assert re.search(r"^\(setup pid=\d+\) prepared$", log, re.M)
    assert re.search(r"^\(greet, pid=\d+\) hello$", log, re.M)
    _, log = cluster.run("printf 'no end'")
    assert re.search(r"^\(task, pid=\d+\) no end$", log, re.M)


BASHRC = """case $- in *i*) ;; *) return ;; esac
echo noise; echo noise >&2; (exec sleep 1000) & cd /
export PATH=$HOME/tools:$PATH WORD="two
lines" GIVEN=from-bashrc SKYPILOT_NODE_RANK=9 HOME=/nowhere
tool() { echo "a function with $1 and $GIVEN"; }
"""
WRITES_BASHRC = f"""cat >~/.bashrc <<'END'
{BASHRC}END
mkdir -p ~/tools; printf '#!/bin/sh\\necho a tool\\n' >~/tools/mytool; chmod +x ~/tools/mytool
"""
USES_BASHRC = (
    'echo "<$WORD>"; tool it; mytool; echo rank $SKYPILOT_NODE_RANK; echo "${BASH_ENV-none}" $PWD; bash -c tool'
)


@pytest.mark.long
def test_what_setup_writes_into_bashrc_is_known_to_run(home: Path) -> None:
    cluster = LocalCluster.make(home)
    status, log = cluster.run(USES_BASHRC + "\nnonsense-command", setup=WRITES_BASHRC, env={"GIVEN": "by the user"})
    lines = re.findall(r"^\(task, pid=\d+\) (.*)$", log, re.M)
    assert lines[:6] == [
        "<two", "lines>", "a function with it and by the user", "a tool", "rank 0",
        f"none {cluster.folder}/nodes/0/home/sky_workdir",
    ]  # fmt: skip
    assert "tool: command not found" in lines[6]  # functions are the script's alone, as in a shell
    assert "line 2: nonsense-command" in lines[7]  # the lines are the user's own
    assert "noise" not in log
    assert status is FAILED
    _, log = cluster.run("echo on", setup="echo exec true >~/.bashrc")
    assert "atoll: bash did not finish its startup files such as ~/.bashrc" in log
    assert ") on\n" in log
    blocks = "until [ -e ~/go ]; do sleep 0.1; done; export LATE=yes"
    job = cluster.submit("echo late: $LATE", setup=f"echo {shlex.quote(blocks)} >~/.bashrc", strict=True)
    cluster.wait_for(job, "atoll: bash still reads its startup files such as ~/.bashrc after 5 s, and the job waits")
    (cluster.folder / "nodes/0/home/go").touch()
    assert ") late: yes\n" in cluster.follow(job)[1]


def test_a_job_of_commands_has_torchruns_variables(home: Path) -> None:
    cluster = LocalCluster.make(home, num_nodes=2)
    text = "import os; e = os.environ; print(*(e[n] for n in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'MASTER_PORT')))"
    job = cluster.submit(command=(sys.executable, "-c", text), num_nodes=2, num_processes=2, cwd=str(home))
    status, log = cluster.follow(job)
    assert status is SUCCEEDED, log
    found = sorted(re.findall(r"\((\w+), rank=(\d), pid=\d+[^)]*\) (\d) (\d) (\d) (\d+)", log))
    port = found[0][-1]
    assert found == [
        ("head", "0", "0", "0", "4", port),
        ("head", "1", "1", "1", "4", port),
        ("worker1", "2", "2", "0", "4", port),
        ("worker1", "3", "3", "1", "4", port),
    ]
    assert 1024 < int(port) < 32768
    assert cluster.follow(job, follow=False, rank=3)[1].count("\n") == 1


# ------------------------------------------------------------------------------------------------- failures
def test_the_first_that_fails_ends_the_job_within_two_seconds(home: Path) -> None:
    cluster = LocalCluster.make(home, num_nodes=3)
    job = cluster.submit(
        "if [ $SKYPILOT_NODE_RANK = 2 ]; then echo about to fail; date +%s.%N; exit 1; fi; sleep 60", num_nodes=3
    )
    status, log = cluster.follow(job)
    ended = time.time()
    assert status is FAILED
    failed_at = float(re.search(r"rank=2, .*\) (\d+\.\d+)", log)[1])  # type: ignore[index]
    assert ended - failed_at < 2.0
    row = cluster.control.job(job)
    assert (row.culprit_node, row.culprit_rank, row.exit_code) == (2, 2, 1)
    assert "rank 2 on worker2 exited with code 1" in row.reason
    end = log[log.index("✗") :]
    assert end.startswith(f"✗ Job {job} failed (status: FAILED): rank 2 on worker2 exited with code 1")
    assert "about to fail" in end
    assert "stopped by the launcher" in end


def test_a_program_that_is_not_there(home: Path) -> None:
    cluster = LocalCluster.make(home)
    job = cluster.submit(command=("no-such-program",))
    status, log = cluster.follow(job)
    assert status is FAILED
    assert cluster.control.job(job).exit_code == 127
    assert "no-such-program" in log


def test_no_bash_is_named(home: Path) -> None:
    cluster = LocalCluster.make(home)
    (home / "empty").mkdir()
    status, log = cluster.run("echo hi", base_env={"PATH": str(home / "empty")})
    assert status is FAILED
    assert "bash" in log


def test_restarts_at_the_same_task_id(home: Path) -> None:
    cluster = LocalCluster.make(home)
    job = cluster.submit(
        "echo id $SKYPILOT_TASK_ID; [ -e again ] || { touch again; exit 9; }", restarts=Restarts(on_errors=1)
    )
    status, log = cluster.follow(job)
    assert status is SUCCEEDED
    ids = re.findall(r"\) id (\S+)", log)
    assert len(ids) == 2
    assert ids[0] == ids[1] == cluster.control.job(job).task_id
    assert cluster.control.job(job).restarts == 1


def test_an_agent_that_is_killed_is_a_lost_node(home: Path) -> None:
    cluster = LocalCluster.make(home, num_nodes=2)
    job = cluster.submit("echo up; sleep 60", num_nodes=2, restarts=Restarts(on_lost_nodes=0))
    cluster.wait_for(job, "(head, rank=0")  # a process that its agent has just forked still looks like one
    cluster.wait_for(job, "(worker1, rank=1")

    def agents() -> list[int]:
        return [pid for pid in descendants(cluster.supervisor_pid()) if command_line(pid).startswith(b"atoll-agent")]

    until(lambda: len(agents()) == 2, "two agents")
    os.kill(agents()[-1], signal.SIGKILL)
    status, _ = cluster.follow(job)
    assert status is FAILED
    assert "was lost" in cluster.control.job(job).reason


def test_a_network_that_loses_its_way_out_is_told_while_the_job_runs(home: Path) -> None:
    cluster = LocalCluster.make(home)
    job = cluster.submit("echo up; while [ ! -e go ]; do sleep 0.05; done")
    cluster.wait_for(job, ") up")
    helpers = [pid for pid in descendants(cluster.supervisor_pid()) if b"slirp4netns" in command_line(pid)]
    if not helpers:
        pytest.skip("no network namespaces here")
    os.kill(helpers[0], signal.SIGKILL)
    told = "slirp4netns was killed by SIGKILL: this job's nodes can no longer reach other networks"
    cluster.wait_for(job, told)
    (cluster.folder / "nodes/0/home/sky_workdir/go").touch()
    status, log = cluster.follow(job)
    assert status is SUCCEEDED
    assert log.count(told) == 1


# ------------------------------------------------------------------------------------------------- the end
@pytest.mark.long  # tests/tasks/test_cases.py has it through the command
def test_cancel_leaves_no_grandchild(home: Path) -> None:
    cluster = LocalCluster.make(home, num_nodes=2)
    word = f"GRANDCHILD_{os.getpid()}_{time.monotonic_ns()}"
    job = cluster.submit(
        f"trap '' TERM; (export {word}=1; setsid nohup sleep 300 >/dev/null 2>&1 & setsid sh -c 'sleep 300 & wait' &)\n"
        "echo going; while true; do sleep 1; done",
        num_nodes=2,
    )
    cluster.wait_for(job, "rank=1")
    until(lambda: len(processes_with(word)) >= 2, "the grandchildren")
    assert cluster.control.cancel([job]) == [job]
    status, log = cluster.follow(job)
    assert status is CANCELLED
    assert log.endswith(f"✗ Job {job} was cancelled (status: CANCELLED).\n")
    cluster.wait_until_idle()
    assert processes_with(word) == []
    assert cluster.control.cancel([job]) == []


def test_what_a_job_leaves_in_the_background_ends_with_it(home: Path) -> None:
    cluster = LocalCluster.make(home)
    word = f"BACKGROUND_{os.getpid()}_{time.monotonic_ns()}"
    assert cluster.run(f"export {word}=1; setsid sleep 300 >/dev/null 2>&1 & sleep 0.1; echo left it")[0] is SUCCEEDED
    cluster.wait_until_idle()
    assert processes_with(word) == []


def test_a_killed_supervisor_takes_its_job_along(home: Path) -> None:
    cluster = LocalCluster.make(home, num_nodes=2)
    word = f"ORPHAN_{os.getpid()}_{time.monotonic_ns()}"
    job = cluster.submit(f"export {word}=1; setsid sleep 300 & echo going; sleep 300", num_nodes=2)
    cluster.wait_for(job, "rank=1")
    until(lambda: len(processes_with(word)) >= 2, "the job's processes")
    os.kill(cluster.supervisor_pid(), signal.SIGKILL)
    until(lambda: not processes_with(word), "the end of everything", within_s=5.0)
    cluster.wait_until_idle()  # a process that is being killed gives up its files one by one
    row = cluster.control.job(job)
    assert row.status is JobStatus.FAILED_DRIVER
    assert "supervisor" in row.reason
    assert cluster.run("echo next")[0] is SUCCEEDED
    assert "✗ Job 1 failed (status: FAILED_DRIVER)" in cluster.log(job)


def test_sigterm_cancels_and_ends(home: Path) -> None:
    cluster = LocalCluster.make(home)
    jobs = [cluster.submit("echo going; sleep 300", num_accelerators=0) for _ in range(2)]
    for job in jobs:
        cluster.wait_for(job, "going")
    os.kill(cluster.supervisor_pid(), signal.SIGTERM)
    cluster.wait_until_idle()
    for job in jobs:
        assert cluster.control.job(job).status is CANCELLED
        assert "supervisor was asked to end" in cluster.log(job)


def test_a_job_ends_with_the_process_it_belongs_to(home: Path) -> None:
    cluster = LocalCluster.make(home)
    owner = subprocess.Popen(["sleep", "300"])
    job = cluster.submit("echo going; sleep 300", owner_pid=owner.pid)
    cluster.wait_for(job, "going")
    owner.kill()
    status, log = cluster.follow(job)  # its end is seen before anybody has waited for it
    owner.wait()
    assert status is CANCELLED
    assert f"the process that started it, {owner.pid}, ended" in log
    job = cluster.submit("echo never", owner_pid=owner.pid)
    assert cluster.follow(job) == (CANCELLED, "")


@pytest.mark.long  # tests/tasks/test_cases.py has it through the command
def test_a_closed_terminal_ends_nothing(home: Path) -> None:
    cluster = LocalCluster.make(home)
    program = (
        "import os, sys; from pathlib import Path; from atoll.tasks.control import LocalControl;"
        "from atoll.tasks.spec import JobSpec; control = LocalControl(Path(sys.argv[1]));"
        "job = control.submit(JobSpec(run='sleep 1; echo lived on', base_env=dict(PATH=os.environ['PATH'])), {});"
        "control.follow(job, lambda data: None)"
    )
    client = subprocess.Popen([sys.executable, "-c", program, str(cluster.folder)], start_new_session=True)
    until(lambda: "Waiting" in cluster.log(1), "the job")
    os.killpg(client.pid, signal.SIGHUP)  # as a terminal does when it is closed
    client.wait()
    status, log = cluster.follow(1)
    assert status is SUCCEEDED
    assert "lived on" in log


@pytest.mark.parametrize("harm", ["text", "kind", "folder"])
def test_damaged_variables_fail_their_job_alone(home: Path, harm: str) -> None:
    cluster = LocalCluster.make(home, accelerator="L4", num_accelerators=1, simulated=True)
    innocent = cluster.submit("echo going; until [ -e go ]; do sleep 0.05; done", num_accelerators=1)
    cluster.wait_for(innocent, "going")
    waits = cluster.submit("echo never", secrets={"HF_TOKEN": "s3cret-value"}, num_accelerators=1)
    path = cluster.folder / "jobs" / str(waits) / "variables.json"
    path.unlink()
    path.mkdir() if harm == "folder" else path.write_text({"text": '{"HF_', "kind": "[1]"}[harm])
    after = cluster.submit("echo next", num_accelerators=1)
    pid = cluster.supervisor_pid()
    (cluster.folder / "nodes" / "0" / "home" / "sky_workdir" / "go").touch()
    status, log = cluster.follow(waits)
    assert status is JobStatus.FAILED_DRIVER
    assert "its variables" in log
    assert "never" not in log
    assert len(re.findall("^✗", log, re.M)) == 1
    assert cluster.follow(innocent)[0] is SUCCEEDED
    assert cluster.follow(after)[0] is SUCCEEDED
    assert cluster.supervisor_pid() == pid
    cluster.wait_until_idle()
    assert supervisor.said_last(cluster.folder) == ""


def test_a_damaged_record_does_not_end_the_supervisor(home: Path) -> None:
    cluster = LocalCluster.make(home)
    going = cluster.submit("echo going; until [ -e go ]; do sleep 0.05; done")
    cluster.wait_for(going, "going")
    (cluster.folder / "cluster.json").write_text("null")
    spec = dataclasses.replace(going_spec(cluster, going), key="another")
    late = cluster.control.ask_supervisor("add", spec, {}, "ada")
    status, log = cluster.follow(late)
    assert status is JobStatus.FAILED_DRIVER
    assert "cluster.json is damaged" in log
    (cluster.folder / "nodes" / "0" / "home" / "sky_workdir" / "go").touch()
    assert cluster.follow(going)[0] is SUCCEEDED


def going_spec(cluster: LocalCluster, job_id: int) -> JobSpec:
    return cluster.control.job(job_id).spec


def running(cluster: LocalCluster) -> tuple[int, str, int]:
    """A job that runs, a word in its processes' environment, and the supervisor."""
    word = f"LEFT_{os.getpid()}_{time.monotonic_ns()}"
    job = cluster.submit(f"export {word}=1; setsid sleep 300 & echo going; sleep 300")
    cluster.wait_for(job, "going")
    return job, word, cluster.supervisor_pid()


def test_a_store_that_is_moved_away_ends_its_jobs(home: Path) -> None:
    cluster = LocalCluster.make(home)
    job, word, pid = running(cluster)
    aside = cluster.folder / "damaged"
    aside.mkdir()
    for path in cluster.folder.glob("jobs.db*"):
        path.rename(aside / path.name)
    late = cluster.submit("echo next")  # the old supervisor is still there
    cluster.wait_for(late, "next")  # though nobody asks for it
    assert not processes_with(word)
    assert f"(status: CANCELLED): the job store {cluster.folder}/jobs.db was removed or replaced" in cluster.log(job)
    cluster.wait_until_idle()
    assert "was removed or replaced: ending its jobs, and leaving\n" in (cluster.folder / supervisor.LOG).read_text()
    assert cluster.supervisor_pid() != pid
    assert late == job + 1
    with Store(aside) as store:
        assert store.job(job).status is CANCELLED


@pytest.mark.parametrize("what", ["home", "lock"])
def test_a_supervisor_that_nobody_finds_leaves_nothing(home: Path, what: str) -> None:
    cluster = LocalCluster.make(home)
    job, word, pid = running(cluster)
    if what == "lock":
        (cluster.folder / "supervisor.lock").unlink()
        until(lambda: "lock" in cluster.log(job), "the job's end")
    else:
        shutil.rmtree(home / "clusters")
    until(lambda: not leaks.is_running(pid), "the supervisor's end")
    assert not processes_with(word)
    if what == "lock":
        assert cluster.run("echo next")[0] is SUCCEEDED
    else:
        assert not (home / "clusters").exists()


def test_jobs_that_wait_for_a_cluster_made_anew_say_so(home: Path) -> None:
    cluster = LocalCluster.make(home)
    going = cluster.submit(
        "echo going; until [ -e go ]; do sleep 0.05; done",
        setup="echo setting up; until [ -e set ]; do sleep 0.05; done",
    )
    cluster.wait_for(going, ") setting up")  # the status says so before its folder is made
    anew = dataclasses.replace(cluster.control.cluster(), created_s=1.0)
    (cluster.folder / "cluster.json").unlink()
    (cluster.folder / "nodes" / "0" / "home" / "sky_workdir" / "set").touch()
    cluster.wait_for(going, "going")  # though it can't be noted that the cluster is set up
    record.save(cluster.folder, anew)
    late = cluster.submit("echo next")
    cluster.wait_for(late, f"waiting for the end of job {going}: the cluster was changed or created again")
    (cluster.folder / "nodes" / "0" / "home" / "sky_workdir" / "go").touch()
    assert cluster.follow(late)[0] is SUCCEEDED


def add(store: Store, spec: JobSpec) -> int:
    """A job that no client saw to."""

    def begin(job_id: int) -> str:
        put_variables(store.path.parent, job_id, spec.variables())
        return "sky-1"

    return store.add(spec, task_id_for=begin, user="ada")


def test_a_client_that_is_gone_ends_no_supervisor(home: Path) -> None:
    cluster = LocalCluster.make(home)
    with Store(cluster.folder) as store:
        job = add(store, JobSpec(run="echo ran", base_env={"PATH": os.environ["PATH"]}))
    ours, theirs = socket.socketpair()
    ours.close()
    with (cluster.folder / supervisor.LOG).open("w") as log:
        program = "import sys; from atoll.tasks.dispatcher import main; main(sys.argv[1], int(sys.argv[2]))"
        command = [sys.executable, "-c", program, str(cluster.folder), str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdout=log, stderr=log)
        theirs.close()
        assert process.wait(30) == 0
    assert cluster.follow(job)[0] is SUCCEEDED
    assert supervisor.said_last(cluster.folder) == ""


def test_only_the_last_supervisor_is_quoted(home: Path) -> None:
    cluster = LocalCluster.make(home)
    assert cluster.run("true")[0] is SUCCEEDED
    cluster.wait_until_idle()
    with (cluster.folder / supervisor.LOG).open("a") as log:
        log.write("it was me\n")
    assert supervisor.said_last(cluster.folder) == "it was me"
    job = cluster.submit("echo going; sleep 300")
    cluster.wait_for(job, "going")
    os.kill(cluster.supervisor_pid(), signal.SIGKILL)
    cluster.wait_until_idle()
    assert cluster.control.job(job).reason == "its supervisor was killed, or the machine restarted"


@pytest.mark.parametrize("after_s", [0.0, 0.03, 0.06, 0.1])
def test_cancel_at_any_moment(home: Path, after_s: float) -> None:
    cluster = LocalCluster.make(home, num_nodes=2)
    word = f"EARLY_{os.getpid()}_{time.monotonic_ns()}"
    job = cluster.submit("sleep 300", setup="sleep 300", num_nodes=2, env={word: "1"})
    time.sleep(after_s)
    cluster.control.cancel([job])
    assert cluster.follow(job)[0] is CANCELLED
    cluster.wait_until_idle()
    assert processes_with(word) == []


def test_a_description_that_nobody_expects_fails_its_job_alone(home: Path) -> None:
    """Its description is not what a client writes, and not what the supervisor expects."""
    cluster = LocalCluster.make(home)
    specs: list[dict[str, Any]] = [{"timeout_s": "soon"}, {"owner_pid": -1}]
    with Store(cluster.folder) as store:
        harmful, unwatched = [add(store, JobSpec(run="echo never", **spec)) for spec in specs]
    status, log = cluster.follow(harmful)
    assert status is JobStatus.FAILED_DRIVER
    assert "an error of Atoll's own, TypeError: unsupported operand" in log
    assert (cluster.folder / supervisor.LOG).read_text().count("-- supervisor started") == 1
    assert "that started it, -1, can't be watched: [Errno 22]" in cluster.control.job(unwatched).reason
    assert cluster.run("echo next")[0] is SUCCEEDED
    assert not list(cluster.folder.glob("supervisor.starts"))


def test_a_node_that_can_not_start(home: Path) -> None:
    cluster = LocalCluster.make(home, num_nodes=2)
    (cluster.folder / "nodes").mkdir()
    (cluster.folder / "nodes" / "1").write_text("in the way")
    job = cluster.submit("echo never", num_nodes=2)
    assert cluster.follow(job)[0] is JobStatus.FAILED_DRIVER
    row = cluster.control.job(job)
    assert row.culprit_node == 1
    assert "worker1 could not be started" in row.reason


# ------------------------------------------------------------------------------------------------- many jobs
@pytest.mark.long
def test_many_quick_submits_lose_no_job(home: Path) -> None:
    """The supervisor ends when nothing is left; a job that comes at that moment must still be seen to."""
    cluster = LocalCluster.make(home)
    program = (
        "import os, sys, time; from pathlib import Path; from atoll.tasks.control import LocalControl\n"
        "from atoll.tasks.spec import JobSpec\n"
        "control = LocalControl(Path(sys.argv[1]))\n"
        "for i in range(6):\n"
        "    time.sleep(0.03 * (i % 4))\n"
        "    job = control.submit(JobSpec(run='true', base_env={'PATH': os.environ['PATH']}), {})\n"
        "    assert control.follow(job, lambda data: None) == 'SUCCEEDED'\n"
    )
    clients = [subprocess.Popen([sys.executable, "-c", program, str(cluster.folder)]) for _ in range(3)]
    assert [client.wait() for client in clients] == [0, 0, 0]
    cluster.wait_until_idle()
    assert [job.status for job in cluster.control.queue()] == [SUCCEEDED] * 18
    assert supervisor.said_last(cluster.folder) == ""


def test_jobs_with_accelerators_take_turns(home: Path) -> None:
    cluster = LocalCluster.make(home, accelerator="L4", num_accelerators=2, simulated=True)
    gpu = {"accelerator": "L4", "simulated": True}

    def beside(other: str) -> str:
        return f"for i in $(seq 600); do [ -e {other} ] && break; sleep 0.05; done; [ -e {other} ] || exit 9"

    first = cluster.submit(f"{beside('free')}; touch first-ends", num_accelerators=2, **gpu)
    after = "[ -e first-ends ] || exit 8"
    second = cluster.submit(f"{after}; touch second; {beside('third')}", num_accelerators=1, **gpu)
    third = cluster.submit(f"{after}; touch third; {beside('second')}", num_accelerators=1, **gpu)
    free = cluster.submit("touch free")
    for job in (first, second, third, free):
        status, log = cluster.follow(job)
        assert status is SUCCEEDED, log
    assert "waiting for 1 × L4 on 1 node: job 1 has 2 of the cluster's 2" in cluster.log(second)


@pytest.mark.long  # tests/cli/test_sweeps.py has it through the command
def test_a_sweep_runs_so_many_at_once(home: Path) -> None:
    cluster = LocalCluster.make(home)
    script = (
        "echo start $(date +%s%N); touch up-$SKYPILOT_JOB_RANK; "
        "until [ -e up-$((SKYPILOT_JOB_RANK ^ 1)) ]; do sleep 0.05; done; "  # 0 and 1 need each other, and 2 and 3
        "echo end $(date +%s%N) $SKYPILOT_JOB_RANK/$SKYPILOT_NUM_JOBS"
    )
    jobs = [
        cluster.submit(script, group="sweep", rank_in_group=i, num_in_group=4, parallel=2, labels={"lr": str(i)})
        for i in range(4)
    ]
    logs = [cluster.follow(job)[1] for job in jobs]
    spans = [tuple(int(n) for n in re.findall(r"\) (?:start|end) (\d+)", log)) for log in logs]
    assert max(sum(a <= start < b for a, b in spans) for start, _ in spans) == 2
    assert all(f" {i}/4" in log for i, log in enumerate(logs))


def test_each_job_of_a_pipeline_starts_when_the_one_before_has_succeeded(home: Path) -> None:
    cluster = LocalCluster.make(home)
    first = cluster.submit("while [ ! -e go ]; do sleep 0.05; done")
    second = cluster.submit("exit 3", after=first)
    third = cluster.submit("echo never", after=second)
    last = cluster.submit("echo never", after=third)
    cluster.wait_for(second, f"waiting for job {first}, which comes before it, to succeed")
    reason = f"waiting for job {first}, which comes before it, to succeed"
    until(lambda: cluster.control.job(second).reason == reason, "the reason, which its log has first")
    assert cluster.run("echo others go on")[0] is SUCCEEDED
    (cluster.folder / "nodes/0/home/sky_workdir/go").touch()
    assert [cluster.follow(job)[0] for job in (first, second, third, last)] == [SUCCEEDED, FAILED, CANCELLED, CANCELLED]
    assert cluster.control.job(third).reason == f"job {second}, which comes before it, failed"
    assert cluster.log(last).endswith(f"job {third}, which comes before it, was cancelled.\n")
    assert "never" not in cluster.log(third)


def test_jobs_that_fix_a_port_take_turns_on_one_network(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_NETWORK_NAMESPACE", "0")
    first, second = LocalCluster.make(home, "one"), LocalCluster.make(home, "two")
    holder = first.submit("echo going; sleep 300", ports=(8008,))
    first.wait_for(holder, "going")
    waiting = second.submit("echo mine", ports=(8007, 8008))
    second.wait_for(waiting, "waiting for port 8008, held by job 1 of cluster one")
    assert second.run("echo others go on", ports=(8007,))[0] is SUCCEEDED
    first.control.cancel([holder])
    assert second.follow(waiting)[0] is SUCCEEDED


def test_a_port_that_can_not_be_locked_fails_its_job_alone(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_NETWORK_NAMESPACE", "0")
    cluster = LocalCluster.make(home)
    (home / "ports").write_text("in the way")
    going = cluster.submit("echo going; until [ -e go ]; do sleep 0.05; done")
    cluster.wait_for(going, "going")
    job = cluster.submit("echo never", ports=(8008,))
    assert cluster.follow(job)[0] is JobStatus.FAILED_DRIVER
    why = rf"the lock of port 8008 can't be taken: .*{home}/ports/machine'. Move {home}/ports away while no job runs"
    assert re.match(why, cluster.control.job(job).reason)
    (home / "ports").unlink()
    (home / "ports/machine/8009.lock").mkdir(parents=True)
    assert cluster.run("echo never", ports=(8008, 8009))[0] is JobStatus.FAILED_DRIVER
    assert cluster.run("echo the first of them is free", ports=(8008,))[0] is SUCCEEDED
    (cluster.folder / "nodes/0/home/sky_workdir/go").touch()
    assert cluster.follow(going)[0] is SUCCEEDED


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        pytest.param(runner, "read_variables", marks=pytest.mark.long),
        (ClusterNodes, "start"),
        (runner.JobRunner, "_frame"),
        pytest.param(runner.JobRunner, "_answered", marks=pytest.mark.long),
    ],
)
def test_an_error_that_nobody_expects_fails_its_job_alone(
    home: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    cluster = LocalCluster.make(home)
    real = getattr(owner, name)

    def breaks_once(*args: Any) -> Any:
        if failed:
            return real(*args)
        failed.append(name)
        raise KeyError("what nobody expected")

    failed: list[str] = []
    monkeypatch.setattr(owner, name, breaks_once)
    ours, theirs = socket.socketpair()
    ours.close()
    before = signal.getsignal(signal.SIGTERM)
    lock = supervisor.open_lock(cluster.folder)
    try:
        assert record.take_lock(lock, 0.0)
        with Store(cluster.folder) as store:
            spec = JobSpec(run="echo well", base_env={"PATH": os.environ["PATH"]})
            jobs = [add(store, spec) for _ in range(2)]
            Dispatcher(cluster.folder, store, lock, theirs).run()
            rows = [store.job(job) for job in jobs]
    finally:
        signal.signal(signal.SIGTERM, before)
        os.close(lock)
    assert sorted(row.status for row in rows) == [JobStatus.FAILED_DRIVER, SUCCEEDED]
    lost = next(row for row in rows if row.status is not SUCCEEDED)
    assert "an error of Atoll's own, KeyError: 'what nobody expected'" in lost.reason
    assert lost.reason in cluster.log(lost.id)


@pytest.mark.long
def test_a_pending_job_is_cancelled_at_once(home: Path) -> None:
    cluster = LocalCluster.make(home, accelerator="L4", num_accelerators=1, simulated=True)
    first = cluster.submit("sleep 300", num_accelerators=1)
    second = cluster.submit("echo never", num_accelerators=1)
    cluster.wait_for_status(first, JobStatus.RUNNING)
    assert cluster.control.cancel([second]) == [second]
    assert cluster.control.job(second).status is CANCELLED
    cluster.control.cancel(None)
    assert cluster.follow(first)[0] is CANCELLED


# ------------------------------------------------------------------------------------------------- secrets
@pytest.mark.long  # tests/cli/test_cluster_commands.py has it through the command
def test_secrets_are_nowhere(home: Path) -> None:
    cluster = LocalCluster.make(home)
    values = {"HF_TOKEN": "hf_0123456789abc", "PLAIN": "given-as-a-secret"}
    job = cluster.submit(
        "echo token $HF_TOKEN; echo plain $PLAIN; printf %s $HF_TOKEN; sleep 0.5; "
        "until [ -e go ]; do sleep 0.05; done; echo; ps -ef; exit 4",
        secrets={"PLAIN": values["PLAIN"]},
        env={"HF_TOKEN": values["HF_TOKEN"]},
        secret_names=("PLAIN",),
    )
    cluster.wait_for(job, "token")
    shown = subprocess.run(["ps", "-eww", "-o", "args"], capture_output=True, text=True, check=True).stdout
    (cluster.folder / "nodes" / "0" / "home" / "sky_workdir" / "go").touch()
    status, log = cluster.follow(job)
    assert status is FAILED
    assert "token ****" in log
    assert "plain ****" in log
    cluster.wait_until_idle()
    texts = [shown, json.dumps(cluster.control.job(job).to_json())]
    for path in cluster.folder.rglob("*"):
        if path.is_file():
            texts.append(path.read_bytes().decode(errors="replace"))
    for value in values.values():
        assert not [text for text in texts if value in text]
    with Store(cluster.folder) as store:
        assert all(value not in repr(store.events(job)) for value in values.values())
    assert not (cluster.folder / "jobs" / str(job) / "variables.json").exists()


# ------------------------------------------------------------------------------------------------- full disks
def test_a_full_disk_does_not_end_the_job(home: Path) -> None:
    """The supervisor's files may not grow for a while, which is what a full disk is to it."""
    cluster = LocalCluster.make(home)
    job = cluster.submit(
        "echo before; until [ -e go ]; do sleep 0.05; done; seq 20000; until [ -e on ]; do sleep 0.05; done"
    )
    cluster.wait_for(job, "before")
    pid = cluster.supervisor_pid()
    size = (cluster.folder / "jobs" / str(job) / "run.log").stat().st_size
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size + 1000, before[1]))
    workdir = cluster.folder / "nodes" / "0" / "home" / "sky_workdir"
    (workdir / "go").touch()
    log_file = cluster.folder / "jobs" / str(job) / "run.log"
    # It writes what still fits, and fails with the rest: once it sleeps, it has.
    until(
        lambda: log_file.stat().st_size >= size + 1000 and (s := stat_of(pid)) and s.state == "S", "a write that failed"
    )
    assert supervisor.is_running(cluster.folder)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
    (workdir / "on").touch()
    status, log = cluster.follow(job)
    assert status is SUCCEEDED
    assert "bytes of output are missing here" in log
    with Store(cluster.folder) as store:
        assert "this log is incomplete" in " ".join(event.text for event in store.events(job))


def test_a_supervisor_whose_store_was_removed_ends_its_jobs(home: Path) -> None:
    cluster = LocalCluster.make(home)
    job = cluster.submit("exec sleep 1000")
    cluster.wait_for_status(job, JobStatus.RUNNING)
    for path in cluster.folder.glob("jobs.db*"):
        path.unlink()
    cluster.wait_until_idle()
    assert "was removed or replaced" in cluster.log(job)
    assert cluster.control.queue() == []


@pytest.mark.long
def test_a_supervisor_that_does_not_end_is_killed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_END_S", 0.5)
    cluster = LocalCluster.make(home)
    job = cluster.submit("exec sleep 1000")
    cluster.wait_for_status(job, JobStatus.RUNNING)
    stop(cluster.supervisor_pid())
    with pytest.raises(AtollError, match="is stopped: kill -CONT"):
        cluster.control.remove_nodes()
    assert cluster.control.end() == [job]
    assert not supervisor.is_running(cluster.folder)
    assert cluster.control.job(job).status.ended
