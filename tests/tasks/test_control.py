"""What clients ask of a cluster: logs from any point, its queue, its end; in this process and through the program."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.tasks.test_cases_more import inside

import leaks
from atoll.core.errors import AtollError, ConfigError, ProvisionError
from atoll.tasks import control, protocol, supervisor
from atoll.tasks.client import Client
from atoll.tasks.protocol import PREAMBLE, decode, request
from atoll.tasks.remote_control import RemoteControl
from atoll.tasks.rows import EventRow
from atoll.tasks.spec import ClusterSpec, ClusterStatus, JobSpec, JobStatus
from atoll.wire import frames
from atoll.wire.command_output import MARK, marked
from local_cluster import LocalCluster, descendants, processes_with, stop, until

SUCCEEDED, CANCELLED = JobStatus.SUCCEEDED, JobStatus.CANCELLED
PROGRAM = [sys.executable, "-m", "atoll.tasks.control"]  # and the name of a cluster


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ATOLL_HOME", str(tmp_path))
    return tmp_path


def program_control(cluster: str = "train") -> RemoteControl:
    program = marked("exec " + shlex.join([*PROGRAM, cluster]))
    command = ["sh", "-c", f"echo '{{\"value\": 1}}'; printf 'a prompt without an end: '; {program}"]
    return RemoteControl(lambda: command, cluster)


# ------------------------------------------------------------------------------------------------- logs
def test_the_last_lines_of_a_quiet_running_job(home: Path) -> None:
    cluster = LocalCluster.make(home)
    job = cluster.submit("seq 100; sleep 300")
    cluster.wait_for(job, ") 100\n")
    status, log = cluster.follow(job, follow=False, tail=5)
    assert status is JobStatus.RUNNING
    assert re.findall(r"\) (\d+)\n", log) == ["96", "97", "98", "99", "100"]
    assert cluster.follow(job, follow=False)[1].count("(task, pid=") == 100
    cluster.control.cancel([job])
    status, log = cluster.follow(job, tail=2)
    assert status is CANCELLED
    assert "was cancelled" in log
    cluster.wait_until_idle()
    assert cluster.follow(job, tail=1) == (CANCELLED, f"✗ Job {job} was cancelled (status: CANCELLED).\n")


def test_lines_are_seen_soon(home: Path) -> None:
    cluster = LocalCluster.make(home)
    job = cluster.submit("for i in 1 2 3 4 5; do sleep 0.2; date +%s.%N; done")
    late_s = []

    def write(data: bytes) -> None:
        now = time.time()
        late_s.extend(now - float(at) for at in re.findall(rb"\) (\d+\.\d+)\n", data))

    assert cluster.control.follow(job, write) is SUCCEEDED
    assert len(late_s) == 5
    assert min(late_s) < 0.5


def test_one_rank_only(home: Path) -> None:
    cluster = LocalCluster.make(home, num_nodes=2)
    job = cluster.submit("echo I am $SKYPILOT_NODE_RANK", num_nodes=2)
    _, log = cluster.follow(job, rank=1)
    assert re.fullmatch(r"\(worker1, rank=1, pid=\d+, ip=127.0.0.2\) I am 1\n", log)
    with pytest.raises(ConfigError, match="rank 2: job 1 has ranks 0 to 1"):
        cluster.follow(job, rank=2)


def test_no_such_job(home: Path) -> None:
    cluster = LocalCluster.make(home)
    with pytest.raises(LookupError, match="no job yet"):
        cluster.control.job(None)
    job = cluster.submit("true")
    assert cluster.follow(job)[0] is SUCCEEDED
    assert cluster.control.job(None).id == job
    for ask in (cluster.control.job, cluster.follow):
        with pytest.raises(LookupError, match="99"):
            ask(99)


def test_no_line_of_a_flood_is_lost_or_torn(home: Path) -> None:
    cluster = LocalCluster.make(home, num_nodes=2)
    num = 60_000
    text = f"import sys; sys.stdout.writelines(f'{{i}} {{chr(97 + i % 26) * (i % 100)}}\\n' for i in range({num}))"
    job = cluster.submit(f'{sys._base_executable} -c "{text}"', num_nodes=2)
    status, log = cluster.follow(job)
    assert status is SUCCEEDED
    expected = [f"{i} {chr(97 + i % 26) * (i % 100)}" for i in range(num)]
    for name in (r"\(head, rank=0, pid=\d+\) ", r"\(worker1, rank=1, pid=\d+, ip=127.0.0.2\) "):
        assert re.findall(f"^{name}(.*)$", log, re.M) == expected


def test_a_progress_bar_does_not_flood(home: Path) -> None:
    cluster = LocalCluster.make(home)
    began = time.monotonic()
    _, log = cluster.run(r"for i in $(seq 300); do printf '\r%d/300' $i; sleep 0.003; done; echo; printf 'a\r\nb\r\n'")
    lines = [line.partition(") ")[2] for line in log.splitlines() if line.startswith("(")]
    assert lines[-3:] == ["300/300", "a", "b"]
    assert len(lines) < 10 + 4 * (time.monotonic() - began)  # two a second, and some where it is quiet for long
    assert "\r" not in log


def test_a_job_whose_answer_was_lost_on_its_way_is_added_once(home: Path) -> None:
    cluster = LocalCluster.make(home)
    lost = home / "lost"

    there = marked("exec " + shlex.join([*PROGRAM, "train"]))
    # The first hears the request, and its answers are lost: hello comes, and then nothing.
    first = f"({there}) | head -c {len(MARK + protocol.answer(version=protocol.VERSION))}; exit 255"
    command = ["sh", "-c", f"[ -e {lost} ] || {{ touch {lost}; {first}; }}; {there}"]
    control = RemoteControl(lambda: command, "train", patience_s=60.0)
    assert control.submit(JobSpec(run="true", key="one"), {"TOKEN": "a value of its own"}) == 1
    assert control.submit(JobSpec(run="true", key="another"), {}) == 2  # another job of the same text
    assert lost.exists()
    assert [job.id for job in cluster.control.queue()] == [2, 1]
    assert cluster.control.submit(JobSpec(run="true", key=cluster.control.job(1).spec.key), {}) == 1
    assert cluster.follow(2)[0] is SUCCEEDED
    cluster.wait_until_idle()


def test_a_connection_that_is_lost_between_two_requests_is_made_again(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    LocalCluster.make(home)
    control = RemoteControl(lambda: ["sh", "-c", f"{marked(shlex.join([*PROGRAM, 'train']))}; exit 255"], "train")
    assert control.queue() == []
    for pid in descendants(os.getpid()):
        if Path(f"/proc/{pid}/cmdline").read_bytes().endswith(b"atoll.tasks.control\0train\0"):
            os.kill(pid, signal.SIGKILL)
            until(lambda pid=pid: not leaks.is_running(pid), "the program's end")
    assert control.queue() == []
    assert capsys.readouterr().err == ""  # nobody has to know


# ------------------------------------------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    ("cluster", "job", "message"),
    [
        ({"status": ClusterStatus.STOPPED}, {}, "atoll start train"),
        ({"status": ClusterStatus.DOWN}, {}, "atoll launch -c train"),
        ({"num_nodes": 2}, {"num_nodes": 3}, "needs 3 nodes and cluster train has 2"),
        ({"num_accelerators": 1}, {"num_accelerators": 2}, "needs 2 accelerators per node and cluster train has 1"),
    ],
)
def test_what_a_cluster_can_not_take(home: Path, cluster: dict[str, object], job: dict[str, int], message: str) -> None:
    made = LocalCluster.make(home, **cluster)
    with pytest.raises(ConfigError, match=message):
        made.submit("true", **job)
    assert made.control.queue() == []


def test_a_supervisor_that_can_not_start_is_an_error(home: Path) -> None:
    cluster = LocalCluster.make(home)
    (cluster.folder / "supervisor.lock").mkdir()
    with pytest.raises(AtollError, match=r"^/.*/supervisor.lock can't be used: Is a directory. `atoll down --purge t"):
        cluster.submit("true")
    assert cluster.control.queue() == []
    (cluster.folder / "supervisor.log").unlink()
    (cluster.folder / "supervisor.log").mkdir()
    with pytest.raises(AtollError, match=r"^/.*/supervisor.log can't be used: Is a directory. `atoll down --purge t"):
        cluster.submit("true")


def test_a_file_where_the_jobs_folders_are_to_be(home: Path) -> None:
    cluster = LocalCluster.make(home)
    (cluster.folder / "jobs").write_text("in the way")
    with pytest.raises(AtollError, match=r"^/.*/train/jobs can't be used: Not a directory. `atoll down --purge train`"):
        cluster.submit("true")
    assert cluster.control.queue() == []


# ------------------------------------------------------------------------------------------------- the end
def test_stop_and_down_end_what_runs(home: Path) -> None:
    cluster = LocalCluster.make(home)
    word = f"STOPPED_{os.getpid()}_{time.monotonic_ns()}"
    job = cluster.submit(f"echo kept > file; export {word}=1; echo going; sleep 300")
    cluster.wait_for(job, "going")
    assert cluster.control.change(status=ClusterStatus.STOPPED).status is ClusterStatus.STOPPED
    assert processes_with(word) == []
    assert cluster.control.job(job).status is CANCELLED
    file = cluster.folder / "nodes" / "0" / "home" / "sky_workdir" / "file"
    assert file.read_text() == "kept\n"
    cluster.control.change(status=ClusterStatus.UP)
    job = cluster.submit("cat file; mkdir -p shut/in; chmod 500 shut; echo made; sleep 300")
    cluster.wait_for(job, ") made")
    cluster.control.remove_nodes()
    assert not (cluster.folder / "nodes").exists()
    assert cluster.control.job(job).status is CANCELLED
    assert "kept" in cluster.follow(job)[1]


def test_pending_jobs_get_a_new_supervisor(home: Path) -> None:
    cluster = LocalCluster.make(home, accelerator="L4", num_accelerators=1, simulated=True)
    first = cluster.submit("echo going; sleep 300", num_accelerators=1)
    second = cluster.submit("echo mine", num_accelerators=1)
    cluster.wait_for(first, "going")
    os.kill(cluster.supervisor_pid(), 9)
    until(lambda: not supervisor.is_running(cluster.folder), "the supervisor's end")
    assert cluster.follow(second)[0] is SUCCEEDED
    assert cluster.control.job(first).status is JobStatus.FAILED_DRIVER


def test_a_log_says_why_it_ends_where_its_supervisor_is_just_being_killed(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = LocalCluster.make(home)
    job = cluster.submit("echo going; sleep 300")
    cluster.wait_for(job, "going")
    os.kill(cluster.supervisor_pid(), signal.SIGKILL)
    cluster.wait_until_idle()
    looks, is_running = iter([True]), supervisor.is_running
    monkeypatch.setattr(supervisor, "is_running", lambda folder: next(looks, False) or is_running(folder))
    status, log = cluster.follow(job)
    assert status is JobStatus.FAILED_DRIVER
    assert "its supervisor was killed" in log.splitlines()[-1]


def test_nodes_that_start_in_any_order(home: Path) -> None:
    """A supervisor whose nodes take different times to start: ranks stay what they are, and setup is a barrier."""
    cluster = LocalCluster.make(home, num_nodes=4)
    program = (
        "import sys, time; from atoll.tasks import dispatcher; from atoll.tasks.nodes import ClusterNodes\n"
        "class Slow(ClusterNodes):\n"
        "    def start(self, job_id, node, *more):\n"
        "        time.sleep((0.3, 0.1, 0.4, 0.0)[node])\n"
        "        return super().start(job_id, node, *more)\n"
        "dispatcher.ClusterNodes = Slow\n"
        "dispatcher.main(sys.argv[1], int(sys.argv[2]))\n"
    )
    ours, theirs = socket.socketpair()
    with open(home / "err", "w") as errors, ours:
        command = [sys.executable, "-c", program, str(cluster.folder), str(theirs.fileno())]
        process = subprocess.Popen(command, stderr=errors, pass_fds=[theirs.fileno()])
        theirs.close()
        until(lambda: supervisor.pid_of(cluster.folder) == process.pid, "this supervisor to be the one")
        job = cluster.submit(
            "date +%s.%N; echo rank $SKYPILOT_NODE_RANK; echo $SKYPILOT_NODE_IPS", setup="date +%s.%N", num_nodes=4
        )
    status, log = cluster.follow(job)
    assert process.wait() == 0
    assert status is SUCCEEDED
    for node, name in enumerate(("head", "worker1", "worker2", "worker3")):
        assert re.search(rf"^\({name}, rank={node}, pid=\d+[^)]*\) rank {node}$", log, re.M)
    assert log.count("127.0.0.1 127.0.0.2 127.0.0.3 127.0.0.4") == 4
    setups = [float(at) for at in re.findall(r"^\(setup .*\) (\d+\.\d+)$", log, re.M)]
    runs = [float(at) for at in re.findall(r"rank=.*\) (\d+\.\d+)$", log, re.M)]
    assert len(setups) == len(runs) == 4
    assert max(setups) < min(runs)


# ------------------------------------------------------------------------------------------------- as a program
def test_everything_through_the_program(home: Path) -> None:
    control = program_control()
    control.create(ClusterSpec("train", created_s=time.time()), anew=True)
    spec = JobSpec(name="far", run="echo my $API_TOKEN; echo é; exit 3", secret_names=("API_TOKEN",))
    job = control.submit(spec, {"API_TOKEN": "0123456789"})
    got: list[bytes] = []
    assert control.follow(job, got.append) is JobStatus.FAILED
    log = b"".join(got).decode()
    assert "my ****" in log
    assert ") é\n" in log
    assert control.job(None).exit_code == 3
    assert [row.id for row in control.queue()] == [job]
    assert control.cancel(None) == []
    assert control.change(autostop_minutes=5, status=ClusterStatus.STOPPED).status is ClusterStatus.STOPPED
    assert control.cluster().autostop_minutes == 5
    control.remove_nodes()
    with pytest.raises(ConfigError, match="is stopped"):
        control.submit(spec, {})
    with pytest.raises(LookupError, match="99"):
        control.job(99)
    with pytest.raises(LookupError, match="99"):
        control.follow(99, got.append)
    with pytest.raises(LookupError, match="cluster other"):
        program_control("other").cluster()
    with pytest.raises(ConfigError, match="not a valid cluster name"):
        program_control("../x").cluster()
    broken = RemoteControl(lambda: ["sh", "-c", "echo no route >&2; exit 255"], "train")
    for ask in (broken.cluster, lambda: broken.follow(1, got.append)):
        with pytest.raises(AtollError, match=r"the head of cluster train.* can't be reached: no route"):
            ask()
    ends = RemoteControl(lambda: ["sh", "-c", "echo This account is not available.; exit 1"], "train", "h1")
    for ask in (ends.cluster, lambda: ends.follow(1, got.append)):
        with pytest.raises(AtollError, match=r"train \(h1\): a login there ended .* printed 'This account is"):
            ask()
    odd = RemoteControl(lambda: ["sh", "-c", marked("echo 17 files")], "train", "h1")
    with pytest.raises(AtollError, match=r"^the head of cluster train \(h1\): its answer can't be read: '17 files'$"):
        odd.queue()


@pytest.mark.parametrize("quiet", [True, False])
def test_a_reader_that_goes_away_ends_the_program(home: Path, quiet: bool) -> None:
    cluster = LocalCluster.make(home)
    job = cluster.submit("echo going; sleep 300" if quiet else "while true; do echo going; done")
    cluster.wait_for(job, "going")
    pipe = subprocess.PIPE
    follower = subprocess.Popen([*PROGRAM, "train"], stdin=pipe, stdout=pipe, stderr=pipe)
    assert follower.stdin is not None
    assert follower.stdout is not None
    assert follower.stderr is not None
    follower.stdin.write(PREAMBLE + request("follow", (job, print), {})[0])
    follower.stdin.flush()
    assert follower.stdout.read(20)
    follower.stdout.close()
    assert follower.wait(60) == 120
    assert follower.stderr.read() == b""
    follower.stdin.close()
    follower.stderr.close()
    assert cluster.control.job(job).status is JobStatus.RUNNING  # it only watched
    cluster.control.cancel(None)
    cluster.wait_until_idle()


def test_a_bare_python_is_enough() -> None:
    """As on a host that has nothing but a Python: no site-packages, no environment."""
    root = str(Path(supervisor.__file__).parents[2])
    program = (
        f"import sys; sys.path.insert(0, {root!r});"
        "import atoll.tasks.dispatcher, atoll.tasks.control, atoll.tasks.remote_control, atoll.providers.ssh.provider"
    )
    subprocess.run([sys.executable, "-I", "-S", "-c", program], check=True, env={})


# ------------------------------------------------------------------------------------------------- when things are odd
def test_a_log_that_was_removed(home: Path) -> None:
    cluster = LocalCluster.make(home)
    job = cluster.submit("echo going; until [ -e go ]; do sleep 0.05; done")
    cluster.wait_for(job, "going")
    path = cluster.folder / "jobs" / str(job) / "run.log"
    path.unlink()
    gone = f"atoll: the log of job {job} is gone: somebody removed {path}\n"
    assert cluster.follow(job, follow=False) == (JobStatus.RUNNING, gone)
    (cluster.folder / "nodes" / "0" / "home" / "sky_workdir" / "go").touch()
    assert cluster.follow(job) == (SUCCEEDED, gone)
    assert cluster.follow(job, tail=3) == (SUCCEEDED, gone)


def test_a_supervisor_that_is_stopped_is_named(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(control, "_END_S", 0.3)
    cluster = LocalCluster.make(home)
    job = cluster.submit("echo going; sleep 300")
    cluster.wait_for(job, "going")
    pid = cluster.supervisor_pid()
    stop(pid)
    said = ""

    def told(line: str) -> bool:
        nonlocal said
        said += capsys.readouterr().err
        return line in said

    followers = [
        threading.Thread(target=each.follow, args=(job, lambda data: None))
        for each in (cluster.control, program_control())
    ]
    for follower in followers:
        follower.start()
    try:
        line = f"job {job}: it can't be followed: its supervisor, process {pid}, is stopped: kill -CONT {pid}\n"
        until(lambda: told(f"note: {line}"), "a word to a follower here")
        until(lambda: told(f"note: the head of cluster train: {line}"), "a word to a follower elsewhere")
        with pytest.raises(AtollError, match=rf"its supervisor, process {pid}, is stopped: kill -CONT {pid}"):
            cluster.control.remove_nodes()
    finally:
        os.kill(pid, signal.SIGCONT)
    cluster.control.cancel([job])
    assert cluster.follow(job)[0] is CANCELLED
    for follower in followers:
        follower.join()
    told("")
    assert said.count("kill -CONT") == 2
    cluster.wait_until_idle()


def test_more_than_the_kernel_takes(home: Path) -> None:
    cluster = LocalCluster.make(home)
    with pytest.raises(ConfigError, match="variable LONG has 200006 bytes, and Linux starts no program with more"):
        cluster.submit(env={"LONG": "x" * 200_000})
    with pytest.raises(ConfigError, match="variables and arguments have 2500"):
        cluster.submit(env={f"V{i}": "x" * 100_000 for i in range(25)})
    with pytest.raises(ConfigError, match="argument 1 has 140001 bytes"):
        cluster.submit(command=("echo", "é" * 70_000))
    with pytest.raises(ConfigError, match="variable WORD has"):
        cluster.submit("true", secrets={"WORD": "x" * 200_000})
    assert cluster.control.queue() == []
    assert cluster.run("echo ${#LONG}", env={"LONG": "x" * 131_000})[0] is SUCCEEDED


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_log_that_fills_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_HOME", str(tmp_path))
    fill = f"cat /dev/zero > {tmp_path}/rest 2>/dev/null"
    said = inside(
        f"mount -t tmpfs -o size=12m none {tmp_path}",
        "date +at=%s.%N",
        ["launch", "-c", "t", "head -c 30000000 /dev/zero | tr '\\0' x | fold; exit 5"],
        fill,
        ["queue", "t", "-o", "json"],
        ["status"],
        ["logs", "t", "--tail", "8"],
        ["cancel", "t"],
        ["down", "t", "--purge"],
        f"rm {tmp_path}/rest; date +at=%s.%N",
        ["launch", "-c", "t", "echo works"],
        "date +at=%s.%N",
        ["down", "t", "--purge"],
    )
    began, full, ended = (float(at) for at in re.findall(r"^at=(\d+\.\d+)$", "".join(text for _, text in said), re.M))
    assert full - began < 25 + 10 * (ended - full)  # nothing was tried for long, however slow the machine is
    codes = [code for code, _ in said]
    assert codes == [100, 0, 0, 100, 0, 0, 0, 0], [text[-300:] for _, text in said]
    assert json.loads(said[1][1])[0]["reason"].endswith("exited with code 5")  # the log has no room for it
    assert "works" in said[6][1]


# ------------------------------------------------------------------------------------------------- the supervisor's end
def test_events_are_pushed_as_they_happen_each_once(home: Path) -> None:
    cluster = LocalCluster.make(home)
    job = cluster.submit("echo going; until [ -e go ]; do sleep 0.05; done")
    events: list[EventRow] = []
    log: list[bytes] = []
    for control_here in (cluster.control, program_control()):
        events.clear()

        def see(event: EventRow) -> None:
            events.append(event)
            if event.kind == "process_started":
                assert b"Waiting for task resources" in b"".join(log)  # what led to it is there
                (cluster.folder / "nodes" / "0" / "home" / "sky_workdir" / "go").touch()

        assert control_here.follow(job, log.append, see) is SUCCEEDED
        assert [event.seq for event in events] == list(range(1, len(events) + 1))
        assert events == cluster.control.events(job)


def test_the_end_of_a_job_is_pushed_to_whoever_waits(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = LocalCluster.make(home)
    asked: list[str] = []
    ask = Client.ask
    monkeypatch.setattr(Client, "ask", lambda self, what, *a, **how: asked.append(what) or ask(self, what, *a, **how))
    for control_here in (cluster.control, program_control()):
        job = cluster.submit("until [ -e go ]; do sleep 0.05; done")
        go = cluster.folder / "nodes" / "0" / "home" / "sky_workdir" / "go"
        cluster.wait_for_status(job, JobStatus.RUNNING)
        asked.clear()
        assert control_here.wait(job, 0.1) is JobStatus.RUNNING
        timer = threading.Timer(0.5, go.touch)
        timer.start()
        assert control_here.wait(job) is SUCCEEDED
        assert len(asked) == 2, asked  # one for each wait
        timer.join()
        go.unlink()


def test_a_client_that_does_not_read_holds_nobody_up_and_misses_nothing(home: Path) -> None:
    cluster = LocalCluster.make(home)
    stays = cluster.submit("echo going; sleep 300")
    cluster.wait_for(stays, "going")
    job = cluster.submit("head -c 20000000 /dev/zero | tr '\\0' x | fold")
    how = {"start": 0, "skip_bytes": 0, "rank": None, "several": False, "after": 0}
    parser, num_bytes, status = frames.Parser(), 0, None
    with supervisor.reach(cluster.folder) as sock:
        sock.sendall(request("follow", (job, print, None), how)[0])
        assert cluster.follow(job)[0] is SUCCEEDED
        while status is None:
            for message in map(frames.RawFrame.parsed, parser.feed(sock.recv(1 << 20))):
                num_bytes += len(message.rest)
                status = message.meta.get("value")
    assert decode(status) is SUCCEEDED
    assert num_bytes == (cluster.folder / "jobs" / str(job) / "run.log").stat().st_size
    cluster.control.cancel(None)
    cluster.wait_until_idle()


def test_a_supervisor_of_another_version_is_not_misunderstood(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = LocalCluster.make(home)
    job = cluster.submit("echo going; sleep 300")
    cluster.wait_for(job, "going")
    pid = cluster.supervisor_pid()
    with monkeypatch.context() as newer:
        newer.setattr(protocol, "VERSION", 7)
        other = control.LocalControl(cluster.folder)
        for ask in (lambda: other.cancel([job]), lambda: other.follow(job, print)):
            with pytest.raises(AtollError, match=f"process {pid}, speaks version 2 of Atoll's protocol, and this .* 7"):
                ask()
        assert other.job(job).status is JobStatus.RUNNING
    cluster.control.cancel(None)
    cluster.wait_until_idle()


def test_bytes_that_are_no_request_end_their_connection_alone(home: Path) -> None:
    cluster = LocalCluster.make(home)
    job = cluster.submit("echo going; until [ -e go ]; do sleep 0.05; done")
    cluster.wait_for(job, "going")
    unknown = frames.pack(frames.ASK, meta={"op": "__init__", "args": [], "kwargs": {}})
    for data in (b"GET /something HTTP/1.1\r\n\r\n", unknown):
        with supervisor.reach(cluster.folder) as sock:
            sock.sendall(data)
            parser, answers = frames.Parser(), []
            while not any("error" in each for each in answers) and (came := sock.recv(1000)):
                answers += [each.parsed().meta for each in parser.feed(came)]
        assert len(answers) == (1 if data.startswith(b"GET") else 2)
    (cluster.folder / "nodes" / "0" / "home" / "sky_workdir" / "go").touch()
    assert cluster.follow(job)[0] is SUCCEEDED


def test_a_program_that_does_not_begin_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.tasks.client._HELLO_S", 0.2)
    with pytest.raises(ProvisionError, match="did not answer within 0 s"):
        RemoteControl(lambda: ["sleep", "60"], "train").queue()
