"""What the driver knows of each rank and node of a gang."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from atoll.gang.call import Call


class Phase(enum.Enum):
    """Where a rank is. Only one that is ``READY`` and has no call can take one."""

    STARTING = "its process was asked for"
    READY = "it takes calls, or runs one"
    ENDING = "it said that it can't take another call, or was ordered to be killed"
    GONE = "its node is lost"


@dataclass(slots=True, eq=False)
class RankState:
    """What the driver knows of a rank.

    Attributes:
        call: what it was given and has not ended; ``number`` is that attempt's.
        starts: how often it came up.
        functions: digests of those that it keeps, the latest last.
        printed: it wrote something since its last call ended.
    """

    rank: int
    node: int
    phase: Phase = Phase.STARTING
    call: Call | None = None
    number: int = 0
    pid: int = 0
    port: int = 0
    has_torch: bool = False
    has_framework: bool = False
    starts: int = 0
    early_deaths: int = 0
    functions: dict[str, None] = field(default_factory=dict)
    path: tuple[str, ...] | None = None
    printed: bool = False

    @property
    def running(self) -> Call | None:
        """The call that it has not ended, and that has not ended without it."""
        call = self.call
        if call is None or call.done or call.number != self.number or self.rank in call.ended:
            return None
        return call


@dataclass(slots=True, eq=False)
class NodeState:
    """What the driver knows of a node's agent.

    Attributes:
        ended: why its agent said it ends; ``silent`` why it was given up.
        restarts: since a rank of it last came up.
        asked_s: since when it owes an answer.
    """

    node: int
    deaf_s: float
    ended: str | None = None
    silent: str | None = None
    restarts: int = 0
    ups: int = 0
    asked_s: float | None = None
