"""``sky.shard``: each rank's part of the data, in the type it came in."""

from __future__ import annotations

import copy
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeVar, TypeVarTuple, overload

from atoll.core.errors import ConfigError, UsageError
from atoll.core.validation import checks_arguments
from atoll.functions.sampler import loaded_type, permutation, rank_and_world_size, resolve_seed
from atoll.wire.pickle_errors import article

__all__ = ["shard"]

T = TypeVar("T")
U = TypeVar("U")
Ts = TypeVarTuple("Ts")


@overload
def shard(data: T, /, *, shuffle: bool = False, seed: int | None = 0, drop_last: bool = False) -> T: ...


@overload
def shard(
    first: T, second: U, /, *rest: *Ts, shuffle: bool = False, seed: int | None = 0, drop_last: bool = False
) -> tuple[T, U, *Ts]: ...


# mypy doesn't see that `*arrays: Any` takes every `*Ts`.
@checks_arguments  # type: ignore[misc]
def shard(*arrays: Any, shuffle: bool = False, seed: int | None = 0, drop_last: bool = False) -> Any:
    """This rank's part of the data: the parts of all ranks are disjoint and together are the whole.

    Rank r of w gets elements r, r + w, r + 2w, ...: lengths differ by at most one, and nothing is repeated. Where the
    ranks step together (DDP), use ``drop_last`` or ``sky.DistributedSampler``, which keep the lengths equal. Outside a
    pool there is one rank, which gets everything.

    Types are kept, and without ``shuffle`` NumPy arrays, torch tensors, memory views and ranges come as views:

    - list, tuple, str, bytes, bytearray, ``array.array``; a range stays one unless shuffled, then it is a list;
    - NumPy arrays and their subclasses, torch tensors, other arrays, pandas objects: by position along the first axis,
      index labels kept. (A shuffled ``memmap`` is read into memory and is a plain array, as NumPy has it.)
    - a dict: each value is sharded, and all must have one length;
    - a named tuple is a record like a dict: each field is sharded. One that holds no arrays (only numbers, strings,
      None ...) is taken as a sequence of its fields, and the part is a plain tuple, as fewer fields aren't that type;
    - a Hugging Face ``Dataset`` is selected from, not read; a ``DatasetDict`` split by split (alone only);
    - a map-style torch ``Dataset`` becomes a ``Subset``;
    - anything else with a length and ``[]`` becomes a list of its items.

    Args:
        arrays: data of one length. A pair is two arguments, ``sky.shard(x, y)``: one tuple ``(x, y)`` is two elements.
        shuffle: deal out in a random order, the same for all arrays and ranks.
        seed: decides that order. Equal seeds and lengths give equal orders in separate calls too. None takes a new
            seed that the ranks of this call agree on; every rank must then make its shuffled shards in the same order.
        drop_last: give every rank one block of n // w neighbours, and drop the n % w left over.

    Returns:
        the part of the one array, or a tuple with the part of each.

    Raises:
        ConfigError: no arrays, or arrays of different lengths (a ``ValueError``).
        UsageError: something that can't be indexed, such as a generator or a DataLoader (a ``TypeError``).
    """
    if not arrays:
        raise ConfigError("shard() got no arrays, expected at least one: x_local = sky.shard(x)")
    key = resolve_seed(seed) if shuffle else None
    if isinstance(arrays[0], loaded_type("datasets", "DatasetDict")) and len(arrays) == 1:
        return type(arrays[0])({name: _shard((split,), key, drop_last)[0] for name, split in arrays[0].items()})
    parts = _shard(arrays, key, drop_last)
    return parts[0] if len(parts) == 1 else parts


def _shard(arrays: tuple[Any, ...], key: int | None, drop_last: bool) -> tuple[Any, ...]:
    n = _common_length((f"argument {i}", x) for i, x in enumerate(arrays))
    rank, world = rank_and_world_size()
    block = n // world
    cut = slice(rank * block, (rank + 1) * block) if drop_last else slice(rank, None, world)
    part = _Part(cut, range(n)[cut] if key is None else permutation(n, key)[cut], shuffled=key is not None)
    return tuple(_take(x, part) for x in arrays)


@dataclass(frozen=True, slots=True)
class _Part:
    """Which elements a rank gets: ``indices``, and where not ``shuffled`` the ``cut`` that selects just those."""

    cut: slice
    indices: Sequence[int]
    shuffled: bool

    def items(self, x: Any) -> Iterator[Any]:
        return (x[i] for i in self.indices)

    @property
    def index(self) -> Any:
        """What an array is to be indexed with: the slice, for a view, or the indices."""
        if not self.shuffled:
            return self.cut
        numpy = sys.modules.get("numpy")
        return list(self.indices) if numpy is None else numpy.asarray(self.indices)


