"""``atoll export``, ``import`` and ``generate``: weights in and out, and text from them. Imports are late."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.core.errors import ConfigError
from atoll.core.validation import command_line, nearest

if TYPE_CHECKING:
    from atoll.train.data.tokenizer import Tokenizer
    from atoll.train.weight_source import WeightSource

Force = Annotated[bool, typer.Option("--force", help="Overwrite an earlier export at DEST.")]
MaxShard = Annotated[
    str, typer.Option("--max-shard", metavar="SIZE", help="Maximum size of a weights file, such as 500MB.")
]


def register(app: typer.Typer) -> None:
    """Add the commands to ``atoll``."""
    app.command("export")(export)
    app.command("import")(import_)
    app.command("generate")(generate)


def export(
    source: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, or one of its checkpoints.")],
    dest: Annotated[Path, typer.Argument(metavar="DEST", help="Folder to write.")],
    dtype: Annotated[str, typer.Option(metavar="TYPE", help="bf16, fp32 or fp16.")] = "bf16",
    push: Annotated[str | None, typer.Option(metavar="OWNER/NAME", help="Also upload to the hub.")] = None,
    private: Annotated[bool, typer.Option("--private", help="With --push: make the repository private.")] = False,
    max_shard: MaxShard = "5GB",
    force: Force = False,
) -> None:
    """Write a trained model as a Hugging Face folder.

    \b
        atoll export outputs/austen outputs/austen-hf
        atoll export outputs/austen/checkpoints/step-00000300 fp32 --dtype fp32
    """
    from atoll.train import hub
    from atoll.train.saved import find_checkpoint

    if push is not None and not hub.reads_as_name(push):
        raise ConfigError(f"--push {push}: expected owner/name")
    if not source.strip():
        raise ConfigError(
            f"{source!r} is not a source of weights: expected a run's output_dir, or one of its checkpoints"
        )
    if "://" not in source and not Path(source).expanduser().exists():
        raise ConfigError(f"{source}: no such folder; expected a run's output_dir, or one of its checkpoints")
    if find_checkpoint(source if "://" in source else str(Path(source).expanduser()), verify=False) is None:
        raise ConfigError(f"{source} is neither a run of Atoll nor one of its checkpoints; other weights: atoll import")
    _convert(source, dest, dtype, max_shard, force)
    if push is not None:
        with progress_bar(f"uploading to {push}"):
            where = hub.push(dest, push, private=private)
        print(f"{dest} is at {where}")


def import_(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A Hugging Face folder, owner/name, or a GGUF file.")],
    dest: Annotated[Path, typer.Argument(metavar="DEST", help="Folder to write.")],
    dtype: Annotated[
        str | None, typer.Option(metavar="TYPE", help="bf16, fp32 or fp16; the source's by default.")
    ] = None,
    max_shard: MaxShard = "5GB",
    force: Force = False,
) -> None:
    """Turn published weights into a folder to train from.

    \b
        atoll import meta-llama/Llama-3.1-8B llama
        atoll train llama3_8b --model.init llama --data.tokenizer llama --data.path notes.txt
    """
    has_tokenizer = _convert(source, dest, dtype, max_shard, force)
    tokenizer = ["--data.tokenizer", str(dest)] if has_tokenizer else []
    print(f"to train from it: {command_line('--model.init', str(dest), *tokenizer)}")


def _convert(source: str, dest: Path, dtype: str | None, max_shard: str, force: bool) -> bool:
    """Write the folder; whether it has a tokenizer that can be read."""
    from atoll.train.data.tokenizer import load_tokenizer
    from atoll.train.metrics.figures import size
    from atoll.train.weights import export as write

    with progress_bar(f"writing {dest}") as progress:
        notes = write(source, dest, dtype=dtype, max_shard_bytes=_bytes(max_shard), force=force, progress=progress)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    written = sum(path.stat().st_size for path in dest.iterdir())
    try:
        load_tokenizer(str(dest))
    except ConfigError:  # none, or one that only transformers reads
        print(f"{dest}: {size(written)}")
        return False
    print(f"{dest}: {size(written)}; try it: {command_line('atoll', 'generate', str(dest), 'Once upon a time')}")
    return True


def generate(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE", help="A run's folder, a checkpoint, a Hugging Face folder, owner/name, or a GGUF file."
        ),
    ],
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="Text to continue.")],
    num_tokens: Annotated[
        int, typer.Option("--num-tokens", "-n", min=1, metavar="N", help="Maximum number of new tokens.")
    ] = 120,
    temperature: Annotated[
        float, typer.Option(min=0.0, metavar="T", help="Sampling temperature; 0: the most likely token.")
    ] = 0.8,
    top_k: Annotated[int | None, typer.Option(min=1, metavar="N", help="Sample from the N most likely tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(metavar="P", help="Nucleus (top-p) sampling.")] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Random seed.")] = 0,
    device: Annotated[
        str | None, typer.Option(metavar="DEVICE", help="cpu, cuda or cuda:1; a GPU by default if there is one.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Tokenizer if the source has none: a folder, file or name.")
    ] = None,
) -> None:
    """Generate text from a prompt, streaming.

    \b
        atoll generate outputs/austen "It is a truth"
        atoll generate outputs/austen "It is a truth" --temperature 0 -n 40
    """
    import torch

    from atoll.train.models import registry
    from atoll.train.models.generate import generate as tokens_after
    from atoll.train.models.generate import stream_text
    from atoll.train.weight_source import open_weights
    from atoll.train.weights import load_weights

    place = _device(device)
    _refuse_broken_text(prompt)
    if not Path(source).exists() and (
        runs := [path.parent.name for path in Path(source).parent.glob("*/summary.json")]
    ):
        raise ConfigError(f"{source}: no such run folder{nearest(Path(source).name, runs, str(Path(source).parent))}")
    with progress_bar(f"loading {source}") as progress:
        opened = open_weights(source, None, progress)
        text = _tokenizer(opened, tokenizer)
        dtype = torch.float32 if place == "cpu" else torch.bfloat16
        model = registry.build(opened.section, device=place, dtype=dtype).eval()
        notes = load_weights(model, opened.section, opened, progress)
        special = opened.special_ids.get("eos_token_id")
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    stop = {text.eos_id, *(special if isinstance(special, list) else [special])} - {None}
    ids = text.encode(prompt)
    if text.bos_id is not None and (text.adds_bos or not ids):
        ids.insert(0, text.bos_id)
    new = tokens_after(
        model,
        ids,
        num_tokens=num_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop={each for each in stop if each is not None},
    )
    print(prompt, end="", flush=True)
    for piece in stream_text(new, text.decode, after=ids):
        print(piece, end="", flush=True)
    print()


def _tokenizer(opened: WeightSource, given: str | None) -> Tokenizer:
    """The source's own tokenizer, or the one that was named."""
    import tempfile

    from atoll.train.data.tokenizer import load_tokenizer

    spec = opened.tokenizer if given is None else given
    if spec is not None:
        return load_tokenizer(spec)
    with tempfile.TemporaryDirectory(prefix="atoll-") as folder:
        if (note := opened.write_tokenizer(Path(folder))) is not None:
            raise ConfigError(f"{opened.label}: {note}; or name one with --tokenizer")
        return load_tokenizer(folder)


