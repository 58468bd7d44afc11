"""``atoll data``: look at what a recipe trains on. Imports are late, so that help is fast."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.weights import progress_bar

if TYPE_CHECKING:
    from atoll.train.data.packing import PackedDataset
    from atoll.train.data.tokenizer import Tokenizer

data_app = typer.Typer(help="What a recipe trains on.", no_args_is_help=True, rich_markup_mode=None)


@data_app.callback()
def _group() -> None:
    """What a recipe trains on."""


@data_app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def preview(
    context: typer.Context,
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="A shipped recipe or a TOML file; $CONFIG_FILE by default.")
    ] = None,
    num: Annotated[
        int, typer.Option("--num", "-n", min=1, max=10**6, metavar="N", help="Number of samples to show.")
    ] = 3,
    start: Annotated[
        int, typer.Option(min=0, max=10**12, metavar="N", help="First sample, numbered as in metrics.jsonl.")
    ] = 0,
    width: Annotated[
        int | None, typer.Option(min=20, metavar="N", help="Width in columns; the terminal's by default.")
    ] = None,
    ids: Annotated[bool, typer.Option("--ids", help="Show the id of each token.")] = False,
    output: Annotated[
        str, typer.Option("-o", "--output", metavar="FORMAT", help="text, or json: one document on standard output.")
    ] = "text",
) -> None:
    """Show samples as training reads them: tokens, documents, and positions that are not trained.

    Overrides follow as for `atoll train`: --data.path notes.txt --train.seq_len 64
    """
    if output not in ("text", "json"):
        raise typer.BadParameter(f"-o {output}: expected 'text' or 'json'")
    from atoll.train.data.packing import PackedDataset
    from atoll.train.data.prepare import prepare
    from atoll.train.recipe.load import load_recipe

    overrides = list(context.args)
    if recipe is not None and recipe.startswith("--"):  # an override; the recipe was left to CONFIG_FILE
        overrides.insert(0, recipe)
        recipe = None
    loaded = load_recipe(recipe, overrides)
    for note in loaded.notes:
        _note(note)
    train, data = loaded.recipe.train, loaded.recipe.data
    with progress_bar("") as show:
        prepared = prepare(
            data,
            seq_len=train.seq_len,
            progress=lambda event: show(event.done, event.total, event.phase),
            note=_note,
        )
    try:
        dataset = PackedDataset(
            prepared.train, train.seq_len, isolate=data.isolate_documents, shuffle=data.shuffle, seed=train.seed
        )
        numbers = range(start, start + num)
        if output == "json":
            _print_json(dataset, prepared.tokenizer, numbers)
        else:
            _print_text(width, dataset, prepared.tokenizer, numbers, ids)
    finally:
        prepared.close()


def _print_json(dataset: PackedDataset, tokenizer: Tokenizer | None, numbers: range) -> None:
    from atoll.train.data.preview import as_json

    for number in numbers:  # one array, written as it is read: many samples may not fit memory
        row = {"number": number, **as_json(dataset.samples([number])[0], tokenizer)}
        print("[" if number == numbers.start else ", ", json.dumps(row), sep="", end="")
    print("]")


def _print_text(
    width: int | None, dataset: PackedDataset, tokenizer: Tokenizer | None, numbers: range, ids: bool
) -> None:
    from rich.console import Console

    from atoll.train.data.preview import legend, render

    console = Console(width=width, highlight=False)
    colour = console.color_system is not None and not console.no_color
    unwrapped = width is None and not console.is_terminal  # what a pipe's reader wants is whole lines
    console.print(legend(colour=colour), soft_wrap=unwrapped)
    for number in numbers:
        (sample,) = dataset.samples([number])
        epoch, within = divmod(number, len(dataset))
        trained = f"{sample.num_trained} of {dataset.seq_len} positions are trained"
        title = f"sample {number}, number {within} of {len(dataset)} in epoch {epoch}: {trained}"
        console.print(f"\n{title}", style="bold" if colour else None, soft_wrap=unwrapped)
        console.print(render(sample, tokenizer, colour=colour, ids=ids), end="", soft_wrap=unwrapped)


def _note(text: str) -> None:
    print(text, file=sys.stderr)
