"""Functions of the user's own that a recipe names."""

from __future__ import annotations

import importlib
import operator
import os
import sys
from collections.abc import Callable
from typing import Any

from atoll.core.errors import ConfigError


def load_function(spec: str, key: str) -> Callable[..., Any]:
    """The function or class that ``"pkg.module:name"`` under ``key`` names; the current folder counts as importable.

    Raises:
        ConfigError: there is no such module or function, or the module itself cannot be imported.
    """
    where, _, name = parts = spec.partition(":")
    if not all(parts):
        raise ConfigError(f"{key} = {spec!r}: expected 'package.module:function'")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(where)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{key} = {spec!r}: importing {where} failed: {error}") from error
    try:
        found = operator.attrgetter(name)(module)
    except AttributeError as error:
        raise ConfigError(f"{key} = {spec!r}: {error}") from None
    if not callable(found):
        raise ConfigError(f"{key} = {spec!r}: {name} is a {type(found).__name__}, expected a function")
    called: Callable[..., Any] = found
    return called
