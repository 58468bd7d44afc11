"""AdamW (Loshchilov and Hutter, "Decoupled weight decay regularization", 2019), with moments in fp32 or bf16."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from atoll.train.dtensor import local
from atoll.train.optim.optimizer import LocalOptimizer, LocalParts, Scaling

_BUCKET_ELEMENTS = 1 << 25  # moved at a time with bf16 moments: bounds what is held in fp32 meanwhile


class AdamW(LocalOptimizer):
    """Groups have ``lr``, ``betas``, ``eps`` and ``weight_decay``.

    Moments in bf16 take 4 bytes a parameter instead of 8. A step changes the second moment by a share of 1 - beta2,
    less than half of bf16's spacing, so that rounding to the nearest would leave it where it is. Rounding up or down by
    chance, with probabilities that make the mean right (Gupta et al., "Deep learning with limited numerical precision",
    2015), keeps the moments right on average. Chance is a hash of (seed, step, place), no generator: a resumed run
    rounds as the uninterrupted one does.

    Args:
        moments: their format; None for the parameters'.
        fused: on a GPU, move fp32 parameters by one Triton kernel a tensor, which reads and writes everything once.
    """

    def __init__(
        self, groups: list[dict[str, Any]], *, moments: torch.dtype | None = None, seed: int = 0, fused: bool = True
    ) -> None:
        self._moments = moments
        super().__init__(groups)
        self.seed = seed
        self._fused = fused

    def initial_state(self, parameter: nn.Parameter, group: dict[str, Any]) -> dict[str, Tensor]:
        return adamw_state(parameter, self._moments)

    def move(self, parameters: list[nn.Parameter], group: dict[str, Any], scaling: Scaling) -> None:
        number_of_group = next(number for number, each in enumerate(self.param_groups) if each is group)
        for number, bucket in enumerate([parameters] if self._moments is None else _buckets(parameters)):
            key = _mixed(self.seed, number_of_group, number)
            move_adamw(self.parts(bucket), group, scaling, key=key, fused=self._fused)


def adamw_state(parameter: nn.Parameter, moments: torch.dtype | None = None) -> dict[str, Tensor]:
    """Zero ``exp_avg`` and ``exp_avg_sq``, and ``step``, which lies on the CPU: reading it there waits for nothing."""
    step = torch.zeros((), dtype=torch.float32, device="cpu")
    return {"step": step, **{name: torch.zeros_like(parameter, dtype=moments) for name in ("exp_avg", "exp_avg_sq")}}


def move_adamw(parts: LocalParts, group: dict[str, Any], scaling: Scaling, *, key: int = 0, fused: bool = True) -> None:
    """One step of parameters whose states are ``adamw_state``'s.

    Args:
        key: of the stream of chance that rounds moments in bf16.
    """
    weights, states = parts.weights, parts.states
    if not weights[0].is_cuda and states["exp_avg"][0].dtype == weights[0].dtype:
        _move_by_torch(parts, group, scaling)
        return
    torch._foreach_add_(states["step"], 1.0)
    steps = [float(step) for step in states["step"]]
    key = _mixed(key, int(max(steps)))
    if fused and all(weight.is_cuda and weight.dtype == torch.float32 for weight in weights):
        from atoll.train.optim.kernels import adamw_step

        divisor = scaling.grad_scale.float()
        first = 0  # of a tensor, in the stream of chance
        for weight, gradient, mean, square, step in zip(
            weights, parts.gradients(narrow=True), states["exp_avg"], states["exp_avg_sq"], steps, strict=True
        ):
            adamw_step(
                weight, gradient.contiguous(), mean, square, group, divisor, scaling.found_inf,
                first=first, key=key, step=step,
            )  # fmt: skip
            first += weight.numel()
    elif not scaling.skips():
        _move_plainly(parts, group, scaling, steps, key)


def _move_by_torch(parts: LocalParts, group: dict[str, Any], scaling: Scaling) -> None:
    gradients = parts.gradients()
    adamw(
        parts.weights,
        gradients,
        parts.states["exp_avg"],
        parts.states["exp_avg_sq"],
        [],
        parts.states["step"],
        fused=True,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
        **scaling.for_torch(gradients),
    )


def _move_plainly(parts: LocalParts, group: dict[str, Any], scaling: Scaling, steps: list[float], key: int) -> None:
    """The arithmetic itself, in the parameters' format."""
    (beta1, beta2), rate = group["betas"], group["lr"]
    weights, gradients = parts.weights, parts.gradients()
    kept_means, kept_squares = parts.states["exp_avg"], parts.states["exp_avg_sq"]
    scaling.divide(gradients)
    means = [kept.to(weight.dtype) for kept, weight in zip(kept_means, weights, strict=True)]
    squares = [kept.to(weight.dtype) for kept, weight in zip(kept_squares, weights, strict=True)]

    torch._foreach_mul_(weights, 1.0 - rate * group["weight_decay"])
    torch._foreach_lerp_(means, gradients, 1.0 - beta1)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, gradients, gradients, 1.0 - beta2)
    divisors = torch._foreach_sqrt(squares)
    torch._foreach_div_(divisors, [(1.0 - beta2**step) ** 0.5 for step in steps])
    torch._foreach_add_(divisors, group["eps"])
    torch._foreach_addcdiv_(weights, means, divisors, [-rate / (1.0 - beta1**step) for step in steps])
    if means[0] is kept_means[0]:
        return
    del divisors

    chance = _hashed(sum(weight.numel() for weight in weights), key, weights[0].device)
    pieces = torch.split(chance, [weight.numel() for weight in weights])
    for piece, mean, square, kept_mean, kept_square in zip(
        pieces, means, squares, kept_means, kept_squares, strict=True
    ):
        bits = piece.view(mean.shape)
        kept_mean.copy_(_rounded(mean, bits & 0xFFFF))
        kept_square.copy_(_rounded(square, (bits >> 16) & 0xFFFF))


