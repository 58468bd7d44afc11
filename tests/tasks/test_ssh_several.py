"""Several at once over ssh: jobs of one cluster, clusters of one host, clusters that fix one port."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tasks.test_ssh_tasks import HEAD, HERE, PYTHON, atoll, eventually, lab, trust
from tasks.test_supervisor import USES_BASHRC, WRITES_BASHRC
from testbed.hosts import Testbed

__all__ = ["lab"]
pytestmark = pytest.mark.timeout(300)  # many commands each, on a machine that may be busy

# Each waits for the other, so they run side by side or not at all.
_MEET = "touch ~/begun-$N; until [ -e ~/begun-1 ] && [ -e ~/begun-2 ]; do sleep 0.05; done; echo met"


def statuses(cluster: str) -> list[str]:
    return [row["status"] for row in json.loads(atoll("queue", cluster, "-o", "json"))]


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


def test_clusters_of_one_host_run_beside_each_other(lab: Testbed) -> None:
    for number in ("1", "2"):
        atoll("launch", "-d", "-c", f"c{number}", "--infra", "ssh/lab", "--env", f"N={number}", _MEET)
    for name in ("c1", "c2"):
        eventually(lambda name=name: statuses(name) == ["SUCCEEDED"], "both have met")
    atoll("down", "c1", "c2")


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
