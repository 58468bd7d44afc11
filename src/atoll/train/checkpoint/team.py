"""The ranks that save and load together: what one of them fails at, all of them hear of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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


class Failures(CheckpointError):
    """Some ranks failed; ``causes`` says at what, by rank."""

    def __init__(self, what: str, causes: Mapping[int, str]) -> None:
        self.causes = dict(causes)
        several: dict[str, list[int]] = {}
        for rank, cause in sorted(self.causes.items()):
            several.setdefault(cause, []).append(rank)
        told = "; ".join(f"{_ranks(ranks)}: {cause}" for cause, ranks in several.items())
        super().__init__(f"{what} failed on {told}")


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
        with Attempt() as attempt:
            value = work()
        causes = {} if attempt.error is None else _causes(attempt.error, self.rank)
        results = self._gather(what, (value, causes))
        failed = {rank: cause for _, part in results for rank, cause in part.items()}
        if failed:
            raise Failures(what, failed) from attempt.error
        return [cast(T, each) for each, _ in results]

    def lead(self, what: str, work: Callable[[], T]) -> T:
        """Do ``work`` on rank 0 and return its value on every rank.

        Raises:
            CheckpointError: it failed, or a rank is gone.
        """
        return self.agree(what, cast(Callable[[], T], work if self.rank == 0 else lambda: None))[0]

    def _gather(self, what: str, item: tuple[T | None, dict[int, str]]) -> list[tuple[T | None, dict[int, str]]]:
        if self.group is None:
            return [item]
        items: list[tuple[T | None, dict[int, str]] | None] = [None] * self.size
        try:
            dist.all_gather_object(items, item, group=self.group)
        except RuntimeError as error:  # a connection closed, or the group's timeout passed
            own = "; ".join(item[1].values())
            raise CheckpointError(
                f"{what}: the ranks could not agree, because one died or hangs ({first_line(error)})"
                + (f"; on rank {self.rank}: {own}" if own else "")
            ) from error
        return [each for each in items if each is not None]


def _causes(error: BaseException, rank: int) -> dict[int, str]:
    if isinstance(error, Failures):
        return error.causes
    if isinstance(error, CheckpointException):
        return {rank: first_line(cause) for rank, (cause, _) in error.failures.items()}
    return {rank: first_line(error)}


def first_line(error: BaseException) -> str:
    """Type and text of an error, on one line."""
    text = str(error).strip().partition("\n")[0]
    return text if isinstance(error, CheckpointError) else f"{type(error).__name__}: {text}".rstrip(": ")


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
