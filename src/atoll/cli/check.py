"""``atoll check`` and ``atoll gpus``: what can be used from here, and what is missing. Imports are late."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from atoll.cli import options, shown
from atoll.cli.environment import environment
from atoll.core.exit_codes import ExitCode
from atoll.providers.base import DEFAULT

_COLUMNS = (
    *("host", "partition", "index", "name", "count", "free", "memory_gb", "instance_type", "region"),
    *("price", "spot_price", "uuid", "held_by"),
)


@dataclass(frozen=True, slots=True)
class _Finding:
    infra: str
    ok: bool
    text: str


def register(app: typer.Typer) -> None:
    """Add the commands to ``atoll``."""
    app.command("check")(check)
    app.command("gpus")(gpus)


def check(
    infras: Annotated[
        list[str] | None,
        typer.Argument(metavar="INFRA", help="local, ssh/NAME, slurm/NAME, aws, …; all declared by default."),
    ] = None,
    output: options.Output = "table",
) -> None:
    """Show what jobs can run on, and what is missing. Each line that begins with ✗ says how to get it.

    \b
        atoll check
        atoll check ssh/lab
        atoll check local ssh/lab -o json

    Logs in to ssh hosts and tests what a job needs there: driver, disk, clock, the connection to the head, an
    all-reduce. The exit code is 100 if something can't be used.
    """
    from atoll.providers import registry

    as_json = options.as_json(output)
    found = [] if infras else [_Finding("atoll", True, line) for line in environment()]
    for infra in infras or registry.declared():
        found += [_Finding(infra, ok, text) for ok, text in registry.examine(infra)]
    if as_json:
        shown.print_json([asdict(each) for each in found])
    else:
        rows = [("✓" if each.ok else "✗", each.infra, each.text) for each in found]
        if sys.stdout.isatty():
            shown.print_table(("", "INFRA", "FOUND"), rows)
        else:
            for mark, infra, text in rows:
                print(f"{mark} {infra}: {text}")
        for line in () if infras else registry.undeclared():
            print(line)
    if not all(each.ok for each in found):
        raise typer.Exit(ExitCode.FAILED)


def gpus(
    where: Annotated[str | None, typer.Argument(metavar="[INFRA]", help="local, ssh/NAME, slurm/NAME, aws, …")] = None,
    infra: Annotated[str, typer.Option(help="The same as a flag.")] = DEFAULT,
    output: options.Output = "table",
) -> None:
    """Show the GPUs that jobs can use, and who holds them.

    Of Slurm, how many are free; of a cloud, what it rents, in US$ an hour.

    \b
        atoll gpus
        atoll gpus ssh/lab
        atoll gpus slurm/lab
        atoll gpus aws
    """
    from atoll.providers import registry

    as_json = options.as_json(output)
    rows, lines = registry.resolve(where or infra).gpu_rows()
    for line in lines:
        shown.note(line) if rows or as_json else print(line)
    if as_json:
        shown.print_json(rows)
    elif rows:
        titles = [title for title in _COLUMNS if title in rows[0]]
        shown.print_table(
            [title.upper() for title in titles],
            [["" if row[title] is None else str(row[title]) for title in titles] for row in rows],
        )
