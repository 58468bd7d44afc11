"""The layers of a model: what activation checkpointing, compilation and FSDP take one by one."""

from __future__ import annotations

from torch import nn

from atoll.core.errors import ConfigError

_LISTS = (nn.ModuleList, nn.ModuleDict)


def layers_of(model: nn.Module, *, needed_by: str | None = None) -> list[nn.Module]:
    """The members, with parameters, of the model's lists of modules; not those of lists inside of them.

    Args:
        needed_by: the key of the recipe that does not work without.

    Raises:
        ConfigError: there are none, and they are needed.
    """
    found: list[nn.Module] = []
    for child in model.children():
        if isinstance(model, (*_LISTS, nn.Sequential)) and not isinstance(child, _LISTS):
            found += [child] if next(child.parameters(), None) is not None else []
        else:
            found += layers_of(child)
    if needed_by is not None and not found:
        name = type(getattr(model, "inner", model)).__name__  # a user's, inside of ours
        raise ConfigError(
            f"{needed_by} works layer by layer, and {name} has no ModuleList or ModuleDict of layers: make one, or "
            "leave it out"
        )
    return found
