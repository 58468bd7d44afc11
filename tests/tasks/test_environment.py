"""The variables of setup, run and commands: names and formats as SkyPilot and torchrun have them."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest

from atoll.providers.base import Allocation
from atoll.tasks.environment import (
    Task,
    command_environment,
    hidden_values,
    script_environment,
    task_id,
)
from atoll.tasks.spec import ClusterSpec, JobSpec, Restarts

ADDRESSES = ("127.0.0.1", "127.0.0.2", "127.0.0.3")


def task(infra: str = "local", secrets: dict[str, str] | None = None, nodes: tuple[int, ...] = (), **spec: Any) -> Task:
    given = Allocation(infra=infra, shares_machine=infra == "local")
    cluster = ClusterSpec("train", infra=infra, num_nodes=3, allocation=given)
    job = JobSpec(**spec)
    return Task(job, cluster, 7, "sky-x_train_7", "ada", ADDRESSES, secrets or {}, nodes or range(job.num_nodes))


def test_task_id() -> None:
    assert task_id("train", 3, datetime(2026, 1, 2, 3, 4, 5, 67)) == "sky-2026-01-02-03-04-05-000067_train_3"


def test_run_has_skypilots_variables_over_the_jobs_nodes() -> None:
    env = script_environment(task(num_nodes=2, num_accelerators=4), "run", 1, {})
    assert env == {
        "PYTHONUNBUFFERED": "1",
        "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2",
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NUM_GPUS_PER_NODE": "4",
        "SKYPILOT_TASK_ID": "sky-x_train_7",
        "SKYPILOT_INTERNAL_JOB_ID": "7",
        "SKYPILOT_CLUSTER_INFO": env["SKYPILOT_CLUSTER_INFO"],
        "SKYPILOT_USER": "ada",
    }
    assert json.loads(env["SKYPILOT_CLUSTER_INFO"]) == {
        "cluster_name": "train",
        "cloud": "local",
        "region": None,
        "zone": None,
    }


def test_setup_has_its_own_over_all_nodes_of_the_cluster() -> None:
    env = script_environment(task("ssh/lab", num_nodes=2, num_accelerators=1), "setup", 2, {})
    assert env["SKYPILOT_SETUP_NODE_IPS"] == "127.0.0.1\n127.0.0.2\n127.0.0.3"
    assert env["SKYPILOT_SETUP_NODE_RANK"] == "2"
    assert env["SKYPILOT_SETUP_NUM_GPUS_PER_NODE"] == "1"
    assert env["SKYPILOT_NUM_NODES"] == "2"
    assert not {"SKYPILOT_NODE_IPS", "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_GPUS_PER_NODE"} & env.keys()
    info = json.loads(env["SKYPILOT_CLUSTER_INFO"])
    assert (info["cloud"], info["region"]) == ("ssh", "lab")


def test_a_jobs_rank_in_its_sweep() -> None:
    env = script_environment(task(group="s1", rank_in_group=2, num_in_group=5), "run", 0, {})
    assert (env["SKYPILOT_JOB_RANK"], env["SKYPILOT_NUM_JOBS"]) == ("2", "5")
    assert "SKYPILOT_JOB_RANK" not in script_environment(task(), "run", 0, {})


def test_what_wins() -> None:
    place = {"HOME": "/nodes/0/home", "TMPDIR": "/tmp/n0", "CUDA_VISIBLE_DEVICES": "0"}
    base = {"HOME": "/home/ada", "PATH": "/bin", "A": "base", "B": "base"}
    user = {"A": "user", "TMPDIR": "/mine", "CUDA_VISIBLE_DEVICES": "1", "SKYPILOT_NODE_RANK": "9"}
    env = script_environment(task(base_env=base, env=user, secrets={"C": "secret"}), "run", 0, place)
    assert (env["A"], env["B"], env["C"], env["PATH"]) == ("user", "base", "secret", "/bin")
    assert (env["HOME"], env["TMPDIR"]) == ("/nodes/0/home", "/tmp/n0")  # the node's own
    assert env["CUDA_VISIBLE_DEVICES"] == "0"  # what is leased; the user's has bounded that
    assert env["SKYPILOT_NODE_RANK"] == "0"
    assert "OMP_NUM_THREADS" not in env
    assert env["TORCHINDUCTOR_CACHE_DIR"] == "/nodes/0/home/.cache/torchinductor", "kept for the next job"


def test_commands_have_torchruns_variables() -> None:
    job = task(num_nodes=2, command=("x",), num_processes=4, restarts=Restarts(on_errors=3), run_id="101")
    env = command_environment(job, 1, 2, {}, master_port=29500, restarts=1, cores=8)
    expected = {
        "RANK": "6",
        "LOCAL_RANK": "2",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_RANK": "6",
        "ROLE_WORLD_SIZE": "8",
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_RUN_ID": "101",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "OMP_NUM_THREADS": "1",  # 8 cores, 8 ranks
        "SKYPILOT_NODE_RANK": "1",
    }
    assert {name: env.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("infra", "nodes", "processes", "given", "expected"),
    [
        ("local", 1, 1, {}, None),
        ("local", 1, 2, {}, "4"),
        ("local", 2, 1, {}, "4"),
        ("local", 2, 2, {}, "2"),
        ("local", 3, 9, {}, "1"),
        ("local", 2, 2, {"OMP_NUM_THREADS": "3"}, "3"),
        ("ssh/lab", 2, 1, {}, None),
        ("ssh/lab", 2, 2, {}, "4"),
    ],
)
def test_ranks_of_a_machine_share_its_cores(
    infra: str, nodes: int, processes: int, given: dict[str, str], expected: str | None
) -> None:
    job = task(infra, command=("x",), num_nodes=nodes, num_processes=processes, base_env=given)
    assert command_environment(job, 0, 0, {}, master_port=1, restarts=0, cores=8).get("OMP_NUM_THREADS") == expected


def test_ranks_count_from_the_first_of_the_jobs_nodes() -> None:
    job = task(num_nodes=2, nodes=(0, 2), command=("x",), num_processes=2)
    env = command_environment(job, 2, 1, {}, master_port=1, restarts=0, cores=8)
    assert {name: env[name] for name in ("RANK", "GROUP_RANK", "SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS")} == {
        "RANK": "3",
        "GROUP_RANK": "1",
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.3",
    }
    last = command_environment(task(nodes=(2,), command=("x",)), 2, 0, {}, master_port=1, restarts=0, cores=8)
    assert last["MASTER_ADDR"] == "127.0.0.3"


KEY = "x7Kq9vTgX7Zq81"


@pytest.mark.parametrize(
    ("name", "value", "hidden"),
    [
        ("DEPLOY_KEY", "production", set()),
        ("DEPLOY_KEY", "production-eu-west-1", set()),
        ("API_TOKEN", "", set()),
        ("MAX_TOKENS", "4096", set()),
        ("PUBLIC_KEY", "/home/ada/.ssh/id_ed25519", set()),
        ("MODEL_KEY", "llama3-8b-instruct", set()),
        ("SORT_KEYS", "true", set()),
        ("ENCRYPTION_KEY", "Correct Horse Battery Staple", set()),
        ("WORD", KEY, set()),
        ("GIT_COMMIT", "da39a3ee5e6b4b0d3255bfef95601890afd80709", set()),
        ("API_KEY", KEY, {KEY}),
        ("GITHUB_PAT", KEY, {KEY}),
        ("PGPASS", KEY, {KEY}),
        ("DB_PASSWORD", "9$kQ2!zv", {"9$kQ2!zv"}),
        ("MY_SECRET", "123e4567-e89b-12d3-a456-426614174000", {"123e4567-e89b-12d3-a456-426614174000"}),
        ("ANYTHING", "ghp_0123456789abcdefABCDEF", {"ghp_0123456789abcdefABCDEF"}),
        ("DB", f"postgres://ada:{KEY}@db:5432/x", {f"postgres://ada:{KEY}@db:5432/x", KEY}),
        ("DB", "postgres://ada:local@db/x", {"postgres://ada:local@db/x"}),
    ],
)
def test_what_logs_hide_of_what_nobody_declared(name: str, value: str, hidden: set[str]) -> None:
    assert hidden_values(JobSpec(base_env={name: value}), {}) == hidden
    assert hidden_values(JobSpec(secret_names=(name,)), {name: value}) == {value}
