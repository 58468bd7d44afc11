"""Every layout gives the losses and gradients of one process: the same sums, only added up elsewhere."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import ranks
from atoll.train.batch import Batch
from atoll.train.engine import Engine
from atoll.train.models.init import initialize
from atoll.train.parallel.layout import resolve
from atoll.train.parallel.mesh import make_mesh
from atoll.train.parallel.norm import GradientNorm
from atoll.train.parallel.plan import Plan
from atoll.train.recipe.schema import Recipe

S, V, GLOBAL = 16, 53, 8

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp2": (2, {"replicate": 2}),
    "ddp2_2x2": (2, {"replicate": 2, "micro": 2}),
    "accumulate_2x4": (1, {"micro": 4}),
    "accumulate_8x1": (1, {"micro": 1}),
    "fsdp2": (2, {"shard": 2}),
    "fsdp2_accumulate": (2, {"shard": 2, "micro": 1}),
    "fsdp4": (4, {"shard": 4, "micro": 2}),
    "hsdp": (4, {"replicate": 2, "shard": 2, "micro": 1}),
    "tp2": (2, {"tensor": 2}),
    "tp2_no_sp": (2, {"tensor": 2, "sequence_parallel": False}),
    "tp2_ddp2": (4, {"tensor": 2, "replicate": 2}),
    "cp2": (2, {"context": 2}),
    "cp4": (4, {"context": 4}),
    "cp2_ddp2": (4, {"context": 2, "replicate": 2, "micro": 2}),
    "fsdp_tp": (4, {"shard": 2, "tensor": 2}),
    "fsdp_cp": (4, {"shard": 2, "context": 2, "micro": 2}),
    "tp_cp": (4, {"tensor": 2, "context": 2}),
    "pp_gpipe": (2, {"pipeline": 2, "micro": 2, "pipeline_schedule": "gpipe"}),
    "pp_1f1b": (2, {"pipeline": 2, "micro": 1, "pipeline_schedule": "1f1b"}),
    "pp_interleaved": (2, {"pipeline": 2, "micro": 2, "pipeline_schedule": "interleaved"}),
    "pp_zero_bubble": (2, {"pipeline": 2, "micro": 2, "pipeline_schedule": "zero_bubble"}),
    "pp_zbv": (2, {"pipeline": 2, "micro": 2, "pipeline_schedule": "zbv"}),
    "pp_fsdp": (4, {"pipeline": 2, "shard": 2, "micro": 2}),
    "pp_ddp": (4, {"pipeline": 2, "replicate": 2, "micro": 2}),
    "pp_tp": (4, {"pipeline": 2, "tensor": 2, "micro": 2}),
    "pp_cp": (4, {"pipeline": 2, "context": 2, "micro": 2}),
    "pp4_1f1b": (4, {"pipeline": 4, "micro": 2}),
}

# By `make test` each axis and each kind of schedule once, and the pairs of axes whose sums meet in one mesh.
IN_MAKE_TEST = {
    "fsdp2_accumulate", "hsdp", "cp2_ddp2", "fsdp_tp", "pp_1f1b", "pp_interleaved", "pp_zbv", "pp_fsdp",
}  # fmt: skip


def of_all(cases: Iterable[Any], in_make_test: Iterable[Any]) -> list[Any]:
    """For ``parametrize``: of the cases, only these belong to `make test`."""
    quick = set(in_make_test)
    every = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [
        pytest.param(*case, marks=() if (case if len(case) > 1 else case[0]) in quick else pytest.mark.long)
        for case in every
    ]


def recipe_of(family: str = "llama", *, precision: str = "fp64", micro: int = 4, **options: Any) -> Recipe:
    model = {"family": family, "layers": 4, "dim": 32, "heads": 4, "kv_heads": 2, "vocab_size": V, "hidden_dim": 48}
    if family in ("gpt2", "phi3"):
        model["kv_heads"] = 4
    model["init_scheme"] = "gpt2"  # no gradient is 0 in its first step
    model |= options.pop("model", {})
    return Recipe.model_validate(
        {
            "model": {**model, "max_seq_len": S},
            "objective": {"chunk_tokens": 24},
            "train": {"seq_len": S, "global_batch": options.pop("global_batch", GLOBAL), "micro_batch": micro},
            "parallel": options,
            "precision": {"compute": precision},
        }
    )


def sequences(num: int = GLOBAL, seed: int = 0, isolate: bool = True) -> Batch:
    """Packed sequences of ragged documents; each ignores a few labels."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, V, (num, S), generator=generator)
    labels = torch.randint(0, V, (num, S), generator=generator)
    labels[torch.rand(num, S, generator=generator) < 0.2] = -100
    starts = torch.rand(num, S, generator=generator) < 0.25
    starts[:, 0] = True
    documents = starts.long().cumsum(1) - 1
    index = torch.arange(S).expand(num, S)
    positions = index - torch.where(starts, index, 0).cummax(1).values
    return Batch(tokens, labels, positions, documents) if isolate else Batch(tokens, labels, index, None)


