"""From a name, a file or a dict to a checked recipe: inheritance, overrides, and every mistake told at once."""

from __future__ import annotations

import copy
import os
import re
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
from atoll.train.recipe.durations import Duration
from atoll.train.recipe.overrides import parse_overrides
from atoll.train.recipe.schema import SCHEMA_VERSION, Recipe

_TOKENS = (".bin", ".bin.gz", ".bin.zst")  # files that need no tokenizer
_NOT_INHERITED = ("name", "version", "base")


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
    notes: list[str] = field(default_factory=list)
    decay_ratio: float | None = None  # of a file of TorchTitan's, until the length of the run is known

    def put(self, tree: Mapping[str, Any], origin: str) -> None:
        """Merge a layer: tables merge, values replace."""
        layer = copy.deepcopy(dict(tree))
        parallel, train, schedule = (_table(layer, name) for name in ("parallel", "train", "schedule"))
        for key, axis in keys.AXIS_SPELLINGS.items():  # ``tp`` becomes ``tensor``, which replaces a base's
            if key in parallel and axis not in parallel:
                parallel[axis] = parallel.pop(key)
        for given, other in (("steps", "tokens"), ("tokens", "steps")):
            # The two say the same thing: the later layer's word replaces both.
            if train.get(given) is not None and train.get(other) is None:
                _table(self.tree, "train").pop(other, None)
        if schedule.get("kind", "wsd") != "wsd" and "decay" not in schedule:
            # Only wsd has one: another kind replaces what a base says of it.
            _table(self.tree, "schedule").pop("decay", None)
        self._merge(self.tree, layer, origin, ())

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
    layers, folder = _Layers(), Path(current_folder())
    given = parse_overrides(overrides)
    if isinstance(spec, Recipe):
        spec = spec.model_dump(mode="json", exclude_none=True)
    if isinstance(spec, Mapping):
        source, name = "recipe", spec.get("name", "run")
        _put_with_bases(layers, dict(spec), source, folder, (), world_size)
    else:
        source = os.fspath(spec or (os.environ if env is None else env).get("CONFIG_FILE", ""))
        if not source:
            raise ConfigError(
                "no recipe was named: give a name or a file, or set CONFIG_FILE; `atoll recipes ls` lists what ships"
            )
        file, layers.notes = files.find(source, folder)
        name = _put_file(layers, file, (), world_size)
    layers.tree["name"] = name
    layers.put(given, "command line")
    recipe = _checked(layers)
    train, schedule = recipe.train, recipe.schedule
    if layers.decay_ratio is not None and train.length is not None and schedule.kind == "wsd" and not schedule.decay:
        decay = titan.decay_length(layers.decay_ratio, train.length, schedule.warmup or Duration(0))
        schedule = schedule.model_copy(update={"decay": decay})
    train = train.model_copy(update={"output_dir": train.output_dir.replace("{name}", recipe.name)})
    return Loaded(recipe.model_copy(update={"train": train, "schedule": schedule}), layers.notes, source)


def _put_file(layers: _Layers, file: Path, chain: tuple[Path, ...], world_size: int) -> str:
    """Merge a file and its bases; returns its name."""
    tree = files.read(file)
    name: str = tree.get("name", file.name.removesuffix(".toml"))
    _put_with_bases(layers, tree, file.name, file.parent, (*chain, file.resolve()), world_size)
    return name


def _put_with_bases(
    layers: _Layers, tree: dict[str, Any], origin: str, folder: Path, chain: tuple[Path, ...], world_size: int
) -> None:
    if titan.is_titan(tree):
        theirs = titan.from_titan(tree, origin, world_size)
        tree, layers.decay_ratio = theirs.tree, theirs.decay_ratio
        layers.notes += theirs.notes
        network = _Layers()
        _put_file(network, files.shipped_file(theirs.model), (), world_size)
        layers.put({"model": network.tree["model"]}, theirs.model)
    version = tree.get("version", SCHEMA_VERSION)
    if version != SCHEMA_VERSION:
        raise ConfigError(f"{origin}: version = {version!r}: this Atoll reads version {SCHEMA_VERSION}: update Atoll")
    base = tree.get("base")
    if base is not None:
        if not isinstance(base, str):
            raise ConfigError(f"{origin}: base = {base!r}: expected the name or the path of one recipe")
        try:
            file, notes = files.find(base, folder)
        except ConfigError as error:
            raise ConfigError(f"{origin}: base: {error}") from None
        if file.resolve() in chain:
            names = " -> ".join(each.name for each in (*chain, file))
            raise ConfigError(f"{origin}: base = {base!r} leads back to itself: {names}")
        layers.notes += notes
        _put_file(layers, file, chain, world_size)
    if chain:  # a file: its data may be beside it
        data = _table(tree, "data")
        data.update({key: files.found_beside(data[key], folder) for key in ("path", "validation") if key in data})
    layers.put({key: value for key, value in tree.items() if key not in _NOT_INHERITED}, origin)


