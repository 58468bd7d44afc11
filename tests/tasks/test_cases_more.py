"""Files, logs, secrets, disks and odd surroundings of jobs on local nodes, by the real command or ``sky.launch``."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.test_cluster_commands import RUN, Atoll, atoll, contents, home, task_file
from tests.pools import SOURCE_ROOT, all_pids, command, eventually
from tests.tasks.test_cases import both_ways, wait_for_log

import atoll as sky
from atoll.providers.local_node import isolation
from atoll.tasks import clusters, lifecycle
from atoll.tasks.logs import JobLog

__all__ = ["atoll", "both_ways", "home"]

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")


# -------------------------------------------------------------------------------------------------------- files
@pytest.mark.long
def test_a_workdir_with_rules_links_and_a_large_file(atoll: Atoll, tmp_path: Path) -> None:
    work = tmp_path / "work"
    for name in ("dataset/large", "dataset/keep.txt", "build/object", "src/build/kept", "main.py"):
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text(name)
    (work / ".gitignore").write_text("dataset/*\n/build\n!keep.txt\n")
    (work / "link").symlink_to("main.py")
    (work / "dangling").symlink_to("nowhere")
    with open(work / "large", "wb") as file:
        file.truncate(64 << 20)
    subprocess.run(["git", "init", "-q", work], check=True)
    script = "find . -type f -o -type l | sort; readlink link dangling; stat -c %s large"
    code, out, _ = atoll("launch", "-c", "t", "--workdir", str(work), script)
    assert code == 0
    lines = [line.partition(") ")[2] for line in out.splitlines() if line.startswith("(task")]
    assert lines[:7] == [
        *("./.gitignore", "./dangling", "./dataset/keep.txt", "./large", "./link", "./main.py", "./src/build/kept")
    ]
    assert lines[7:10] == ["main.py", "nowhere", str(64 << 20)]


@pytest.mark.long
def test_a_file_that_vanishes_while_it_is_copied(atoll: Atoll, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    for number in range(400):
        (work / f"kept{number}").write_text("x")
    go = threading.Event()

    def churn() -> None:
        while not go.is_set():
            for number in range(50):
                path = work / f"some{number}"
                path.write_bytes(b"y" * 10_000)
                path.unlink()

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        code, out, err = atoll("launch", "-c", "t", "--num-nodes", "3", "--workdir", str(work), "ls | grep -c kept")
    finally:
        go.set()
        thread.join()
    assert code == 0, err
    assert len(re.findall(r"\) 400$", out, re.M)) == 3


@pytest.fixture
def outside() -> Iterator[Path]:
    """A place of the machine itself, where nothing may appear."""
    where = Path("/var/tmp") / f"atoll-test-{os.getpid()}"
    yield where
    shutil.rmtree(where, ignore_errors=True)


@pytest.mark.long
def test_mounts_outside_of_the_home_are_the_nodes_own(
    atoll: Atoll, tmp_path: Path, both_ways: str, outside: Path
) -> None:
    (tmp_path / "src/deep").mkdir(parents=True)
    (tmp_path / "src/deep/file").write_text("of a folder")
    (tmp_path / "one").write_text("of a file")
    at_root = f"/atoll-test-{os.getpid()}"
    task = task_file(
        tmp_path / "task.yaml",
        f"""
num_nodes: 2
file_mounts:
  {at_root}/data: {tmp_path}/src
  {outside}/one: {tmp_path}/one
  {outside}/data: {tmp_path}/src
  /tmp/atoll-test/one: {tmp_path}/one
run: |
  cat {at_root}/data/deep/file {outside}/one /tmp/atoll-test/one
  echo "from $SKYPILOT_NODE_RANK" > {outside}/data/new && cat {outside}/data/new
  test -d {at_root} && mkdir -p {outside}/made {at_root}/made && echo kept > {outside}/made/beside
  ls -d /usr /tmp /proc/self; hostname; echo $PWD
