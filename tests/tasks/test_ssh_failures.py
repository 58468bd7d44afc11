"""Tasks on hosts of the testbed when something goes wrong: named in time, and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from testbed.fixtures import MakeBed
from testbed.hosts import Host, Testbed

pytestmark = [pytest.mark.serial, pytest.mark.long, pytest.mark.timeout(300)]
ATOLL = str(Path(sys.executable).parent / "atoll")
PYTHON = os.path.realpath(sys.executable)  # not of an environment that has torch, which a preflight would try
Run = Callable[..., "Running"]
SUPERVISED = ("here", "on the head")


def declare(name: str, hosts: list[str], **settings: object) -> None:
    """``[ssh.NAME]`` in config.toml, beside those that are there."""
    lines = [f"{key} = {json.dumps(value)}" for key, value in {"python": PYTHON, **settings}.items()]
    with Path(os.environ["ATOLL_HOME"], "config.toml").open("a") as file:
        file.write("\n".join([f"[ssh.{name}]", f"hosts = {json.dumps(hosts)}", *lines, ""]))


def trust(bed: Testbed) -> None:
    """Every host's user may log in to every other host, as labs have it; their home is shared."""
    there = bed.folder / "home" / "sky" / ".ssh"
    there.mkdir(exist_ok=True)
    for name in ("id_ed25519", "known_hosts"):
        shutil.copy(bed.home / ".ssh" / name, there / name)
    bed.hosts[0].run("chown -R sky:sky /home/sky/.ssh && chmod 700 /home/sky/.ssh && chmod 600 /home/sky/.ssh/*")


def atoll(*words: str, code: int = 0, timeout: float = 100, cwd: Path | None = None) -> str:
    done = subprocess.run([ATOLL, *words], capture_output=True, text=True, timeout=timeout, cwd=cwd)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


class Running:
    """A command that goes on, and what it has said so far."""

    def __init__(self, path: Path, *words: str) -> None:
        self._path = path
        with path.open("wb") as out:
            self.process = subprocess.Popen([ATOLL, *words], stdout=out, stderr=out, start_new_session=True)

    @property
    def said(self) -> str:
        return self._path.read_text(errors="replace")

    def says(self, pattern: str, seconds: float = 60.0) -> float:
        """Wait until it does; returns how long that took."""
        began = time.monotonic()
        while not re.search(pattern, self.said):
            assert time.monotonic() < began + seconds, f"not within {seconds:g} s: {pattern}\n{self.said}"
            time.sleep(0.05)
        return time.monotonic() - began

    def ends(self, code: int, seconds: float = 60.0) -> str:
        assert self.process.wait(seconds) == code, self.said
        return self.said


def eventually(condition: object, what: str, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]  # any callable
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.1)


