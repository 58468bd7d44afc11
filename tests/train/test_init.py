"""Initial weights: a function of the seed alone, whatever the layout, type of number and wrapping."""

from __future__ import annotations

import hashlib
import statistics
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ranks
from atoll.train.dtensor import local
from atoll.train.models.init import initialize, materialize
from atoll.train.models.registry import UserModel, build
from atoll.train.recipe.schema import ModelSection

# No size divides by 2 or 4, except heads where tensor parallelism cuts them.
UNEVEN = ModelSection(vocab_size=37, dim=24, layers=2, heads=4, head_dim=6, hidden_dim=27, init_scheme="torchtitan")


def _whole(section: ModelSection, dtype: torch.dtype = torch.float32, seed: int = 1) -> dict[str, Tensor]:
    model = build(section, device="cpu", dtype=dtype)
    initialize(model, seed)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


# ------------------------------------------------------------------------------------------------- one process
DEEP = dict.fromkeys(("o", "up", "down"), 0.03 / 2**0.5)


@pytest.mark.parametrize(
    ("section", "spreads"),
    [
        ({}, {"embed": 1.0, "head": 128**-0.5, "o": 0.0, "down": 0.0}),
        ({"family": "gpt2"}, {"embed": 1.0, "head": 128**-0.5, "o": 0.0, "down": 0.0}),
        ({"family": "gpt2", "init_scheme": "gpt2"}, {"embed": 0.03, "o": 0.03 / 6**0.5, "down": 0.03 / 6**0.5}),
        ({"init_scheme": "gpt2"}, {"embed": 0.03, "head": 0.03, "o": 0.03 / 6**0.5, "up": 0.03, "down": 0.03 / 6**0.5}),
        # Of block i, counted from 0, of TorchTitan's Llama 3: 0.02 / sqrt(2 (i + 1)).
        ({"init_scheme": "torchtitan"}, {"embed": 1.0, "head": 128**-0.5, **DEEP}),
        ({"tied": True}, {"embed": 128**-0.5, **DEEP}),
        ({"family": "qwen3", "tied": True}, {"embed": 128**-0.5, **DEEP}),
    ],
)
def test_rules(section: dict[str, Any], spreads: dict[str, float]) -> None:
    weights = _whole(ModelSection(vocab_size=500, dim=128, layers=3, heads=4, init_std=0.03, **section))
    deep = "tied" in section or section.get("init_scheme") == "torchtitan"
    for name, value in weights.items():
        part, block = name.split(".")[-2], name.split(".")[1]
        if name.endswith("bias"):
            assert not value.any(), name
        elif "norm" in name:
            assert (value == 1).all(), name
        else:
            std = spreads.get(part, 0.03)
            if deep and part in ("o", "up", "down"):
                std *= (int(block) + 1) ** -0.5
            assert value.std().item() == pytest.approx(std, rel=0.03), name
            assert abs(value.mean().item()) <= 4 * std / value.numel() ** 0.5, name


def test_the_spread_of_matrices_that_a_recipe_leaves_open() -> None:
    spreads = [ModelSection(dim=256, tied=tied).std for tied in (False, True)]
    assert spreads == [256**-0.5, 0.02]
    assert ModelSection(init_scheme="gpt2").std == 0.02


def test_is_normal_and_independent_between_names_seeds_and_places() -> None:
    section = ModelSection(vocab_size=1000, dim=128, layers=1, heads=4, init_scheme="gpt2")
    first, second = _whole(section, torch.float64, 1), _whole(section, torch.float64, 2)
    drawn = (first["embed.weight"] / 0.02).flatten()
    ordered = drawn.sort().values
    normal = statistics.NormalDist()
    expected = torch.tensor([normal.cdf(value) for value in ordered[::100].tolist()], dtype=torch.float64)
    empirical = torch.arange(len(ordered), dtype=torch.float64)[::100] / len(ordered)
    assert (expected - empirical).abs().max() < 1.95 / len(ordered) ** 0.5  # Kolmogorov-Smirnov, 1 in 1,000
    assert drawn.unique().numel() == drawn.numel()

    def correlation(a: Tensor, b: Tensor) -> float:
        return float(torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1].abs()) * a.numel() ** 0.5

    assert correlation(first["embed.weight"], second["embed.weight"]) < 4
    assert correlation(first["embed.weight"], first["head.weight"]) < 4
    assert correlation(drawn[1:], drawn[:-1]) < 4
    assert correlation(drawn[128:], drawn[:-128]) < 4


