"""The loss's two Triton kernels: what the plain operations do, over odd sizes, and no worse in bf16."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import leaks
from atoll.train.data.packing import UNTRAINED
from atoll.train.models import logprobs
from atoll.train.models.logprobs import ChunkedLogProbs

pytestmark = [pytest.mark.gpu, pytest.mark.serial, pytest.mark.leaks_per_module, pytest.mark.timeout(300)]


@pytest.fixture(scope="session", autouse=True)
def _cuda_in_process() -> None:
    """The CUDA driver and its libraries stay for the life of the process."""
    with leaks.keep():
        loss_of(*inputs(4, 5, torch.bfloat16), 2)


def inputs(tokens: int, vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(tokens)
    hidden = torch.randn((tokens, 64), generator=generator, device="cuda").to(dtype)
    weight = torch.randn((vocabulary, 64), generator=generator, device="cuda").to(dtype)
    labels = torch.randint(0, vocabulary, (tokens,), generator=generator, device="cuda")
    labels[::5] = UNTRAINED
    return hidden, weight, labels


def loss_of(
    hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int, by: str = "nll"
) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = (each.detach().clone().requires_grad_() for each in (hidden, weight))
    found = ChunkedLogProbs(hidden, weight, labels, chunk)
    loss = found.nll() if by == "nll" else -found.tokens().sum().reshape(1)
    loss.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return loss.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize(("tokens", "vocabulary"), [(1, 3), (7, 4096), (100, 4097), (65, 12_345), (33, 50_257)])
@pytest.mark.parametrize("by", ["nll", "tokens"])
def test_they_do_what_plain_operations_do(
    tokens: int, vocabulary: int, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        given = inputs(tokens, vocabulary, dtype)
        found = loss_of(*given, 32, by)
        exact = loss_of(*(part.double() if part.is_floating_point() else part for part in given), 32, by)
        with monkeypatch.context() as patch:
            patch.setattr(logprobs, "_has_kernels", lambda _: False)
            plain = loss_of(*given, 32, by)
        for ours, theirs, true in zip(found, plain, exact, strict=True):
            distance = (ours.double() - true).norm()
            assert distance <= max(1.1 * (theirs.double() - true).norm(), 1e-5 * true.norm())


def test_without_gradients_logits_stay() -> None:
    hidden, weight, labels = inputs(50, 300, torch.bfloat16)
    with torch.no_grad():
        alone = ChunkedLogProbs(hidden, weight, labels, 16).nll()
    assert torch.equal(alone, loss_of(hidden, weight, labels, 16)[0])