""",
    )
    code, out, _ = atoll("launch", "-c", "t", task)
    assert code == 0
    if both_ways == "namespaces":
        assert [out.count(text) for text in ("of a folder", "of a file")] == [2, 2 * 2]
        assert [out.count(f"from {node}\n") for node in (0, 1)] == [1, 1]
        assert "kept" in atoll("exec", "t", f"cat {outside}/made/beside; rmdir {at_root}/made")[1]
        assert out.count("/proc/self\n") == 2
        assert atoll("cp", f"t/worker1:{outside}/data/new", "new")[0] == 0
        assert Path("new").read_text() == "from 1\n"
    else:
        for target in (f"{at_root}/data", f"{outside}/one", f"{outside}/data", "/tmp/atoll-test/one"):
            assert f"file_mounts.{target}: it can't be shown there (no mounts of its own): it is at ~/.atoll-m" in out
    assert not os.path.lexists(at_root)
    assert not outside.exists()
    assert not os.path.lexists("/tmp/atoll-test")
    assert "of a f" in atoll("exec", "t", "cat ~/.atoll-mounts/tmp/atoll-test/one")[1]
    assert atoll("down", "t")[0] == 0
    left = {path.name for path in clusters.folder_of("t").iterdir()}
    assert "nodes" not in left
    assert "jobs" in left
    assert "can't be shown" in atoll("logs", "t", "1")[1] or both_ways == "namespaces"


# --------------------------------------------------------------------------------------------------------- logs
@pytest.mark.long
def test_a_quiet_job_shows_what_it_said(atoll: Atoll) -> None:
    atoll("launch", "-c", "t", "-d", "seq 20; printf 'Continue? '; sleep 60")
    wait_for_log(atoll, "t", "20\n")
    # A line without its end comes within a second or so, and with its prefix.
    eventually(
        lambda: re.search(r"^\(task, pid=\d+\) Continue\? $", atoll("logs", "t", "--no-follow")[1], re.M), "it", 15
    )
    code, out, _ = atoll("logs", "t", "--no-follow", "--tail", "5")
    assert code == 101
    assert [line.partition(") ")[2] for line in out.splitlines()] == ["17", "18", "19", "20", "Continue? "]


def test_a_line_that_comes_in_parts_is_one_line(atoll: Atoll) -> None:
    code, out, _ = atoll("launch", "-c", "t", "printf 'asked: '; sleep 1.2; echo answered; printf 'no end'; sleep 0.8")
    assert code == 0
    lines = [line.partition(") ")[2] for line in out.splitlines() if line.startswith("(task")]
    assert lines == ["asked: answered", "no end"]
    assert "no end\n✓" in out


def test_lines_of_several_never_mix(tmp_path: Path) -> None:
    log = JobLog(tmp_path, ["s3cret-value"])
    one, two = log.stream("(1) "), log.stream("(2) ")
    one.feed(b"begun ", 1.0)
    assert one.due == 1.5
    log.tick(1.5)
    two.feed(b"whole\n", 1.6)
    one.feed(b"goes on\n", 1.7)
    one.feed(b"10%", 1.8)
    log.tick(2.3)
    one.feed(b"\r20%", 2.4)
    log.tick(2.9)
    log.say("we")
    one.feed(b"\r\n", 3.0)
    two.feed(b"a s3cret-", 3.1)
    log.tick(3.6)  # what may be the beginning of a secret waits
    two.feed(b"value b", 3.7)
    log.tick(4.2)
    log.close(5.0)
    assert (tmp_path / "run.log").read_text().splitlines() == [
        *("(1) begun ", "(2) whole", "(1) goes on", "(1) 10%", "(1) 20%", "we", "(1) ", "(2) a **** b")
    ]


def test_whatever_a_job_prints(atoll: Atoll) -> None:
    python = shlex.quote(sys.executable)
    code = (
        "import os, time; w = lambda data: os.write(1, data); w(bytes(range(256)) + b'\\n'); w(b'crlf\\r\\n');"
        "w(b'\\x1b[31mred\\x1b[0m\\n'); [(w(b'\\r%d%%' % i), time.sleep(0.002)) for i in range(101)]; w(b'\\n');"
        "view = memoryview(b'x' * 10_000_000 + b'\\n')\nwhile view: view = view[os.write(1, view):]\nw(b'after\\n')"
    )
    atoll("launch", "-c", "t", "-d", f'{python} -c "$CODE"', "--env", f"CODE={code}")
    eventually(lambda: atoll("logs", "t", "--status")[0] != 101, "its end", 60)
    shown = (clusters.folder_of("t") / "jobs/1/run.log").read_bytes()
    assert bytes(range(14, 256)) in shown
    assert b") crlf\n" in shown
    assert b") \x1b[31mred\x1b[0m\n" in shown
    assert b") 100%\n" in shown
    assert shown.count(b"%\n") < 50  # two a second, and few however slowly they came
    assert shown.count(b"x" * 1000) > 9_900
    assert b") after\n" in shown


@pytest.mark.long
def test_the_end_of_a_large_log_is_shown_at_once(atoll: Atoll) -> None:
    atoll("launch", "-c", "t", "-d", "yes 'a line of forty characters, as they come.' | head -c 100000000; echo; seq 3")
    assert atoll("logs", "t", "--tail", "1")[0] == 0
    before = _read_bytes()
    code, out, _ = atoll("logs", "t", "--tail", "4")
    assert _read_bytes() - before < 10_000_000, "it is not read from the start"
    assert code == 0
    assert [line.partition(") ")[2] for line in out.splitlines()[:3]] == ["1", "2", "3"]
    lifecycle.down("t")
    lifecycle.forget("t")


def _read_bytes() -> int:
    """How much this process has read so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


