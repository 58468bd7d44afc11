"""Options that several commands share: every spelling is accepted everywhere, and help shows one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from tests.pools import SOURCE_ROOT
from typer.testing import CliRunner

from atoll.cli import options
from atoll.cli.app import app
from atoll.core.errors import ConfigError


def parsed(*words: str) -> dict[str, object]:
    """The options that a command gets from a line."""
    root = typer.main.get_command(app)
    with root.make_context("atoll", list(words), resilient_parsing=False) as context:
        name, command, rest = root.resolve_command(context, [*context._protected_args, *context.args])
        return dict(command.make_context(name, rest, parent=context).params)


@pytest.mark.parametrize("command", [["run"], ["train"], ["launch"], ["exec", "t"]])
@pytest.mark.parametrize("flag", ["--nodes", "--num-nodes", "--nnodes", "--num_nodes"])
def test_nodes_in_every_spelling(command: list[str], flag: str) -> None:
    params = parsed(*command, flag, "3", "x.py")
    assert params.get("nodes", params.get("num_nodes")) == 3


@pytest.mark.parametrize("command", ["run", "train"])
@pytest.mark.parametrize("flag", ["--nproc", "--nproc-per-node", "--nproc_per_node"])
def test_processes_in_every_spelling(command: str, flag: str) -> None:
    assert parsed(command, flag, "2", "x.py")["nproc"] == "2"


@pytest.mark.parametrize("command", [["run"], ["train"], ["launch"], ["exec", "t"]])
@pytest.mark.parametrize("flag", ["--gpus", "--accelerators"])
def test_gpus_in_every_spelling(command: list[str], flag: str) -> None:
    params = parsed(*command, flag, "L4:2", "x.py")
    assert params.get("gpus", params.get("accelerators")) == ["L4:2"]


def test_train_keeps_keys_of_the_recipe_as_they_are() -> None:
    root = typer.main.get_command(app)
    command = root.commands["train"]  # type: ignore[attr-defined]
    with root.make_context("atoll", ["train"]) as parent:
        words = ["tiny.toml", "--train.global_batch", "4", "--dry-run"]
        context = command.make_context("train", words, parent=parent)
    assert context.params["dryrun"]
    assert context.args == ["--train.global_batch", "4"]


@pytest.mark.parametrize(("text", "number"), [("2", 2), ("2:4", 4), ("3:3", 3), (1, 1)])
def test_a_number_of_nodes(text: str | int, number: int) -> None:
    assert options.parse_nodes(text) == number


@pytest.mark.parametrize("text", ["0", "", "a", "4:2", "2:", "-1", "٣", "9" * 30])
def test_what_no_number_of_nodes_is(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is not a number from 1 to"):
        options.parse_nodes(text)


def test_processes_per_node() -> None:
    assert options.num_processes("auto", 0, 8, "local") == 1
    assert options.num_processes("auto", 4, 8, "local") == 4
    assert options.num_processes("cpu", 0, 8, "local") == 8
    assert options.num_processes("3", 0, None, "ssh/lab") == 3
    for text, num_cores in (("gpu", 8), ("cpu", None), ("0", 8), ("x", 8)):
        with pytest.raises(typer.BadParameter, match="--nproc-per-node"):
            options.num_processes(text, 0, num_cores, "ssh/lab")


def test_generate_names_a_run_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs/austen").mkdir(parents=True)
    (tmp_path / "outputs/austen/summary.json").write_text("{}")
    done = CliRunner().invoke(app, ["generate", "outputs/austin", "It is"])
    assert str(done.exception) == "outputs/austin: no such run folder: did you mean 'outputs/austen'?"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nodes", "2"], "--nodes comes after the command: atoll train --nodes"),
        (["train", "llama3_debug", "--nporc", "2"], "unknown option --nporc: did you mean '--nproc'?"),
        (["launch", "--num-node", "2", "true"], "unknown option --num-node: did you mean '--num-nodes'?"),
        (["launch", "--acelerators", "L4", "true"], "unknown option --acelerators: did you mean '--accelerators'?"),
        (["status", "--zzz"], "No such option: --zzz"),
    ],
)
def test_an_unknown_option_is_answered_with_the_nearest_spelling(words: list[str], said: str) -> None:
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())


def test_without_the_packages_of_the_trainer_its_commands_say_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name in ('torch', 'numpy'):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{SOURCE_ROOT}:{tmp_path}"}
    for words in (
        ("atoll", "train", "llama3_debug", "--nodes", "2"),
        ("atoll", "train", "llama3_debug", "--dryrun"),
        ("atoll", "data", "preview", "llama3_debug"),
        ("atoll", "export", "a", "b"),
        ("atoll.train", "llama3_debug"),
    ):
        command = [sys.executable, "-m", *words]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=100)
        assert done.returncode == 2, done.stdout + done.stderr
        assert re.fullmatch(r"atoll: the trainer needs (torch|numpy), which \S+ lacks: pip install .*\n", done.stderr)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["launch", "my.toml"], "my.toml is a recipe: atoll train my.toml"),
        (["train", "train.py"], "train.py is a script: atoll run train.py"),
        (["train", "a task.yaml"], "a task.yaml is a task file: atoll launch 'a task.yaml'"),
        (["data", "preview", "train.py"], "train.py is a script: atoll run train.py"),
    ],
)
def test_a_file_that_another_command_starts_is_refused_with_that_command(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("my.toml", "train.py", "a task.yaml"):
        (tmp_path / name).touch()
    done = CliRunner().invoke(app, words)
    assert str(done.exception) == said
    assert isinstance(done.exception, ConfigError)
