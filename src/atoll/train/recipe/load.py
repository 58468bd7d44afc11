"""From a name, a file or a dict to a checked recipe: inheritance, overrides, and every mistake told at once."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from atoll.core.errors import ConfigError
from atoll.core.paths import current_folder
from atoll.core.validation import nearest
from atoll.train.recipe import files, keys, titan
from atoll.train.recipe.compare import diff, harmful, resolved_toml
from atoll.train.recipe.durations import parse_duration
from atoll.train.recipe.overrides import parse_overrides
from atoll.train.recipe.schema import SCHEMA_VERSION, DataSection, Recipe

__all__ = ["Loaded", "diff", "harmful", "load_recipe", "require_complete", "resolved_toml"]

_COMMAND_LINE = "command line"
_NOT_INHERITED = ("name", "version", "base")
_MISSING = object()


@dataclass(frozen=True, slots=True)
class Loaded:
    """A recipe as it will run, and how it came about.

    Attributes:
        recipe: every base merged, overrides applied, ``{name}`` filled in.
    """

    recipe: Recipe
    notes: list[str]
    source: str


@dataclass(slots=True)
class _Layers:
    """Trees merged so far, the base first, and who said what."""

    tree: dict[str, Any] = field(default_factory=dict)
    origins: dict[keys.Path, str] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    decay_ratio: float | None = None  # of a file of TorchTitan's, until the length of the run is known

    def put(self, tree: Mapping[str, Any], origin: str) -> None:
        """Merge a layer: tables merge, values replace. Its unknown keys become complaints and are left out."""
        layer = copy.deepcopy(dict(tree))
        for path, complaint in keys.unknown_keys(layer):
            self.complaints.append(f"{origin}: {complaint}")
            _drop(layer, path)
        parallel = layer.get("parallel", {})
        for key in keys.AXIS_SPELLINGS.keys() & parallel.keys():  # ``tp`` becomes ``tensor``, which replaces a base's
            if (axis := keys.axis_name(key)) in parallel:
                self.complaints.append(f"{origin}: [parallel] {axis} is given twice, once as {key}")
            parallel[axis] = parallel.pop(key)
        train = layer.get("train", {})
        for given, other in (("steps", "tokens"), ("tokens", "steps")):
            # The two say the same thing: the later layer's word replaces both.
            if train.get(given) is not None and train.get(other) is None:
                self.tree.get("train", {}).pop(other, None)
        schedule = layer.get("schedule", {})
        if schedule.get("kind", "wsd") != "wsd" and "decay" not in schedule:
            # Only wsd has one: another kind replaces what a base says of it.
            self.tree.get("schedule", {}).pop("decay", None)
        self._merge(self.tree, layer, origin, ())

    def settle_decay(self) -> None:
        """Let TorchTitan's ``decay_ratio`` be a length, once every layer has had its word on how long the run is."""
        train, schedule = self.tree.get("train", {}), self.tree.get("schedule", {})
        if self.decay_ratio is None or "decay" in schedule or schedule.get("kind") != "wsd":
            return
        tokens = train.get("tokens")
        try:
            length = parse_duration(train.get("steps") if tokens is None else f"{tokens}tok")
            warmup = parse_duration(schedule.get("warmup") or 0)
        except ValueError:  # the check that follows has the words for it
            return
        schedule["decay"] = titan.decay_length(self.decay_ratio, length, warmup)

    def _merge(self, into: dict[str, Any], layer: Mapping[str, Any], origin: str, where: keys.Path) -> None:
        for key, value in layer.items():
            path = (*where, key)
            if isinstance(value, Mapping) and isinstance(into.get(key), dict):
                self.origins[path] = origin
                self._merge(into[key], value, origin, path)
            else:
                into[key] = value
                self._note_origin(value, origin, path)

    def _note_origin(self, value: Any, origin: str, path: keys.Path) -> None:
        self.origins[path] = origin
        for key, inner in value.items() if isinstance(value, Mapping) else ():
            self._note_origin(inner, origin, (*path, key))


