"""Optimizers: against torch's and by hand on one process, and over meshes against one process."""

from __future__ import annotations

import copy

import pytest
import torch

import ranks
from atoll.core.errors import ConfigError
from atoll.train.checkpoint.checkpointer import optimizer_tensors
from atoll.train.models.registry import build
from atoll.train.optim.adamw import AdamW, _hashed, _rounded
from atoll.train.optim.build import build_optimizer, decays, matrices
from atoll.train.optim.muon import Muon, orthogonalised
from atoll.train.recipe.schema import ModelSection, OptimizerSection

TINY = ModelSection(layers=2, dim=16, heads=4, kv_heads=2, hidden_dim=24, vocab_size=33)


def model(dtype=torch.float64):
    torch.manual_seed(0)
    made = build(TINY, device="cpu").to(dtype)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.1)
    return made


def gradients(step, parameters):
    """What every process takes as the gradient of a step."""
    generator = torch.Generator().manual_seed(step)
    return {n: torch.randn(p.shape, generator=generator, dtype=torch.float64) for n, p in parameters.items()}


def train(section, steps=3, dtype=torch.float64):
    """Weights after some steps on one process."""
    parameters = dict(model(dtype).named_parameters())
    optimizer = build_optimizer(parameters, section)
    for step in range(steps):
        take(optimizer, step)
        for name, gradient in gradients(step, parameters).items():
            parameters[name].grad = gradient.to(dtype)
        optimizer.step()
    return parameters, optimizer


