"""``sky.DistributedSampler``, and the shuffled order that it shares with ``sky.shard``."""

from __future__ import annotations

import hashlib
import operator
import secrets
import sys
from array import array
from collections.abc import Iterator, Sequence, Sized
from itertools import chain
from typing import Any

from atoll.core.context import CallContext, current
from atoll.core.errors import ConfigError, UsageError
from atoll.core.validation import suggests_keywords

__all__ = ["DistributedSampler", "agreed_seed", "loaded_type", "permutation", "rank_and_world_size"]

# splitmix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014).
_GAMMA, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1

# Below this length sorting in Python is quicker than importing NumPy.
_NUMPY_FROM = 10_000


class DistributedSampler(Sized):
    """Deals the indices of a dataset out to the ranks of a call, for ``DataLoader(dataset, sampler=...)``.

    Rank r takes positions r, r + world, r + 2 * world, ... of the epoch's order. So that no rank runs short while
    the others wait in a collective, every rank gets equally many: the order is continued from its beginning until it
    divides evenly, or its tail is dropped with ``drop_last``. This is what torch's sampler of the same name does,
    without needing torch or a process group. Outside a pool it is one rank of one.

    Rank and world size are those of the call it was made in. One made outside a pool and sent to a task takes those
    of the task.

    Args:
        dataset: anything with a length.
        shuffle: a new order for each epoch, the same on every rank. Call ``set_epoch`` before each epoch.
        seed: decides the orders. None takes one that the ranks of this call agree on; every rank must then make its
            samplers and shuffled shards in the same order.
        drop_last: drop the tail that doesn't divide evenly, instead of repeating the beginning.

    Raises:
        UsageError: ``dataset`` has no length, or is an iterable dataset, which takes no sampler.
    """

    @suggests_keywords
    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int | None = 0, drop_last: bool = False) -> None:
        _require_map_style(dataset)
        for name, value in (("shuffle", shuffle), ("drop_last", drop_last)):
            if type(value).__name__ not in ("bool", "bool_"):
                # torch's own sampler takes num_replicas and rank in these places
                more = "; rank and world size come from the pool, so leave them out" if type(value) is int else ""
                raise UsageError(f"DistributedSampler: {name}={value!r}: expected True or False{more}")
        self.dataset = dataset
        self.shuffle = bool(shuffle)
        self.seed = resolve_seed(seed)
        self.drop_last = bool(drop_last)
        self.epoch = 0
        self._fixed = None if current() is None else rank_and_world_size()

    @property
    def rank(self) -> int:
        """Which rank this sampler deals to."""
        return (self._fixed or rank_and_world_size())[0]

    @property
    def num_replicas(self) -> int:
        """How many ranks share the dataset."""
        return (self._fixed or rank_and_world_size())[1]

    @property
    def num_samples(self) -> int:
        """How many indices each rank gets in an epoch."""
        n, world = len(self.dataset), self.num_replicas
        return n // world if self.drop_last else -(-n // world)

    @property
    def total_size(self) -> int:
        """How many indices all ranks get together in an epoch, repeated ones included."""
        return self.num_samples * self.num_replicas

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        n, total, rank, world = len(self.dataset), self.total_size, self.rank, self.num_replicas
        order = permutation(n, self.seed, self.epoch) if self.shuffle else range(n)
        whole = order[rank : min(n, total) : world]
        # Positions past the end continue from the beginning, round and round where the ranks outnumber the samples.
        wrapped = range(rank + len(whole) * world, total, world)
        return chain(whole, (order[position % n] for position in wrapped))

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration takes; without it each epoch repeats the first order.

        Raises:
            ConfigError: ``epoch`` is not a whole number.
        """
        try:
            self.epoch = operator.index(epoch)
        except TypeError:
            raise ConfigError(
                f"set_epoch({epoch!r}): expected a whole number, as in `for epoch in range(3): "
                f"sampler.set_epoch(epoch)`"
            ) from None

    def __repr__(self) -> str:
        return (
            f"DistributedSampler(n={len(self.dataset)}, rank={self.rank}, num_replicas={self.num_replicas}, "
            f"shuffle={self.shuffle}, seed={self.seed}, drop_last={self.drop_last}, epoch={self.epoch})"
        )


def rank_and_world_size() -> tuple[int, int]:
    """Global rank and world size of the running call; (0, 1) outside a pool."""
    context = current()
    return (0, 1) if context is None else (context.rank, context.world_size)


def permutation(n: int, *key: int) -> Sequence[int]:
    """The numbers 0 to n - 1 in a random order that is a function of ``n`` and ``key`` alone.

    Element i gets the i-th output of splitmix64, and the elements are sorted by it: with NumPy or without, in whichever
    version, while NumPy does not promise that its own ``permutation`` stays as it is. splitmix64 is a bijection of its
    counter, so no two elements tie.

    Returns:
        an array of n 64-bit integers, which can be handed to NumPy or torch without a copy.
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    start = int.from_bytes(digest, "little")
    if n >= _NUMPY_FROM or "numpy" in sys.modules:
        try:
            import numpy as np
        except ImportError:
            pass  # not installed: the same order, slower
        else:
            order = array("q")
            mixed = np.argsort(_splitmix64(np.arange(n, dtype=np.uint64), start))
            order.frombytes(mixed.astype(np.int64, copy=False).view(np.uint8).data)
            return order
    return array("q", sorted(range(n), key=lambda i: _splitmix64(i, start)))


