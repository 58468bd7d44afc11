"""Clouds through SkyPilot: rented machines, which are hosts of the testbed behind a fake of SkyPilot's process."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.pools import eventually

import atoll as sky
from atoll.core.errors import ConfigError, ProvisionError
from atoll.providers import registry
from atoll.providers.base import NodeRequest
from atoll.providers.skypilot import KINDS, client, environment, helper
from atoll.tasks import clusters, controllers, lifecycle, managed_api
from atoll.tasks.spec import JobStatus
from testbed.fixtures import bed, make_bed
from testbed.hosts import Testbed

__all__ = ["bed", "make_bed"]

FAKE = Path(__file__).parent / "infras" / "skypilot_fake.py"
ATOLL = str(Path(sys.executable).with_name("atoll"))
Script = Callable[..., None]


def install_fake(home: Path) -> Script:
    """Have every process of a state folder take the fake for SkyPilot; returns what has it behave so from now on."""
    venv = home / "skypilot" / "venv"
    (venv / "bin").mkdir(parents=True)
    program = venv / "bin" / "python"
    program.write_text(f"#!/bin/sh\nexec {shlex.join([sys.executable, str(FAKE)])}\n")
    program.chmod(0o755)
    (venv / "atoll.json").write_text(json.dumps({"version": environment.VERSION, "extras": [*KINDS, "kubernetes"]}))

    def behave(**how: object) -> None:
        have = json.loads((home / "fake.json").read_text()) if (home / "fake.json").exists() else {}
        (home / "fake.new").write_text(json.dumps({**have, **how}))
        (home / "fake.new").rename(home / "fake.json")

    behave()
    return behave


@pytest.fixture
def prices(home: Path) -> Iterator[Script]:
    """A cloud that has prices, and no machines."""
    home.mkdir()
    yield install_fake(home)
    client.close()


@pytest.fixture
def cloud(bed: Testbed) -> Iterator[Script]:
    """A cloud of two machines."""
    home = Path(os.environ["ATOLL_HOME"])
    behave = install_fake(home)
    behave(hosts=[host.addr for host in bed.hosts], key=str(bed.home / ".ssh" / "id_ed25519"))
    yield behave
    client.close()


def calls(method: str) -> list[dict[str, Any]]:
    """The arguments of each call of a method so far."""
    log = Path(os.environ["ATOLL_HOME"], "calls.jsonl")
    lines = log.read_text().splitlines() if log.exists() else []
    return [arguments for name, arguments in map(json.loads, lines) if name == method]


def rented() -> list[str]:
    """Clusters that somebody pays for."""
    return sorted(path.name for path in Path(os.environ["ATOLL_HOME"], "fake-clusters").glob("*"))


def atoll(*words: str, code: int = 0) -> str:
    """What a command prints, standard error behind its output; it has to end with that exit code."""
    done = subprocess.run([ATOLL, *words], capture_output=True, text=True, timeout=90)
    print(done.stdout, done.stderr)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


# ------------------------------------------------------------------------------------------------- which, and prices
@pytest.mark.parametrize(
    ("made", "infra"),
    [
        (sky.AWS, "aws"),
        (lambda: sky.AWS(region="us-east-1", zone="us-east-1a"), "aws/us-east-1/us-east-1a"),
        (lambda: sky.GCP(zone="us-central1-a"), "gcp/*/us-central1-a"),
        (lambda: sky.Kubernetes(region="arn:aws:eks/x"), "k8s/arn:aws:eks/x"),
        (sky.SkyPilot, "skypilot"),
        (lambda: sky.SkyPilot("aws/us-east-1"), "aws/us-east-1"),
        (lambda: sky.SkyPilot(infra="slurm/lab/debug"), "skypilot/slurm/lab/debug"),
        (lambda: sky.SkyPilot(region="us-east-1"), "skypilot/*/us-east-1"),
        (lambda: sky.SkyPilot("*"), "skypilot"),
    ],
)
def test_an_infra_is_one_text_however_it_is_said(made: Callable[[], sky.SkyPilot], infra: str) -> None:
    assert made().infra == infra
    assert registry.resolve(infra).infra == infra


def test_a_star_is_any_cloud() -> None:
    assert registry.resolve("*/us-east-1").infra == "skypilot/*/us-east-1"
    assert sky.Resources(region="us-east-1").infra == "*/us-east-1"
    for stated in ("*/us-east-1", "skypilot/*/us-east-1", "skypilot", "skypilot/aws", "*"):
        assert registry.fits(stated, "aws/us-east-1"), stated
    for stated in ("*/us-west-2", "skypilot/gcp"):
        assert not registry.fits(stated, "aws/us-east-1"), stated
    assert not registry.fits("skypilot", "ssh/lab")


def test_what_no_infra_is() -> None:
    for made, said in (
        (lambda: sky.SkyPilot("awss"), "SkyPilot has no cloud 'awss': did you mean 'aws'"),
        (lambda: sky.AWS("gcp"), "expected aws"),
        (lambda: sky.AWS("aws/us-east-1", region="us-west-2"), "says this already"),
        (lambda: sky.AWS(region=3), r"AWS\(region=3\): expected text"),
        (lambda: sky.AWS(end_minutes=0), "end_minutes"),
        (lambda: registry.resolve("slurm/x/y/z/nowhere"), "no such Slurm cluster"),
    ):
        with pytest.raises(ConfigError, match=said):
            made()
    with pytest.raises(sky.UsageError, match="no argument 'regoin': did you mean 'region'"):
        sky.AWS(regoin="x")  # type: ignore[call-arg]


def test_a_plan_needs_no_credentials_and_a_pool_says_what_to_set_up(prices: Script) -> None:
    prices(missing="run `aws configure`")
    pool = sky.ComputePool(provider=sky.AWS(region="us-west-2", use_spot=True), nodes=2, accelerator="L4")
    plan = pool.plan()
    assert plan.offer is not None
    assert (plan.world_size, plan.hourly_cost) == (2, 0.8)
    assert "aws/us-west-2: g6.xlarge, spot $0.40/h (on demand $0.80/h)" in str(plan)
    with pytest.raises(ConfigError, match="aws/us-west-2 can't be used yet: run `aws configure`"):
        pool.up()
    assert calls("launch") == []
    assert calls("offers")[0]["resources"] == {"infra": "aws/us-west-2", "use_spot": True, "accelerators": "L4:1"}
    with pytest.raises(ConfigError, match=r"H100:8 can't be had on aws.*nothing there fits"):
        sky.ComputePool(provider="aws", accelerator="H100:8").plan()
    assert registry.examine("aws") == [(False, "run `aws configure`")]
    assert "L4    1      g6.xlarge      us-east-1  0.8" in atoll("gpus", "aws")
    assert "✗ aws: run `aws configure`" in atoll("check", "aws", code=100)


def test_a_cloud_is_asked_for_any_of_several_kinds_and_a_typo_is_said(prices: Script) -> None:
    for accelerators in (["L4", "A10G"], {"L4": 1, "A10G": 1}):
        task = sky.Task(run="true", resources={"infra": "*/us-east-1", "accelerators": accelerators})
        sky.launch(task, "c", dryrun=True)
    in_order, any_of = [each["resources"] for each in calls("offers")]
    assert in_order == {"infra": "*/us-east-1", "accelerators": ["L4:1", "A10G:1"]}
    assert any_of == {"infra": "*/us-east-1", "accelerators": {"L4:1": None, "A10G:1": None}}
    prices(no_offers=["ResourcesUnavailableError", "nothing there fits"])
    said = atoll("launch", "--dryrun", "--infra", "aws", "--gpus", "L44:2", "true", code=2)
    assert "L44:2 can't be had on aws: accelerator 'L44' is not known: did you mean L4?" in said


def test_the_sdk_lists_what_clouds_rent(prices: Script) -> None:
    found = sky.get(sky.list_accelerators(name_filter="L4", clouds=["AWS", "gcp"]))
    assert [(each.cloud, each.instance_type, each.price) for each in found["L4"]] == [
        ("AWS", "g6.xlarge", 0.8),
        ("gcp", "g6.xlarge", 0.8),
    ]
    assert sky.get(sky.list_accelerators(quantity_filter=8, clouds="aws")) == {}
    with pytest.raises(sky.UsageError, match="name clouds, as in clouds='aws'"):
        sky.list_accelerators()
    with pytest.raises(ConfigError, match="did you mean 'aws'"):
        sky.list_accelerators(clouds="awss")
    with pytest.raises(ConfigError, match="K8S/lab: no such infra: did you mean 'k8s'"):
        registry.resolve("K8S/lab")
    with pytest.raises(sky.UsageError, match=r"name_filter='A100\(' is no regular expression: missing \)"):
        sky.list_accelerators(clouds="aws", name_filter="A100(")
    with pytest.raises(AttributeError, match=r"no attribute 'optimize': sky.launch\(task, dryrun=True\)"):
        sky.optimize


def test_a_managed_job_tries_the_cheapest_of_any_of_first(prices: Script) -> None:
    prices(error=["ResourcesUnavailableError", "none are left"])
    try:
        for key, first in (("any_of", "aws"), ("ordered", "gcp")):
            task = sky.Task(run="true", resources={key: [{"infra": "gcp"}, {"infra": "aws"}]})
            (job,) = managed_api.launch(task)
            eventually(lambda job=job: "none are left" in job.logs(), "it was tried", 60)
            assert f"Attempt 1: launching on {first}" in job.logs()
            job.cancel()
            assert job.wait() is JobStatus.CANCELLED
    finally:
        lifecycle.purge(controllers.HERE, print)


def test_a_task_is_planned_on_several_infras_side_by_side(prices: Script, tmp_path: Path) -> None:
    task = tmp_path / "task.yaml"
    task.write_text(
        "resources: {accelerators: L4, use_spot: true, disk_size: 100,\n"
        "  any_of: [{infra: gcp}, {infra: aws/us-east-1}]}\n"
        "num_nodes: 2\nrun: echo hi\n"
    )
    said = atoll("launch", "--dryrun", "-c", "c", str(task))
    assert said.index("aws/us-east-1: g6.xlarge, spot $0.40/h (on demand $0.80/h); $0.80/h in all") < said.index(
        "or gcp"
    )
    assert calls("offers")[0]["resources"]["disk_size"] == 100
    said = atoll("launch", "--dryrun", "-c", "c", "--max-cost", "5", "echo hi", code=2)
    assert "--max-cost 5: what local costs is not known" in said


def test_skypilot_that_can_not_be_used_is_one_line(prices: Script, home: Path) -> None:
    prices(says="it has SkyPilot 0.10.0, and 0.14.1 is needed")
    with pytest.raises(ProvisionError, match=r"process ended: it has SkyPilot 0.10.0.*remove .*venv"):
        registry.resolve("aws").plan(NodeRequest())
    (home / "skypilot" / "venv" / "bin" / "python").chmod(0o600)
    with pytest.raises(ProvisionError, match="can't be started: Permission denied"):
        registry.resolve("aws").plan(NodeRequest())


@pytest.mark.parametrize(
    ("infra", "kind", "says", "step"),
    [
        ("*/us-east-1", "NoCloudAccessError", "No cloud access", "`atoll check` says what to set up"),
        ("aws", "NoCloudAccessError", "No cloud access", "`atoll check aws` says what to set up"),
        ("aws", "RuntimeError", "API server process exited unexpectedly.\nView logs", "start: .*server.log .*/port$"),
        ("aws", "ApiServerConnectionError", "Could not connect, try: curl", "start: .*server.log .*/port$"),
        ("aws", "ApiServerAuthenticationError", "sky api login", "another program answers .* remove .*/port$"),
    ],
)
def test_what_skypilot_says_comes_with_the_next_step(
    prices: Script, infra: str, kind: str, says: str, step: str
) -> None:
    prices(no_offers=[kind, says])
    with pytest.raises(sky.AtollError, match=step):
        registry.resolve(infra).plan(NodeRequest())


def test_prices_that_can_not_be_fetched_are_one_plain_line(prices: Script, home: Path) -> None:
    prices(no_offers=["ConnectionError", "HTTPSConnectionPool(host='x', port=443): Max retries exceeded with url: /v8"])
    with pytest.raises(ProvisionError) as error:
        registry.resolve("aws").plan(NodeRequest())
    folder = home / "skypilot/home/.sky/catalogs/v8/aws"
    assert str(error.value) == (
        f"SkyPilot: prices could not be fetched from the internet: put the cloud's vms.csv into {folder}"
    )


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_text(""), lambda path: path.write_text("x\n")])
def test_a_lost_port_or_password_is_chosen_anew(prices: Script, damage: Callable[[Path], object]) -> None:
    names = "SKYPILOT_API_SERVER_LOCAL_PORT", "SKYPILOT_SERVICE_ACCOUNT_TOKEN"
    first, again = environment.environ(), environment.environ()
    assert [first[name] for name in names] == [again[name] for name in names]
    for name in ("port", "password"):
        damage(environment.folder() / name)
    anew = environment.environ()
    assert all(anew[name] != first[name] for name in names)
    assert anew[names[1]].startswith("sky_")
    assert (environment.folder() / "password").stat().st_mode & 0o777 == 0o600


def test_the_users_own_skypilot_is_another(prices: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYPILOT_API_SERVER_ENDPOINT", "http://sky.example.com")  # it would be told our password
    assert "SKYPILOT_API_SERVER_ENDPOINT" not in environment.environ()


def test_a_port_at_which_another_user_listens_is_not_told_the_password(prices: Script) -> None:
    name = "SKYPILOT_API_SERVER_LOCAL_PORT"
    port = environment.environ()[name]
    code = "import socket, sys; s = socket.create_server(('127.0.0.1', int(sys.argv[1]))); print(flush=True); input()"
    with subprocess.Popen(
        ["/usr/bin/env", "python3", "-c", code, port],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        user=65534,
        cwd="/",
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"\n"
        assert environment.environ()[name] != port
        other.kill()


def test_what_a_cloud_lacks_is_said_without_the_details_of_its_tools() -> None:
    said = "AWS credentials are not set. Run:\n  \x1b[1m$ aws configure\n    Details: `aws sts` failed: [botocore.e…"
    assert helper._first_lines(said) == "AWS credentials are not set. Run: $ aws configure"


@pytest.mark.long
def test_skypilot_that_can_not_be_installed_is_one_line(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(ProvisionError) as error:
        registry.resolve("aws").plan(NodeRequest())
    assert "\n" not in str(error.value)
    assert "could not be installed: Could not find a version" in str(error.value)


def test_an_installation_outlives_its_killed_command_and_the_next_one_waits(home: Path, tmp_path: Path) -> None:
    home.mkdir()
    go, python = tmp_path / "go", home / "skypilot" / "venv" / "bin" / "python"
    # In place of `python -m venv` and of pip, which takes until we say so.
    slow = f"#!/bin/sh\\n[ $1 = -m ] || exit\\necho $$ >> {tmp_path}/pips\\nuntil [ -e {go} ]; do sleep 0.05; done"
    code = (
        "import pathlib, sys; from atoll.providers.skypilot import environment as e\n"
        f"p = pathlib.Path({str(python)!r}); p.parent.mkdir(parents=True, exist_ok=True)\n"
        f"p.write_text('{slow}'); p.chmod(0o755); sys.executable = '/bin/true'\n"
        "print(e.interpreter('aws'))"
    )

    def install() -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [sys.executable, "-c", code], stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )

    first = install()
    eventually((tmp_path / "pips").exists, "pip runs", 30)
    first.kill()
    first.communicate()
    second = install()
    assert second.stderr is not None
    assert "waiting for another command to install SkyPilot" in second.stderr.readline()
    assert len((tmp_path / "pips").read_text().split()) == 1
    go.touch()
    said, _ = second.communicate(timeout=30)
    assert said.strip() == str(python)
    assert len((tmp_path / "pips").read_text().split()) == 2


# ------------------------------------------------------------------------------------------------------- the machines
def test_the_life_of_a_cluster(cloud: Script, tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("shipped\n")
    said = atoll("launch", "-c", "c", "--infra", "aws", "--num-nodes", "2", "--workdir", str(tmp_path), "cat note.txt")
    assert said.count(") shipped") == 2
    assert rented() == ["atoll-c"]
    (report,) = sky.get(sky.cost_report(days=1))
    assert (report.name, report.num_nodes, report.hourly_cost) == ("c", 2, 1.6)
    assert report.total_cost == pytest.approx(1.6 * report.duration / 3600, abs=0.001)
    (launched,) = calls("launch")
    assert launched == {"name": "atoll-c", "resources": {"infra": "aws"}, "num_nodes": 2, "idle_minutes": 60}
    assert clusters.load("c").allocation.infra == "aws/us-east-1"
    said = atoll("exec", "c", "--num-nodes", "2", "[ $SKYPILOT_NODE_RANK = 0 ] && sleep 60; exit 3", code=100)
    assert "rank 1 on worker1 exited with code 3" in said
    assert atoll("ssh", "c/worker1", "--", "hostname").strip() == "h2"
    eventually(lambda: len(calls("renew")) == 1, "the watcher has the machines stay", 60)
    said = atoll("launch", "-c", "c", "--num-nodes", "3", "true", code=2)
    assert "rented machines can't become more" in said
    atoll("down", "c")
    assert rented() == []
    atoll("down", "c")
    assert (len(calls("down")), len(calls("end_server"))) == (1, 1)
    assert "shipped" in atoll("logs", "c", "1")
    assert [path.name for path in (environment.folder() / "ssh").glob("atoll-*")] == []


@pytest.mark.long
def test_a_pool_and_its_end(cloud: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.providers.upkeep._KEEP_S", 0.1)
    with sky.ComputePool(provider=sky.AWS(), nodes=2, logs="quiet") as pool:
        assert pool.run(os.getenv, "RANK") == ["0", "1"]
        assert len(rented()) == 1
        eventually(lambda: len(calls("renew")) == 1, "its machines stay", 30)
    assert rented() == []


def test_a_launch_that_fails_leaves_nothing_and_the_next_infra_is_tried(cloud: Script) -> None:
    cloud(error=["ResourcesUnavailableError", "no capacity in us-east-1"])
    with pytest.raises(ProvisionError, match="no capacity in us-east-1: try another region"):
        sky.launch(sky.Task(run="true"), "c", infra="aws")
    assert rented() == []
    said: list[str] = []
    task = sky.Task(run="true", resources={"ordered": [{"infra": "aws"}, {"infra": "gcp"}]})
    with pytest.raises(ProvisionError, match="no capacity"):
        sky.launch(task, "c", on_line=said.append)
    assert any(line.startswith("aws failed, trying gcp") for line in said)
    assert rented() == []
    assert clusters.find("c") is None


def test_a_launch_that_is_interrupted_gives_the_machines_back(cloud: Script) -> None:
    cloud(polls=1000)
    with begin() as process:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert rented() == []
    assert calls("down")[0]["request_id"] == "request-of-atoll-c"


@pytest.mark.long
def test_a_launch_that_was_killed_is_continued(cloud: Script) -> None:
    cloud(polls=1000)
    with begin() as process:
        process.kill()
    assert rented() == ["atoll-c"]
    cloud(polls=0)
    assert ") again" in atoll("launch", "-c", "c", "--infra", "aws", "echo again")
    assert len(calls("launch")) == 1
    atoll("down", "c")
    assert rented() == []


@pytest.mark.long
def test_a_launch_is_taken_down_meanwhile(cloud: Script) -> None:
    cloud(polls=1000)
    with begin() as process:
        atoll("down", "c")
        assert rented() == []
        cloud(polls=0)
        process.communicate(timeout=60)
        assert process.returncode not in (0, None)
    assert rented() == []
    assert clusters.find("c") is None


def begin() -> subprocess.Popen[bytes]:
    """A launch whose machines don't come."""
    process = subprocess.Popen([ATOLL, "launch", "-c", "c", "--infra", "aws", "true"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    while b"Instances are being made" not in process.stdout.readline():
        assert process.poll() is None
    return process


@pytest.mark.long
def test_machines_that_were_deleted_by_hand_and_a_cloud_that_lies(cloud: Script, bed: Testbed) -> None:
    atoll("launch", "-c", "c", "--infra", "aws", "true")
    Path(os.environ["ATOLL_HOME"], "fake-clusters", "atoll-c").unlink()
    note = environment.folder() / "clusters" / "atoll-c.json"
    note.unlink()  # what was said of it is old
    assert "UP" in atoll("status")  # it answers
    bed.hosts[0].cut()
    note.unlink()
    assert "are not there any more" in atoll("status")
    assert clusters.load("c").status is sky.ClusterStatus.DOWN
    atoll("down", "c")


@pytest.mark.long
def test_machines_are_stopped_and_started_where_the_cloud_can(cloud: Script, bed: Testbed) -> None:
    atoll("launch", "-c", "c", "--infra", "aws", "echo kept > ~/file")
    atoll("stop", "c")
    assert len(calls("stop")) == 1
    assert rented() == ["atoll-c"]
    atoll("start", "c")
    assert len(calls("start")) == 1
    assert ") kept" in atoll("exec", "c", "cat ~/file")
    cloud(status="STOPPED")  # the watcher was gone, and the machines ended themselves
    bed.hosts[0].cut()
    (environment.folder() / "clusters" / "atoll-c.json").unlink()
    assert "cluster c is stopped" in atoll("status")
    atoll("down", "c")
    assert rented() == []


@pytest.mark.long
def test_a_cluster_is_saved_and_taken_down_at_its_cost(cloud: Script, bed: Testbed) -> None:
    cloud(price=3600.0)  # a dollar a second
    run = "trap 'echo saved > ~/saved; exit 0' TERM; touch ~/up; while :; do sleep 0.1; done"
    atoll("launch", "-c", "c", "-d", "--infra", "aws", "--max-cost", "30", run)
    eventually(lambda: rented() == [], "it is taken down", 100)
    eventually(lambda: clusters.load("c").status is sky.ClusterStatus.DOWN, "its record says so", 30)
    assert bed.hosts[0].run("cat /home/sky/saved") == "saved\n"
    eventually(lambda: "of --max-cost 30" in str(clusters.load("c").notes), "and why", 30)


@pytest.mark.long
def test_the_logs_of_a_machine_that_lost_power_can_be_read(cloud: Script, bed: Testbed) -> None:
    job = sky.launch(sky.Task(run="echo before; sleep 100", num_nodes=2), "c", infra="aws")
    eventually(lambda: job.logs().count(") before") == 2, "both run", 60)
    bed.hosts[0].power_off()
    cloud(status="INIT")
    job.cancel()
    began = time.monotonic()
    sky.down("c")
    assert time.monotonic() - began < 60
    assert rented() == []
    assert job.logs().count(") before") == 2
