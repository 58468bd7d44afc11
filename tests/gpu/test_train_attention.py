"""FlexAttention on a GPU: what the dense mask gives, forward and backward, compiled once for all batches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import leaks
from atoll.train.models.attention import KERNELS, FlexKernel, SdpaKernel, document_starts, use_kernel
from atoll.train.models.init import initialize
from atoll.train.models.registry import build
from atoll.train.parallel import recompute
from atoll.train.parallel.compile import compile_blocks
from atoll.train.parallel.context import places
from atoll.train.recipe.schema import ModelSection

pytestmark = [
    *(pytest.mark.gpu, pytest.mark.serial, pytest.mark.leaks_per_module, pytest.mark.timeout(300)),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # the compiler's own look at its inputs
]


@pytest.fixture(scope="session", autouse=True)
def _cuda_in_process() -> None:
    """The CUDA driver, and the compiler's processes, stay for the life of the process."""
    with leaks.keep():
        q = torch.randn(1, 128, 2, 64, device="cuda", requires_grad=True)
        starts = torch.zeros(1, 128, dtype=torch.long, device="cuda")
        kernel = FlexKernel()
        kernel.attend(q, q, q, kernel.mask(starts, torch.arange(128, device="cuda"), 128)).sum().backward()


def drawn(batch: int, length: int, mean: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(batch, length, generator=generator) < 1 / mean).long().cumsum(1).cuda()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(8, 2, 64), (4, 4, 128), (6, 2, 96)])
@pytest.mark.parametrize(("length", "mean"), [(1024, 190), (2000, 50), (1024, 100_000)])
def test_it_attends_as_the_dense_mask(
    length: int, mean: int, heads: int, kv_heads: int, width: int, ranks: int
) -> None:
    documents = drawn(2, length, mean, length)
    starts = document_starts(documents)
    generator = torch.Generator("cuda").manual_seed(0)
    own = torch.arange(length) if ranks == 1 else places(1, ranks, length)
    own = own.cuda()

    def random(positions: int, count: int) -> Tensor:
        return torch.randn(2, positions, count, width, generator=generator, device="cuda").bfloat16().requires_grad_()

    q, k, v = random(len(own), heads), random(length, kv_heads), random(length, kv_heads)
    grad = torch.randn_like(q)
    found, wanted = [], []
    for kernel, into, dtype in ((FlexKernel(), found, torch.bfloat16), (SdpaKernel(), wanted, torch.float64)):
        inputs = [each.detach().to(dtype).requires_grad_() for each in (q, k, v)]
        out = kernel.attend(*inputs, kernel.mask(starts[:, own], own, length))
        into += [out, *torch.autograd.grad(out, inputs, grad.to(dtype))]
    for one, other in zip(found, wanted, strict=True):
        assert (one.double() - other).norm() < 0.01 * other.norm()


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_a_compiled_model_learns_the_same_and_compiles_once(mode: recompute.Mode) -> None:
    section = ModelSection(vocab_size=1000, dim=512, layers=3, heads=8, kv_heads=2, max_seq_len=2048)
    losses: dict[str, list[float]] = {}
    for name in ("sdpa", "flex"):
        torch._dynamo.reset()
        model = build(section, device="cuda", dtype=torch.float32)
        initialize(model, 0)
        use_kernel(model, KERNELS[name]())
        recompute.checkpoint_activations(model, mode)
        compile_blocks(model, "default")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses[name] = []
        for step in range(6):
            documents = drawn(2, 1024, 100 + 50 * step, step)
            positions = torch.arange(1024, device="cuda") - document_starts(documents)
            tokens = (positions * 7 + documents) % 1000
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(tokens, positions, documents, tokens.roll(-1, 1))
            loss.backward()
            for parameter in model.parameters():
                parameter.grad /= tokens.numel()
            optimizer.step()
            optimizer.zero_grad()
            losses[name].append(loss.item() / tokens.numel())
            if step == 1:
                compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled, "compiled again for another batch"
    assert losses["flex"] == pytest.approx(losses["sdpa"], rel=3e-3)
    assert losses["flex"][-1] < losses["flex"][0]


@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(8, 2, 64), (4, 4, 128), (6, 2, 96)])
@pytest.mark.parametrize("keys", [1024, 4096, 4000])
def test_the_last_queries_attend_as_with_the_dense_mask(keys: int, heads: int, kv_heads: int, width: int) -> None:
    generator = torch.Generator("cuda").manual_seed(0)

    def random(positions: int, count: int) -> Tensor:
        return torch.randn(2, positions, count, width, generator=generator, device="cuda").bfloat16()

    q, k, v = random(1024, heads), random(keys, kv_heads), random(keys, kv_heads)
    seen = SdpaKernel().mask(
        torch.zeros(2, 1024, dtype=torch.long, device="cuda"), torch.arange(keys - 1024, keys, device="cuda"), keys
    )
    grad = torch.randn_like(q)
    found, wanted = [], []
    torch._dynamo.reset()  # every case is a compilation of its own, and there is a limit
    attend = torch.compile(SdpaKernel().attend, fullgraph=True, dynamic=False)
    for kernel, into, dtype, mask in (
        (attend, found, torch.bfloat16, None),
        (SdpaKernel().attend, wanted, torch.float64, seen),
    ):
        inputs = [each.to(dtype).requires_grad_() for each in (q, k, v)]
        out = kernel(*inputs, mask)
        into += [out, *torch.autograd.grad(out, inputs, grad.to(dtype))]
    for one, other in zip(found, wanted, strict=True):
        assert (one.double() - other).norm() < 0.01 * other.norm()
