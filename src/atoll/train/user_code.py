"""Functions of the user's own that a recipe names."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from atoll.core.errors import ConfigError
from atoll.core.validation import nearest


def load_function(spec: str, key: str) -> Callable[..., Any]:
    """The function or class that ``"pkg.module:name"`` under ``key`` names; the current folder counts as importable.

    Raises:
        ConfigError: there is no such module or function, or the module itself cannot be imported.
    """
    where, colon, name = spec.partition(":")
    if not (colon and name and where):
        raise ConfigError(f"{key} = {spec!r}: expected 'package.module:function'")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is not None and (where == error.name or where.startswith(f"{error.name}.")):
            raise ConfigError(
                f"{key} = {spec!r}: there is no module {error.name!r}: start in its folder, or install it"
            ) from None
        raise ConfigError(f"{key} = {spec!r}: importing {where} failed: {error}") from error
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            hint = nearest(part, [each for each in dir(found) if not each.startswith("_")])
            raise ConfigError(f"{key} = {spec!r}: {where} has no {part!r}{hint}")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"{key} = {spec!r}: {name} is a {type(found).__name__}, expected a function")
    called: Callable[..., Any] = found
    return called