def _take(x: Any, part: _Part) -> Any:
    """The part of one array. The kinds of data are asked for in the same order as in ``_length``."""
    if isinstance(x, loaded_type("datasets", "Dataset")):
        return x.select(part.index if part.shuffled else part.indices)
    if isinstance(x, loaded_type("torch.utils.data", "Dataset")):
        return loaded_type("torch.utils.data", "Subset")(x, part.indices)
    if hasattr(type(x), "iloc"):
        return x.iloc[part.index]
    if _is_array(x):
        return x[part.index]
    if isinstance(x, Mapping):
        taken = copy.copy(x) if isinstance(x, MutableMapping) else {}
        taken.update((name, _take(value, part)) for name, value in x.items())
        return taken
    if _is_record(x):
        return type(x)._make(_take(field, part) for field in x)
    return _take_sequence(x, part)


def _take_sequence(x: Any, part: _Part) -> Any:
    if type(x) in (list, tuple, str, bytes, bytearray, range, array, memoryview) and not part.shuffled:
        return x[part.cut]
    if isinstance(x, list) and type(x) is not list:
        taken = copy.copy(x)  # a subclass may have any constructor and attributes
        taken[:] = list(part.items(x))
        return taken
    if isinstance(x, str):
        return "".join(part.items(x))
    if isinstance(x, array):
        return array(x.typecode, part.items(x))
    kind = next((kind for kind in (tuple, bytes, bytearray) if isinstance(x, kind)), list)
    return kind(part.items(x))


def _is_array(x: object) -> bool:
    return hasattr(x, "shape") and hasattr(type(x), "__getitem__") and not isinstance(x, memoryview)


def _is_record(x: object) -> bool:
    """Whether x is a named tuple with at least one array among its fields."""
    return isinstance(x, tuple) and hasattr(type(x), "_make") and any(not _is_scalar(field) for field in x)


def _is_scalar(x: object) -> bool:
    return isinstance(x, (str, bytes)) or getattr(x, "shape", None) == () or not hasattr(type(x), "__len__")


def _length(x: Any, name: str) -> int:
    _refuse(x, name)
    if isinstance(x, (loaded_type("datasets", "Dataset"), loaded_type("torch.utils.data", "Dataset"))):
        return len(x)
    if _is_array(x):
        return int(x.shape[0])
    if isinstance(x, Mapping):
        return _common_length((f"{name}[{key!r}]", value) for key, value in x.items())
    if _is_record(x):
        return _common_length((f"{name}.{key}", value) for key, value in zip(x._fields, x, strict=True))
    return len(x)


def _common_length(named: Iterable[tuple[str, Any]]) -> int:
    """The one length that all have; 0 where there are none."""
    first: tuple[str, int] | None = None
    for name, x in named:
        n = _length(x, name)
        what = f"{name} ({type(x).__name__}) has length {n}"
        if first is not None and n != first[1]:
            raise ConfigError(
                f"shard() needs arrays of one length, as their elements belong together: {first[0]}, {what}. "
                "Cut them to one length first, or shard them in separate calls"
            )
        first = first or (what, n)
    return 0 if first is None else first[1]


def _refuse(x: Any, name: str) -> None:
    """Raise for what has no elements to pick by position, saying what to pass instead."""
    kind = type(x).__name__
    advice = None
    if x is None:
        advice = "pass the data itself (a function that forgets its return gives None)"
    elif isinstance(x, loaded_type("torch.utils.data", "DataLoader")):
        advice = (
            "shard its dataset, sky.shard(loader.dataset), or give the loader sampler=sky.DistributedSampler(dataset)"
        )
    elif isinstance(x, loaded_type("datasets", "DatasetDict")):
        advice = "a DatasetDict, whose splits have lengths of their own, is sharded alone: sky.shard(splits)"
    elif isinstance(x, (loaded_type("datasets", "IterableDataset"), loaded_type("datasets", "IterableDatasetDict"))):
        advice = "use datasets.distributed.split_dataset_by_node(data, rank=info.rank, world_size=info.world_size)"
    elif isinstance(x, (Iterator, loaded_type("torch.utils.data", "IterableDataset"))):
        advice = (
            "pass list(data), or let each rank skip what is not its own: "
            "itertools.islice(data, info.rank, None, info.world_size) with info = sky.instance_info()"
        )
    elif isinstance(x, Set) and not hasattr(type(x), "__getitem__"):
        advice = "a set has no order that all ranks share: pass sorted(data), or list(data) of a dict view"
    elif getattr(x, "shape", None) == ():
        advice = "it has no axis to cut: pass an array of at least one dimension"
    elif isinstance(x, memoryview) and x.ndim > 1:
        advice = "Python can't slice a memory view of several dimensions: pass numpy.asarray(data)"
    elif not (hasattr(type(x), "__getitem__") and (hasattr(type(x), "__len__") or hasattr(x, "shape"))):
        advice = "expected something with a length and [], such as a list, an array or a map-style dataset"
    if advice is not None:
        what = kind if x is None else article(kind)
        raise UsageError(f"shard() can't cut {name}, which is {what}: {advice}")
