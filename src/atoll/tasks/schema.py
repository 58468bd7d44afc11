"""Reading a task file: YAML whose every value knows its line, and the checks that its keys are made of.

A check takes a value and the ``Place`` where it stands, and returns the value in its one canonical form, or raises a
``ConfigError`` that names file, line, key, value and what was expected.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml

from atoll.core.errors import ConfigError
from atoll.core.paths import read_text
from atoll.core.secrets import redact
from atoll.core.validation import nearest

_HALF = re.compile("[\ud800-\udc7f\udd00-\udfff]")  # between them: bytes of a command line that are not UTF-8
_MOST_VALUES = 100_000  # of a document
_LONGEST_SHOWN = 60  # characters of a value in a message

# What people write that YAML takes for something else, by what its parser says about it.
_YAML_HINTS = {
    "cannot start any token": "indent with spaces, and put quotes around text that starts with % @ ` or a tab",
    "mapping values are not allowed": "text that holds ': ' needs quotes, and a key under another is indented",
    "undefined alias": "text that starts with * needs quotes",
    "found unhashable key": "text that starts with { needs quotes",
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value stands: in a YAML document, a call in Python, or a flag of a command.

    Attributes:
        label: the file, or what else holds the value; empty for flags.
        path: keys and indices down to the value.
        node: the value's YAML, or None where there is no file.
        line: of the value's key, from 0.
    """

    label: str
    path: tuple[str | int, ...] = ()
    node: yaml.Node | None = None
    line: int | None = None

    def __truediv__(self, key: str | int) -> Place:
        """The place of what stands under ``key``; where there is nothing, it has this one's line."""
        node, line = None, self.line
        if isinstance(self.node, yaml.MappingNode):
            node, line = _children(self.node).get(str(key), (None, line))
        elif isinstance(self.node, yaml.SequenceNode) and isinstance(key, int):
            node = self.node.value[key]
            line = node.start_mark.line
        return Place(self.label, (*self.path, key), node, line)

    def __str__(self) -> str:
        """``train.yaml:12: resources.cpus``, ``Task: name`` or ``--cpus``."""
        if not self.label:
            return "--" + next(key for key in reversed(self.path) if isinstance(key, str)).replace("_", "-")
        dotted = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in self.path).removeprefix(".")
        return self.label + ("" if self.line is None else f":{self.line + 1}") + (f": {dotted}" if dotted else "")

    @property
    def shown(self) -> str | None:
        """The text of the scalar here as its file shows it; None where there is no file or no scalar."""
        return self.node.value if isinstance(self.node, yaml.ScalarNode) else None

    def fail(self, value: object, expected: str) -> NoReturn:
        """Say that ``value`` is not what was expected here."""
        raise ConfigError(f"{self} is {_in_words(value)}: expected {expected}")

    def refuse(self, why: str) -> NoReturn:
        """Say what is wrong here without showing the value."""
        raise ConfigError(f"{self}: {why}")

    def mapping(self, value: object) -> Mapping[Any, Any]:
        """``value``, if it is a mapping."""
        if not isinstance(value, Mapping):
            self.fail(value, "keys with values")
        return value

    def items(self, value: object) -> list[Any]:
        """``value``, if it is a list."""
        if not isinstance(value, (list, tuple)):
            self.fail(value, "a list")
        return list(value)


Check = Callable[[Place, Any], Any]


@functools.lru_cache(maxsize=8)  # one look at all keys, not one for each of ten thousand variables
def _children(node: yaml.MappingNode) -> dict[str, tuple[yaml.Node, int]]:
    """Values and lines by key; the last counts: what ``<<`` merged in comes before the mapping's own."""
    return {name.value: (value, name.start_mark.line) for name, value in node.value if isinstance(name.value, str)}


def _in_words(value: object) -> str:
    """A value as a message shows it."""
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (str, int, float)):
        shown = redact(repr(value))
        return shown if len(shown) <= _LONGEST_SHOWN else f"{shown[:_LONGEST_SHOWN]}…"
    kinds: dict[type, str] = {list: "a list", tuple: "a list", set: "a set", dict: "a mapping"}
    return kinds.get(type(value), f"of type {type(value).__name__}")


# ------------------------------------------------------------------------------------------------------ checks
def no_bytes(text: str) -> str | None:
    """What of ``text`` no program could be given, as a clause; None where all of it can be."""
    if "\0" in text:
        return "a zero character, which no program can be given"
    half = _HALF.search(text)
    if half is not None:
        return f"\\u{ord(half[0]):04x}, which is half a character: write the whole one itself"
    return None


def text(at: Place, value: Any) -> str:
    """Text, as it is."""
    if not isinstance(value, str):
        quotes = ", so put it in quotes" if isinstance(value, (bool, int, float)) else ""
        at.fail(value, f"text{quotes}")
    return value


def yes_no(at: Place, value: Any) -> bool:
    """``true`` or ``false``."""
    if not isinstance(value, bool):
        at.fail(value, "true or false")
    return value


def anything(_: Place, value: Any) -> Any:
    """Whatever it is: keys that only a cloud's side reads."""
    return value


def any_mapping(at: Place, value: Any) -> dict[str, Any]:
    """Keys with any values."""
    return dict(at.mapping(value))