def load_recipe(
    spec: str | os.PathLike[str] | Mapping[str, Any] | Recipe | None,
    overrides: Sequence[str] = (),
    *,
    env: Mapping[str, str] | None = None,
    world_size: int = 1,
) -> Loaded:
    """Read a recipe and check it.

    Args:
        spec: a shipped recipe's name, a path relative to the current folder, a tree as a TOML file has it, a recipe, or
            None for what ``CONFIG_FILE`` names.
        overrides: as on the command line: ``["--train.steps", "100", "--data.path=notes.txt"]``.
        env: where ``CONFIG_FILE`` is looked up; the environment by default.
        world_size: ranks there will be, for TorchTitan files that give the batch of one rank.

    Raises:
        ConfigError: there is no such recipe, or something in it can't be; the message has every mistake, with the file,
            the key, the value and what was expected.
    """
    try:
        return _loaded(spec, overrides, env, world_size)
    except RecursionError:
        raise ConfigError(
            f"{'recipe' if isinstance(spec, (Mapping, Recipe)) else spec}: its tables or lists are nested too deeply, "
            "or its chain of bases is too long"
        ) from None


def _loaded(
    spec: str | os.PathLike[str] | Mapping[str, Any] | Recipe | None,
    overrides: Sequence[str],
    env: Mapping[str, str] | None,
    world_size: int,
) -> Loaded:
    layers, folder = _Layers(), Path(current_folder())
    given = parse_overrides(overrides)
    if isinstance(spec, Recipe):
        spec = spec.model_dump(mode="json", exclude_none=True)
    if isinstance(spec, Mapping):
        source, name = "recipe", spec.get("name", "run")
        _put_with_bases(layers, dict(spec), source, folder, (), world_size)
    else:
        source = files.default_spec(os.environ if env is None else env) if spec is None else os.fspath(spec)
        file, layers.notes = files.find(source, folder)
        tree = files.read(file)
        name = tree.get("name", files.stem_of(file))
        _put_with_bases(layers, tree, os.path.basename(file), file.parent, (file.resolve(),), world_size)
    layers.tree["name"] = name
    layers.put(given, _COMMAND_LINE)
    layers.settle_decay()
    recipe = _checked(layers)
    output_dir = recipe.train.output_dir.replace("{name}", recipe.name)
    recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"output_dir": output_dir})})
    return Loaded(recipe, layers.notes, source)


def _put_with_bases(
    layers: _Layers, tree: dict[str, Any], origin: str, folder: Path, chain: tuple[Path, ...], world_size: int
) -> None:
    if titan.is_titan(tree):
        theirs = tree
        tree, notes = titan.from_titan(theirs, origin, world_size)
        layers.notes += notes
        layers.decay_ratio = titan.decay_ratio(theirs)
    _check_version(tree, origin)
    base = tree.pop("base", None)
    if base is not None:
        if not isinstance(base, str):
            raise ConfigError(f"{origin}: base = {base!r}: expected the name or the path of one recipe")
        if not base.strip():
            raise ConfigError(f"{origin}: base is empty: name a recipe, or leave base out")
        try:
            file, notes = files.find(base, folder)
        except ConfigError as error:
            raise ConfigError(f"{origin}: base: {error}") from None
        if file.resolve() in chain:
            names = " -> ".join(each.name for each in (*chain, file))
            raise ConfigError(f"{origin}: base = {base!r} leads back to itself: {names}")
        layers.notes += notes
        below = files.read(file)
        _put_with_bases(layers, below, file.name, file.parent, (*chain, file.resolve()), world_size)
    if chain:  # a file: its data may be beside it
        data = tree.get("data")
        for key in ("path", "validation"):
            if isinstance(data, dict) and key in data:
                data[key] = files.found_beside(data[key], folder)
    layers.put({key: value for key, value in tree.items() if key not in _NOT_INHERITED}, origin)


def _check_version(tree: Mapping[str, Any], origin: str) -> None:
    version = tree.get("version", SCHEMA_VERSION)
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise ConfigError(f"{origin}: version = {version!r}: expected a whole number, {SCHEMA_VERSION} now")
    if version > SCHEMA_VERSION:
        raise ConfigError(
            f"{origin}: version = {version} was written for a newer Atoll: this one reads recipes up to version "
            f"{SCHEMA_VERSION}; update Atoll, or write the recipe for version {SCHEMA_VERSION}"
        )


