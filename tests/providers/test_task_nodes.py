"""What a task's node on this machine has for itself, and that it harms nobody else's."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.pools import NAMESPACE, SOURCE_ROOT, eventually, mode, namespaces_work, with_marker
from tests.talking import TaskNode

from atoll.agent.namespace import VARIABLE
from atoll.providers import local_node
from atoll.providers.base import Boot
from atoll.providers.local_node import NodePlace, isolation, start_agent

__all__ = ["mode"]

own = pytest.mark.skipif(not namespaces_work(), reason="this kernel refuses namespaces: nodes share the machine's")


PYTHON = sys._base_executable  # type: ignore[attr-defined]  # a clone and its .venv may lie below /tmp


@pytest.fixture
def nodes() -> Iterator[list[TaskNode]]:
    """Head and worker1 of a cluster, with namespaces."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(contextlib.closing(TaskNode(name, at)))
            for at, name in enumerate(("train-head", "train-worker1"))
        ]


# ------------------------------------------------------------------------------------------------------ host names
@own
def test_each_has_a_host_name_that_resolves_to_its_address(nodes: list[TaskNode]) -> None:
    ask = "hostname; hostname -i; getent ahostsv4 peer0 peer1 localhost | sort -u | grep STREAM; {python} -c '{code}'"
    code = "import socket; print(socket.getfqdn())"
    for node, name, peer in zip(nodes, ("train-head", "train-worker1"), ("peer1", "peer0"), strict=True):
        said = node.run(ask.format(python=PYTHON, code=code)).splitlines()
        assert said[:2] == [name, node.addr]
        assert said[-1] == name
        assert f"{'127.0.0.2' if peer == 'peer1' else '127.0.0.1'}" in "".join(said[2:-1])
    assert socket.gethostname() not in ("train-head", "train-worker1")


@own
def test_the_machines_other_hosts_stay_known(nodes: list[TaskNode]) -> None:
    others = [
        line.rstrip()
        for line in Path("/etc/hosts").read_text().splitlines()
        if line.partition("#")[0].split()[1:] and "localhost" not in line.split()
    ]
    assert set(others) <= set(nodes[0].run("cat /etc/hosts").splitlines())


# ------------------------------------------------------------------------------------------------------------- /tmp
@own
def test_each_has_its_own_tmp(nodes: list[TaskNode]) -> None:
    name = f"atoll-test-{uuid.uuid4().hex}"
    assert nodes[0].run(f"echo $TMPDIR; stat -c %a /tmp; echo mine > /tmp/{name}", env={"TMPDIR": nodes[0].tmp}) == (
        "/tmp\n1777\n"
    )
    assert nodes[0].run(f"cat /tmp/{name}", 1) == "mine\n"
    assert nodes[1].run(f"ls /tmp/{name} || echo nothing").endswith("nothing\n")
    assert not Path("/tmp", name).exists()


@pytest.fixture
def kept() -> Iterator[Path]:
    """A folder directly below /tmp with something in it."""
    folder = Path(tempfile.mkdtemp(prefix="atoll-test-", dir="/tmp"))
    (folder / "deep").mkdir()
    (folder / "deep" / "file").write_text("precious")
    yield folder
    (folder / "deep" / "file").unlink()
    (folder / "deep").rmdir()
    folder.rmdir()


@own
def test_what_must_be_visible_is_and_outlives_the_node(kept: Path) -> None:
    file = kept.with_name(kept.name + "-file")
    file.write_text("also precious")
    link = kept.with_name(kept.name + "-link")
    link.symlink_to(kept / "deep")
    try:
        visible = (str(link / "file"), str(file), "/tmp/not-there/at-all", "/etc")
        listed = sorted([file.name, kept.name, link.name])
        for kill in (False, True):
            with contextlib.closing(TaskNode(visible=visible)) as node:
                assert node.run(f"cat {kept}/deep/file {file}; touch {kept}/deep/file") == "preciousalso precious"
                assert sorted(each for each in node.run("ls -A /tmp", 1).split() if each in listed) == listed
                assert node.run(f"cat {link}/file", 1) == "precious"
                if kill:
                    node.start("echo up; sleep 300", 2)
                    node.line(2)
                    node.handle.process.kill()  # type: ignore[attr-defined]  # a LocalNode's
            assert not os.path.exists(node.tmp)
            assert (kept / "deep" / "file").read_text() == "precious"
            assert file.read_text() == "also precious"
    finally:
        link.unlink()
        file.unlink()


