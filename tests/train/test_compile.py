"""Blocks are compiled whole or not at all, under every layout; what can't be is said."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ranks
import small
from atoll.core.errors import ConfigError
from atoll.train.parallel.compile import check_compile
from atoll.train.parallel.plan import Plan
from atoll.train.recipe.schema import Recipe
from test_parallel import of_all, recipe_of, step_of

BREAKING = """
import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.inner = nn.Linear(dim, dim)

    def forward(self, x):
        torch._dynamo.graph_break()
        return self.inner(x)


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed = nn.Embedding(config.vocabulary, config.dim)
        self.blocks = nn.ModuleList([Layer(config.dim)])
        self.head = nn.Linear(config.dim, config.vocabulary, bias=False)

    def forward(self, tokens, documents):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


build = Model
"""


def compiled_step(recipe: Recipe, isolate: bool) -> Any:
    import test_parallel

    torch.compile = functools.partial(torch.compile, backend="eager")  # type: ignore[assignment]
    test_parallel.Plan = functools.partial(Plan, compiled=True)  # type: ignore[assignment,misc]
    return step_of(recipe, 2, isolate)


def refusal_of(folder: str, tree: dict[str, object]) -> str:
    import sys

    sys.path.insert(0, folder)
    with pytest.raises(ConfigError) as caught:
        small.train(tree)
    return str(caught.value)


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "context": (2, {"context": 2}),
    "context_together": (2, {"context": 2}),
    "tensor": (2, {"tensor": 2}),
    "shard": (2, {"shard": 2}),
    "tensor_olmo2": (2, {"tensor": 2, "family": "olmo2"}),
    "tensor_context": (4, {"tensor": 2, "context": 2}),
    "pipeline": (2, {"pipeline": 2, "micro": 2}),
}


@pytest.mark.parametrize("name", of_all(LAYOUTS, ["tensor", "context_together"]))
def test_a_block_is_one_graph(name: str) -> None:
    world, options = LAYOUTS[name]
    isolate = not name.endswith("together")
    recipe = recipe_of(precision="fp32", **options)
    expected = ranks.run(world, step_of, recipe, 2, isolate)[0]
    losses, _, norm = ranks.run(world, compiled_step, recipe, isolate)[0]
    assert losses == pytest.approx(expected[0], rel=1e-5)
    assert norm == pytest.approx(expected[2], rel=1e-5)


@pytest.mark.long
@pytest.mark.timeout(300)  # a minute of compiling, twice where the machine is busy
def test_what_is_compiled_is_kept_for_the_next_run(tmp_path: Path) -> None:
    """Though each run's ranks have a folder of their own for temporary files."""
    recipe = small.write_toml(small.tree(tmp_path, train__steps=3, compile={"enabled": True}), tmp_path / "tree.toml")
    home = tmp_path / "home"
    env = small.environment(ATOLL_HOME=str(home))
    env.pop("TORCHINDUCTOR_CACHE_DIR", None)  # torch has set it here
    kept = []
    for turn in range(2):
        command = [sys.executable, "-m", "atoll", "train", str(recipe), "--train.output_dir", str(tmp_path / str(turn))]
        subprocess.run(command, check=True, capture_output=True, env=env)
        kept.append({path for path in (home / "compile" / "fxgraph").rglob("*") if path.is_file()})
    assert kept[0]
    assert kept[1] == kept[0], "compiled again"


def test_a_model_that_breaks_the_graph_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a_breaking_model.py").write_text(BREAKING)
    tree = small.tree(tmp_path, model={"python": "a_breaking_model:build", "dim": 16}, compile={"enabled": True})
    (refused,) = ranks.run(1, refusal_of, str(tmp_path), tree)
    assert refused.startswith("[compile] enabled = true: torch.compile can't make one graph of each block: ")
    assert refused.endswith("set [compile] enabled = false")


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_cuda_graphs_are_refused_where_they_do_not_hold(mode: str) -> None:
    class World:
        size, device = 2, torch.device("cuda")

    recipe = Recipe.model_validate({"compile": {"mode": mode}})
    with pytest.raises(ConfigError, match="this run has 2 ranks"):
        check_compile(recipe, World)  # type: ignore[arg-type]
    World.size = 1
    check_compile(recipe, World)  # type: ignore[arg-type]
    World.device = torch.device("cpu")
    with pytest.raises(ConfigError, match="this run has a CPU"):
        check_compile(recipe, World)  # type: ignore[arg-type]
