"""The ``atoll`` command: what it prints, its exit codes, and never a traceback of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.pools import SOURCE_ROOT

import atoll as sky
from atoll.functions.named.registry import end_pool, named_pools
from command_here import Atoll
from command_here import atoll as here

__all__ = ["here"]

RUN = "from atoll.cli.main import main; main()"
SAYS_WHEN_IT_WAITS = (
    "from atoll.functions.named import detached; fetch = detached.result; "
    "detached.result = lambda *asked: print('waits', flush=True) or fetch(*asked)"
)
COMMANDS = [
    [],
    ["pools"],
    ["pools", "ls"],
    ["pools", "down"],
    ["images"],
    ["images", "ls"],
    ["images", "prune"],
    ["result"],
    ["gpus"],
]


def start(*arguments: str, code: str = RUN) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": SOURCE_ROOT, "COLUMNS": "120"},
    )


def atoll(*arguments: str) -> tuple[int, str, str]:
    """Exit code, output and errors."""
    process = start(*arguments)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A state folder for one test; pools that it leaves up are ended."""
    monkeypatch.setenv("ATOLL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "120")
    yield tmp_path / "home"
    for pool in named_pools():
        end_pool(pool["name"])


@sky.compute
def double(x: Any) -> Any:
    return 2 * x


@sky.compute
def fail() -> None:
    raise LookupError("no such thing")


@sky.compute
def sleep() -> None:
    time.sleep(60)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command) or "atoll")
def test_help(command: list[str], here: Atoll) -> None:
    code, out, err = here(*command, "--help")
    assert (code, err) == (0, "")
    assert "Usage:" in out


def test_alone_it_shows_help() -> None:
    _, out, err = atoll()
    assert "I have" in out + err
    assert "Traceback" not in err


def test_version() -> None:
    assert atoll("--version") == (0, f"atoll {sky.__version__}\n", "")


def test_the_installed_command() -> None:
    command = Path(sys.executable).with_name("atoll")
    assert subprocess.run([command, "--version"], capture_output=True, text=True).stdout == f"atoll {sky.__version__}\n"


def test_ctrl_c_while_the_command_is_still_being_imported(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    process = start("status", code=f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {RUN}")
    assert process.stdout is not None
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    assert (*process.communicate(timeout=60), process.returncode) == (
        "",
        "\natoll: interrupted before anything started\n",
        130,
    )


def test_help_loads_nothing_heavy() -> None:
    heavy = ["torch", "numpy", "pydantic", "cloudpickle", "pandas", "atoll.gang", "rich.markdown"]
    code = f"""
import sys
from atoll.cli.main import main
try:
    main()
finally:
    print([name for name in {heavy} if name in sys.modules], file=sys.stderr)
"""
    env = {**os.environ, "PYTHONPATH": SOURCE_ROOT}
    done = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, env=env)
    assert (done.returncode, done.stderr) == (0, "[]\n")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["poolz"], 2, "poolz"),
        (["pools", "lss"], 2, "lss"),
        (["pools", "ls", "-o", "xml"], 2, "xml"),
        (["pools", "ls", "--jsn"], 2, "--jsn"),
        (["pools", "down"], 2, "--all"),
        (["train", "--help"], 0, "[RECIPE]"),
        (["train", "--help"], 0, "--nproc-per-node N"),
        (["pools", "down", "nope"], 102, "`atoll pools ls`"),
        (["pools", "down", "../up"], 2, "name='../up'"),
        (["pools", "down", "absent"], 102, "absent"),
        (["result"], 2, "Missing argument"),
        (["result", "abc"], 102, "'abc'"),
        (["result", "../../etc"], 102, "etc"),
        (["result", "abc", "--timeout", "soon"], 2, "--timeout"),
        (["gpus", "-o", "yaml"], 2, "yaml"),
        (["gpus", "extra"], 2, "extra"),
    ],
)
def test_mistakes(arguments: list[str], code: int, said: str, here: Atoll) -> None:
    got, out, err = here(*arguments)
    assert got == code
    assert said in out + err


def test_pools() -> None:
    assert atoll("pools", "ls") == (0, "no named pool is up; `sky.ComputePool(name='my-pool', ...)` starts one\n", "")
    assert atoll("pools", "ls", "-o", "json") == (0, "[]\n", "")
    assert atoll("pools", "down", "--all") == (0, "no named pool is up\n", "")
    with sky.ComputePool(name="one", nodes=2), sky.ComputePool(name="two"):
        pass
    code, out, err = atoll("pools", "ls")
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines()]
    assert rows[0][:4] == ["NAME", "RANKS", "PID", "UP"]
    assert [row[:2] for row in rows[1:]] == [["one", "2"], ["two", "1"]]
    assert rows[1][-1] == "nodes=2"
    found = json.loads(atoll("pools", "ls", "--output", "json")[1])
    assert [(pool["name"], pool["world_size"]) for pool in found] == [("one", 2), ("two", 1)]
    assert atoll("pools", "down", "one", "absent") == (
        102,
        "one: ended\nabsent: no such pool is up; `atoll pools ls` lists those that are\n",
        "",
    )
    assert atoll("pools", "down", "-a") == (0, "two: ended\n", "")
    assert named_pools() == []


def test_result() -> None:
    with sky.ComputePool(name="crew") as pool:
        value, failed = pool.submit(double, "ab", detach=True), pool.submit(fail, detach=True)
        assert atoll("result", value) == (0, "'abab'\n", "")
        code, out, err = atoll("result", failed)
        assert (code, out) == (100, "")
        assert err.startswith("atoll: LookupError: no such thing\n")
        assert ", in fail\n" in err  # where the task failed,
        assert "atoll/cli/" not in err  # not where the command did
        running = pool.submit(sleep, detach=True)
        code, out, err = atoll("result", running, "--timeout", "0.1")
        assert (code, out) == (101, "")
        assert "the call continues" in err
        waiting = start("result", running, code=f"{SAYS_WHEN_IT_WAITS}; {RUN}")
        assert waiting.stdout is not None
        assert waiting.stdout.readline() == "waits\n"
        waiting.send_signal(signal.SIGINT)
        out, err = waiting.communicate(timeout=60)
        assert waiting.returncode == 130
        assert "Traceback" not in out + err
        pool.down()
        code, out, err = atoll("result", running)
        assert (code, out) == (100, "")
        assert err.startswith("atoll: PoolClosed: ")


def test_gpus() -> None:
    code, out, err = atoll("gpus", "-o", "json")
    found = json.loads(out)
    assert code == 0
    assert err.startswith("no GPU: ") if not found else err == ""
    assert all({"index", "uuid", "name", "memory_gb"} <= gpu.keys() for gpu in found)
    code, out, err = atoll("gpus")
    assert (code, err) == (0, "")
    assert out.startswith("no GPU: ") if not found else found[0]["name"] in out
