"""The state of an optimizer as named tensors, so that it is saved and resharded like parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from atoll.core.errors import CheckpointError
from atoll.train.checkpoint.checkpointer import SavedTensor

_PREFIX = "optim."


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, names: Mapping[Parameter, str], saved: Mapping[str, SavedTensor] | None = None
) -> dict[str, Tensor]:
    """The optimizer's state by name, ``optim.<parameter>.<key>``: the tensors themselves, to save or to load into.

    An optimizer makes a parameter's state at that parameter's first gradient, so a fresh one has none to load into.
    With ``saved`` (``Checkpointer.tensors``) it is made as the checkpoint has it: a tensor of the parameter's shape is
    sharded like the parameter, any other (a step counter) is held whole by every rank. Nothing is guessed about the
    optimizer, no zero-gradient step changes a counter or a product, and a parameter that had no state when it was
    saved has none afterwards. State that is there already stays what it is. What this does not know: states of another
    shape than the parameter that are sharded themselves (Adafactor's rows and columns under FSDP).

    Args:
        optimizer: any whose state values are tensors or None.
        saved: the tensors of the checkpoint that is about to be loaded.

    Raises:
        CheckpointError: a state value is of another kind.
    """
    found: dict[str, Tensor] = {}
    by_parameter = _by_parameter(saved or {})
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[parameter]
            state: dict[str, Any] = optimizer.state.get(parameter, {})
            if not state and name in by_parameter:
                state = {key: _like(parameter, key, entry, group) for key, entry in by_parameter[name].items()}
                optimizer.state[parameter] = state
            for key, value in state.items():
                if value is None:
                    continue
                if not isinstance(value, Tensor):
                    raise CheckpointError(
                        f"{type(optimizer).__name__} keeps {key} = {value!r} of {name}: only tensors can be saved"
                    )
                found[f"{_PREFIX}{name}.{key}"] = value
    return found


def _by_parameter(saved: Mapping[str, SavedTensor]) -> dict[str, dict[str, SavedTensor]]:
    states: dict[str, dict[str, SavedTensor]] = {}
    for full, entry in saved.items():
        if full.startswith(_PREFIX):
            name, _, key = full.removeprefix(_PREFIX).rpartition(".")
            states.setdefault(name, {})[key] = entry
    return states


def _like(parameter: Parameter, key: str, entry: SavedTensor, group: Mapping[str, Any]) -> Tensor:
    """A tensor to load a state into."""
    if key != "step" and entry.shape == tuple(parameter.shape):
        return torch.zeros_like(parameter, dtype=entry.dtype, requires_grad=False)
    # PyTorch's optimizers count steps on the CPU, but for kernels that read the counter themselves.
    on_device = key != "step" or group.get("fused") or group.get("capturable")
    return torch.zeros(entry.shape, dtype=entry.dtype, device=parameter.device if on_device else "cpu")