def rows(batch: Batch, start: int, stop: int) -> Batch:
    return batch.map(lambda part: part[start:stop])


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def step_of(
    recipe: Recipe, num_steps: int = 1, isolate: bool = True
) -> tuple[list[float], dict[str, torch.Tensor], float]:
    """Losses per token, the gradients of the first step by name, and their norm, as this rank has them."""
    layout = resolve(recipe, dist.get_world_size())
    mesh = make_mesh(layout, torch.device("cpu"))
    engine = Engine(Plan(recipe, layout), mesh, lambda model: initialize(model, 1))
    optimizer = torch.optim.AdamW(engine.weights.masters.values(), lr=1e-2, fused=True)
    losses: list[float] = []
    gradients: dict[str, torch.Tensor] = {}
    norm = 0.0
    share, micro = recipe.train.global_batch // layout.data, recipe.train.micro_batch
    for step in range(num_steps):
        batch = sequences(recipe.train.global_batch, step, isolate)
        first = mesh.data_rank * share
        own = [rows(batch, first + place, first + place + micro) for place in range(0, share, micro)]
        total = engine.forward_backward(own).double() / (layout.tensor * layout.context)
        dist.all_reduce(total)
        tokens = int((batch.labels != -100).sum())
        losses.append(total.item() / tokens)
        for parameter in engine.weights.masters.values():
            if parameter.grad is not None:
                parameter.grad.div_(tokens)
        if step == 0:
            gradients = {name: full(p.grad) for name, p in engine.weights.masters.items()}
            norm = GradientNorm(engine.weights.masters, mesh)()[0].item()
        optimizer.step()
        engine.weights.publish()
    return losses, gradients, norm


_references: dict[tuple[str, int, bool], Any] = {}


def reference(
    recipe: Recipe, num_steps: int = 1, isolate: bool = True
) -> tuple[list[float], dict[str, torch.Tensor], float]:
    """The same on one process with whole batches, whatever the layout: worked out once."""
    whole = Recipe.model_validate(
        {
            **recipe.model_dump(),
            "parallel": {},
            "train": {**recipe.train.model_dump(), "micro_batch": recipe.train.global_batch},
        }
    )
    key = (whole.model_dump_json(), num_steps, isolate)
    if key not in _references:
        _references[key] = ranks.run(1, step_of, whole, num_steps, isolate)[0]
    return _references[key]


