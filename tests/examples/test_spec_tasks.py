"""Task files that people already have, as the guides of their projects show them, on two local nodes.

What they take from the network (packages, repositories, models) has a stand-in; their command lines are as published.
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest
from tests.examples.launched import atoll, fixed_ports, last_job, of, program, repository, wait_for_log

from atoll.providers.network import Network, NetworkUnavailable

__all__ = ["fixed_ports", "repository"]

# Where nodes have the machine's ports, a test's time is also that of those that it waits for.
pytestmark = [pytest.mark.usefixtures("repository"), pytest.mark.timeout(300)]

LOG = 'echo "$(basename "$0") $*" >> ~/called\n'  # what a stand-in for a program does


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text).lstrip("\n"))


# ----------------------------------------------------------------------------------------------- PyTorch's own example
TORCHRUN = """
    name: minGPT-ddp

    resources:
      cpus: 4+
      accelerators: L4:2

    num_nodes: 2

    workdir: .

    setup: |
      git clone --depth 1 examples.git || true
      cd examples
      git filter-branch --prune-empty --subdirectory-filter distributed/minGPT-ddp
      pip install -r requirements.txt

    run: |
      cd examples/mingpt
      export LOGLEVEL=INFO
      MASTER_ADDR=$(echo "$SKYPILOT_NODE_IPS" | head -n1)
      echo "Starting distributed training, head node: $MASTER_ADDR"

      torchrun \\
      --nnodes=$SKYPILOT_NUM_NODES \\
      --nproc_per_node=$SKYPILOT_NUM_GPUS_PER_NODE \\
      --master_addr=$MASTER_ADDR \\
      --master_port=8008 \\
      --node_rank=${SKYPILOT_NODE_RANK} \\
      main.py
