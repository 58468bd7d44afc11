"""A cluster's nodes on this machine as the supervisor gets them: made, shared out, gone with whoever started them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest
from tests.pools import NAMESPACE, SOURCE_ROOT, eventually, mode, namespaces_work
from tests.talking import BASE_ENV, Talk

import leaks
from atoll.agent import orphans
from atoll.agent.process_tree import command_line
from atoll.core.errors import AtollError, ProvisionError
from atoll.tasks import reaper, supervisor
from atoll.tasks.control import LocalControl
from atoll.tasks.nodes import ClusterNodes, StartedNode
from atoll.tasks.spec import ClusterSpec, ClusterStatus, JobStatus
from atoll.wire import frames
from local_cluster import LocalCluster

__all__ = ["mode"]


PYTHON = sys._base_executable  # type: ignore[attr-defined]  # a clone and its .venv may lie below /tmp


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Callable[..., ClusterNodes]]:
    """Opens the nodes of a cluster by its name and number of nodes."""
    with contextlib.ExitStack() as stack:

        def make(name: str = "train", num_nodes: int = 2, **more: object) -> ClusterNodes:
            spec = ClusterSpec(name, num_nodes=num_nodes, **more)  # type: ignore[arg-type]  # fields by name
            nodes = ClusterNodes(spec, tmp_path / "clusters" / name)
            nodes.open()
            stack.callback(nodes.close)
            return nodes

        yield make


@contextlib.contextmanager
def started(nodes: ClusterNodes, *numbers: int) -> Iterator[list[tuple[StartedNode, Talk]]]:
    """Some nodes of a cluster, and our ends of their channels."""
    with contextlib.ExitStack() as stack:
        found = []
        for number in numbers:
            node = nodes.start(1, number, 0)
            stack.callback(node.handle.stop)
            found.append((node, Talk(node.handle.channel)))
        yield found


def test_what_they_say_depends_on_what_can_be_had(mode: str, tmp_path: Path) -> None:
    nodes = ClusterNodes(ClusterSpec("train", num_nodes=3), tmp_path / "clusters" / "train")
    lines = nodes.open()
    try:
        assert nodes.addresses == ("127.0.0.1", "127.0.0.2", "127.0.0.3")
        if mode == NAMESPACE:
            assert not any("processes" in line for line in lines)
            assert not nodes.shared_networks or lines
        else:
            assert lines == [
                "nodes share processes, host name and /tmp with this machine (ATOLL_PID_NAMESPACE=0): pkill and pgrep "
                "are kept to a node's own processes, killall is not",
                "nodes share ports with this machine, and jobs that fix the same one wait: ATOLL_PID_NAMESPACE=0",
            ]
            assert set(nodes.shared_networks) == {"machine"}
    finally:
        nodes.close()


def test_each_has_a_home_of_its_own_that_stays(mode: str, source: Callable[..., ClusterNodes], tmp_path: Path) -> None:
    nodes = source()
    for _ in range(2):
        with started(nodes, 0, 1) as both:
            for number, (node, talk) in enumerate(both):
                assert node.plan.addr == nodes.addresses[number]
                assert node.plan.home == str(tmp_path / "clusters" / "train" / "nodes" / str(number) / "home")
                assert os.stat(node.plan.home).st_mode & 0o777 == 0o700
                assert node.plan.workdir == f"{node.plan.home}/sky_workdir"
                assert talk.run("pwd; echo $HOME; echo x >> ~/kept", cwd=node.plan.workdir, env=node.env).split() == [
                    node.plan.workdir,
                    node.plan.home,
                ]
                assert talk.run("touch $TMPDIR/some; echo $TMPDIR", 1, env=node.env).strip() == (
                    "/tmp" if mode == NAMESPACE else node.tmp
                )
            assert both[0][0].env["NCCL_HOSTID"] == both[1][0].env["NCCL_HOSTID"] != ""
        assert not any(os.path.exists(node.tmp) for node, _ in both)
        assert all("train" not in os.path.basename(node.tmp) for node, _ in both)
    assert (Path(both[0][0].plan.home) / "kept").read_text() == "x\nx\n"


def test_names_of_clusters_that_are_too_long_for_a_host_still_tell_nodes_apart(
    source: Callable[..., ClusterNodes],
) -> None:
    if not namespaces_work():
        pytest.skip("this kernel refuses namespaces: nodes have no host names of their own")
    nodes = source("c" * 63, 12)
    with started(nodes, 0, 11) as found:
        names = [talk.run("hostname").strip() for _, talk in found]
    assert names == ["c" * 58 + "-head", "c" * 54 + "-worker11"]


# ---------------------------------------------------------------------------------------------------- accelerators
def test_simulated_ones_are_said_and_hidden(source: Callable[..., ClusterNodes]) -> None:
    nodes = source(accelerator="L4", num_accelerators=2, simulated=True)
    with started(nodes, 1) as ((node, talk),):
        assert talk.run("echo $ATOLL_SIMULATED,$CUDA_VISIBLE_DEVICES,", env=node.env) == "1,,\n"


# --------------------------------------------------------------------------------------------------------- networks
SERVES = """
import socket, sys, time
for number in (1, 2):
    held = socket.create_server((f"127.0.0.{number}", 29500)) if number == 1 else held
