"""What can be sent: functions of every kind and home, and that the code that runs is the code as it is now."""

from __future__ import annotations

import asyncio
import functools
import importlib
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import atoll as sky

pytestmark = pytest.mark.leaks_per_module

FACTOR = 10
SOURCE_ROOT = str(Path(sky.__file__).resolve().parents[1])


@sky.compute
def scale(x: int) -> int:
    return x * FACTOR


@sky.compute(retries=1, timeout=60)
def scale_more(x: int, *, by: int = 2) -> int:
    assert x > 0, "rewritten by pytest"
    return scale.local(x) * by


class Counter:
    """A class of a test module: it travels by value."""

    unit = 2

    def __init__(self, start: int) -> None:
        self.start = start

    @sky.compute
    def plus(self, x: int) -> int:
        return self.start + x

    @staticmethod
    @sky.compute
    def static_above(x: int) -> int:
        return x + 1

    @sky.compute
    @staticmethod
    def static_below(x: int) -> int:
        return x + 2

    @classmethod
    @sky.compute
    def class_above(cls, x: int) -> int:
        return cls.unit * x

    @sky.compute
    @classmethod
    def class_below(cls, x: int) -> int:
        return cls.unit * x + 1


# -- kinds ------------------------------------------------------------------------------------------------------------
def test_bare_and_called(pool: sky.ComputePool) -> None:
    assert scale(3) @ pool == [30, 30]
    assert scale_more(3, by=3) >> pool == 90
    assert scale.__name__ == "scale"
    assert scale.local(4) == 40


@pytest.mark.parametrize("bad", [{"retries": -1}, {"retries": True}, {"timeout": 0}, {"timeout": "soon"}])
def test_options_that_cannot_work_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(sky.ConfigError, match=next(iter(bad))):
        sky.compute(**bad)


def test_something_that_is_no_function_is_refused() -> None:
    with pytest.raises(sky.UsageError, match="needs a function, not int"):
        sky.compute(3)  # type: ignore[call-overload]


def test_methods_in_both_decorator_orders(pool: sky.ComputePool) -> None:
    counter = Counter(5)
    assert counter.plus(2) >> pool == 7
    assert counter.plus.local(3) == 8
    assert Counter.static_above(1) >> pool == counter.static_above(1) >> pool == 2
    assert Counter.static_below(1) >> pool == counter.static_below(1) >> pool == 3
    assert Counter.class_above(4) >> pool == counter.class_above(4) >> pool == 8
    assert Counter.class_below(4) >> pool == counter.class_below(4) >> pool == 9


def test_lambdas_partials_callables_and_coroutines(pool: sky.ComputePool) -> None:
    class Adder:
        def __call__(self, a: int, b: int) -> int:
            return a + b

    async def slowly(x: int) -> int:
        await asyncio.sleep(0)
        return x + 1

    add = sky.compute(lambda a, b: a + b)
    assert add(1, 2) @ pool == [3, 3]
    assert sky.compute(functools.partial(pow, 2))(5) >> pool == 32
    assert sky.compute(functools.partial(lambda a, b: a - b, b=1))(5) >> pool == 4
    assert sky.compute(Adder())(1, 2) >> pool == 3
    assert sky.compute(slowly)(1) @ pool == [2, 2]
    assert sky.compute(len)([1, 2, 3]) >> pool == 3
    assert pool.run_one(os.path.join, "a", "b") == "a/b"


def test_generator_functions_stream(pool: sky.ComputePool) -> None:
    @sky.compute
    def count(n: int) -> Iterator[int]:
        yield from range(n)

    assert list(count(50) >> pool) == list(range(50))


