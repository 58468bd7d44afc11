# Functions of a script: closures, recursion, a decorator of its own, a lambda, methods, generators, globals.
#> [run]
#> python = true
#> long = true
#> lines = ["top level", "closure [13, 13]", "recursion 120", "decorated [16, 16]", "lambda 8", "method [7, 7]", "static 9", "stream [0, 1, 2]", "global 5", "defaults (1, 2, {'c': 3})", "own error ValueError no 3", "map [0, 1, 4]", "partial 11", "keyword (3, 4)"]
import functools

import atoll as sky

print("top level")
STEP = 3


def doubled(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return 2 * function(*args, **kwargs)

    return wrapper


def closure(base):
    def add(x):
        return base + x + STEP

    return add


@sky.compute
def factorial(n):
    return n * helper(n - 1) if n > 1 else 1


def helper(n):
    return factorial.local(n) if n > 1 else 1


@sky.compute
@doubled
def plus(x):
    """Adds."""
    return x + STEP


class Model:
    def __init__(self, w):
        self.w = w

    def forward(self, x):
        return self.w + x

    @staticmethod
    def loss(x):
        return x * x

    def __eq__(self, other):
        return self.w == other.w


@sky.compute
def stream(n):
    yield from range(n)


@sky.compute
def read_global():
    return STEP


@sky.compute
def defaults(a, b=2, *args, **more):
    return a, b, more


@sky.compute
def fails(x):
    raise ValueError(f"no {x}")


@sky.compute
def only_keywords(*, a, b):
    return a, b


if __name__ == "__main__":
    with sky.ComputePool(nodes=2) as pool:
        print("closure", sky.compute(closure(5))(5) @ pool)
        print("recursion", factorial(5) >> pool)
        print("decorated", plus(5) @ pool)
        print("lambda", pool.run_one(lambda x: x + STEP, 5))
        print("method", pool.run(Model(3).forward, 4))
        print("static", pool.run_one(Model.loss, 3))
        print("stream", list(stream(3) >> pool))
        STEP = 5
        print("global", read_global() >> pool)
        print("defaults", defaults(1, c=3) >> pool)
        try:
            fails(3) >> pool
        except ValueError as error:
            print("own error", type(error).__name__, error)
        print("map", list(pool.map(lambda x: x * x, range(3))))
        print("partial", pool.run_one(functools.partial(lambda a, b: a + b, 1), 10))
        print("keyword", only_keywords(a=3, b=4) >> pool)
