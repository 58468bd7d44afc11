"""The seam to places where nodes come from: nothing outside names one, a new one is a file, and what is above bears
one that is late, lies, loses nodes or starts half of them."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.pools import agent_pid, eventually

import atoll as sky
import leaks
from atoll.agent.process_tree import command_line
from atoll.core.errors import ConfigError, NodeLost, ProvisionError
from atoll.providers import registry
from atoll.providers.base import AllocatedNode, Allocation, AllocationState, NodeRequest
from atoll.tasks import supervisor, waiting

SOURCE = Path(sky.__file__).parent
INFRAS = Path(__file__).parent / "infras"
# What they may import of it: the seam itself, and plain data.
OPEN = {"base", "registry", "accelerators", "gpus", "bundle", "upkeep"}


def outside() -> Iterator[tuple[Path, ast.AST]]:
    """Every node of every module that is not a provider's own; ``atoll.train`` knows nothing of the launcher."""
    for path in SOURCE.rglob("*.py"):
        if path.relative_to(SOURCE).parts[0] not in ("providers", "train"):
            for node in ast.walk(ast.parse(path.read_text())):
                yield path.relative_to(SOURCE), node


def names(node: ast.AST) -> set[str]:
    """Names and attributes in an expression."""
    return {getattr(each, "id", None) or getattr(each, "attr", "") for each in ast.walk(node)}


def test_nothing_outside_names_an_infra_or_a_provider() -> None:
    found = []
    for path, node in outside():
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            constants = any(isinstance(each, (ast.Constant, ast.Tuple)) for each in sides)
            not_none = not any(isinstance(each, ast.Constant) and each.value is None for each in sides)
            wrong = "infra" in set().union(*map(names, sides)) and constants and not_none
            wrong = wrong and not any(isinstance(op, (ast.In, ast.NotIn)) for op in node.ops)
            wrong = wrong or sum("infra" in names(side) for side in sides) > 1  # `registry.fits` compares two
        elif isinstance(node, ast.Call):
            function = node.func
            called = getattr(function, "id", None) or getattr(function, "attr", "")
            asks_type = called == "isinstance" and any("provider" in name.lower() for name in names(node))
            begins = called == "startswith" and "infra" in names(function)
            wrong = asks_type or begins
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names]
            if modules == ["atoll.providers"]:
                modules = [f"atoll.providers.{each.name}" for each in node.names]  # type: ignore[union-attr]
            parts = [module.split(".") for module in modules if module.startswith("atoll.providers.")]
            wrong = any(part[2] not in OPEN for part in parts)
        else:
            continue
        if wrong:
            found.append(f"{path}:{node.lineno}")
    assert found == []


def test_an_allocation_survives_json() -> None:
    made = Allocation(
        infra="ssh/lab",
        id="c",
        state=AllocationState.PENDING,
        reason="queued",
        nodes=(AllocatedNode(name="h1", address="10.0.0.1", reach="h1:22"),),
        site="head",
        settings={"key": None, "grace_s": 3.0},
    )
    assert Allocation.from_json(json.loads(json.dumps(made.to_json()))) == made
    for wrong in (None, {}, {"infra": "local"}, {**made.to_json(), "state": "GONE"}, {**made.to_json(), "nodes": [3]}):
        with pytest.raises(ValueError, match="allocation: "):
            Allocation.from_json(wrong)


def test_infras_are_resolved_or_said_to_be_none(home: Path) -> None:
    home.mkdir()
    (home / "config.toml").write_text('[ssh.lab]\nhosts = ["a", "b:2222"]\n')
    assert registry.declared() == ["local", "ssh/lab"]
    assert registry.resolve("local") == sky.Local()
    assert registry.resolve("ssh/lab").num_nodes == 2
    for infra, said in (
        ("lab", "did you mean ssh/lab"),
        ("locl", "did you mean 'local'"),
        ("mars", "this version knows local, skypilot.*, slurm/NAME, ssh/NAME and clouds such as aws, gcp"),
        ("registry", "no such infra"),
        ("local/x", "local alone"),
        ("ssh", "ssh/NAME, with a NAME"),
    ):
        with pytest.raises(ConfigError, match=said):
            registry.resolve(infra)


@pytest.mark.parametrize(
    ("state", "said"), [(AllocationState.LOST, "its time limit was reached"), (AllocationState.READY, "no answer")]
)
def test_what_fails_since_its_nodes_ended_says_why_they_did(state: AllocationState, said: str) -> None:
    class Ended(sky.Local):
        def poll(self, allocation: Allocation, *, max_age_s: float = 0.0) -> Allocation:
            return Allocation(state=state, reason="its time limit was reached")

    with pytest.raises(ProvisionError, match=said), registry.given_back_on_failure(Ended(), Allocation()):
        raise ProvisionError("no answer from h1")


