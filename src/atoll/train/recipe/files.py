"""Where recipes are: shipped ones by name, the user's by path."""

from __future__ import annotations

import glob
import json
import os
import re
import tomllib
from pathlib import Path
from typing import Any

from atoll.core.errors import ConfigError
from atoll.core.paths import read_text
from atoll.core.validation import check_kind_of_file, command_line, nearest

_SHIPPED = Path(__file__).parent / "shipped"
_OF_A_RUN = "recipe.json"  # in a run's folder: the recipe it was made with, complete
# What other trainers call theirs, in files that scripts name but this machine may not have.
_SAME_AS = {"debug_model": "llama3_debug", "debugmodel": "llama3_debug"}


def shipped_names() -> list[str]:
    """Names of the recipes that come with Atoll."""
    return sorted(file.name.removesuffix(".toml") for file in _SHIPPED.glob("*.toml"))


def shipped_file(name: str) -> Path:
    """The file of a shipped recipe.

    Raises:
        ConfigError: there is none of that name; the message has the nearest one.
    """
    stem = name.removesuffix(".toml")
    if stem not in shipped_names():
        raise ConfigError(f"no recipe {name!r} ships with Atoll{_did_you_mean(stem)}")
    return _SHIPPED / f"{stem}.toml"


def find(spec: str, folder: Path) -> tuple[Path, list[str]]:
    """The file that a name or path stands for, and notes for the user.

    A bare name is a shipped recipe; with ``.toml`` or a folder it is a file, relative to ``folder``, and the shipped
    one of the same name where there is no such file. A run's folder stands for the recipe that it was made with.

    Raises:
        ConfigError: there is neither; the message has the nearest name.
    """
    if spec in shipped_names():
        return shipped_file(spec), []
    file = folder / Path(spec).expanduser()
    if file.is_file():
        return file, []
    if (file / _OF_A_RUN).is_file():
        return file / _OF_A_RUN, []
    if file.is_dir():
        raise ConfigError(f"{spec} is a folder: name the recipe's file in it, such as {spec.rstrip('/')}/recipe.toml")
    stem = Path(spec).name.removesuffix(".toml")
    name = _SAME_AS.get(stem, stem)
    if name in shipped_names():
        note = f"{spec} is not here: the recipe {name} that ships with Atoll is used"
        return shipped_file(name), [] if spec == f"{name}.toml" else [note]
    hint = _did_you_mean(stem, *(file.name for file in folder.glob("*.toml")))
    if re.fullmatch(r"[\w.-]+/[\w.-]+", spec) and not spec.endswith(".toml"):
        hint += f"; to start from published weights: `{command_line('atoll', 'train', 'RECIPE', '--model.init', spec)}`"
    raise ConfigError(f"no recipe {spec!r}: no such file, and none ships with Atoll{hint}")


def found_beside(given: Any, folder: Path) -> Any:
    """Data that the current folder lacks and the recipe's folder has, by its path there; other paths unchanged."""
    if isinstance(given, list):
        return [found_beside(each, folder) for each in given]
    if isinstance(given, dict) and "path" in given:
        return {**given, "path": found_beside(given["path"], folder)}
    if not isinstance(given, str) or "://" in given or os.path.isabs(given) or glob.glob(given, recursive=True):
        return given
    beside = os.path.relpath(folder / given)
    return beside if glob.glob(beside, recursive=True) else given


def _did_you_mean(stem: str, *others: str) -> str:
    return nearest(stem, [*shipped_names(), *others]) + " (`atoll recipes ls` shows those that ship)"


def read(file: Path) -> dict[str, Any]:
    """The tables of a TOML file, or of the JSON in a run's folder.

    Raises:
        ConfigError: it can't be read, or is no TOML; the message has the line.
    """
    shown = os.path.relpath(file) if not file.is_relative_to(_SHIPPED) else file.name
    check_kind_of_file(shown, "train")
    text = read_text(file, shown, "a recipe, a TOML file")
    kind, parse = ("JSON", json.loads) if file.suffix == ".json" else ("TOML", tomllib.loads)
    try:
        tree = parse(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{shown}: invalid {kind}: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{shown}: expected the recipe of a run, a JSON object")
    return tree
