"""What only GPUs can show. Run with `pytest -m gpu` on a machine with at least two."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

import atoll as sky
from atoll.providers.gpus import local_gpus

pytestmark = [pytest.mark.gpu, pytest.mark.serial, pytest.mark.timeout(300)]


@pytest.fixture
def pool():  # of one test: it holds every GPU, and other tests have pools of their own
    assert len(local_gpus()) >= 2, f"at least 2 GPUs are needed, this machine has {len(local_gpus())}"
    with sky.ComputePool(nodes=2) as pool:
        yield pool


def test_a_rank_for_each_gpu_and_a_group_over_nccl(pool):
    @sky.compute
    def look():
        import torch
        import torch.distributed as dist

        device = torch.cuda.current_device()
        x = torch.ones(4, device="cuda") * (dist.get_rank() + 1)
        dist.all_reduce(x)
        return dist.get_backend(), device, int(os.environ["LOCAL_RANK"]), x.tolist(), os.environ["CUDA_VISIBLE_DEVICES"]

    results = look() @ pool
    world = pool.world_size
    assert world == len(local_gpus()) // 2 * 2
    assert all(backend == "nccl" for backend, *_ in results)
    assert all(device == local for _, device, local, *_ in results)
    assert all(x == [world * (world + 1) / 2] * 4 for *_, x, _ in results)
    visible = {node: {row[4] for row in rows} for node, rows in results.by_node().items()}
    assert all(len(values) == 1 for values in visible.values()), "ranks of a node see different GPUs"
    assert visible[0] != visible[1]


def test_ddp_trains_in_sync(pool):
    @sky.compute
    def train():
        import hashlib

        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        torch.manual_seed(dist.get_rank())
        model = DistributedDataParallel(torch.nn.Linear(64, 64).cuda())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            model(torch.randn(8, 64, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return hashlib.sha256(model.module.weight.detach().cpu().numpy().tobytes()).hexdigest()

    assert len(set(train() @ pool)) == 1
    assert len(set(train() @ pool)) == 1, "a second call in the same ranks"


def test_cuda_tensors_come_back_on_the_cpu_with_one_line(pool, capfd):
    @sky.compute
    def give():
        import torch

        model = torch.nn.Linear(3, 2).cuda()
        return torch.arange(6, device="cuda").view(2, 3), model, {"again": torch.ones(2, device="cuda")}

    tensor, model, more = give() >> pool
    assert tensor.device.type == "cpu"
    assert tensor.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert model(tensor.float()).shape == (2, 2)
    assert more["again"].device.type == "cpu"
    assert capfd.readouterr().err.count("CUDA") == 1


def test_one_call_on_each_gpu_side_by_side(pool):
    @sky.compute
    def where():
        import torch

        time.sleep(0.5)
        return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)

    uuids = sky.gather(*(where() for _ in range(pool.world_size))) >> pool
    assert len(set(uuids)) == pool.world_size


def test_a_rank_killed_in_a_collective_ends_the_call_at_once(pool):
    @sky.compute
    def die():
        import torch
        import torch.distributed as dist

        x = torch.ones(1, device="cuda")
        dist.all_reduce(x)
        torch.cuda.synchronize()
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            dist.all_reduce(x)
            torch.cuda.synchronize()

    with pytest.raises(sky.WorkerDied) as caught:
        _ = die() @ pool
    assert caught.value.rank == 1
    assert caught.value.signal == signal.SIGKILL
    test_ddp_trains_in_sync(pool)


def test_a_rank_that_raises_frees_the_ones_in_a_collective(pool):
    @sky.compute
    def fail():
        import torch
        import torch.distributed as dist

        x = torch.ones(1, device="cuda")
        dist.all_reduce(x)
        if dist.get_rank() == 1:
            raise ValueError("mine")
        dist.all_reduce(x)
        torch.cuda.synchronize()

    started = time.monotonic()
    with pytest.raises(ValueError, match="mine"):
        _ = fail() @ pool
    assert time.monotonic() - started < 60, "mostly the import of torch and the first communicator"
    test_ddp_trains_in_sync(pool)


def test_nccl_socket_timeout_is_the_groups_timeout():
    @sky.compute
    def timeout():
        import torch
        import torch.distributed as dist

        before = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cuda")).options._timeout
        os.environ["NCCL_SOCKET_TIMEOUT"] = "600"
        os.environ["NCCL_DEBUG"] = "WARN"
        after = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cuda")).options._timeout
        return before.total_seconds(), after.total_seconds()

    with sky.ComputePool(nodes=2) as pool:
        assert all(after == 600 for _, after in timeout() @ pool)
    with sky.ComputePool(nodes=2, env={"NCCL_SOCKET_TIMEOUT": "77"}) as other:
        assert all(before == 77 for before, _ in timeout() @ other)


def test_more_ranks_than_gpus_use_gloo():
    @sky.compute
    def look():
        import torch
        import torch.distributed as dist

        x = torch.ones(2)
        dist.all_reduce(x)
        return dist.get_backend(), x.tolist()

    num = 2 * len(local_gpus())
    with sky.ComputePool(nodes=2, workers_per_node=num) as pool:
        assert look() @ pool == [("gloo", [2.0 * num] * 2)] * (2 * num)


def test_a_driver_that_has_initialised_cuda():
    script = """
import torch, atoll as sky
torch.ones(1, device="cuda").sum().item()
@sky.compute
def add(x):
    return (x.cuda() + 1).cpu()
with sky.ComputePool(nodes=2) as pool:
    results = add(torch.ones(3, device="cuda")) @ pool
assert all(result.tolist() == [2.0, 2.0, 2.0] for result in results)
print("fine")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.endswith("fine\n"), done.stderr


def test_the_hugging_face_trainer_uses_every_gpu(pool, tmp_path):
    @sky.integrations.transformers(backend="nccl")
    @sky.compute
    def fine_tune(output_dir):
        import hashlib

        import torch
        from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
        )
        rows = [{"input_ids": torch.randint(0, 64, (16,)), "labels": torch.tensor(i % 2)} for i in range(64)]
        args = TrainingArguments(
            output_dir=output_dir, max_steps=4, per_device_train_batch_size=4, fp16=True, report_to=[]
        )
        trainer = Trainer(model=BertForSequenceClassification(config), args=args, train_dataset=rows)
        trainer.train()
        state = trainer.model.state_dict()
        digest = hashlib.sha256(b"".join(value.cpu().numpy().tobytes() for value in state.values())).hexdigest()
        return args.world_size, digest

    results = fine_tune(str(tmp_path)) @ pool
    assert {world for world, _ in results} == {pool.world_size}
    assert len({digest for _, digest in results}) == 1