def _table(tree: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A section of a tree; an empty table where it has none, or something else in its place."""
    table = tree.get(name)
    return table if isinstance(table, dict) else {}


def _checked(layers: _Layers) -> Recipe:
    try:
        return Recipe.model_validate(layers.tree)
    except ValidationError as error:
        found: dict[keys.Path, list[ErrorDetails]] = {}  # where a key accepts several kinds, it has an error for each
        for each in error.errors(include_url=False):
            found.setdefault(_key_path(each), []).append(each)
    lines = []
    for path, errors in found.items():
        origin = layers.origins.get(path) or layers.origins.get(path[:1], "recipe")
        deepest = max(len(each["loc"]) for each in errors)  # the kind that fits best
        lines.append(f"{origin}: {_sentence(path, [each for each in errors if len(each['loc']) == deepest])}")
    raise ConfigError("\n  ".join(lines if len(lines) == 1 else [f"{len(lines)} mistakes in the recipe:", *lines]))


def _key_path(error: ErrorDetails) -> keys.Path:
    """The beginning of an error's location that names a key; the rest tells list items and kinds of a union apart."""
    path: keys.Path = ()
    for part in error["loc"]:
        if not isinstance(part, str) or keys.field_of((*path, part)) is None:
            break
        path = (*path, part)
    is_unknown_here = error["type"] == "extra_forbidden" and len(error["loc"]) == len(path) + 1
    return (*path, str(error["loc"][-1])) if is_unknown_here else path


def _sentence(path: keys.Path, errors: list[ErrorDetails]) -> str:
    error = next((each for each in errors if each["type"] == "extra_forbidden"), errors[0])
    key, value = keys.title(path), error["input"]
    if error["type"] == "extra_forbidden":
        return _unknown(str(error["loc"][-1]), path, value)
    if error["type"] == "value_error":  # our own words, from the schema
        return f"{key}: {error['ctx']['error']}"
    if error["type"] == "missing":
        return f"{key}: a value is missing in {value!r}"
    words = " or ".join(dict.fromkeys(each["msg"].partition(" should ")[2] or each["msg"] for each in errors))
    words = re.sub(r"a valid dictionary or instance of \w+", "a table", words)
    example = f', as ["{value}"]' if isinstance(value, str) else ""
    words = re.sub(r"a valid (list|tuple)", f"a list{example}", words)
    hint = nearest(value, re.findall("'(.*?)'", words)) if isinstance(value, str) else ""
    return f"{key} = {value!r} should {words}{hint}"


def _unknown(key: str, path: keys.Path, value: Any) -> str:
    table = path[:-1] if path[-1:] == (key,) else path
    if not table and isinstance(value, Mapping):
        known = keys.sections()
        return f"unknown section [{key}]{nearest(key, known) or ': the sections are ' + ', '.join(known)}"
    found, where = keys.meant(key, table), "outside every section"
    hint = f": did you mean {' or '.join(found)}?" if found else ""
    if table:
        where = f"in [{'.'.join(table)}]"
        hint = hint or f": its keys are {', '.join(keys.keys_in(table))}"
    return f"unknown key `{key}` {where}{hint}"


def require_complete(recipe: Recipe) -> None:
    """Refuse a recipe that leaves out what only its user can give.

    Raises:
        ConfigError: names each missing key and the flag to add.
    """
    missing, data = [], recipe.data
    if data.path is None:
        missing.append(
            "[data] path is not set: add --data.path FILE (text, JSONL, Parquet, .bin, a folder, a glob, or "
            "hf://owner/name)"
        )
    are_tokens = data.path is not None and all(path.lower().endswith(_TOKENS) for path in data.paths)
    if data.tokenizer is None and data.format != "bin" and not are_tokens:
        missing.append(
            "[data] tokenizer is not set: add --data.tokenizer bytes (needs no file), bpe:4096 (trained on the data), "
            "or a hub name, a folder or a tokenizer.json; or --data.format bin where the files hold tokens"
        )
    if recipe.train.length is None:
        missing.append("[train] steps is not set: add --train.steps 1000 (or 2ep, or 1e9tok)")
    if missing:
        head = "" if len(missing) == 1 else f"the recipe {recipe.name} is not complete:\n  "
        raise ConfigError(head + "\n  ".join(missing))
