"""The state of an optimizer as named tensors, so that it is saved and resharded like parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from atoll.core.errors import CheckpointError


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: Mapping[Parameter, str]) -> dict[str, Tensor]:
    """The optimizer's state by name, ``optim.<parameter>.<key>``: the tensors themselves, to save or to load into.

    Args:
        optimizer: one that makes all of its state when it is made, as those of ``train.optim`` do.

    Raises:
        CheckpointError: a state value is neither a tensor nor None.
    """
    found: dict[str, Tensor] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state: dict[str, Any] = optimizer.state.get(parameter, {})
            for key, value in state.items():
                if value is None:
                    continue
                if not isinstance(value, Tensor):
                    raise CheckpointError(
                        f"{type(optimizer).__name__} keeps {key} = {value!r} of {names[parameter]}: only tensors can "
                        "be saved"
                    )
                found[f"optim.{names[parameter]}.{key}"] = value
    return found