def _refuse_broken_text(prompt: str) -> None:
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"the prompt is not valid UTF-8 text at its character {error.start + 1}: what encoding has the terminal or "
            "file that it came from?"
        ) from None


def _device(wanted: str | None) -> str:
    import torch

    if wanted is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    found = re.fullmatch(r"cpu|cuda(?::(\d{1,4}))?", wanted)
    if found is None:
        raise ConfigError(f"--device {wanted}: expected cpu, cuda or cuda:N")
    num_gpus = torch.cuda.device_count()
    if wanted != "cpu" and int(found[1] or 0) >= num_gpus:
        raise ConfigError(f"--device {wanted}: torch can use {num_gpus} GPUs here, and the first is cuda:0")
    return wanted


def _bytes(text: str) -> float:
    from pydantic import ByteSize, TypeAdapter, ValidationError

    size = 0
    with suppress(ValidationError):
        if re.fullmatch(r"\d{1,15}(\.\d+)?\s*[A-Za-z]*", text):  # pydantic takes 1..5GB for 1
            size = int(TypeAdapter(ByteSize).validate_python(text))
    if size <= 0:
        raise ConfigError(f"--max-shard {text}: expected a size such as 5GB or 500MB")
    return size


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[..., None]]:
    """A line on stderr that says how far it is; gone when it is done, and nothing where nobody looks.

    It is shown done, total (None where that is not known) and, where it changes, what is done.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        task = shown.add_task(what, total=None)

        def update(done: float, total: float | None, what: str | None = None) -> None:
            shown.update(task, completed=done, total=total, description=what)

        yield update