def test_positional_keyword_unhashable_and_empty_arguments(pool: sky.ComputePool) -> None:
    @sky.compute
    def echo(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    call = echo([1], {"a": {2}}, None, function=3, pool=4, timeout=5, args=[6])
    expected = (([1], {"a": {2}}, None), {"function": 3, "pool": 4, "timeout": 5, "args": [6]})
    assert call >> pool == expected
    assert echo() @ pool == [((), {}), ((), {})]


def test_a_wrong_call_raises_as_python_does(pool: sky.ComputePool) -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        scale() >> pool  # type: ignore[call-arg]


def test_a_pending_call_or_a_value_in_place_of_the_function(pool: sky.ComputePool) -> None:
    with pytest.raises(sky.UsageError, match=r"pool.submit\(scale, \.\.\.\)|scale\(\.\.\.\) >> pool"):
        pool.submit(scale(3))
    with pytest.raises(sky.UsageError, match="int"):
        pool.run(3)  # type: ignore[arg-type]


# -- what a function refers to ----------------------------------------------------------------------------------------
def test_globals_are_those_of_the_moment_of_the_call(pool: sky.ComputePool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert scale(1) >> pool == 10
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 20)
    assert scale(1) @ pool == [20, 20]


def test_a_global_defined_after_the_first_call_is_seen(pool: sky.ComputePool) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec("def later():\n    return undefined_yet", names)
    function = sky.compute(names["later"])
    with pytest.raises(NameError, match="undefined_yet"):
        function() >> pool
    names["undefined_yet"] = 7
    assert function() >> pool == 7


def test_closures_follow_their_cells(pool: sky.ComputePool) -> None:
    box = [1]
    number = 1

    @sky.compute
    def read() -> tuple[list[int], int]:
        return box, number

    assert read() >> pool == ([1], 1)
    box.append(2)
    number = 2
    assert read() @ pool == [([1, 2], 2)] * 2
    assert box == [1, 2]


def test_mutable_defaults_do_not_leak_between_calls(pool: sky.ComputePool) -> None:
    @sky.compute
    def gather(x: int, seen: list[int] = []) -> list[int]:  # noqa: B006 - the case
        seen.append(x)
        return seen

    assert [gather(i) >> pool for i in range(3)] == [[0], [1], [2]]


def test_recursion_and_functions_that_use_each_other(pool: sky.ComputePool) -> None:
    @sky.compute
    def factorial(n: int) -> int:
        return n * factorial.local(n - 1) if n else 1

    def helper(x: int) -> int:
        return x + 1

    @sky.compute
    def outer(x: int) -> int:
        return helper(factorial.local(x))

    assert factorial(5) >> pool == 120
    assert outer(4) >> pool == 25


def test_arguments_are_those_of_the_moment_of_the_call(pool: sky.ComputePool, tmp_path: Path, until: Any) -> None:
    import numpy as np

    gate = tmp_path / "gate"

    def wait() -> None:
        import time

        while not gate.exists():
            time.sleep(0.01)

    blockers = [pool.submit(wait) for _ in range(2)]
    data = np.ones(4000)  # large enough for a buffer of its own, small enough to go inside the frame
    waiting = pool.submit(lambda a: float(a.sum()), data)
    data[:] = 0
    gate.touch()
    assert waiting.result() == 4000.0
    assert [blocker.result() for blocker in blockers] == [None, None]


# -- homes ------------------------------------------------------------------------------------------------------------
@pytest.fixture
def sibling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Writes a module beside the driver and imports it; written again, it is only written."""
    monkeypatch.syspath_prepend(tmp_path)
    name = f"sibling_{tmp_path.name.replace('-', '_')}"

    def write(text: str) -> ModuleType:
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
        return importlib.import_module(name)

    yield write
    sys.modules.pop(name, None)


SIBLING = """
import atoll as sky
VALUE = {value}
@sky.compute
def decorated(): return {value}
def plain(): return VALUE
class Model:
    @sky.compute
    def method(self): return {value}
"""


def test_a_sibling_module_that_was_edited_runs_the_new_code(
    pool: sky.ComputePool, sibling: Callable[[str], ModuleType]
) -> None:
    # Edits of equal size, as fast as they come: neither time in seconds nor size tells them apart.
    for value in (1, 2, 3):
        module = sibling(SIBLING.format(value=value))
        assert module.decorated() >> pool == value, "one rank first"
        assert module.decorated() @ pool == [value, value]
        assert pool.run(module.plain) == [value, value]
        assert module.Model().method() @ pool == [value, value]
        assert list(pool.map(module.plain, *[[]])) == []
    assert module.decorated.local() == 1, "the driver itself keeps what it imported"
    importlib.reload(module)
    assert module.decorated.local() == 3
    assert module.decorated() @ pool == [3, 3]
    sibling(SIBLING.format(value=4))
    importlib.reload(module)
    assert module.decorated() @ pool == [4, 4]


def test_a_helper_imported_in_the_body_is_the_edited_one(
    pool: sky.ComputePool, sibling: Callable[[str], ModuleType]
) -> None:
    module = sibling("VALUE = 1")

    @sky.compute
    def read(name: str) -> int:
        return int(importlib.import_module(name).VALUE)

    assert read(module.__name__) @ pool == [1, 1]
    sibling("VALUE = 2")
    assert read(module.__name__) >> pool == 2
    sibling("VALUE = 3")
    assert read(module.__name__) @ pool == [3, 3]


def run_script(folder: Path, text: str) -> str:
    script = folder / "script.py"
    script.write_text(textwrap.dedent(text))
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": SOURCE_ROOT},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "NeverDispatched" not in done.stderr
    return done.stdout


def test_a_script_without_a_main_guard(tmp_path: Path) -> None:
    out = run_script(
        tmp_path,
        """
        import atoll as sky
        print("started")
        BASE = 100
        def helper(x): return x + BASE
        @sky.compute
        def f(x): return helper(x) + sky.instance_info().rank
        pool = sky.ComputePool(nodes=2, logs="quiet").up()
        print(f(1) @ pool, f(2) >> pool)
        pool.down()
        pending_at_exit = f(3)
        """,
    )
    assert out.split("\n") == ["started", "[101, 102] 102", ""]


def test_classes_of_main_come_back_as_the_same_class(tmp_path: Path) -> None:
    out = run_script(
        tmp_path,
        """
        from dataclasses import dataclass
        from enum import Enum
        import atoll as sky

        @dataclass
        class Point:
            x: int
            def double(self): return Point(2 * self.x)

        class Color(Enum):
            RED = 1

        class Broken(ValueError):
            def __init__(self, code, why):
                super().__init__(why)
                self.code = code

        @sky.compute
        def move(p): return Point(p.x + 1), p.double(), Color.RED

        @sky.compute
        def fail(): raise Broken(3, "no")

        with sky.ComputePool(nodes=2, logs="quiet") as pool:
            for a, b, color in move(Point(1)) @ pool:
                assert type(a) is type(b) is Point and a == b == Point(2)
                assert color is Color.RED
            try:
                fail() @ pool
            except Broken as error:
                assert error.code == 3 and type(error.__cause__) is sky.RemoteTraceback
                assert "raise Broken" in str(error.__cause__)
                print("caught")
        """,
    )
    assert out == "caught\n"


# -- notebooks --------------------------------------------------------------------------------------------------------
class Notebook:
    """A live kernel that runs cells one by one."""

    def __init__(self, client: Any) -> None:
        self.client = client

    def press_interrupt(self) -> None:
        """What the button does: the kernel's whole process group is signalled."""
        asyncio.run(self.client.km.interrupt_kernel())

    def run(self, text: str) -> str:
        """What the cell printed and showed, or the name and text of what it raised."""
        import nbformat

        cell = nbformat.v4.new_code_cell(textwrap.dedent(text))
        self.client.nb.cells.append(cell)
        self.client.execute_cell(cell, len(self.client.nb.cells) - 1)
        texts = []
        for output in cell.outputs:
            if output.output_type == "stream" and output.name == "stdout":
                texts.append(output.text)
            elif output.output_type == "execute_result":
                texts.append(output.data["text/plain"])
            elif output.output_type == "error":
                texts.append(f"{output.ename}: {output.evalue}\n" + "\n".join(output.traceback))
        return "".join(texts).strip()


@pytest.fixture
def notebook(jupyter_in_process: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Notebook]:
    import nbclient
    import nbformat
    from traitlets.config import Config

    monkeypatch.setenv("PYTHONPATH", SOURCE_ROOT)
    with tempfile.TemporaryDirectory() as folder:  # short, as a socket's path has to be
        # A port would be chosen while it is free, and might be somebody's when the kernel has started.
        config = Config({"KernelManager": {"transport": "ipc", "connection_file": f"{folder}/k.json"}})
        client = nbclient.NotebookClient(nbformat.v4.new_notebook(), allow_errors=True, timeout=100, config=config)
        yield from started(client)


def started(client: Any) -> Iterator[Notebook]:
    with client.setup_kernel():
        book = Notebook(client)
        book.run("import atoll as sky\npool = sky.ComputePool(nodes=2, logs='quiet').up()")
        yield book
        book.run("pool.down()")


def test_notebook_shows_progress_while_a_cell_runs(notebook: Notebook, tmp_path: Path, until: Any) -> None:
    def shown(text: str) -> bool:
        outputs = notebook.client.nb.cells[-1].outputs
        return text in "".join(output.get("text", "") for output in outputs)

    def answer() -> None:
        for step in range(3):
            until(lambda step=step: shown(f"[rank 0] step {step}") and shown(f"reported {step}"))
            (tmp_path / str(step)).touch()

    thread = threading.Thread(target=answer)
    thread.start()
    said = notebook.run(f"""
        import pathlib, time

        @sky.compute
        def steps():
            for step in range(3):
                print("step", step, flush=True)
                sky.report({{"step": step}})
                ends = time.monotonic() + 20
                while not (pathlib.Path({str(tmp_path)!r}) / str(step)).exists():
                    assert time.monotonic() < ends, f"step {{step}} was not shown"
                    time.sleep(0.02)
            return "done"

        def note(event):
            if isinstance(event, sky.events.MetricsReported):
                print("reported", event.metrics["step"])

        with sky.ComputePool(on_event=note) as talking:
            result = steps() >> talking
        result
    """)
    thread.join()
    assert said.endswith("'done'")


def test_notebook_cells_are_rerun_edited_interrupted(notebook: Notebook, tmp_path: Path, until: Any) -> None:
    cell = "K = {k}\n@sky.compute\ndef f(x): return x * K + {c}\nf(2) @ pool"
    assert notebook.run(cell.format(k=10, c=0)) == "[20, 20]"
    assert notebook.run(cell.format(k=10, c=0)) == "[20, 20]"
    assert notebook.run(cell.format(k=10, c=5)) == "[25, 25]"
    notebook.run("K = 100")
    assert notebook.run("f(2) >> pool") == "205"
    assert "f(...) has not run: dispatch it, `f(...) @ pool`" in notebook.run("f(2)")

    raised = notebook.run("@sky.compute\ndef bad(): raise KeyError('lost')\nbad() @ pool")
    assert raised.startswith("KeyError")
    assert re.search(r"RemoteTraceback.*rank [01] \(node [01]\)", raised, re.DOTALL)

    started = tmp_path / "started"

    def interrupt() -> None:
        until(started.exists)
        notebook.press_interrupt()

    thread = threading.Thread(target=interrupt)
    thread.start()
    raised = notebook.run(f"""
        @sky.compute
        def forever():
            import pathlib, time
            if sky.instance_info().is_head: pathlib.Path({str(started)!r}).touch()
            while True: time.sleep(0.05)
        forever() @ pool
    """)
    thread.join()
    assert raised.startswith("KeyboardInterrupt")
    assert notebook.run("f(1) @ pool") == "[105, 105]"