@own
def test_only_what_must_be_visible_is_seen_and_only_its_own_can_be_removed(kept: Path) -> None:
    for path in ("home", "venv/lib", "venv/bin", "tools/bin"):
        (kept / path).mkdir(parents=True)
    for path in ("home/mine", "venv/lib/package", "tools/bin/program", "sibling"):
        (kept / path).write_text("here")
    visible, readable = (str(kept / "home"), str(kept / "venv")), (str(kept), str(kept / "venv/bin"))
    try:
        with contextlib.closing(TaskNode(visible=visible, readable=(*readable[1:], str(kept / "tools/bin")))) as node:
            assert node.run(f"ls {kept} {kept}/tools; cat {kept}/tools/bin/program").split() == [
                *(f"{kept}:", "home", "tools", "venv", f"{kept}/tools:", "bin", "here")
            ]
            assert "Read-only file system" in node.run(f"touch {kept}/tools/bin/new 2>&1 || true; echo x > {kept}/lost")
            assert node.run(f"echo > {kept}/venv/bin/new; rm -rf /tmp/* 2>/dev/null; ls {kept}/tools/bin") == (
                "program\n"
            )
        assert sorted(os.listdir(kept)) == ["deep", "home", "sibling", "tools", "venv"]
        assert (kept / "deep" / "file").exists()
        assert (kept / "tools/bin/program").exists()
        assert os.listdir(kept / "home") == os.listdir(kept / "venv") == []
        # One that may be written to inside of one that may not.
        (kept / "home" / "mine").write_text("here")
        with contextlib.closing(TaskNode(visible=visible, readable=readable)) as node:
            assert node.run(f"cat {kept}/sibling; echo x > {kept}/home/mine; rm -rf {kept} 2>/dev/null || echo no") == (
                "hereno\n"
            )
        assert (kept / "sibling").read_text() == "here"
    finally:
        for path in ("home", "venv", "tools"):
            shutil.rmtree(kept / path)
        (kept / "sibling").unlink()


@own
def test_a_network_that_is_gone_is_named(kept: Path) -> None:
    tmp = kept / "atoll-00000000-n0"
    tmp.mkdir()
    place = NodePlace("head", str(tmp), str(tmp), (), network=f"{kept}/gone/net")
    (kept / "gone").mkdir()
    (kept / "gone/user").symlink_to(os.readlink("/proc/self/ns/user"))
    try:
        node = start_agent(Boot(), place, "ATOLL_POOL_TAG=00000000.0")
        assert node.channel.recv(1) == b""
        said = node.reason
        node.stop()
        assert str(said).startswith("its agent exited with code 1 (nsenter: ")
        assert f"{kept}/gone/net" in str(said)
    finally:
        shutil.rmtree(kept / "gone")
    assert not tmp.exists()


# -------------------------------------------------------------------------------------------------------- processes
def test_pkill_in_one_node_harms_neither_its_shell_nor_its_peer_nor_other_clusters(mode: str) -> None:
    """Where processes are the machine's, by a ``pkill`` of ours before the real one."""
    marker = f"marker-{uuid.uuid4().hex}"
    with contextlib.ExitStack() as stack:
        everywhere = [
            stack.enter_context(contextlib.closing(TaskNode(*which)))
            for which in (("one-head", 0), ("one-worker1", 1), ("two-head", 0))
        ]
        for node in everywhere:
            again = "setsid bash -c 'exec -a $MARKER sleep 300'"
            node.start(f"{again} & (exec -a $MARKER sleep 300) & echo up; wait", env={"MARKER": marker})
            node.line()
        eventually(lambda: len(with_marker(marker)) == 6, "two processes of that name on each")
        assert everywhere[0].run(f"pgrep -c -f {marker}", 1) == "2\n"
        gone = f"while pgrep -f {marker} >/dev/null; do sleep 0.05; done"
        assert everywhere[0].run(f"pkill -f {marker}; {gone}; pkill -9 -f {marker} || echo survived", 2) == (
            "survived\n"
        )
        assert everywhere[0].end()[0] == 0
        eventually(lambda: len(with_marker(marker)) == 4, "the others'")
        assert [node.run("echo fine", 3) for node in everywhere] == ["fine\n"] * 3


@own
def test_no_node_sees_processes_of_another(nodes: list[TaskNode]) -> None:
    for node in nodes:
        seen = node.run("pkill -9 atoll-agent; ps -e -o comm=").split()
        assert sorted(seen) == ["atoll-agent", "bash", "ps"]


