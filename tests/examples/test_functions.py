"""The guide's snippets in examples/functions: each keeps its promise, and differs from the guide where it is listed.

Most tests run a script as it stands, but on the module's pool, and then send its functions out again with an observer
around them that looks, on the ranks, at what the guide's functions don't return. That scripts run by themselves is
tested in processes of their own.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import runpy
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import atoll as sky

pytestmark = pytest.mark.leaks_per_module

EXAMPLES = Path(__file__).parents[2] / "examples" / "functions"
TENSORFLOW = Path(__file__).parents[2] / ".venv-tensorflow" / "bin"
HELPERS = {"where.py", "stand_ins.py"}
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py") if path.name not in HELPERS)
# These take a second or less; the others import torch in three processes. What they do is tested on one pool below.
IN_MAKE_TEST = {
    "environment_variables.py",
    "head_node_io.py",
    "set_epoch.py",
    "shard.py",
    "shard_with_shuffle.py",
}

Script = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The current folder of the module's pool, where scripts leave their files."""
    path = tmp_path_factory.mktemp("functions")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        yield path


@pytest.fixture(scope="module")
def pool(folder: Path) -> Iterator[sky.ComputePool]:
    with sky.ComputePool(nodes=2, accelerator="A100") as pool:
        yield pool


@pytest.fixture(scope="module")
def script(pool: sky.ComputePool) -> Script:
    """Runs a script once, as `__main__` and on the module's pool; gives its globals."""
    done: dict[str, dict[str, Any]] = {}

    def run(name: str) -> dict[str, Any]:
        if name not in done:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(sys, "argv", [name])
                patch.syspath_prepend(EXAMPLES)
                patch.setattr(sky, "ComputePool", lambda **_: contextlib.nullcontext(pool))
                done[name] = runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return done[name]

    return run


def digest(state: dict[str, Any]) -> str:
    """Equal for state dicts that are equal bit by bit."""
    import hashlib  # travels to ranks with this function

    parts = (name.encode() + tensor.detach().cpu().numpy().tobytes() for name, tensor in sorted(state.items()))
    return hashlib.sha256(b"".join(parts)).hexdigest()


