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
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.fixtures import MakeBed
from testbed.hosts import Host, Testbed

pytestmark = pytest.mark.serial
ATOLL = str(Path(sys.executable).parent / "atoll")
SUPERVISED = ("here", "on the head")


def declare(name: str, hosts: list[str], **settings: object) -> None:
    """``[ssh.NAME]`` in config.toml, beside those that are there."""
    lines = [f"{key} = {json.dumps(value)}" for key, value in {"python": sys.executable, **settings}.items()]
    with Path(os.environ["ATOLL_HOME"], "config.toml").open("a") as file:
        file.write("\n".join([f"[ssh.{name}]", f"hosts = {json.dumps(hosts)}", *lines, ""]))


def trust(bed: Testbed) -> None:
    """Every host's user may log in to every other host, as labs have it; their home is shared."""
    there = bed.folder / "home" / "sky" / ".ssh"
    there.mkdir(exist_ok=True)
    for name in ("id_ed25519", "known_hosts"):
        shutil.copy(bed.home / ".ssh" / name, there / name)
    bed.hosts[0].run("chown -R sky:sky /home/sky/.ssh && chmod 700 /home/sky/.ssh && chmod 600 /home/sky/.ssh/*")


def atoll(*words: str, code: int = 0, timeout: float = 60, cwd: Path | None = None) -> str:
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

    def says(self, pattern: str, seconds: float = 30.0) -> float:
        """Wait until it does; returns how long that took."""
        began = time.monotonic()
        while not re.search(pattern, self.said):
            assert time.monotonic() < began + seconds, f"not within {seconds:g} s: {pattern}\n{self.said}"
            time.sleep(0.05)
        return time.monotonic() - began

    def ends(self, code: int, seconds: float = 60.0) -> str:
        assert self.process.wait(seconds) == code, self.said
        return self.said


def eventually(condition: object, what: str, seconds: float = 10.0) -> None:
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


@pytest.fixture(params=SUPERVISED)
def lab(request: pytest.FixtureRequest, make_bed: MakeBed) -> Iterator[Testbed]:
    """Three hosts; afterwards nothing of ours runs on any that is alive."""
    bed = make_bed(3)
    if request.param != "here":
        trust(bed)
    yield bed
    nothing_runs_on(*(host for host in bed.hosts if host.pids()))


def test_hosts_that_lose_power_or_freeze_are_named_in_time(lab: Testbed, tmp_path: Path) -> None:
    head, dying, freezing = lab.hosts
    declare("power", ["h1", "h2"], grace_s=2)
    declare("ice", ["h1", "h3"], grace_s=2)
    job = "echo it runs; test $SKYPILOT_NODE_RANK = 0 && setsid sleep 1000 & sleep 1000"
    jobs = []
    for name in ("power", "ice"):
        words = ["launch", "-c", name, "--infra", f"ssh/{name}", "--num-nodes", "2", job]
        jobs.append(Running(tmp_path / f"{name}.log", *words))
    for each in jobs:
        each.says(r"\(worker1, rank=1, .*it runs")
        each.says(r"\(head, rank=0, .*it runs")
    dying.power_off()
    freezing.freeze()
    began = time.monotonic()
    for each, name in zip(jobs, ("h2", "h3"), strict=True):
        each.says(rf"{name} \(node 1\) has not been heard for \d+ s", 10)
    assert time.monotonic() - began < 10
    for each, name in zip(jobs, ("h2", "h3"), strict=True):
        each.says(rf"worker1 was lost: no connection to {name} for 2 s.*; stopping the others", 10)
        each.says("Restarting in 1 s", 10)
    eventually(lambda: not any("sleep 1000" in line for line in head.command_lines()), "the others are stopped")
    for name in ("power", "ice"):
        atoll("cancel", name, "-y", "-a")
    for each in jobs:
        each.ends(103, 20)
    nothing_runs_on(head)
    freezing.thaw()
    nothing_runs_on(freezing)
