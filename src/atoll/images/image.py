"""What the ranks of a pool need beside the interpreter that runs them: packages, variables, the user's own modules.

An ``Image`` only says what is wanted; ``atoll.images.resolve.resolve`` makes it so on this machine.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from atoll.core.errors import ConfigError
from atoll.core.secrets import redact
from atoll.core.validation import suggests_fields
from atoll.images.requirements import check_requirement

_MIN_PYTHON = (3, 11)


@suggests_fields
@dataclass(frozen=True)
class Image:
    """Packages and variables for the ranks of a pool.

    On local nodes the image overlays the interpreter that runs the driver: what that already has, in a version and with
    the requested extras, is not installed; the rest is built once and kept under ``ATOLL_HOME``.

    Attributes:
        python: ``"3.12"`` for that version; None or ``"auto"`` for the driver's interpreter.
        pip: requirements as pip reads them: ``"torch>=2.4"``, ``"jax[cuda12]"``, a URL, a path; a single one may be a
            bare string.
        apt: Debian packages. On local nodes they must be there already; nothing is installed on your machine.
        env: variables of the ranks, set before their first import. Numbers become text, True and False ``"1"`` and
            ``"0"``.
        includes: local modules that the ranks must be able to import: a ``.py`` file, a package folder, a folder of
            modules, or the name of a module that can be imported here.
        constraints: path of a pip constraints file, or its lines. ``PIP_CONSTRAINT`` holds as well.

    Raises:
        ConfigError: a value that cannot work; the message names it.
    """

    python: str | None = None
    pip: Sequence[str] = ()
    apt: Sequence[str] = ()
    # Not part of the hash only because a dict has none.
    env: Mapping[str, str | int | float | bool] | None = field(default=None, hash=False)
    includes: Sequence[str | os.PathLike[str]] = ()
    constraints: str | os.PathLike[str] | Sequence[str] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "python", _check_python(self.python))
        object.__setattr__(self, "pip", check_pip("Image(pip=)", self.pip))
        object.__setattr__(self, "apt", _texts("Image(apt=)", self.apt))
        for name in self.apt:
            if not re.fullmatch(r"[a-z0-9][a-z0-9+.-]*(:[a-z0-9]+)?(=\S+)?", name):
                raise ConfigError(f"Image(apt=): {name!r} is not a Debian package name; expected one like 'ffmpeg'")
        object.__setattr__(self, "env", check_env("Image(env=)", self.env))
        object.__setattr__(self, "includes", _texts("Image(includes=)", self.includes))
        if self.constraints is not None and not isinstance(self.constraints, (str, os.PathLike)):
            object.__setattr__(self, "constraints", _texts("Image(constraints=)", self.constraints))


def check_pip(what: str, value: str | Sequence[str] | None) -> tuple[str, ...]:
    """The requirements of ``value`` (one string counts as one); ``what`` names it in errors.

    Raises:
        ConfigError: an entry that pip could not read as a requirement.
    """
    return tuple(check_requirement(what, text) for text in _texts(what, value))


def check_env(what: str, value: object) -> dict[str, str]:
    """Variables as text; ``what`` names them in errors.

    Raises:
        ConfigError: a name or value that cannot be an environment variable.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        # Texts stay out of the message, as one may be a secret.
        given = repr(value) if isinstance(value, (int, float)) else type(value).__name__
        raise ConfigError(f"{what}: expected a dict of names and values such as {{'A': '1'}}, got {given}")
    return {_check_name(what, name): _check_value(what, name, entry) for name, entry in value.items()}


def _check_name(what: str, name: object) -> str:
    if not isinstance(name, str) or not name or "=" in name or "\0" in name:
        raise ConfigError(f"{what}: {name!r} cannot be the name of a variable; expected text without '='")
    return name


def _check_value(what: str, name: str, value: object) -> str:
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, str) and "\0" not in value:
        return value
    if value is None:
        raise ConfigError(f"{what}: {name} is None (NoneType); leave it out, or give '' for an empty value")
    # The value itself stays out of the message: it may be a secret.
    raise ConfigError(f"{what}: {name} has a value of type {type(value).__name__}; expected str, int, float or bool")


def _check_python(value: object) -> str | None:
    if value is None or value == "auto":
        return None
    if not isinstance(value, str) or not re.fullmatch(r"\d+\.\d+", value):
        raise ConfigError(f'Image(python={value!r}): expected a version in quotes such as python="3.12"')
    if tuple(int(part) for part in value.split(".")) < _MIN_PYTHON:
        raise ConfigError(f"Image(python={value!r}): ranks need Python {'.'.join(map(str, _MIN_PYTHON))} or newer")
    return value


def _texts(what: str, value: object) -> tuple[str, ...]:
    """A tuple of non-empty strings from one string or path, a sequence of them, or None."""
    if value is None:
        return ()
    if isinstance(value, (str, os.PathLike)):
        value = (value,)
    if not isinstance(value, Iterable) or isinstance(value, (Mapping, bytes)):
        raise ConfigError(f"{what}: expected a list of strings, got {redact(repr(value))}")
    texts = []
    for entry in value:
        text = os.fspath(entry) if isinstance(entry, os.PathLike) else entry
        if not isinstance(text, str) or not text.strip():
            raise ConfigError(f"{what}: expected non-empty strings, got {entry!r}")
        texts.append(text.strip())
    return tuple(texts)
