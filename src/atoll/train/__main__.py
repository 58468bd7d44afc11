"""``torchrun -m atoll.train RECIPE [--section.key value ...]``: one rank of a run, without Atoll's launcher."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import os
import sys
import time
from typing import TYPE_CHECKING, NoReturn

from atoll.core.errors import AtollError
from atoll.core.exit_codes import ExitCode, exit_code_of
from atoll.train import prepare_process

if TYPE_CHECKING:
    from atoll.train.events import Event

_USAGE = """usage: torchrun --nproc-per-node N -m atoll.train [RECIPE] [--no-resume] [--events] [--section.key value]

RECIPE is a shipped recipe (atoll recipes ls) or a TOML file; by default the one that CONFIG_FILE names.
The same command again resumes from the newest checkpoint.
"""
_HEAD_TELLS_S = 5.0  # rank 0 may have started later by that; a launcher ends the others with it


def main(arguments: list[str]) -> int:
    """Train; returns the exit code: 0 finished, 2 a mistake in the recipe, 100 failed, 101 saved and stopped early."""
    if "-h" in arguments or "--help" in arguments:
        print(_USAGE, end="")
        return 0
    flags = {"--no-resume", "--allow-changes", "--events"}
    given = {argument for argument in arguments if argument in flags}
    rest = [argument for argument in arguments if argument not in flags]
    recipe = rest.pop(0) if rest and not rest[0].startswith("--") else None
    is_head = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"
    try:
        prepare_process()
        from atoll.train import run

        report = _print_event if "--events" in given else None
        resume, allow_changes = "--no-resume" not in given, "--allow-changes" in given
        result = run(recipe, rest, resume=resume, allow_changes=allow_changes, report=report)
        if report is not None and is_head:
            print(json.dumps({"result": dataclasses.asdict(result)}), flush=True)
    except AtollError as error:
        # Most are the same on every rank, and rank 0 tells them. One that it does not know of is told by its own rank.
        where = getattr(error, "__notes__", [])
        if is_head or where == [f"on rank {os.environ.get('RANK', os.environ.get('SLURM_PROCID'))}"]:
            print(" ".join(["atoll:", *(f"{each}:" for each in where), str(error)]), file=sys.stderr)
        else:
            time.sleep(_HEAD_TELLS_S)  # torchrun ends all ranks as soon as one has failed
        return exit_code_of(error)
    except KeyboardInterrupt:
        return 130
    return 0 if result.status == "finished" else ExitCode.NOT_FINISHED


def _print_event(event: Event) -> None:
    """Print an event of the run as a line of JSON, for ``atoll train`` to show."""
    from atoll.train.events import encode

    print(json.dumps(encode(event)), flush=True)


def leave(code: int) -> NoReturn:
    """End the process as Python would, but without taking down the interpreter.

    Gloo's threads outlive their groups wherever a model or a mesh still holds one, and race with that: now and then
    such a rank, its work done, is aborted by "terminate called without an active exception".
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed at the other end, or here
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
