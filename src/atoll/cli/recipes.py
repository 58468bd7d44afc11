"""``atoll recipes``: the recipes that ship with Atoll, and any recipe as it would run. Imports are late."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli import options
from atoll.cli.shown import print_json, print_table
from atoll.core.errors import ConfigError
from atoll.core.validation import command_line

if TYPE_CHECKING:
    from atoll.train.recipe.schema import ParallelSection

recipes_app = typer.Typer(
    help="Recipes: what is trained, on what, and how.", no_args_is_help=True, rich_markup_mode=None
)

_WITH_OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}


@recipes_app.command("ls")
def ls(output: options.Output = "table") -> None:
    """List the recipes that ship with Atoll."""
    from atoll.train.metrics.figures import count
    from atoll.train.recipe.files import shipped_names

    as_json = options.as_json(output)
    rows = [_row(name) for name in shipped_names()]
    rows.sort(key=lambda row: (row["name"].split("_")[0], row["parameters"]))
    if as_json:
        print_json(rows)
        return
    table = []
    for row in rows:
        on_cpu = "✓" if row["parameters"] < 1e8 else ""  # trains there in minutes
        size, length = count(row["parameters"]), str(row["seq_len"])
        table.append((row["name"], size, on_cpu, length, row["layout"], row["note"]))
    print_table(("NAME", "PARAMS", "CPU", "SEQ_LEN", "LAYOUT", "NOTE"), table)
    print("\n`atoll recipes show NAME` prints every key, `atoll recipes cp NAME` writes a file to edit")


def _row(name: str) -> dict[str, Any]:
    from atoll.train.recipe.files import shipped_file
    from atoll.train.recipe.load import load_recipe

    recipe = load_recipe(name).recipe
    # Counting needs torch and builds the model; the first comment of each file has the number, and a test checks it.
    about = shipped_file(name).read_text().split("\n", 1)[0].removeprefix("# ")
    note, _, rest = about.partition(":")
    number = re.search(r"([\d,]+) parameters", rest)
    assert number is not None
    return {
        "name": name,
        "parameters": int(number[1].replace(",", "")),
        "seq_len": recipe.train.seq_len,
        "layout": _layout(recipe.parallel),
        "note": note + ("" if recipe.data.path else "; needs --data.path"),
    }


def _layout(parallel: ParallelSection) -> str:
    axes = ("pipeline", "replicate", "shard", "context", "tensor")
    sizes = [(axis, getattr(parallel, axis)) for axis in axes]
    parts = [f"{axis} {'rest' if size == -1 else size}" for axis, size in sizes if size not in (None, 1)]
    return " × ".join(parts) or "chosen at start"


@recipes_app.command("show", context_settings=_WITH_OVERRIDES)
def show(
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A shipped recipe's name, or a file.")],
) -> None:
    """Print a recipe with the value of every key.

    \b
        atoll recipes show llama3_8b --train.steps 100
    """
    from atoll.train.recipe.compare import resolved_toml
    from atoll.train.recipe.load import load_recipe

    if recipe.startswith("-"):
        raise typer.BadParameter("the recipe comes first: atoll recipes show llama3_8b --train.steps 100")
    loaded = load_recipe(recipe, context.args)
    for note in loaded.notes:
        print(f"note: {note}", file=sys.stderr)
    print(resolved_toml(loaded.recipe), end="")


@recipes_app.command("cp")
def cp(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name that `atoll recipes ls` shows.")],
    dest: Annotated[
        Path | None, typer.Argument(metavar="DEST", help="File or folder to write; NAME.toml by default.")
    ] = None,
) -> None:
    """Write a shipped recipe to a file, to edit it."""
    from atoll.train.recipe.files import shipped_file

    source = shipped_file(name)
    target = Path(source.name) if dest is None else dest / source.name if dest.is_dir() else dest
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(source.read_text(encoding="utf-8"))
    except FileExistsError:
        raise ConfigError(f"{target} already exists, not overwritten: name another file, or remove it first") from None
    except OSError as error:
        raise ConfigError(f"{target} can't be written: {error.strerror}") from None
    shown = target if target.is_absolute() or os.sep in str(target) else f"./{target}"
    print(f"written to {shown}; edit it, then: {command_line('atoll', 'train', str(shown))}")
