"""Options that several commands share: every spelling is accepted everywhere, and help shows one."""

from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

from atoll.cli import options
from atoll.cli.app import app


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