socket.create_connection(("127.0.0.1", 29500)).close()
print(socket.gethostbyname(socket.gethostname()), flush=True)
time.sleep(300)
"""


def test_two_clusters_use_the_same_port_side_by_side(source: Callable[..., ClusterNodes]) -> None:
    clusters = [source("one"), source("two")]
    if clusters[0].shared_networks:
        pytest.skip("no network namespaces here: the second job waits, which the supervisor's tests cover")
    with started(clusters[0], 0, 1) as ones, started(clusters[1], 0) as twos:
        for _, talk in (ones[0], twos[0]):
            talk.start(f"exec {PYTHON} -c '{SERVES}'")
            assert talk.line() == "127.0.0.1"
        # And the nodes of one cluster share its network.
        reach = 'import socket; socket.create_connection(("127.0.0.1", 29500)); print("reached")'
        assert ones[1][1].run(f"{PYTHON} -c '{reach}'") == "reached\n"


@pytest.mark.parametrize("which", ["_slirp", "_holder"])
def test_a_network_that_ended_is_made_anew_for_later_jobs(source: Callable[..., ClusterNodes], which: str) -> None:
    nodes = source()
    if nodes.shared_networks:
        pytest.skip("no network namespaces here")
    with contextlib.ExitStack() as stack:
        running = nodes.start(1, 0, 0)
        stack.callback(running.handle.stop)
        old = Talk(running.handle.channel)
        old.next(frames.AGENT)  # it is in the network by now
        first = nodes._session._network  # type: ignore[attr-defined]  # that of local nodes
        getattr(first, which).kill()
        eventually(lambda: first is not None and first.fault, "seen")
        later = [nodes.start(2, number, 0) for number in (0, 1)]
        for node in later:
            stack.callback(node.handle.stop)
        new = [Talk(node.handle.channel) for node in later]
        notes = [note for talk in new for note in talk.next(frames.AGENT).meta["place"]["notes"]]
        assert len(notes) == 1
        assert "the cluster's network was created again: " in notes[0]
        assert "was killed by SIGKILL; jobs that still run in the old one" in notes[0]
        ask = "readlink /proc/self/ns/net; ip -brief link show tap0 2>/dev/null | wc -l"
        said = [talk.run(ask).split() for talk in (old, *new)]
        assert said[1] == said[2] != said[0]
        if shutil.which("ip"):
            assert said[1][1] == "1"


def test_environments_on_the_path_can_be_installed_into_and_the_rest_only_read(
    source: Callable[..., ClusterNodes], tmp_path: Path
) -> None:
    if not namespaces_work() or not str(tmp_path).startswith("/tmp/"):
        pytest.skip("needs a /tmp of its own, and this folder below the machine's")
    for name in ("venv/bin", "base/bin", "base/lib", "tools"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "venv/pyvenv.cfg").write_text(f"home = {tmp_path}/base/bin\n")
    nodes = source()
    node = nodes.start(1, 0, 0, (), (f"{tmp_path}/venv/bin", f"{tmp_path}/tools"))
    try:
        ask = (
            f"cd {tmp_path}; ls; ls base clusters/train clusters/train/nodes; touch venv/new ~/new; touch base/lib/new"
        )
        said = Talk(node.handle.channel).run(f"{ask} tools/new 2>&1 || true", env=node.env)
        assert said.split("\n\n")[0].split()[:4] == ["base", "clusters", "tools", "venv"]
        assert said.count("Read-only file system") == 2
        assert said.index("clusters/train:\nnodes") < said.index("clusters/train/nodes:\n0\n")
        assert "\n1\n" not in said
        assert (tmp_path / "venv/new").exists()
        assert Path(node.plan.home, "new").exists()
    finally:
        node.handle.stop()


# -------------------------------------------------------------------------------------------------- ends and failures
def test_a_node_whose_agent_was_killed_leaves_nothing(mode: str, source: Callable[..., ClusterNodes]) -> None:
    with started(source(), 0) as ((node, talk),):
        talk.start("setsid sleep 302 & echo up; sleep 302", env=node.env)
        talk.line()
        below = eventually(lambda: len(found := list(filter(_tagged, leaks.descendants()))) >= 3 and found, "3", 30)
        node.handle.process.kill()  # type: ignore[attr-defined]  # the agent, or unshare which takes it along
        with pytest.raises(EOFError):
            talk.next(frames.EXIT)
        assert "killed by SIGKILL" in str(node.handle.reason)
        node.handle.stop()
        eventually(lambda: not any(map(leaks.is_running, below)), "all of it gone")
        assert not os.path.exists(node.tmp)


def _tagged(pid: int) -> bool:
    try:
        return b"ATOLL_POOL_TAG=" in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def test_a_home_that_cannot_be_made_is_a_provision_error_with_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "clusters" / "train"
    folder.mkdir(parents=True)
    (folder / "nodes").write_text("no folder")
    nodes = ClusterNodes(ClusterSpec("train", num_nodes=2), folder)
    nodes.open()
    with contextlib.closing(nodes), pytest.raises(ProvisionError, match=r"Not a directory") as caught:
        nodes.start(1, 1, 0)
    assert caught.value.node == 1


@pytest.mark.long
def test_64_nodes_start_quickly(source: Callable[..., ClusterNodes]) -> None:
    nodes = source("many", 64)
    began = time.monotonic()
    with started(nodes, *range(64)) as found:
        for _, talk in found:
            talk.next(frames.AGENT, seconds=60)
        took_s = time.monotonic() - began
        for node, talk in found:
            talk.send(frames.START, meta={"argv": ["true"], "env": {**BASE_ENV, **node.env}, "cwd": "/"})
        assert all(talk.end(seconds=60)[0] == 0 for _, talk in found)
    assert took_s < 60, "64 agents in 3 s is the aim on an idle machine"


DRIVER = """
import os, select, sys
sys.path.insert(0, {root!r})
from pathlib import Path
from atoll.tasks.nodes import ClusterNodes
from atoll.tasks.spec import ClusterSpec
from atoll.wire import frames