def take(optimizer, step):
    """What the loop does before a step."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak"] / (1 + step)


# --------------------------------------------------------------------------------------------------------- groups
def test_norms_biases_and_embeddings_do_not_decay_and_the_head_does():
    parameters = dict(model().named_parameters())
    decaying = {name for name, parameter in parameters.items() if decays(name, parameter)}
    assert decaying == {n for n in parameters if ".attention." in n or ".feed_forward." in n} | {"head.weight"}
    for name in ("wte.weight", "learned_positions.weight", "model.embed_tokens.weight", "h.0.ln_norm.weight"):
        assert not decays(name, torch.nn.Parameter(torch.ones(2, 2)))
    assert not decays("blocks.0.attention.q.bias", torch.nn.Parameter(torch.ones(2)))


def test_matrices_are_those_inside_the_blocks():
    parameters = dict(model().named_parameters())
    assert matrices(parameters) == {n for n in parameters if ".attention." in n or ".feed_forward." in n}


def test_matrices_of_a_model_without_blocks():
    names = ("wte.weight", "h.0.mlp.weight", "h.0.mlp.bias", "lm_head.weight")
    assert matrices({n: torch.nn.Parameter(torch.ones(2, 2)) for n in names}) == {"h.0.mlp.weight"}


def test_every_parameter_is_in_one_group_with_its_peak():
    parameters = dict(model().named_parameters())
    for kind in ("adamw", "muon", "sgd"):
        optimizer = build_optimizer(parameters, OptimizerSection(kind=kind, lr=0.5, muon_lr=0.25))
        grouped = [id(p) for group in optimizer.param_groups for p in group["params"]]
        assert sorted(grouped) == sorted(id(p) for p in parameters.values())
        peaks = {group.get("kind"): group["peak"] for group in optimizer.param_groups}
        assert peaks == ({"muon": 0.25, "adamw": 0.5} if kind == "muon" else {None: 0.5})


def test_a_frozen_parameter_is_left_alone():
    parameters = dict(model().named_parameters())
    parameters["head.weight"].requires_grad_(False)
    optimizer = build_optimizer(parameters, OptimizerSection())
    assert parameters["head.weight"] not in optimizer.state


def test_a_model_without_a_parameter_to_train_is_refused():
    frozen = torch.nn.Parameter(torch.zeros(2, 2), requires_grad=False)
    with pytest.raises(ConfigError, match=r"none of the model's 1 parameters has requires_grad"):
        build_optimizer({"w": frozen}, OptimizerSection())


def test_state_is_tensors_that_exist_before_the_first_step():
    parameters = dict(model().named_parameters())
    optimizer = build_optimizer(parameters, OptimizerSection(kind="muon"))
    assert set(optimizer.state[parameters["blocks.0.attention.q.weight"]]) == {"momentum"}
    assert set(optimizer.state[parameters["norm.weight"]]) == {"step", "exp_avg", "exp_avg_sq"}
    assert all(isinstance(value, torch.Tensor) for state in optimizer.state.values() for value in state.values())


# ---------------------------------------------------------------------------------------------------- one process
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_equals_torchs_own(kind):
    section = OptimizerSection(kind=kind, lr=0.01, weight_decay=0.1, momentum=0.9)
    ours, _ = train(section)
    theirs = dict(model().named_parameters())
    groups = [
        {"params": [p for n, p in theirs.items() if decays(n, p)], "weight_decay": 0.1},
        {"params": [p for n, p in theirs.items() if not decays(n, p)], "weight_decay": 0.0},
    ]
    if kind == "adamw":
        optimizer = torch.optim.AdamW(groups, lr=0.01, betas=section.betas, eps=section.eps)
    else:
        optimizer = torch.optim.SGD(groups, lr=0.01, momentum=0.9)
    for step in range(3):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (1 + step)
        for name, gradient in gradients(step, theirs).items():
            theirs[name].grad = gradient
        optimizer.step()
    for name, parameter in ours.items():
        torch.testing.assert_close(parameter, theirs[name], rtol=1e-12, atol=1e-14)


def test_a_parameter_without_a_gradient_stays_and_its_step_too():
    parameters = dict(model().named_parameters())
    optimizer = build_optimizer(parameters, OptimizerSection())
    before = copy.deepcopy(parameters)
    parameters["head.weight"].grad = torch.ones_like(parameters["head.weight"])
    optimizer.step()
    assert torch.equal(parameters["norm.weight"], before["norm.weight"])
    assert not torch.equal(parameters["head.weight"], before["head.weight"])
    assert optimizer.state[parameters["norm.weight"]]["step"] == 0


def test_muon_by_hand():
    ours, _ = train(OptimizerSection(kind="muon", muon_lr=0.02, momentum=0.9, weight_decay=0.1), steps=2)
    start = dict(model().named_parameters())
    for name in (
        "blocks.0.attention.q.weight",
        "blocks.0.attention.k.weight",
        "blocks.1.feed_forward.up.weight",
        "blocks.1.feed_forward.down.weight",
    ):
        weight = start[name].detach().clone()
        momentum = torch.zeros_like(weight)
        for step in range(2):
            gradient, rate = gradients(step, start)[name], 0.02 / (1 + step)
            momentum = 0.9 * momentum + 0.1 * gradient
            u, values, v = torch.linalg.svd(0.1 * gradient + 0.9 * momentum, full_matrices=False)
            values /= values.square().sum() ** 0.5
            for _ in range(5):
                values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
            x = u * values @ v
            rows, columns = weight.shape
            weight = weight * (1 - rate * 0.1) - rate * max(1, rows / columns) ** 0.5 * x
        torch.testing.assert_close(ours[name].detach(), weight, rtol=1e-9, atol=1e-11)


def test_muon_makes_singular_values_nearly_one():
    torch.manual_seed(1)
    values = torch.linalg.svdvals(orthogonalised(torch.randn(3, 48, 16)))
    assert values.min() > 0.6
    assert values.max() < 1.3


# ----------------------------------------------------------------------------------------------- moments in bf16
def test_rounding_by_chance_is_right_on_average():
    count = 200_000
    value = torch.full((count,), 1.0 + 2**-10)  # an eighth of bf16's spacing above 1
    rounded = _rounded(value, _hashed(count, 7, torch.device("cpu")) & 0xFFFF).float()
    assert set(rounded.unique().tolist()) == {1.0, 1.0 + 2**-7}
    assert rounded.mean().item() == pytest.approx(1.0 + 2**-10, abs=1e-4)
    assert torch.equal(_rounded(-value, torch.zeros(count, dtype=torch.int32)).float(), -torch.ones(count))


def test_hash_bits_are_even_and_depend_on_the_key():
    first, second = (_hashed(100_000, key, torch.device("cpu")) for key in (1, 2))
    for bit in range(32):
        assert ((first >> bit) & 1).double().mean().item() == pytest.approx(0.5, abs=0.01)
    assert (first == second).double().mean() < 0.01
    low, high = (first & 0xFFFF).double(), ((first >> 16) & 0xFFFF).double()
    assert abs(torch.corrcoef(torch.stack((low, high)))[0, 1].item()) < 0.02


def test_second_moment_in_bf16_moves_at_a_beta_where_nearest_rounding_would_not():
    weight = torch.nn.Parameter(torch.zeros(4096))
    optimizer = build_optimizer({"w": weight}, OptimizerSection(moments="bf16", betas=(0.9, 0.999)))
    squares = optimizer.state[weight]["exp_avg_sq"]
    squares.fill_(1.0)
    for _ in range(100):
        weight.grad = torch.full_like(weight, 2.0)
        optimizer.step()
    assert squares.dtype == torch.bfloat16
    expected = 4.0 - 3.0 * 0.999**100
    assert squares.float().mean().item() == pytest.approx(expected, rel=0.005)


def test_bf16_moments_follow_fp32_ones():
    wide, _ = train(OptimizerSection(lr=0.01), steps=20, dtype=torch.float32)
    narrow, optimizer = train(OptimizerSection(lr=0.01, moments="bf16"), steps=20, dtype=torch.float32)
    assert isinstance(optimizer, AdamW)
    start = dict(model(torch.float32).named_parameters())
    for name, parameter in wide.items():
        moved = (parameter - start[name]).norm()
        assert (narrow[name] - parameter).norm() < 0.02 * moved


def test_bf16_moments_in_several_buckets(monkeypatch):
    whole, _ = train(OptimizerSection(moments="bf16"), dtype=torch.float32)
    monkeypatch.setattr("atoll.train.optim.adamw._BUCKET_ELEMENTS", 300)
    pieces, _ = train(OptimizerSection(moments="bf16"), dtype=torch.float32)
    for name, parameter in whole.items():
        torch.testing.assert_close(pieces[name], parameter, rtol=0, atol=1e-4)


@pytest.mark.parametrize("section", [{"moments": "bf16"}, {"kind": "muon"}, {"kind": "sgd"}, {}])
def test_resume_is_bit_equal(section):
    section = OptimizerSection(**section)
    whole, _ = train(section, steps=4, dtype=torch.float32)
    parameters, first = train(section, steps=2, dtype=torch.float32)
    names = {parameter: name for name, parameter in parameters.items()}
    saved = {name: tensor.clone() for name, tensor in optimizer_tensors(first, names).items()}
    second = build_optimizer(parameters, section)
    for name, tensor in optimizer_tensors(second, names).items():
        tensor.copy_(saved[name])
    for parameter in parameters.values():
        for key, value in first.state[parameter].items():
            assert second.state[parameter][key].dtype == value.dtype
    for step in (2, 3):
        take(second, step)
        for name, gradient in gradients(step, parameters).items():
            parameters[name].grad = gradient.float()
        second.step()
    for name, parameter in parameters.items():
        assert torch.equal(parameter, whole[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("section", [{"moments": "bf16"}, {"kind": "muon"}, {"kind": "sgd"}, {}], ids=str)
def test_gradients_are_divided_and_nothing_moves_where_one_is_not_finite(section, dtype):
    section = OptimizerSection(**section)
    expected, _ = train(section, steps=2, dtype=dtype)
    parameters = dict(model(dtype).named_parameters())
    optimizer = build_optimizer(parameters, section)
    yes, no = torch.tensor(1.0), torch.tensor(0.0)
    for step in range(2):
        take(optimizer, step)
        for name, gradient in gradients(step, parameters).items():
            parameters[name].grad = 3 * gradient.to(dtype)
        optimizer.step(grad_scale=torch.tensor(3.0, dtype=torch.float64), found_inf=no)
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 1e-10, "atol": 1e-12}
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter, expected[name], **tolerance)
        parameter.grad = torch.full_like(parameter, float("nan"))
    before = copy.deepcopy({name: (p, optimizer.state[p]) for name, p in parameters.items()})
    optimizer.step(grad_scale=torch.tensor(float("nan"), dtype=torch.float64), found_inf=yes)
    for name, parameter in parameters.items():
        weight, state = before[name]
        assert torch.equal(parameter, weight)
        assert all(torch.equal(value, state[key]) for key, value in optimizer.state[parameter].items() if key != "step")


# ---------------------------------------------------------------------------------------------------------- meshes
def sharded(section, sizes):
    """Weights after three steps on a mesh of (replicate, shard, tensor) ranks, and the states' placements."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard", "tensor"))
    made = model()
    if sizes[2] > 1:
        for block in made.blocks.values():
            plan = dict.fromkeys(("q", "k", "v"), ColwiseParallel()) | {"o": RowwiseParallel()}
            parallelize_module(block.attention, mesh["tensor"], plan)
            plan = dict.fromkeys(("gate", "up"), ColwiseParallel()) | {"down": RowwiseParallel()}
            parallelize_module(block.feed_forward, mesh["tensor"], plan)
    if sizes[0] * sizes[1] > 1:
        over = mesh["replicate", "shard"] if sizes[0] > 1 else mesh["shard"]
        for block in made.blocks.values():
            fully_shard(block, mesh=over)
        fully_shard(made, mesh=over)
    parameters = dict(made.named_parameters())
    optimizer = build_optimizer(parameters, section)
    for step in range(3):
        take(optimizer, step)
        for name, gradient in gradients(step, parameters).items():
            parameter = parameters[name]
            if isinstance(parameter, DTensor):
                everywhere = [Replicate()] * parameter.device_mesh.ndim
                whole = DTensor.from_local(gradient, parameter.device_mesh, everywhere, run_check=False)
                parameter.grad = whole.redistribute(placements=parameter.placements)
            else:
                parameter.grad = gradient
        optimizer.step()
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(parameter, DTensor) and key != "step":
                assert value.placements == parameter.placements
    weights = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in parameters.items()}
    return {name: weight.detach().clone() for name, weight in weights.items()}


