"""The fused step of AdamW with bf16 moments, and Muon's directions: what their references do, over odd shapes."""

from __future__ import annotations

import pytest
import torch

import leaks
from atoll.train.optim import muon
from atoll.train.optim.adamw import AdamW
from atoll.train.optim.muon import orthogonalised

pytestmark = [pytest.mark.gpu, pytest.mark.serial, pytest.mark.leaks_per_module, pytest.mark.timeout(300)]

SHAPES = [(1,), (31,), (1024,), (1025,), (257, 129), (3, 5, 7), (0,), (2048, 512)]


@pytest.fixture(scope="session", autouse=True)
def _cuda_in_process() -> None:
    """The CUDA driver and its libraries stay for the life of the process."""
    with leaks.keep():
        optimizer_of(fused=True).step()


def optimizer_of(*, fused: bool) -> AdamW:
    generator = torch.Generator("cuda").manual_seed(1)
    groups = []
    for weight_decay in (0.1, 0.0):
        parameters = [torch.nn.Parameter(torch.randn(shape, generator=generator, device="cuda")) for shape in SHAPES]
        groups.append(
            {"params": parameters, "weight_decay": weight_decay, "lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}
        )
    return AdamW(groups, moments=torch.bfloat16, seed=2**31 + 7, fused=fused)


def test_it_does_what_the_reference_does() -> None:
    fused, reference = optimizer_of(fused=True), optimizer_of(fused=False)
    generator = torch.Generator("cuda").manual_seed(2)
    different = total = 0
    for _ in range(5):
        for group, other in zip(fused.param_groups, reference.param_groups, strict=True):
            for ours, theirs in zip(group["params"], other["params"], strict=True):
                gradient = torch.randn(ours.shape, generator=generator, device="cuda")
                # A gradient of a transposed product is not contiguous.
                ours.grad = gradient.t().contiguous().t() if gradient.ndim == 2 else gradient
                theirs.grad = gradient.clone()
        scale = torch.tensor(4.0, dtype=torch.float64, device="cuda")  # exact, however a kernel divides
        for optimizer in (fused, reference):
            optimizer.step(grad_scale=scale, found_inf=torch.zeros((), device="cuda"))
        for group, other in zip(fused.param_groups, reference.param_groups, strict=True):
            for ours, theirs in zip(group["params"], other["params"], strict=True):
                # One bf16 step of a moment moves a weight by at most a hundredth of lr.
                torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-5)
                for key in ("exp_avg", "exp_avg_sq"):
                    mine, its = fused.state[ours][key], reference.state[theirs][key]
                    assert mine.dtype == torch.bfloat16
                    torch.testing.assert_close(mine.float(), its.float(), atol=1e-6, rtol=2**-6)
                    different += int((mine != its).sum())
                    total += mine.numel()
    # Fused multiply-adds differ in the last bit of fp32, which now and then carries into bf16: the chance is the same.
    assert different < total / 500


@pytest.mark.parametrize("gradients", [torch.float32, torch.bfloat16])
def test_moments_in_fp32_are_those_of_torchs_own(gradients: torch.dtype) -> None:
    parameters = [torch.nn.Parameter(torch.randn(shape, device="cuda")) for shape in SHAPES]
    options = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    exact = [torch.nn.Parameter(parameter.detach().double()) for parameter in parameters]
    ours, torchs = AdamW([{"params": parameters, **options}]), torch.optim.AdamW(exact, **options)
    for parameter in parameters:
        parameter.grad_dtype = None
    for _ in range(5):
        for parameter, other in zip(parameters, exact, strict=True):
            gradient = torch.randn(parameter.shape, device="cuda").to(gradients)
            parameter.grad, other.grad = gradient * 4, gradient.double()
        ours.step(grad_scale=torch.tensor(4.0, dtype=torch.float64, device="cuda"))
        torchs.step()
    for parameter, other in zip(parameters, exact, strict=True):
        torch.testing.assert_close(parameter.double(), other, atol=1e-6, rtol=1e-6)
        assert ours.state[parameter]["exp_avg"].dtype == torch.float32


def test_values_that_are_no_numbers_stay_what_they_are() -> None:
    optimizer = optimizer_of(fused=True)
    parameter = optimizer.param_groups[0]["params"][2]
    parameter.grad = torch.full_like(parameter, float("inf"))
    optimizer.step()
    assert not torch.isfinite(optimizer.state[parameter]["exp_avg"]).any()


@pytest.mark.parametrize("shape", [(3, 512, 2048), (2, 2048, 512), (2, 512, 512), (2, 300, 700), (1, 17, 5)])
def test_orthogonal_directions_are_those_of_fp64(shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(3):
        generator = torch.Generator("cuda").manual_seed(seed)
        x = torch.randn(shape, generator=generator, device="cuda").bfloat16()
        expected = orthogonalised(x.double())
        found = orthogonalised(x)
        assert found.dtype == torch.bfloat16
        with monkeypatch.context() as patch:
            patch.setattr(muon, "_has_kernel", lambda *_: False)
            plain = orthogonalised(x)
        # Five steps enlarge what bf16 rounds of X, whoever multiplies: 0.028 and 0.011 were seen, 0.08 of 17 × 5.
        assert (found - expected).norm() <= 1.1 * (plain - expected).norm()
        assert (plain - expected).norm() < (0.04 if min(shape[1:]) >= 512 else 0.12) * expected.norm()


@pytest.mark.parametrize("tall", [False, True])
@pytest.mark.parametrize(("side", "depth"), [(256, 64), (768, 192), (512, 2048)])
def test_half_of_a_symmetric_product_is_all_of_it(side: int, depth: int, tall: bool) -> None:
    from atoll.train.optim.kernels import symmetric_product  # needs Triton

    generator = torch.Generator("cuda").manual_seed(4)
    x = torch.randn((3, depth, side) if tall else (3, side, depth), generator=generator, device="cuda").half()
    rows = x.double().transpose(1, 2) if tall else x.double()
    expected = rows @ rows.transpose(1, 2)
    found = symmetric_product(x, x, dtype=torch.float32, tall=tall, alpha=0.5)
    assert (found - 0.5 * expected).norm() < 2e-5 * (0.5 * expected).norm()  # 9e-6 seen, of sums of 2,048
    assert torch.equal(found, found.transpose(1, 2))
    gram = (expected / depth).half()
    found = symmetric_product(gram, gram, gram, dtype=torch.float16, alpha=0.5, beta=2.0)
    exact = 0.5 * gram.double() @ gram.double() + 2 * gram.double()
    assert (found - exact).norm() < 2.5e-4 * exact.norm()  # what fp16 rounds: 2.2e-4


def test_zeros_have_no_direction() -> None:
    assert not orthogonalised(torch.zeros((2, 64, 32), device="cuda", dtype=torch.bfloat16)).any()
