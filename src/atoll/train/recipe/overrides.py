"""Keys of a recipe from the command line: ``--train.steps 100``, ``--data.path=notes.txt``."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from atoll.core.errors import ConfigError
from atoll.train.recipe.keys import OTHER_NAMES, Path, is_text, key_names, may_be_none, sections

_OF_LAUNCHER = "it is for `atoll train`; under torchrun, nodes and ranks stand before -m"
_ANSWERS = {
    **dict.fromkeys(("nodes", "num_nodes", "nnodes", "nproc", "nproc_per_node"), _OF_LAUNCHER),
    **dict.fromkeys(("gpus", "infra", "dryrun", "dry_run", "detach"), _OF_LAUNCHER),
    "resume": "the same command resumes by default, --no-resume starts over",
    "config": "the recipe is the first argument: atoll train FILE",
}


def parse_overrides(arguments: Sequence[str]) -> dict[str, Any]:
    """The tree that overrides spell, of the same shape as a recipe's file; the last of two equal keys counts.

    Values are parsed as TOML, otherwise taken as strings: ``100``, ``false``, ``["tensorboard"]``, ``notes.txt``.
    ``none`` unsets an optional key.

    Raises:
        ConfigError: an argument is not ``--section.key VALUE``, or has no value.
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
        raise ConfigError(f"unexpected argument {argument!r}: expected --section.key VALUE, such as --train.steps 100")
    if path == ("name",):
        return path
    if path[0] in sections() and path[1:2] in ((), ("",)):
        raise ConfigError(
            f"{name} is a section: name a key in it, such as --{path[0]}.{key_names(sections()[path[0]])[0]}"
        )
    if len(path) == 1 or not all(path):
        answer = _ANSWERS.get(path[0], "expected --section.key, such as --train.steps")
        if path[0] not in _ANSWERS:
            every = [key for model in sections().values() for key in key_names(model)]
            near = keys_named(path[0]) or [
                full for key in get_close_matches(path[0], every, 1) for full in keys_named(key)
            ]
            answer = f"did you mean {' or '.join(f'--{full}' for full in near)}?" if near else answer
        raise ConfigError(f"unknown option {name}: {answer}")
    return path


def keys_named(name: str) -> list[str]:
    """``train.steps`` of ``steps``, or of the name that another trainer has for it."""
    found = [f"{section}.{name}" for section, model in sections().items() if name in key_names(model)]
    return [OTHER_NAMES[name]] if not found and name in OTHER_NAMES else found


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
