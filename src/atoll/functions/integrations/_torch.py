"""The torch process group that ``@sky.integrations.torch`` and ``.transformers`` ask for."""

from __future__ import annotations

import os

from atoll.core.context import CallContext
from atoll.functions.integrations._frameworks import Framework
from atoll.worker.process_group import disarm, explicit


def set_up(framework: Framework, ctx: CallContext) -> None:
    """Make the group, over one rank too."""
    disarm()  # the group asked for here is the only one to make
    import torch

    if framework.name == "transformers" and not torch.cuda.is_available():
        # On CPU ranks the Trainer silently assumes world size 1 unless told otherwise.
        os.environ["ACCELERATE_USE_CPU"] = "true"
    explicit(framework.backend, framework.timeout)
