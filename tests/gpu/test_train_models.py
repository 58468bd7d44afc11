"""Models on a GPU: the CPU's initial weights, no waiting for the device in a step, no attention matrix in memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import leaks
from atoll.train.models.init import initialize
from atoll.train.models.registry import build
from atoll.train.recipe.schema import ModelSection

pytestmark = [pytest.mark.gpu, pytest.mark.serial, pytest.mark.leaks_per_module]

SECTION = ModelSection(vocab_size=1000, dim=256, layers=2, heads=8, kv_heads=2, max_seq_len=4096)


@pytest.fixture(scope="session", autouse=True)
def _cuda_in_process() -> None:
    """The CUDA driver and its libraries keep descriptors and threads for the life of the process."""
    with leaks.keep():
        model = build(SECTION, device="cuda", dtype=torch.bfloat16)
        initialize(model, 0)
        model(*_inputs(64)).backward()


def _inputs(length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, positions, documents and labels of two documents, each [1, S]."""
    tokens = torch.randint(0, 1000, (1, length), device="cuda")
    half = torch.arange(length // 2, device="cuda")
    documents = torch.arange(length, device="cuda")[None] // (length // 2)
    return tokens, torch.cat((half, half))[None], documents, tokens.roll(-1, 1)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_initial_weights_are_those_of_the_cpu(family: str) -> None:
    section = SECTION.model_copy(update={"family": family, "kv_heads": None})
    here, there = build(section, device="cuda"), build(section, device="cpu")
    initialize(here, 3)
    initialize(there, 3)
    for (name, found), expected in zip(here.named_parameters(), there.parameters(), strict=True):
        # The logarithms of the two differ in the last bit of a float64; few of these show in a float32.
        different = (found.cpu() != expected).sum().item()
        assert different <= found.numel() * 1e-6, name
        torch.testing.assert_close(found.cpu(), expected, rtol=2e-7, atol=0)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "gpt2"])
def test_a_step_never_waits_for_the_device(family: str) -> None:
    section = SECTION.model_copy(update={"family": family})
    model = build(section, device="cuda", dtype=torch.bfloat16)
    initialize(model, 0)
    inputs = _inputs(1024)
    model(*inputs).backward()  # the first one copies the angles' frequencies
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(*inputs).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_attention_over_documents_takes_no_memory_per_head_and_pair() -> None:
    model = build(SECTION, device="cuda", dtype=torch.bfloat16)
    initialize(model, 0)
    length = 4096
    inputs = _inputs(length)
    model(*inputs).backward()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model(*inputs).backward()
    per_pair = (torch.cuda.max_memory_allocated() - before) / length**2
    # The mask takes a byte, and two as bf16; one head's scores would take two more, eight heads' thirty-two.
    assert per_pair < 16
