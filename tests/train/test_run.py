"""One run from recipe to result: what it trains on, what it validates on, what it says where it can't."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

import ranks
import small
from atoll.core.errors import AtollError, CheckpointError, ConfigError
from atoll.train.checkpoint.claim import FolderClaim
from atoll.train.checkpoint.manifest import Manifest
from atoll.train.checkpoint.store import open_store
from atoll.train.data.loader import batched
from atoll.train.data.packing import PackedDataset
from atoll.train.events import CheckpointSaved, Note, RunEnded, StepDone, Validated
from atoll.train.models import registry
from atoll.train.models.init import initialize
from atoll.train.objectives.pretrain import Pretrain
from atoll.train.recipe.load import load_recipe
from atoll.train.saved import find_checkpoint
from atoll.train.trainer import run
from atoll.train.weights import export

pytestmark = pytest.mark.usefixtures("torch_in_process")


def _train(world: int, recipe: dict[str, Any]) -> Any:
    """The result of a run on so many ranks; one is this process."""
    return small.train(recipe) if world == 1 else ranks.run(world, small.train, recipe)[0]


def _loss_by_hand(recipe: dict[str, Any], dataset: PackedDataset, weights: dict[str, torch.Tensor] | None) -> float:
    """Nats per token over every sequence once, one sequence at a time, without anything of the trainer's loop."""
    section = load_recipe(recipe).recipe.model.model_copy(update={"vocab_size": 260})
    model = registry.build(section, device="cpu", dtype=torch.float64)
    if weights is None:
        initialize(model, 0)
    else:
        model.load_state_dict(weights)
    total, tokens = 0.0, 0
    with torch.no_grad():
        for index in range(len(dataset)):
            batch = batched([dataset.window(index)], Pretrain())
            logits = model(batch.tokens, batch.positions, batch.documents)
            total += float(F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum"))
            tokens += int((batch.labels != -100).sum())
    return total / tokens


# -------------------------------------------------------------------------------------------------- validation
VALIDATION = {
    "one": (1, {}),
    "fsdp": (2, {"parallel__shard": 2}),
    "ddp": (2, {"parallel__replicate": 2, "train__micro_batch": 1}),
    "pipeline": (2, {"parallel__pipeline": 2, "train__micro_batch": 1}),
    "context": (2, {"parallel__context": 2}),
    "tensor": (2, {"parallel__tensor": 2}),
}


@pytest.mark.parametrize("layout", VALIDATION)
def test_validation_counts_every_token_once(tmp_path: Path, layout: str) -> None:
    world, changes = VALIDATION[layout]
    held = tmp_path / "held.txt"
    held.write_text(small.text(3, seed=9)[: 3 * small.SEQ_LEN - 5])
    tree = small.tree(tmp_path, data__validation=str(held), train__steps=2, precision__compute="fp64", **changes)
    result = _train(world, tree)
    dataset = small.corpus(tree).validation
    assert dataset is not None
    assert len(dataset) == 3, "uneven over two ranks"
    expected = _loss_by_hand(tree, dataset, small.weights(tmp_path / "run"))
    assert result.validation_loss == pytest.approx(expected, rel=1e-11)


def test_validation_of_a_few_batches_reads_no_more(tmp_path: Path) -> None:
    tree = small.tree(
        tmp_path, data__validation=0.5, train__validate_every=1, train__validate_batches=1, train__steps=2
    )
    dataset = small.corpus(tree).validation
    assert dataset is not None
    assert len(dataset) > 8
    events: list[Any] = []
    small.train(tree, events=events)
    told = [event for event in events if isinstance(event, Validated)]
    assert [event.step for event in told] == [1, 2]
    places = [index * len(dataset) // 4 for index in range(4)]
    assert told[0].tokens == sum(int(dataset.window(place).num_trained) for place in places)


def test_a_checkpoint_is_rated_by_the_validation_of_its_own_weights(tmp_path: Path) -> None:
    tree = small.tree(
        tmp_path, data__validation=0.5, train__validate_every=2, train__steps=4, checkpoint__every=1, checkpoint__keep=9
    )
    events: list[Any] = []
    small.train(tree, events=events)
    told = {event.step: event.loss for event in events if isinstance(event, Validated)}
    assert told.keys() == {2, 4}
    for step in range(1, 5):
        found = find_checkpoint(str(tmp_path / "run" / "checkpoints" / f"step-{step:08}"))
        assert found is not None
        assert found.manifest.metric == told.get(step)


# ------------------------------------------------------------------------------------- the last batch of an epoch
@pytest.fixture
def seven(tmp_path: Path) -> dict[str, Any]:
    """A recipe whose data are seven sequences; weights hardly move, so that losses add up."""
    path = tmp_path / "seven.txt"
    path.write_text(small.text(40)[: 7 * small.SEQ_LEN - 20])
    return small.tree(
        tmp_path,
        data__path=str(path),
        train__steps="1ep",
        train__micro_batch=1,
        precision__compute="fp64",
        optimizer__lr=1e-30,
    )


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("epochs", [1, 2])
def test_the_last_partial_batch_is_trained(tmp_path: Path, seven: dict[str, Any], world: int, epochs: int) -> None:
    tree = small.changed(seven, train__steps=f"{epochs}ep")
    result = _train(world, tree)
    dataset = small.corpus(tree).dataset
    assert len(dataset) == 7
    rows = small.steps(tmp_path / "run")
    wanted = {1: [(0, 4), (4, 3)], 2: [(0, 4), (4, 4), (8, 4), (12, 2)]}[epochs]
    assert [(row["first_sample"], row["num_samples"]) for row in rows] == wanted
    assert result.tokens == epochs * sum(dataset.samples([number])[0].num_trained for number in range(7))
    counted = [0, *(row["tokens"] for row in rows)]
    total = sum(row["loss"] * (counted[i + 1] - counted[i]) for i, row in enumerate(rows))
    assert total / result.tokens == pytest.approx(_loss_by_hand(tree, dataset, None), rel=1e-11)


def test_a_length_in_tokens_is_reached(tmp_path: Path) -> None:
    tree = small.tree(tmp_path, train__steps="500tok")
    result = small.train(tree)
    per_step = result.tokens / result.steps
    assert result.tokens >= 0.8 * 500
    assert result.steps == -(-500 // per_step)


@pytest.mark.long
def test_gradients_do_not_depend_on_how_a_batch_is_dealt(tmp_path: Path, seven: dict[str, Any]) -> None:
    tree = small.changed(seven, optimizer__lr=3e-3, train__steps="3ep")
    ways = {"whole": (1, 4), "accumulated": (1, 1), "two": (2, 2), "two accumulated": (2, 1)}
    for name, (world, micro) in ways.items():
        _train(world, small.changed(tree, train__micro_batch=micro, train__output_dir=str(tmp_path / name)))
    for name in ways:
        assert small.losses(tmp_path / name) == pytest.approx(small.losses(tmp_path / "whole"), rel=1e-11)


# ----------------------------------------------------------------------------------------------- disks and folders
@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 3 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(folder)], capture_output=True)
    if done.returncode != 0:
        pytest.skip(f"mounting a small disk is not allowed here: {done.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.long
def test_a_disk_that_fills_in_a_save(tmp_path: Path, small_disk: Path) -> None:
    tree = small.tree(
        tmp_path, train__output_dir=str(small_disk / "run"), train__steps=6, checkpoint__every=2, parallel__shard=2
    )
    filler = small_disk / "filler"
    first, second = ranks.run(2, _fill_after, tree, str(filler))
    assert first == second
    assert first.startswith("saving step 4 to ")
    assert "No space left on device" in first
    assert small.saved_step(small_disk / "run") == 2
    filler.unlink()
    assert ranks.run(2, small.train, tree)[0].status == "finished"
    rows = small.steps(small_disk / "run")
    assert [row["step"] for row in rows] == list(range(1, 7))


def _fill_after(recipe: dict[str, Any], filler: str) -> str:
    """Run it; the disk is full once the first checkpoint is complete. What the run says then."""

    def report(event: Any) -> None:
        if isinstance(event, CheckpointSaved) and event.step == 2:
            free = os.statvfs(Path(filler).parent).f_bavail * os.statvfs(Path(filler).parent).f_frsize
            Path(filler).write_bytes(bytes(max(0, free - 65536)))  # the journal still finds room

    with pytest.raises(CheckpointError) as caught:
        run(dict(recipe), report=report)
    return str(caught.value)


@pytest.mark.parametrize("free_pages", [0, *(pytest.param(pages, marks=pytest.mark.long) for pages in (3, 20))])
def test_a_full_disk_is_exit_code_100(tmp_path: Path, small_disk: Path, free_pages: int) -> None:
    (small_disk / "filler").write_bytes(bytes(3 * 2**20 - 4096 * free_pages))
    tree = small.tree(tmp_path, train__output_dir=str(small_disk / "run"), train__steps=2)
    ((code, said),) = small.fork(tmp_path, small.write_toml(tree, tmp_path / "tree.toml")).finish()
    assert code == 100
    assert "No space left on device" in said
    assert "Traceback" not in said


def test_an_output_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(ConfigError, match=r"output_dir .*run.*: File exists; choose another"):
        small.train(small.tree(tmp_path))


def test_an_output_folder_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file")
    with pytest.raises(ConfigError, match="Not a directory"):
        small.train(small.tree(tmp_path, train__output_dir=str(tmp_path / "file" / "run")))


def test_an_output_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """Root may write everywhere but below /proc."""
    with pytest.raises(ConfigError, match=r"output_dir '/proc/run'.*choose another"):
        small.train(small.tree(tmp_path, train__output_dir="/proc/run"))


def test_a_damaged_recipe_in_the_folder(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for content in (b"", b"{", b"[1]", b'{"version": 7}', b"\xff"):
        (tmp_path / "run" / "recipe.json").write_bytes(content)
        with pytest.raises(ConfigError, match=r"recipe\.json' is damaged .*--no-resume"):
            small.train(small.tree(tmp_path))
    (tmp_path / "run" / "recipe.json").unlink()
    (tmp_path / "run" / "recipe.json").mkdir()
    with pytest.raises(ConfigError, match=r"output_dir .*run': Is a directory"):
        small.train(small.tree(tmp_path))


def test_a_recipe_that_never_began_does_not_bind_the_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"mistyped\.txt"):
        small.train(small.tree(tmp_path, data__path=str(tmp_path / "mistyped.txt")))
    assert small.train(small.tree(tmp_path)).status == "finished"


def test_runs_in_a_relative_folder_are_told_as_people_type_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = small.train(small.tree(tmp_path, train__output_dir="outputs/here", train__steps=2))
    assert result.output_dir == str(tmp_path / "outputs" / "here")
    assert result.checkpoint == "outputs/here/checkpoints/step-00000002"


# ------------------------------------------------------------------------------------------------- clear refusals
REFUSED: dict[str, tuple[int, dict[str, Any], str]] = {
    "no data file": (1, {"data__path": "/nowhere/at/all.txt"}, r"/nowhere/at/all\.txt"),
    "an empty file": (1, {"data__path": "{folder}/empty.txt"}, r"empty\.txt has 0 tokens to train on"),
    "an empty folder": (1, {"data__path": "{folder}/empty"}, r"empty"),
    "less than a sequence": (1, {"data__path": "{folder}/short.txt"}, r"less than one sequence.*seq_len = 32"),
    "an unknown tokenizer": (1, {"data__tokenizer": "byte"}, r"\[data\] tokenizer = 'byte'.*'bytes'"),
    "a vocabulary too small": (1, {"model__vocab_size": 100}, r"260 tokens.*vocab_size = 100"),
    "a mesh that does not divide": (2, {"parallel__tensor": 3}, r"3[\s\S]*2|2[\s\S]*3"),
    "heads that do not divide": (2, {"parallel__tensor": 2, "model__kv_heads": 1}, r"kv_heads = 1.*2|2.*kv_heads"),
    "a batch that does not divide": (2, {"parallel__shard": 2, "train__global_batch": 3}, r"global_batch = 3"),
    "no weights to start from": (1, {"model__init": "{folder}/no-model"}, r"no-model"),
    "more positions than the model has": (
        1,
        {"model__family": "gpt2", "model__kv_heads": None, "model__max_seq_len": 16},
        r"seq_len = 32 .*max_seq_len = 16",
    ),
    "no length": (1, {"train__steps": None}, r"\[train\] steps|--train\.steps"),
    "a user's model that is not there": (1, {"model__python": "nowhere_at_all:build"}, r"nowhere_at_all"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_on_every_rank(tmp_path: Path, name: str) -> None:
    world, changes, pattern = REFUSED[name]
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "empty").mkdir()
    given = {
        key: value.replace("{folder}", str(tmp_path)) if isinstance(value, str) else value
        for key, value in changes.items()
    }
    tree = small.tree(tmp_path, **given)
    for kind, message in [_refusal(tree)] if world == 1 else ranks.run(world, _refusal, tree):
        assert kind == "ConfigError", message
        assert re.search(pattern, message), message


def _refusal(recipe: dict[str, Any]) -> tuple[str, str]:
    try:
        small.train(recipe)
    except AtollError as error:
        return type(error).__name__, str(error)
    return "", "nothing was refused"


def test_a_typo_is_told_once_and_without_a_traceback(tmp_path: Path) -> None:
    path = small.write_toml(small.tree(tmp_path), tmp_path / "tree.toml")
    ((code, said),) = small.fork(tmp_path, path, "--train.step", "3").finish()
    assert code == 2
    assert said.startswith("atoll: ")
    assert "steps" in said
    assert "Traceback" not in said


def test_a_tracker_that_cannot_start_is_an_error_of_every_rank(tmp_path: Path) -> None:
    """Rank 0 alone has trackers, and the others don't wait for it."""
    tree = small.tree(tmp_path, metrics__trackers=["tensorboard"], parallel__shard=2)
    told = ranks.run(2, _refusal_without_tensorboard, tree, timeout=55)
    assert told[0] == told[1]
    assert told[0][0] == "ConfigError"
    assert "tensorboard" in told[0][1]


def _refusal_without_tensorboard(recipe: dict[str, Any]) -> tuple[str, str]:
    for name in ("tensorboard", "torch.utils.tensorboard"):
        sys.modules[name] = None  # type: ignore[assignment]  # the way to say that it is not installed
    return _refusal(recipe)


# -------------------------------------------------------------------------------------------------- what is told
def test_the_end_is_told_also_where_a_users_model_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "raising_model.py").write_text(
        "from torch import nn\n"
        "class Model(nn.Module):\n"
        "    def __init__(self, section):\n"
        "        super().__init__()\n"
        "        self.head = nn.Linear(1, section.vocabulary)\n"
        "    def forward(self, tokens, positions, documents=None):\n"
        "        raise LookupError('my own mistake')\n"
        "def build(section):\n"
        "    return Model(section)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    events: list[Any] = []
    with pytest.raises(LookupError, match="my own mistake"):
        small.train(small.tree(tmp_path, model__python="raising_model:build"), events=events)
    ended = [event for event in events if isinstance(event, RunEnded)]
    assert [(event.status, event.error) for event in ended] == [("failed", "LookupError: my own mistake")]


def test_json_output_is_one_object(tmp_path: Path) -> None:
    path = small.write_toml(small.tree(tmp_path, train__steps=2, model__vocab_size=260), tmp_path / "tree.toml")
    atoll = str(Path(sys.executable).with_name("atoll"))
    done = subprocess.run(
        [atoll, "train", str(path), "-o", "json"], capture_output=True, text=True, env=small.environment(), timeout=100
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["status"], result["step"], result["steps"]) == ("finished", 2, 2)
    assert Path(result["checkpoint"]).name == "step-00000002"
    assert result["loss"] == small.losses(tmp_path / "run")[-1]


@pytest.mark.long
def test_a_checkpoint_that_fails_at_the_end_fails_the_run(tmp_path: Path) -> None:
    place = tmp_path / "elsewhere"
    tree = small.tree(tmp_path, train__steps=2, checkpoint__path=str(place))
    events: list[Any] = []

    def report(event: Any) -> None:
        events.append(event)
        if isinstance(event, StepDone) and event.step == 1:
            place.rename(tmp_path / "gone")
            place.write_text("a file where the folder was")

    with pytest.raises(CheckpointError):
        run(tree, report=report)
    assert [event.status for event in events if isinstance(event, RunEnded)] == ["failed"]
    assert not [event for event in events if isinstance(event, Note) and "Traceback" in event.text]


@pytest.mark.long
def test_a_place_for_checkpoints_that_cannot_be_written_is_refused_before_the_first_step(tmp_path: Path) -> None:
    tree = small.tree(tmp_path, train__steps=2, checkpoint__path=str(tmp_path / "text.txt" / "checkpoints"))
    events: list[Any] = []
    with pytest.raises(ConfigError, match=r"text\.txt"):
        small.train(tree, events=events)
    assert not [event for event in events if isinstance(event, StepDone | RunEnded)]
    assert not Path(tree["train"]["output_dir"]).exists(), "a run that never began leaves no folder"


def test_checkpoints_of_another_run_are_not_gone_on_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = str(tmp_path / "shared")
    first = small.tree(tmp_path, train__output_dir=str(tmp_path / "first"), train__steps=3, checkpoint__path=place)
    small.train(first)
    begun_over = small.changed(first, train__output_dir=str(tmp_path / "first"))
    with pytest.raises(ConfigError, match=r"holds step 3 of another run: choose another with --checkpoint\.path"):
        small.train(begun_over, resume=False)
    other = small.changed(first, train__output_dir=str(tmp_path / "second"), optimizer={"lr": 1e-2})
    with pytest.raises(ConfigError, match=r"different settings:\s+\[optimizer\] lr"):
        small.train(other)
    own = small.tree(tmp_path, train__output_dir=str(tmp_path / "third"), train__steps=3)
    small.train(own)
    with pytest.raises(ConfigError, match="holds step 3 of another run"):
        small.train(small.changed(own, checkpoint__path=place), allow_changes=True)
    assert small.saved_step(place) == 3

    # A relative place counts from where one is: elsewhere it is not there, or of another run.
    for number, name in enumerate(("a", "b", "c")):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        if name < "c":
            here = small.changed(first, train__output_dir="out", checkpoint__path="kept", train__seed=number)
            small.train(here)
    for name in ("b", "c"):
        monkeypatch.chdir(tmp_path / name)
        with pytest.raises(ConfigError, match=r"\.\./a/out.*'kept'.*started"):
            find_checkpoint("../a/out")

    # The folder is lost, the checkpoints are not: the same recipe goes on from them, and says so.
    events: list[Any] = []
    moved = small.changed(first, train__output_dir=str(tmp_path / "moved"))
    assert small.train(moved, events=events).step == 3
    assert any("resuming from step 3" in event.text for event in events if isinstance(event, Note))


def test_one_place_for_checkpoints_has_one_writer(tmp_path: Path) -> None:
    place = tmp_path / "shared"
    place.mkdir()
    tree = small.tree(tmp_path, train__steps=1, schedule__warmup=0, checkpoint__path=str(place))
    held = FolderClaim(place, "the other run", "--checkpoint.path PLACE")
    try:
        refusal = f"in use by pid {os.getpid()} .*the other run.*--checkpoint.path PLACE"
        with pytest.raises(ConfigError, match=refusal):
            small.train(tree)
        with pytest.raises(ConfigError, match=refusal):
            small.train(small.changed(tree, checkpoint__path=f"file://{place}"))
    finally:
        held.close()
    assert small.train(tree).status == "finished"
    assert not (place / ".writer").exists()


def test_checkpoints_do_not_go_where_another_run_has_its_own(tmp_path: Path) -> None:
    """The folder of checkpoints of a run that has none of its own named is held as well."""
    tree = small.tree(tmp_path, train__steps=2, train__output_dir=str(tmp_path / "first"))
    other = small.changed(
        tree, train__output_dir=str(tmp_path / "second"), checkpoint__path=str(tmp_path / "first" / "checkpoints")
    )
    refused: list[str] = []

    def report(event: Any) -> None:
        if isinstance(event, StepDone) and event.step == 1:
            with pytest.raises(ConfigError, match="in use by pid") as caught:
                _claim(other)
            refused.append(str(caught.value))

    run(tree, report=report)
    assert "output_dir" in refused[0]
    assert not (tmp_path / "first" / "checkpoints" / ".writer").exists()


def _claim(tree: dict[str, Any]) -> None:
    """What a run of this recipe does before it looks at the checkpoints that are there."""
    open_store(tree["checkpoint"]["path"]).claim("other", "--checkpoint.path PLACE", print)


@pytest.mark.parametrize("every", ["0.5ep", None], ids=["every half", "alone"])
@pytest.mark.long
def test_what_stays_for_good_is_saved_and_stays_also_when_the_run_is_lengthened(
    seven: dict[str, Any], tmp_path: Path, every: str | None
) -> None:
    """3.5 steps an epoch: half an epoch ends inside steps 2, 4, 6, 7, 9 and 11, a whole one in 4, 7 and 11."""
    checkpoint = {"every": every, "keep_every": "1ep", "keep": 1}
    tree = small.changed(seven, train__global_batch=2, train__steps="2ep", checkpoint=checkpoint, schedule__warmup=0)
    events: list[Any] = []
    small.train(tree, events=events)
    saved = [event.step for event in events if isinstance(event, CheckpointSaved)]
    assert saved == ([2, 4, 6, 7] if every else [4, 7])
    assert _steps_kept(tmp_path) == [4, 7]
    longer = small.changed(tree, train__steps="3ep", checkpoint__keep_every="5ep")
    small.train(longer, allow_changes=True)
    assert _steps_kept(tmp_path) == [4, 7, 11]


def test_what_a_version_before_kept_for_good_stays(tmp_path: Path) -> None:
    """Its checkpoints don't say which those are; their recipe says that there are some."""
    checkpoint = {"every": 1, "keep_every": 2, "keep": 3}
    tree = small.tree(tmp_path, train__steps=4, checkpoint=checkpoint)
    small.train(tree)
    assert _steps_kept(tmp_path) == [2, 3, 4]
    for path in (tmp_path / "run" / "checkpoints").glob("step-*/manifest.json"):
        found = Manifest.decode(path.read_bytes())
        meta = {key: value for key, value in found.meta.items() if key != "keep"}
        path.write_bytes(dataclasses.replace(found, meta=meta).encode())
    small.train(small.changed(tree, train__steps=6, checkpoint={**checkpoint, "keep": 1}), allow_changes=True)
    assert {2, 4, 6} <= {*_steps_kept(tmp_path)}


def _steps_kept(folder: Path) -> list[int]:
    return sorted(open_store(str(folder / "run" / "checkpoints")).listing())


def test_the_best_is_known_where_only_saves_are_asked_for(tmp_path: Path) -> None:
    checkpoint = {"every": 1, "keep": 1, "keep_best": True}
    tree = small.tree(tmp_path, data__validation=0.5, train__steps=3, checkpoint=checkpoint)
    small.train(tree)
    for step in _steps_kept(tmp_path):
        found = find_checkpoint(str(tmp_path / "run" / "checkpoints" / f"step-{step:08}"))
        assert found is not None
        assert found.manifest.metric is not None
    with pytest.raises(ConfigError, match=r"keep_best.*\[data\] validation"):
        small.train(small.changed(tree, data__validation=None, train__output_dir=str(tmp_path / "other")))


def test_a_process_may_train_more_than_once(tmp_path: Path) -> None:
    import atoll.train

    for number in range(2):
        tree = small.tree(tmp_path, train__output_dir=str(tmp_path / str(number)), train__steps=1, schedule__warmup=0)
        assert atoll.train.run(tree, report=lambda event: None).step == 1


def with_weights_that_rank_1_lacks(recipe: dict[str, Any], folder: str) -> str:
    weights = folder if dist.get_rank() == 0 else f"{folder}-not-here"
    with pytest.raises(ConfigError) as caught:
        small.train(small.changed(recipe, model__init=weights))
    return f"{caught.value} {getattr(caught.value, '__notes__', '')}"


@pytest.mark.long
def test_weights_that_one_rank_lacks_stop_all_of_them(tmp_path: Path) -> None:
    first = small.tree(tmp_path, train__output_dir=str(tmp_path / "first"), train__steps=1, schedule__warmup=0)
    small.train(first)
    export(str(tmp_path / "first"), tmp_path / "weights", max_shard_bytes=1e9, force=False)
    recipe = small.tree(tmp_path, parallel={"shard": 2})
    messages = ranks.run(2, with_weights_that_rank_1_lacks, recipe, str(tmp_path / "weights"), timeout=60)
    assert all("weights-not-here" in message for message in messages)
    assert "found on rank 1" in messages[0]


def test_the_largest_seed_trains(tmp_path: Path) -> None:
    result = small.train(small.tree(tmp_path, train__seed=2**63 - 1, train__steps=2, optimizer__moments="bf16"))
    assert result.status == "finished"


def test_a_run_in_one_process_leaves_the_hook_of_tracebacks(tmp_path: Path) -> None:
    before = sys.excepthook
    small.train(small.tree(tmp_path, train__steps=3))
    assert sys.excepthook is before


def test_a_folder_that_was_removed_and_made_anew_is_the_new_runs(tmp_path: Path) -> None:
    place = tmp_path / "run"
    place.mkdir()
    first = FolderClaim(place, "run one", "--train.output_dir DIR")
    shutil.rmtree(place)
    first.check()  # nobody else is there
    place.mkdir()
    second = FolderClaim(place, "run two", "--train.output_dir DIR")
    with pytest.raises(OSError, match="was removed while this run wrote there, and is another run's now"):
        first.check()
    first.close()
    with pytest.raises(ConfigError, match="run two"):
        FolderClaim(place, "run three", "--train.output_dir DIR")
    second.check()
    second.close()
