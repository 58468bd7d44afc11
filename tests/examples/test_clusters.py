"""`examples/clusters/`: the commands of its README as they stand, on local nodes, SSH hosts and Slurm."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.examples.launched import ROOT, repository

from testbed.fixtures import MakeBed, make_bed
from testbed.slurm import slurm_missing, start_slurm
from wheels import make_wheel

__all__ = ["make_bed", "repository"]

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
README = ROOT / "examples/clusters/README.md"


def commands(title: str) -> list[str]:
    """The commands of one section of the README."""
    section = README.read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```bash\n(.*?)^```", section, re.M | re.S)
    return [line for block in blocks for line in block.splitlines() if not line.startswith("#")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The example's folder, with the wheel that `offline.yaml` installs."""
    copied = tmp_path / "clusters"
    shutil.copytree(README.parent, copied)
    (copied / "wheels").mkdir()
    make_wheel(copied / "wheels", "tqdm", "4.67.1")
    monkeypatch.chdir(copied)
    return copied


def run(title: str) -> dict[str, str]:
    """Run them in one shell that ends at the first that fails; what each printed."""
    mark, said = "--- ", {}
    lines = commands(title)
    script = "\n".join(f"echo '{mark}{number}'; {line}" for number, line in enumerate(lines))
    done = subprocess.run(
        ["bash", "-e", "-c", script],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    for part in done.stdout.split(mark)[1:]:
        number, _, text = part.partition("\n")
        said[lines[int(number)]] = text
    assert done.returncode == 0, done.stdout
    assert len(said) == len(lines)
    return said


def of(said: dict[str, str], begin: str) -> str:
    """What the first command that begins so printed."""
    return next(text for command, text in said.items() if command.startswith(begin))


def check_sweep(text: str) -> None:
    """Six experiments, each with one GPU and its loss."""
    rows = re.findall(r"^\d+ +(\S+) +SUCCEEDED +0 +\S+ +step=40, loss=(\S+), lr=(\S+)$", text, re.M)
    assert [lr for lr, _, _ in rows] == ["0.5", "0.2", "0.1", "0.05", "0.02", "0.01"]
    assert all(lr == again for lr, _, again in rows)


def test_on_this_machine(repository: Path, folder: Path) -> None:
    said = run("On this machine")
    assert "node 1 of 2, head 127.0.0.1" in of(said, "atoll launch -c train")
    assert '"step": 400' in of(said, "atoll exec train")
    assert '"step": 40,' in of(said, "atoll logs train 1")
    assert "cluster train is resized: 2 → 4 nodes, L4:2 → L4:4 per node, 4+ → 8+ CPUs" in of(
        said, "atoll launch -c train train.yaml --num"
    )
    titan = of(said, "atoll launch -c titan")
    assert "H100:8 per node, simulated" in titan
    assert "resources.use_spot has no effect on local" in titan
    assert "token of 10 characters, config large.toml" in titan
    assert "hf_example" not in titan
    check_sweep(of(said, "atoll exec sweep"))
    assert "2 lr-0.5 SUCCEEDED" in of(said, "python sdk.py")


def test_on_ssh_hosts(make_bed: MakeBed, folder: Path) -> None:
    make_bed(2)
    Path(os.environ["ATOLL_HOME"], "config.toml").write_text('[ssh.lab]\nhosts = ["h1", "h2"]\n')
    said = run("On SSH hosts")
    assert "node 1 of 2, head 10.77.0." in of(said, "atoll launch -c train")
    assert "h1" in of(said, "atoll exec train")
    assert (
        said["atoll launch -c train train.yaml --gpus none --sweep LR=0.5,0.1,0.02 --parallel 3"].count("SUCCEEDED")
        == 6
    )
    assert of(said, "atoll launch -c offline").count(") tqdm 4.67.1") == 2


def test_on_slurm(make_bed: MakeBed, folder: Path) -> None:
    lacking = slurm_missing()
    if lacking is not None:
        pytest.skip(lacking)
    bed = make_bed(5)
    start_slurm(bed, num_gpus=4)

    Path(os.environ["ATOLL_HOME"], "config.toml").write_text('[slurm.lab]\nlogin = "h1"\n')
    said = run("On Slurm")
    assert "node 1 of 2, head 10.77.0." in of(said, "atoll launch -c train")
    assert re.search(r"2 GPUs asked for, GPU-\w+ and GPU-\w+ to be seen$", of(said, "atoll launch -c train"), re.M)
    sweep = of(said, "atoll exec train train.yaml --num-nodes 1")
    check_sweep(sweep)
    large = of(said, "atoll launch -c large")
    assert "4 nodes, L4:4 per node" in large
    assert of(said, "atoll launch -c offline").count(") tqdm 4.67.1") == 2
    assert "2 lr-0.5 SUCCEEDED" in of(said, "python sdk.py")
    assert bed.hosts[0].run("squeue -h -t PENDING,RUNNING").strip() == ""


GPU_INFO = "\"{'Gpus': [{'Name': '%s', 'Manufacturer': 'x', 'Count': %d, 'MemoryInfo': {'SizeInMiB': 1}}]}\""
COLUMNS = "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice"
PRICES = f"""{COLUMNS},Region,AvailabilityZone,Arch
g6.12xlarge,L4,4,48,192,{GPU_INFO % ("L4", 4)},4.60,1.80,us-east-1,use1-az1,x86_64
p5.48xlarge,H100,8,192,2048,{GPU_INFO % ("H100", 8)},55.04,28.10,us-east-1,use1-az1,x86_64
p5en.48xlarge,H200,8,192,2048,{GPU_INFO % ("H200", 8)},63.30,24.50,us-east-2,use2-az1,x86_64
"""


@pytest.mark.timeout(1500)  # SkyPilot is installed for it
def test_on_a_cloud(repository: Path, folder: Path) -> None:
    catalog = Path(os.environ["ATOLL_HOME"], "skypilot/home/.sky/catalogs/v8")
    for name, text in {
        "aws/vms.csv": PRICES,
        "aws/images.csv": "Tag,Region,OS,OSVersion,ImageId,CreationDate,BaseImageId\n",
        "aws/instance_quota_mapping.csv": "Region,AcceleratorName,SpotInstanceCode,OnDemandInstanceCode\n",
        "common/accelerators.csv": "AcceleratorName,Clouds\n"
        + "".join(f"{name},['AWS']\n" for name in ("L4", "H100", "H200")),
    }.items():
        (catalog / name).parent.mkdir(parents=True, exist_ok=True)
        (catalog / name).write_text(text)
    first = subprocess.run(["atoll", "gpus", "aws"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if "could not be installed" in first.stdout:
        pytest.skip(first.stdout.splitlines()[-1])
    said = run("On a cloud")
    assert "aws/us-east-1: g6.12xlarge, $4.60/h (spot $1.80/h); $18.40/h in all" in of(said, "atoll launch -c train")
    spot, on_demand = [text for command, text in said.items() if "-c titan" in command]
    assert "aws/us-east-2: p5en.48xlarge, spot $24.50/h (on demand $63.30/h); $49.00/h in all" in spot
    assert "aws/us-east-1: p5.48xlarge, $55.04/h (spot $28.10/h); $110.08/h in all" in on_demand
    assert "nothing was started (--dryrun)" in spot
    typo = ["atoll", "launch", "--dryrun", "--infra", "aws/us-est-1", "true"]
    done = subprocess.run(typo, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 2
    assert re.search(r"Invalid region 'us-est-1'; Did you mean one of these: 'us-east-1", done.stdout)


# -------------------------------------------------------------------------------------------------- docs/clusters.md
PAGE = ROOT / "docs/clusters.md"
BLOCK = re.compile(r"(<!-- run -->\n```bash\n(.*?)```\n\n```text\n)(.*?)(```)", re.S)
VARIES = (
    (r"\b\d{4}-\d\d-\d\d-\d\d-\d\d-\d\d-\d+", "<time>"),
    (r"pid=\d+", "pid=#"),
    (r"GPU-[\w-]+", "GPU-#"),
    (r"\b(\d+m )?\d+s( ago)?|\b\d+m ago", "#s"),
    (r"(SUCCEEDED +0 +)\d+\.\d", r"\1#"),
    (r"\b\d+\.\d s\b", "# s"),
    (r" +", " "),
)
_COMPARED = 60  # columns: what stands before them may be a digit longer, and the rest is cut


def cut(line: str) -> str:
    """What the page shows of a line: 80 columns."""
    return line if len(line) <= 80 else line[:79] + "…"


def plain(text: str) -> list[str]:
    """Lines without what differs from run to run, and without those of a queue, which may move at once."""
    for pattern, instead in VARIES:
        text = re.sub(pattern, instead, text)
    return [line.strip()[:_COMPARED] for line in text.splitlines() if not line.startswith("waiting for")]


def test_the_page_shows_what_its_commands_print(make_bed: MakeBed, folder: Path) -> None:
    lacking = slurm_missing()
    if lacking is not None:
        pytest.skip(lacking)
    bed = make_bed(5)
    start_slurm(bed, num_gpus=4)
    config = '[slurm.lab]\nlogin = "h1"\n[ssh.lab]\nhosts = ["h2", "h3"]\n'
    Path(os.environ["ATOLL_HOME"], "config.toml").write_text(config)
    printed: dict[str, list[str]] = {}
    for _, script, *_ in BLOCK.findall(PAGE.read_text()):
        typed = [line.replace("\\\n", "") for line in re.split(r"(?<!\\)\n", script.rstrip("\n"))]
        told = "set -e\n" + "".join(f"echo '$ {re.sub(' +', ' ', line)}'\n{line}\n" for line in typed)
        shell = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        done = subprocess.run(["bash", "-c", told], text=True, **shell)
        assert done.returncode == 0, done.stdout
        printed[script] = [cut(line) for line in done.stdout.splitlines()][len(typed) == 1 :]
    if os.environ.get("RECORD"):
        page = PAGE.read_text()
        PAGE.write_text(BLOCK.sub(lambda found: found[1] + "\n".join(printed[found[2]]) + "\n" + found[4], page))
    for _, script, shown, _ in BLOCK.findall(PAGE.read_text()):
        there = plain("\n".join(printed[script]))
        assert shown.strip(), script
        for line in plain(shown):
            assert line in [*there, "…"], "\n".join([script, *there])
