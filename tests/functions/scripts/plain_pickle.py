"""A user's script: what it defines meets plain pickle inside ranks. Prints one line of JSON for each check."""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import multiprocessing
import pickle
import sys
import typing
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import atoll as sky

FACTOR = 3


@dataclasses.dataclass
class Batch:
    x: torch.Tensor


class Kind(enum.Enum):
    A = 1


class Pair(typing.NamedTuple):
    left: int
    right: int


class Outer:
    class Inner:
        value = 5


class Squares(Dataset[int]):
    def __init__(self, transform: Any = None) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> int:
        return self.transform(i) if self.transform else i * i


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)


def collate(items: list[int]) -> Batch:
    return Batch(torch.tensor(items))


def triple(x: int) -> int:
    return FACTOR * x


def make(x: int) -> Batch:
    return Batch(torch.tensor([x]))


@functools.cache
def fib(n: int) -> int:
    return n if n < 2 else fib(n - 1) + fib(n - 2)


def loader(context: str) -> list[int]:
    batches = DataLoader(Squares(), batch_size=2, collate_fn=collate, num_workers=1, multiprocessing_context=context)
    return [value for batch in batches for value in batch.x.tolist()]


def loader_of(data: Squares, context: str) -> list[int]:
    """The dataset came as an argument, and holds a function that this one uses as well."""
    assert data.transform is triple
    batches = DataLoader(data, batch_size=2, collate_fn=collate, num_workers=1, multiprocessing_context=context)
    return [value for batch in batches for value in batch.x.tolist()]


def executor(context: str) -> list[int]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(context)) as processes:
        made = processes.submit(make, 7).result()
        return [*processes.map(triple, [1, 2]), made.x.item(), processes.submit(fib, 9).result()]


def nested(context: str) -> list[int]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(context)) as processes:
        return processes.submit(executor, context).result()


def save(folder: Path) -> Net:
    net = Net()
    torch.save(net, folder / "net.pt")
    assert type(torch.load(folder / "net.pt", weights_only=False)) is Net
    return net


def load(folder: Path) -> bool:
    return type(torch.load(folder / "net.pt", weights_only=False)) is Net


def load_blind(folder: Path) -> Any:
    """A later call that names nothing of the script."""
    return torch.load(folder / "net.pt", weights_only=False)


def there_and_back() -> list[Any]:
    values = [Kind.A, Pair(1, 2), Outer.Inner, Outer.Inner(), triple, Net, fib]
    back = pickle.loads(pickle.dumps(values))
    assert back[0] is Kind.A
    assert back[4] is triple
    assert back[2] is Outer.Inner
    assert back[6] is fib
    return back[:4]


def copied(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def gather() -> list[Any]:
    mine = Pair(dist.get_rank(), Kind.A.value)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    assert all(type(each) is Pair for each in everyone)
    return everyone


def count() -> int:
    global FACTOR
    FACTOR += 1
    return FACTOR


def pool_inside() -> list[Any]:
    with sky.ComputePool(logs="quiet") as pool:
        return [pool.run_one(triple, 2), type(pool.run_one(copied, Pair(1, 2))) is Pair]


def redefine(scale: int) -> type:
    """What a notebook does: the cell runs again."""
    space = globals()
    exec(f"class Cell:\n    scale = {scale}\ndef use(): return pickle.loads(pickle.dumps(Cell())).scale", space)
    return space["Cell"]


def main(folder: Path, contexts: list[str]) -> None:
    def check(name: str, expected: Any, call: Any) -> None:
        try:
            got = call()
            ok = got == expected
        except Exception as error:
            ok, got = False, error
        print(json.dumps({"check": name, "ok": ok, "got": repr(got)}), flush=True)

    with sky.ComputePool(nodes=2, logs="quiet") as pool:
        for context in contexts:
            start, _, grand = context.partition("+")
            if grand:
                check(f"grandchildren, {start}", [3, 6, 7, 34], lambda c=start: pool.run_one(nested, c))
            else:
                data = Squares(triple)
                check(f"DataLoader, {start}", [0, 1, 4, 9], lambda c=start: pool.run_one(loader, c))
                check(
                    f"DataLoader of an argument, {start}", [0, 3, 6, 9], partial(pool.run_one, loader_of, data, start)
                )
                check(f"ProcessPoolExecutor, {start}", [3, 6, 7, 34], lambda c=start: pool.run_one(executor, c))
        check("torch.save", Net, lambda: type(pool.run_one(save, folder)))
        check("torch.load in a second call", [True, True], lambda: pool.run(load, folder))
        check("torch.load in a call that names nothing", Net, lambda: type(pool.run(load_blind, folder)[1]))
        check("torch.load in the driver", Net, lambda: type(torch.load(folder / "net.pt", weights_only=False)))
        check("pickle", [Kind.A, Pair(1, 2), Outer.Inner], lambda: pool.run(there_and_back)[1][:3])
        check("a result is of the driver's class", True, lambda: isinstance(pool.run_one(make, 3), Batch))
        check("so is one of an inner class", True, lambda: isinstance(pool.run_one(there_and_back)[3], Outer.Inner))
        check("an argument of an inner class", Outer.Inner, lambda: type(pool.run_one(copied, Outer.Inner())))
        check("all_gather_object", [[Pair(0, 1), Pair(1, 1)]] * 2, lambda: pool.run(gather))
        check("a pool inside a rank", [6, True], lambda: pool.run_one(pool_inside))
        check("globals in the first call", [4, 4], lambda: pool.run(count))
        check("globals in the second call", [4, 4], lambda: pool.run(count))
        for scale in (1, 2):
            cell = redefine(scale)
            check(f"a cell that is run again, {scale}", [scale] * 2, lambda: pool.run(globals()["use"]))
            check(f"its class comes back, {scale}", cell, lambda c=cell: type(pool.run_one(c)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
