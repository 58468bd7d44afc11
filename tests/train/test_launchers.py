"""The same run, whoever starts its ranks: equal bit for bit where the layout is the same."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed import TCPStore

import leaks
import small
from atoll.train import __main__ as entry

pytestmark = pytest.mark.timeout(300)  # some start torch thrice

BIN = Path(sys.executable).parent
# Each with a port of its own, which is a function of the job: also beside other workers, whose pids are near.
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 64
_JOBS = itertools.count(64 * (os.getppid() % 128) + _WORKER, 64)


@contextlib.contextmanager
def _unserved() -> Iterator[int]:
    """A port of this machine that nobody listens on, and that nobody else takes."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


def _torchrun(num_ranks: int, logs: Path) -> list[str]:
    return [
        str(BIN / "torchrun"), "--nproc-per-node", str(num_ranks), "--standalone", "--log-dir", str(logs),
        "-m", "atoll.train",
    ]  # fmt: skip


def _finish(command: list[str], code: int = 0, **more: str) -> str:
    """Run it to its end; what it said."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=small.environment(**more), timeout=110
    )
    assert done.returncode == code, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``tree.toml`` and the run of it by torchrun on two ranks."""
    folder = tmp_path_factory.mktemp("reference")
    tree = small.tree(folder, train__steps=4, parallel__shard=2)
    path = small.write_toml(tree, folder / "tree.toml")
    _finish([*_torchrun(2, folder), str(path)])
    return folder


def _to(folder: Path) -> list[str]:
    return ["--train.output_dir", str(folder / "run")]


def test_atoll_train(reference: Path, tmp_path: Path) -> None:
    said = _finish([str(BIN / "atoll"), "train", str(reference / "tree.toml"), "--nodes", "2", *_to(tmp_path)])
    small.assert_same_run(reference / "run", tmp_path / "run")
    assert "FSDP" in said
    assert "next:" in said


@pytest.mark.long
def test_sizes_that_do_not_divide_are_refused_before_pytorch_is_loaded(tmp_path: Path) -> None:
    path = small.write_toml(small.tree(tmp_path, parallel__shard=3), tmp_path / "tree.toml")
    said = _finish([str(BIN / "atoll"), "train", str(path), "--nodes", "2", *_to(tmp_path)], code=2)
    assert said == "atoll: [parallel] shard 3 = 3 ranks do not divide the 2 there are: change an axis\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_atoll_train_with_one_node_of_two_ranks(reference: Path, tmp_path: Path) -> None:
    _finish([str(BIN / "atoll"), "train", str(reference / "tree.toml"), "--nproc", "2", *_to(tmp_path)])
    small.assert_same_run(reference / "run", tmp_path / "run")


@pytest.mark.long
def test_accelerate(reference: Path, tmp_path: Path) -> None:
    """``--multi_gpu`` is its way to say several processes; with ``--cpu`` it starts one, or MPI's."""
    launch = [
        str(BIN / "accelerate"), "launch", "--num_processes", "2", "--num_machines", "1", "--multi_gpu",
        "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0",
        "--log_dir", str(tmp_path), "-m", "atoll.train",
    ]  # fmt: skip
    _finish([*launch, str(reference / "tree.toml"), *_to(tmp_path)])
    small.assert_same_run(reference / "run", tmp_path / "run")


def _srun(folder: Path, *arguments: list[str]) -> small.Forked:
    """Ranks, each with its arguments, in the environment that srun gives its tasks on one node."""
    host = socket.gethostname()
    job = str(next(_JOBS))
    num_ranks = str(len(arguments))
    return small.Forked(
        folder,
        arguments,
        [
            {
                "SLURM_JOB_ID": job,
                "SLURM_STEP_ID": "0",
                "SLURM_PROCID": str(rank),
                "SLURM_LOCALID": str(rank),
                "SLURM_NODEID": "0",
                "SLURM_NTASKS": num_ranks,
                "SLURM_NNODES": "1",
                "SLURM_STEP_NODELIST": host,
                "SLURM_STEP_TASKS_PER_NODE": num_ranks,
                "SLURM_TASKS_PER_NODE": num_ranks,
            }
            for rank in range(len(arguments))
        ],
    )


