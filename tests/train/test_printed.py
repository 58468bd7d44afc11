"""Every command that the trainer prints runs as it is printed, in a shell."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import small
from atoll.cli.app import app
from atoll.cli.train import _say_next
from atoll.cli.train_job import Training
from atoll.train.recipe.load import load_recipe
from atoll.train.trainer import run

pytestmark = pytest.mark.usefixtures("torch_in_process")

BIN = Path(sys.executable).parent


def commands(text: str) -> dict[str, list[str]]:
    """What stands under ``next:``, by what it is for."""
    lines = text.partition("next:\n")[2].splitlines()
    return {line[:26].strip(): shlex.split(line[line.index("  atoll ") :]) for line in lines if "  atoll " in line}


def test_what_a_run_says_is_next_can_be_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where folders have spaces, the checkpoints a place of their own, and the recipe is longer than it was."""
    folder = tmp_path / "my runs"
    folder.mkdir()
    monkeypatch.chdir(folder)
    small.write_toml(small.tree(folder, train__steps=2), folder / "a recipe.toml")
    given = ["--train.output_dir", "out of it", "--checkpoint.path=kept here", "--train.steps", "2"]
    first = run("a recipe.toml", given, report=lambda event: None)
    loaded = load_recipe("a recipe.toml", given)
    _say_next(Training(loaded, "a recipe.toml", given), vars(first), None)
    found = commands(capsys.readouterr().out)
    assert found.keys() == {"train longer", "generate text", "export to Hugging Face", "scale"}
    for words in (found["generate text"], found["export to Hugging Face"]):
        done = CliRunner().invoke(app, words[1:])
        assert done.exit_code == 0, done.output
    longer, scale = found["train longer"], found["scale"]
    assert run(longer[2], longer[3:], report=lambda event: None).step == 4
    assert (scale[3:5], scale[-1]) == (["--nodes", "2"], "--no-resume")
    wider = run(scale[2], scale[5:-1], resume=False, report=lambda event: None)
    assert (wider.status, wider.step) == ("finished", 2)


def test_what_cannot_be_done_is_not_suggested(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = tmp_path / "tokens.bin"
    tokens.write_bytes(bytes(range(256)) * 40)
    tree = small.tree(
        tmp_path,
        data__path=str(tokens),
        data__tokenizer=None,
        data__document_end=None,
        model__vocab_size=65536,
        train__steps=2,
        train__global_batch=1,
        train__micro_batch=1,
    )
    _say_next(Training(load_recipe(tree), None, []), vars(small.train(tree)), None)
    assert commands(capsys.readouterr().out).keys() == {"train longer", "export to Hugging Face"}


@pytest.mark.long
@pytest.mark.timeout(600)
def test_what_a_run_says_is_next_runs_in_a_shell(tmp_path: Path) -> None:
    folder = tmp_path / "my runs"
    folder.mkdir()
    small.write_toml(small.tree(folder, train__steps=2), folder / "a recipe.toml")
    line = "atoll train 'a recipe.toml' --train.output_dir 'out of it' --checkpoint.path 'kept here'"
    for words in commands(typed(line, folder)).values():
        typed(shlex.join(words), folder)
    assert (folder / "out of it-hf" / "model.safetensors").is_file()


def typed(line: str, folder: Path) -> str:
    path = f"{BIN}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", line], cwd=folder, env=small.environment(PATH=path), capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return done.stdout
