"""What a run minimises, as one class; each kind is a module of ``objectives``, or a user's own class."""

from __future__ import annotations

import dataclasses
import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from atoll.core.errors import ConfigError
from atoll.train import objectives
from atoll.train.batch import Batch
from atoll.train.data.packing import Sample
from atoll.train.events import StepDone
from atoll.train.models.logprobs import LogProbs
from atoll.train.recipe.schema import ObjectiveSection
from atoll.train.user_code import load_function


class Objective(ABC):
    """A loss, written as on one device: every layout gives its sums and their gradients.

    The loss of a step is the sum of ``loss`` over all sequences divided by the sum of ``weight``; so are the metrics.
    """

    metrics: tuple[str, ...] = ()
    """Names of the sums that ``loss`` returns beside: figures of their own in ``metrics.jsonl``."""

    def fields(self, sample: Sample) -> Mapping[str, NDArray[Any]]:
        """What a sequence has in ``Batch.extra``, each [S, ...]; called on the loader's thread."""
        return {}

    @abstractmethod
    def loss(self, logprobs: LogProbs, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The loss of a micro-batch and what ``metrics`` names, which gets no gradient: sums, one number each.

        A sequence without labels must add nothing: such ones fill up the last batch.
        """

    def weight(self, batch: Batch) -> float:
        """What the sums of whole sequences, in host memory, are divided by: their trained tokens."""
        return batch.num_trained


def make_objective(section: ObjectiveSection) -> Objective:
    """The objective of a recipe.

    Raises:
        ConfigError: ``python`` names something that isn't there or gives no objective.
    """
    where = f"[objective] python = {section.python!r}"
    try:
        if section.python is None:
            made = importlib.import_module(f"{objectives.__name__}.{section.kind}").OBJECTIVE()
        else:
            made = load_function(section.python, "[objective] python")()
    except TypeError as error:  # it takes arguments, or lacks a method
        raise ConfigError(f"{where}: {error}") from error
    if not isinstance(made, Objective):
        raise ConfigError(f"{where} returned {type(made).__name__}: expected an atoll.train.objective.Objective")
    if taken := {each.name for each in dataclasses.fields(StepDone)}.intersection(made.metrics):
        raise ConfigError(f"{where}: its metric {min(taken)!r} is a figure of every step: give it another name")
    return made


def use_objective(model: nn.Module, objective: Objective, chunk_tokens: int) -> None:
    """Have the part of ``model`` that computes the loss, if it has one, compute this one."""
    for module in model.modules():
        if isinstance(getattr(module, "objective", None), Objective):
            module.objective, module.chunk_tokens = objective, chunk_tokens  # type: ignore[assignment]


def sums_of(objective: Objective, logprobs: LogProbs, batch: Batch) -> Tensor:
    """Loss and metrics of a micro-batch as one vector, [1 + number of metrics]; the first alone has a gradient."""
    names = objective.metrics
    match objective.loss(logprobs, batch):
        case (Tensor() as loss, Mapping() as sums):
            parts: list[Any] = [loss, *map(sums.get, names)]
            if all(isinstance(each, Tensor) and each.numel() == 1 for each in parts):
                return torch.cat([loss.reshape(1), *(each.detach().reshape(1).to(loss) for each in parts[1:])])
    raise ConfigError(
        f"[objective] {type(objective).__name__}.loss has to return the loss and a dict with {list(names)}, each a "
        "tensor of one number: summed over the micro-batch"
    )
