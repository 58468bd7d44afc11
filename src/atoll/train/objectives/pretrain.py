"""Next-token prediction."""

from __future__ import annotations

from torch import nn

from atoll.train.models.head import ChunkedCrossEntropy
from atoll.train.models.parts import Decoder
from atoll.train.recipe.schema import ObjectiveSection


class Pretrain:
    """The sum over tokens of the negative log-likelihood of the next one."""

    def __init__(self, section: ObjectiveSection) -> None:
        self._chunk_tokens = section.chunk_tokens

    def install(self, model: nn.Module) -> None:
        """Put the loss into a model's head. A model of the user's own brings or inherits its own."""
        if isinstance(model, Decoder) and model.head is not None:
            model.head.token_loss = ChunkedCrossEntropy(self._chunk_tokens)
