"""What a run left behind: its newest whole checkpoint, the recipe in it, its weights one at a time, its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from atoll.core.errors import CheckpointError, ConfigError
from atoll.train.checkpoint.manifest import Manifest, step_name, step_of
from atoll.train.checkpoint.store import Store, open_store
from atoll.train.checkpoint.survey import INDEX, read_index, reader_of, rot, survey
from atoll.train.folder import stored_identity, stored_recipe

_WEIGHTS = "model."  # what a checkpoint puts in front of the names of a model's tensors
_CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class SavedStep:
    """One whole checkpoint, in a folder or an object store."""

    store: Store
    manifest: Manifest
    notes: tuple[str, ...] = ()  # of newer steps that were passed over
    run: Path | None = None  # the folder of the run, where that was asked for

    @property
    def label(self) -> str:
        """Where it lies."""
        return self.store.path(self.manifest.step)

    @property
    def recipe(self) -> dict[str, Any]:
        """The resolved recipe that it was trained with.

        Raises:
            ConfigError: it holds none.
        """
        recipe = self.manifest.meta.get("recipe")
        if not isinstance(recipe, dict):
            raise ConfigError(f"{self.label} holds no recipe: its weights belong to a network that is not known")
        return recipe

    @property
    def tokenizer(self) -> str | None:
        """The tokenizer its data was read with: the folder that the run keeps, else what the recipe names."""
        for place in (self.run or Path(self.store.root).parent, Path(self.store.root)):
            if (place / "tokenizer").is_dir():
                return str(place / "tokenizer")
        named = (self.recipe.get("data") or {}).get("tokenizer")
        return named if isinstance(named, str) and not named.startswith("bpe:") else None

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor of the model, by name."""
        return {name: tuple(entry.size) for name, entry in self._tensors.items()}

    @property
    def weight_files(self) -> list[str]:
        """Files that hold tensors of the model, relative to the step's folder."""
        places = (self._metadata.storage_data or {}).items()
        found = {str(place.relative_path) for index, place in places if index.fqn.startswith(_WEIGHTS)}
        return sorted(map(self.manifest.inside, found))

    def read(self, name: str) -> Tensor:
        """One tensor of the model, on CPU, in the type it was saved in."""
        entry = self._tensors[name]
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        _load_state_dict({_WEIGHTS + name: tensor}, reader_of(self.store, self.manifest, self._metadata), no_dist=True)
        return tensor

    @cached_property
    def _tensors(self) -> dict[str, TensorStorageMetadata]:
        found = self._metadata.state_dict_metadata
        return {
            name.removeprefix(_WEIGHTS): entry
            for name, entry in found.items()
            if name.startswith(_WEIGHTS) and isinstance(entry, TensorStorageMetadata)
        }

    @cached_property
    def _metadata(self) -> Metadata:
        return read_index(self.store, self.manifest)


def find_checkpoint(spec: str, *, verify: bool = True) -> SavedStep | None:
    """The checkpoint that ``spec`` is, or the newest whole one of the run or of the folder of checkpoints it is.

    Args:
        spec: an ``output_dir``, its ``checkpoints``, one ``step-…`` in there, or a URL of one of them.
        verify: read the files of its weights through and compare their checksums, too.

    Returns:
        None where it is none of these.

    Raises:
        ConfigError: it is one of them, without a whole checkpoint.
    """
    spec = spec.rstrip("/")
    root, _, last = spec.rpartition("/")
    if (step := step_of(last)) is not None:
        return _newest(open_store(root or "."), verify, step)
    recipe = None if "://" in spec else stored_recipe(Path(spec))
    if recipe is not None and (elsewhere := recipe.checkpoint.path) is not None:
        saved = _newest(open_store(elsewhere), verify)
        if saved is None or len({saved.manifest.meta.get("run"), stored_identity(Path(spec))} - {None}) > 1:
            raise ConfigError(
                f"{spec}: its checkpoints are in {elsewhere!r}, and there is none of this run: a relative path counts "
                "from the folder in which it was started; go there"
            )
        return replace(saved, run=Path(spec))
    for place in (f"{spec}/{_CHECKPOINTS}", spec):
        if (saved := _newest(open_store(place), verify)) is not None:
            return saved
    if Path(spec, _CHECKPOINTS).is_dir():
        raise ConfigError(f"{spec} has no whole checkpoint yet")
    return None


def _newest(store: Store, verify: bool, only: int | None = None) -> SavedStep | None:
    """The newest whole checkpoint, or that one step; None where there is none, not even a damaged one."""
    try:
        found = survey(store, only)
        while (newest := found.newest()) is not None:
            saved = SavedStep(store, newest)
            wrong = rot(store, newest, [newest.inside(INDEX)])
            if wrong is None and verify:
                wrong = rot(store, newest, saved.weight_files)
            if wrong is None:
                passed = [
                    f"{store.path(each)} is damaged: {found.torn[each]}" for each in found.torn if each > newest.step
                ]
                return replace(saved, notes=tuple(f"{each}; {step_name(newest.step)} is used" for each in passed))
            found.mark_torn(newest.step, wrong)
    except CheckpointError as error:
        raise ConfigError(str(error)) from None
    except OSError as error:
        raise ConfigError(f"{store.root} cannot be read: {error}") from None
    return None
