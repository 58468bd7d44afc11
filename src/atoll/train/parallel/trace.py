"""What a block keeps for its backward pass: it is run once on the meta device, and what autograd saves is counted."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from atoll.train.models.family import family_of
from atoll.train.models.parts import Attention
from atoll.train.parallel.recompute import Policy
from atoll.train.recipe.schema import ModelSection

_TOKENS = 16
_DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


@dataclass(frozen=True, slots=True)
class BlockMemory:
    """Bytes a token of a block; the attention mask, if there is one, comes on top.

    Attributes:
        none, selective, full: what it keeps under these modes of activation checkpointing.
        working: what its backward pass needs besides.
        last_norm: what the norm before the head keeps.
    """

    none: float
    selective: float
    full: float
    working: float
    last_norm: float


@functools.lru_cache(maxsize=64)
def block_memory(
    model: ModelSection, itemsize: int, *, tensor: int, between: int, context: int, gpu: bool, compiled: bool
) -> BlockMemory:
    """Trace one block of a family.

    Args:
        itemsize: bytes of a number of the compute format.
        tensor: ranks that share its matrices.
        between: ranks that share the sequence between its parts.
        context: ranks whose keys and values its attention sees.
        gpu: whether a norm is one operation without compilation too.
        compiled: whether elementwise operations are made again in the backward pass rather than kept.
    """
    family = family_of(model)
    share = {
        "layers": 1,
        "heads": model.heads // tensor,
        "kv_heads": model.num_kv_heads // tensor,
        "head_dim": model.size_of_head,
        "hidden_dim": family.hidden_dim(model) // tensor,
        "vocab_size": 1,
    }
    watch = _Watch()
    with torch.device("meta"):
        decoder = family.build(model.model_copy(update=share)).to(_DTYPES[itemsize])
        x = torch.empty(1, _TOKENS, model.dim, dtype=_DTYPES[itemsize], requires_grad=True)
        rope = None if decoder.rope is None else decoder.rope(torch.zeros(1, _TOKENS), x.dtype)
    watch.ignore(*decoder.parameters(), *(rope or ()))
    block = decoder.blocks["0"]
    for module in decoder.modules():
        if isinstance(module, Attention):
            module.attention_kernel.attend = functools.partial(watch.attend, context)  # type: ignore[method-assign]
        elif isinstance(module, nn.RMSNorm) and (gpu or (compiled and module is not decoder.norm)):
            module.forward = functools.partial(watch.norm, module.weight)  # type: ignore[method-assign]
    rows = 0
    for name, module in block.named_modules():
        cut = family.cuts.get(name)
        rows += cut == "rows" and tensor > 1
        if cut == "norm":
            module.register_forward_pre_hook(functools.partial(watch.step_out, between))
            module.register_forward_hook(functools.partial(watch.step_out, 1))
    none = watch.kept(lambda: block(x, None, rope), compiled)
    widest = max(module.out_features for module in block.modules() if isinstance(module, nn.Linear))
    entering = model.dim * itemsize / between
    assert decoder.norm is not None
    return BlockMemory(
        none=none / _TOKENS,
        selective=watch.selective / _TOKENS + (1 + rows) * entering,  # each reduction over the tensor ranks is kept
        full=entering,
        working=2 * (widest + model.dim) * itemsize,  # the widest activation, the stream, their gradients
        last_norm=watch.kept(functools.partial(decoder.norm, x), False) / _TOKENS,
    )


class _Watch(TorchDispatchMode):
    """Counts what autograd saves, and what selective checkpointing keeps."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self.selective = 0
        self._policy = Policy()
        self._ignored: set[int] = set()
        self._alive: list[Tensor] = []  # so that no two storages have one address
        self._solid: set[int] = set()  # storages that another than an elementwise operation made or took
        self._saved: dict[int, float] = {}
        self._sizes: dict[int, float] = {}
        self._made_of: dict[int, set[int]] = {}  # of what elementwise operations made
        self._between = 1

    def ignore(self, *tensors: Tensor) -> None:
        """Leave weights and the angles of positions out."""
        self._alive += tensors
        self._ignored |= {_storage(each) for each in tensors}

    def kept(self, forward: Callable[[], Any], compiled: bool) -> float:
        """Bytes that autograd saves in ``forward``; where it is compiled, not what is cheap to make again."""
        self._saved.clear()
        with self, torch.autograd.graph.saved_tensors_hooks(self._save, lambda each: each):
            self._alive.append(forward())
        if not compiled:
            return sum(self._saved.values())
        kept = {source for at in self._saved for source in self._sources(at)}
        return sum(self._saved.get(at) or self._sizes[at] for at in kept)

    def _sources(self, at: int) -> set[int]:
        """What a tensor is made again from."""
        if at in self._solid:
            return {at} - self._ignored
        return {source for each in self._made_of.get(at, ()) for source in self._sources(each)}

    def step_out(self, between: int, *_: Any) -> None:
        """From here on the work is on this rank's part of the sequence, one of ``between``."""
        self._between = between

    def _save(self, tensor: Tensor) -> Tensor:
        at, size = _storage(tensor), tensor.untyped_storage().nbytes() / self._between
        self._alive.append(tensor)
        if at not in self._ignored:
            self._saved[at] = max(size, self._saved.get(at, 0.0))
        return tensor

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        made = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        self._alive += made
        taken = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        self._sizes |= {_storage(each): each.untyped_storage().nbytes() / self._between for each in made}
        if torch.Tag.pointwise not in function.tags and function is not torch.ops.aten._to_copy.default:
            self._solid |= {_storage(each) for each in made + taken}
        else:
            for each in made:
                self._made_of.setdefault(_storage(each), {_storage(one) for one in taken} - {_storage(each)})
        if self._policy(SimpleNamespace(is_recompute=False), function) == CheckpointPolicy.MUST_SAVE:
            self.selective += sum(each.nbytes for each in made)
        return result

    def norm(self, weight: Tensor, x: Tensor) -> Tensor:
        """A norm that is one operation."""
        statistics = torch.empty(*x.shape[:-1], 2, dtype=torch.float32, device=x.device)
        self._solid.add(_storage(x))
        out: Tensor = _Opaque.apply(torch.empty_like(x), x, weight, statistics)  # type: ignore[no-untyped-call]
        return out

    def attend(self, context: int, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        """Attention of any kernel: it keeps what it takes, what it gives, and a statistic of each query and head."""
        statistics = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        out = torch.empty_like(q)
        if context > 1:
            k, v = k.repeat(1, context, 1, 1), v.repeat(1, context, 1, 1)
        self._solid |= {_storage(each) for each in (q, k, v)}
        self.selective += out.nbytes + statistics.nbytes
        result: Tensor = _Opaque.apply(out, q, k, v, statistics, out)  # type: ignore[no-untyped-call]
        return result


class _Opaque(torch.autograd.Function):
    """An operation that gives ``out`` and keeps ``others``."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, *others: Tensor) -> Tensor:
        ctx.save_for_backward(*others)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        raise AssertionError("nothing is computed on the meta device")


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