@pytest.mark.parametrize(
    "section",
    [
        OptimizerSection(lr=0.01),
        OptimizerSection(kind="muon", lr=0.01, momentum=0.9),
        pytest.param(OptimizerSection(kind="sgd", lr=0.01), marks=pytest.mark.long),
    ],
    ids=lambda section: section.kind,
)
@pytest.mark.parametrize(
    "sizes",
    [(1, 2, 2), *(pytest.param(each, marks=pytest.mark.long) for each in ((1, 2, 1), (1, 3, 1), (1, 1, 2), (2, 2, 1)))],
    ids=str,
)
def test_a_mesh_moves_weights_as_one_process_does(section, sizes):
    expected, _ = train(section)
    for weights in ranks.run(sizes[0] * sizes[1] * sizes[2], sharded, section, sizes):
        for name, parameter in expected.items():
            torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-10, atol=1e-12)


def dealt_to_replicas():
    import torch.distributed as dist

    parameters = dict(model().named_parameters())
    section = OptimizerSection(kind="muon", lr=0.01, momentum=0.9)
    optimizer = build_optimizer(parameters, section, replicas=dist.group.WORLD)
    for step in range(3):
        take(optimizer, step)
        for name, gradient in gradients(step, parameters).items():
            parameters[name].grad = gradient
        optimizer.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


