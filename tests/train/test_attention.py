"""Attention kernels: what a query sees, block by block, against the mask of every query and key."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from atoll.core.errors import ConfigError
from atoll.train.models import attention
from atoll.train.models.attention import FlexKernel, SdpaKernel, document_starts, kernel_name
from atoll.train.parallel.context import places
from atoll.train.recipe.schema import Recipe


def recipe(**sections: dict[str, object]) -> Recipe:
    """A small model with the given keys."""
    model = {"layers": 1, "dim": 64, "heads": 4, "kv_heads": 2, "hidden_dim": 64, "vocab_size": 61}
    sections["data"] = {"path": "text.txt", **sections.get("data", {})}
    return Recipe.model_validate({"name": "small", "model": model, **sections})


def drawn_documents(batch: int, length: int, mean: int, generator: torch.Generator) -> Tensor:
    """[B, S]: numbers of documents of about ``mean`` tokens."""
    return (torch.rand(batch, length, generator=generator) < 1 / mean).long().cumsum(1)


def parts_of(length: int, ranks: int) -> list[Tensor]:
    """The places of each context rank's queries."""
    return [torch.arange(length)] if ranks == 1 else [places(rank, ranks, length) for rank in range(ranks)]


def test_a_document_starts_where_its_number_does() -> None:
    documents = torch.tensor([[0, 0, 0, 1, 2, 2], [3, 3, 4, 4, 4, 4]])
    assert document_starts(documents).tolist() == [[0, 0, 0, 3, 4, 4], [0, 0, 2, 2, 2, 2]]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(("length", "mean"), [(768, 40), (768, 500), (1536, 5), (384, 10_000), (600, 70), (252, 60)])
def test_blocks_are_those_of_the_mask(length: int, mean: int, ranks: int) -> None:
    documents = drawn_documents(2, length, mean, torch.Generator().manual_seed(length + mean))
    starts = document_starts(documents)
    for own in parts_of(length, ranks):
        dense = SdpaKernel().mask(starts[:, own], own, length)
        expected = (documents[:, own, None] == documents[:, None, :]) & (own[:, None] >= torch.arange(length))
        assert torch.equal(dense[:, 0], expected)
        partial, full = attention._blocks(starts[:, own], own, length)
        assert not (partial & full).any()
        for query in range(partial.shape[1]):
            for key in range(partial.shape[2]):
                block = dense[:, 0, 128 * query : 128 * (query + 1), 128 * key : 128 * (key + 1)].flatten(1)
                whole = block.all(1) & (128 * (key + 1) <= length)
                assert not (block.any(1) & ~(partial | full)[:, query, key]).any(), "a block that is seen is left out"
                assert not (full[:, query, key] & ~whole).any(), "a block is taken for whole"
        seen = (partial | full).sum()
        needed = sum(
            dense[:, 0, 128 * q : 128 * (q + 1), 128 * k : 128 * (k + 1)].flatten(1).any(1).sum()
            for q in range(partial.shape[1])
            for k in range(partial.shape[2])
        )
        if ranks == 1:
            assert seen == needed, "blocks that nobody sees are computed"


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("ranks", [1, 2])
def test_flex_attends_as_the_dense_mask(ranks: int) -> None:
    """Uncompiled: the compiled kernel's twin of this runs on a GPU, in ``tests/gpu``."""
    uncompiled = FlexKernel()
    uncompiled.flex = flex_attention
    generator = torch.Generator().manual_seed(0)
    length = 512
    documents = drawn_documents(2, length, 90, generator)
    starts = document_starts(documents)
    for own in parts_of(length, ranks):
        q = torch.randn(2, len(own), 4, 16, generator=generator)
        k, v = torch.randn(2, 2, length, 2, 16, generator=generator)
        found, wanted = (
            kernel.attend(q, k, v, kernel.mask(starts[:, own], own, length)) for kernel in (uncompiled, SdpaKernel())
        )
        torch.testing.assert_close(found, wanted, atol=2e-6, rtol=1e-5)


def test_the_kernel_of_a_run() -> None:
    apart, together = recipe(), recipe(data={"isolate_documents": False})
    assert kernel_name(apart, "cuda") == "flex"
    assert kernel_name(apart, "cpu") == "sdpa"
    assert kernel_name(together, "cuda") == "sdpa"
    assert kernel_name(recipe(compile={"attention": "sdpa"}), "cuda") == "sdpa"
    assert kernel_name(recipe(precision={"compute": "fp64"}), "cuda") == "sdpa"
    with pytest.raises(ConfigError, match="needs a GPU"):
        kernel_name(recipe(compile={"attention": "flex"}), "cpu")


@pytest.mark.parametrize("kernel", [SdpaKernel(), None], ids=["fused", "masked"])
@pytest.mark.parametrize("keys", [24, 40, 1, 9])
def test_without_a_mask_the_queries_are_the_last_positions(keys: int, kernel: SdpaKernel | None) -> None:
    queries = min(keys, 8)
    inputs = [
        torch.randn(2, length, heads, 16, dtype=torch.float64, requires_grad=True)
        for length, heads in ((queries, 4), (keys, 2), (keys, 2))
    ]
    starts, places = torch.zeros(2, queries, dtype=torch.long), torch.arange(keys - queries, keys)
    grad = torch.randn(2, queries, 4, 16, dtype=torch.float64)
    expected = SdpaKernel().attend(*inputs, SdpaKernel().mask(starts, places, keys))
    wanted = [expected, *torch.autograd.grad(expected, inputs, grad)]
    with contextlib.ExitStack() as stack:
        if kernel is None:
            stack.enter_context(pytest.MonkeyPatch.context()).setattr(attention, "_has_kernel", lambda _: False)
        out = SdpaKernel().attend(*inputs, None)
    for one, other in zip([out, *torch.autograd.grad(out, inputs, grad)], wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