# ------------------------------------------------------------------------------------------------------ secrets
def test_a_secret_shows_nowhere_while_its_job_runs(atoll: Atoll, home: Path, tmp_path: Path) -> None:
    secret = "hf_Zq81vTgX7secret"
    task = task_file(
        tmp_path / "task.yaml",
        f"envs: {{HF_TOKEN: {secret}, OTHER: visible}}\nnum_nodes: 2\nsetup: echo setup $HF_TOKEN\n"
        "run: |\n  echo it is $HF_TOKEN $OTHER; printf $HF_TOKEN; sleep 0.7; printf 'begun %s' ${HF_TOKEN:0:9}\n"
        "  until [ -e ~/go ]; do sleep 0.1; done; exit 3",
    )
    said = [atoll("launch", "-c", "t", "-d", task)]
    eventually(lambda: atoll("logs", "t", "--no-follow")[1].count("begun") == 2, "both run", 40)
    assert [pid for pid in all_pids() if any(secret in word for word in command(pid))] == []
    files = contents(home / "clusters/t")
    assert {"jobs.db", "run.log", "supervisor.log", "cluster.json"} <= {path.name for path in files}
    assert [path for path, held in files.items() if secret.encode() in held] == []
    for node in (0, 1):
        (clusters.node_home("t", node) / "go").touch()
    said += [atoll("logs", "t"), atoll("logs", "t", "--rank", "1"), atoll("queue", "t", "-o", "json")]
    said += [atoll("status", "t", "-o", "json"), atoll("logs", "t", "-o", "json"), atoll("queue", "t")]
    assert "it is **** visible" in said[1][1]
    assert secret not in repr(said)
    assert secret.encode() not in b"".join(contents(home / "clusters/t").values())


def test_a_variable_without_a_value_is_asked_for(atoll: Atoll, home: Path, tmp_path: Path) -> None:
    task = task_file(tmp_path / "task.yaml", "envs: {A: null}\nrun: echo $A")
    code, out, err = atoll("launch", "-c", "t", task)
    assert code == 2
    assert "--env A=" in out + err
    assert not list(home.glob("clusters/*"))
    assert atoll("launch", "-c", "t", "--env", "A=5", task)[0] == 0


# --------------------------------------------------------------------------------------------------- surroundings
def inside(mount: str, *commands: list[str] | str) -> list[tuple[int, str]]:
    """The command, several times, in a mount namespace where something was mounted before; exit codes and output."""
    code = f"import sys; sys.argv = ['atoll', *sys.argv[1:]]; {RUN}"
    run = f"{sys.executable} -c {shlex.quote(code)}"
    lines = [each if isinstance(each, str) else f'{run} {shlex.join(each)}; echo "exit=$?"' for each in commands]
    script = "\n".join(["set -e", mount, "set +e", *lines])
    done = subprocess.run(
        ["unshare", "--mount", "bash", "-c", script],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": SOURCE_ROOT},
    )
    assert done.returncode == 0, done.stdout
    assert "Traceback" not in done.stdout
    parts = re.split(r"exit=(\d+)\n", done.stdout)
    return [(int(code), said) for said, code in zip(parts[::2], parts[1::2], strict=False)]


