"""Activation checkpointing (Chen et al., "Training deep nets with sublinear memory cost", 2016), block by block.

``none`` keeps every activation for the backward pass. ``full`` keeps what enters a block and computes the rest again.
``selective`` also keeps, inside a block, what is dear to compute again or waits on other ranks: the outputs of the
attention kernel, of every second matrix product, and of reductions over ranks. A number is the share of the blocks that
are ``selective``, evenly over the depth; the others keep everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from atoll.train.parallel.layers import layers_of

Mode = Literal["none", "selective", "full"]
Recompute = Mode | float


def _operators(namespace: str, names: Iterable[str]) -> set[Any]:
    """Those of the named operators that this version of torch has."""
    operators = getattr(torch.ops, namespace)
    return {getattr(operators, name).default for name in names if hasattr(operators, name)}


_PRODUCTS = _operators("aten", ("mm", "addmm", "_scaled_mm"))
_KEPT = _operators(
    "aten",
    (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    ),
) | _operators("_c10d_functional", ("reduce_scatter_tensor", "all_reduce"))
_KEPT.add(torch.ops.higher_order.flex_attention)


def mode_of(recompute: Recompute) -> Mode:
    """What the blocks do that do not keep everything."""
    return recompute if isinstance(recompute, str) else "selective"


def count_of(recompute: Recompute, num_blocks: int) -> int:
    """How many of the first ``num_blocks`` blocks of a stage compute activations again."""
    if isinstance(recompute, str):
        return 0 if recompute == "none" else num_blocks
    return int(num_blocks * recompute + 1e-6)  # of k / L, k at L


def describe(recompute: Recompute, num_blocks: int) -> str:
    """For a user to read."""
    if isinstance(recompute, str):
        return recompute
    return f"selective in {count_of(recompute, num_blocks)} of {num_blocks} blocks"


def checkpoint_activations(model: nn.Module, recompute: Recompute) -> None:
    """Have the layers of ``model`` compute activations again in the backward pass. Names of parameters stay.

    Each layer's ``forward`` is wrapped, not the layer: compilation and FSDP that come later take it as it is.

    Raises:
        ConfigError: the model has no list of layers.
    """
    if recompute == "none":
        return
    mode = mode_of(recompute)
    for number, block in enumerate(layers_of(model, needed_by=f"[train] recompute = {recompute!r}")):
        if count_of(recompute, number + 1) > count_of(recompute, number):
            block.forward = MethodType(_forward(mode, draws=_draws(block)), block)


def _forward(mode: Mode, *, draws: bool) -> Callable[..., Any]:
    """A block's ``forward`` under ``mode``.

    It is a plain function, since torch.compile passes over a block whose ``forward`` is ``checkpoint`` itself.
    """
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": draws}
    if mode == "selective":
        options["context_fn"] = _contexts

    def forward(block: nn.Module, *inputs: Any, **named: Any) -> Any:
        return checkpoint(type(block).forward, block, *inputs, **named, **options)

    return forward


def _draws(block: nn.Module) -> bool:
    """Whether the block may draw random numbers, so that the generators' states must be kept for its second run.

    It does not where every part of it is Atoll's or known.
    """
    quiet = (nn.Linear, nn.RMSNorm, nn.LayerNorm, nn.Embedding)
    return not all(isinstance(m, quiet) or type(m).__module__.startswith("atoll.train.") for m in block.modules())


def _contexts() -> Any:
    """Contexts of one block's forward and of its second run; each counts the matrix products anew."""
    return create_selective_checkpoint_contexts(Policy())  # type: ignore[no-untyped-call]  # torch has no types here


class Policy:
    """Which outputs are kept.

    Of a gated block the second, fourth and sixth products are those of k, o and up. The seventh, down, is never
    computed again, since nothing in the backward pass needs its result: keeping the even ones costs least.
    """

    def __init__(self) -> None:
        self.products = {False: 0, True: 0}  # seen in the first run, in the second

    def __call__(self, context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator in _PRODUCTS:
            self.products[context.is_recompute] += 1
            keep = self.products[context.is_recompute] % 2 == 0
        else:
            keep = operator in _KEPT
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
