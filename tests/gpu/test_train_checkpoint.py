"""Checkpoints of tensors on a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

import ranks
from atoll.train.checkpoint.staging import HostCopy
from checkpoints import checkpointer, load

pytestmark = pytest.mark.gpu


def save_from_gpu(root: str) -> tuple[bool, bool, float, float]:
    """Both ranks on one GPU: the copies are theirs, the collectives of saving are Gloo's."""
    torch.cuda.set_device(0)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    number = dist.get_rank() + 1.0
    part = torch.zeros(50_000_000, device="cuda")
    tensors = {
        "big": DTensor.from_local(part, mesh, [Shard(0)]),
        "bfloat16": torch.ones(7, 3, device="cuda").bfloat16().t(),
    }
    saver = checkpointer(root)
    stalls = []
    for step in (1, 2):
        part.fill_(number * step)  # still under way when the copy is asked for
        saver.save(step, tensors, {})
        saver.before_change()
        part.fill_(-1)
        stalls.append(saver.wait().stall_s)
    copies = HostCopy()
    page_locked = all(copy.is_pinned() for copy in copies.take(tensors).values())
    copies.close()
    load(saver, 2, tensors)
    same = bool(part.eq(number * 2).all()) and bool(tensors["bfloat16"].eq(1).all())
    load(saver, 1, tensors)
    same = same and bool(part.eq(number).all())
    saver.close()
    return same, page_locked, stalls[0], stalls[1]


def test_what_is_saved_is_the_state_at_the_call(tmp_path):
    for same, page_locked, first_s, second_s in ranks.run(2, save_from_gpu, str(tmp_path)):
        assert same
        assert page_locked
        assert second_s < 5, (first_s, second_s)
