"""Stopped and resumed is the same as never stopped: bit for bit on the same ranks, to rounding on others."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import ranks
import small
from atoll.core.errors import CheckpointError, ConfigError
from atoll.train.saved import find_checkpoint

# Torch keeps the first Gloo device of a process for good.
pytestmark = pytest.mark.usefixtures("torch_in_process")

NUM_DOCUMENTS = 20
LAYOUTS = {"one": (1, {}), "fsdp": (2, {"parallel__shard": 2}), "ddp": (2, {"parallel__replicate": 2})}


@pytest.fixture
def whole(tmp_path: Path) -> dict[str, Any]:
    """A recipe of two epochs and a bit, to be run without interruption into ``whole``."""
    (tmp_path / "text.txt").write_text(small.text(NUM_DOCUMENTS))
    return small.tree(tmp_path, train__output_dir=str(tmp_path / "whole"), train__steps=14)


@pytest.mark.parametrize(
    "layout", [pytest.param("one", marks=pytest.mark.long), "fsdp", pytest.param("ddp", marks=pytest.mark.long)]
)
def test_a_run_stopped_twice_is_the_uninterrupted_one(tmp_path: Path, whole: dict[str, Any], layout: str) -> None:
    world, changes = LAYOUTS[layout]
    whole = small.changed(whole, **changes)
    parts = small.changed(whole, train__output_dir=str(tmp_path / "parts"))
    stops = [("SIGTERM", world - 1), ("SIGUSR1", 0)] if layout != "ddp" else [("file", 0), ("SIGINT", 0)]
    for after, (how, rank) in zip((2, 9), stops, strict=True):
        results = ranks.run(world, _train_and_stop, whole if after == 2 else None, parts, after, how, rank)
        assert [(result.status, result.step) for result in results] == [("stopped", after + 1)] * world
        assert results[0].checkpoint is not None
        assert small.saved_step(tmp_path / "parts") == after + 1
    result = ranks.run(world, small.train, parts)[0]
    assert (result.status, result.step) == ("finished", 14)
    small.assert_same_run(tmp_path / "whole", tmp_path / "parts")
    rows = small.steps(tmp_path / "parts")
    assert [(row["first_sample"], row["num_samples"]) for row in rows] == [(4 * step, 4) for step in range(14)]
    assert 3 * 4 < len(small.text(NUM_DOCUMENTS)) / small.SEQ_LEN < 10 * 4, (
        "one stop before the end of the epoch, one after"
    )


def _train_and_stop(whole: dict[str, Any] | None, parts: dict[str, Any], after: int, how: str, rank: int) -> Any:
    """The uninterrupted run, where it is asked for, then a part of the other: what one gang can do, one does."""
    if whole is not None:
        small.train(whole)
    return small.train_and_stop(parts, after, how, rank)


def test_a_run_whose_rank_was_killed_goes_on_from_the_last_checkpoint(tmp_path: Path, whole: dict[str, Any]) -> None:
    whole = small.changed(whole, parallel__shard=2)
    killed = small.changed(whole, train__output_dir=str(tmp_path / "killed"), checkpoint__every=4)
    outcomes = ranks.start(2, _train_and_stop, whole, killed, 10, "SIGKILL", 1, patient=True).outcomes()
    assert outcomes[1] == ("died", -signal.SIGKILL)
    done = small.saved_step(tmp_path / "killed")
    assert done in (4, 8), "that of step 8 may have been in flight"
    assert len(small.steps(tmp_path / "killed")) >= 10
    result = ranks.run(2, _resumed_at, killed)[0]
    assert result == (done + 1, f"step {done}")
    small.assert_same_run(tmp_path / "whole", tmp_path / "killed")


def _resumed_at(recipe: dict[str, Any]) -> tuple[int, str]:
    """The first step that was done, and where the run said it went on."""
    from atoll.train.events import RunStarted, StepDone

    events: list[Any] = []
    small.train(recipe, events=events)
    started = next((event for event in events if isinstance(event, RunStarted)), None)
    first = next((event.step for event in events if isinstance(event, StepDone)), 0)
    return first, "" if started is None else str(started.resumed_from)


MESHES: list[tuple[str, int, dict[str, Any]]] = [
    ("fsdp", 2, {"parallel__shard": 2}),
    ("one", 1, {}),
    ("tensor", 2, {"parallel__tensor": 2}),
    ("pipeline", 2, {"parallel__pipeline": 2, "train__micro_batch": 1}),
    ("ddp", 2, {"parallel__replicate": 2}),
]


@pytest.mark.long
@pytest.mark.parametrize("family", ["llama", "olmo2"])
def test_a_run_goes_on_over_every_mesh_with_the_losses_of_one_rank(
    tmp_path: Path, whole: dict[str, Any], family: str
) -> None:
    whole = small.changed(whole, model__family=family, precision__compute="fp64", train__steps=10)
    small.train(whole)
    moving = small.changed(whole, train__output_dir=str(tmp_path / "moving"))
    for number, (_, world, changes) in enumerate(MESHES):
        last = number == len(MESHES) - 1
        here = small.changed(moving, **changes)
        result = (
            ranks.run(world, small.train, here)
            if last
            else ranks.run(world, small.train_and_stop, here, 2 * number + 1, "SIGUSR1")
        )[0]
        assert result.step == (10 if last else 2 * (number + 1))
    expected, found = small.losses(tmp_path / "whole"), small.losses(tmp_path / "moving")
    assert found == pytest.approx(expected, rel=1e-11)
    assert small.steps(tmp_path / "whole")[-1]["tokens"] == small.steps(tmp_path / "moving")[-1]["tokens"]


@pytest.mark.parametrize(
    "optimizer",
    [
        {"optimizer__kind": "muon"},
        pytest.param({"optimizer__kind": "sgd", "optimizer__lr": 1e-2}, marks=pytest.mark.long),
        pytest.param({"optimizer__moments": "bf16"}, marks=pytest.mark.long),
    ],
    ids=["muon", "sgd", "bf16 moments"],
)
def test_other_optimizers_go_on_too(tmp_path: Path, whole: dict[str, Any], optimizer: dict[str, Any]) -> None:
    whole = small.changed(whole, train__steps=6, **optimizer)
    two = small.changed(whole, parallel__shard=2, train__output_dir=str(tmp_path / "two"))
    parts = small.changed(two, train__output_dir=str(tmp_path / "parts"))
    moved = small.changed(whole, train__output_dir=str(tmp_path / "moved"))
    ranks.run(2, _train_in_parts, two, parts, small.changed(moved, parallel__shard=2))
    small.assert_same_run(tmp_path / "two", tmp_path / "parts")
    small.train(moved)
    assert small.losses(tmp_path / "moved") == pytest.approx(small.losses(tmp_path / "two"), rel=1e-5)


def _train_in_parts(whole: dict[str, Any], parts: dict[str, Any], *stopped: dict[str, Any]) -> None:
    """On the same ranks: the first one at once, the second one in two parts; of the others only the first part."""
    small.train(whole)
    for each in (parts, *stopped):
        small.train_and_stop(each, 2, "SIGTERM")
    small.train(parts)


def test_a_finished_run_says_so_and_still_knows_its_checkpoint(tmp_path: Path) -> None:
    tree = small.tree(tmp_path, train__steps=3)
    first = small.train(tree)
    before = small.steps(tmp_path / "run")
    events: list[Any] = []
    again = small.train(tree, events=events)
    assert (again.status, again.step, again.steps) == ("finished", 3, 3)
    assert again.checkpoint == first.checkpoint is not None
    assert again.loss == first.loss
    notes = [event.text for event in events if type(event).__name__ == "Note"]
    assert any("already finished: 3 of 3 steps; to train longer: --train.steps N" in note for note in notes), notes
    assert small.steps(tmp_path / "run") == before


def test_more_steps_resume_and_fewer_are_refused(tmp_path: Path) -> None:
    tree = small.tree(tmp_path, train__steps=3)
    small.train(tree)
    with pytest.raises(ConfigError, match=r"\[train\] steps: 3 -> 2[\s\S]*--allow-changes"):
        small.train(small.changed(tree, train__steps=2))
    result = small.train(small.changed(tree, train__steps=5))
    assert (result.status, result.step) == ("finished", 5)
    assert [row["step"] for row in small.steps(tmp_path / "run")] == [1, 2, 3, 4, 5]


def test_fewer_steps_than_were_done_are_finished(tmp_path: Path) -> None:
    tree = small.tree(tmp_path, train__steps=5)
    small.train(tree)
    result = small.train(small.changed(tree, train__steps=3), allow_changes=True)
    assert (result.status, result.step) == ("finished", 5)
    assert len(small.steps(tmp_path / "run")) == 5


@pytest.mark.parametrize("length", [8, "1ep"])
def test_another_batch_leaves_a_run_as_long_as_it_was(tmp_path: Path, length: int | str) -> None:
    tree = small.tree(tmp_path, train__steps=length)
    ranks.run(1, small.train_and_stop, tree, 1)
    result = small.train(small.changed(tree, train__global_batch=2), allow_changes=True)
    rows = small.steps(tmp_path / "run")
    assert result.status == "finished"
    assert [row["step"] for row in rows] == list(range(1, result.step + 1))
    assert small.saved_step(tmp_path / "run") == result.step
    if length == 8:
        assert (result.step, rows[-1]["samples"]) == (8, 2 * 4 + 6 * 2)
    else:
        assert rows[-1]["samples"] == len(small.corpus(tree).dataset)


def test_no_resume_starts_over_beside_the_old_run(tmp_path: Path) -> None:
    tree = small.tree(tmp_path, train__steps=2)
    small.train(tree)
    other = small.changed(tree, optimizer__lr=1e-3)
    with pytest.raises(ConfigError, match=r"\[optimizer\] lr: 0.003 -> 0.001"):
        small.train(other)
    result = small.train(other, resume=False)
    assert result.output_dir == str(tmp_path / "run-2")
    assert small.train(tree, resume=False).output_dir == str(tmp_path / "run-3")
    assert small.losses(tmp_path / "run-3") == small.losses(tmp_path / "run")


def test_other_data_are_refused(tmp_path: Path) -> None:
    tree = small.tree(tmp_path, train__steps=2)
    small.train(tree)
    (tmp_path / "text.txt").write_text(small.text(30, seed=5))
    with pytest.raises(ConfigError, match=r"data differ from those of step 2.*30 documents.*--no-resume"):
        small.train(small.changed(tree, train__steps=4), allow_changes=True)
    with pytest.raises(ConfigError, match="data differ"):
        small.train(tree)


def test_only_torn_checkpoints_are_never_a_fresh_start(tmp_path: Path) -> None:
    tree = small.tree(tmp_path, train__steps=2)
    small.train(tree)
    found = find_checkpoint(str(tmp_path / "run"))
    assert found is not None
    largest = max(Path(found.label).glob("*.distcp"), key=lambda path: path.stat().st_size)
    os.truncate(largest, 10)
    with pytest.raises(CheckpointError, match=rf"step.2[\s\S]*{largest.name}"):
        small.train(tree)
    assert len(small.steps(tmp_path / "run")) == 2


@pytest.mark.long
def test_a_run_whose_newest_checkpoint_rotted_resumes_from_the_one_before(tmp_path: Path) -> None:
    recipe = small.tree(tmp_path, checkpoint__every=2, train__steps=4)
    small.train(recipe)
    before = small.losses(tmp_path / "run")
    (shard,) = (tmp_path / "run" / "checkpoints" / "step-00000004").glob("*.distcp")
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    assert _resumed_at(recipe) == (3, "step 2")
    assert small.losses(tmp_path / "run") == before
    assert small.saved_step(tmp_path / "run") == 4


def test_tied_embeddings_survive_everything(tmp_path: Path, whole: dict[str, Any]) -> None:
    tied = small.changed(whole, model__tied=True, parallel__shard=2, train__steps=6)
    parts = small.changed(tied, train__output_dir=str(tmp_path / "parts"))
    ranks.run(2, _train_in_parts, tied, parts)
    small.assert_same_run(tmp_path / "whole", tmp_path / "parts")
    _exported_equals(tmp_path, tmp_path / "parts")


def _exported_equals(tmp_path: Path, run: Path) -> Path:
    """``transformers`` computes what the run's last checkpoint does; the exported folder."""
    from transformers import AutoModelForCausalLM

    from atoll.train.models import registry
    from atoll.train.recipe.schema import Recipe
    from atoll.train.weights import export, load_weights

    folder = tmp_path / "exported"
    export(str(run), folder, dtype="fp32")
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = find_checkpoint(str(run))
    assert found is not None
    section = Recipe.model_validate(found.recipe).model
    ours = registry.build(section, device="cpu").eval()
    load_weights(ours, section, str(run))
    tokens = torch.arange(20).reshape(2, 10) * 7
    with torch.no_grad():
        expected = theirs(tokens).logits
        found_logits = ours(tokens, torch.arange(10).expand(2, 10))
    torch.testing.assert_close(found_logits, expected, rtol=1e-5, atol=1e-5)
    return folder


def test_a_run_begins_with_the_weights_of_an_exported_one(tmp_path: Path) -> None:
    tree = small.tree(tmp_path, train__steps=3)
    small.train(tree)
    exported = _exported_equals(tmp_path, tmp_path / "run")
    begun = small.changed(
        tree, model__init=str(exported), train__output_dir=str(tmp_path / "tuned"), optimizer__lr=1e-9, train__steps=2
    )
    small.train(begun)
    before, after = small.weights(tmp_path / "run"), small.weights(tmp_path / "tuned")
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, rtol=0, atol=1e-7)
    small.train(small.changed(begun, train__steps=4), allow_changes=True)
    assert len(small.steps(tmp_path / "tuned")) == 4
