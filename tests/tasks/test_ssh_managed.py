"""Managed jobs on hosts of the testbed: one that dies is left for another, and one of them controls jobs."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from tests.tasks.test_ssh_tasks import PYTHON, atoll, eventually

from atoll.tasks import controllers
from testbed.fixtures import MakeBed
from testbed.hosts import Testbed

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture
def apart(make_bed: MakeBed) -> Testbed:
    """Two hosts with homes of their own, declared as ``ssh/one`` and ``ssh/two``."""
    bed = make_bed(2, shared_home=False)
    groups = zip(("one", "two"), bed.hosts, strict=True)
    lines = [f'[ssh.{name}]\nhosts = ["{host.name}"]\npython = "{PYTHON}"\ngrace_s = 5\n' for name, host in groups]
    Path(os.environ["ATOLL_HOME"], "config.toml").write_text("\n".join(lines))
    return bed


def trust_second(bed: Testbed) -> None:
    """The first host's user may log in to the second, which is declared there."""
    name = bed.hosts[1].name
    files = {
        ".ssh/id_ed25519": (bed.home / ".ssh" / "id_ed25519").read_text(),
        ".ssh/known_hosts": bed.hosts[0].run(f"ssh-keyscan {name} 2>/dev/null"),
        ".atoll/config.toml": f'[ssh.two]\nhosts = ["{name}"]\npython = "{PYTHON}"\n',
    }
    for path, text in files.items():
        bed.hosts[0].run(f"umask 077; mkdir -p ~/.ssh ~/.atoll; cat > ~/{path} <<'END'\n{text}\nEND", user="sky")


def log_of(job_id: int, *more: str) -> str:
    return atoll("jobs", "logs", str(job_id), "--no-follow", *more, code=101)


def test_a_host_that_loses_power_is_left_for_another(apart: Testbed, tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "task.yaml").write_text(
        "name: moves\nworkdir: .\nresources:\n  any_of: [{infra: ssh/one}, {infra: ssh/two}]\n"
        "run: |\n  echo on $(hostname) as $SKYPILOT_TASK_ID; [ $(hostname) = h2 ] || sleep 1000\n"
    )
    atoll("jobs", "launch", "task.yaml", "-d")
    eventually(lambda: "on h1 as" in log_of(1), "it runs on the first host")
    apart.hosts[0].power_off()
    said = atoll("jobs", "logs", "1", timeout=900)
    assert "on h2" in said
    assert len(set(re.findall(r"sky-managed-\S+", said))) == 1
    assert "Attempt 1 on ssh/one ended after" in said
    (row,) = json.loads(atoll("jobs", "queue", "-o", "json"))
    assert (row["status"], row["restarts"]) == ("SUCCEEDED", 1)
    eventually(lambda: not apart.hosts[1].command_lines(), "nothing runs on the second host")


def test_a_host_controls_jobs(apart: Testbed, tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """With nothing but its Python: local nodes there, and files that came from here."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("from here")
    one = ("--controller", "ssh/one")
    said = atoll("jobs", "launch", *one, "--workdir", ".", "--infra", "local", "cat file; echo; hostname")
    assert "from here" in said
    assert re.search(r"\(task, pid=\d+\) job-1-\w+-1-head", said)
    assert "✓ Managed job 1 finished (status: SUCCEEDED)." in said
    trust_second(apart)
    said = atoll("jobs", "launch", *one, "--infra", "ssh/two", "--workdir", ".", "cat file; echo; hostname")
    assert "from here" in said
    assert re.search(r"\(task, pid=\d+\) h2", said)
    atoll("jobs", "launch", *one, "--infra", "local", "-n", "waits", "-d", "sleep 1000")
    eventually(lambda: "RUNNING" in atoll("jobs", "queue", *one), "it runs")
    cluster = controllers.of("ssh/one")
    (pid,) = apart.hosts[0].run(f"cat ~/.atoll/clusters/{cluster}/supervisor.lock", user="sky").split()
    apart.hosts[0].run(f"kill -9 {pid}")
    eventually(lambda: "started again" in log_of(3, *one), "the controller is started again, there")
    assert "Managed job 3 is being cancelled" in atoll("jobs", "cancel", *one, "-n", "waits")
    atoll("jobs", "logs", *one, "3", code=103)
    assert "atoll-jobs-ssh-one" in atoll("status")
    atoll("down", cluster)
    eventually(lambda: not apart.hosts[0].command_lines(), "nothing runs there")
