"""The torch process group that ``@sky.integrations.torch`` and ``.transformers`` ask for."""

from __future__ import annotations

import os

from atoll.worker.process_group import disarm, explicit


def set_up(backend: str | None, timeout: float | None, *, for_trainer: bool) -> None:
    """Make the group, over one rank too; ``for_trainer``: Hugging Face's, or its Accelerator, has to see it."""
    disarm()  # the group asked for here is the only one to make
    import torch

    if for_trainer and not torch.cuda.is_available():
        # On CPU ranks the Trainer silently assumes world size 1 unless told otherwise.
        os.environ["ACCELERATE_USE_CPU"] = "true"
    explicit(backend, timeout)
