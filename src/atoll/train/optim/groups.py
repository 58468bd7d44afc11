"""Which parameters decay, and which of them are matrices that Muon moves."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

# Parts of the names of tables that are looked up by index, ours (embed, learned_positions) and common ones.
_TABLES = ("embed", "position", "wte", "wpe")
_HEADS = ("head", "lm_head", "output", "unembed")


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Whether weight decay applies: never to norms, biases and embeddings, but to the head."""
    return parameter.ndim >= 2 and not name.endswith("bias") and "norm" not in name and not _is_table(name)


def matrices(parameters: dict[str, nn.Parameter]) -> set[str]:
    """The names of the hidden layers' matrices: those of two dimensions inside the blocks.

    In a model that has no ``blocks``, all of two dimensions but embeddings and the head.
    """
    hidden = {name for name, each in parameters.items() if each.ndim == 2 and decays(name, each)}
    in_blocks = {name for name in hidden if "blocks" in name.split(".")}
    return in_blocks or {name for name in hidden if not _is_head(name)}


def split_by_decay(names: Iterable[str], parameters: dict[str, nn.Parameter]) -> tuple[list[str], list[str]]:
    """Those that decay and those that don't, in the order of ``names``."""
    named = list(names)
    return (
        [name for name in named if decays(name, parameters[name])],
        [name for name in named if not decays(name, parameters[name])],
    )


def _is_table(name: str) -> bool:
    return any(table in name for table in _TABLES) and "unembed" not in name


def _is_head(name: str) -> bool:
    return any(part in _HEADS for part in name.split("."))
