"""Pipeline parallelism: the model cut into stages, and the order in which micro-batches pass through them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
    _PipelineSchedule,
)

from atoll.train.batch import Batch
from atoll.train.data.packing import UNTRAINED
from atoll.train.models.parts import Decoder
from atoll.train.parallel.layout import layers_of_stage, num_micro_batches, num_stages_per_rank
from atoll.train.parallel.mesh import Mesh
from atoll.train.recipe.schema import Recipe

_SCHEDULES: dict[str, Callable[..., _PipelineSchedule]] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}


def cut(model: Decoder, stage: int, num_stages: int) -> Decoder:
    """Leave of ``model`` what belongs to one stage."""
    keep = {str(number) for number in layers_of_stage(stage, num_stages, model.config.layers)}
    for number in list(model.blocks):
        if number not in keep:
            del model.blocks[number]
    if stage > 0:
        model.embed = model.learned_positions = None
    if stage < num_stages - 1:
        model.norm = model.head = None
    return model


class _Stage(PipelineStage):
    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """What torch 2.11 sends to open the ways between stages; Gloo has none from the tip of a V to itself."""
        made: list[dist.P2POp] = super()._get_init_p2p_neighbors_ops()
        return [each for each in made if each.group_peer != self.group_rank]


class Pipeline:
    """Runs the micro-batches of a step through this rank's stages."""

    def __init__(
        self, stages: dict[int, nn.Module], recipe: Recipe, mesh: Mesh, dtype: torch.dtype, num_sums: int
    ) -> None:
        last = mesh.layout.pipeline * num_stages_per_rank(recipe) - 1
        micro_batch = recipe.train.micro_batch
        self.num_micro_batches = num_micro_batches(recipe, mesh.layout)
        self._has_first, self._has_last = 0 in stages, last in stages
        length = recipe.train.seq_len // mesh.layout.context
        split = mesh.layout.tensor if recipe.parallel.sequence_parallel else 1
        hidden = torch.empty(micro_batch, length // split, recipe.model.dim, dtype=dtype, device="meta")
        tokens = torch.empty(micro_batch, recipe.train.seq_len, dtype=torch.int64, device="meta")
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        sums = torch.empty(num_sums, dtype=wide, device="meta")
        made = [
            _Stage(
                module,
                number,
                last + 1,
                mesh.device,
                input_args=(tokens if number == 0 else hidden.requires_grad_(),),
                output_args=(sums if number == last else hidden.requires_grad_(),),
                group=mesh.group("pipeline"),
            )
            for number, module in stages.items()
        ]
        make = _SCHEDULES[recipe.parallel.pipeline_schedule]
        looped = recipe.parallel.pipeline_schedule not in ("gpipe", "1f1b")
        self._schedule = make(
            made if looped else made[0],
            n_microbatches=self.num_micro_batches,
            loss_fn=self._loss,
            scale_grads=False,
        )
        self._sums = torch.zeros(num_sums, device=mesh.device)

    def _loss(self, sums: Tensor, _target: Tensor) -> Tensor:
        self._sums = self._sums + sums.detach()
        return sums[0].clone()  # schedules that part the backward pass detach it in place, which no view can be

    def train(self, batches: Sequence[Batch]) -> Tensor:
        """Forward and backward of a step's micro-batches; their sums on ranks with the last stage, zeros elsewhere."""
        return self._run(self._schedule.step, batches)

    def evaluate(self, batches: Sequence[Batch]) -> Tensor:
        """As ``train``, without gradients."""
        # A schedule takes a fixed number of micro-batches: what is missing trains nothing.
        filler = replace(batches[-1], labels=torch.full_like(batches[-1].labels, UNTRAINED))
        batches = [*batches, *[filler] * (self.num_micro_batches - len(batches))]
        if not isinstance(self._schedule, ScheduleZBVZeroBubble):
            return self._run(self._schedule.eval, batches)
        # Torch's own eval of it hands gradients, which there are none of, from one stage of a rank to its other.
        whole = self._schedule.pipeline_order_with_comms
        forward = ("FORWARD", "SEND_F", "RECV_F", "UNSHARD", "RESHARD")
        self._schedule.pipeline_order_with_comms = {
            rank: [action for action in actions if action.computation_type.name in forward]
            for rank, actions in whole.items()
        }
        try:
            return self._run(self._schedule.eval, batches)
        finally:
            self._schedule.pipeline_order_with_comms = whole

    def _run(self, step: Callable[..., Any], batches: Sequence[Batch]) -> Tensor:
        whole = {name: torch.cat([batch.fields[name] for batch in batches]) for name in batches[0].fields}
        inputs = (whole["tokens"],) if self._has_first else ()
        target = {"target": whole["labels"]} if self._has_last else {}
        self._sums = torch.zeros_like(self._sums)
        try:
            step(*inputs, **target, **whole)
        except RuntimeError as error:
            raise error.__cause__ or error from None  # torch wraps what a stage raises, also out of memory
        return self._sums