def compare(world: int, recipe: Recipe, tolerance: float, isolate: bool = True) -> None:
    losses, gradients, norm = reference(recipe, isolate=isolate)
    seen: dict[str, torch.Tensor] = {}
    for own_losses, own_gradients, own_norm in ranks.run(world, step_of, recipe, 1, isolate):
        assert own_losses == pytest.approx(losses, rel=tolerance)
        assert own_norm == pytest.approx(norm, rel=tolerance)
        for name, gradient in own_gradients.items():
            torch.testing.assert_close(
                gradient, gradients[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )
        seen |= own_gradients
    assert seen.keys() == gradients.keys()


@pytest.mark.parametrize("name", of_all(LAYOUTS, IN_MAKE_TEST))
def test_a_layout_has_the_gradients_of_one_process(name: str) -> None:
    world, options = LAYOUTS[name]
    compare(world, recipe_of(**options), 1e-11)


@pytest.mark.parametrize("name", of_all(["cp2", "cp4", "tp2", "fsdp2", "pp_1f1b"], ["cp2", "pp_1f1b"]))
@pytest.mark.long
def test_a_layout_without_document_borders(name: str) -> None:
    world, options = LAYOUTS[name]
    compare(world, recipe_of(**options), 1e-11, isolate=False)


# What families differ in is what tensor parallelism cuts, and where the positions come from.
@pytest.mark.parametrize(
    ("name", "family"),
    of_all(
        itertools.product(
            ["ddp2", "hsdp", "tp2", "tp2_no_sp", "cp2", "fsdp_tp", "pp_1f1b"], ["qwen3", "phi3", "olmo2", "gpt2"]
        ),
        [
            ("tp2", "qwen3"),
            ("tp2", "olmo2"),
            ("cp2", "gpt2"),
        ],
    ),
)
def test_the_other_families(family: str, name: str) -> None:
    world, options = LAYOUTS[name]
    compare(world, recipe_of(family, **options), 1e-11)


@pytest.mark.parametrize(
    "name",
    of_all(["ddp2", "fsdp2_accumulate", "hsdp", "tp2", "cp2_ddp2", "fsdp_tp"], ["tp2"]),
)
def test_a_tied_embedding(name: str) -> None:
    world, options = LAYOUTS[name]
    compare(world, recipe_of(**options, model={"tied": True}), 1e-11)


@pytest.mark.parametrize(
    "name",
    of_all(
        ["ddp2_2x2", "fsdp2", "hsdp", "tp2", "cp2", "fsdp_tp", "fsdp_cp", "pp_1f1b", "pp_fsdp"],
        ["fsdp2", "pp_1f1b"],
    ),
)
@pytest.mark.long
def test_ten_steps_in_single_precision(name: str) -> None:
    world, options = LAYOUTS[name]
    recipe = recipe_of(precision="fp32", **options)
    losses, _, norm = reference(recipe, 10)
    for own, _, own_norm in ranks.run(world, step_of, recipe, 10):
        assert own[0] == pytest.approx(losses[0], rel=1e-5)
        assert own_norm == pytest.approx(norm, rel=1e-5)
        assert own == pytest.approx(losses, rel=1e-4)
        assert own[-1] != own[0]


def losses_of_second_document(recipe: Recipe, first_tokens: list[int]) -> list[float]:
    """The summed loss of a document in the middle of sequences that begin with another one, of each of these tokens."""
    mesh = make_mesh(resolve(recipe, dist.get_world_size()), torch.device("cpu"))
    engine = Engine(Plan(recipe, mesh.layout), mesh, lambda model: initialize(model, 1))
    batch = sequences(2)
    # The border is inside the first quarter, so that context ranks hold parts of both documents.
    documents = (torch.arange(S) >= 3).long().expand(2, S).contiguous()
    index = torch.arange(S).expand(2, S)
    positions = torch.where(documents == 1, index - 3, index)
    labels = torch.where(documents == 1, batch.labels, -100)
    found = []
    for first_token in first_tokens:
        tokens = batch.tokens.clone()
        tokens[:, :3] = first_token
        total = engine.evaluate([Batch(tokens, labels, positions, documents)]).double()
        dist.all_reduce(total)
        found.append(total.item())
    return found


@pytest.mark.parametrize("name", of_all(["cp2", "cp4", "tp2", "fsdp2"], ["cp4"]))
def test_a_document_in_a_pack_does_not_see_the_one_before(name: str) -> None:
    world, options = LAYOUTS[name]
    recipe = recipe_of(precision="fp32", **options)
    for with_one, with_other in ranks.run(world, losses_of_second_document, recipe, [1, 2]):
        assert with_one == with_other, "bit for bit"
        assert with_one > 0


@pytest.mark.parametrize("name", of_all(["ddp2", "fsdp2", "hsdp"], ["fsdp2"]))
@pytest.mark.long
def test_gradients_summed_in_bf16_are_near_and_not_equal(name: str) -> None:
    world, options = LAYOUTS[name]
    recipe = recipe_of(precision="fp32", **options)
    narrow = recipe.model_copy(update={"precision": recipe.precision.model_copy(update={"reduce": "bf16"})})
    exact = {k: v for _, grads, _ in ranks.run(world, step_of, recipe) for k, v in grads.items()}
    rounded = {k: v for _, grads, _ in ranks.run(world, step_of, narrow) for k, v in grads.items()}
    assert any(not torch.equal(exact[key], rounded[key]) for key in exact)
    for key, gradient in exact.items():
        assert (rounded[key] - gradient).norm() <= 0.02 * gradient.norm(), key
