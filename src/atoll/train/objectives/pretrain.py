"""Next-token prediction."""

from __future__ import annotations

from torch import Tensor

from atoll.train.batch import Batch
from atoll.train.models.logprobs import LogProbs
from atoll.train.objective import Objective


class Pretrain(Objective):
    """The negative log-likelihood of the next token, averaged over all trained tokens."""

    def loss(self, logprobs: LogProbs, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """As ``Objective.loss``."""
        return logprobs.nll(), {}


OBJECTIVE = Pretrain
