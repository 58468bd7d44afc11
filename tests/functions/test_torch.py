"""The torch process group: there when torch is imported, true to its world, the caller's own where he makes one."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from pathlib import Path
from typing import Any

import pytest

import atoll as sky

pytestmark = pytest.mark.leaks_per_module


@sky.compute
def total() -> tuple[bool, float, int]:
    """Is there a group, what do all ranks add up to in it, and how many are they?"""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        return False, 0.0, 0
    value = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(value)
    return True, float(value), dist.get_world_size()


def has_torch() -> bool:
    import sys

    return "torch" in sys.modules


# -- undecorated ------------------------------------------------------------------------------------------------------
@pytest.mark.long
def test_cold_ranks_then_warm_ones() -> None:
    with sky.ComputePool(nodes=2, logs="quiet") as pool:
        assert pool.run(has_torch) == [False, False]
        assert total() @ pool == [(True, 3.0, 2)] * 2
        assert total() @ pool == [(True, 3.0, 2)] * 2

        def before_import() -> bool:
            import sys

            return bool(sys.modules["torch"].distributed.is_initialized())

        assert pool.run(before_import) == [True, True]
        assert total() >> pool == (False, 0.0, 0), "undecorated, a world of one has no group"
        assert total() @ pool == [(True, 3.0, 2)] * 2


@pytest.mark.long
def test_one_rank_warmed_before_and_one_restarted() -> None:
    with sky.ComputePool(nodes=2, logs="quiet") as pool:
        assert total() >> pool == (False, 0.0, 0)
        assert sorted(pool.map(lambda _: has_torch(), range(2), chunksize=1)) in ([False, True], [True, True])
        assert total() @ pool == [(True, 3.0, 2)] * 2

        def die() -> None:
            if sky.instance_info().rank == 1:
                os._exit(1)
            time.sleep(60)

        with pytest.raises(sky.WorkerDied):
            pool.run(die)
        assert total() @ pool == [(True, 3.0, 2)] * 2, "a rank that counts from the start again meets the other"


def test_ddp_gives_equal_parameters(pool: sky.ComputePool) -> None:
    @sky.compute
    def train() -> Any:
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        rank = sky.instance_info().rank
        torch.manual_seed(rank)
        model: Any = torch.nn.Linear(4, 1)
        if dist.is_initialized():
            model = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    import torch

    first, second = train() @ pool
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.long
def test_only_some_ranks_import_torch() -> None:
    @sky.compute
    def some() -> bool | None:
        if sky.instance_info().rank == 0:
            return None
        import torch.distributed as dist

        return dist.is_initialized()

    with sky.ComputePool(nodes=2, logs="quiet") as pool:
        assert some() @ pool == [None, False]
        assert total() @ pool == [(True, 3.0, 2)] * 2


def test_no_rank_goes_on_before_all_have_joined(pool: sky.ComputePool, tmp_path: Path) -> None:
    """One that is done at once closed connections that another was still making, on a busy machine."""
    mark = tmp_path / "joined"

    def linger(seconds: float) -> None:
        import torch.distributed.distributed_c10d as c10d

        join = getattr(c10d._new_process_group_helper, "__wrapped__", c10d._new_process_group_helper)

        @functools.wraps(join)
        def joined(*args: Any, **options: Any) -> Any:
            group = join(*args, **options)
            time.sleep(seconds)
            mark.touch()
            return group

        c10d._new_process_group_helper = joined if seconds and sky.instance_info().rank == 1 else join

    pool.run(linger, 0.5)
    mark.unlink(missing_ok=True)
    assert pool.run(mark.exists) == [True, True]
    pool.run(linger, 0.0)


def test_the_group_is_gone_after_the_call(pool: sky.ComputePool) -> None:
    @sky.compute
    def keep() -> None:
        import torch.distributed as dist

        assert dist.is_initialized()

    @sky.compute
    def look() -> bool:
        import torch.distributed as dist

        return dist.is_initialized()

    keep() @ pool
    assert look() >> pool is False


@pytest.mark.long  # tests/gang/test_failures.py has two pools at once, with port 29500 taken besides
def test_two_pools_at_once_each_with_its_group(pool: sky.ComputePool) -> None:
    with sky.ComputePool(nodes=3, logs="quiet") as other:
        futures = [pool.submit(total, everywhere=True), other.submit(total, everywhere=True)]
        assert [future.result() for future in futures] == [[(True, 3.0, 2)] * 2, [(True, 6.0, 3)] * 3]


# -- the caller's own group -------------------------------------------------------------------------------------------
def free_port() -> int:
    """One that the kernel gives nobody for a connection of his own before it is used."""
    import socket

    for port in range(20000 + os.getpid() % 1000 * 10, 32768):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no port below 32768 is free")


def own(**how: Any) -> tuple[float, int, int]:
    import torch
    import torch.distributed as dist

    dist.init_process_group(**how)
    value = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(value)
    return float(value), dist.get_world_size(), dist.get_rank()


@pytest.mark.parametrize(
    "how",
    [{}, {"backend": "gloo"}, {"backend": "gloo", "init_method": "env://"}, {"backend": "gloo", "world_size": 2}],
    ids=lambda how: " ".join(how) or "nothing",
)
def test_a_function_that_makes_its_group(pool: sky.ComputePool, how: dict[str, Any]) -> None:
    for _ in range(2):
        assert pool.run(own, **how) == [(3.0, 2, 0), (3.0, 2, 1)]
    result = pool.run_one(own, **{k: v for k, v in how.items() if k != "world_size"})
    assert result == (1.0, 1, 0)
    assert total() @ pool == [(True, 3.0, 2)] * 2


def test_a_function_that_makes_its_group_at_a_port_of_its_own(pool: sky.ComputePool) -> None:
    def make(port: int) -> Any:
        rank = sky.instance_info().rank
        return own(backend="gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)

    for _ in range(2):
        assert pool.run(make, free_port()) == [(3.0, 2, 0), (3.0, 2, 1)]


def test_a_function_that_makes_destroys_and_makes_groups(pool: sky.ComputePool) -> None:
    def make() -> Any:
        import torch.distributed as dist

        results = []
        for _ in range(3):
            results.append(own(backend="gloo"))
            dist.destroy_process_group()
        return results

    assert pool.run(make) == [[(3.0, 2, rank)] * 3 for rank in (0, 1)]


@pytest.mark.long
def test_making_it_twice_is_still_the_callers_error(pool: sky.ComputePool) -> None:
    def twice() -> None:
        own(backend="gloo")
        own(backend="gloo")

    with pytest.raises(ValueError, match="twice"):
        pool.run(twice)
    assert total() @ pool == [(True, 3.0, 2)] * 2


# -- decorated --------------------------------------------------------------------------------------------------------
def body() -> tuple[bool, float, int]:
    return total.local()


@sky.integrations.torch
@sky.compute
def above_bare() -> Any:
    return body()


@sky.compute
@sky.integrations.torch
def below_bare() -> Any:
    return body()


@sky.integrations.torch(backend="gloo", timeout=30)
@sky.compute(timeout=60)
def above_called() -> Any:
    return body()


@sky.compute()
@sky.integrations.torch(backend="gloo")
def below_called() -> Any:
    return body()


@pytest.mark.parametrize("function", [above_bare, below_bare, above_called, below_called], ids=lambda f: f.__name__)
def test_decorated_above_and_below(pool: sky.ComputePool, function: Any) -> None:
    assert function() @ pool == [(True, 3.0, 2)] * 2
    assert function() >> pool == (True, 1.0, 1), "a world of one has its group too"
    assert (function() & function()) >> pool == [(True, 1.0, 1)] * 2
    assert function() @ pool == [(True, 3.0, 2)] * 2


@pytest.mark.long
def test_decorated_in_a_cold_world_of_one_and_a_method(pool: sky.ComputePool) -> None:
    class Trainer:
        def __init__(self, add: float) -> None:
            self.add = add

        @sky.integrations.torch
        @sky.compute
        def fit(self) -> float:
            return body()[1] + self.add

    with sky.ComputePool(nodes=1, logs="quiet") as cold:
        assert above_bare() >> cold == (True, 1.0, 1)
    assert Trainer(0.5).fit() @ pool == [3.5, 3.5]


@pytest.mark.long
def test_nccl_without_a_gpu_for_each_rank() -> None:
    import torch

    @sky.integrations.torch(backend="nccl")
    @sky.compute
    def train() -> str:
        import torch.distributed as dist

        return dist.get_backend()

    too_many = torch.cuda.device_count() + 1
    with sky.ComputePool(workers_per_node=too_many, logs="quiet") as pool:
        with pytest.raises(sky.ConfigError, match=r"backend='nccl' needs a GPU for each.*backend='gloo'"):
            train() @ pool
        assert pool.run(lambda: 1) == [1] * too_many
    with sky.ComputePool(nodes=2, accelerator="A100", logs="quiet") as simulated:
        assert train() @ simulated == ["gloo", "gloo"]
        assert simulated.run(lambda: own(backend="nccl")) == [(3.0, 2, 0), (3.0, 2, 1)]


def test_wrong_arguments_of_the_decorator() -> None:
    with pytest.raises(sky.UsageError, match=r"torch\(backend='nccl'\)"):
        sky.integrations.torch("nccl")
    with pytest.raises(sky.ConfigError, match="timeout=0"):
        sky.integrations.torch(timeout=0)
    assert above_bare.local()[0] is False, "outside a pool the function just runs"


# -- failures ---------------------------------------------------------------------------------------------------------
def test_a_rank_that_raises_while_the_other_sits_in_a_barrier(pool: sky.ComputePool) -> None:
    @sky.compute
    def uneven() -> None:
        import torch.distributed as dist

        dist.barrier()
        if sky.instance_info().rank == 0:
            raise LookupError("rank 0 is to blame")
        dist.barrier()

    future = pool.submit(uneven, everywhere=True)
    error = future.exception(timeout=60)
    assert type(error) is LookupError
    assert "rank 0 is to blame" in str(error)
    assert isinstance(error.__cause__, sky.RemoteTraceback)
    assert error.__cause__.rank == 0
    assert total() @ pool == [(True, 3.0, 2)] * 2


@pytest.mark.long
def test_a_rank_that_raises_while_the_other_imports_torch() -> None:
    @sky.compute
    def uneven(folder: Path) -> None:
        if sky.instance_info().rank == 0:
            (folder / "importing").touch()
            import torch  # noqa: F401 - half imported it could never be imported again

            time.sleep(1000)
        while not (folder / "importing").exists():
            time.sleep(0.01)
        time.sleep(0.2)
        raise LookupError("mine")

    import tempfile

    with tempfile.TemporaryDirectory() as folder, sky.ComputePool(nodes=2, logs="quiet") as pool:
        with pytest.raises(LookupError, match="mine"):
            uneven(Path(folder)) @ pool
        assert total() @ pool == [(True, 3.0, 2)] * 2


def test_the_error_comes_while_the_other_rank_would_wait_for_ever(pool: sky.ComputePool, tmp_path: Path) -> None:
    @sky.compute
    def uneven() -> None:
        import torch.distributed as dist

        if sky.instance_info().rank == 1:
            (tmp_path / "raised").write_text(str(time.monotonic()))
            raise LookupError("mine")
        dist.barrier()

    total() @ pool
    with pytest.raises(LookupError, match="mine"):
        uneven() @ pool
    # A gloo barrier waits 30 minutes; a few times the promised second is far from that.
    assert time.monotonic() - float((tmp_path / "raised").read_text()) < 5.0


def test_groups_come_back_after_a_rank_was_killed(pool: sky.ComputePool) -> None:
    @sky.compute
    def die() -> None:
        import torch.distributed as dist

        if sky.instance_info().rank == 0:  # which has the store of the group
            os._exit(5)
        dist.barrier()

    with pytest.raises(sky.WorkerDied, match="exited with code 5") as caught:
        die() @ pool
    assert caught.value.rank == 0
    assert total() @ pool == [(True, 3.0, 2)] * 2


# -- Hugging Face -----------------------------------------------------------------------------------------------------
def fine_tune() -> Any:
    import tempfile

    import torch
    from datasets import Dataset
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    rank = sky.instance_info().rank
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=2
    )
    model = BertForSequenceClassification(config)
    ids = [[(7 * i + j) % 50 for j in range(8)] for i in range(16)]
    data = Dataset.from_dict({"input_ids": ids, "labels": [i % 2 for i in range(16)]})
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder, max_steps=2, per_device_train_batch_size=2, report_to=[], save_strategy="no",
            disable_tqdm=True, learning_rate=0.01, seed=rank, dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = Trainer(model=model, args=args, train_dataset=data)
        trainer.train()
        return args.world_size, {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def test_the_trainer_sees_every_rank_and_ends_with_equal_weights(pool: sky.ComputePool) -> None:
    import torch

    train = sky.integrations.transformers(sky.compute(fine_tune))
    (first_world, first), (second_world, second) = train() @ pool
    assert (first_world, second_world) == (2, 2)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert pool.run(lambda: os.environ.get("ACCELERATE_USE_CPU")) == [None, None]


@pytest.mark.long
def test_an_accelerator_has_every_rank_and_averages_gradients(pool: sky.ComputePool) -> None:
    @sky.integrations.accelerate
    @sky.compute
    def train() -> Any:
        import torch
        from accelerate import Accelerator

        accelerator = Accelerator()
        model = torch.nn.Linear(4, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(3):
            optimizer.zero_grad()
            accelerator.backward(model(torch.randn(8, 4)).square().mean())
            optimizer.step()
        return accelerator.num_processes, [p.detach() for p in model.parameters()]

    import torch

    (first_world, first), (second_world, second) = train() @ pool
    assert first_world == second_world == 2
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.long
def test_nccl_socket_timeout_set_late_bounds_the_first_collective() -> None:
    def stay_away() -> str:
        import os
        import time

        import torch
        import torch.distributed as dist

        os.environ["NCCL_SOCKET_TIMEOUT"] = "2"  # as the manual's troubleshooting does, inside the function
        if dist.get_rank() == 1:
            time.sleep(20)
            return "away"
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            return f"ended: {error}"
        return "went through"

    with sky.ComputePool(nodes=2, logs="quiet") as pool:
        assert total() @ pool == [(True, 3.0, 2)] * 2  # warm ranks: the group is there before the variable is set
        future = pool.submit(stay_away, everywhere=True)
        results = future.result(timeout=60)
    assert results[0].startswith("ended"), results[0]


@pytest.mark.long
def test_a_rank_whose_group_was_left_half_made_is_replaced() -> None:
    def half() -> None:
        import datetime

        import torch.distributed as dist

        if sky.instance_info().rank == 1:  # alone: nobody answers, and what torch counts groups by is off from now on
            dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=1))
        time.sleep(60)

    with sky.ComputePool(nodes=2, logs="quiet") as pool:
        assert total() @ pool == [(True, 3.0, 2)] * 2
        with pytest.raises(Exception, match=r"(?i)time|connect"):
            pool.run(half)
        assert total() @ pool == [(True, 3.0, 2)] * 2


def test_what_torch_compiles_is_kept_where_the_pools_own_folder_is_not(pool: sky.ComputePool) -> None:
    assert (
        pool.run(os.getenv, "TORCHINDUCTOR_CACHE_DIR")
        == [os.environ.get("TORCHINDUCTOR_CACHE_DIR") or f"{os.environ['ATOLL_HOME']}/compile"] * 2
    )
    with sky.ComputePool(env={"TORCHINDUCTOR_CACHE_DIR": "/mine"}, logs="quiet") as other:
        assert other.run(os.getenv, "TORCHINDUCTOR_CACHE_DIR") == ["/mine"]


@pytest.mark.long
def test_another_pool_has_what_the_first_compiled() -> None:
    def compiled() -> tuple[int, int]:
        import torch
        from torch._dynamo.utils import counters

        torch.compile(lambda x: (x.sin() + 3).sum())(torch.ones(64))
        return counters["inductor"]["fxgraph_cache_miss"], counters["inductor"]["fxgraph_cache_hit"]

    found = []
    for _ in range(2):
        with sky.ComputePool(logs="quiet") as pool:
            found.append(pool.run_one(compiled))
    assert found == [(1, 0), (0, 1)]
