"""SkyPilot's real SDK on a real Slurm: its server here, a login node and two nodes that are hosts of the testbed.

Without internet: what SkyPilot installs, here and on the nodes, comes from wheels that are downloaded once, and prices
are of small catalogs on disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.pools import eventually
from tests.providers.test_skypilot import atoll

import atoll as sky
from atoll.core.errors import ConfigError
from atoll.providers import registry
from atoll.providers.skypilot import client, environment
from atoll.tasks import clusters
from testbed.fixtures import MakeBed, bed, make_bed
from testbed.hosts import Testbed
from testbed.slurm import slurm_missing, start_slurm

__all__ = ["bed", "make_bed"]

pytestmark = [pytest.mark.long, pytest.mark.serial, pytest.mark.timeout(1200)]
INPUTS = Path(__file__).parents[2] / "inputs"
WHEELS = INPUTS / "skypilot-wheels"
VENV = INPUTS / "skypilot-venv"  # it takes a minute to make
WANTED = [
    f"skypilot[kubernetes,slurm,remote]=={environment.VERSION}",
    "setuptools<70",
    "setuptools",
    "wheel",
    "pip",
    "uv",
]
# In the place of what SkyPilot loads from the internet on a node: uv, and a Python of the version that it wants.
SHIMS = """cat > /usr/local/bin/curl <<'END'
#!/bin/sh
case "$*" in
*astral.sh/uv*) echo 'mkdir -p "$UV_INSTALL_DIR" && cp /usr/local/lib/uv-here "$UV_INSTALL_DIR/uv"' ;;
*) exec /usr/bin/curl "$@" ;;
esac
END
cat > /usr/local/lib/uv-here <<'END'
#!/bin/bash
export UV_FIND_LINKS={wheels} UV_NO_INDEX=1 UV_OFFLINE=1 UV_PYTHON_DOWNLOADS=never
words=()
for word in "$@"; do
    [ "$last" = --python ] && [ "$word" = 3.10 ] && word=/usr/bin/python3
    last=$word
    words+=("$word")
done
exec /usr/local/lib/uv "${{words[@]}}"
END
install -m 755 {uv} /usr/local/lib/uv
chmod 755 /usr/local/bin/curl /usr/local/lib/uv-here
"""
GPU = "\"{'Gpus': [{'Name': 'L4', 'Manufacturer': 'NVIDIA', 'Count': 1, 'MemoryInfo': {'SizeInMiB': 22888}}], " + (
    "'TotalGpuMemoryInMiB': 22888}\""
)
IMAGES = "Tag,Region,OS,OSVersion,ImageId,CreationDate,BaseImageId\n"
QUOTAS = "Region,AcceleratorName,SpotInstanceCode,OnDemandInstanceCode\n"
CATALOGS = {
    "aws/vms.csv": "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region,"
    f"AvailabilityZone,Arch\ng6.xlarge,L4,1,4,16,{GPU},0.805,0.301,us-east-1,use1-az1,x86_64\n"
    f"g6.xlarge,L4,1,4,16,{GPU},0.805,0.15,us-west-2,usw2-az1,x86_64\n"
    "m6i.2xlarge,,,8,32,,0.384,0.16,us-east-1,use1-az1,x86_64\n",
    "aws/images.csv": IMAGES,
    "aws/instance_quota_mapping.csv": QUOTAS,
    "gcp/vms.csv": "InstanceType,vCPUs,MemoryGiB,AcceleratorName,AcceleratorCount,GpuInfo,Region,AvailabilityZone,"
    f"Price,SpotPrice\ng2-standard-4,4,16,,,,us-central1,us-central1-a,0.146,0.058\n,,,L4,1,{GPU},us-central1,"
    "us-central1-a,0.56,0.22\n",
    "gcp/images.csv": IMAGES,
    "gcp/accelerator_quota_mapping.csv": QUOTAS,
    "common/accelerators.csv": "AcceleratorName,Clouds\nL4,\"['AWS', 'GCP']\"\n",
}


@pytest.fixture(scope="module")
def wheels() -> Path:
    """SkyPilot and what it needs."""
    if not (WHEELS / "complete").exists():
        WHEELS.mkdir(parents=True, exist_ok=True)
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(WHEELS)]
        for words in (WANTED[:1], *([each] for each in WANTED[1:])):
            done = subprocess.run([*download, *words], capture_output=True, text=True)
            if done.returncode != 0:
                pytest.skip(f"{words[0]} can't be had from a package index: {done.stderr.strip().splitlines()[-1]}")
        (WHEELS / "complete").touch()
    (wheel,) = WHEELS.glob("uv-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (program,) = (each for each in archive.namelist() if each.endswith("/scripts/uv"))
        (WHEELS / "uv").write_bytes(archive.read(program))
    return WHEELS


@pytest.fixture
def skypilot(make_bed: MakeBed, wheels: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Testbed]:
    """SkyPilot's Slurm ``lab``, and prices of two clouds."""
    if (lacking := slurm_missing()) is not None:
        pytest.skip(lacking)
    if str(wheels).startswith("/tmp/"):
        pytest.skip("hosts have a /tmp of their own, where they don't see the wheels: clone this elsewhere")
    made = make_bed(3)
    start_slurm(made)
    for host in made.hosts:
        host.run(SHIMS.format(wheels=wheels, uv=wheels / "uv"))
    (made.home / ".slurm").mkdir()
    key = made.home / ".ssh" / "id_ed25519"
    (made.home / ".slurm" / "config").write_text(
        f"Host lab\n  HostName {made.hosts[0].addr}\n  User sky\n  IdentityFile {key}\n"
    )
    # Its server listens outside of the hosts' network.
    ssh = made.folder / "bin" / "ssh"
    inside = ssh.read_text().replace("#!/bin/sh\n", "")
    ssh.write_text(f'#!/bin/sh\ncase "$*" in *skypilot/ssh/config*) exec /usr/bin/ssh "$@";; esac\n{inside}')
    with installed(wheels, monkeypatch):
        yield made


