"""Clusters' records: what is made, reused, resized or refused, their names, and that one launch at a time decides."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.pools import SOURCE_ROOT

from atoll.core.errors import ConfigError, ProvisionError
from atoll.core.paths import temporary_beside
from atoll.providers import registry
from atoll.providers.base import Allocation, Node, NodePlan, NodeRequest, Offer, Plan, Provider
from atoll.tasks import clusters, lifecycle
from atoll.tasks.clusters import UnknownCluster
from atoll.tasks.placing import accelerators_text, decide, decide_any
from atoll.tasks.requests import Options, task_request
from atoll.tasks.rows import JobRow
from atoll.tasks.spec import ClusterSpec, ClusterStatus, JobSpec, JobStatus
from atoll.tasks.task import Task

RUNNING = JobRow(3, None, "", "me", JobSpec(), JobStatus.RUNNING, "", None, 0.0)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state folder for one test, on a machine without GPUs."""
    monkeypatch.setenv("ATOLL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path / "home"


def have(**fields: object) -> ClusterSpec:
    return dataclasses.replace(ClusterSpec("t", num_nodes=2), **fields)  # type: ignore[arg-type]


def make(spec: ClusterSpec) -> None:
    with clusters.locked(spec.name, "launch", print):
        clusters.save(spec, None)


# ---------------------------------------------------------------------------------------------------- decisions
def test_a_new_cluster_is_what_was_asked_for() -> None:
    made = decide("t", None, NodeRequest(num_nodes=3, accelerators=(("L4", 2),), cpus="8+", memory="32"))
    assert (made.cluster.num_nodes, made.cluster.cpus, made.cluster.memory_gb) == (3, "8+", "32")
    assert (made.accelerator, made.num_accelerators, made.cluster.simulated) == ("L4", 2, True)
    no_gpu = "this machine has no GPU that CUDA_VISIBLE_DEVICES='' leaves"
    assert made.lines == (f"3 × L4:2 simulated on CPU: {no_gpu}",)
    assert made.changed


def test_without_accelerators_nothing_is_simulated() -> None:
    made = decide("t", None, NodeRequest())
    assert (made.cluster.infra, made.cluster.simulated, made.num_accelerators, made.lines) == ("local", False, 0, ())


@pytest.mark.parametrize(
    ("wanted", "num_accelerators"),
    [
        (NodeRequest(num_nodes=1), 0),
        (NodeRequest(num_nodes=2, accelerators=(("L4", 4),)), 4),
        (NodeRequest(num_nodes=1, accelerators=(("L4", 2),)), 2),
        (NodeRequest(num_nodes=2, accelerators=(("H100", 8), ("L4", 1))), 1),
        (NodeRequest(num_nodes=2, cpus="4"), 0),
    ],
    ids=["fewer nodes", "the same", "fewer accelerators", "its second choice", "fewer CPUs"],
)
def test_less_than_it_has_uses_a_part(wanted: NodeRequest, num_accelerators: int) -> None:
    cluster = have(accelerator="L4", num_accelerators=4, simulated=True, cpus="8+")
    made = decide("t", cluster, wanted, [RUNNING])
    assert (made.cluster, made.num_accelerators, made.lines, made.changed) == (cluster, num_accelerators, (), False)


@pytest.mark.parametrize(
    ("wanted", "said", "accelerator"),
    [
        (NodeRequest(num_nodes=4), "2 → 4 nodes", "L4:4"),
        (NodeRequest(accelerators=(("H100", 8),)), "L4:4 → H100:8 per node", "H100:8"),
        (NodeRequest(accelerators=(("L4", 8),)), "L4:4 → L4:8 per node", "L4:8"),
        (NodeRequest(num_nodes=3, accelerators=(("L4", 2),)), "2 → 3 nodes", "L4:4"),
        (NodeRequest(cpus="16+"), "8+ → 16+ CPUs", "L4:4"),
        (NodeRequest(memory="64"), "64 memory", "L4:4"),
    ],
)
def test_more_than_it_has_resizes_it_when_idle(wanted: NodeRequest, said: str, accelerator: str) -> None:
    cluster = have(accelerator="L4", num_accelerators=4, simulated=True, cpus="8+")
    made = decide("t", cluster, wanted)
    assert made.lines[0] == f"cluster t is resized: {said}"
    assert accelerators_text(made.cluster.accelerator, made.cluster.num_accelerators) == accelerator
    assert made.cluster.num_nodes == max(2, wanted.num_nodes)
    assert made.changed
    with pytest.raises(ConfigError, match=r"can't be resized .* while job 3 is on it.*atoll cancel t 3"):
        decide("t", cluster, wanted, [RUNNING])


def test_a_stopped_cluster_is_restarted() -> None:
    made = decide("t", have(status=ClusterStatus.STOPPED), NodeRequest(num_nodes=2))
    assert made.cluster.status is ClusterStatus.UP
    assert made.lines == ("cluster t was stopped and is restarted",)
    assert made.changed


def test_a_cluster_that_is_down_is_made_anew() -> None:
    made = decide("t", have(status=ClusterStatus.DOWN, num_nodes=9, setup_done=(0, 1)), NodeRequest(num_nodes=2))
    assert (made.cluster.status, made.cluster.num_nodes, made.cluster.setup_done) == (ClusterStatus.UP, 2, ())
    assert "created again" in made.lines[0]


def test_what_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"is on local, not on ssh/lab \(--infra\)"):
        decide("t", have(), NodeRequest(infra="ssh/lab"))
    with pytest.raises(ConfigError, match="ssh/lab: no group of that name"):
        decide("t", None, NodeRequest(infra="ssh/lab"))
    with pytest.raises(ConfigError, match="no such infra; this version knows local, skypilot"):
        decide("t", None, NodeRequest(infra="mars"))
    with pytest.raises(ConfigError, match=r"accelerator 'H10O' is not known: did you mean H100\?"):
        decide("t", None, NodeRequest(accelerators=(("H10O", 8),)))
    with pytest.raises(ConfigError, match=r"2 × L4:2 can't be had: this machine has no GPU.*--no-simulate"):
        decide("t", None, NodeRequest(num_nodes=2, accelerators=(("L4", 2),), simulate=False))


