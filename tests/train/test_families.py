"""A new family is one file and a recipe: those of ``new_family`` go all the ways that the families of Atoll go."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ranks
import small
from atoll.core.errors import ConfigError
from atoll.train.models import families
from atoll.train.models.registry import build, flops_per_token
from atoll.train.parallel.estimate import estimate
from atoll.train.parallel.layout import Layout
from atoll.train.recipe.load import load_recipe
from atoll.train.recipe.schema import ModelSection, Recipe
from atoll.train.weights import export, load_weights
from test_estimate import measured
from test_parallel import step_of

FOLDER = str(Path(__file__).parent / "new_family")


@pytest.fixture(autouse=True)
def new_family() -> Iterator[None]:
    """What putting the file beside the others does."""
    families.__path__.append(FOLDER)
    yield
    families.__path__.remove(FOLDER)


def recipe(**changes: Any) -> Recipe:
    text = small.changed(load_recipe(f"{FOLDER}/parallel_debug.toml", env={}).recipe.model_dump(), **changes)
    return Recipe.model_validate(text)


def test_an_unknown_family_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"no model family: did you mean 'parallel_blocks'\?; known are gpt2, llama"):
        load_recipe({"model": {"family": "parallel_block"}}, env={})


def test_it_trains_and_comes_back_from_an_export(tmp_path: Path) -> None:
    wanted = small.tree(tmp_path, model={"family": "parallel_blocks", **recipe().model.model_dump(exclude_none=True)})
    result = small.train(wanted)
    assert result.step == 8
    export(result.output_dir, tmp_path / "hf", dtype="fp32")
    back, saved = (build(ModelSection(**wanted["model"]), device="cpu") for _ in range(2))
    load_weights(back, back.config, str(tmp_path / "hf"))
    load_weights(saved, saved.config, result.output_dir)
    for (name, value), other in zip(back.named_parameters(), saved.parameters(), strict=True):
        assert torch.equal(value, other), name
    assert value.std() > 0


def _step(wanted: Recipe) -> Any:
    if FOLDER not in families.__path__:
        families.__path__.append(FOLDER)
    return step_of(wanted)


@pytest.mark.parametrize("axis", ["tensor", pytest.param("pipeline", marks=pytest.mark.long)])
def test_a_layout_has_the_gradients_of_one_process(axis: str) -> None:
    wanted = recipe(precision__compute="fp64", model__init_scheme="gpt2", train__micro_batch=4, train__seq_len=16)
    ((_, expected, norm),) = ranks.run(1, _step, recipe_with(wanted, micro_batch=8))
    seen = set()
    for _, gradients, own_norm in ranks.run(2, _step, recipe_with(wanted, **{axis: 2})):
        assert own_norm == pytest.approx(norm, rel=1e-11)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-11, atol=1e-11)
        seen |= gradients.keys()
    assert seen == expected.keys()


def recipe_with(wanted: Recipe, *, micro_batch: int | None = None, **axes: int) -> Recipe:
    train = wanted.train.model_copy(update={} if micro_batch is None else {"micro_batch": micro_batch})
    return wanted.model_copy(update={"train": train, "parallel": wanted.parallel.model_copy(update=axes)})


@pytest.mark.parametrize("mode", ["none", "full"])
def test_its_memory_and_arithmetic_are_counted(mode: Any) -> None:
    wanted = recipe(precision__compute="fp32", data__isolate_documents=False, train__seq_len=128, train__micro_batch=2)
    parts, peak = measured(wanted, mode)
    found = estimate(wanted, Layout(), recompute=mode, device="cpu")
    for part, size in parts.items():
        assert found.parts[part] == pytest.approx(size, rel=0.05), part
    assert found.total - found.parts["reserve"] == pytest.approx(peak, rel=0.15)
    per_layer = 32 * (32 + 16 + 16 + 32) + 2 * 32 * 48
    assert flops_per_token(wanted.model, 128) == 6 * (2 * per_layer + 260 * 32) + 6 * 2 * 32 * 128