@contextlib.contextmanager
def _as_under_torchrun(folder: Path, *arguments: str) -> Iterator[small.Forked]:
    """Two ranks with the same arguments, in the environment that torchrun gives its workers, beside its store."""
    # libuv would keep a pipe for the life of this process.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=False)
    variables = [
        {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
        for rank in ("0", "1")
    ]
    yield small.Forked(folder, [arguments] * 2, variables)


def _endless(reference: Path, folder: Path) -> list[str]:
    return [str(reference / "tree.toml"), *_to(folder), "--train.steps", "100000", "--schedule.kind", "constant"]


def _wait_for_steps(folder: Path) -> None:
    journal = folder / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 100
    while not (journal.exists() and journal.read_bytes().count(b"\n") > 3):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_srun(reference: Path, tmp_path: Path) -> None:
    for code, said in _srun(tmp_path, *[[str(reference / "tree.toml"), *_to(tmp_path)]] * 2).finish():
        assert code == 0, said
    small.assert_same_run(reference / "run", tmp_path / "run")


@pytest.mark.long
def test_slurms_notice_to_all_tasks_saves(reference: Path, tmp_path: Path) -> None:
    run = _srun(tmp_path, *[_endless(reference, tmp_path)] * 2)
    _wait_for_steps(tmp_path)
    for pid in run.pids:
        os.kill(pid, signal.SIGUSR1)
    for code, said in run.finish():
        assert code == 101, said
    assert small.saved_step(tmp_path / "run") == len(small.steps(tmp_path / "run"))


@pytest.mark.long
def test_ctrl_c_that_comes_twice_saves(reference: Path, tmp_path: Path) -> None:
    """The terminal sends it to the whole process group, and torchrun sends it to its ranks once more."""
    with _as_under_torchrun(tmp_path, *_endless(reference, tmp_path)) as run:
        _wait_for_steps(tmp_path)
        for pid in run.pids * 2:
            os.kill(pid, signal.SIGINT)
        for code, said in run.finish():
            assert code == 101, said
    assert small.saved_step(tmp_path / "run") == len(small.steps(tmp_path / "run"))


@pytest.mark.long
def test_ctrl_c_under_torchrun_saves(reference: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*_torchrun(2, tmp_path), *_endless(reference, tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=small.environment(),
        start_new_session=True,
    )
    _wait_for_steps(tmp_path)
    for pid in [process.pid, *leaks.descendants(process.pid)]:
        os.kill(pid, signal.SIGINT)
    said, _ = process.communicate(timeout=100)
    assert process.returncode != 0
    assert small.saved_step(tmp_path / "run") == len(small.steps(tmp_path / "run")), said


@pytest.mark.long
def test_two_nodes_of_two_ranks_are_torchruns_four(reference: Path, tmp_path: Path) -> None:
    path = str(reference / "tree.toml")
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    four = ["--parallel.shard", "4", "--train.micro_batch", "1"]
    _finish([str(BIN / "atoll"), "train", path, "--nodes", "2", "--nproc", "2", *four, *_to(ours)])
    _finish([*_torchrun(4, tmp_path), path, *four, *_to(theirs)])
    small.assert_same_run(ours / "run", theirs / "run")


@pytest.mark.long
def test_a_run_goes_on_under_another_launcher(reference: Path, tmp_path: Path) -> None:
    path = str(reference / "tree.toml")
    _finish([*_torchrun(2, tmp_path), path, *_to(tmp_path), "--train.steps", "2"])
    _finish([str(BIN / "atoll"), "train", path, "--nodes", "2", *_to(tmp_path), "--allow-changes"])
    rows = small.steps(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]


# ------------------------------------------------------------------------------------------------- what goes wrong
def test_a_mistake_is_told_once(reference: Path, tmp_path: Path) -> None:
    tree = str(reference / "tree.toml")
    with _as_under_torchrun(tmp_path, tree, *_to(tmp_path), "--data.path", "/nowhere.txt") as run:
        first, second = run.finish()
    assert (first[0], second) == (2, (2, ""))
    assert first[1].startswith("atoll: ")
    assert first[1].count("\n") == 1, "no traceback of ours"
    assert "/nowhere.txt" in first[1]


@pytest.mark.long
def test_a_mistake_is_told_once_although_the_store_goes_with_rank_0(reference: Path, tmp_path: Path) -> None:
    wrong = [str(reference / "tree.toml"), *_to(tmp_path), "--data.path", "/nowhere.txt"]
    first, second = _srun(tmp_path, wrong, wrong).finish()
    assert (first[0], second[0]) == (2, 2)
    assert first[1].startswith("atoll: ")
    assert "atoll: " not in second[1], "torch may say that the store went with rank 0"


@pytest.mark.long
def test_what_one_rank_alone_finds_wrong_is_told_once(reference: Path, tmp_path: Path) -> None:
    good = [str(reference / "tree.toml"), *_to(tmp_path)]
    first, second = _srun(tmp_path, good, [*good, "--model.python", "nowhere_at_all:build"]).finish()
    assert (first[0], second[0]) == (2, 2)
    assert "atoll: found on rank 1: [model] python = 'nowhere_at_all:build'" in first[1]
    assert "atoll: " not in second[1], "torch may say that the store went with rank 0"


def test_a_broken_environment_of_one_rank_is_told_by_it(reference: Path, tmp_path: Path) -> None:
    variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "one", "MASTER_ADDR": "127.0.0.1"}
    run = small.Forked(tmp_path, [[str(reference / "tree.toml"), *_to(tmp_path)]], [variables])
    ((code, said),) = run.finish()
    assert code == 2
    assert said == "atoll: on rank 1: LOCAL_RANK='one' in the environment: expected a whole number\n"


@pytest.mark.long
def test_ranks_that_cannot_meet_say_where(reference: Path, tmp_path: Path) -> None:
    arguments = [str(reference / "tree.toml"), *_to(tmp_path), "--train.hang_timeout_s", "1"]
    with _unserved() as port:
        variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ((code, said),) = small.Forked(tmp_path, [arguments], [variables]).finish()
    assert code == 100, said
    assert f"the 2 ranks could not meet at 127.0.0.1:{port} within 1 s" in said
    assert "Traceback" not in said


HANGS = """
import os, time
from torch import nn


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed, self.calls = nn.Embedding(config.vocabulary, config.dim), 0
        self.head = nn.Linear(config.dim, config.vocabulary)

    def forward(self, tokens, documents):
        self.calls += 1
        if os.environ["RANK"] == "{rank}" and self.calls > 2:
            {what}
        return self.head(self.embed(tokens))


def build(config):
    return Model(config)
"""


@pytest.mark.parametrize(
    ("what", "num_ranks", "said"),
    [
        ("time.sleep(1000)", 2, "rank 1"),
        ("raise RuntimeError('out of ideas')", 1, "RuntimeError: out of ideas"),
    ],
)
@pytest.mark.long
def test_a_rank_that_hangs_or_raises_ends_atoll_train(tmp_path: Path, what: str, num_ranks: int, said: str) -> None:
    (tmp_path / "a_bad_model.py").write_text(HANGS.format(what=what, rank=num_ranks - 1))
    tree = small.tree(tmp_path, model__python="a_bad_model:build", train__hang_timeout_s=6.0)
    path = small.write_toml(tree, tmp_path / "tree.toml")
    command = [str(BIN / "atoll"), "train", str(path), "--nodes", str(num_ranks)]
    shown = _finish(command, code=100, PYTHONPATH=str(tmp_path))
    assert said in shown
    assert "typer" not in shown, "no frames of the command"


def test_rank_0_has_the_time_to_tell_a_mistake(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torchrun ends all ranks with the first that fails."""
    waited: list[float] = []
    monkeypatch.setattr("atoll.train.__main__.time.sleep", waited.append)
    for rank, expected in (("1", 1), ("0", 1)):
        monkeypatch.setenv("RANK", rank)
        assert entry.main(["llama3_debug", "--train.stps", "5"]) == 2
        assert len(waited) == expected
    assert capsys.readouterr().err.count("stps") == 1