@AS_ROOT
@pytest.mark.long
def test_a_full_disk(home: Path) -> None:
    home.mkdir()
    fill = "dd if=/dev/zero of=~/big bs=1M count=100"
    said = inside(
        f"mount -t tmpfs -o size=12m none {home}",
        ["launch", "-c", "t", f"{fill} || echo full $?; seq 30000; rm ~/big; echo room again; exit 5"],
        ["queue", "t", "-o", "json"],
        ["exec", "t", "echo works"],
        # It leaves the disk full: that it ended is known all the same.
        ["exec", "t", f"{fill}; true"],
        ["queue", "t", "-o", "json"],
        # And fuller still: what can't be written is said in a line.
        f"cat /dev/zero > {home}/clusters/t/nodes/0/home/more 2>/dev/null",
        ["launch", "-c", "u", "echo never"],
        ["exec", "t", "echo never"],
        ["down", "t"],
        ["queue", "t", "-o", "json"],
        ["launch", "-c", "u", "echo works"],
        ["down", "u"],
    )
    codes = [code for code, _ in said]
    assert codes == [100, 0, 0, 0, 0, 100, 100, 0, 0, 0, 0], said
    assert "No space left on device" in said[0][1]
    assert "exited with code 5" in said[0][1]
    assert "works" in said[2][1]
    assert [row["exit_code"] for row in json.loads(said[4][1])] == [0, 0, 5]
    assert f"atoll: {home}/" in said[5][1]
    assert said[5][1].endswith("No space left on device\n")
    assert said[6][1].count("\n") == 2  # where it would run, and why it does not
    assert "is the disk full" in said[6][1]
    assert said[8][1] == said[4][1]
    assert "works" in said[9][1]


@AS_ROOT
def test_a_state_folder_that_cannot_be_written_to(home: Path) -> None:
    home.mkdir()
    said = inside(f"mount -t tmpfs -o ro none {home}", ["launch", "-c", "t", "echo"], ["status"], ["queue"])
    assert said[0][0] == 100
    assert "Read-only file system" in said[0][1]
    assert len(said[0][1].splitlines()) == 1
    assert [code for code, _ in said[1:]] == [0, 0]


