"""Weights in and out: into a built model of any sharding, and from all that can be read to Hugging Face's files."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import nn

from atoll.core.errors import ConfigError
from atoll.core.paths import fsync_folder, sweep_temporary, temporary_beside
from atoll.train import hub
from atoll.train.dtensor import copy_part
from atoll.train.hub import Progress
from atoll.train.models import hf
from atoll.train.models.family import family_of, shapes, stored_tensors
from atoll.train.recipe.schema import ModelSection
from atoll.train.weight_source import WeightSource, open_weights

SHARD_BYTES = 5_000_000_000

_USERS = "inner."  # the module of a user's own model inside ours
# What a source may say differently from the recipe with equal shapes, and other results.
_TELLING = ("norm_eps", "rope_theta", "rope_scaling")


# ---------------------------------------------------------------------------------------------------------- in
@torch.no_grad()
def load_weights(
    model: nn.Module, section: ModelSection, source: str | WeightSource, progress: Progress | None = None
) -> list[str]:
    """Set the parameters of a model from published or own weights.

    Each rank reads what it holds: parameters may be sharded (DTensor, any mesh), of any dtype and on any device, and
    those of other pipeline stages may be missing. One tensor is in memory at a time; safetensors are mapped, so that
    only the pages of a rank's own part are read.

    Args:
        model: one that ``registry.build`` made, or a stage of it, materialised.
        section: the recipe's ``[model]``, its vocabulary size known.
        source: a name on a hub, a folder with safetensors, a ``.safetensors`` or ``.gguf`` file, a run of Atoll, or one
            that is open.
        progress: called with tensors set and tensors in all; while fetching, with bytes.

    Returns:
        lines to show: what the source says differently from the recipe.

    Raises:
        ConfigError: a tensor is missing, left over, or of another shape, and the message names it and both shapes; or
            it holds values that are not finite.
    """
    opened = open_weights(source, section, progress) if isinstance(source, str) else source
    parameters = {name.removeprefix(_USERS): value for name, value in model.named_parameters()}
    notes = opened.notes + _differences(section, opened)
    theirs = {name: name for name in parameters}
    if "head.weight" in theirs and "head.weight" not in opened.tensors:
        theirs["head.weight"] = "embed.weight"
        notes.append(f"{opened.label} has a tied head: here the head starts as a copy of the embedding")
    wanted = {theirs[name]: tuple(parameter.shape) for name, parameter in parameters.items()}
    places = parameters if section.python is not None else shapes(section)
    _compare(opened, wanted, places, "the model", ": are family, layers and tied of [model] those of it?")
    # In the file's order, so that tensors which the file holds as one are read once.
    order = {name: number for number, name in enumerate(opened.tensors)}
    for number, name in enumerate(sorted(parameters, key=lambda name: order[theirs[name]])):
        part = copy_part(opened.read(theirs[name]), parameters[name])
        if not part.isfinite().all():
            count = int((~part.isfinite()).sum())
            raise ConfigError(
                f"{opened.label}: {count:,} of {part.numel():,} values of {theirs[name]} are NaN or infinite"
            )
        if progress is not None:
            progress(number + 1, len(parameters))
    return notes


def _differences(section: ModelSection, opened: WeightSource) -> list[str]:
    own = opened.section
    if section.python is not None:
        return []
    rotary = family_of(section).rotary
    networks = [
        f"of heads = {each.heads}, kv_heads = {each.num_kv_heads}, head_dim = {each.size_of_head} with "
        f"{'rotary' if family_of(each).rotary else 'learnt'} positions"
        for each in (section, own)
    ]
    if networks[0] != networks[1]:
        raise ConfigError(f"[model] is {networks[0]}, {opened.label} is {networks[1]}: use its numbers")
    notes = [
        f"[model] {key} = {getattr(section, key)} here, {getattr(own, key)} in {opened.label}"
        for key in _TELLING
        if getattr(section, key) != getattr(own, key) and (rotary or key == "norm_eps")
    ]
    if section.max_seq_len > own.max_seq_len and rotary:
        notes.append(
            f"[model] max_seq_len = {section.max_seq_len} here: {opened.label} was made for {own.max_seq_len} at most"
        )
    return notes


def _compare(
    opened: WeightSource, wanted: Mapping[str, tuple[int, ...]], places: Collection[str], what: str, hint: str = ""
) -> None:
    """Compare names and shapes before anything is changed.

    Args:
        wanted: shapes by name.
        places: all names that the network has, on this rank or another.
        what: whose they are, for messages.
    """
    have = set(opened.tensors)
    if missing := [name for name in wanted if name not in have]:
        example = f"{missing[0]} {list(wanted[missing[0]])}"
        raise ConfigError(f"{opened.label} lacks {_counted(missing)} that {what} needs, such as {example}{hint}")
    if surplus := sorted(have - set(places)) or opened.unknown:
        example = f"{surplus[0]} {list(opened.shape(surplus[0]) if surplus[0] in have else opened.names[surplus[0]])}"
        raise ConfigError(
            f"{opened.label} has {_counted(surplus)} that {what} has no place for, such as {example}{hint}"
        )
    for name, shape in wanted.items():
        if (found := opened.shape(name)) != shape:
            raise ConfigError(
                f"{opened.label}: tensor {opened.file_name(name)} ({name}) is {list(found)}, {what} has {list(shape)} "
                "there" + (hint and ": use the source's numbers in [model]")
            )


def _counted(names: list[str]) -> str:
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''}"


# --------------------------------------------------------------------------------------------------------- out
def export(
    source: str | WeightSource,
    folder: str | Path,
    *,
    dtype: str | None = None,
    max_shard_bytes: float = SHARD_BYTES,
    force: bool = False,
    progress: Progress | None = None,
) -> list[str]:
    """Write ``config.json``, ``generation_config.json``, safetensors and the tokenizer, as ``transformers`` reads them.

    One shard is in memory at a time. The folder appears whole or not at all.

    Args:
        source: as ``load_weights`` takes it, or one that is open.
        folder: to be made.
        dtype: "fp32", "bf16" or "fp16"; by default what the source keeps its weights in, and bf16 for quantised ones
            and for checkpoints.
        max_shard_bytes: of one file of weights; a single larger tensor has a file to itself.
        force: replace an earlier export at ``folder``; anything else there is never deleted.
        progress: called with bytes written and bytes in all; while fetching, with those.

    Returns:
        lines to show.

    Raises:
        ConfigError: the source can't be read, ``transformers`` has no such network, or the target is taken.
    """
    target = Path(folder).expanduser()
    if dtype is not None and dtype not in hf.DTYPES:
        raise ConfigError(f"dtype = {dtype!r}: expected one of {', '.join(hf.DTYPES)}")
    _refuse_taken(target, force)  # before hours of a download
    opened = open_weights(source, None, progress) if isinstance(source, str) else source
    dtype = dtype or opened.dtype
    config = hf.hf_config(opened.section, dtype) | opened.special_ids
    wanted = shapes(opened.section)
    _compare(opened, wanted, wanted, "its network")
    with _whole_folder(target) as place:
        _write_json(place / "config.json", config)
        _write_json(place / "generation_config.json", {"_from_model_config": True, **opened.special_ids})
        _write_tensors(opened, place, getattr(torch, hf.DTYPES[dtype]), max_shard_bytes, progress)
        note = opened.write_tokenizer(place)
    return opened.notes + ([] if note is None else [note])


def _refuse_taken(target: Path, force: bool) -> None:
    """Refuse a target that is more than an earlier export."""
    if not target.exists():
        return
    if not target.is_dir():
        raise ConfigError(f"{target} is a file: choose another folder")
    if Path.cwd().is_relative_to(target.resolve()):
        raise ConfigError(
            f"{target} is, or holds, the folder you are in, and would be replaced: start from another one"
        )
    found = sorted(path.name for path in target.iterdir())
    if found and not force:
        raise ConfigError(f"{target} exists and is not empty: choose another folder, or give --force")
    known = [*hub.WEIGHTS, *hub.TOKENIZER]
    others = [name for name in found if not any(fnmatch(name, each) for each in known) or (target / name).is_dir()]
    if found and (others or "config.json" not in found):
        wrong = f"holds {others[0]}, which is not of an export" if others else "holds no config.json"
        raise ConfigError(f"{target} {wrong}, and --force replaces earlier exports only: choose another folder")


def _write_tensors(
    opened: WeightSource, place: Path, dtype: torch.dtype, max_shard_bytes: float, progress: Progress | None
) -> None:
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    known = shapes(opened.section)
    stored = {each.name: each for each in stored_tensors(opened.section)}
    sizes = {name: sum(math.prod(known[part.name]) for part in each.parts) for name, each in stored.items()}
    split = split_torch_state_dict_into_shards(
        {name: torch.empty(size, dtype=dtype, device="meta") for name, size in sizes.items()},
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=int(max_shard_bytes),
    )
    done = 0
    for file, names in split.filename_to_tensors.items():
        content = {}
        for name in names:
            parts = [opened.read(part.name).detach().to("cpu", dtype) for part in stored[name].parts]
            whole = torch.cat(parts)
            content[name] = whole.t().contiguous() if stored[name].transposed else whole
            done += whole.nbytes
            if progress is not None:
                progress(done, split.metadata["total_size"])
        try:
            save_file(content, place / file, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(str(error)) from None
    if split.is_sharded:
        _write_json(place / hub.INDEX, {"metadata": split.metadata, "weight_map": split.tensor_to_filename})


@contextmanager
def _whole_folder(target: Path) -> Iterator[Path]:
    """A folder to write into, which takes its place as ``target`` when all of it is on disk."""
    target = target.resolve()  # a link stays one, and "." has a name
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        sweep_temporary(target)
        with temporary_beside(target, folder=True) as place, temporary_beside(target, folder=True) as old:
            yield place
            mode = (place / "config.json").stat().st_mode
            for path in place.iterdir():
                path.chmod(mode)  # safetensors makes its files readable by their owner only
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
            fsync_folder(place)
            if target.exists():
                os.replace(target, old)
            os.replace(place, target)
        fsync_folder(target.parent)
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror or error}") from None


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