def _drop(tree: dict[str, Any], path: keys.Path) -> None:
    tables: list[Any] = [tree]
    for part in path[:-1]:
        inner = [table[part] for table in tables if isinstance(table, dict) and part in table]
        tables = [item for value in inner for item in (value if isinstance(value, list) else [value])]
    for table in tables:
        if isinstance(table, dict):
            table.pop(path[-1], None)


def _checked(layers: _Layers) -> Recipe:
    complaints = list(layers.complaints)
    try:
        recipe = Recipe.model_validate(layers.tree)
    except ValidationError as error:
        complaints += _in_words(error.errors(include_url=False), layers)
    else:
        if not complaints:
            return recipe
    count = len(complaints)
    title = complaints[0] if count == 1 else f"{count} mistakes in the recipe:\n  " + "\n  ".join(complaints)
    raise ConfigError(title)


def _in_words(errors: list[ErrorDetails], layers: _Layers) -> list[str]:
    """One line for each wrong key: where a key accepts several kinds, pydantic has an error for each."""
    lines: dict[keys.Path, str] = {}
    for error in errors:
        path = _key_path(error["loc"])
        if path in lines:
            continue
        origin = layers.origins.get(path) or layers.origins.get(path[:1], "recipe")
        lines[path] = f"{origin}: {_sentence(path, error, layers.tree)}"
    return list(lines.values())


def _key_path(location: tuple[int | str, ...]) -> keys.Path:
    """The longest beginning of a location that names a key; the rest tells list items and kinds of a union apart."""
    path: keys.Path = ()
    for part in location:
        if not isinstance(part, str) or keys.field_of((*path, part)) is None:
            break
        path = (*path, part)
    return path


def _sentence(path: keys.Path, error: ErrorDetails, tree: Mapping[str, Any]) -> str:
    if error["type"] == "value_error":  # our own words, from the schema
        reason = str(error["ctx"]["error"])
        named = len(path) > 1 or path[:1] == ("name",)
        return f"{keys.title(path)}: {reason}" if named else f"[{'.'.join(path)}] {reason}"
    value: Any = tree
    for part in path:
        value = value.get(part, _MISSING) if isinstance(value, Mapping) else _MISSING
    if value is _MISSING:
        return f"{keys.title(path)} is missing: expected {keys.expected(path)}"
    hint = nearest(value, keys.choices(path)) if isinstance(value, str) else ""
    return f"{keys.title(path)} = {value!r}: expected {keys.expected(path)}{hint}"


def require_complete(recipe: Recipe) -> None:
    """Refuse a recipe that leaves out what only its user can give.

    Raises:
        ConfigError: names each missing key and the flag to add.
    """
    missing = []
    if recipe.data.path is None:
        missing.append(
            "[data] path is not set: add --data.path FILE (text, JSONL, Parquet, .bin, a folder, a glob, or "
            "hf://owner/name)"
        )
    if recipe.data.tokenizer is None and not _holds_tokens(recipe.data):
        missing.append(
            "[data] tokenizer is not set: add --data.tokenizer bytes (needs no file), bpe:4096 (trained on the data), "
            "or a hub name, a folder or a tokenizer.json; or --data.format bin where the files hold tokens"
        )
    if recipe.train.length is None:
        missing.append("[train] steps is not set: add --train.steps 1000 (or 2ep, or 1e9tok)")
    if missing:
        head = "" if len(missing) == 1 else f"the recipe {recipe.name} is not complete:\n  "
        raise ConfigError(head + "\n  ".join(missing))


def _holds_tokens(data: DataSection) -> bool:
    """Whether all files are token files by ``format`` or their names, so that no tokenizer is needed."""
    paths = [data.path] if isinstance(data.path, str) else data.path or []
    flat: list[str] = []
    for part in paths:
        inner = part if isinstance(part, str) else part.path
        flat += [inner] if isinstance(inner, str) else inner
    return data.format == "bin" or (
        bool(flat) and all(path.lower().endswith((".bin", ".bin.gz", ".bin.zst")) for path in flat)
    )
