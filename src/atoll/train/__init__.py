"""The trainer: a language model from a recipe, on one CPU or on many GPUs, the same loop.

It imports nothing of the launcher: ``torchrun -m atoll.train RECIPE`` is enough. ``atoll train`` starts ranks for it.
"""

from __future__ import annotations

import gc
import importlib
import os
from typing import TYPE_CHECKING, Any

from atoll.core.packages import trainer_packages
from atoll.core.paths import atoll_home

if TYPE_CHECKING:
    from atoll.train.events import TrainResult as TrainResult
    from atoll.train.recipe.load import load_recipe as load_recipe
    from atoll.train.recipe.schema import Recipe as Recipe
    from atoll.train.trainer import run as run

_WHERE = {
    "Recipe": "atoll.train.recipe.schema",
    "TrainResult": "atoll.train.events",
    "load_recipe": "atoll.train.recipe.load",
    "run": "atoll.train.trainer",
}

__all__ = ["Recipe", "TrainResult", "load_recipe", "run"]


def prepare_process() -> None:
    """Before a process that trains imports PyTorch: import faster, and keep what torch compiles for the next run.

    Torch's place for that is the folder of temporary files, and that of a rank ends with it.
    """
    gc.disable()  # until the loop: it finds nothing in what is imported, and takes a fifth of the time of that
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(atoll_home() / "compile"))


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'atoll.train' has no attribute {name!r}; it has {', '.join(__all__)}")
    with trainer_packages():
        return getattr(importlib.import_module(_WHERE[name]), name)