@pytest.mark.parametrize(
    "name",
    [*(pytest.param(name, marks=pytest.mark.long) for name in ("with  spaces", "a:b")), "ünïcødé ☃", "quotes'\"$HOME"],
)
def test_a_state_folder_with_an_odd_name(
    atoll: Atoll, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("ATOLL_HOME", str(tmp_path / name))
    (tmp_path / "work").mkdir()
    (tmp_path / "work/file").write_text("brought")
    task = task_file(
        tmp_path / "task.yaml",
        f"workdir: {tmp_path}/work\nfile_mounts: {{/srv/atoll-test: {tmp_path}/work/file}}\nnum_nodes: 2\n"
        'setup: echo set up\nrun: cat file; cat /srv/atoll-test; test "$PWD" = "$HOME/sky_workdir"',
    )
    code, out, err = atoll("launch", "-c", "t", task)
    assert (code, err) == (0, "")
    assert out.count("brought") == (4 if isolation().command else 2)
    assert out.count("set up") == 2
    lifecycle.down("t")


def test_from_a_folder_that_is_gone(atoll: Atoll, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert atoll("launch", "-c", "t", "echo works")[0] == 0
    assert atoll("exec", "t", "echo works")[0] == 0
    assert "works" in atoll("logs", "t")[1]
    code, _, err = atoll("launch", "-c", "t", "--workdir", ".", "echo")
    assert code == 2
    assert len(err.splitlines()) == 1
    monkeypatch.chdir(tmp_path)


def test_python_and_torchrun_come_from_one_environment(
    atoll: Atoll, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(folder: Path, *programs: str) -> str:
        (folder / "bin").mkdir(parents=True)
        for name in programs:
            (folder / "bin" / name).write_text(f"#!/bin/sh\necho {name} of {folder.name}\n")
            (folder / "bin" / name).chmod(0o755)
        return str(folder)

    def told() -> list[str]:
        code, out, _ = atoll("exec", "t", "python; torchrun")
        assert code == 0
        return [line.partition(") ")[2] for line in out.splitlines() if line.startswith("(task")]

    both = ("python", "torchrun")
    on_path, later, active = (made(tmp_path / name, *both) for name in ("on-path", "later", "active"))
    monkeypatch.setenv("PATH", f"{on_path}/bin:{later}/bin:/usr/bin:/bin")
    assert atoll("launch", "-c", "t", "true")[0] == 0
    assert told() == ["python of on-path", "torchrun of on-path"]
    monkeypatch.chdir(tmp_path)
    made(tmp_path / ".venv", *both)
    assert told() == ["python of .venv", "torchrun of .venv"]
    monkeypatch.setenv("VIRTUAL_ENV", active)
    assert told() == ["python of active", "torchrun of active"]
    monkeypatch.setenv("VIRTUAL_ENV", later)  # which is on PATH, behind another one
    assert told() == ["python of later", "torchrun of later"]


def test_torchrun_of_an_environment_that_was_not_activated(
    atoll: Atoll, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(Path(sys.executable).parent)
    (tmp_path / "bin").mkdir()
    for name in ("bash", "which", "unshare", "nsenter", "env"):  # as on Debian, which has no `python`
        (tmp_path / "bin" / name).symlink_to(shutil.which(name) or name)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    code, out, _ = atoll("launch", "-c", "t", "which torchrun python")
    assert code == 0
    assert [line.partition(") ")[2] for line in out.splitlines() if line.startswith("(task")] == [
        f"{folder}/torchrun",
        f"{folder}/python",
    ]


def test_names(atoll: Atoll, home: Path) -> None:
    for name in ("a.b", "a_b", "A-1"):
        code, out, _ = atoll("launch", "-c", name, "hostname")
        assert code == 0
        assert f"{name}-head" in out or "share" in out
    for name in ("träin", "-x", "a b", ".hidden", "a..", "", "x" * 80):
        code, out, err = atoll("launch", "-c", name, "true")
        assert code in (2, 100), name
        assert len((out + err).splitlines()) <= 8
    code, _, err = atoll("status", "A_b")
    assert code == 102
    assert "did you mean 'a_b'" in err
    assert atoll("stop", "a*")[0] == 0
    assert [row["status"] for row in json.loads(atoll("status", "-o", "json")[1])] == ["UP", "STOPPED", "STOPPED"]
    assert atoll("down", "-a")[1].count("is down") == 3
    assert atoll("status", "-o", "json")[1] == "[]\n"


# ------------------------------------------------------------------------------------------------------- Python
def test_jobs_from_threads_as_in_a_notebook(tmp_path: Path) -> None:
    seen: dict[str, object] = {}

    def cell(name: str) -> None:
        job = sky.launch(sky.Task(run=f"echo in {name}; sleep 0.1; exit 2"), name)
        seen[name] = (job.wait(60), job.status, job.exit_code, f"in {name}\n" in job.logs())
        slow = sky.exec(sky.Task(run="sleep 60"), name)
        slow.cancel()
        seen[f"{name} cancelled"] = slow.wait(60)

    threads = [threading.Thread(target=cell, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failed, cancelled = sky.JobStatus.FAILED, sky.JobStatus.CANCELLED
    assert seen == {
        **dict.fromkeys(("one", "two"), (failed, failed, 2, True)),
        **dict.fromkeys(("one cancelled", "two cancelled"), cancelled),
    }


def test_a_script_that_starts_a_job_and_leaves(atoll: Atoll, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import atoll as sky\n"
        f"task = sky.Task.from_yaml({str(tmp_path / 'task.yaml')!r})\n"
        "print(sky.launch(task, 't', infra='local').id)\n"
    )
    task_file(tmp_path / "task.yaml", "run: sleep 0.5; echo went on")
    env = {**os.environ, "PYTHONPATH": SOURCE_ROOT}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=env, timeout=60)
    assert (done.stdout, done.stderr) == ("1\n", "")
    code, out, _ = atoll("logs", "t")
    assert code == 0
    assert "went on" in out


@pytest.mark.parametrize("own_network", ["1", "0"])
def test_local_clusters_reach_each_other_at_the_address_that_status_prints(
    atoll: Atoll, monkeypatch: pytest.MonkeyPatch, own_network: str
) -> None:
    monkeypatch.setenv("ATOLL_NETWORK_NAMESPACE", own_network)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert atoll("launch", "-d", "-c", "lighthouse", f"exec python -m http.server -b 0.0.0.0 {port}")[0] == 0
    ip = atoll("status", "--ip", "lighthouse")[1].strip()
    connect = f"for i in $(seq 100); do (: < /dev/tcp/{ip}/{port}) 2>/dev/null && exit 0; sleep 0.05; done; exit 1"
    try:
        assert atoll("launch", "-c", "replica", f"bash -c '{connect}'")[0] == 0
    finally:
        atoll("down", "-y", "lighthouse", "replica")