# -------------------------------------------------------------------------------------------- a provider is one file
@pytest.fixture
def folders(home: Path) -> Iterator[None]:
    (home / "providers").mkdir(parents=True)
    shutil.copy(INFRAS / "folders.py", home / "providers")
    yield
    registry._registered.clear()


def test_a_provider_is_one_file(folders: None, capfd: pytest.CaptureFixture[str]) -> None:
    assert len((INFRAS / "folders.py").read_text().splitlines()) <= 150
    with sky.ComputePool(registry.resolve("folders/2"), nodes=2, logs="quiet") as pool:
        assert pool.run(os.getenv, "RANK") == ["0", "1"]
    job = sky.launch(sky.Task(run="echo at $SKYPILOT_NODE_RANK", num_nodes=2), "c", infra="folders/2")
    assert job.wait() is sky.JobStatus.SUCCEEDED
    assert {"at 0", "at 1"} <= {line.partition(") ")[2] for line in job.logs().splitlines()}
    with pytest.raises(ConfigError, match="folders/2 has 2 nodes"):
        sky.launch(sky.Task(run="true", num_nodes=3), "d", infra="folders/2")
    sky.down("c")


# -------------------------------------------------------------------------------- providers that are late, lie or fail
Script = Callable[..., None]


@pytest.fixture
def fake(home: Path) -> Iterator[Script]:
    """Has the fake provider behave so from now on."""
    (home / "providers").mkdir(parents=True)
    shutil.copy(INFRAS / "fake.py", home / "providers")

    def behave(**how: object) -> None:
        (home / "fake.new").write_text(json.dumps(how))
        (home / "fake.new").rename(home / "providers" / "fake.json")

    yield behave
    behave()
    with contextlib.suppress(sky.AtollError):
        sky.down("c")
    registry._registered.clear()


@pytest.fixture
def node(home: Path) -> Path:
    """The home of its node."""
    return home / "clusters" / "c" / "nodes" / "0" / "home"


def launched(run: str, num_nodes: int = 1, **more: Any) -> Any:
    return sky.launch(sky.Task(run=run, num_nodes=num_nodes, **more), "c", infra="fake")


def test_a_launch_and_a_pool_wait_for_a_pending_allocation_and_say_why(
    fake: Script, capfd: pytest.CaptureFixture[str]
) -> None:
    fake(state="PENDING", reason="behind 3 jobs", addresses=["127.0.0.9"])
    said: list[str] = []

    def report(line: str) -> None:
        said.append(line)
        if "behind 3 jobs" in line:
            fake(state="PENDING", reason="next in turn", addresses=["127.0.0.9"])
        if "next in turn" in line:
            fake(addresses=["127.0.0.9"])

    job = sky.launch(sky.Task(run="echo at $SKYPILOT_NODE_IPS"), "c", infra="fake", on_line=report)
    assert job.wait() is sky.JobStatus.SUCCEEDED
    assert [line for line in said if "waiting" in line] == [
        "waiting for fake: behind 3 jobs",
        "waiting for fake: next in turn",
    ]
    assert "at 127.0.0.9" in job.logs()
    fake(state="PENDING", reason="behind a pool")
    threading.Timer(0.5, fake).start()
    with sky.ComputePool(registry.resolve("fake")) as pool:
        assert pool.run(os.getenv, "RANK") == ["0"]
    assert "atoll: waiting for fake: behind a pool" in capfd.readouterr().err


