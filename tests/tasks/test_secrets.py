"""Values of variables reach the ranks and lie nowhere: every byte of the state folders is searched for planted ones."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tests.cli.test_cluster_commands import home
from tests.pools import eventually

from atoll.tasks import clusters, supervisor

__all__ = ["home"]
pytestmark = pytest.mark.timeout(240)

ATOLL = str(Path(sys.executable).parent / "atoll")
PLANTED = {
    "GITHUB_PAT": "planted9fQ2xZ71bLw3",
    "PGPASS": "planted7KqvTgX7Zq81",
    "SLACK_URL": "https://hooks.slack.com/services/planted/B01/x7Kq9vTgX7",
    "DATABASE": "postgres://ada:planted4kQ2zv81@db:5432/x",
    "MY_WORD": "planted-word",  # no secret, and no record's business
    "HF_TOKEN": "hf_planted8Xw2Lm5Rt",
}
GIVEN = ("--env", "GIVEN=planted-given", "--env", "API_KEY=plantedZ3vN8rQ1", "--secret", "DECLARED=plantedsecret")
LAUNCHED = ("HF_TOKEN", "GIVEN", "API_KEY", "DECLARED")  # what `launch` is given of them
NAMES = (*PLANTED, "GIVEN", "API_KEY", "DECLARED")
HIDDEN = ("GITHUB_PAT", "PGPASS", "SLACK_URL", "DATABASE", "HF_TOKEN", "API_KEY", "DECLARED")


def plant(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in PLANTED.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("DEPLOY_KEY", "production")


def say(names: tuple[str, ...]) -> str:
    """Bash that prints how long each variable is, those that are to be hidden, and an ordinary word."""
    lengths = " ".join(f"{name}=${{#{name}}}" for name in names)
    values = " ".join(f"${name}" for name in names if name in HIDDEN)
    return f"echo {lengths}; echo {values} this is production code; echo up > up; until [ -e go ]; do sleep 0.05; done"


def arrived(out: str, names: tuple[str, ...]) -> None:
    values = PLANTED | {"GIVEN": "planted-given", "API_KEY": "plantedZ3vN8rQ1", "DECLARED": "plantedsecret"}
    assert " ".join(f"{name}={len(values[name])}" for name in names) in out
    assert "**** this is production code" in out
    assert "planted" not in out


def holding(*folders: Path) -> list[str]:
    """Files below some folders, and processes of ours that are no ranks, that hold a planted value."""
    found = []
    for folder in folders:
        for path in folder.rglob("*"):
            try:
                if path.is_file() and b"planted" in path.read_bytes():
                    found.append(str(path))
            except FileNotFoundError:  # a supervisor that ends clears up
                continue
    return found


def seen_in_process(pid: int) -> bool:
    return any(b"planted" in Path(f"/proc/{pid}/{name}").read_bytes() for name in ("environ", "cmdline"))


def atoll(*words: str, code: int | None = 0) -> str:
    done = subprocess.run([ATOLL, *words], capture_output=True, text=True, timeout=100)
    assert code is None or done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    "end", [*(pytest.param(end, marks=pytest.mark.long) for end in ("finished", "failed")), "killed"]
)
def test_local_jobs_leave_no_value(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    plant(monkeypatch)
    places = (home, Path(tempfile.gettempdir()))
    script = f"cd {shlex.quote(str(tmp_path))}; rm -f up; {say(NAMES)}; {'exit 3' if end == 'failed' else 'true'}"
    out = tmp_path / "out"
    with out.open("wb") as file:
        run = subprocess.Popen([ATOLL, "run", *GIVEN, "--", "bash", "-c", script], stdout=file, stderr=file)
    eventually(lambda: "production" in out.read_text() or run.poll() is not None, "the rank runs", 60)
    assert holding(*places) == []
    (folder,) = (home / "clusters").iterdir()
    pid = supervisor.pid_of(folder)
    assert pid is not None
    assert not seen_in_process(pid)
    if end == "killed":
        os.kill(pid, signal.SIGKILL)
    (tmp_path / "go").touch()
    assert run.wait(60) == (0 if end == "finished" else 100)
    arrived(out.read_text(), NAMES)
    assert holding(*places) == []

    task = tmp_path / "task.yaml"
    script = f"cd; rm -f up go; {say(LAUNCHED)}; {'exit 3' if end == 'failed' else 'true'}"
    task.write_text(json.dumps({"envs": {"DEPLOY_KEY": "production"}, "run": script}))
    node = clusters.node_home("t", 0)
    for number, command in enumerate(("launch", "exec"), 1):
        (node / "up").unlink(missing_ok=True)
        atoll(command, *(("-c", "t") if command == "launch" else ("t",)), "-d", "--env", "HF_TOKEN", *GIVEN, str(task))
        log = clusters.folder_of("t") / "jobs" / str(number) / "run.log"
        eventually(lambda log=log: log.exists() and "production" in log.read_text(), "the job runs", 60)
        assert holding(*places) == []
        pid = supervisor.pid_of(clusters.folder_of("t"))
        assert pid is not None
        assert not seen_in_process(pid)
        if end == "killed":
            os.kill(pid, signal.SIGKILL)
        (node / "go").touch()
        said = atoll("logs", "t", code={"finished": 0}.get(end, 100))
        arrived(said, LAUNCHED)
        for words in (
            ["queue", "t"],
            ["queue", "t", "-o", "json"],
            ["status", "t", "-o", "json"],
            ["logs", "t", "-o", "json"],
        ):
            assert "planted" not in atoll(*words, code=None)
        assert holding(*places) == []


def test_a_job_whose_variables_went_with_its_supervisor_says_so(home: Path) -> None:
    from local_cluster import LocalCluster

    cluster = LocalCluster.make(home, accelerator="L4", num_accelerators=1, simulated=True)
    first = cluster.submit("echo going; until [ -e go ]; do sleep 0.05; done", num_accelerators=1)
    cluster.wait_for(first, "going")
    waits = cluster.submit("echo never", num_accelerators=1, env={"A": "planted"})
    assert [Path(each).name for each in holding(home)] == ["variables.json"], "until the job starts"
    (cluster.folder / "jobs" / str(waits) / "variables.json").unlink()
    (cluster.folder / "nodes" / "0" / "home" / "sky_workdir" / "go").touch()
    status, log = cluster.follow(waits)
    assert status.ended
    assert "its variables can't be read" in log
    assert "never" not in log