def test_replicas_share_the_matrices():
    expected, _ = train(OptimizerSection(kind="muon", lr=0.01, momentum=0.9))
    for weights in ranks.run(3, dealt_to_replicas):
        for name, parameter in expected.items():
            torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-10, atol=1e-12)


def low_memory_replicas():
    parameters, _ = train(OptimizerSection(moments="bf16"), dtype=torch.float32)
    return {name: parameter.detach() for name, parameter in parameters.items()}


def test_replicas_round_alike():
    one, two = ranks.run(2, low_memory_replicas)
    assert all(torch.equal(one[name], two[name]) for name in one)


def unsummed_gradient():
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate

    mesh = init_device_mesh("cpu", (2,))
    weight = torch.nn.Parameter(DTensor.from_local(torch.ones(3), mesh, [Replicate()], run_check=False))
    optimizer = build_optimizer({"w": weight}, OptimizerSection(kind="sgd", lr=1.0, momentum=0.0))
    weight.grad = DTensor.from_local(torch.full((3,), 1.0 + dist.get_rank()), mesh, [Partial()], run_check=False)
    optimizer.step()
    return weight.to_local().tolist()


def test_gradients_that_still_are_parts_of_a_sum_are_summed():
    assert ranks.run(2, unsummed_gradient) == [[-2.0] * 3] * 2


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.usefixtures("cuda_in_process")
def test_on_a_gpu_every_optimizer_agrees_with_the_cpu_and_waits_for_nothing():
    for section in (
        OptimizerSection(lr=0.01),
        OptimizerSection(lr=0.01, moments="bf16"),
        OptimizerSection(kind="muon", lr=0.01),
        OptimizerSection(kind="sgd", lr=0.01),
    ):
        expected, _ = train(section, dtype=torch.float32)
        parameters = {n: torch.nn.Parameter(p.detach().cuda()) for n, p in model(torch.float32).named_parameters()}
        optimizer = build_optimizer(parameters, section)
        for step in range(3):
            take(optimizer, step)
            for name, gradient in gradients(step, parameters).items():
                parameters[name].grad = gradient.float().cuda()
            scale, found_inf = torch.ones((), dtype=torch.float64, device="cuda"), torch.zeros((), device="cuda")
            torch.cuda.set_sync_debug_mode("error")
            try:
                optimizer.step(grad_scale=scale, found_inf=found_inf)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        # bf16 in the orthogonalisation is worth about a hundredth of a step of muon_lr.
        tolerance = 5e-3 if isinstance(optimizer, Muon) else 2e-5
        for name, parameter in expected.items():
            torch.testing.assert_close(parameters[name].cpu().detach(), parameter.detach(), rtol=0, atol=tolerance)