def _buckets(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Runs of parameters with at most ``_BUCKET_ELEMENTS`` local elements, or one parameter that has more."""
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        elements = local(parameter).numel()
        if bucket and size + elements > _BUCKET_ELEMENTS:
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += elements
    if bucket:
        yield bucket


def _rounded(value: Tensor, chance: Tensor) -> Tensor:
    """``value`` in bf16, rounded away from zero where its lower 16 bits exceed ``chance``'s complement.

    Args:
        value: any shape; fp32, or fp64, which is rounded to fp32 first.
        chance: int32 of the same shape, uniform in [0, 2^16).
    """
    # bf16 is the upper half of fp32: adding to the lower half carries with a probability that is its share of a step.
    bits = value.to(torch.float32).view(torch.int32)
    return ((bits + chance) & -0x10000).view(torch.float32).to(torch.bfloat16)


def _hashed(count: int, key: int, device: torch.device) -> Tensor:
    """[count] int32 of uniform bits, a function of (key, place): Wellons' ``lowbias32`` integer hash (2018)."""
    bits = torch.arange(count, dtype=torch.int32, device=device)
    bits.bitwise_xor_(_signed(key))
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        # Torch shifts the sign in; the mask makes it the unsigned shift that the hash asks for.
        bits.bitwise_xor_((bits >> shift) & ((1 << (32 - shift)) - 1))
        bits.mul_(_signed(factor))
    return bits


def _mixed(*numbers: int) -> int:
    """One 32-bit key of several numbers, by the same hash."""
    key = 0
    for number in numbers:
        key = (key * 0x9E3779B1 + number + 1) & 0xFFFFFFFF
        key = ((key ^ key >> 16) * 0x7FEB352D) & 0xFFFFFFFF
        key = ((key ^ key >> 15) * 0x846CA68B) & 0xFFFFFFFF
        key ^= key >> 16
    return key


def _signed(number: int) -> int:
    """The int32 with the bits of a 32-bit number."""
    return number - (1 << 32) if number >= 1 << 31 else number
