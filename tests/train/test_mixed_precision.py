"""Mixed precision, the same under every layout: masters to the last bit, gradients of many micro-batches."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

import ranks
from atoll.core.errors import ConfigError
from atoll.train.batch import Batch
from atoll.train.engine import Engine
from atoll.train.models.family import stored_tensors
from atoll.train.models.init import initialize
from atoll.train.models.parts import Positions
from atoll.train.models.registry import build
from atoll.train.parallel.gradients import ReplicatedWeights
from atoll.train.parallel.layout import resolve
from atoll.train.parallel.mesh import make_mesh
from atoll.train.parallel.plan import Plan
from atoll.train.parallel.precision import NumberFormats
from atoll.train.recipe.schema import Recipe
from atoll.train.weights import load_weights

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "ddp": (2, {"replicate": 2}),
    "fsdp": (2, {"shard": 2}),
    "hsdp": (4, {"replicate": 2, "shard": 2}),
    "tp": (2, {"tensor": 2}),
    "tp_ddp": (4, {"tensor": 2, "replicate": 2}),
    "pp": (2, {"pipeline": 2}),
    "pp_fsdp": (4, {"pipeline": 2, "shard": 2}),
    "cp": (2, {"context": 2}),
}
MODEL = {"vocab_size": 61, "layers": 2, "dim": 32, "heads": 4, "kv_heads": 2, "hidden_dim": 48, "max_seq_len": 16}
NUM_BATCHES = 64  # sequences, each a micro-batch of its own on one rank


def recipe_of(parallel: dict[str, Any], **precision: str) -> Recipe:
    return Recipe.model_validate(
        {
            "model": {**MODEL, "init_scheme": "gpt2"},  # no gradient is 0 in its first step
            "train": {"seq_len": 16, "global_batch": NUM_BATCHES, "micro_batch": 1, "recompute": "none"},
            "parallel": parallel,
            "precision": precision,
        }
    )


def _engine(recipe: Recipe, init: str | None) -> tuple[Engine, Any]:
    mesh = make_mesh(resolve(recipe, dist.get_world_size()), torch.device("cpu"))

    def set_weights(model: Any) -> None:
        if init is None:
            initialize(model, 1)
        else:
            load_weights(model, recipe.model, init)

    return Engine(Plan(recipe, mesh.layout), mesh, set_weights), mesh


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def _masters(recipe: Recipe, init: str | None) -> dict[str, Tensor]:
    engine, _ = _engine(recipe, init)
    return {name: _whole(master) for name, master in engine.weights.masters.items()}


# `make test` has the same of the module's own weights: test_layouts_agree_bit_for_bit.
@pytest.mark.long
@pytest.mark.parametrize("start", ["seed", "init"])
def test_masters_are_the_same_bits_in_every_layout(tmp_path: Path, start: str) -> None:
    section = recipe_of({}).model
    exact = build(section, device="cpu")
    initialize(exact, 1 if start == "seed" else 2)
    expected = {name: value.detach() for name, value in exact.named_parameters()}
    init = None
    if start == "init":
        init = str(tmp_path / "model.safetensors")
        save_file({stored.name: expected[stored.parts[0].name] for stored in stored_tensors(section)}, init)
    for name in LAYOUTS if start == "seed" else ("one", "ddp", "fsdp"):
        world, parallel = LAYOUTS[name]
        seen: dict[str, Tensor] = {}
        for masters in ranks.run(world, _masters, recipe_of(parallel, compute="bf16"), init):
            seen |= masters
        assert seen.keys() == expected.keys(), name
        for key, value in expected.items():
            assert seen[key].dtype == torch.float32, (name, key)
            assert torch.equal(seen[key], value), (name, key)


def _gradients(recipe: Recipe) -> dict[str, Tensor]:
    engine, mesh = _engine(recipe, None)
    draw = torch.Generator().manual_seed(0)
    tokens, labels = (torch.randint(0, 61, (NUM_BATCHES, 16), generator=draw) for _ in range(2))
    index = torch.arange(16).expand(1, 16)
    share = NUM_BATCHES // mesh.layout.data
    rows = range(mesh.data_rank * share, (mesh.data_rank + 1) * share)
    engine.forward_backward([Batch(tokens[at : at + 1], labels[at : at + 1], index, None) for at in rows])
    return {
        name: _whole(master.grad) / labels.numel()
        for name, master in engine.weights.masters.items()
        if master.grad is not None
    }


@pytest.mark.parametrize(
    "layout",
    ["hsdp", *(pytest.param(n, marks=pytest.mark.long) for n in ("one", "ddp", "fsdp", "tp_ddp", "pp"))],
)
def test_a_reduction_in_bf16_rounds_once_whatever_the_micro_batches(layout: str) -> None:
    world, parallel = LAYOUTS[layout]
    exact: dict[str, Tensor] = {}
    rounded: dict[str, Tensor] = {}
    for precision, found in (("fp32", exact), ("bf16", rounded)):
        for own in ranks.run(world, _gradients, recipe_of(parallel, compute="fp32", reduce=precision)):
            found |= own
    errors = {name: ((rounded[name] - value).norm() / value.norm()).item() for name, value in exact.items()}
    # A number rounded to bf16 moves by 0.2 % at most; sums of such numbers that cancel out by a little more.
    assert max(errors.values()) < 0.005, errors
    if layout in ("one", "pp"):
        assert not any(errors.values()), "no rank to sum over, nothing to round"


@pytest.mark.parametrize("layout", ["one", pytest.param("tp", marks=pytest.mark.long)])
def test_gradients_of_one_micro_batch_stay_in_the_compute_format(layout: str) -> None:
    world, parallel = LAYOUTS[layout]
    for narrow, wide in ranks.run(world, _one_micro_batch, recipe_of(parallel, compute="bf16")):
        for name, gradient in narrow.items():
            assert gradient.dtype == torch.bfloat16
            assert wide[name].dtype == torch.float32
            assert torch.equal(2 * gradient.float(), wide[name]), name


def _one_micro_batch(recipe: Recipe) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients of a batch, and of the same batch twice."""
    engine, _ = _engine(recipe, None)
    tokens = torch.arange(16).expand(1, 16)
    found = []
    for count in (1, 2, 1):
        engine.forward_backward([Batch(tokens, tokens, tokens, None)] * count)
        masters = engine.weights.masters.items()
        found.append({name: _whole(master.grad) for name, master in masters if master.grad is not None})
    assert all(torch.equal(gradient, found[2][name]) for name, gradient in found[0].items())
    return found[0], found[1]