def _splitmix64(i: Any, start: int) -> Any:
    """Output ``i``, an int or an array of unsigned 64-bit integers, of the generator that begins at ``start``."""
    z = ((i + 1) * _GAMMA + start) & _MASK
    z = ((z ^ (z >> 30)) * _MIX_1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX_2) & _MASK
    return z ^ (z >> 31)


def resolve_seed(seed: int | None) -> int:
    """``seed`` as a plain int, or a seed that the ranks of this call agree on where it is None."""
    if seed is None:
        return agreed_seed()
    try:
        return operator.index(seed)
    except TypeError:
        raise UsageError(f"seed={seed!r} is a {type(seed).__name__}, expected an int or None") from None


# The call that last drew an agreed seed, and how many it has drawn. The call is held, so its identity can't be reused.
_drawn: tuple[CallContext | None, int] = (None, 0)


def agreed_seed() -> int:
    """A seed that is equal on all ranks of the running call without any message between them.

    It is made of the call's seed and the number of seeds drawn before in this call, so two draws differ, and ranks
    agree as long as they draw in the same order. Outside a pool it is simply random.
    """
    global _drawn
    context = current()
    if context is None:
        return secrets.randbits(63)
    count = _drawn[1] + 1 if _drawn[0] is context else 0
    _drawn = (context, count)
    digest = hashlib.blake2b(repr((context.seed, count)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def loaded_type(module: str, name: str) -> Any:
    """The class ``module.name`` for ``isinstance``, or an empty tuple where that module isn't loaded.

    An object can only be an instance of a class whose module is loaded, so nothing needs importing to ask.
    """
    return getattr(sys.modules.get(module), name, ())


def _require_map_style(dataset: object) -> None:
    kind = type(dataset).__name__
    if isinstance(dataset, loaded_type("torch.utils.data", "DataLoader")):
        raise UsageError("DistributedSampler needs a dataset, and got a DataLoader: pass loader.dataset")
    if isinstance(
        dataset, (loaded_type("torch.utils.data", "IterableDataset"), loaded_type("datasets", "IterableDataset"))
    ):
        raise UsageError(
            f"DistributedSampler needs a dataset with a length and indices, and {kind} is an iterable dataset: a "
            "DataLoader takes no sampler for it. Leave sampler out and let each rank iterate over its own part, for "
            "instance itertools.islice(items, info.rank, None, info.world_size) with info = sky.instance_info()"
        )
    try:
        len(dataset)  # type: ignore[arg-type]  # asking is the point
    except TypeError as error:
        raise UsageError(
            f"DistributedSampler needs a dataset with a length, and {kind} has none ({error}): give it a __len__, or "
            "pass list(...) of it"
        ) from error
