"""Images on Slurm: what is asked of Apptainer and pyxis, by programs in their place that say how they are called."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.providers.test_slurm import atoll, make_slurm

from atoll.core.errors import ConfigError
from atoll.providers.slurm.containers import image_of
from testbed.fixtures import MakeBed
from testbed.hosts import Host

pytestmark = pytest.mark.timeout(300)

# Both run the command where they are, and say in which image it would have been.
APPTAINER = """#!/bin/bash
[ "$1" = exec ] || exit 9
shift; options=
while [ "${1#--}" != "$1" ]; do
    options="$options $1"; if [ "$1" = --bind ]; then options="$options $2"; shift; fi; shift
done
export INSIDE="$1 with$options"; shift
exec "$@"
"""
SRUN = """#!/bin/bash
[ "$1" = --help ] && { echo "      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH"; exit 0; }
words=()
for word in "$@"; do
    case $word in
        --container-image=*) export INSIDE="${word#*=}" ;;
        --container-workdir=*) export AT="${word#*=}" ;;
        --container-mounts=*) export MOUNTS="${word#*=}" ;;
        --chdir=*) ;;
        *) words+=("$word") ;;
    esac
done
exec /usr/bin/srun "--chdir=${AT:-/}" "${words[@]}"
"""
TASK = """
num_nodes: 2
workdir: .
resources: {accelerators: L4:1, image_id: "docker:nvcr.io/nvidia/pytorch:25.01-py3"}
setup: echo "setup in $INSIDE"
run: echo "rank $SKYPILOT_NODE_RANK in $INSIDE sees $CUDA_VISIBLE_DEVICES"; ls
"""


def install(host: Host, name: str, text: str) -> None:
    host.run(f"cat > /usr/local/bin/{name} <<'END'\n{text}END\nchmod 755 /usr/local/bin/{name}")


@pytest.mark.long
@pytest.mark.parametrize("tool", ["apptainer", "pyxis"])
def test_scripts_run_in_the_image(make_bed: MakeBed, tmp_path: Path, tool: str) -> None:
    bed = make_slurm(make_bed)
    for host in bed.hosts:
        install(host, *(("apptainer", APPTAINER) if tool == "apptainer" else ("srun", SRUN)))
    (tmp_path / "task.yaml").write_text(TASK)
    (tmp_path / "note.txt").write_text("shipped\n")
    said = atoll("launch", "-c", "c", "--infra", "slurm/lab", "task.yaml", cwd=tmp_path)
    image = {
        "apptainer": "docker://nvcr.io/nvidia/pytorch:25.01-py3 with --nv --bind /tmp",
        "pyxis": "nvcr.io#nvidia/pytorch:25.01-py3",
    }[tool]
    assert said.count(f"setup in {image}") == 2
    assert said.count(f" in {image} sees GPU-") == 2
    assert said.count("note.txt") == 2
    assert "no effect" not in said
    stopped = atoll("launch", "-c", "c", "exit 7", code=100)
    assert "exited with code 7" in stopped
    atoll("down", "c")


@pytest.mark.long
def test_an_image_is_refused_where_nothing_runs_it(make_bed: MakeBed, tmp_path: Path) -> None:
    bed = make_slurm(make_bed, 2)
    (tmp_path / "task.yaml").write_text(TASK)
    said = atoll("launch", "-c", "c", "--infra", "slurm/lab", "--nodes", "1", "task.yaml", cwd=tmp_path, code=2)
    assert "slurm/lab runs no containers: its login node has neither apptainer nor pyxis" in said
    assert bed.hosts[0].run("squeue -h") == ""


@pytest.mark.parametrize(
    ("image_id", "tool", "image"),
    [
        ("docker:ubuntu:24.04", "/usr/bin/apptainer", "docker://ubuntu:24.04"),
        ("docker://ubuntu", "pyxis", "ubuntu"),
        ("docker:nvcr.io/nvidia/pytorch:25.01-py3", "pyxis", "nvcr.io#nvidia/pytorch:25.01-py3"),
        ("docker:library/ubuntu", "pyxis", "library/ubuntu"),
        ("/shared/image.sif", "/usr/bin/singularity", "/shared/image.sif"),
    ],
)
def test_images_as_each_tool_takes_them(image_id: str, tool: str, image: str) -> None:
    assert image_of(image_id, tool, "slurm/lab") == image


@pytest.mark.parametrize("image_id", ["ami-0123", {"us-east-1": "ami-1"}])
def test_what_is_no_image_here(image_id: object) -> None:
    with pytest.raises(ConfigError, match="on slurm/lab expected docker:IMAGE"):
        image_of(image_id, "pyxis", "slurm/lab")
