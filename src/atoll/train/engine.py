"""Forward and backward of one optimizer step on any layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from atoll.train.batch import Batch
from atoll.train.models.init import materialize
from atoll.train.models.registry import build
from atoll.train.objective import make_objective, use_objective
from atoll.train.parallel.apply import parallelize, weights_of
from atoll.train.parallel.gradients import Weights
from atoll.train.parallel.layout import num_stages_per_rank, stage_numbers
from atoll.train.parallel.mesh import Mesh
from atoll.train.parallel.pipeline import Pipeline, cut
from atoll.train.parallel.plan import Plan
from atoll.train.parallel.precision import number_formats, scale_float8


class Engine:
    """A model spread over the mesh, and what it does with micro-batches.

    Attributes:
        objective: what it minimises.
        stages: the parts of the model on this rank, by their number; a single one without a pipeline.
        weights: their parameters as the optimizer sees them.
    """

    def __init__(self, plan: Plan, mesh: Mesh, set_weights: Callable[[nn.Module], None]) -> None:
        """Build the model on the meta device, parallelize it, allocate this rank's part and set its weights.

        Args:
            set_weights: fills the parameters of a stage, in place.
        """
        recipe, formats = plan.recipe, number_formats(plan.recipe, mesh.device)
        self.mesh = mesh
        self.objective = make_objective(recipe.objective)
        self._num_sums = 1 + len(self.objective.metrics)
        self._plan = plan
        self.stages: dict[int, nn.Module] = {}
        is_piped = mesh.layout.pipeline > 1
        numbers = stage_numbers(recipe, mesh.place["pipeline"], mesh.layout.pipeline) if is_piped else [0]
        num_stages = mesh.layout.pipeline * num_stages_per_rank(recipe)
        for number in numbers:
            model = build(recipe.model, device="meta", dtype=formats.master)
            use_objective(model, self.objective, recipe.objective.chunk_tokens)
            if is_piped:
                model = cut(model, number, num_stages)  # type: ignore[arg-type]  # ``layout.check`` refuses others
            parallelize(model, plan, mesh)
            materialize(model, mesh.device)
            set_weights(model)
            self.stages[number] = model
        self._kept = [
            (stage, name)
            for stage in self.stages.values()
            if (own := dict(stage.named_buffers()))
            for name in stage.state_dict()
            if name in own
        ]
        self.weights: Weights = weights_of(list(self.stages.values()), recipe, mesh)
        self._pipeline = Pipeline(self.stages, recipe, mesh, formats.compute, self._num_sums) if is_piped else None

    @property
    def buffers(self) -> dict[str, Tensor]:
        """What a user's model keeps beside its parameters, and would save, as it is now. Atoll's own keep nothing."""
        return {name: stage.get_buffer(name) for stage, name in self._kept}

    @property
    def counts_loss(self) -> bool:
        """Whether this rank's loss goes into the sum over all ranks: tensor and context ranks have copies of one."""
        return self.mesh.place["tensor"] == self.mesh.place["context"] == 0

    @property
    def counts_tokens(self) -> bool:
        """Whether this rank's tokens go into the sum over all ranks: of those that share batches, one's do."""
        return self.counts_loss and self.mesh.place["pipeline"] == 0

    @property
    def evaluation_batches(self) -> int:
        """How many micro-batches ``evaluate`` is best given at a time."""
        return 1 if self._pipeline is None else self._pipeline.num_micro_batches

    def forward_backward(self, batches: Sequence[Batch]) -> Tensor:
        """Sum the gradients of a step's micro-batches into the weights.

        Returns:
            the sums of loss and metrics of this rank's sequences; zeros on ranks without the last stage.
        """
        self.weights.begin()
        if self._pipeline is not None:
            self.weights.last_micro_batch()
            total = self._pipeline.train(batches)
        else:
            (model,) = self.stages.values()
            total = torch.zeros(self._num_sums, device=self.mesh.device)
            for number, batch in enumerate(batches):
                if number == len(batches) - 1:
                    self.weights.last_micro_batch()
                sums = model(batch.tokens, **batch.fields)
                sums[0].backward()
                total = total + sums.detach()
        self.weights.finish()
        return total

    def publish(self) -> None:
        """The optimizer has moved the weights, or they were loaded: the model computes with them from now on."""
        self.weights.publish()
        for buffer in self.buffers.values():
            dist.broadcast(buffer, src=0)  # each data rank kept its own
        if self._plan.gathers_float8:
            for stage in self.stages.values():
                scale_float8(stage)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> Tensor:
        """As ``forward_backward``, without gradients."""
        for stage in self.stages.values():
            stage.eval()  # a user's model may drop out, or keep statistics
        try:
            if self._pipeline is not None:
                return self._pipeline.evaluate(batches)
            (model,) = self.stages.values()
            return torch.stack([model(batch.tokens, **batch.fields) for batch in batches]).sum(dim=0)
        finally:
            for stage in self.stages.values():
                stage.train()
