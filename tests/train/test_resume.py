"""Stopped and resumed is the same as never stopped: bit for bit on the same ranks, to rounding on others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ranks
import small

LAYOUTS = {"one": (1, {}), "fsdp": (2, {"parallel__shard": 2}), "ddp": (2, {"parallel__replicate": 2})}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_stopped_twice_is_the_uninterrupted_one(tmp_path: Path, layout: str) -> None:
    world, changes = LAYOUTS[layout]
    whole = small.tree(tmp_path, train__output_dir=str(tmp_path / "whole"), train__steps=30, **changes)
    parts = small.changed(whole, train__output_dir=str(tmp_path / "parts"))
    ranks.run(world, small.train, whole)
    assert ranks.run(world, small.train_and_stop, parts, 5)[0].status == "stopped"
    assert ranks.run(world, small.train_and_stop, parts, 22)[0].status == "stopped"
    result = ranks.run(world, small.train, parts)[0]
    assert (result.status, result.step) == ("finished", 30)
    small.assert_same_run(tmp_path / "whole", tmp_path / "parts")
    rows = small.steps(tmp_path / "parts")
    assert [row["first_sample"] for row in rows] == [4 * step for step in range(30)]
    epoch = len_of_epoch(tmp_path)
    assert 5 * 4 < epoch < 22 * 4, f"an epoch of {epoch} sequences: the stops are not on both sides of its end"


def len_of_epoch(tmp_path: Path) -> int:
    events: list[Any] = []
    tree = small.tree(tmp_path, train__output_dir=str(tmp_path / "epoch"), train__steps="1ep", checkpoint__at_end=False)
    small.train(tree, events=events)
    return int(small.steps(tmp_path / "epoch")[-1]["samples"])
