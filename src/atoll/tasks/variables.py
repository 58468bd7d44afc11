"""The variables of a task: declared in its file, given on the command line or in ``.env`` files, and told apart into
those that may be seen and secrets.

No message shows a value: any of them may be a secret.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from atoll.core.errors import ConfigError
from atoll.core.paths import read_text
from atoll.core.validation import unsendable

SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"  # torchrun's --shutdown-timeout
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_REFERENCE = re.compile(r"\$(?:\{([A-Za-z_][A-Za-z0-9_]*)\}|([A-Za-z_][A-Za-z0-9_]*))")
_ONLY_COMMENT = re.compile(r"=[ \t]+#.*\s*\Z")
NAME_RULE = "a name of letters, digits and _ that does not start with a digit"


@dataclass(frozen=True, slots=True)
class Given:
    """Variables from outside the task's file; they win over it.

    Attributes:
        envs: by ``--env`` and ``--env-file``.
        secrets: by ``--secret`` and ``--secret-file``.
    """

    envs: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> set[str]:
        """Every name that was given."""
        return {*self.envs, *self.secrets}


def shutdown_s(variables: Mapping[str, str]) -> float | None:
    """What torch's own variable says of the seconds between SIGTERM and SIGKILL; None where it is not set.

    Raises:
        ConfigError: it is no number of seconds.
    """
    text = variables.get(SHUTDOWN)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 8):
        raise ConfigError(f"{SHUTDOWN}={text!r}: expected whole seconds, such as 60")
    return float(text)


def gather(flag: str, assignments: Iterable[str], files: Iterable[str], environ: Mapping[str, str]) -> dict[str, str]:
    """What ``--env`` (or ``--secret``) and its files give; an assignment wins over a file, a later over an earlier.

    Args:
        flag: ``--env`` or ``--secret``.
        assignments: ``NAME=VALUE``, or ``NAME`` for its value in ``environ``.

    Raises:
        ConfigError: a bad name, a name that ``environ`` lacks, or a file that cannot be read.
    """
    found: dict[str, str] = {}
    for file in files:
        found.update(read_env_file(file))
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if NAME.fullmatch(name) is None:
            raise ConfigError(
                f"{flag} {name}{'=…' if equals else ''}: expected NAME=VALUE or NAME; NAME is {NAME_RULE}"
            )
        if not equals and name not in environ:
            raise ConfigError(f"{flag} {name}: {name} is not set in your shell: export it, or give {flag} {name}=VALUE")
        found[name] = _checked_text(f"{flag} {name}", value if equals else environ[name])
    return found


def read_env_file(path: str) -> dict[str, str]:
    """The variables of a ``.env`` file, as python-dotenv reads it; ``$`` is never replaced.

    Raises:
        ConfigError: a file that cannot be read, or a line that is no assignment, by number.
    """
    from dotenv.parser import parse_stream

    found: dict[str, str] = {}
    for each in parse_stream(io.StringIO(read_text(os.path.expanduser(path), path, "a .env file"))):
        line = each.original.line + len(each.original.string) - len(each.original.string.lstrip("\n"))
        if each.error or (each.key is not None and each.value is None):
            raise ConfigError(f"{path}:{line}: expected NAME=VALUE, VALUE bare or wholly in quotes")
        if each.key is None or each.value is None:
            continue  # a comment
        if NAME.fullmatch(each.key) is None:
            raise ConfigError(f"{path}:{line}: {each.key}=…: expected {NAME_RULE}")
        value = "" if _ONLY_COMMENT.search(each.original.string) else each.value
        found[each.key] = _checked_text(f"{path}:{line}: {each.key}", value)
    return found


def substitute(value: Any, variables: Mapping[str, str]) -> Any:
    """``value`` with ``$NAME`` and ``${NAME}`` replaced in all its text, also in keys; unknown names stay."""
    if isinstance(value, str):
        return _REFERENCE.sub(lambda found: variables.get(found[1] or found[2], found[0]), value)
    if isinstance(value, Mapping):
        return {substitute(key, variables): substitute(item, variables) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [substitute(item, variables) for item in value]
    return value


def _checked_text(where: str, value: str) -> str:
    wrong = unsendable(value)
    if wrong is not None:
        raise ConfigError(f"{where}: the value contains {wrong}")
    return value
