"""The variables of a task: declared in its file, given on the command line or in ``.env`` files, and told apart into
those that may be seen and secrets.

No message shows a value: any of them may be a secret.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from atoll.core.errors import ConfigError
from atoll.core.paths import read_text
from atoll.core.secrets import is_secret
from atoll.tasks.schema import Place, list_of, no_bytes, text

SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"  # torchrun's --shutdown-timeout
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_REFERENCE = re.compile(r"\$(?:\{([A-Za-z_][A-Za-z0-9_]*)\}|([A-Za-z_][A-Za-z0-9_]*))")
_NAME_RULE = "a name of letters, digits and _ that starts with no digit"
# A quoted value may hold line breaks; what follows one that is not quoted may be a comment.
_ENV_LINE = re.compile(
    r"""[ \t]*(?:export[ \t]+)?(?P<name>[^\s=#'"]+)[ \t]*=[ \t]*"""
    r"""(?:'(?P<single>[^']*)'|"(?P<double>(?:\\.|[^"\\])*)"|(?P<bare>[^'"\n][^\n]*|))"""
    r"""[ \t]*(?:[ \t]#[^\n]*)?(?:\n|\Z)""",
    re.S,
)
_BLANK_LINE = re.compile(r"[ \t]*(?:#[^\n]*)?(?:\n|\Z)")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", '"': '"', "\\": "\\", "$": "$", "`": "`"}


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


def declared(at: Place, value: Any) -> dict[str, str | None]:
    """``envs``: names with their text, as SkyPilot renders it; None where the value must come from outside."""
    found: dict[str, str | None] = {}
    for name, item in at.mapping(value).items():
        if not isinstance(name, str) or _NAME.fullmatch(name) is None:
            (at / str(name)).refuse(f"expected {_NAME_RULE}")
        if item is not None and not isinstance(item, (str, bool, int, float)):
            (at / name).refuse("expected text or a number; put anything else in quotes")
        found[name] = None if item is None else _checked_text(str(at / name), str(item))
    return found


def declared_secrets(at: Place, value: Any) -> dict[str, str | None]:
    """``secrets``: like ``envs``, or a list of names (also ``secrets:NAME``) whose values come from outside."""
    if isinstance(value, (list, tuple)):
        return declared(at, dict.fromkeys(name.removeprefix("secrets:") for name in list_of(text)(at, value)))
    return declared(at, value)


def changed_text(at: Place, values: Mapping[str, str | None], given: Collection[str]) -> str | None:
    """One line naming the variables at ``at`` whose text is not what the file shows, but for those given; or None."""
    changes = []
    for name, value in values.items():
        shown = (at / name).shown
        if name not in given and value is not None and shown not in (None, value):
            secret = is_secret(name) or at.path[-1] == "secrets"
            changes.append(name if secret else f"{name}: {shown} is {value}")
    if not changes:
        return None
    return f"{at}: YAML changes the text of some values (quotes keep it): {', '.join(changes)}"


def settle(
    at: Place, envs: Mapping[str, str | None], secrets: Mapping[str, str | None], given: Given
) -> tuple[dict[str, str], dict[str, str]]:
    """What the scripts see: variables, and secrets apart.

    A name that is declared as a secret, given as one or looks like one is a secret.

    Raises:
        ConfigError: a declared name that nobody gave a value; it names the flag that does.
    """
    values: dict[str, str | None] = {**envs, **{name: value for name, value in secrets.items() if value is not None}}
    values = {**dict.fromkeys(secrets), **values, **given.envs, **given.secrets}
    hidden = {name for name in values if name in secrets or name in given.secrets or is_secret(name)}
    complete = {}
    for name, value in values.items():
        if value is None:
            key, flag = ("secrets", "--secret") if name in secrets else ("envs", "--env")
            (at / key / name).refuse(
                f"no value: give one with {flag} {name}=…, or {flag} {name} for that of your shell"
            )
        complete[name] = value
    shown = {name: value for name, value in complete.items() if name not in hidden}
    return shown, {name: value for name, value in complete.items() if name in hidden}


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
        if _NAME.fullmatch(name) is None:
            raise ConfigError(
                f"{flag} {name}{'=…' if equals else ''}: expected NAME=VALUE or NAME; NAME is {_NAME_RULE}"
            )
        if not equals and name not in environ:
            raise ConfigError(f"{flag} {name}: {name} is not set in your shell: export it, or give {flag} {name}=VALUE")
        found[name] = _checked_text(f"{flag} {name}", value if equals else environ[name])
    return found


def read_env_file(path: str) -> dict[str, str]:
    """The variables of a ``.env`` file: ``NAME=VALUE`` lines with comments, ``export`` and quotes.

    Text in single quotes and without quotes is taken as it is, text in double quotes knows backslash escapes; both
    quoted forms may span lines. ``$`` is never replaced.

    Raises:
        ConfigError: a file that cannot be read, or a line that is no assignment, by number.
    """
    content = read_text(os.path.expanduser(path), path, "a .env file")
    found: dict[str, str] = {}
    position = 0
    while position < len(content):
        blank = _BLANK_LINE.match(content, position)
        if blank is not None:
            position = blank.end()
            continue
        where = f"{path}:{content.count(chr(10), 0, position) + 1}"
        line = _ENV_LINE.match(content, position)
        if line is None:
            raise ConfigError(f"{where}: expected NAME=VALUE, VALUE bare or wholly in quotes")
        if _NAME.fullmatch(line["name"]) is None:
            raise ConfigError(f"{where}: {line['name']}=…: expected {_NAME_RULE}")
        found[line["name"]] = _checked_text(f"{where}: {line['name']}", _unquoted(line))
        position = line.end()
    return found


def _unquoted(line: re.Match[str]) -> str:
    if line["single"] is not None:
        return line["single"]
    if line["double"] is not None:
        return re.sub(r"\\(.)", lambda escape: _ESCAPES.get(escape[1], escape[0]), line["double"], flags=re.S)
    return re.split(r"(?:^|\s)#", line["bare"], maxsplit=1)[0].strip()


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
    wrong = no_bytes(value)
    if wrong is not None:
        raise ConfigError(f"{where}: the value holds {wrong}")
    return value