"""
STATIC = """--master_addr=$MASTER_ADDR \\
      --master_port=8008 \\
      --node_rank=${SKYPILOT_NODE_RANK} \\"""
RENDEZVOUS = """--rdzv_backend=c10d \\
      --rdzv_endpoint=$MASTER_ADDR:29500 \\
      --rdzv_id $SKYPILOT_TASK_ID \\"""
# Says who it is, then waits to be let go: the launcher holds its port meanwhile.
MAIN = """
    import os, pathlib, sys, time
    rank, world, local, node = map(os.getenv, ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SKYPILOT_NODE_RANK"))
    sys.stdout.write(f"rank {rank} of {world} local {local} node {node}\\n")  # print would make it two writes
    go = pathlib.Path.home() / "go"
    while not go.exists():
        time.sleep(0.05)
"""


@pytest.fixture
def mingpt(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(repository.parent))  # the launch itself calls git too, and that is logged at home
    program("git", f"#!/bin/sh\n{LOG}exit 1\n")  # as in the second setup of a cluster
    program("pip", f"#!/bin/sh\n{LOG}")
    write(repository / "train.yaml", TORCHRUN)
    assert TORCHRUN.count(STATIC) == 1
    write(repository / "train-rdzv.yaml", TORCHRUN.replace(STATIC, RENDEZVOUS))
    write(repository / "examples/mingpt/main.py", MAIN)
    return repository


def let_go(cluster: str) -> None:
    """Have the scripts on both nodes of a cluster end."""
    Path("go").touch()
    for node in ("head", "worker1"):
        atoll("cp", "go", f"{cluster}/{node}:go")


@pytest.fixture
def own_networks() -> None:
    """Skips where clusters share the machine's network: the second one's job waits for the first one's port there."""
    try:
        Network.start("one").close()
    except NetworkUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.long  # tests/tasks/test_cases.py has two clusters with one port, without torchrun
@pytest.mark.usefixtures("own_networks")
def test_three_clusters_whose_scripts_fix_the_same_ports(mingpt: Path) -> None:
    started = {"train": "train.yaml", "train-again": "train.yaml", "train-rdzv": "train-rdzv.yaml"}
    for cluster, file in started.items():
        atoll("launch", "-c", cluster, file, "-d")
    for cluster in started:  # all wait in there at the same time
        wait_for_log(cluster, " of 4 local ", 4)
    log = {}
    for cluster in started:
        let_go(cluster)
        log[cluster] = atoll("logs", cluster)
        assert "✓ Job finished (status: SUCCEEDED)." in log[cluster]
        for who in ("head", "worker1"):
            assert "Starting distributed training, head node: 127.0.0.1" in of(log[cluster], who)

    for cluster in ("train", "train-again"):  # where ranks are told, in the order of the nodes
        for node, who in enumerate(("head", "worker1")):
            ranks = {f"rank {2 * node + local} of 4 local {local} node {node}" for local in (0, 1)}
            assert ranks <= set(of(log[cluster], who))
    told = {line.split()[1] for who in ("head", "worker1") for line in of(log["train-rdzv"], who) if " local " in line}
    assert told == {"0", "1", "2", "3"}
    home = mingpt.parent / "home/clusters/train/nodes/1/home"
    assert [line.split()[0] for line in (home / "called").read_text().splitlines()] == ["git", "git", "pip"]


# ---------------------------------------------------------------------------------------------------------- TorchTitan
TITAN = """
    resources:
      accelerators: {H100:8, H200:8}
      disk_size: 1024GB

    num_nodes: 2

    workdir: .

    envs:
      CONFIG_FILE: "./torchtitan/models/llama3/train_configs/llama3_8b.toml"
      HF_TOKEN: ""

    setup: |
      pip install -r requirements.txt
      pip install .
      python scripts/download_hf_assets.py --repo_id meta-llama/Llama-3.1-8B --assets tokenizer --hf_token=$HF_TOKEN

    run: |
      MASTER_ADDR=$(echo "$SKYPILOT_NODE_IPS" | head -n1)
      echo "Starting distributed training, head node: $MASTER_ADDR"

      torchrun \\
      --nnodes=$SKYPILOT_NUM_NODES \\
      --nproc_per_node=$SKYPILOT_NUM_GPUS_PER_NODE \\
      --master_addr $MASTER_ADDR \\
      --master_port 8008 \\
      --node_rank $SKYPILOT_NODE_RANK \\
      -m torchtitan.train \\
      --job.config_file $CONFIG_FILE \\
      --training.dataset c4_test
"""


@pytest.mark.usefixtures("fixed_ports")
def test_torchtitans_task(repository: Path, tmp_path: Path) -> None:
    program("pip", f"#!/bin/sh\n{LOG}")
    write(repository / "torchtitan.yaml", TITAN)
    write(repository / "scripts/download_hf_assets.py", "import sys; print(f'{len(sys.argv[-1])} characters')")
    write(
        repository / "torchtitan/train.py",
        """
        import os, sys
        sys.stdout.write(" ".join(["rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], *sys.argv[1:]]) + "\\n")
        """,
    )
    token = "hf_sesameopen"
    command = ("launch", "-c", "torchtitan-multinode", "torchtitan.yaml")
    said = atoll(*command, "--env", "HF_TOKEN", HF_TOKEN=token)
    assert "2 × H100:8 simulated on CPU" in said
    assert said.count(f"{len('--hf_token=') + len(token)} characters") == 2
    for node, who in enumerate(("head", "worker1")):
        config = "./torchtitan/models/llama3/train_configs/llama3_8b.toml"
        arguments = f"--job.config_file {config} --training.dataset c4_test"
        ranks = {f"rank {8 * node + local} of 16 {arguments}" for local in range(8)}
        assert {line for line in of(said, who) if line.startswith("rank ")} == ranks
    shown = said + atoll("logs", "torchtitan-multinode") + atoll("queue", "torchtitan-multinode", "-o", "json")
    assert token not in shown
    assert not [path for path in (tmp_path / "home").rglob("*") if path.is_file() and token in path.read_text("latin1")]

    said = atoll(*command, "--num-nodes", "4", "--env", "HF_TOKEN", "--env", "CONFIG_FILE=70b.toml", "--dryrun",
                 HF_TOKEN=token)  # fmt: skip
    assert "cluster torchtitan-multinode is resized: 2 → 4 nodes" in said
    assert "Cluster torchtitan-multinode is down" in atoll("down", "-y", "torchtitan-multinode")


# ------------------------------------------------------------------------------------------------------- symphony-learn
SETUP = """
    setup: |
      sudo apt install -y make
      make all
"""
LIGHTHOUSE = """
    name: lighthouse
    resources:
      cpus: 4
      disk_size: 20GB
    num_nodes: 1
    workdir: .
    {SETUP}
    run: |
      pkill -f torchft_lighthouse || true
      HEAD_NODE_IP=$(echo "$SKYPILOT_NODE_IPS" | head -n1)
      RUST_BACKTRACE=1 python torchft_lighthouse.py --bind=$HEAD_NODE_IP:29510 --min_replicas 1 \\
        --quorum_tick_ms 100 --join_timeout_ms 10000
"""
WORKER = """
    name: worker
    resources:
      accelerators: L40S:1
      disk_size: 1024GB
      num_nodes: 2
    workdir: .
    envs:
      TORCHFT_LIGHTHOUSE: ""
      CONFIG_FILE: "./models/llama3/train_configs/debug_model.toml"
      FT_REPLICA_ID: 0
      FT_GROUP_SIZE: 1
    {SETUP}
    run: |
      pkill -f torchrun || true
      rm -rf outputs
      HEAD_NODE_IP=$(echo "$SKYPILOT_NODE_IPS" | head -n1)
      NODE_IP=$(echo "$SKYPILOT_NODE_IPS" | sed -n "$((SKYPILOT_NODE_RANK + 1))p")
      TORCHFT_LIGHTHOUSE=http://$TORCHFT_LIGHTHOUSE:29510 NNODES=$SKYPILOT_NUM_NODES \\
        NGPU=$SKYPILOT_NUM_GPUS_PER_NODE GLOO_SOCKET_IFNAME=$SOCKET_IFNAME NCCL_SOCKET_IFNAME=$SOCKET_IFNAME \\
        MASTER_ADDR=$HEAD_NODE_IP LOCAL_ADDR=$NODE_IP \\
        ISHOST=$(if [ "$NODE_IP" = "$HEAD_NODE_IP" ]; then echo true; else echo false; fi) \\
        WHO="$LOCAL_ADDR $ISHOST" \\
        ./run_train.sh --fault_tolerance.enable --fault_tolerance.replica_id=$FT_REPLICA_ID \\
        --fault_tolerance.group_size=$FT_GROUP_SIZE
"""
RUN_TRAIN = """
    #!/usr/bin/env bash
    set -e
    torchrun --nnodes $NNODES --nproc_per_node $NGPU --rdzv_id 101 --rdzv_backend c10d \\
      --rdzv_endpoint="$MASTER_ADDR:29500" --local_addr $LOCAL_ADDR --rdzv-conf is_host=$ISHOST \\
      --local-ranks-filter 0 --role rank --tee 3 train.py --job.config_file $CONFIG_FILE "$@"
"""
LIGHTHOUSE_PROGRAM = """
    import socket, sys
    host, port = sys.argv[1].removeprefix("--bind=").split(":")
    with socket.create_server((host, int(port))) as server:
        print("listening on", host, port, flush=True)
        while True:
            with server.accept()[0] as replica:
                replica.sendall(b"step 7")
"""
TRAIN = """
    import os, pathlib, sys, urllib.parse, socket
    where = urllib.parse.urlsplit(os.environ["TORCHFT_LIGHTHOUSE"])
    with socket.create_connection((where.hostname, where.port)) as lighthouse:
        says = lighthouse.recv(100).decode()
    pathlib.Path("outputs").mkdir()
    rank, world, who = map(os.getenv, ("RANK", "WORLD_SIZE", "WHO"))
    # At once: print would make it several writes, and torchrun reads the file meanwhile, and shows half a line as one.
    line = " ".join(("rank", rank, "of", world, "by", who, *sys.argv[1:]))
    os.write(1, f"the lighthouse says {says}\\n{line}\\n".encode())
"""


@pytest.fixture
def symphony(repository: Path, fixed_ports: None) -> Path:
    program("apt", f"#!/bin/sh\n{LOG}")
    program("make", f"#!/bin/sh\n{LOG}")
    program("sudo", '#!/bin/sh\nexec "$@"\n')  # the machine's may ask for a password, or know another apt
    for name, text in (("lighthouse.yaml", LIGHTHOUSE), ("worker.yaml", WORKER)):
        write(repository / "skypilot" / name, text.replace("{SETUP}", SETUP.strip()))
    write(repository / "run_train.sh", RUN_TRAIN)
    (repository / "run_train.sh").chmod(0o755)
    write(repository / "torchft_lighthouse.py", LIGHTHOUSE_PROGRAM)
    write(repository / "train.py", TRAIN)
    return repository


@pytest.mark.long
def test_symphony_learns_lighthouse_and_workers(symphony: Path) -> None:
    atoll("launch", "-c", "lighthouse", "skypilot/lighthouse.yaml", "-d")
    ip = atoll("status", "--ip", "lighthouse").strip()
    wait_for_log("lighthouse", "listening on 127.0.0.1 29510")

    variables = {"TORCHFT_LIGHTHOUSE": ip, "SOCKET_IFNAME": "lo", "CONFIG_FILE": "./debug_model.toml"}
    flags = [word for name, value in variables.items() for word in ("--env", f"{name}={value}")]
    said = atoll("exec", "worker_cluster", *flags, "skypilot/worker.yaml", code=102)
    assert "`atoll launch -c worker_cluster TASK` makes it" in said
    first = atoll("launch", "-c", "worker_cluster", *flags, "skypilot/worker.yaml")
    assert "num_nodes" in first.partition("Job submitted")[0]  # moved up, and said so
    again = ("--env", "FT_REPLICA_ID=1", "--env", "FT_GROUP_SIZE=2")
    second = atoll("exec", "worker_cluster", *flags, *again, "skypilot/worker.yaml")
    for said, replica, size in ((first, 0, 1), (second, 1, 2)):
        assert "✓ Job finished (status: SUCCEEDED)." in said
        more = f"--fault_tolerance.enable --fault_tolerance.replica_id={replica} --fault_tolerance.group_size={size}"
        for who, by in (("head", "127.0.0.1 true"), ("worker1", "127.0.0.2 false")):
            lines = [line.partition(":")[2] for line in of(said, who) if line.startswith("[rank0]:")]
            assert lines[0] == "the lighthouse says step 7"
            assert lines[1] in [
                f"rank {rank} of 2 by {by} --job.config_file ./debug_model.toml {more}" for rank in (0, 1)
            ]
    for node in (0, 1):
        called = symphony.parent / f"home/clusters/worker_cluster/nodes/{node}/home/called"
        assert called.read_text().splitlines() == ["apt install -y make", "make all"]  # and not for exec

    lighthouse = json.loads(atoll("queue", "lighthouse", "-o", "json"))[0]
    assert lighthouse["status"] == "RUNNING"  # `pkill -f` of the others did it no harm
    atoll("cancel", "-y", "lighthouse", "1")
    assert last_job("lighthouse")["status"] == "CANCELLED"
