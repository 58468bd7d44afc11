"""Where weights come from: safetensors files and folders, a hub, GGUF files, Atoll's own runs and checkpoints.

Each is read one tensor at a time, by Atoll's names, whatever the names, fusions and orders of the file.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from torch import Tensor

from atoll.core.errors import ConfigError
from atoll.core.validation import nearest
from atoll.train import hub
from atoll.train.data.tokenizer import load_tokenizer
from atoll.train.hub import Progress
from atoll.train.models import gguf, hf
from atoll.train.models.config_json import checked
from atoll.train.models.family import Part, Stored, stored_tensors
from atoll.train.recipe.schema import ModelSection
from atoll.train.saved import SavedStep, find_checkpoint

# Buffers that older checkpoints hold beside the weights.
_NO_WEIGHTS = re.compile(r"rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$|attn_rot_embd|^rope_freqs\.weight$")
_HEADS = ("lm_head.weight", "output.weight")
_EXPECTED = "expected a run's folder, a Hugging Face folder, a .safetensors or .gguf file, or owner/name on a hub"
_FLOATS = ("F32", "BF16", "F16", "F64")


@dataclass
class WeightSource:
    """Tensors of one model, to be read one at a time.

    Attributes:
        label: what messages call it.
        section: the network it says it is, or the recipe's where it doesn't.
        names: tensors that the file has, by the file's names, in its order, with their shapes.
        read_stored: reads one by the file's name.
        stored: the file's tensors that ours are in; None where they have our names.
        dtype: "fp32", "bf16" or "fp16": what its weights are kept in.
        special_ids: ``bos_token_id`` and its like.
        write_tokenizer: writes the tokenizer's files into a folder; returns a line where it could not.
        tokenizer: what ``load_tokenizer`` takes; None where only ``write_tokenizer`` can make it.
        notes: lines to show of what was found while opening it.
    """

    label: str
    section: ModelSection
    names: dict[str, tuple[int, ...]]
    read_stored: Callable[[str], Tensor]
    stored: list[Stored] | None = None
    dtype: str = "bf16"
    special_ids: dict[str, Any] = field(default_factory=dict)
    write_tokenizer: Callable[[Path], str | None] = lambda _: None
    tokenizer: str | None = None
    notes: list[str] = field(default_factory=list)
    _last: tuple[str, Tensor] | None = None

    def __post_init__(self) -> None:
        if self.stored is None:  # a user's own model is inside of ours
            self.stored = [
                Stored(name, (Part(name.removeprefix("inner."), shape[0] if shape else 1),))
                for name, shape in self.names.items()
            ]
        self._places: dict[str, tuple[Stored, str, int]] = {}
        known = set()
        for stored in self.stored:
            # Checkpoints of bare models lack the ``model.`` in front.
            short = stored.name.removeprefix("model.").removeprefix("transformer.")
            theirs = stored.name if stored.name in self.names else short
            if theirs in self.names:
                known.add(theirs)
                start = 0
                for part in stored.parts:
                    self._places[part.name] = (stored, theirs, start)
                    start += part.rows
        # Some checkpoints hold a tied head a second time.
        fine = (*known, *(_HEADS if self.section.tied else ()))
        self.unknown = [name for name in self.names if name not in fine and not _NO_WEIGHTS.search(name)]

    @property
    def tensors(self) -> list[str]:
        """Our names of what it has."""
        return list(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, by our name.

        Raises:
            ConfigError: it is one of several fused ones whose sizes don't add up.
        """
        stored, theirs, _ = self._places[name]
        shape = self.names[theirs][::-1] if stored.transposed else self.names[theirs]
        rows = {part.name: part.rows for part in stored.parts}
        if len(rows) == 1:
            return shape
        if shape[:1] != (sum(rows.values()),):
            sizes = " + ".join(str(each) for each in rows.values())
            raise ConfigError(f"{self.label}: tensor {theirs} is {list(shape)}, its config says {sizes} rows")
        return (rows[name], *shape[1:])

    def file_name(self, name: str) -> str:
        """What the file calls the tensor that ours is in."""
        return self._places[name][1]

    def read(self, name: str) -> Tensor:
        """A tensor by our name, on CPU; may be a view of the file."""
        stored, theirs, start = self._places[name]
        if self._last is None or self._last[0] != theirs:
            self._last = None  # drop it before the next one is in memory
            self._last = (theirs, self.read_stored(theirs))
        tensor = self._last[1]
        if stored.permuted_heads:
            tensor = _unpermuted(tensor, stored.permuted_heads)
        if stored.transposed:
            tensor = tensor.t()
        return tensor if len(stored.parts) == 1 else tensor[start : start + self.shape(name)[0]]


