"""Keys of a recipe from the command line: ``--train.steps 100``, ``--data.path=notes.txt``."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from typing import Any

from atoll.core.errors import ConfigError
from atoll.core.validation import nearest
from atoll.train.recipe.keys import Path, is_text, key_names, may_be_none, sections


def parse_overrides(arguments: Sequence[str]) -> dict[str, Any]:
    """The tree that overrides spell, of the same shape as a recipe's file; the last of two equal keys counts.

    A value is read as TOML where it is TOML, else it is text: ``100``, ``false``, ``["tensorboard"]``, ``notes.txt``.
    ``none`` leaves a key open that may be left open.

    Raises:
        ConfigError: an argument is no ``--section.key VALUE``, or has no value.
    """
    tree: dict[str, Any] = {}
    waiting = list(arguments)
    while waiting:
        argument = waiting.pop(0)
        name, equals, text = argument.partition("=")
        path = _path(argument, name)
        if not equals:
            if not waiting or waiting[0].startswith("--"):
                raise ConfigError(f"{argument} has no value: give one, {argument} VALUE or {argument}=VALUE")
            text = waiting.pop(0)
        table = tree
        for part in path[:-1]:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise ConfigError(f"{argument}: {'.'.join(path[:-1])} was given a plain value before")
        table[path[-1]] = _value(path, text)
    return tree


def _path(argument: str, name: str) -> Path:
    dotted = name.removeprefix("--")
    path = tuple(part.replace("-", "_") for part in dotted.split("."))
    if not name.startswith("-") and "=" not in argument:
        raise ConfigError(f"{argument!r} is no override: expected --section.key VALUE, such as --train.steps 100")
    if path == ("name",):
        return path
    if path[0] in sections() and path[1:2] in ((), ("",)):
        raise ConfigError(
            f"{name} is a section: name a key in it, such as --{path[0]}.{key_names(sections()[path[0]])[0]}"
        )
    if len(path) == 1 or not all(path):
        dotted_keys = [f"{section}.{key}" for section, model in sections().items() for key in key_names(model)]
        same = [full for full in dotted_keys if full.split(".")[1] == path[0]]
        hint = f": did you mean {' or '.join(f'--{full}' for full in same)}?" if same else nearest(path[0], dotted_keys)
        raise ConfigError(f"{name} names no section{hint or ': expected --section.key, such as --train.steps'}")
    return path


def _value(path: Path, text: str) -> Any:
    if text.lower() == "none" and may_be_none(path):
        return None
    try:
        read = tomllib.loads(f"value = {text.lower() if text in ('True', 'False') else text}")
    except tomllib.TOMLDecodeError:
        return text
    value = read["value"]
    # One value only (not `1\nother = 2`), no dates, and no number where text is wanted: a file may be called 2024.
    is_plain = isinstance(value, (str, list, dict)) or (isinstance(value, (bool, int, float)) and not is_text(path))
    return value if len(read) == 1 and is_plain else text