# ------------------------------------------------------------------------------------------------ by themselves
@pytest.mark.timeout(400)  # one installs TensorFlow
@pytest.mark.parametrize(
    "name", [name if name in IN_MAKE_TEST else pytest.param(name, marks=pytest.mark.long) for name in SCRIPTS]
)
def test_script_runs_by_itself_without_a_main_guard(name: str, tmp_path: Path) -> None:
    assert "__main__" not in (EXAMPLES / name).read_text()
    ended = run_alone(name, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip()
    assert "Traceback" not in ended.stderr


def test_accelerator_is_taken_from_the_command_line(tmp_path: Path) -> None:
    ended = run_alone("environment_variables.py", tmp_path, "--accelerator", "H100:2")
    assert ended.returncode == 0, ended.stderr
    table = {line.split()[0]: line.split()[1:5] for line in ended.stdout.splitlines()}
    assert table["RANK"] == ["0", "1", "2", "3"]
    assert table["LOCAL_RANK"] == ["0", "1", "0", "1"]
    assert table["NODE_RANK"] == ["0", "0", "1", "1"]


def run_alone(
    name: str, folder: Path, *arguments: str, python: Path | str = sys.executable
) -> subprocess.CompletedProcess[str]:
    command = [str(python), str(EXAMPLES / name), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=390)


# ----------------------------------------------------------------------------------------------------- PyTorch
def watch_training(train: Any, epochs: int) -> dict[str, Any]:
    """On a rank: run the guide's `train`, and keep what its steps saw."""
    import copy

    import torch.distributed as dist

    names = train.__atoll_function__.__globals__
    step, losses, seen = names["train_step"], [], {}

    def watched(model: Any, batch: Any) -> None:
        if not losses:
            seen.update(model=model, before=copy.deepcopy(model.state_dict()), batch=batch)
        step(model, batch)
        losses.append(names["final_loss"])
        if len(losses) == 1:
            seen.update(after=copy.deepcopy(model.state_dict()))

    names["train_step"] = watched
    result = train.local(epochs=epochs)
    model = seen.pop("model")
    parameters, kind = digest(model.state_dict()), type(model).__name__
    return {
        **seen,
        "result": result,
        "losses": losses,
        "digest": parameters,
        "kind": kind,
        "world": dist.get_world_size(),
    }


def test_ddp_trains_in_sync(script: Script, pool: sky.ComputePool) -> None:
    import torch

    names = script("pytorch_basic")
    ranks = watch_training_on(pool, names["train"])
    assert [rank["result"]["node"] for rank in ranks] == [0, 1]
    assert [rank["world"] for rank in ranks] == [2, 2]
    assert [rank["kind"] for rank in ranks] == ["DistributedDataParallel"] * 2
    # Each rank drew its own random parameters and saw its own half of the data; still they end equal, bit by bit.
    assert ranks[0]["digest"] == ranks[1]["digest"]
    assert not torch.equal(ranks[0]["batch"][0], ranks[1]["batch"][0])
    for rank in ranks:
        assert len(rank["losses"]) == 10 * 1024 // 2 // 64
        assert sum(rank["losses"][-8:]) < 0.6 * sum(rank["losses"][:8])
        assert rank["result"]["loss"] == rank["losses"][-1]


def watch_training_on(pool: sky.ComputePool, train: Any) -> list[dict[str, Any]]:
    return list(pool.run(watch_training, train, 10))


def test_ddp_steps_along_the_gradient_averaged_over_ranks(script: Script, pool: sky.ComputePool) -> None:
    import torch

    names = script("pytorch_basic")
    ranks = pool.run(watch_training, names["train"], 1)
    gradients = []
    for rank in ranks:
        model = names["MyModel"]()
        model.load_state_dict({key.removeprefix("module."): value for key, value in rank["before"].items()})
        words, novels = rank["batch"]
        torch.nn.functional.cross_entropy(model(words), novels).backward()
        gradients.append({f"module.{key}": value.grad for key, value in model.named_parameters()})
    for key, before in ranks[0]["before"].items():
        assert not torch.allclose(gradients[0][key], gradients[1][key])
        expected = before - 0.1 * (gradients[0][key] + gradients[1][key]) / 2
        for rank in ranks:
            torch.testing.assert_close(rank["after"][key], expected)


def test_environment_variables_are_true(script: Script, pool: sky.ComputePool) -> None:
    names = script("environment_variables")
    ranks = names["results"]
    assert [rank["RANK"] for rank in ranks] == ["0", "1"]
    assert [rank["NODE_RANK"] for rank in ranks] == ["0", "1"]
    assert [rank["LOCAL_RANK"] for rank in ranks] == ["0", "0"]
    assert [rank["LOCAL_WORLD_SIZE"] for rank in ranks] == ["1", "1"]
    assert [rank["WORLD_SIZE"] for rank in ranks] == ["2", "2"]
    info = pool.run(sky.instance_info)[0]
    assert [(rank["MASTER_ADDR"], rank["MASTER_PORT"]) for rank in ranks] == [(info.head_addr, str(info.head_port))] * 2
    assert {rank.keys() == set(names["NAMES"]) for rank in ranks} == {True}
    one = names["one"]
    assert (one["RANK"], one["WORLD_SIZE"], one["LOCAL_WORLD_SIZE"]) == ("0", "1", "1")
    # Where the variables say that rank 0 listens, a store of torch's own can be reached.
    assert pool.run(rendezvous) == [3, 3]


def rendezvous() -> int:
    """On a rank: make a group from the variables alone, as a program under torchrun does, and add up 1 + 2."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method="env://")
    total = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(total)
    return int(total.item())


def test_decorator_makes_the_group(script: Script) -> None:
    # `nccl` was asked for: over GPUs it is NCCL, and on simulated ones Gloo.
    assert [result[0] for result in script("explicit_decorator")["results"]] == [True, True]
    assert {result[1] for result in script("explicit_decorator")["results"]} <= {"nccl", "gloo"}
    assert [result[2] for result in script("explicit_decorator")["results"]] == [2, 2]


# ------------------------------------------------------------------------------------------------ Hugging Face
def watch_trainer(fine_tune: Any) -> dict[str, Any]:
    """On a rank: run the guide's `fine_tune`, and look at its Trainer when it evaluates."""
    import transformers

    seen: dict[str, Any] = {}

    class Watched(transformers.Trainer):
        def train(self, *args: Any, **kwargs: Any) -> Any:
            seen["before"] = digest(self.model.state_dict())
            return super().train(*args, **kwargs)

        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            seen.update(
                digest=digest(self.model.state_dict()), world=self.args.world_size, steps=self.state.global_step
            )
            answer = self.predict(self.eval_dataset)
            seen["right"] = (answer.predictions.argmax(axis=1) == answer.label_ids).tolist()
            return super().evaluate(*args, **kwargs)

    original, transformers.Trainer = transformers.Trainer, Watched
    try:
        seen["result"] = fine_tune.local()
    finally:
        transformers.Trainer = original
    return seen


@pytest.mark.long
@pytest.mark.timeout(240)
def test_hugging_face_trainer_trains_one_model_over_both_ranks(
    script: Script, pool: sky.ComputePool, folder: Path
) -> None:
    names = script("hugging_face_trainer")
    ranks = pool.run(watch_trainer, names["fine_tune"])
    assert [rank["world"] for rank in ranks] == [2, 2]
    # The ranks began with random weights of their own, and end with the same, bit by bit.
    assert ranks[0]["before"] != ranks[1]["before"]
    assert ranks[0]["digest"] == ranks[1]["digest"] != ranks[0]["before"]
    # Half of the batches of 16 each: no sample was trained on twice in an epoch.
    assert [rank["steps"] for rank in ranks] == [3 * 768 // 16 // 2] * 2
    # Both evaluated the whole test split together, and have learned to tell the novels apart.
    assert [len(rank["right"]) for rank in ranks] == [256, 256]
    assert sum(ranks[0]["right"]) > 0.7 * 256
    assert ranks[0]["result"]["eval_loss"] == ranks[1]["result"]["eval_loss"]
    assert names["results"][0]["eval_loss"] == names["results"][1]["eval_loss"]
    assert (folder / "results").is_dir()


@pytest.mark.long
def test_stand_in_for_imdb_is_balanced_and_its_splits_are_disjoint(script: Script) -> None:
    splits = script("hugging_face_trainer")["two_novels"]()
    assert splits["train"].column_names == splits["test"].column_names == ["text", "label"]
    for split in splits.values():
        assert sorted(set(split["label"])) == [0, 1]
        assert sum(split["label"]) * 2 == len(split)
    assert not set(splits["train"]["text"]) & set(splits["test"]["text"])


# ---------------------------------------------------------------------------------------- shards and the sampler
def test_shards_are_disjoint_and_complete(script: Script, pool: sky.ComputePool) -> None:
    names = script("shard")
    assert sum(names["results"]) == sum(range(1001))
    # A sum could hide an element that two ranks have: give each a bit of its own.
    results = pool.run(names["process_data"], [1 << i for i in range(101)])
    assert results[0] & results[1] == 0
    assert results[0] | results[1] == (1 << 101) - 1
    assert {result.bit_count() for result in results} == {50, 51}
    assert "Node 1: processing 500 items" in (pool.log_dir / "rank1.out").read_text()


def test_pairs_stay_together(script: Script) -> None:
    names = script("shard_several_arrays")
    novel_of = dict(zip(names["x_full"], names["y_full"].tolist(), strict=True))
    parts = names["results"]
    assert [type(text).__name__ for text, _ in parts] == ["list", "list"]
    for texts, novels in parts:
        assert [novel_of[text] for text in texts] == novels.tolist()
    assert sorted(parts[0][0] + parts[1][0]) == sorted(names["x_full"])
    assert parts[0][0] != names["x_full"][::2]  # it was shuffled


def test_shuffled_shards_are_reproducible(script: Script) -> None:
    names = script("shard_with_shuffle")
    parts, again = ([part.tolist() for part in results] for results in (names["results"], names["again"]))
    assert parts == again
    assert sorted(parts[0] + parts[1]) == list(range(24))
    assert parts[0] != list(range(0, 24, 2))


def test_sampler_covers_the_data_in_a_new_order_each_epoch(script: Script) -> None:
    ranks = script("distributed_sampler")["results"]
    assert [len(rank) for rank in ranks] == [3, 3]
    for parts in zip(*ranks, strict=True):
        assert sorted(parts[0] + parts[1]) == list(range(200))
    for rank in ranks:
        assert len({tuple(epoch) for epoch in rank}) == 3


def test_set_epoch_is_what_changes_the_order(script: Script) -> None:
    names = script("set_epoch")
    for epoch in range(3):
        assert sorted(names["results"][0][epoch] + names["results"][1][epoch]) == list(range(20))
    assert len({tuple(order) for order in names["results"][0]}) == 3
    assert len({tuple(order) for order in names["without"][0]}) == 1
    assert names["results"][0][0] == names["without"][0][0]


# ------------------------------------------------------------------------------------------------- the head node
def watch_saving(train: Any) -> dict[str, Any]:
    """On a rank: run the guide's `train`; how often it saved, and the parameters that it ended with."""
    names = train.__atoll_function__.__globals__
    save, code, seen = names["save_checkpoint"], names["training_code"], {"saved": 0}

    def watched_save(model: Any) -> None:
        seen["saved"] += 1
        save(model)

    def watched_code() -> Any:
        model, epoch, loss = code()
        seen["digest"] = digest(model.state_dict())
        return model, epoch, loss

    names.update(save_checkpoint=watched_save, training_code=watched_code)
    return {**seen, "result": train.local(), **seen}


def test_only_the_head_saves_and_prints(script: Script, pool: sky.ComputePool, folder: Path) -> None:
    import torch

    names = script("head_node")
    assert list(names["results"]) == [{"node": 0, "is_head": True}, {"node": 1, "is_head": False}]
    ranks = pool.run(watch_saving, names["train"])
    assert [rank["saved"] for rank in ranks] == [1, 0]
    assert ranks[0]["digest"] == ranks[1]["digest"]
    saved = folder / "outputs" / "functions"
    assert digest(torch.load(saved / "head_node.pt")) == ranks[0]["digest"]
    assert not list(saved.glob("*.part"))
    for line in ("Saved checkpoint from head node", "Epoch 19: loss="):
        assert (pool.log_dir / "rank0.out").read_text().count(line) == 2  # one of the script, one of the second call
        assert not any(line in path.read_text() for path in pool.log_dir.glob("rank1.out"))


def test_head_does_the_io(script: Script, folder: Path) -> None:
    names = script("head_node_io")
    saved = folder / "outputs" / "functions"
    assert [is_head for is_head, _ in names["results"]] == [True, False]
    assert json.loads((saved / "checkpoint.pt").read_text()) == {"rank": "0"}
    assert [json.loads(line) for line in (saved / "metrics.jsonl").read_text().splitlines()] == [{"loss": 0.25}]


def test_barrier_comes_before_the_aggregation(script: Script) -> None:
    # Rank 1 writes half a second after the head has come to the barrier.
    assert list(script("synchronize")["results"]) == [[201], []]


@pytest.mark.long  # on ranks of its own, which load torch
def test_slices_train_apart(tmp_path: Path) -> None:
    ended = run_alone("mig.py", tmp_path)
    losses = re.findall(r"^slice \d: learning rate \S+, loss (\S+)$", ended.stdout, re.MULTILINE)
    assert len({*losses}) == 2, ended.stderr


# ------------------------------------------------------------------------------------------- the other practices
def test_gradient_accumulation_equals_large_batches(script: Script) -> None:
    import torch

    names = script("gradient_accumulation")
    assert digest(names["results"][0]) == digest(names["results"][1])
    # On one process: each step over all that both ranks saw in four batches of 16.
    model = names["Classifier"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    begun = {key: value.clone() for key, value in model.state_dict().items()}
    for start in range(0, 512, 128):
        rows = names["dataset"][start : start + 128]
        optimizer.zero_grad()
        model([torch.stack(column) for column in zip(*rows, strict=True)]).backward()
        optimizer.step()
    for key, expected in model.state_dict().items():
        assert not torch.allclose(begun[key], expected)
        torch.testing.assert_close(names["results"][0][key], expected)
        torch.testing.assert_close(names["large"][0][key], expected)


def test_mixed_precision_is_on_with_cuda_and_off_without(script: Script) -> None:
    import torch

    cuda = torch.cuda.is_available()
    dtype = "torch.float16" if cuda else "torch.float32"
    assert script("mixed_precision")["results"] == {"scaler": cuda, "dtype": dtype, "fp16": cuda, "keras": True}


# ------------------------------------------------------------------------------------------------- Keras and JAX
def test_keras_trains_one_model(script: Script) -> None:
    first, second = script("keras_jax")["results"]
    assert (first["node"], second["node"]) == (0, 1)
    assert first["accuracy"] == second["accuracy"] > 0.95
    assert [weight.tobytes() for weight in first["weights"]] == [weight.tobytes() for weight in second["weights"]]


def test_keras_trains_one_model_on_tensorflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an environment that has TensorFlow; the long test of this script has it installed for the ranks."""
    if not (TENSORFLOW / "python").exists():
        pytest.skip("TensorFlow has an environment of its own: make install-tensorflow")
    monkeypatch.setenv("PATH", f"{TENSORFLOW}:{os.environ['PATH']}")
    ended = run_alone("keras_tensorflow.py", tmp_path, python=TENSORFLOW / "python")
    found = re.findall(r"^rank \d: accuracy (\S+), weights (\S+)$", ended.stdout, re.MULTILINE)
    assert len(found) == 2, ended.stderr
    assert found[0] == found[1]
    assert float(found[0][0]) > 0.85


def test_pmap_steps_along_the_gradient_averaged_over_ranks(script: Script) -> None:
    import numpy as np

    names = script("jax_pmap")
    first, second = names["results"]
    assert first["devices"] == second["devices"] == 2
    assert first["losses"] == second["losses"]
    assert first["losses"][1] < 0.5 < first["losses"][0]
    assert (first["w"] == second["w"]).all()
    # On one process: each step over what both ranks saw in it.
    x, y = names["images"].reshape(-1, 784) / np.float32(255), np.eye(10, dtype=np.float32)[names["labels"]]
    half, w, b = len(x) // 2, np.zeros((784, 10)), np.zeros(10)
    for step in range(40):
        rows = np.arange(step * 64, (step + 1) * 64) % half
        rows = np.concatenate([rows, rows + half])
        scores = np.exp(x[rows] @ w + b)
        error = (scores / scores.sum(axis=1, keepdims=True) - y[rows]) / len(rows)
        w, b = w - 0.5 * x[rows].T @ error, b - 0.5 * error.sum(axis=0)
    np.testing.assert_allclose(first["w"], w, atol=1e-4)


# ------------------------------------------------------------------------------------------------ troubleshooting
def watch_timeout(total: Any) -> tuple[Any, float, str]:
    """On a rank: run the guide's lines; seconds that the group's collectives may take, and NCCL_DEBUG, afterwards."""
    import torch
    import torch.distributed as dist

    result = total.local(10)
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    options = dist.distributed_c10d._get_default_group()._get_backend(device).options
    return result, options._timeout.total_seconds(), os.environ["NCCL_DEBUG"]


def test_nccl_socket_timeout_becomes_the_groups_timeout(script: Script, pool: sky.ComputePool) -> None:
    names = script("nccl_timeout")
    assert list(names["results"]) == [30, 30]
    # torch is loaded on these ranks, so the group is there before the variables are set.
    assert list(pool.run(watch_timeout, names["total"])) == [(30, 600.0, "INFO")] * 2
    # And on ranks that are new it is made after.
    with sky.ComputePool(nodes=2) as fresh:
        assert list(fresh.run(watch_timeout_on_first_import, names["total"])) == [(30, 600.0, "INFO")] * 2
    assert list(pool.run(os.environ.get, "NCCL_SOCKET_TIMEOUT")) == [None, None]


def watch_timeout_on_first_import(total: Any) -> tuple[Any, float, str]:
    assert "torch" not in sys.modules
    return watch_timeout(total)


def wait_for_a_rank_that_does_not_come() -> str:
    """On a rank: rank 0 waits in a collective, rank 1 does other things."""
    import time

    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(1))  # the ranks are connected: what is waited for below is the collective alone
    os.environ["NCCL_SOCKET_TIMEOUT"] = "1"
    if dist.get_rank() == 1:
        time.sleep(2)
        return "did not come"
    with pytest.raises(RuntimeError) as caught:
        dist.all_reduce(torch.ones(1))
    return str(caught.value)


def test_nccl_socket_timeout_ends_a_wait(pool: sky.ComputePool) -> None:
    message, other = pool.run(wait_for_a_rank_that_does_not_come)
    assert re.search("timed? ?out", message, re.IGNORECASE), message
    assert other == "did not come"


def test_guard_for_the_process_group_works_inside_and_outside_a_pool(script: Script) -> None:
    names = script("process_group_guard")
    (kind, parameters), (other_kind, other_parameters) = names["results"]
    assert kind == other_kind == "DistributedDataParallel"
    assert parameters == other_parameters  # DDP gave rank 1 those of rank 0
    assert names["one"][0] == names["here"][0] == "MyModel"


# ------------------------------------------------------------------------------------------- the text and its list
# Of each snippet of the guide, blank lines left out: SHA-256 of its text. With it these tests know, without holding
# the guide's text, that the scripts differ from it in the listed lines and nowhere else.
GUIDE = {
    "distributed_sampler.py": "de60e837ca27c693",
    "explicit_decorator.py": "73df46719c93c505",
    "gradient_accumulation.py": "56aa156db1d3400e",
    "head_node.py": "8bd291b2812b3397",
    "head_node_io.py": "9eedd6a17ec22be5",
    "hugging_face_trainer.py": "12fd4daeeb1a9524",
    "jax_pmap.py": "64c4cad9f8c71da4",
    "keras_jax.py": "804b424ef9157058",
    "keras_tensorflow.py": "699088c6d066325a",
    "mig.py": "a850f7f19614a1a1",
    "mixed_precision.py": "2a675c4f20664c6c",
    "nccl_timeout.py": "d51fdb7bdcb7b7fa",
    "process_group_guard.py": "4b4cdd386b97a04a",
    "pytorch_basic.py": "fbcb29e246f4c0f8",
    "set_epoch.py": "c916c2f068b5186f",
    "shard.py": "4c5b21e92ab40d93",
    "shard_several_arrays.py": "fb01e6f16ae0a709",
    "shard_with_shuffle.py": "0d7b9adf8405cebf",
    "synchronize.py": "cd32fd31b1a6eb36",
}
NOTHING = "—"
MARKED = re.compile(r"(?P<indent> *)(?P<ours>.*?) *# changed: (?P<why>.+)")


def guide_lines(name: str) -> list[str]:
    """The lines of a script that stand between its `# >>> the guide` and `# <<<`, without common indentation."""
    parts = re.findall(r"^ *# >>> the guide\n(.*?)^ *# <<<$", (EXAMPLES / name).read_text(), re.DOTALL | re.MULTILINE)
    assert parts, f"{name} marks nothing as the guide's"
    return "".join(map(textwrap.dedent, parts)).splitlines()


def listed(name: str) -> list[tuple[str, str, str]]:
    """What the README lists for a script: the guide's line, ours, and why."""
    rows = []
    for line in (EXAMPLES / "README.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and cells[0].strip("`") == name:
            rows.append((cells[1].strip("`"), cells[2].strip("`"), cells[3]))
    return rows


def test_every_script_is_in_the_readme() -> None:
    assert set(GUIDE) == set(SCRIPTS) - {"environment_variables.py"}
    text = (EXAMPLES / "README.md").read_text()
    assert [name for name in SCRIPTS if f"`{name}`" not in text] == []
    named = re.findall(r"^\| `(\w+\.py)` \|", text, re.MULTILINE)
    assert set(named) <= set(SCRIPTS)


@pytest.mark.parametrize("name", sorted(GUIDE))
def test_readme_lists_every_changed_line(name: str) -> None:
    marked = [match for line in guide_lines(name) if (match := MARKED.fullmatch(line))]
    rows = listed(name)
    assert [(match["ours"] or NOTHING, match["why"]) for match in marked] == [row[1:] for row in rows]
    # Undoing what is listed gives the guide's own text.
    undo = iter(rows)
    text = []
    for line in guide_lines(name):
        match = MARKED.fullmatch(line)
        theirs = line if match is None else match["indent"] + next(undo)[0]
        if theirs.strip() not in ("", NOTHING):
            text.append(theirs.rstrip())
    assert hashlib.sha256("\n".join(text).encode()).hexdigest()[:16] == GUIDE[name]


def test_no_line_is_marked_outside_the_guides_text() -> None:
    for name in SCRIPTS:
        marks = (EXAMPLES / name).read_text().count("# changed:")
        assert marks == (len(listed(name)) if name in GUIDE else 0), name
