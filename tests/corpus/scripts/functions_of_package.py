# Functions of a package of one's own that lies beside the script: relative imports, classes, its own exception.
#> [files]
#> "lab/__init__.py" = "from .jobs import train, NoData\n"
#> "lab/settings.py" = "RATE = 0.5\n"
#> "lab/core/__init__.py" = ""
#> "lab/core/result.py" = """
#> import dataclasses
#> @dataclasses.dataclass(frozen=True)
#> class Result:
#>     rank: int
#>     rate: float
#> """
#> "lab/jobs.py" = """
#> import atoll as sky
#> from . import settings
#> from .core.result import Result
#>
#> class NoData(Exception):
#>     def __init__(self, where, *, rank):
#>         super().__init__(f'no data in {where} for {rank}')
#>         self.where, self.rank = where, rank
#>
#> @sky.compute
#> def train(path=None):
#>     rank = sky.instance_info().rank
#>     if path:
#>         raise NoData(path, rank=rank)
#>     from .core import result
#>     return Result(rank, settings.RATE), result.Result is Result
#> """
#> [run]
#> python = true
#> long = true
#> lines = ["[(Result(rank=0, rate=0.5), True), (Result(rank=1, rate=0.5), True)] True", "NoData no data in x for 0"]
import atoll as sky
import lab
from lab.core.result import Result

with sky.ComputePool(nodes=2) as pool:
    got = lab.train() @ pool
    print(got, isinstance(got[0][0], Result))
    try:
        lab.train("x") >> pool
    except lab.NoData as error:
        print(type(error).__name__, error)
