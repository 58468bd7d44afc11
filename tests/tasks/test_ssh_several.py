"""Several at once over ssh: jobs of one cluster, clusters of one host, clusters that fix one port."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from atoll.providers.ssh.site import _hop
from tasks.test_ssh_tasks import HEAD, HERE, PYTHON, atoll, declare, eventually, lab, trust
from tasks.test_supervisor import USES_BASHRC, WRITES_BASHRC
from testbed.hosts import Testbed

__all__ = ["lab"]
pytestmark = pytest.mark.timeout(300)  # many commands each, on a machine that may be busy

# Each waits for the other, so they run side by side or not at all.
_MEET = "touch ~/begun-$N; until [ -e ~/begun-1 ] && [ -e ~/begun-2 ]; do sleep 0.05; done; echo met"


def statuses(cluster: str) -> list[str]:
    return [row["status"] for row in json.loads(atoll("queue", cluster, "-o", "json"))]


@pytest.mark.long
@pytest.mark.parametrize("supervised", [HERE, HEAD])
def test_jobs_that_start_together_all_run(lab: Testbed, supervised: str) -> None:
    if supervised == HEAD:
        trust(lab)
    words = ("launch", "-c", "c", "--infra", "ssh/lab", "--num-nodes", "2", "--sweep", "N=1,2", "--parallel", "2")
    said = atoll(*words, _MEET)
    assert ("the supervisor runs on h1" in said) == (supervised == HEAD)
    assert statuses("c") == ["SUCCEEDED", "SUCCEEDED"]
    lab.hosts[0].run("rm /home/sky/begun-*")
    for number in ("1", "2"):
        atoll("exec", "-d", "c", "--env", f"N={number}", _MEET)
    eventually(lambda: statuses("c") == ["SUCCEEDED"] * 4, "both have met")
    atoll("down", "c")


def test_what_setup_writes_into_bashrc_is_known_to_the_first_launch_and_to_run(lab: Testbed, tmp_path: Path) -> None:
    task = tmp_path / "task.yaml"
    lines = "\n".join(f"  {line}" for line in [*WRITES_BASHRC.splitlines(), "run: |", f"  {USES_BASHRC}"])
    task.write_text(f"envs: {{GIVEN: by-the-user}}\nsetup: |\n{lines.replace('  run: |', 'run: |')}\n")
    said = atoll("launch", "-c", "c", "--infra", "ssh/lab", str(task), code=100)
    for line in ("<two", "lines>", "a function with it and by-the-user", "a tool", "rank 0"):
        assert f") {line}\n" in said
    said = atoll("run", "--infra", "ssh/lab", "--workdir", str(tmp_path), "--", "mytool")
    assert said.count("a tool") == 1
    atoll("down", "c")


@pytest.mark.long
def test_paths_with_spaces_percents_and_backslashes(
    lab: Testbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Path(os.environ["ATOLL_HOME"], "a b%h")
    home.mkdir(mode=0o700)
    monkeypatch.setenv("ATOLL_HOME", str(home))
    odd = "it's 50%C of\\it"
    key = tmp_path / odd / "key"
    work, extra = tmp_path / odd / "work", tmp_path / odd / "extra"
    for folder in (work, extra):
        (folder / odd).mkdir(parents=True)
        (folder / odd / "file").write_text(f"of {folder.name}\n")
    shutil.copy(lab.home / ".ssh" / "id_ed25519", key)
    trust(lab)
    declare(lab, key=str(key), workdir=f"/home/sky/{odd}")
    mounts = {f"~/{odd}/extra": str(extra), f"{odd}/empty": {"name": "a-bucket"}}
    run = f"cat '{odd[:2]}'\\'{odd[2:]}'/file; cat ~/it*/extra/*/file; ls -d */empty"
    task = tmp_path / "task.yaml"
    task.write_text(yaml.safe_dump({"workdir": str(work), "num_nodes": 2, "file_mounts": mounts, "run": run}))
    said = atoll("launch", "-c", "c", "--infra", "ssh/lab", str(task))
    assert "the supervisor runs on h1" in said
    for line in ("of work", "of extra", f"{odd}/empty"):
        assert said.count(f") {line}\n") == 2, said
    assert "something else" not in said
    task.write_text(yaml.safe_dump({"file_mounts": {"~/in/the/way": {"name": "a-bucket"}}, "run": "true"}))
    lab.hosts[0].run("touch /home/sky/in")
    said = atoll("launch", "-c", "c", str(task), code=100)
    assert "h1: /home/sky/in/the could not be written: Not a directory" in said
    atoll("down", "c")


@pytest.mark.long
def test_clusters_of_one_host_run_beside_each_other(lab: Testbed, tmp_path: Path) -> None:
    for number in ("1", "2"):
        words = ("--infra", "ssh/lab", "--workdir", str(tmp_path), "--env", f"N={number}")
        said = atoll("launch", "-d", "-c", f"c{number}", *words, _MEET)
        old = "/home/sky/.atoll/clusters/c1/sky_workdir"
        assert (f"h1: /home/sky/sky_workdir led to {old} until now" in said) == (number == "2")
    atoll("run", "--infra", "ssh/lab", "--workdir", str(tmp_path), "--no-python", "true")  # has no part in the link
    assert lab.hosts[0].run("readlink /home/sky/sky_workdir").endswith("/clusters/c2/sky_workdir\n")
    for name in ("c1", "c2"):
        eventually(lambda name=name: statuses(name) == ["SUCCEEDED"], "both have met")
    atoll("down", "c1", "c2")


@pytest.mark.long
def test_a_fixed_port_is_waited_for_on_its_host_and_no_other(lab: Testbed, tmp_path: Path) -> None:
    config = "".join(f'[ssh.{host.name}]\nhosts = ["{host.name}"]\npython = "{PYTHON}"\n' for host in lab.hosts)
    Path(os.environ["ATOLL_HOME"], "config.toml").write_text(config)
    task = tmp_path / "task.yaml"
    task.write_text(f"run: |\n  true --master_port 8008\n  {_MEET}\n")
    for number in ("1", "2"):
        words = ("--infra", f"ssh/h{number}", "--env", f"N={number}", str(task))
        atoll("launch", "-d", "-c", f"c{number}", *words)
    for name in ("c1", "c2"):
        eventually(lambda name=name: statuses(name) == ["SUCCEEDED"], "both have met, on hosts of their own")
    lab.hosts[0].run("rm /home/sky/begun-*")
    atoll("exec", "-d", "c1", "--env", "N=1", str(task))
    eventually(lambda: statuses("c1")[0] == "RUNNING", "the first runs")
    atoll("launch", "-d", "-c", "c3", "--infra", "ssh/h1", "--env", "N=2", str(task))
    eventually(
        lambda: "waiting for port 8008, held by job 2 of cluster c1" in atoll("logs", "c3", "--no-follow", code=101),
        "the second waits for the port",
    )
    atoll("cancel", "c1", "-a", "-y")
    eventually(lambda: statuses("c3") == ["SUCCEEDED"], "the second runs")
    atoll("down", "c1", "c2", "c3")


def test_a_head_is_asked_to_log_in_as_a_user_of_a_domain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text(f"#!/bin/sh\nprintf '%s|' \"$@\" >{tmp_path}/words\n")
    ssh.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    class Head:
        def run(self, command: str, limit_s: float) -> subprocess.CompletedProcess[bytes]:
            return subprocess.run(["sh", "-c", command], capture_output=True, timeout=limit_s)

    assert _hop(Head(), "LAB\\ada@10.0.0.2:2222") is None  # type: ignore[arg-type]
    assert (tmp_path / "words").read_text().endswith("|-p|2222|LAB\\ada@10.0.0.2|true|")