nodes = ClusterNodes(ClusterSpec("train", num_nodes=2), Path(sys.argv[1], "clusters", "train"))
for line in nodes.open():
    print("note", line)
started = [nodes.start(1, number, 0) for number in (0, 1)]
script = sys.stdin.read()
for node in started:
    what = {{"argv": ["bash"], "env": {{**os.environ, **node.env}}, "cwd": node.plan.workdir}}
    frame = frames.pack(frames.START, meta={{**what, "script": {{"name": "run.sh", "text": script}}}})
    frames.send_all(node.handle.channel, frame)
parsers = {{node.handle.channel: (number, frames.Parser()) for number, node in enumerate(started)}}
while parsers:
    for channel in select.select(list(parsers), [], [])[0]:
        number, parser = parsers[channel]
        for frame in parser.feed(*frames.receive(channel)):
            if frame.kind == frames.LOG:
                for line in bytes(frame.parsed().rest).decode().splitlines():
                    print(number, line, flush=True)
            elif frame.kind == frames.EXIT:
                del parsers[channel]
for node in started:
    node.handle.stop()
nodes.close()
"""


def drive(folder: Path, script: str, *, prefix: tuple[str, ...] = (), python: str = PYTHON) -> subprocess.Popen[str]:
    """A driver of its own that runs a script on two nodes and prints what they say, each line with its node."""
    process = subprocess.Popen(
        [*prefix, python, "-I", "-c", DRIVER.format(root=SOURCE_ROOT), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    opened(process.stdin).write(script)
    opened(process.stdin).close()
    return process


def opened(end: IO[str] | None) -> IO[str]:
    assert end is not None
    return end


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_the_driver(mode: str, tmp_path: Path, number: int) -> None:
    with drive(tmp_path, "(setsid sleep 303 &); trap '' TERM; echo up; sleep 303") as driver:
        for _ in range(2):
            while not opened(driver.stdout).readline().endswith("up\n"):
                assert driver.poll() is None
        below = eventually(lambda: len(found := leaks.descendants(driver.pid)) >= 6 and found, "all of it runs", 30)
        driver.send_signal(number)
        driver.wait()
        eventually(lambda: not any(map(leaks.is_running, below)), "nodes, network and all they ran gone")
        eventually(lambda: not list(tmp_path.glob("atoll-*")), "their temporary files gone")


@contextlib.contextmanager
def frozen(home: Path, name: str = "train") -> Iterator[list[int]]:
    """What a supervisor of a local cluster left that was killed when its agents, and what holds them, were stopped."""
    cluster = LocalCluster.make(home, name)
    job = cluster.submit("setsid sleep 304 & echo up; exec sleep 304")
    cluster.wait_for(job, "up")
    below = eventually(lambda: len(found := cluster_processes(cluster)) >= 3 and found, "all of it runs")
    for pid in below:
        if "sleep" not in command_line(pid).decode():
            os.kill(pid, signal.SIGSTOP)
    os.kill(supervisor.pid_of(cluster.folder), signal.SIGKILL)
    eventually(lambda: not supervisor.is_running(cluster.folder), "its supervisor is gone")
    try:
        time.sleep(0.2)
        assert all(map(leaks.is_running, below)), "nothing of it ends by itself"
        yield below
    finally:
        for pid in filter(leaks.is_running, below):
            os.kill(pid, signal.SIGKILL)


def cluster_processes(cluster: LocalCluster) -> list[int]:
    """Its agents, and what comes before and after them."""
    needle = f"ATOLL_OWNER={reaper.owner_of(cluster.folder)}.".encode()
    found = []
    for pid in leaks.descendants():
        with contextlib.suppress(OSError):
            if needle in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(pid)
    return found


@pytest.mark.parametrize(
    "how",
    [pytest.param("queue", marks=pytest.mark.long), "down", "next", pytest.param("made anew", marks=pytest.mark.long)],
)
def test_what_is_stopped_ends_at_the_latest_before_the_next_job(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setenv("ATOLL_HOME", str(tmp_path))
    with frozen(tmp_path) as below:
        cluster = LocalCluster(tmp_path / "clusters/train", LocalControl(tmp_path / "clusters/train"))
        if how == "queue":
            assert cluster.control.job(1).status is JobStatus.FAILED_DRIVER
        elif how == "down":
            assert cluster.control.remove_nodes()[1] == []
        elif how == "next":
            assert cluster.run("echo next")[0] is JobStatus.SUCCEEDED
        else:
            shutil.rmtree(cluster.folder)
            cluster = LocalCluster.make(tmp_path)
            assert cluster.run("echo next")[0] is JobStatus.SUCCEEDED
        assert not any(map(leaks.is_running, below))
        cluster.wait_until_idle()


def test_only_what_is_this_clusters_of_this_home_and_machine_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, copy = tmp_path / "home", tmp_path / "copy"
    monkeypatch.setenv("ATOLL_HOME", str(home))
    with frozen(home, "train") as below:
        shutil.copytree(home, copy, ignore=shutil.ignore_patterns("socket", "nodes"))
        assert (copy / "id").read_text() == (home / "id").read_text() != ""
        others = [home / "clusters/train2", home / "clusters/trai", copy / "clusters/train"]
        for other in others:
            assert reaper.end_here(other) == []
        with monkeypatch.context() as elsewhere:  # which shares the folder
            elsewhere.setattr(os, "uname", lambda: types.SimpleNamespace(nodename="elsewhere"))
            assert reaper.end_here(home / "clusters/train") == []
        with monkeypatch.context() as another:
            another.setattr(os, "getuid", lambda: 12345)
            assert reaper.end_here(home / "clusters/train") == []
        # One that only looks like it, and one with the pid of another life.
        owner = reaper.owner_of(home / "clusters/train")
        strange = subprocess.Popen(
            ["sleep", "305"], env={"ATOLL_OWNER": f"{owner}0.x", "NOT_ATOLL_OWNER": f"{owner}.x"}
        )
        below.append(strange.pid)
        assert orphans.end(f"{owner}.ffffffff") == []
        assert all(map(leaks.is_running, below))
        orphans.end(owner, but=owner)
        assert all(map(leaks.is_running, below))
        assert reaper.end_here(home / "clusters/train") == []
        assert [pid for pid in below if leaks.is_running(pid)] == [strange.pid]
        strange.kill()
        strange.wait()


def test_what_cannot_be_ended_is_named_and_the_cluster_is_not_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uninterruptible sleep can't be had at will: signals that do nothing stand for it."""
    monkeypatch.setattr(orphans, "_KILL_S", 0.3)
    cluster = LocalCluster.make(tmp_path)
    owner = reaper.owner_of(cluster.folder)
    left = subprocess.Popen(["sleep", "306"], env={"ATOLL_OWNER": f"{owner}.x.y"})
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda *_: None)
    named = rf"process {left.pid} \(sleep 306\) on {os.uname().nodename}"
    with pytest.raises(AtollError, match=f"cluster train: not even SIGKILL ends {named}"):
        cluster.control.remove_nodes()
    assert cluster.control.cluster().status is ClusterStatus.UP
    nodes = ClusterNodes(ClusterSpec("train"), cluster.folder)
    with pytest.raises(ProvisionError, match=f"not even SIGKILL ends what an earlier job left: {named}"):
        nodes.open()
    monkeypatch.undo()
    assert cluster.control.remove_nodes()[1] == []
    assert left.wait(5) == -signal.SIGKILL