def test_values_are_those_of_the_description() -> None:
    # Worked out in whole numbers of any length. Runs that start over, and islands on another release, find the same.
    def value(seed: int, name: str, place: int) -> float:
        key = int.from_bytes(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest(), "little")
        x = (place * 0x9E3779B97F4A7C15 + key) % 2**64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return 0.02 * statistics.NormalDist().inv_cdf(((x ^ x >> 31) // 2**12 + 0.5) / 2**52)

    section = ModelSection(vocab_size=16, dim=8, layers=1, heads=2, init_scheme="gpt2")
    weight = _whole(section, torch.float64, 7)["embed.weight"]
    expected = [value(7, "embed.weight", place) for place in range(128)]
    assert weight.flatten().tolist() == pytest.approx(expected, rel=1e-12)
    assert weight[0, :3].tolist() == pytest.approx([0.02123916769583706, -0.02603722672526634, 0.005192245022830522])


def test_the_matrix_of_one_type_is_that_of_the_others_rounded() -> None:
    exact, single, half = (_whole(UNEVEN, dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16))
    for name, value in exact.items():
        assert torch.equal(value.float(), single[name]), name
        assert torch.equal(single[name].bfloat16(), half[name]), name


def test_slices_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = _whole(UNEVEN, torch.float64)
    monkeypatch.setattr("atoll.train.models.init._SLICE", {"cpu": 70})
    found = _whole(UNEVEN, torch.float64)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_a_stage_has_the_same_values() -> None:
    expected = _whole(UNEVEN)
    stage = build(UNEVEN)
    stage.embed, stage.norm, stage.head = None, None, None
    del stage.blocks["0"]
    materialize(stage, torch.device("cpu"))
    initialize(stage, 1)
    found = dict(stage.named_parameters())
    assert set(found) == {name for name in expected if name.startswith("blocks.1.")}
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


# ------------------------------------------------------------------------------------------------- layouts
def _compare(model: nn.Module, expected: dict[str, Tensor]) -> int:
    """How many parameters equal; the whole is put together from the ranks' pieces by DTensor itself."""
    count = 0
    for name, parameter in model.named_parameters():
        value = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        assert torch.equal(value, expected[name]), name
        count += 1
    return count


def _parallel(section: ModelSection, sizes: dict[str, int]) -> nn.Module:
    """A model under tensor parallelism and FSDP2, as far as ``sizes`` has them."""
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    model = build(section)
    if "tensor" in sizes:
        plan: dict[str, Any] = {"embed": RowwiseParallel()}
        for number in model.blocks:
            for part in ("attention.q", "attention.k", "attention.v", "feed_forward.gate", "feed_forward.up"):
                plan[f"blocks.{number}.{part}"] = ColwiseParallel()
            for part in ("attention.o", "feed_forward.down"):
                plan[f"blocks.{number}.{part}"] = RowwiseParallel()
        parallelize_module(model, mesh["tensor"], plan)
        model.head.weight = nn.Parameter(distribute_tensor(model.head.weight, mesh["tensor"], [Shard(0)]))
    data = tuple(axis for axis in sizes if axis != "tensor")
    if data:
        policy = MixedPrecisionPolicy()
        for block in model.blocks.values():
            fully_shard(block, mesh=mesh[data], mp_policy=policy)
        fully_shard(model, mesh=mesh[data], mp_policy=policy)
    return model


TINY = ModelSection(vocab_size=3, dim=2, layers=1, heads=1, hidden_dim=2)  # fewer rows than ranks


def _initialized(cases: list[tuple[ModelSection, dict[str, int]]], expected: list[dict[str, Tensor]]) -> list[int]:
    found = []
    for (section, sizes), values in zip(cases, expected, strict=True):
        model = _parallel(section, sizes)
        materialize(model, torch.device("cpu"))
        initialize(model, 1)
        found.append(_compare(model, values))
    return found


@pytest.mark.parametrize(
    ("world", "cases"),
    [
        pytest.param(2, [(UNEVEN, {"shard": 2}), (UNEVEN, {"tensor": 2})], marks=pytest.mark.long),
        pytest.param(3, [(UNEVEN, {"shard": 3})], marks=pytest.mark.long),
        (
            4,
            [
                (UNEVEN, {"replicate": 2, "shard": 2}),
                (UNEVEN, {"shard": 2, "tensor": 2}),
                (UNEVEN, {"replicate": 1, "shard": 2, "tensor": 2}),
                (TINY, {"shard": 4}),
            ],
        ),
    ],
    ids=["2 ranks", "3 ranks", "4 ranks"],
)
def test_layouts_agree_bit_for_bit(world: int, cases: list[tuple[ModelSection, dict[str, int]]]) -> None:
    expected = [_whole(section) for section, _ in cases]
    counts = [len(values) for values in expected]
    assert ranks.run(world, _initialized, cases, expected) == [counts] * world


PLACEMENTS: list[tuple[tuple[int, ...], list[Any]]] = [
    ((4,), [Shard(1)]),
    ((2, 2), [Shard(0), Shard(1)]),
    ((2, 2), [Shard(1), Shard(1)]),
    ((2, 2), [Replicate(), Shard(1)]),
    ((4,), [Replicate()]),
]


def _placed(expected: Tensor) -> list[bool]:
    found = []
    for shape, placements in PLACEMENTS:
        mesh = init_device_mesh("cpu", shape)
        model = build(UNEVEN)
        empty = distribute_tensor(torch.empty_like(expected), mesh, placements)
        model.embed.weight = nn.Parameter(empty)
        model.norm = model.head = None
        model.blocks.clear()
        initialize(model, 1)
        found.append(torch.equal(model.embed.weight.full_tensor(), expected))
    return found


def test_any_placement() -> None:
    assert ranks.run(4, _placed, _whole(UNEVEN)["embed.weight"]) == [[True] * len(PLACEMENTS)] * 4


def _float8(expected: dict[str, Tensor]) -> int:
    """Parameters whose matrices are torchao's own tensors inside DTensors, for an all-gather in 8 bits."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = build(UNEVEN)
    convert_to_float8_training(model.blocks, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True))
    mesh = init_device_mesh("cpu", (2,))
    for module in (*model.blocks.values(), model):
        fully_shard(module, mesh=mesh)
    materialize(model, torch.device("cpu"))
    initialize(model, 1)
    wrapped = 0
    for name, parameter in model.named_parameters():
        wrapped += type(parameter.to_local()) is not Tensor
        part = local(parameter)
        assert type(part) is Tensor, "kernels take the address of its memory"
        assert torch.equal(part, expected[name].chunk(2)[mesh.get_local_rank()]), name
        with torch.no_grad():
            part.zero_()
        assert not parameter.to_local().any(), "the same memory"
    return wrapped


def test_float8_weights() -> None:
    assert ranks.run(2, _float8, _whole(UNEVEN)) == [14, 14]


class _Tied(nn.Module):
    def __init__(self, section: ModelSection) -> None:
        super().__init__()
        self.embed = nn.Embedding(section.vocabulary, section.dim)
        self.head = nn.Linear(section.dim, section.vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embed(tokens))
        return logits


def _tied_by_seed(seed: int) -> UserModel:
    torch.manual_seed(seed)
    return UserModel(_Tied(UNEVEN), UNEVEN)


def _tied(*, sharded: bool) -> tuple[bool, Tensor, Tensor]:
    """Whether one parameter is behind both names, the loss, and the gradient."""
    with torch.device("meta"):
        model = UserModel(_Tied(UNEVEN), UNEVEN)
    model.make = _tied_by_seed
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    materialize(model, torch.device("cpu"))
    initialize(model, 1)
    tokens = torch.arange(20).view(2, 10)
    loss = model(tokens, tokens, None, tokens)
    loss.backward()
    inner: Any = model.inner
    grad = inner.embed.weight.grad
    grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return inner.head.weight is inner.embed.weight and len(list(model.parameters())) == 1, loss.detach(), grad


def test_a_users_tie_outlives_the_meta_device_and_sharding() -> None:
    _, loss, grad = alone = _tied(sharded=False)
    assert alone[0]
    for found in ranks.run(2, _tied, sharded=True):
        assert found[0]
        assert torch.equal(found[1], loss)
        torch.testing.assert_close(found[2], grad)