def _unpermuted(tensor: Tensor, heads: int) -> Tensor:
    """Rows [H·E, D] with rotary pairs side by side to ours, with the pairs' halves one after the other."""
    return tensor.reshape(heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


# ------------------------------------------------------------------------------------------------------ opening
def open_weights(spec: str, section: ModelSection | None = None, progress: Progress | None = None) -> WeightSource:
    """Open what ``spec`` names: a run's folder, a checkpoint's, a Hugging Face folder, a file, or a name on a hub.

    Args:
        spec: path or ``owner/name``.
        section: the network for files that don't describe their own.
        progress: of a download, in bytes.

    Raises:
        ConfigError: there is nothing that can be read; says what was expected.
    """
    path = Path(spec).expanduser()
    if not spec.strip():
        raise ConfigError(f"{spec!r} is not a source of weights: {_EXPECTED}")
    if path.is_dir() or "://" in spec:
        saved = find_checkpoint(str(path) if path.is_dir() else spec)
        if saved is not None:
            return _from_checkpoint(saved)
    if path.is_dir():
        return _from_folder(path, spec, section)
    if path.is_file() and path.suffix in (".gguf", ".safetensors"):
        return _from_file(path, spec, section)
    if path.exists():
        raise ConfigError(f"{spec}: {_EXPECTED}")
    if hub.is_hub_name(spec):
        return _from_folder(hub.fetch(spec, patterns=hub.WEIGHTS + hub.TOKENIZER, progress=progress), spec, section)
    near = nearest(path.name, os.listdir(path.parent), os.path.dirname(spec)) if path.parent.is_dir() else ""
    raise ConfigError(f"{spec}: no such file or folder, and no owner/name on a hub{near or f'; {_EXPECTED}'}")


def _from_folder(folder: Path, label: str, section: ModelSection | None) -> WeightSource:
    """As ``transformers`` does: model.safetensors, else what its index names; else the one file there is."""
    if (folder / "adapter_config.json").is_file():
        raise ConfigError(
            f"{label} holds an adapter (adapter_config.json), and whole weights are read: merge it into its base, "
            "with merge_and_unload() of peft, and name the folder that this is saved in"
        )
    if (folder / "model.safetensors").is_file():
        return _from_file(folder / "model.safetensors", label, section)
    if (folder / hub.INDEX).is_file():
        places = _read_json(folder / hub.INDEX).get("weight_map")
        if not isinstance(places, dict):
            raise ConfigError(f"{folder / hub.INDEX}: weight_map is {places!r}, expected the file of each tensor")
        return _from_safetensors(folder, places, label, section)
    files = [*folder.glob("*.safetensors"), *folder.glob("*.gguf")]
    if len(files) == 1:
        return _from_file(files[0], label, section)
    have = ", ".join(sorted(path.name for path in folder.iterdir())[:6]) or "nothing"
    raise ConfigError(
        f"{label} holds no weights that can be read: expected .safetensors files with their {hub.INDEX}, one .gguf "
        f"file, or Atoll's checkpoints; it has {have}. Files that end in .bin are pickles, which are not read: save "
        "such a model again, with save_pretrained(folder)"
    )


def _from_file(path: Path, label: str, section: ModelSection | None) -> WeightSource:
    if path.suffix == ".gguf":
        return _from_gguf(path)
    return _from_safetensors(path.parent, dict.fromkeys(_opened(path).keys(), path.name), label, section)


def _from_safetensors(
    folder: Path, places: Mapping[str, str], label: str, section: ModelSection | None
) -> WeightSource:
    """Open the files of tensors.

    Args:
        places: the file of each, in the folder, by its name.
    """
    from safetensors import SafetensorError

    opened = {file: _opened(folder / file) for file in sorted(set(places.values()))}
    try:
        pieces = {name: opened[file].get_slice(name) for name, file in places.items()}
    except SafetensorError as error:  # which says what is missing
        raise ConfigError(f"{label} does not hold what its {hub.INDEX} says: {error}; fetch or copy it again") from None
    dtypes = {name: piece.get_dtype() for name, piece in pieces.items() if not _NO_WEIGHTS.search(name)}
    for name, dtype in dtypes.items():
        if dtype not in _FLOATS:
            raise ConfigError(
                f"{label}: tensor {name} is of type {dtype}, expected one of {', '.join(_FLOATS)}: quantised weights "
                "are read from GGUF files only"
            )
    config: dict[str, Any] = {}
    if (folder / "config.json").is_file():
        config = _read_json(folder / "config.json")
        section = hf.section_from_hf(config, source=f"{label}: config.json")
    if section is None:
        raise ConfigError(f"{label} has no config.json beside it, so that its network is not known")
    if (folder / "generation_config.json").is_file():
        config |= _read_json(folder / "generation_config.json")
    return WeightSource(
        label=label,
        section=section,
        names={name: tuple(piece.get_shape()) for name, piece in pieces.items()},
        read_stored=lambda name: opened[places[name]].get_tensor(name),
        stored=stored_tensors(section) if section.python is None else None,
        dtype={("F32",): "fp32", ("F16",): "fp16"}.get(tuple(set(dtypes.values())), "bf16"),
        special_ids=checked(_SpecialIds, config, label).model_dump(exclude_none=True),
        write_tokenizer=partial(_copy_tokenizer, folder),
        tokenizer=str(folder),
    )


class _SpecialIds(BaseModel):
    """A folder's generation config, or else its config, says which tokens those are."""

    bos_token_id: int | list[int] | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | list[int] | None = None


def _opened(file: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file} is not a complete safetensors file: {error}; fetch or copy it again") from None


def _from_gguf(path: Path) -> WeightSource:
    file = gguf.GgufFile(path)
    section = file.section
    return WeightSource(
        label=str(path),
        section=section,
        names=file.shapes,
        read_stored=file.read,
        stored=gguf.layout(section),
        dtype=file.dtype,
        special_ids=file.special_ids,
        write_tokenizer=file.write_tokenizer,
    )


# -------------------------------------------------------------------------------------------- Atoll's own checkpoints
def _from_checkpoint(saved: SavedStep) -> WeightSource:
    """The weights of a checkpoint; optimizer state and the rest are left alone."""
    section = checked(ModelSection, saved.recipe.get("model") or {}, f"{saved.label}: [model] of its recipe")
    if section.vocab_size is None and "embed.weight" in saved.shapes:
        section = section.model_copy(update={"vocab_size": saved.shapes["embed.weight"][0]})
    tokenizer = None if saved.tokenizer is None else load_tokenizer(saved.tokenizer)
    ids = {} if tokenizer is None else {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}

    def write_tokenizer(folder: Path) -> str | None:
        if tokenizer is None:
            return "the run keeps no tokenizer, and none was written"
        tokenizer.save(folder)
        if not (folder / "tokenizer.json").is_file():
            return "the tokenizer is 'bytes', which Atoll knows and transformers does not"
        return None

    return WeightSource(
        label=saved.label,
        section=section,
        names=saved.shapes,
        read_stored=saved.read,
        special_ids={key: number for key, number in ids.items() if number is not None},
        write_tokenizer=write_tokenizer,
        tokenizer=saved.tokenizer,
        notes=list(saved.notes),
    )


def _copy_tokenizer(source: Path, folder: Path) -> str | None:
    """Copy the files of a tokenizer as they are."""
    files = {path for each in hub.TOKENIZER for path in source.glob(each) if path.is_file()}
    for path in files:
        (folder / path.name).write_bytes(path.read_bytes())
    return None if files else "there is no tokenizer beside the weights, and none was written"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds {str(content)[:40]}, expected an object in braces")
    return content