class Rented(Provider):
    """``rented/PRICE`` and ``rented/PRICE/missing``: a machine for that many dollars an hour."""

    kind = "rented"
    form = "rented/PRICE"

    def __init__(self, name: str) -> None:
        self.place = f"rented/{name}"

    @classmethod
    def resolve(cls, name: str) -> Rented:
        return cls(name)

    def plan(self, request: NodeRequest, allocation: Allocation | None = None) -> Plan:
        _, price, *missing = self.place.split("/")
        if price == "full":
            raise ProvisionError(f"{self.place}: nothing is left")
        nodes = tuple(NodePlan(node, "", 1) for node in range(request.num_nodes))
        instance = request.resources.get("instance_type", "small")
        offer = Offer(infra=self.place, instance_type=instance, price=float(price), missing="".join(missing))
        return Plan("rented", nodes, allocation=allocation or Allocation(infra=self.place), offer=offer)

    def launch_agents(self, *_: object) -> Iterator[Node]:
        raise ProvisionError("not here")


def test_of_several_alternatives_the_cheapest_that_is_set_up_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._registered, "rented", Rented)
    wanted = [NodeRequest(infra=f"rented/{name}", num_nodes=2) for name in ("full", "3", "1/keys", "2")]
    made = decide_any("t", None, wanted)
    assert (made.cluster.infra, made.hourly_cost) == ("rented/2", 4.0)
    assert [each.cluster.infra for each in made.others] == ["rented/3", "rented/1/keys"]
    assert made.lines == ("rented/full: nothing is left",)
    assert decide_any("t", None, wanted, in_order=True).cluster.infra == "rented/3"
    assert decide_any("t", have(infra="rented/3"), wanted).cluster.infra == "rented/3"
    with pytest.raises(ProvisionError, match="none of the task's alternatives can be had"):
        decide_any("t", None, [wanted[0], wanted[0]])
    with pytest.raises(ProvisionError, match="nothing is left"):
        decide_any("t", None, wanted[:1])


def test_what_else_a_task_asks_of_its_nodes_reaches_the_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._registered, "rented", Rented)
    task = Task(run="true", resources={"use_spot": True, "instance_type": "large", "cpus": 2, "autostop": 5})
    request = task_request(task, Options(infra="rented/1")).resources
    assert request.resources == {"use_spot": True, "instance_type": "large"}
    made = decide("t", None, request)
    assert made.offer is not None
    assert made.offer.instance_type == "large"
    again = ClusterSpec.from_json(json.loads(json.dumps(made.cluster.to_json()))).request()
    assert (again.resources, again.cpus, again.infra) == (request.resources, "2", "rented/1")


def test_alternatives_of_a_task() -> None:
    task = Task(
        run="true",
        resources={
            "accelerators": ["L4", "T4"],
            "any_of": [{"infra": "ssh/a"}, {"infra": "ssh/b", "use_spot": True}, {"infra": "ssh/a"}],
        },
    )

    def places(infra: str | None = None) -> list[tuple[str | None, bool]]:
        request = task_request(task, Options(infra=infra))
        assert not request.in_order
        wanted = [request.resources, *request.others]
        assert {each.accelerators for each in wanted} == {(("L4", 1), ("T4", 1))}
        return [(each.infra, bool(each.resources)) for each in wanted]

    assert places() == [("ssh/a", False), ("ssh/b", True)]
    assert places("ssh") == [("ssh/a", False), ("ssh/b", True)]
    assert places("ssh/b") == [("ssh/b", True)]