def whole(low: int, high: int) -> Check:
    """A whole number from ``low`` to ``high``."""
    expected = f"a whole number from {low} to {high}"

    def check(at: Place, value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            at.fail(value, expected + (", without quotes" if isinstance(value, str) and value.isdigit() else ""))
        return value

    return check


def number(low: float) -> Check:
    """A finite number of at least ``low``."""

    def check(at: Place, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value < float("inf"):
            at.fail(value, f"a number, {low:g} or more")
        return value

    return check


def one_of(*names: str) -> Check:
    """One of ``names``, in any case."""
    known = {name.casefold(): name for name in names}

    def check(at: Place, value: Any) -> str:
        name = known.get(text(at, value).casefold())
        if name is None:
            at.fail(value, f"{', '.join(names[:-1])} or {names[-1]}{nearest(value, names)}")
        return name

    return check


def text_or(check: Check) -> Check:
    """Text, or what ``check`` takes."""
    return lambda at, value: value if isinstance(value, str) else check(at, value)


def list_of(check: Check) -> Check:
    """A list of what ``check`` takes."""
    return lambda at, value: [check(at / index, item) for index, item in enumerate(at.items(value))]


def mapping_of(check: Check) -> Check:
    """Text keys with values that ``check`` takes."""
    return lambda at, value: {
        text(at / str(key), key): check(at / key, item) for key, item in at.mapping(value).items()
    }


def section(fields: Mapping[str, Check]) -> Check:
    """A mapping of known keys. A key without a value counts as absent."""

    def check(at: Place, value: Any) -> dict[str, Any]:
        entries = at.mapping(value)
        for key in entries:
            if key not in fields:
                (at / str(key)).refuse(f"there is no such key{_suggestion(str(key), fields)}")
        return {key: fields[key](at / key, item) for key, item in entries.items() if item is not None}

    return check


def _suggestion(key: str, known: Iterable[str]) -> str:
    names = [name for name in known if not name.startswith("_")]
    return nearest(key, names) or f": known are {', '.join(names)}"


# -------------------------------------------------------------------------------------------------------- YAML
class _Loader(yaml.SafeLoader):
    """YAML 1.1 as SkyPilot reads it, without what nobody means: ``010`` as 8, ``1:30`` as 90, dates, and tags.

    Keys are text: a variable may be called ``ON`` or ``NO``.
    """

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]  # the stubs say nothing of it
        if getattr(event, "tag", None) not in (None, "!"):
            raise yaml.composer.ComposerError(
                None, None, f"the tag {event.tag}: values have none here, and quotes make text", event.start_mark
            )
        node = super().compose_node(parent, index)
        is_key = index is None and isinstance(parent, yaml.MappingNode)
        if is_key and isinstance(node, yaml.ScalarNode) and node.tag != f"{_TAG}merge":
            node.tag = f"{_TAG}str"
        return node


_TAG = "tag:yaml.org,2002:"
_NUMBERS = {  # such a text is a number; another that YAML 1.1 takes for one stays text
    f"{_TAG}int": re.compile(r"[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)$"),
    f"{_TAG}float": re.compile(
        r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+][0-9]+)?|\.[0-9][0-9_]*(?:[eE][-+][0-9]+)?|\.inf|\.Inf|\.INF)$|\.(?:nan|NaN|NAN)$"
    ),
}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, _NUMBERS.get(tag, form)) for tag, form in forms if tag != f"{_TAG}timestamp"]
    for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def read_documents(path: Path, label: str) -> list[tuple[Any, Place]]:
    """The documents of a YAML file that are not empty, each with the place of its root.

    Raises:
        ConfigError: a file that cannot be read or is not YAML; one line, with the line number.
    """
    content = read_text(path, label, "a task file")
    documents = []
    try:
        loader = _Loader(content)
        while loader.check_node():
            root: yaml.Node = loader.get_node()  # type: ignore[assignment]  # check_node said that there is one
            _refuse_mistakes(root, label, {})
            value = loader.construct_document(root)
            if value is not None:
                documents.append((value, Place(label, (), root, root.start_mark.line)))
    except ConfigError:  # it is a ValueError too
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        problem = error.problem or str(error.context)
        hint = next((f" ({hint})" for key, hint in _YAML_HINTS.items() if key in problem), "")
        raise ConfigError(f"{label}{line}: not YAML: {problem}{hint}") from None
    except yaml.reader.ReaderError as error:
        line = f":{content.count(chr(10), 0, error.position) + 1}"
        raise ConfigError(f"{label}{line}: not YAML: a character that text may not hold") from None
    except RecursionError:
        raise ConfigError(f"{label}: its values are nested too deeply") from None
    except ValueError as error:
        raise ConfigError(f"{label}: not YAML: {error}") from None
    return documents


def _refuse_mistakes(node: yaml.Node, label: str, sizes: dict[int, int]) -> int:
    """Refuse what YAML takes without a word; returns how many values the node stands for.

    That is text that is none, of a key given twice in a mapping the first, and aliases that multiply or never end.
    """
    if (size := sizes.get(id(node))) is not None:
        if not size:
            raise ConfigError(f"{label}:{node.start_mark.line + 1}: these values hold themselves")
        return size
    sizes[id(node)] = 0
    size = 1
    if isinstance(node, yaml.ScalarNode) and (wrong := no_bytes(node.value)) is not None:
        raise ConfigError(f"{label}:{node.start_mark.line + 1}: the text holds {wrong}")
    if isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.value == "<<":
                continue
            line = key.start_mark.line + 1
            if key.value in lines:
                raise ConfigError(f"{label}:{line}: {key.value} is given twice: see line {lines[key.value]}")
            lines[key.value] = line
        size += sum(_refuse_mistakes(child, label, sizes) for pair in node.value for child in pair)
    elif isinstance(node, yaml.SequenceNode):
        size += sum(_refuse_mistakes(child, label, sizes) for child in node.value)
    if size > _MOST_VALUES:
        raise ConfigError(f"{label}:{node.start_mark.line + 1}: more than {_MOST_VALUES:,} values, aliases counted out")
    sizes[id(node)] = size
    return size