def test_root_needs_no_sudo_where_the_machine_has_none(mode: str, tmp_path: Path) -> None:
    for name in ("bash", "sh", "env", "id"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    with contextlib.closing(TaskNode(visible=(str(tmp_path),))) as node:
        said = node.run("sudo -n -E -- env A=1 bash -c 'echo $A'; sudo A=2 bash -c 'echo $A $0 \"$@\"' x 'y  z'; "
                        "sudo -u nobody id; echo $?; sudo; sudo absent; echo $?; sudo -n bash -c 'exit 7'; echo $?",
                        env={"PATH": str(tmp_path)})  # fmt: skip
        if os.geteuid() == 0:
            assert said.splitlines() == [
                "1",
                "2 x y  z",
                "sudo: -u: this machine has no sudo, and what stands in for it runs commands as root only",
                "1",
                "env: 'absent': No such file or directory",
                "127",
                "7",
            ]
        else:
            assert said.count("sudo: command not found") == 6
    (tmp_path / "sudo").write_text("#!/bin/sh\necho the real one")
    (tmp_path / "sudo").chmod(0o755)
    with contextlib.closing(TaskNode(visible=(str(tmp_path),))) as node:
        assert node.run("sudo -n true", env={"PATH": str(tmp_path)}) == "the real one\n"


# ---------------------------------------------------------------------------------------------------- where refused
def test_what_a_node_does_not_have_is_left_alone(mode: str) -> None:
    before = socket.gethostname(), Path("/etc/hosts").read_text(), os.readlink("/proc/self/ns/mnt")
    mounts = Path("/proc/self/mountinfo").read_text().count(" /tmp ")
    with contextlib.closing(TaskNode()) as node:
        assert (node.run("hostname").strip() == "head") is (mode == NAMESPACE)
        assert VARIABLE not in node.run("env", 1)
        assert (socket.gethostname(), Path("/etc/hosts").read_text(), os.readlink("/proc/self/ns/mnt")) == before
        assert Path("/proc/self/mountinfo").read_text().count(" /tmp ") == mounts


@own
def test_without_own_processes_the_rest_can_still_be_had(monkeypatch: pytest.MonkeyPatch, kept: Path) -> None:
    """As in a container whose /proc is partly covered: the kernel lets nobody mount another there."""
    rest = isolation().command
    rest = (rest[0], "--mount", "--propagation", "slave", *rest[rest.index("--uts") :])
    monkeypatch.setattr(local_node, "isolation", lambda: local_node.Isolation(rest, "mount /proc failed"))
    with contextlib.closing(TaskNode(visible=(str(kept),))) as node:
        place = node.hello["place"]
        assert (place["pid_namespace"], place["hostname"], place["tmp"]) == (False, True, True)
        assert place["notes"] == ["shared with the machine: mount /proc failed"]
        said = node.run(f"hostname; hostname -i; echo $TMPDIR; cat {kept}/deep/file; pgrep bash | wc -l",
                        env={"TMPDIR": node.tmp})  # fmt: skip
        assert said == "head\n127.0.0.1\n/tmp\nprecious1\n"
        node.start("(setsid sleep 300 &) ; echo up; sleep 300", 1)
        node.line(1)
    assert node.pids() == []
    assert not os.path.exists(node.tmp)
    assert (kept / "deep" / "file").read_text() == "precious"


ASKS = """
import sys
sys.path.insert(0, {root!r})
from atoll.providers.local_node import isolation
from atoll.providers.network import Network, NetworkUnavailable
found = isolation()
print(found.command, "|", found.refused)
try:
    Network.start("one").close()
except NetworkUnavailable as error:
    print(error)
"""


@own
def test_a_kernel_that_refuses_is_believed_and_quoted() -> None:
    """As in a container: no right to make namespaces, and none to be had through a user namespace."""
    deny = "echo 0 > /proc/sys/user/max_user_namespaces && exec setpriv --bounding-set=-sys_admin --inh-caps=-sys_admin"
    asked = subprocess.run(
        ["unshare", "--user", "--map-root-user", "sh", "-c", f'{deny} "$@"', "sh", PYTHON, "-I", "-c",
         ASKS.format(root=SOURCE_ROOT)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert asked.returncode == 0, asked.stderr
    command, network = asked.stdout.splitlines()
    assert command.startswith("() | unshare: ")
    assert "slirp4netns" in network or network.startswith("the kernel refuses a network namespace: unshare: ")