# ------------------------------------------------------------------------------------------------------ records
def test_records() -> None:
    make(have())
    make(have(name="other"))
    assert clusters.all_names() == ["other", "t"]
    assert clusters.load("t") == have()
    assert clusters.folder_of("t").stat().st_mode & 0o777 == 0o700
    assert clusters.matching(["o*", "t"]) == ["other", "t"]
    with pytest.raises(UnknownCluster, match="did you mean 'other'"):
        clusters.load("othr")
    with pytest.raises(UnknownCluster, match="`atoll status --all` lists all clusters"):
        clusters.load("something")
    with pytest.raises(UnknownCluster, match=r"no cluster matches 'x\*'"):
        clusters.matching(["x*"])


def test_a_damaged_record_is_named() -> None:
    make(have())
    path = clusters.folder_of("t") / "cluster.json"
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"cluster\.json is damaged"):
        clusters.load("t")


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("infra", "mars", "infra: 'mars' and its allocation's 'local' differ"),
        ("allocation", {"infra": "local"}, "allocation: invalid value"),
        ("num_nodes", 0, "num_nodes: invalid value 0"),
        ("num_nodes", 10**400, "num_nodes: invalid value 1000"),
        ("created_s", float("inf"), "created_s: invalid value inf"),
    ],
)
def test_a_record_of_what_cannot_be(field: str, value: object, said: str) -> None:
    make(have())
    path = clusters.folder_of("t") / "cluster.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    with pytest.raises(ConfigError, match=rf"{path} is damaged \({said}.*`atoll down --purge t`"):
        clusters.load("t")


@pytest.mark.parametrize("file", ["launch.lock", "record.lock"])
def test_a_lock_that_is_a_folder(file: str) -> None:
    make(have())
    path = clusters.folder_of("t") / file
    path.unlink(missing_ok=True)
    path.mkdir()
    with pytest.raises(ConfigError, match=rf"{path} can't be locked .*: `atoll down --purge t` removes"):
        lifecycle.stop("t")
    told: list[str] = []
    lifecycle.purge("t", told.append)
    what = f"cluster t: {path} can't be locked (Is a directory)"
    assert told == [f"{what}; what was left of it is removed"]
    assert not clusters.folder_of("t").exists()


@pytest.mark.parametrize("name", ["", "../up", "a/b", "-c", "a" * 64, "a b", "ü"])
def test_names_that_cannot_be(name: str) -> None:
    with pytest.raises(ConfigError, match="cluster name"):
        clusters.folder_of(name)


def test_a_fresh_name_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "Jo.Doe-with-a-very-long-name" * 3)
    codes = iter(("00ff", "00ff", "ff00"))
    monkeypatch.setattr("secrets.token_hex", lambda num_bytes: next(codes))
    first = clusters.check_name(clusters.fresh_name())
    assert first.startswith("atoll-00ff-JoDoe")
    make(have(name=first))
    assert clusters.fresh_name().startswith("atoll-ff00-")  # no other cluster's


def test_nodes_by_name() -> None:
    assert [clusters.node_of(have(), name) for name in ("head", "worker1")] == [0, 1]
    with pytest.raises(ConfigError, match="did you mean 'worker1'"):
        clusters.node_of(have(), "worker2")


HOLD = """
import sys, time
from atoll.tasks import clusters, lifecycle
with clusters.locked("t", "launch", print):
    print("held", flush=True)
    sys.stdin.read()
    print("done", flush=True)
"""


def test_one_launch_at_a_time() -> None:
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD], text=True, env={**os.environ, "PYTHONPATH": SOURCE_ROOT}, **streams
    )
    assert other.stdin is not None
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    told: list[str] = []

    def waiting(line: str) -> None:
        told.append(line)
        os.kill(other.pid, signal.SIGCONT)
        other.stdin.close()  # only now does it let go

    left = clusters.folder_of("t") / ".cluster.json.0123abcd.tmp"  # of one that was killed
    left.touch()
    with clusters.locked_if_free("t", "autostop") as free:
        assert not free
    os.kill(other.pid, signal.SIGSTOP)
    holder = f"launch, process {other.pid}, which is stopped (kill -CONT {other.pid})"
    with temporary_beside(clusters.folder_of("t") / "cluster.json") as written, clusters.locked("t", "down", waiting):
        assert (told, other.stdout.read()) == ([f"waiting for another command on cluster t: {holder}"], "done\n")
        assert (left.exists(), written.exists()) == (False, True)  # the second is being written
    other.stdout.close()
    assert other.wait(20) == 0
    with clusters.locked_if_free("t", "autostop") as free:
        assert free
