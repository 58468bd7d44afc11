"""Keys of a recipe from the command line: ``--train.steps 100``, ``--data.path=notes.txt``."""

from __future__ import annotations

import contextlib
import tomllib
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError, create_model

from atoll.core.errors import ConfigError
from atoll.train.recipe import keys

_LAUNCH = ("nodes", "num_nodes", "nnodes", "nproc", "nproc_per_node", "gpus", "infra", "dryrun", "detach")
_ANSWERS = {
    **dict.fromkeys(_LAUNCH, "it is for `atoll train`; under torchrun, nodes and ranks stand before -m"),
    "resume": "the same command resumes by default, --no-resume starts over",
}


def parse_overrides(arguments: Sequence[str]) -> dict[str, Any]:
    """The tree that overrides spell, of the same shape as a recipe's file; the last of two equal keys counts.

    A value is TOML where the key accepts that, otherwise text: ``100``, ``false``, ``["tensorboard"]``, ``notes.txt``.
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


def _path(argument: str, name: str) -> keys.Path:
    path = tuple(name.removeprefix("--").replace("-", "_").split("."))
    if not name.startswith("-") and "=" not in argument:
        raise ConfigError(f"unexpected argument {argument!r}: expected --section.key VALUE, such as --train.steps 100")
    if path == ("name",) or (len(path) > 1 and all(path)):
        return path
    if path[0] in keys.sections():
        raise ConfigError(f"{name} is a section: name a key in it, such as --{path[0]}.{keys.keys_in(path[:1])[0]}")
    answer = _ANSWERS.get(path[0])
    if answer is None:
        found = [f"--{full}" for full in keys.meant(path[0])]
        answer = f"did you mean {' or '.join(found)}?" if found else "expected --section.key, such as --train.steps"
    raise ConfigError(f"unknown option {name}: {answer}")


def _value(path: keys.Path, text: str) -> Any:
    """What the key accepts of three readings: nothing at all, a TOML value, the text; else the TOML, to complain of."""
    value: Any = text
    with contextlib.suppress(tomllib.TOMLDecodeError):
        given = tomllib.loads(f"value = {text.lower() if text in ('True', 'False') else text}")
        value = given["value"] if len(given) == 1 else text  # not `1\nother = 2`
    readings: list[Any] = [None, value] if text.lower() == "none" else [value]
    if not isinstance(value, (str, list, dict)) and not _accepts(path, 0.5):
        readings.append(text)  # a file may be called 2024; where numbers may stand, 1.5 is none's name
    return next((reading for reading in readings if _accepts(path, reading)), value)


def _accepts(path: keys.Path, value: Any) -> bool:
    field = keys.field_of(path)
    definition: Any = (field.annotation, field) if field is not None else (Any, ...)
    try:
        create_model("Only", value=definition).model_validate({"value": value})
    except ValidationError:
        return False
    return True
