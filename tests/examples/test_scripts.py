"""The scripts of `examples/torchrun` and `examples/torchtitan` by themselves, without Atoll around them."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SMALL = ("--layers", "1", "--dim", "32", "--seq-len", "32", "--batch", "8", "--log-every", "1", "--save-every", "5")


def start(num_ranks: int, out: Path, steps: int) -> list[subprocess.Popen[str]]:
    """The ranks as torchrun would start them; the first one's output can be read."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, str(EXAMPLES / "torchrun/train.py"), *SMALL, "--out", str(out), "--steps", str(steps)]
    ranks = []
    for rank in range(num_ranks):
        env = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": num_ranks,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        output = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
        ours = {**os.environ, **{name: str(value) for name, value in env.items()}}
        ranks.append(subprocess.Popen(command, env=ours, stdout=output, text=True))
    return ranks


def train(num_ranks: int, out: Path, steps: int) -> list[str]:
    ranks = start(num_ranks, out, steps)
    text, _ = ranks[0].communicate(timeout=100)
    assert [each.wait(timeout=60) for each in ranks] == [0] * num_ranks
    return text.splitlines()


def losses(lines: list[str]) -> dict[int, float]:
    words = [line.split() for line in lines if line.startswith("step ")]
    return {int(each[1].split("/")[0]): float(each[3]) for each in words}


@pytest.mark.long
def test_killed_at_any_moment_it_ends_at_the_same_weights(tmp_path: Path) -> None:
    import torch

    whole = losses(train(2, tmp_path / "whole", 240))
    assert list(whole) == list(range(1, 241))
    assert whole[240] < whole[1]

    ranks = start(2, tmp_path / "killed", 240)  # a step takes milliseconds: some hundred are left to kill it in
    assert ranks[0].stdout is not None
    with ranks[0].stdout as output:
        for line in output:
            if line.startswith("step 13/"):
                break
        for each in ranks:
            each.kill()
            each.wait()

    lines = train(2, tmp_path / "killed", 240)
    at = int(next(line for line in lines if line.startswith("resumed")).split()[-1])
    assert at % 5 == 0
    assert 10 <= at < 240
    assert losses(lines) == {step: loss for step, loss in whole.items() if step > at}
    one, other = (torch.load(tmp_path / name / "checkpoint.pt", weights_only=True) for name in ("whole", "killed"))
    assert all(torch.equal(one["model"][name], other["model"][name]) for name in one["model"])
    assert other["step"] == 240


@pytest.mark.long
def test_another_number_of_ranks_trains_the_same_thing(tmp_path: Path) -> None:
    assert losses(train(1, tmp_path / "one", 6)) == pytest.approx(losses(train(2, tmp_path / "two", 6)), abs=2e-3)


def test_the_training_loop_is_under_60_lines() -> None:
    text = (EXAMPLES / "torchrun/train.py").read_text()
    loop = text[text.index("    began, seen") : text.index('if __name__ == "__main__"')]
    assert len(loop.splitlines()) < 60


def test_torchtitan_has_what_its_debug_model_trains_with(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    from atoll.train.recipe.load import load_recipe

    shutil.copytree(
        EXAMPLES / "torchtitan", tmp_path / "torchtitan", ignore=shutil.ignore_patterns("assets", "outputs")
    )
    (tmp_path / "austen").symlink_to(EXAMPLES / "austen")
    done = subprocess.run(
        [sys.executable, "prepare.py"], cwd=tmp_path / "torchtitan", capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assets = tmp_path / "torchtitan/assets"
    tokenizer = Tokenizer.from_file(str(assets / "tokenizer/tokenizer.json"))
    assert tokenizer.get_vocab_size() <= 2048
    special = json.loads((assets / "tokenizer/tokenizer_config.json").read_text())
    assert tokenizer.token_to_id(special["bos_token"]) is not None
    samples = [json.loads(line)["text"] for line in (assets / "data/data.json").read_text().splitlines()]
    assert len(samples) > 100
    assert tokenizer.decode(tokenizer.encode(samples[0]).ids) == samples[0]
    for name in ("debug.toml", "llama3_8b.toml"):  # Atoll's own reader of the same format knows every key
        assert load_recipe(str(tmp_path / "torchtitan" / name))


def test_a_node_without_python_is_told_what_to_do(tmp_path: Path) -> None:
    setups = {path: yaml.safe_load(path.read_text()).get("setup", "") for path in EXAMPLES.glob("*/*.yaml")}
    files = [path for path, setup in setups.items() if re.search(r"\bpython\b", setup)]
    assert len(files) == 5
    for path in files:
        setup = setups[path]
        env = {"PATH": str(tmp_path), "HOSTNAME": "h1"}
        done = subprocess.run(["/bin/bash", "-c", setup], env=env, capture_output=True, text=True, cwd=ROOT, timeout=60)
        assert done.returncode == 1, path
        assert done.stderr.startswith("no python on the PATH of h1: activate an environment in ~/.bashrc there"), path
