"""Events of a run. The loop emits them on rank 0; consoles, files and trackers take them.

Events travel from the ranks to the terminal of ``atoll train`` as JSON objects: ``encode`` and ``decode``.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, get_args


@dataclass(frozen=True, slots=True)
class RunStarted:
    """The model is built and the first step is next."""

    name: str
    output_dir: str
    parameters: int  # of the whole model
    layout: str  # "FSDP over 2 ranks", ...
    device: str  # "CPU", "NVIDIA H100 80GB HBM3", ...
    world_size: int
    first_step: int  # steps done before; 0 for a fresh start
    steps: int  # of the whole run
    tokens_per_step: int
    resumed_from: str | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """Something that takes a while outside the steps: tokenising, downloading, loading weights, saving."""

    phase: str
    done: float
    total: float | None
    unit: str = ""


@dataclass(frozen=True, slots=True)
class StepDone:
    """One optimizer step. Times are of this step; memory is the peak since the start, of the fullest rank."""

    step: int
    tokens: int  # trained since the beginning of the run, over all ranks
    samples: int  # sequences consumed since the beginning
    loss: float  # over all ranks; nats per trained token, or what the objective divides by
    lr: float
    grad_norm: float
    tokens_per_s: float  # all ranks
    tokens_per_s_per_gpu: float
    step_s: float
    data_wait_s: float
    memory_bytes: int
    mfu: float | None = None
    step_spread_s: float = 0.0  # slowest minus fastest rank
    # sample numbers of the step, as (first, count)
    first_sample: int = 0
    num_samples: int = 0
    metrics: dict[str, float] = field(default_factory=dict)  # of the objective


@dataclass(frozen=True, slots=True)
class Validated:
    """Loss on held-out text, per token, over all ranks."""

    step: int
    loss: float
    tokens: int
    took_s: float
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """A checkpoint is complete."""

    step: int
    path: str
    stall_s: float  # how long training stood still
    took_s: float


@dataclass(frozen=True, slots=True)
class Note:
    """A line for the reader."""

    text: str


@dataclass(frozen=True)
class TrainResult:
    """How a run ended.

    Attributes:
        status: ``finished``, or ``stopped`` where it was asked to stop and has saved; in events also ``failed``.
        step, steps: optimizer steps done, and of the whole run.
        loss, validation_loss: nats per token of the last step, and of the last validation; None where there was none.
        tokens: trained since the beginning, over all ranks.
        took_s: of this session.
        checkpoint: path of the last one; None where none was saved.
        figures: others by name: ``tokens_per_s``, ``memory_bytes``, ``mfu``.
        output_dir: the folder of the run.
        world_size: ranks that trained.
    """

    status: str
    step: int
    loss: float | None
    tokens: int
    took_s: float
    validation_loss: float | None = None
    checkpoint: str | None = None
    figures: dict[str, float] = field(default_factory=dict)
    steps: int = 0
    output_dir: str = ""
    world_size: int = 1


@dataclass(frozen=True, slots=True)
class RunEnded(TrainResult):
    """The run is over."""

    sample: str | None = None  # generated text
    curve: str | None = None  # path of the picture
    error: str | None = None


Event = RunStarted | Progress | StepDone | Validated | CheckpointSaved | Note | RunEnded

_BY_NAME = {each.__name__: each for each in get_args(Event)}


def encode(event: Event) -> dict[str, Any]:
    """The event as a JSON object."""
    return {"event": type(event).__name__, **dataclasses.asdict(event)}


def decode(data: dict[str, Any]) -> Event:
    """The event of a JSON object that ``encode`` made."""
    event: Event = _BY_NAME[data["event"]](**{key: value for key, value in data.items() if key != "event"})
    return event
