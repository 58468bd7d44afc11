"""A user's own model: what it keeps beside trained parameters is saved, and validation does not disturb it."""

from __future__ import annotations

from pathlib import Path

import pytest

import ranks
import small

MODEL = '''
import torch
from torch import nn


class Model(nn.Module):
    """An embedding, a running mean that the forward pass reads and moves, a frozen matrix, dropout."""

    def __init__(self, config):
        super().__init__()
        self.embed = nn.Embedding(config.vocabulary, config.dim)
        self.frozen = nn.Linear(config.dim, config.dim, bias=False)
        self.frozen.weight.requires_grad_(False)
        self.head = nn.Linear(config.dim, config.vocabulary, bias=False)
        self.register_buffer("mean", torch.zeros(config.dim))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens, documents):
        x = self.embed(tokens)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1)).to(self.mean.dtype)
            self.calls += 1
            x = nn.functional.dropout(x, 0.3)
        return self.head(x + self.frozen(x) + 0.1 * self.calls * self.mean.to(x.dtype))


def build(config):
    return Model(config)
'''


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    (tmp_path / "a_users_model.py").write_text(MODEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    return small.tree(tmp_path, model={"python": "a_users_model:build", "dim": 16}, precision={"compute": "fp64"})


def train_there(folder: str, tree: dict[str, object], **options: object) -> object:
    import sys

    sys.path.insert(0, folder)
    return small.train(tree, **options)


def stop_there(folder: str, tree: dict[str, object], after: int) -> object:
    import sys

    sys.path.insert(0, folder)
    return small.train_and_stop(tree, after)


@pytest.mark.parametrize("parallel", [pytest.param({"replicate": -1}, marks=pytest.mark.long), {"shard": -1}])
def test_buffers_and_dropout_resume_exactly(
    tmp_path: Path, recipe: dict[str, object], parallel: dict[str, int]
) -> None:
    recipe = small.changed(recipe, parallel=parallel)
    whole = small.changed(recipe, train__output_dir=str(tmp_path / "whole"))
    ranks.run(2, train_there, str(tmp_path), whole)
    ranks.run(2, stop_there, str(tmp_path), recipe, 3)
    assert small.saved_step(tmp_path / "run") < 8
    ranks.run(2, train_there, str(tmp_path), recipe)
    assert small.losses(tmp_path / "run") == small.losses(tmp_path / "whole")
    saved = small.weights(tmp_path / "run")
    assert {"inner.mean", "inner.calls", "inner.frozen.weight"} <= saved.keys()
    assert saved["inner.calls"] > 0


@pytest.mark.long
def test_frozen_parameters_go_on_under_another_layout(tmp_path: Path, recipe: dict[str, object]) -> None:
    ranks.run(2, stop_there, str(tmp_path), small.changed(recipe, parallel={"replicate": -1}), 3)
    before = small.weights(tmp_path / "run")["inner.frozen.weight"]
    ranks.run(2, train_there, str(tmp_path), small.changed(recipe, parallel={"shard": -1}))
    assert small.saved_step(tmp_path / "run") == 8
    assert small.weights(tmp_path / "run")["inner.frozen.weight"].equal(before)


def test_validation_neither_drops_out_nor_moves_statistics(tmp_path: Path, recipe: dict[str, object]) -> None:
    still = small.changed(recipe, optimizer={"lr": 1e-12}, data__validation=0.2, train__validate_every=1)
    ranks.run(1, train_there, str(tmp_path), still)
    plain = small.changed(still, train__validate_every=None, train__output_dir=str(tmp_path / "plain"))
    ranks.run(1, train_there, str(tmp_path), plain)
    assert small.losses(tmp_path / "run") == small.losses(tmp_path / "plain"), "training went on as without it"
    assert small.weights(tmp_path / "run")["inner.calls"] == small.weights(tmp_path / "plain")["inner.calls"]


def notes_there(folder: str, tree: dict[str, object]) -> list[str]:
    import sys

    from atoll.train import run
    from atoll.train.events import Note

    sys.path.insert(0, folder)
    notes: list[str] = []
    run(tree, report=lambda event: notes.append(event.text) if isinstance(event, Note) else None)
    return notes


def test_no_weights_of_a_users_model_are_said_to_be_drawn(tmp_path: Path, recipe: dict[str, object]) -> None:
    (notes,) = ranks.run(1, notes_there, str(tmp_path), recipe)
    (line,) = [note for note in notes if note.startswith("weights under seed")]
    assert line.endswith(": 3 as a_users_model:build makes them")
