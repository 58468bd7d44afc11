"""The task files of `examples/`, launched on local nodes by the commands of their READMEs."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest
from tests.examples.launched import atoll, examples, fixed_ports, last_job, losses, of, repository, wait_for_log

__all__ = ["examples", "fixed_ports", "repository"]

# Where nodes have the machine's ports, a test's time is also that of those that it waits for.
pytestmark = [pytest.mark.usefixtures("examples", "fixed_ports"), pytest.mark.timeout(300)]

TRAIN = "examples/torchrun/train.yaml"
KNOWS_NOTHING = math.log(256)  # the loss of a model that gives every byte the same chance
SMALL = (
    *("--data.tokenizer", "bpe:300", "--model.layers", "2", "--model.dim", "96", "--model.hidden_dim", "128"),
    *("--train.seq_len", "32", "--train.global_batch", "4", "--train.micro_batch", "2", "--schedule.warmup", "1"),
    *("--train.validate_every", "2", "--train.validate_batches", "2", "--metrics.sample_tokens", "20"),
)


# ---------------------------------------------------------------------------------------------------------- torchrun
@pytest.mark.long
def test_torchrun_told_who_is_who(examples: Path) -> None:
    said = atoll("launch", "-c", "train", TRAIN, "--gpus", "L4:1", "--env", "STEPS=10")
    assert "2 × L4:1 simulated on CPU: this machine has no GPU" in said
    assert "node 0 of 2, the head is 127.0.0.1" in of(said)
    assert "node 1 of 2, the head is 127.0.0.1" in of(said, "worker1")
    assert "0.64M parameters, 4,025,023 bytes of text, 2 ranks on cpu" in of(said)
    assert losses(said)[10] < KNOWS_NOTHING - 1
    assert "✓ Job finished (status: SUCCEEDED)." in said
    assert atoll("logs", "train", "--no-follow", "--tail", "1").strip() == "✓ Job finished (status: SUCCEEDED)."

    # More of it on the cluster that is still up: what torchrun would be told there.
    tell = 'echo "$SKYPILOT_NODE_RANK of $SKYPILOT_NUM_NODES: $SKYPILOT_NUM_GPUS_PER_NODE" $SKYPILOT_NODE_IPS'
    more = ("--num-nodes", "4", "--gpus", "L4:4", "--cpus", "8+")
    said = atoll("launch", "-c", "train", *more, f"{tell}; ls ~/sky_workdir/examples || true")
    assert "cluster train is resized: 2 → 4 nodes, L4:1 → L4:4 per node, 4+ → 8+ CPUs" in said
    ips = "127.0.0.1 127.0.0.2 127.0.0.3 127.0.0.4"
    for rank, who in enumerate(("head", "worker1", "worker2", "worker3")):
        assert f"{rank} of 4: 4 {ips}" in of(said, who)
    assert "torchrun" in of(said, "head")  # the nodes that were there keep their files
    assert "4x (L4:4, simulated)" in atoll("status", "train")

    assert "Cluster train is down" in atoll("down", "-y", "train")
    assert losses(atoll("logs", "train", "1"))[10] < KNOWS_NOTHING
    assert "no cluster is up" in atoll("status")


@pytest.mark.long
def test_torchrun_with_its_rendezvous() -> None:
    rdzv = "examples/torchrun/train-rdzv.yaml"
    said = atoll("launch", "-c", "train-rdzv", rdzv, "--gpus", "L4:1", "--env", "STEPS=10")
    assert "0.64M parameters, 4,025,023 bytes of text, 2 ranks on cpu" in said
    steps = [line for line in said.splitlines() if "step 10/10  loss " in line]
    assert len(steps) == 1  # of rank 0, which may be on any node
    assert "✓ Job finished (status: SUCCEEDED)." in said
    atoll("down", "-y", "train-rdzv")


@pytest.mark.long
@pytest.mark.timeout(240)
def test_more_nodes_and_cards_on_the_cluster_that_is_still_up() -> None:
    atoll("launch", "-c", "train", "--num-nodes", "2", "--gpus", "L4:2", "--cpus", "4+", "true")
    more = ("--num-nodes", "4", "--gpus", "L4:4", "--cpus", "8+")
    said = atoll("launch", "-c", "train", TRAIN, *more, "--env", "STEPS=2", within_s=200)
    assert "cluster train is resized: 2 → 4 nodes, L4:2 → L4:4 per node, 4+ → 8+ CPUs" in said
    assert "0.64M parameters, 4,025,023 bytes of text, 16 ranks on cpu" in of(said)
    assert losses(said)[2] < KNOWS_NOTHING


@pytest.mark.long
def test_the_plain_script(tmp_path: Path) -> None:
    script = ("examples/torchrun/train.py", "--steps", "20", "--log-every", "10", "--out", str(tmp_path / "out"))
    said = atoll("run", "--nodes", "2", "--nproc", "2", *script)
    assert "4 ranks on cpu" in said
    found = losses(said)
    assert KNOWS_NOTHING > found[10] > found[20]
    assert (tmp_path / "out/checkpoint.pt").is_file()
    assert "no cluster is up" in atoll("status")


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_killed_rank_is_started_again_at_the_checkpoint(examples: Path) -> None:
    task = (examples / TRAIN).read_text()
    often = "train.py --layers 1 --dim 64 --log-every 5 --save-every 5 --steps"
    changed = task.replace("train.py --steps", often)
    assert changed.count(often) == changed.count("job_recovery: {max_restarts_on_errors: 1}") == 1
    (examples / TRAIN).write_text(changed)

    whole = losses(atoll("launch", "-c", "train", TRAIN, "--env", "STEPS=200"))
    assert list(whole) == list(range(5, 201, 5))

    atoll("launch", "-c", "train", TRAIN, "--env", "STEPS=200", "-d")
    wait_for_log("train", "step 20/200")
    atoll("ssh", "train/worker1", "--", "pkill", "-9", "-n", "-f", "train.py")
    said = atoll("logs", "train", "2")
    (resumed,) = (line for line in of(said) if line.startswith("resumed at step "))
    at = int(resumed.split()[-1])
    assert 20 <= at < 200
    assert of(said).count("from the beginning") == 1
    assert losses(said) == pytest.approx(whole, abs=2e-3)  # DDP sums four gradients in another order at first
    row = last_job("train")
    assert (row["status"], row["restarts"]) == ("SUCCEEDED", 1)


# ------------------------------------------------------------------------------------------------- the other examples
@pytest.mark.long
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_accelerate(kind: str) -> None:
    said = atoll("launch", "-c", kind, f"examples/accelerate/{kind}.yaml", "--env", "STEPS=20")
    assert "4 processes, MULTI_CPU on cpu" in of(said)
    assert any(line.startswith("FSDP was asked for") for line in of(said)) is (kind == "fsdp")
    assert losses(said)[20] < KNOWS_NOTHING - 2
    where = next(line for line in of(said) if line.startswith("saved in ")).removeprefix("saved in ")
    assert (Path(where) / "model.safetensors").is_file()


@pytest.mark.long
def test_torchtitan_gets_as_far_as_it_can_without_a_gpu() -> None:
    if importlib.util.find_spec("torchtitan") is None:
        pytest.skip("TorchTitan is not installed here (examples/torchtitan/requirements.txt); test_spec_tasks.py runs "
                    "the command with a stand-in")  # fmt: skip
    if importlib.util.find_spec("triton") is not None:
        pytest.skip("Triton is installed here, where TorchTitan goes on until it needs a GPU")
    said = atoll("launch", "-c", "titan", "examples/torchtitan/task.yaml", "--gpus", "H100:2", code=100)
    assert all(any("tokenizer and data are in" in line for line in said.splitlines() if f"ip={ip})" in line)
               for ip in ("127.0.0.1", "127.0.0.2"))  # fmt: skip
    for who in ("head", "worker1"):
        assert any("ModuleNotFoundError: No module named 'triton'" in line for line in of(said, who))
    assert "✗ Job 1 failed (status: FAILED): rank " in said


@pytest.mark.long
def test_a_recipe(tmp_path: Path) -> None:
    where = ("--train.output_dir", str(tmp_path / "run"), "--data.cache", str(tmp_path / "cache"))
    said = atoll(
        "train", "examples/recipe/austen.toml", "--nodes", "2", *SMALL, *where, "--train.steps", "4", within_s=115
    )
    assert "parameters · FSDP 2 · CPU" in said
    assert "step 4/4   loss " in said
    assert "finished: 4 of 4 steps" in said
    assert said.count("validation loss") >= 2
