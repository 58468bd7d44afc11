"""Managed jobs on Slurm: what Slurm takes goes on in another job, what somebody cancels is over."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest
from tests.providers.test_slurm import USER, atoll, configure, make_slurm, queue
from tests.tasks.test_ssh_tasks import eventually

from atoll.tasks import clusters, controllers, supervisor
from testbed.fixtures import MakeBed
from testbed.hosts import Testbed

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
RUN = """echo attempt on $(hostname) as $SKYPILOT_TASK_ID; [ -e ~/go ] || sleep 1000"""


@pytest.fixture
def slurm(make_bed: MakeBed) -> Testbed:
    return make_slurm(make_bed)


def slurm_jobs(bed: Testbed) -> list[str]:
    return bed.hosts[0].run("squeue -h -t RUNNING -o %i", user=USER).split()


def row() -> dict[str, Any]:
    return dict(json.loads(atoll("jobs", "queue", "-o", "json"))[0])


def log() -> str:
    return atoll("jobs", "logs", "--no-follow", code=101)


def test_what_slurm_takes_at_its_limit_goes_on(slurm: Testbed) -> None:
    configure('time = "0:02:00"')
    assert "told of its limit as it begins" in atoll("jobs", "launch", "--infra", "slurm/lab", RUN, code=2)
    configure('time = "0:02:00"', "notice_s = 10")
    atoll("jobs", "launch", "--infra", "slurm/lab", "-d", RUN)
    eventually(lambda: log().count("attempt on h") == 1, "it runs", 90)
    (first,) = slurm_jobs(slurm)
    slurm.hosts[0].run(f"scontrol update JobId={first} TimeLimit=1", user="root")  # sooner
    slurm.hosts[0].run("touch ~/go", user=USER)
    said = atoll("jobs", "logs", timeout_s=450)
    assert said.count("attempt on h") == 2, said
    assert "time limit" in said
    assert (row()["status"], row()["restarts"]) == ("SUCCEEDED", 1)
    assert queue(slurm) == []


def test_what_somebody_cancels_there_is_over(slurm: Testbed) -> None:
    atoll("jobs", "launch", "--infra", "slurm/lab", "-d", RUN)
    eventually(lambda: "attempt on h" in log(), "it runs", 90)
    (second,) = slurm_jobs(slurm)
    slurm.hosts[0].run(f"scancel {second}", user=USER)
    assert "scancel" in atoll("jobs", "logs", code=103)
    assert row()["status"] == "CANCELLED"
    assert queue(slurm) == []


def test_a_controller_that_is_killed_keeps_its_place_in_the_queue(slurm: Testbed) -> None:
    configure('sbatch = ["--exclusive"]')
    atoll("launch", "-c", "holder", "--infra", "slurm/lab", "--num-nodes", "2", "true")
    atoll("jobs", "launch", "--infra", "slurm/lab", "-d", "echo at last")
    eventually(lambda: "busy" in row()["reason"] or "first" in row()["reason"], "it waits, and says why", 60)
    ids = slurm.hosts[0].run("squeue -h -o %i", user=USER).split()
    folder = clusters.folder_of(controllers.HERE)
    before = supervisor.pid_of(folder)
    assert before is not None
    os.kill(before, signal.SIGKILL)
    eventually(lambda: supervisor.pid_of(folder) not in (None, before), "a new controller")
    eventually(lambda: "started again" in log(), "it continues")
    atoll("down", "holder")
    assert "at last" in atoll("jobs", "logs", timeout_s=200)
    assert (
        max(ids, key=int) == slurm.hosts[0].run("scontrol -o show job | grep -o 'JobId=[0-9]*'").split("=")[-1].strip()
    )
    assert queue(slurm) == []