@contextlib.contextmanager
def installed(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """SkyPilot from wheels, and prices of two clouds, below ``ATOLL_HOME``."""
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(wheels), "CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    catalogs = environment.folder() / "home" / ".sky" / "catalogs" / "v8"
    for name, text in CATALOGS.items():
        (catalogs / name).parent.mkdir(parents=True, exist_ok=True)
        (catalogs / name).write_text(text)
    VENV.mkdir(exist_ok=True)
    (environment.folder() / "venv").symlink_to(VENV)
    stamp, have = VENV / "atoll.json", ["kubernetes", "slurm"]
    if stamp.exists() and not {*have} < {*json.loads(stamp.read_text())["extras"]}:
        stamp.unlink()
    for cloud in have:
        environment.interpreter(cloud)
    # The clouds' own packages are not among the wheels: without them it knows prices, and that credentials are missing.
    stamp.write_text(json.dumps({"version": environment.VERSION, "extras": ["aws", "gcp", *have]}))
    try:
        yield
    finally:
        client.close()
        environment.end_server()
        remove_what_its_server_leaves()


def remove_what_its_server_leaves() -> None:
    """SkyPilot kills its server, which leaves processes that end others, semaphores and folders."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if bytes(VENV) in path.read_bytes():
                os.kill(int(path.parent.name), signal.SIGKILL)
    maps = ""
    for path in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            maps += path.read_text()
    for path in Path("/dev/shm").glob("sem.mp-*"):
        if path.name not in maps:
            path.unlink(missing_ok=True)
    for path in Path(tempfile.gettempdir()).iterdir():
        if re.fullmatch(r"sky-tmp\w+|[0-9a-f]{32}", path.name):
            shutil.rmtree(path)
        elif re.fullmatch(r"sky_ssh_\w+\.log", path.name):
            path.unlink()


def test_plans_and_prices_without_credentials(skypilot: Testbed, tmp_path: Path) -> None:
    task = tmp_path / "task.yaml"
    task.write_text(
        "resources: {accelerators: L4, use_spot: true, any_of: [{infra: gcp}, {infra: aws}]}\nnum_nodes: 2\nrun: echo\n"
    )
    said = atoll("launch", "--dryrun", "-c", "c", str(task))
    assert "\naws/us-west-2: g6.xlarge, spot $0.15/h (on demand $0.81/h); $0.30/h in all" in said
    assert "\nor gcp/us-central1: g2-standard-4, spot $0.28/h (on demand $0.71/h); $0.56/h in all" in said
    assert "It can't be started yet" in said
    pool = sky.ComputePool(provider=sky.AWS(region="us-east-1"), nodes=2, accelerator="L4")
    assert pool.plan().hourly_cost == pytest.approx(1.61)
    with pytest.raises(ConfigError, match="aws/us-east-1 can't be used yet"):
        pool.up()
    with pytest.raises(ConfigError, match="A100:8 can't be had on aws"):
        sky.ComputePool(provider="aws", accelerator="A100:8").plan()
    rows, _ = registry.resolve("aws").gpu_rows()
    assert [(row["name"], row["instance_type"], row["price"]) for row in rows] == [("L4", "g6.xlarge", 0.805)]
    assert "atoll: " not in atoll("check", "gcp", code=100)


def test_the_life_of_a_cluster_on_skypilots_slurm(skypilot: Testbed, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "note.txt").write_text("shipped\n")
    (tmp_path / "task.yaml").write_text(
        f"num_nodes: 2\nworkdir: {work}\nresources: {{infra: skypilot/slurm/lab, cpus: 2}}\n"
        "setup: echo set up\nrun: cat note.txt; echo rank $SKYPILOT_NODE_RANK on $(hostname)\n"
    )
    login = skypilot.hosts[0]
    assert "slurm can be used" in run("check", "skypilot/slurm/lab")
    said = run("launch", "-c", "c", str(tmp_path / "task.yaml"))
    assert said.count(") shipped") == 2
    assert "rank 0 on h2" in said
    assert "rank 1 on h3" in said
    assert len(login.run("squeue -h").splitlines()) == 1
    (environment.folder() / "password").unlink()
    assert client.ask("slurm", "describe", name="nothing") is None  # with a new one, which ssh goes by, too
    fails = "[ $SKYPILOT_NODE_RANK = 0 ] && sleep 100; exit 3"
    assert "rank 1 on worker1 exited with code 3" in run("exec", "c", "--num-nodes", "2", fails, code=100)
    run("exec", "c", "-d", "--num-nodes", "2", "echo going; sleep 1000")
    eventually(lambda: run("logs", "c", "--no-follow", code=101).count(") going") == 2, "both run", 60)
    run("cancel", "-y", "c", "3")
    assert "CANCELLED" in run("queue", "c")
    run("down", "-y", "c")
    run("down", "-y", "c")
    eventually(lambda: login.run("squeue -h") == "", "its Slurm job is cancelled", 30)
    assert "shipped" in run("logs", "c", "1")
    assert os.listdir(environment.folder() / "clusters") == []


def test_a_cluster_that_nobody_renews_ends_itself_whatever_is_open_there(skypilot: Testbed) -> None:
    login = skypilot.hosts[0]
    run("launch", "-c", "c", "--infra", "skypilot/slurm/lab", "--cpus", "2", "--num-nodes", "2", "true")
    how = clusters.load("c").allocation.settings
    assert how["guard"] == "down"
    # Somebody's terminal, which a machine that has lost its power leaves open for hours.
    terminal = subprocess.Popen(["ssh", "-tt", "h2", "sleep 1000"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    try:
        client.ask("slurm", "renew", name=how["name"], guard=how["guard"], idle_minutes=1)
        renewed_s = time.monotonic()
        kill_what_looks_after("c")
        client.close()
        environment.end_server()  # nothing is left of it here
        assert login.run("squeue -h") != ""
        eventually(lambda: login.run("squeue -h") == "", "its Slurm job ends", 200)
        assert time.monotonic() - renewed_s > 60
        assert terminal.poll() is None
    finally:
        terminal.kill()
        terminal.communicate()
    assert "are not there any more" in run("status")
    run("down", "-y", "c")


def kill_what_looks_after(name: str) -> None:
    """Its watcher and its supervisor, as a loss of power does."""
    folder = str(clusters.folder_of(name)).encode()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if folder in path.read_bytes().split(b"\0"):
                os.kill(int(path.parent.name), signal.SIGKILL)


def run(*words: str, code: int = 0) -> str:
    """What a command prints."""
    done = subprocess.run(
        [str(Path(sys.executable).with_name("atoll")), *words], capture_output=True, text=True, timeout=600
    )
    print(done.stdout, done.stderr)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr
