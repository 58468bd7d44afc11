"""What tests of task files share: ``atoll`` as a user types it, in a repository of its own, without GPUs."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.providers.network import Network, NetworkUnavailable
from atoll.tasks import clusters, lifecycle

ROOT = Path(__file__).resolve().parents[2]
ATOLL = "from atoll.cli.main import main; main()"


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder to type commands in, with a state folder and a PATH of its own; its clusters are taken down."""
    folder = tmp_path / "repository"
    (tmp_path / "bin").mkdir()
    folder.mkdir()
    programs = f"{tmp_path / 'bin'}:{os.path.dirname(sys.executable)}"
    for name, value in {
        "ATOLL_HOME": str(tmp_path / "home"),
        "CUDA_VISIBLE_DEVICES": "",
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH")))),
        "COLUMNS": "200",
        "NO_COLOR": "1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(folder)
    yield folder
    for name in clusters.all_names():
        lifecycle.down(name)


@pytest.fixture
def fixed_ports() -> Iterator[None]:
    """Ports that a task file fixes are this test's alone, where nodes have the machine's: others wait meanwhile."""
    with contextlib.ExitStack() as ends:
        try:
            Network.start("one").close()
        except NetworkUnavailable:
            known_to_all = os.open("/tmp", os.O_RDONLY)  # every test run on this machine locks the same folder
            ends.callback(os.close, known_to_all)
            fcntl.flock(known_to_all, fcntl.LOCK_EX)
        yield


@pytest.fixture
def examples(repository: Path) -> Path:
    """A repository that has this one's examples."""
    made = shutil.ignore_patterns("assets", "outputs", "checkpoints", "__pycache__")
    shutil.copytree(ROOT / "examples", repository / "examples", ignore=made)
    return repository


def program(name: str, text: str) -> None:
    """Put a program on the PATH of ``repository``, before the machine's."""
    path = Path(os.environ["PATH"].partition(":")[0], name)
    path.write_text(text)
    path.chmod(0o755)


def atoll(*arguments: str, code: int | None = 0, within_s: float = 100, **variables: str) -> str:
    """Run the command; what it prints, after the exit code that it must have, or any where that is None."""
    done = subprocess.run(
        [sys.executable, "-c", ATOLL, *arguments],
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=within_s,
    )
    assert code in (None, done.returncode), done.stdout
    return done.stdout


def of(job: str, who: str = "head") -> list[str]:
    """What one node printed, in a log with prefixes."""
    return [line.partition(") ")[2] for line in job.splitlines() if line.startswith(f"({who}, rank=")]


def losses(job: str) -> dict[int, float]:
    """By step, of the last attempt that got there."""
    found = re.findall(r"^\(head, rank=0, pid=\d+\) step (\d+)/\d+  loss (\d+\.\d+)", job, re.M)
    return {int(step): float(loss) for step, loss in found}


def last_job(cluster: str) -> dict[str, Any]:
    """Its row in ``atoll queue``."""
    row: dict[str, Any] = json.loads(atoll("queue", cluster, "-o", "json"))[0]
    return row


def wait_for_log(cluster: str, text: str, times: int = 1, within_s: float = 60.0) -> None:
    """Until the newest job of a cluster has printed something so often."""
    deadline = time.monotonic() + within_s
    while (said := atoll("logs", cluster, "--no-follow", code=None)).count(text) < times:
        assert time.monotonic() < deadline, f"waited {within_s:g} s for {text!r}, {times} times, in:\n{said}"
        time.sleep(0.1)
