"""Layouts that a recipe can't have on the ranks there are, told before any rank starts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import ranks
from atoll.core.errors import ConfigError
from atoll.train.corpus import with_vocabulary
from atoll.train.data.tokenizer import load_tokenizer
from atoll.train.dryrun import dryrun
from atoll.train.parallel.layout import Layout, resolve
from atoll.train.parallel.plan import plan
from atoll.train.recipe.schema import Recipe
from atoll.train.world import World


def recipe_of(batch: int = 8, float8: str = "none", **parallel: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "model": {"layers": 8, "dim": 64, "heads": 4, "vocab_size": 256},
            "train": {"steps": 10, "seq_len": 32, "global_batch": batch},
            "parallel": parallel,
            "precision": {"float8": float8},
        }
    )


@pytest.mark.parametrize(
    ("recipe", "ranks", "words"),
    [
        (
            recipe_of(pipeline=2, stages_per_rank=2),
            2,
            "stages_per_rank = 2 with pipeline_schedule = '1f1b': a rank holds one stage",
        ),
        (
            recipe_of(pipeline=2, stages_per_rank=3, pipeline_schedule="gpipe"),
            2,
            "stages_per_rank = 3 with pipeline_schedule = 'gpipe'",
        ),
        (
            recipe_of(pipeline=2, stages_per_rank=1, pipeline_schedule="zbv"),
            2,
            "stages_per_rank = 1 with pipeline_schedule = 'zbv': a rank holds two",
        ),
        (recipe_of(batch=3, pipeline=4), 4, "has 3 micro-batches, fewer than the 4 stages of [parallel] pipeline = 4"),
    ],
)
def test_what_a_run_can_not_do_is_refused_by_a_dry_run_too(recipe, ranks, words):
    with pytest.raises(ConfigError) as caught:
        resolve(recipe, ranks)
    assert words in str(caught.value)
    with pytest.raises(ConfigError) as told:
        dryrun(recipe, nproc=ranks, gpus="H100")
    assert str(told.value) == str(caught.value)


@pytest.mark.parametrize(
    "parallel",
    [
        {"stages_per_rank": 1},
        {"stages_per_rank": 1, "pipeline_schedule": "gpipe"},
        {"stages_per_rank": 2, "pipeline_schedule": "zbv"},
        {"stages_per_rank": 4, "pipeline_schedule": "interleaved"},
    ],
)
def test_stages_that_a_schedule_takes(parallel):
    assert resolve(recipe_of(pipeline=2, **parallel), 2) == Layout(pipeline=2)


def test_a_dry_run_needs_no_data_and_counts_the_nodes():
    big = Recipe.model_validate({"model": {"layers": 40, "dim": 8192, "heads": 64, "vocab_size": 32000}})
    text = "\n".join(dryrun(big, gpus="L4:8").lines)
    assert "on 16 ranks" not in text
    assert "ranks instead of 8 (--nodes " in text
    tiny = "\n".join(dryrun(recipe_of(), nproc=1).lines)
    assert "checkpoint: " in tiny
    assert "0.00 GiB" not in tiny.split("checkpoint: ")[1]
    with pytest.raises(ConfigError, match=r"--gpus 8: .* with a count: H100:8"):
        dryrun(recipe_of(), gpus="8")
    with pytest.raises(ConfigError, match=r"vocab_size is not set, and there is no tokenizer .* --model\.vocab_size N"):
        dryrun(Recipe())


def told(recipe: Recipe, memory: int) -> list[str]:
    assert dist.group.WORLD is not None
    lines: list[str] = []
    plan(recipe, World(0, 0, 1, 1, torch.device("cpu"), dist.group.WORLD, False, ""), memory, note=lines.append)
    return lines


def test_a_run_that_may_end_out_of_memory_says_so_at_its_start():
    big = Recipe.model_validate({"model": {"vocab_size": 256}, "train": {"micro_batch": 8, "recompute": "none"}})
    (line,) = ranks.run(1, told, big, 1 << 30)[0]
    assert line.startswith("the run needs about ")
    assert "per rank, more than the 1.00 GiB available; it would with --train." in line
    assert ranks.run(1, told, big, 1 << 40) == [[]]


def test_a_tokenizer_that_is_larger_than_the_model_says_how_to_take_its_size():
    with pytest.raises(
        ConfigError, match=r"has 260 tokens, but \[model\] vocab_size = 256: add --model.vocab_size none"
    ):
        with_vocabulary(recipe_of(), load_tokenizer("bytes").vocab_size)