def test_a_pipeline_of_shards_is_not_reduced_in_bf16() -> None:
    with pytest.raises(ConfigError, match=r'reduce = "bf16" with \[parallel\] pipeline = 2 and shard × context = 2'):
        resolve(recipe_of({"pipeline": 2, "shard": 2}, reduce="bf16"), 4)


def test_weights_are_freed_with_the_run() -> None:
    model = torch.nn.Linear(4, 4)
    formats = NumberFormats(torch.bfloat16, torch.float32, torch.float32)
    weights = ReplicatedWeights([model], formats, group=None, overlap=True)
    weights.begin()
    weights.last_micro_batch()
    model(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
    weights.finish()
    assert weights.masters["weight"].grad is not None
    kept = weakref.ref(weights)
    del weights, model
    gc.collect()
    assert kept() is None


def test_angles_are_exact_where_the_model_computes_in_bf16() -> None:
    positions = torch.arange(8000, 8016)[None]
    cos, _ = Positions(64, 10_000.0)(positions, torch.bfloat16)
    expected, _ = Positions(64, 10_000.0)(positions, torch.float32)
    assert torch.equal(cos, expected)


def _float8_steps(recipe: Recipe) -> list[float]:
    from test_parallel import step_of

    return step_of(recipe, 3)[0]


@pytest.mark.parametrize(
    "parallel",
    [
        {"tensor": 2},
        {"shard": 2, "micro": 2},
        pytest.param({"tensor": 2, "sequence_parallel": False}, marks=pytest.mark.long),
        pytest.param({"shard": 2, "tensor": 2, "micro": 2}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_float8_on_several_ranks(parallel: dict[str, Any]) -> None:
    """The scale of a sharded matrix is that of the whole: the same losses as on one rank, but for the order of sums."""
    from test_parallel import recipe_of as sized

    def wanted(**options: Any) -> Recipe:
        tree = sized(precision="bf16", model={"dim": 64, "hidden_dim": 96, "kv_heads": 4}, **options).model_dump()
        tree["precision"] |= {"float8": "tensorwise", "float8_emulate": True}
        return Recipe.model_validate(tree)

    expected = ranks.run(1, _float8_steps, wanted())[0]
    world = parallel.get("tensor", 1) * parallel.get("shard", 1)
    for losses in ranks.run(world, _float8_steps, wanted(**parallel)):
        assert losses == pytest.approx(expected, rel=5e-3)
