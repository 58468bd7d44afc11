"""Activation checkpointing: the same gradients, to the bit, from less memory."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

import ranks
from atoll.core.errors import ConfigError
from atoll.train.models.registry import build
from atoll.train.parallel import recompute
from atoll.train.recipe.schema import ModelSection
from live import LiveBytes

CONFIG = ModelSection(layers=4, dim=64, heads=4, kv_heads=2, vocab_size=96, hidden_dim=128)
MODES = ("none", "selective", "full")


def model(mode, dtype=torch.float32, config=CONFIG):
    torch.manual_seed(0)
    made = build(config, device="cpu").to(dtype)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.05)
    recompute.checkpoint_activations(made, mode)
    return made


def batch(documents=True, length=64):
    tokens = torch.randint(0, 96, (2, length), generator=torch.Generator().manual_seed(1))
    place = torch.arange(length).expand(2, -1)
    border = torch.tensor([[20], [50]])
    if not documents:
        return tokens, place, None, tokens.roll(-1, 1)
    return tokens, torch.where(place < border, place, place - border), (place >= border).long(), tokens.roll(-1, 1)


def gradients(made, inputs):
    made(*inputs).sum().backward()
    return {name: parameter.grad for name, parameter in made.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("mode", ["selective", "full", 0.5])
def test_gradients_are_bit_equal(mode, documents, dtype):
    expected = gradients(model("none", dtype), batch(documents))
    got = gradients(model(mode, dtype), batch(documents))
    assert expected.keys() == got.keys()
    for name, gradient in expected.items():
        assert torch.equal(gradient, got[name]), name


def test_names_and_types_stay():
    plain, wrapped = model("none"), model("selective")
    assert list(plain.state_dict()) == list(wrapped.state_dict())
    assert [type(module) for module in plain.modules()] == [type(module) for module in wrapped.modules()]
    plain.load_state_dict(wrapped.state_dict())


def test_a_copy_computes_with_its_own_weights():
    original = model("full")
    copied = copy.deepcopy(original)
    gradients(copied, batch())
    assert all(parameter.grad is None for parameter in original.parameters())
    assert all(parameter.grad is not None for parameter in copied.parameters())


def test_memory_falls_with_the_mode():
    kept, peak = {}, {}
    for mode in MODES:
        made = model(mode)
        with LiveBytes() as live:
            loss = made(*batch())
            kept[mode] = live.now
            live.reset_peak()
            loss.sum().backward()
            peak[mode] = live.peak
    assert kept["selective"] < 0.5 * kept["none"]
    assert kept["full"] < 0.4 * kept["selective"]
    assert peak["full"] < peak["selective"] < 0.75 * peak["none"]
    made = model(0.5)
    with LiveBytes() as live:
        loss = made(*batch())
        assert live.now == pytest.approx((kept["none"] + kept["selective"]) / 2, rel=0.05)


def test_selective_computes_every_second_product_and_no_attention_again():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seen = {}

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.seen[str(function)] = self.seen.get(str(function), 0) + 1
            return function(*args, **(kwargs or {}))

    counts = {}
    for mode in MODES:
        made = model(mode)
        with Count() as count:
            made(*batch()).sum().backward()
        counts[mode] = count.seen
    products = {mode: seen["aten.mm.default"] for mode, seen in counts.items()}
    # Of a block's seven: q, v and gate again, not k, o and up; down is never needed. full: six.
    assert products["selective"] - products["none"] == 3 * CONFIG.layers
    assert products["full"] - products["none"] == 6 * CONFIG.layers
    attention = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    assert counts["selective"][attention] == counts["none"][attention] == CONFIG.layers
    assert counts["full"][attention] == 2 * CONFIG.layers


def test_without_gradients_nothing_is_kept():
    made = model("selective")
    with torch.no_grad():
        assert torch.equal(made(*batch()), model("none")(*batch()))


class DropBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.inner(x))


class Users(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(DropBlock() for _ in range(2))

    def forward(self, x):
        for block in self.layers:
            x = block(x)
        return x


def test_dropout_of_a_users_model_is_the_same_in_the_second_run():
    found = []
    for mode in MODES:
        torch.manual_seed(0)
        made = Users()
        recompute.checkpoint_activations(made, mode)
        made(torch.ones(4, 8)).sum().backward()
        found.append([parameter.grad for parameter in made.parameters()])
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_a_model_without_a_list_of_layers_is_refused():
    with pytest.raises(ConfigError, match=r"recompute = 'full'.*Linear has no ModuleList or ModuleDict of layers"):
        recompute.checkpoint_activations(nn.Linear(2, 2), "full")
    recompute.checkpoint_activations(nn.Linear(2, 2), "none")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch hides its own, which errors would forestall
def test_a_compiled_block_is_one_graph_that_recomputes(mode):
    torch._dynamo.reset()
    expected = gradients(model("none"), batch())
    made = model(mode)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    for block in made.blocks.values():
        block.compile(backend=backend, fullgraph=True)
    got = gradients(made, batch())
    assert len(graphs) == 1  # of all blocks
    assert ("TagActivationCheckpoint" in str([node.target for node in graphs[0].graph.nodes])) == (mode != "none")
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-5, atol=1e-6)
    torch._dynamo.reset()


def spread_each(cases):
    return [spread(mode, tensor) for mode, tensor in cases]


def spread(mode, tensor):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from atoll.train.parallel.tensor import apply_tensor

    torch.manual_seed(0)
    made = model("none", torch.float64)
    mesh = init_device_mesh("cpu", (2,))
    if tensor:
        apply_tensor(made, mesh, sequence_parallel=True)
    recompute.checkpoint_activations(made, mode)
    if not tensor:
        for block in made.blocks.values():
            fully_shard(block, mesh=mesh)
        fully_shard(made, mesh=mesh)
    found = gradients(made, batch())
    return {name: (g.full_tensor() if hasattr(g, "full_tensor") else g) for name, g in found.items()}


def test_with_sharded_and_tensor_parallel_blocks():
    expected = gradients(model("none", torch.float64), batch())
    cases = list(itertools.product(["selective", "full"], [False, True]))
    for rank in ranks.run(2, spread_each, cases):
        for case, found in zip(cases, rank, strict=True):
            for name, gradient in expected.items():
                torch.testing.assert_close(
                    found[name], gradient, rtol=1e-10, atol=1e-12, msg=lambda m, n=(case, name): f"{n}: {m}"
                )
