"""Packages that the trainer needs and the launcher does not."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from atoll.core.errors import ConfigError

# Of the extra `train`: what modules of the trainer import at their top.
_OF_TRAINER = frozenset({"torch", "numpy", "tokenizers", "safetensors", "fsspec", "huggingface_hub", "matplotlib"})


@contextlib.contextmanager
def trainer_packages() -> Iterator[None]:
    """Around imports of the trainer.

    Raises:
        ConfigError: one of its packages is not installed; names the interpreter, and what to install.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in _OF_TRAINER:
            raise
        raise ConfigError(
            f'the trainer needs {name}, which {sys.executable} lacks: pip install "atoll[train]" there, or '
            f'pip install -c constraints.txt -e ".[train]" in a clone'
        ) from None