NOBODY = ("setpriv", "--reuid", "nobody", "--regid", "nogroup", "--clear-groups")
# Everybody may use /dev/net/tun on the usual machine; some keep it to root.
TUN = "mount -t tmpfs none /dev/net && mknod -m 666 /dev/net/tun c 10 200 && exec"


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that nobody can work in."""
    folder = Path(tempfile.mkdtemp(prefix="atoll-test-", dir="/var/tmp"))
    os.chmod(folder, 0o777)
    yield folder
    shutil.rmtree(folder)


def nobodys_python() -> str:
    """An interpreter that other users can run."""
    code = f"import subprocess, sys; assert sys.version_info >= (3, 11); open({__file__!r})"
    again = "subprocess.run([PYTHON, '-c', ''], check=True)"
    for candidate in (PYTHON, "/usr/bin/python3"):
        command = [*NOBODY, candidate, "-c", f"{code}; {again}"]
        if subprocess.run(command, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL).returncode == 0:
            return candidate
    pytest.skip("no Python 3.11 here that another user may run with these files")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become nobody")
@pytest.mark.parametrize("tun", [False, True])
def test_a_user_without_rights_gets_the_same(mode: str, public: Path, tun: bool) -> None:
    script = """
echo "$(hostname) $(id -un) $(ls -d /proc/[0-9]* 2>/dev/null | wc -l) $TMPDIR"
grep -h CapEff /proc/self/status
echo "$HOME" > ~/proof
touch /tmp/atoll-test-of-$$ && rm /tmp/atoll-test-of-$$
ip -brief link show tap0 2>&1
"""
    prefix = ("unshare", "--mount", "sh", "-c", f'{TUN} "$@"', "sh", *NOBODY) if tun else NOBODY
    with drive(public, script, prefix=prefix, python=nobodys_python()) as driver:
        said = opened(driver.stdout).read()
    assert driver.returncode == 0
    for number, name in enumerate(("train-head", "train-worker1")):
        mine = [line[2:] for line in said.splitlines() if line.startswith(f"{number} ")]
        hostname, user, num_processes, tmp = mine[0].split()
        assert user == "nobody"
        if mode == NAMESPACE:
            assert (hostname, tmp) == (name, "/tmp")
            assert int(num_processes) < 8
        else:
            assert hostname == os.uname().nodename
    assert said.count("CapEff:\t0000000000000000") == 2
    if mode == NAMESPACE and tun:
        assert said.count("tap0") == 2
        assert "note" not in said
    else:
        assert "note nodes share ports with this machine" in said
    nodes = public / "clusters" / "train" / "nodes"
    proofs = sorted(path.read_text().strip() for path in nodes.glob("*/home/proof"))
    assert proofs == [str(nodes / str(number) / "home") for number in (0, 1)]
    assert not list(public.glob("atoll-*"))


@pytest.mark.parametrize("what", ["folder", "loop"])
def test_a_home_whose_id_cannot_be_used_is_named_and_goes_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setenv("ATOLL_HOME", str(tmp_path))
    cluster = LocalCluster.make(tmp_path)
    if what == "folder":
        (tmp_path / "id").mkdir()
    else:
        (tmp_path / "id").symlink_to("id")
    job = cluster.submit("echo never")
    cluster.wait_until_idle()
    assert cluster.control.job(job).status is JobStatus.FAILED_DRIVER
    assert f"{tmp_path / 'id'} can't be used: " in cluster.log(job)
    assert "Remove it, once no jobs run" in cluster.log(job)
    _, (line,) = cluster.control.remove_nodes()
    assert "So it is not known whether processes of cluster train hang there" in line
    (tmp_path / "id").rmdir() if what == "folder" else (tmp_path / "id").unlink()
    assert cluster.run("echo again")[0] is JobStatus.SUCCEEDED


def test_an_id_that_root_made_can_be_read_by_others(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        reaper.owner_of(tmp_path / "clusters/train")
    finally:
        os.umask(before)
    assert (tmp_path / "id").stat().st_mode & 0o777 == 0o644
