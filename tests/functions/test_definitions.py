"""What a script defines, in ranks and in their children: plain pickle finds it, and ordinary things travel."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent / "scripts"


def run(script: str, *arguments: str) -> None:
    """Run a script of checks; each that failed is told."""
    done = subprocess.run([sys.executable, str(SCRIPTS / script), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    checks = [json.loads(line) for line in done.stdout.splitlines()]
    assert checks
    assert [f"{check['check']}: {check['got']}" for check in checks if not check["ok"]] == []


@pytest.mark.long
def test_plain_pickle_finds_what_the_script_defines(tmp_path: Path) -> None:
    run("plain_pickle.py", str(tmp_path), "fork")


@pytest.mark.long
@pytest.mark.timeout(300)
# Grandchildren by spawn only: nested forkservers lose semaphores in plain Python 3.11, too.
@pytest.mark.parametrize("start", ["spawn", "spawn+grandchildren", "forkserver"])
def test_so_do_fresh_interpreters_that_ranks_start(start: str, tmp_path: Path) -> None:
    run("plain_pickle.py", str(tmp_path), start)


@pytest.mark.long
def test_ordinary_things_of_a_script_travel_or_say_why_not() -> None:
    run("ordinary.py")


def test_a_spawned_child_knows_the_script(tmp_path: Path) -> None:
    """Without torch, so that it is fast; the script's own lines are not run again."""
    script = tmp_path / "script.py"
    script.write_text(
        """
import collections, multiprocessing
from concurrent.futures import ProcessPoolExecutor

import atoll as sky

print("top level")

class Own(collections.namedtuple("Own", "x")):
    pass

def more(own):
    return Own(own.x + STEP)

STEP = 2

def spawn(own):
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as processes:
        return processes.submit(more, own).result()

if __name__ == "__main__":
    with sky.ComputePool() as pool:
        print(pool.run_one(spawn, Own(1)) == Own(3), type(pool.run_one(spawn, Own(1))) is Own)
"""
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["top level", "True True"], done.stderr