def nothing_runs_on(*hosts: Host) -> None:
    for host in hosts:
        with contextlib.suppress(AssertionError):
            eventually(lambda host=host: not host.command_lines(), "")
        assert host.command_lines() == [], host.name
        assert host.run("find /tmp -mindepth 1 -maxdepth 1 -name 'atoll-*'").split() in ([], ["/tmp/atoll-2000"])


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Starts commands, and ends those that go on after the test."""
    begun: list[Running] = []

    def begin(*words: str) -> Running:
        begun.append(Running(tmp_path / f"said-{len(begun)}", *words))
        return begun[-1]

    yield begin
    for each in begun:
        if each.process.poll() is None:
            each.process.kill()
            each.process.wait()


@pytest.fixture(params=SUPERVISED)
def lab(request: pytest.FixtureRequest, make_bed: MakeBed) -> Iterator[Testbed]:
    """Three hosts; afterwards nothing of ours runs on any that is alive."""
    bed = make_bed(3)
    if request.param != "here":
        trust(bed)
    yield bed
    nothing_runs_on(*(host for host in bed.hosts if host.pids()))


@pytest.mark.long
def test_hosts_that_lose_power_or_freeze_are_named_in_time(lab: Testbed, run: Run) -> None:
    head, dying, freezing = lab.hosts
    declare("power", ["h1", "h2"], grace_s=2)
    declare("ice", ["h1", "h3"], grace_s=2, max_restarts_on_lost_nodes=0)
    job = "echo it runs; test $SKYPILOT_NODE_RANK = 0 && setsid sleep 1000 & sleep 1000"
    jobs = []
    for name in ("power", "ice"):
        words = ["launch", "-c", name, "--infra", f"ssh/{name}", "--num-nodes", "2", job]
        jobs.append(run(*words))
    for each in jobs:
        each.says(r"\(worker1, rank=1, .*it runs")
        each.says(r"\(head, rank=0, .*it runs")
    dying.power_off()
    freezing.freeze()
    began = time.monotonic()
    for each, name in zip(jobs, ("h2", "h3"), strict=True):
        each.says(rf"{name} \(node 1\) has not been heard for \d+ s", 20)
    assert time.monotonic() - began < 20
    for each, name in zip(jobs, ("h2", "h3"), strict=True):
        each.says(rf"worker1 was lost: no connection to {name} for 2 s.*; stopping the others", 20)
    jobs[0].says("Restarting in 1 s", 20)
    jobs[1].ends(100)
    eventually(lambda: not any("sleep 1000" in line for line in head.command_lines()), "the others are stopped")
    atoll("cancel", "power", "-y", "-a")
    jobs[0].ends(103)
    nothing_runs_on(head)
    freezing.thaw()
    nothing_runs_on(freezing)


@pytest.mark.long
def test_a_cut_shorter_than_the_grace_kills_nothing_and_no_line_is_lost(lab: Testbed, run: Run) -> None:
    declare("lab", ["h1", "h2"], grace_s=60)
    job = "i=0; until [ -e ~/healed ]; do i=$((i + 1)); echo line $i; sleep 0.1; done; echo last $i"
    launched = run("launch", "-c", "c", "--infra", "ssh/lab", "--num-nodes", "2", job)
    launched.says("rank=1.* line 5\n")
    followed = run("logs", "c", "--tail", "2")
    only = run("logs", "c", "--rank", "1")
    followed.says(r"line \d+\n")
    for host in lab.hosts[:2]:
        host.cut()
    time.sleep(8)  # longer than a link is kept that says nothing
    logs = [
        place / "clusters/c/jobs/1/run.log"
        for place in (Path(os.environ["ATOLL_HOME"]), lab.folder / "home/sky/.atoll")
    ]
    log = next(each for each in logs if each.exists())
    eventually(lambda: "h2 (node 1) has not been heard for" in log.read_text(), "the silence is told")
    for host in lab.hosts[:2]:
        host.heal()
    lab.hosts[0].run("touch /home/sky/healed")
    said = launched.ends(0)
    last = {}
    for rank in (0, 1):
        last[rank] = int(re.search(rf"rank={rank}, .* last (\d+)\n", said)[1])  # type: ignore[index]
        lines = [int(each) for each in re.findall(rf"rank={rank}, .* line (\d+)\n", said)]
        assert lines == [*range(1, last[rank] + 1)], said
    assert "h2 (node 1) has not been heard for" in said
    for watcher, which in ((followed, (0, 1)), (only, (1,))):
        watched = watcher.ends(0)
        for rank in which:
            lines = [int(each) for each in re.findall(rf"rank={rank}, .* line (\d+)\n", watched)]
            assert lines == [*range(lines[0], last[rank] + 1)], watched
    assert "rank=0" not in only.said


@pytest.mark.long
def test_a_node_that_is_back_is_taken_up_again_at_the_same_task_id(lab: Testbed, run: Run) -> None:
    declare("lab", ["h1", "h2"], grace_s=1)
    tried = "~/tried-$SKYPILOT_NODE_RANK"
    job = f"echo id $SKYPILOT_TASK_ID; test -e {tried} && exit 0; touch {tried}; sleep 1000"
    launched = run("launch", "-c", "c", "--infra", "ssh/lab", "--num-nodes", "2", job)
    launched.says("rank=1.* id ")
    launched.says("rank=0.* id ")
    lab.hosts[1].cut()
    launched.says("worker1 was lost")
    lab.hosts[1].heal()
    said = launched.ends(0)
    assert len(re.findall(" id ", said)) == 4
    assert len(set(re.findall(r" id (\S+)", said))) == 1
    assert json.loads(atoll("queue", "c", "-o", "json"))[0]["restarts"] >= 1


def test_what_is_wrong_with_hosts_is_one_line_each_with_the_fix(make_bed: MakeBed, run: Run) -> None:
    """One host has each fault; with a good host as the head."""
    bed = make_bed(8, shared_home=False)
    names = ("good", "refusing", "hanging", "old", "fixed", "full", "changed", "unknown")
    good, refusing, hanging, old, fixed, full, *_ = bed.hosts
    refusing.run("kill $(pgrep -ox sshd); while pgrep -x sshd; do sleep 0.01; done")
    hanging.run("echo sleep 1000 > /home/sky/.bashrc")
    old.run(
        "printf '#!/bin/sh\\necho Python 3.8.10\\n' > /usr/local/bin/old-python; chmod +x /usr/local/bin/old-python"
    )
    fixed.run("mount -o remount,ro /home")
    full.run("mount -t tmpfs -o size=64k,mode=1777 none /tmp; mount -t tmpfs -o size=64k,mode=777 none /home/sky")
    known = bed.home / ".ssh" / "known_hosts"
    keys = {line.split()[0]: line for line in known.read_text().splitlines()}
    keys[bed.hosts[6].addr] = keys[good.addr].replace(good.addr, bed.hosts[6].addr)
    del keys[bed.hosts[7].addr]
    known.write_text("\n".join(keys.values()) + "\n")
    (bed.folder / "work").mkdir()
    (bed.folder / "work" / "data").write_bytes(b"x" * 100_000)
    rsync = fixed.run("which rsync || true").strip()
    if rsync:  # nobody needs it there
        fixed.run(f"mount --bind /dev/null {rsync}")
    for name, host in zip(names, bed.hosts, strict=True):
        declare(name, [*dict.fromkeys(["h1", host.name])])
    old_python = "/usr/local/bin/old-python"
    declare("ancient", [old.name], python=old_python)
    declare("stranger", ["h1", "stranger@h1"])
    declare("behind", ["h1"], jump="h2")
    expected = {
        "refusing": r"h2: refuses connections: does sshd run there, and on this port\?",
        "hanging": r"h3: hangs at login: no answer within \d+ s. Try `ssh h3`",
        "ancient": rf"h4: has Python 3.8.10 as {old_python}, and Atoll needs 3.11 or newer there: install one",
        "full": r"h6: could not write \S+ there: .*No space left on device. Free some space there",
        "changed": r"h7: its host key has CHANGED.*SHA256:\S+\. .*`ssh-keygen -R 10.77.0.17`, then `ssh h7` once",
        "unknown": r"h8: its host key is not known: its fingerprint is SHA256:\S+ .*accept it: `ssh h8` once",
        "stranger": r"stranger@h1: does not let stranger in with the keys .*`ssh-copy-id stranger@h1`",
        "behind": r"h1: its jump host can't be used: h2: refuses connections",
    }
    words = ("--workdir", str(bed.folder / "work"), "cat data | wc -c")

    def begin(name: str) -> Running:
        num = "1" if name in ("ancient", "behind") else "2"
        return run("launch", "-c", name, "--infra", f"ssh/{name}", "--num-nodes", num, *words)

    tried = {"hanging": begin("hanging")}  # for long; the others meanwhile, no more at once than a small machine bears
    others = [*(name for name in expected if name not in tried), "fixed"]
    for pair in zip(others[::2], others[1::2], strict=True):
        tried |= {name: begin(name) for name in pair}
        for name in pair:
            tried[name].process.wait(100)
    for name, pattern in expected.items():
        said = tried[name].ends(100)
        assert re.search(f"atoll: {pattern}", said), f"{name}: {said}"
        assert "Traceback" not in said
        assert said.count("\n") <= 4, said
    said = tried["fixed"].ends(0)  # its home can't be written to: the files go elsewhere, and it is told
    assert len(re.findall("rank=[01], .*100000\n", said)) == 2, said
    assert "sky_workdir could not be made" in said
    assert "it is at /tmp/atoll-2000/clusters/fixed" in said
    assert json.loads(atoll("status", "-o", "json"))[0]["name"] == "fixed"
    checked = atoll("check", "ssh/refusing", "ssh/ancient", code=100)
    assert "✓ ssh/refusing: h1: Python 3." in checked
    assert "✗ ssh/refusing: h2: refuses connections" in checked
    assert "✗ ssh/ancient: h4: has Python 3.8.10" in checked
    assert "h1: no GPU" in atoll("gpus", "--infra", "ssh/good")
    bed.hosts[2].run("pkill -x sleep -u sky")
    atoll("down", "-y", "fixed")
    nothing_runs_on(*bed.hosts)


def test_a_port_that_is_blocked_is_named_with_both_addresses(bed: Testbed) -> None:
    declare("lab", ["h1", "h2"])
    wall = "add table inet f; add chain inet f i { type filter hook input priority 0; }; add rule inet f i"
    bed.hosts[0].run(f"nft '{wall} ip saddr 10.77.0.12 tcp dport 1024-65535 ct state new reject'")
    said = atoll("launch", "-c", "c", "--infra", "ssh/lab", "--num-nodes", "2", "true", code=100)
    assert re.search(
        r"h2: can't reach h1 at 10\.77\.0\.11:\d+ from 10\.77\.0\.12 \(.*\): open TCP 1024-65535 between", said
    )
    assert "Traceback" not in said
    nothing_runs_on(*bed.hosts)
    assert "c" not in os.listdir(Path(os.environ["ATOLL_HOME"], "clusters"))


def test_torchrun_killed_leaves_no_workers(bed: Testbed, run: Run) -> None:
    declare("lab", ["h1"])
    job = f"{sys.executable} -m torch.distributed.run --nproc-per-node 2 --no-python sleep 1000"
    launched = run("launch", "-c", "c", "--infra", "ssh/lab", job)
    host = bed.hosts[0]
    eventually(lambda: host.command_lines().count("sleep 1000") == 2, "the workers run", 100)
    host.run("pkill -9 -f '^[^ ]*python[^ ]* -m torch.distributed.run'")
    said = launched.ends(100)
    assert "rank 0 on head" in said
    assert "SIGKILL" in said or "137" in said
    nothing_runs_on(host)


def test_a_supervisor_on_the_head_that_is_killed_leaves_nothing(bed: Testbed) -> None:
    trust(bed)
    declare("lab", ["h1", "h2"], grace_s=60)
    job = "setsid sleep 1000 & while :; do echo a line; sleep 0.02; done"
    atoll("launch", "-d", "-c", "c", "--infra", "ssh/lab", "--num-nodes", "2", job)
    eventually(lambda: "RUNNING" in atoll("queue", "c"), "it runs", 60)
    bed.hosts[0].run("kill -9 $(cat /home/sky/.atoll/clusters/c/supervisor.lock)")
    nothing_runs_on(*bed.hosts)
    (row,) = json.loads(atoll("queue", "c", "-o", "json"))
    assert row["status"] == "FAILED_DRIVER"
    assert "its supervisor was killed" in row["reason"]
    assert "✗ Job 1 failed (status: FAILED_DRIVER)" in atoll("logs", "c", code=100)
    atoll("exec", "c", "--num-nodes", "2", "true")


def test_a_launch_that_is_killed_locks_nothing(bed: Testbed, tmp_path: Path, run: Run) -> None:
    declare("lab", ["h1", "h2"])
    work = tmp_path / "work"
    work.mkdir()
    (work / "large").write_bytes(os.urandom(30 << 20))
    for host in bed.hosts[:2]:  # how far it is, is told of the first that gets bytes: either
        host.slow(40)
    words = ("launch", "-c", "c", "--infra", "ssh/lab", "--num-nodes", "2", "--workdir", str(work))
    dying = run(*words, "true")
    dying.says("copying to the nodes")
    os.killpg(dying.process.pid, signal.SIGKILL)
    dying.ends(-9)
    for host in bed.hosts[:2]:
        host.run("tc qdisc del dev eth0 root")
    said = atoll(*words, "sha256sum large; touch ~/done-$SKYPILOT_NODE_RANK")
    assert len(set(re.findall(r"rank=\d, .*\) (\w{64})  large", said))) == 1
    said = run(*words, "sleep 1; echo well")
    said.says("Job submitted")
    os.killpg(said.process.pid, signal.SIGKILL)
    said.ends(-9)
    assert atoll("logs", "c").count(") well\n") == 2


@pytest.mark.long
def test_a_head_that_is_off_hinders_no_other_command(bed: Testbed, run: Run) -> None:
    trust(bed)
    declare("lab", ["h1", "h2"], grace_s=2)
    atoll(
        "launch", "-d", "-c", "c", "--infra", "ssh/lab", "--num-nodes", "2", "echo up; setsid sleep 1000 & sleep 1000"
    )
    watched, left = run("logs", "c"), run("logs", "c")
    for each in (watched, left):
        each.says("rank=1.* up\n")
    os.killpg(left.process.pid, signal.SIGINT)
    assert "Job 1 is still running" in left.ends(101, 15)
    bed.hosts[0].power_off()
    watched.says(r"the connection to the head of cluster c \(h1\) is lost", 45)
    os.killpg(watched.process.pid, signal.SIGINT)
    assert "Job 1 is still running" in watched.ends(101, 15)
    nothing_runs_on(bed.hosts[1])
    assert "the jobs are known on their heads; `atoll status --refresh`" in atoll("status", timeout=15)
    said = atoll("status", "--refresh", timeout=60)
    assert "atoll: cluster c: h1: " in said
    for words in (("logs", "c"), ("exec", "c", "true")):
        said = atoll(*words, code=100, timeout=60)
        assert "h1: " in said
        assert "Traceback" not in said
    for words in (("down", "c"), ("down", "--purge", "c")):
        said = atoll(*words, timeout=60)
        assert re.search("h1: (does not answer|can.t be reached).* /home/sky/.atoll/clusters/c stays there", said), said
        assert "Cluster c is down" in said
        assert "h2" not in said


def test_a_head_from_which_everything_was_removed_hinders_nothing(bed: Testbed) -> None:
    trust(bed)
    declare("lab", ["h1", "h2"])
    words = ("launch", "-c", "c", "--infra", "ssh/lab", "--num-nodes", "2", "echo well")
    clear = "rm -rf /home/sky/.atoll"
    atoll(*words)
    bed.hosts[0].run(clear)
    said = atoll("queue", "c")
    assert "nothing is left of cluster c on its head: /home/sky/.atoll/clusters/c was removed there" in said
    assert "nothing is left of cluster c" in atoll("logs", "c", code=102)
    assert atoll(*words).count(") well\n") == 2
    assert atoll("logs", "c", "1").count(") well\n") == 2
    bed.hosts[0].run(clear)
    atoll("down", "c", "-y")
    atoll(*words)
    bed.hosts[0].run(clear)
    assert "is down and forgotten" in atoll("down", "--purge", "c", "-y")
    atoll(*words)
    assert "jobs.db" in bed.hosts[0].run("ls /home/sky/.atoll/clusters/c")
    atoll("down", "--purge", "c", "-y")
    assert bed.hosts[0].run("ls /home/sky/.atoll/clusters 2>/dev/null || true") == ""


def test_agents_of_a_supervisor_that_is_no_more_end_before_the_next_ones_start(bed: Testbed) -> None:
    """As where the head was cut off from a host when its supervisor was killed."""
    trust(bed)
    declare("lab", ["h1", "h2"], grace_s=90)
    head, other = bed.hosts
    atoll("launch", "-d", "-c", "c", "--infra", "ssh/lab", "--num-nodes", "2", "echo up; exec sleep 1000")
    eventually(lambda: "rank=1" in atoll("logs", "c", "--no-follow", code=101), "it runs", 60)
    other.cut()
    head.run("kill -9 $(cat /home/sky/.atoll/clusters/c/supervisor.lock); pkill -9 -u sky -x ssh || true")
    time.sleep(1)
    other.heal()
    assert "sleep 1000" in other.command_lines(), "the host does not know yet"
    said = atoll("exec", "c", "--num-nodes", "2", "pgrep -fx 'sleep 1000' || echo alone")
    assert said.count(") alone\n") == 2, said
    nothing_runs_on(*bed.hosts)


def stopped(*hosts: Host) -> None:
    """Stop, and leave so, what the user runs on hosts, but not what was started by a job."""
    for host in hosts:
        for pid in host.pids():
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes()
                if b"atoll.agent" in line and not line.startswith(b"sshd"):
                    os.kill(pid, signal.SIGSTOP)


@pytest.mark.parametrize("supervised", SUPERVISED)
def test_agents_that_are_stopped_end_with_their_job_at_down_and_before_the_next_job(
    bed: Testbed, supervised: str
) -> None:
    head, other = bed.hosts
    state = Path(os.environ["ATOLL_HOME"])
    if supervised != "here":
        trust(bed)
        state = bed.folder / "home" / "sky" / ".atoll"
    declare("lab", ["h1", "h2"], grace_s=90)
    job = "pgrep -cfx 'sleep 1000'; echo up; setsid sleep 1000 & exec sleep 1000"
    words = ("launch", "-d", "-c", "c", "--infra", "ssh/lab", "--num-nodes", "2", job)

    def begin() -> None:
        atoll(*words)
        eventually(lambda: "rank=1" in atoll("logs", "c", "--no-follow", code=101), "it runs", 60)
        assert re.findall(r"rank=\d, .*\) (\d+)\n", atoll("logs", "c", "--no-follow", code=101)) == ["0", "0"]
        stopped(other)
        time.sleep(1)

    def kill_supervisor() -> None:
        lock = state / "clusters/c/supervisor.lock"
        if supervised == "here":
            os.kill(int(lock.read_text()), signal.SIGKILL)
        else:
            head.run("kill -9 $(cat /home/sky/.atoll/clusters/c/supervisor.lock)")

    begin()
    atoll("cancel", "c", "-a", "-y")
    nothing_runs_on(other)
    begin()
    kill_supervisor()
    assert "FAILED_DRIVER" in atoll("queue", "c")
    nothing_runs_on(other)
    begin()
    kill_supervisor()
    assert "Cluster c is down" in atoll("down", "c", "-y")
    assert other.command_lines() == []
    begin()
    kill_supervisor()
    for folder in {state, Path(os.environ["ATOLL_HOME"])}:
        shutil.rmtree(folder / "clusters")
    begin()  # beside nothing, in a cluster that was made anew
    atoll("down", "c", "-y")
    nothing_runs_on(*bed.hosts)


def test_what_is_said_names_the_cause_and_what_helps(bed: Testbed, tmp_path: Path) -> None:
    declare("lab", ["h1", "h2"])
    words = ("launch", "-c", "c", "--infra", "ssh/lab", "--num-nodes", "2", "echo well > ~/made-$SKYPILOT_NODE_RANK")
    assert "(Host key verification failed; there: `ssh sky@10.77.0.12` once). Keep" in atoll(*words)
    source, dest = "c:made-0", str(tmp_path / "made")
    assert f"{source} → {dest}: 5 bytes" in atoll("cp", source, dest)
    assert f"{dest} → c/worker1:again: 5 bytes" in atoll("cp", dest, "c/worker1:again")
    row = json.loads(atoll("cp", dest, "c:again", "-o", "json"))
    assert row == {"source": dest, "dest": "c:again", "copied": "5 bytes"}
    said = atoll("cp", "c:nothing", dest, code=100)
    assert re.search(r"atoll: c:nothing can't be copied to \S+: .*nothing.*: No such file or directory", said)
    assert "c:x/y/z: " in atoll("cp", dest, "c:x/y/z", code=100)
    assert "there is no such file" in atoll("cp", str(tmp_path / "nothing"), "c:there", code=2)


def test_nodes_that_share_an_address_are_told_apart(bed: Testbed, tmp_path: Path) -> None:
    declare("twice", ["h1", "sky@10.77.0.11"])
    task = tmp_path / "task.yaml"
    task.write_text("num_nodes: 2\nsetup: echo set up\nrun: 'true'\n")
    said = atoll("launch", "-c", "t", "--infra", "ssh/twice", str(task))
    for name in ("head", "worker1"):
        assert re.search(rf"\(setup pid=\d+, ip=10\.77\.0\.11, {name}\) set up", said), said


def test_a_warmup_longer_than_the_run_is_refused_before_hosts_are_asked() -> None:
    words = ("--infra", "ssh/nowhere", "--train.steps", "4", "--schedule.warmup", "6")
    words = (*words, "--data.path", "x.txt", "--data.tokenizer", "bytes")
    assert "6 + 0 steps, longer than the run of 4" in atoll("train", "llama3_debug", *words, code=2)
