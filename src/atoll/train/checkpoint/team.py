"""The ranks that save and load together: what one of them fails at, all of them hear of."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from atoll.core.errors import CheckpointError

T = TypeVar("T")


class Attempt:
    """``with Attempt() as attempt:`` keeps what failed inside in ``attempt.error``.

    Whatever it is: a rank that stops on an error the others don't know of leaves them waiting. Ctrl-C goes through.
    """

    error: BaseException | None = None

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> bool:
        self.error = error
        return isinstance(error, (Exception, CheckpointException))  # DCP's is no Exception

    def check(self) -> None:
        """Raise what failed."""
        if self.error is not None:
            raise self.error


class Team:
    """Ranks of a Gloo group, or this process alone."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    def agree(self, what: str, work: Callable[[], T]) -> list[T]:
        """Do ``work`` on every rank and return the values by rank, on every rank.

        Args:
            what: an "-ing" phrase that starts the message, e.g. ``writing step 100 to /data/…``.

        Raises:
            CheckpointError: it failed on some rank: the same message on all of them; or a rank is gone.
        """
        value: T | None = None
        causes: dict[int, str] = {}
        with Attempt() as attempt:
            value = work()
        if isinstance(attempt.error, CheckpointException):  # which every rank has, of all
            causes = {rank: first_line(cause) for rank, (cause, _) in attempt.error.failures.items()}
        elif attempt.error is not None:
            causes = {self.rank: first_line(attempt.error)}
        results: list[tuple[T | None, dict[int, str]]] = [(value, causes)] * self.size
        if self.group is not None:
            try:
                dist.all_gather_object(results, (value, causes), group=self.group)
            except RuntimeError as error:  # a connection closed, or the group's timeout passed
                own = "".join(f"; on rank {rank}: {cause}" for rank, cause in causes.items())
                raise CheckpointError(
                    f"{what}: the ranks could not agree, because one died or hangs ({first_line(error)}){own}"
                ) from error
        ranks: dict[str, list[int]] = {}
        for rank, cause in sorted({rank: cause for _, part in results for rank, cause in part.items()}.items()):
            ranks.setdefault(cause, []).append(rank)
        if ranks:
            told = [
                f"{'ranks' if by[1:] else 'rank'} {', '.join(map(str, by))}: {cause}" for cause, by in ranks.items()
            ]
            raise CheckpointError(f"{what} failed on {'; '.join(told)}") from attempt.error
        return [cast(T, each) for each, _ in results]

    def lead(self, what: str, work: Callable[[], T]) -> T:
        """Do ``work`` on rank 0 and return its value on every rank.

        Raises:
            CheckpointError: it failed, or a rank is gone.
        """
        return self.agree(what, cast(Callable[[], T], work if self.rank == 0 else lambda: None))[0]


def first_line(error: BaseException) -> str:
    """Type and text of an error, on one line."""
    text = str(error).strip().partition("\n")[0]
    return text if isinstance(error, CheckpointError) else f"{type(error).__name__}: {text}".rstrip(": ")