def test_other_commands_tell_why_a_launch_waits(fake: Script, home: Path) -> None:
    fake(state="PENDING", reason="behind 3 jobs (Priority)")
    said: dict[str, str] = {}

    def report(line: str) -> None:
        if "behind 3 jobs" not in line:
            return
        for words in ("status c", "queue", "queue c -o json", "queue d"):
            done = subprocess.run([sys.executable, "-m", "atoll", *words.split()], capture_output=True, text=True)
            said[words] = f"{done.returncode} {done.stdout}"
        said["sdk"] = str([(each["name"], each.status, each.reason) for each in sky.get(sky.status())])
        fake()

    sky.launch(sky.Task(run="true", num_nodes=2), "c", infra="fake", on_line=report).wait()
    why = "waiting for fake: behind 3 jobs (Priority)"
    assert re.search(r"^c +fake +2x \(CPU\) +INIT ", said["status c"], re.M), said["status c"]
    assert said["status c"].splitlines()[-1] == f"c: {why}"
    assert said["queue"] == f"0 cluster c has no nodes yet, so no job: {why}\n"
    row = {"cluster": "c", "job_id": None, "status": "PENDING", "reason": why}
    assert json.loads(said["queue c -o json"].partition(" ")[2]) == [row]
    assert said["queue d"].startswith("102 ")
    assert said["sdk"] == f"[('c', <ClusterStatus.INIT: 'INIT'>, '{why}')]"
    assert waiting.launches() == []
    (home / "clusters/killed").mkdir()
    (home / "clusters/killed" / waiting.FILE).write_text("{}")  # of a launch that was killed
    assert waiting.launches() == []
    assert not (home / "clusters/killed").exists()


def test_nodes_that_never_come_are_no_cluster(fake: Script) -> None:
    fake(state="LOST", reason="its quota is used up")
    with pytest.raises(ProvisionError, match="fake gave no nodes: its quota is used up"):
        launched("true")
    with pytest.raises(ProvisionError, match="fake gave no nodes: its quota is used up"):
        sky.ComputePool(registry.resolve("fake")).up()
    assert sky.get(sky.status()) == []


def test_a_job_between_attempts_waits_for_nodes_and_goes_by_their_new_addresses(fake: Script, node: Path) -> None:
    fake(addresses=["127.0.0.5"])
    run = "echo at $SKYPILOT_NODE_IPS; mkdir ~/first && touch ~/up && sleep 60; true"
    job = launched(run)
    eventually((node / "up").exists, "it runs", 60)
    fake(state="PENDING", reason="a new machine boots", addresses=["127.0.0.6"])
    kill_agent()
    eventually(lambda: "waiting for fake: a new machine boots" in job.logs(), "it waits", 60)
    assert job.row().reason == "waiting for fake: a new machine boots"
    fake(addresses=["127.0.0.6"])
    assert job.wait() is sky.JobStatus.SUCCEEDED, job.logs()
    log = job.logs()
    assert "at 127.0.0.5" in log
    assert "at 127.0.0.6" in log


def test_a_lying_poll_kills_no_healthy_job(fake: Script, node: Path) -> None:
    job = launched("touch ~/up; until [ -e ~/go ]; do sleep 0.05; done")
    eventually((node / "up").exists, "it runs", 60)
    fake(state="LOST", reason="so it says")
    (node / "go").touch()
    assert job.wait() is sky.JobStatus.SUCCEEDED


def test_a_preempted_node_is_reported_as_lost_with_the_reason(fake: Script, node: Path) -> None:
    job = launched("mkdir ~/first && touch ~/up && sleep 60; true")
    eventually((node / "up").exists, "it runs", 60)
    fake(preempted="the spot machine was taken back")
    kill_agent()
    assert job.wait() is sky.JobStatus.SUCCEEDED
    assert "head was lost: the spot machine was taken back" in job.logs().replace("\n", " ")
    with sky.ComputePool(registry.resolve("fake"), logs="quiet") as pool:
        call = pool.submit(time.sleep, 60)
        os.kill(agent_pid(pool, 0), signal.SIGKILL)
        with pytest.raises(NodeLost, match="node 0 was lost: the spot machine was taken back"):
            call.result(60)


def test_a_node_that_does_not_start_is_named(fake: Script) -> None:
    fake(broken=1)
    job = launched("true", num_nodes=2)
    assert job.wait() is not sky.JobStatus.SUCCEEDED
    assert "worker1" in job.logs()
    assert "no machine left" in job.logs()
    with pytest.raises(ProvisionError, match="node 1 of 2 could not be started on fake: no machine left"):
        sky.ComputePool(registry.resolve("fake"), nodes=2).up()


def test_a_request_is_plain() -> None:
    assert NodeRequest(workers_per_node="auto").num_ranks(0) == 1
    assert NodeRequest(workers_per_node="auto").num_ranks(4) == 4
    assert NodeRequest(workers_per_node=3).num_ranks(4) == 3


def kill_agent() -> None:
    """Kill the newest agent of the cluster's supervisor."""
    pid = supervisor.pid_of(Path(os.environ["ATOLL_HOME"], "clusters", "c"))
    assert pid is not None
    agents = [each for each in leaks.descendants(pid) if command_line(each).startswith(b"atoll-agent")]
    os.kill(agents[-1], signal.SIGKILL)
