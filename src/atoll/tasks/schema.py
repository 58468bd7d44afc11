"""Reading a task file: YAML whose every value knows its line, and what its sections are made of.

A section is a pydantic model. ``check`` names every mistake with file, line, key, value and what was expected.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar, get_args

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    PlainValidator,
    StrictStr,
    Tag,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails

from atoll.core.errors import ConfigError
from atoll.core.paths import read_text
from atoll.core.secrets import redact
from atoll.core.validation import nearest, unsendable

_MOST_VALUES = 100_000  # of a document
_LONGEST_SHOWN = 60  # characters of a value in a message

# What people write that YAML takes for something else, by what its parser says about it.
_YAML_HINTS = {
    "cannot start any token": "indent with spaces, and put quotes around text that starts with % @ ` or a tab",
    "mapping values are not allowed": "text that holds ': ' needs quotes, and a key under another is indented",
    "undefined alias": "text that starts with * needs quotes",
    "found unhashable key": "text that starts with { needs quotes",
}
# What was expected, by the type of pydantic's error.
_EXPECTED = {"model_type": "keys with values", "dict_type": "keys with values", "list_type": "a list"}
_EXPECTED |= {"string_type": "text", "bool_type": "true or false"}

Keypath: TypeAlias = tuple[str | int, ...]  # keys and indices down to a value


@dataclass(frozen=True, slots=True)
class Document:
    """What is checked: a YAML document, a call in Python, or the flags of a command.

    Attributes:
        label: the file, or what else holds the values; empty for flags.
        root: the YAML, or None where there is no file.
    """

    label: str
    root: yaml.Node | None = None

    def at(self, *path: str | int) -> str:
        """``train.yaml:12: resources.cpus``, ``Task: name`` or ``--cpus``; what is not there has its parent's line."""
        if not self.label:
            key = next(key for key in reversed(path) if isinstance(key, str))
            return "--" + {"accelerators": "gpus"}.get(key, key).replace("_", "-")  # as --help spells it
        line = self._find(path)[1]
        dotted = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(".")
        return self.label + (f":{line + 1}" if line is not None else "") + (f": {dotted}" if dotted else "")

    def shown(self, *path: str | int) -> str | None:
        """The text of a scalar as its file shows it; None where there is no file or no scalar."""
        node = self._find(path)[0]
        return node.value if isinstance(node, yaml.ScalarNode) else None

    def error(self, *path: str | int, why: str) -> ConfigError:
        """The error that says what is wrong there without showing the value."""
        return ConfigError(f"{self.at(*path)}: {why}")

    def _find(self, path: Keypath) -> tuple[yaml.Node | None, int | None]:
        node = self.root
        line = None if node is None else node.start_mark.line
        for key in path:
            if isinstance(node, yaml.MappingNode):
                node, line = _children(node).get(str(key), (None, line))
            elif isinstance(node, yaml.SequenceNode) and isinstance(key, int):
                node = node.value[key]
                line = node.start_mark.line
            else:
                node = None
        return node, line


@functools.lru_cache(maxsize=8)  # one look at all keys, not one for each of ten thousand variables
def _children(node: yaml.MappingNode) -> dict[str, tuple[yaml.Node, int]]:
    """Values and lines by key; the last counts: what ``<<`` merged in comes before the mapping's own."""
    return {name.value: (value, name.start_mark.line) for name, value in node.value if isinstance(name.value, str)}


# ---------------------------------------------------------------------------------------------------- sections
S = TypeVar("S", bound="Section")


class Section(BaseModel):
    """A mapping of known keys. A key without a value counts as absent."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_empty_keys(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        return {str(key): item for key, item in value.items() if item is not None or key not in _keys_of(cls)}


def load(model: type[S], value: Any, document: Document) -> S:
    """A section of ``value``.

    Raises:
        ConfigError: it can't be; every mistake has a line.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise config_error(model, error, document) from None


def config_error(model: type[Section], error: ValidationError, document: Document) -> ConfigError:
    """The error that names every mistake, a line for each, in the order of the file."""
    lines = [_mistake(model, each, document) for each in error.errors(include_url=False)]
    return ConfigError("\n".join(text for _, text in sorted(lines, key=lambda line: line[0])))


def check(model: type[Section], value: Any, document: Document) -> dict[str, Any]:
    """The keys that ``value`` has of a section, in canonical form; raises what ``load`` does."""
    return load(model, value, document).model_dump(exclude_unset=True, by_alias=True)


class Expected(ValueError):
    """What a validator raises: what was expected instead of the value, or of ``part``, or of what its ``key`` has."""

    def __init__(self, expected: str, part: object = None, key: str | None = None) -> None:
        super().__init__(expected)
        self.part, self.key = part, key


class Refused(ValueError):
    """What a validator raises that says what is wrong without showing the value, perhaps about one ``key`` of it."""

    def __init__(self, why: str, key: str | None = None) -> None:
        super().__init__(why)
        self.key = key


def _mistake(model: type[BaseModel], found: ErrorDetails, document: Document) -> tuple[int, str]:
    """The line where a mistake stands, and the message."""
    # Pydantic adds to the path which part of a union a value was taken for, and whether it is a key.
    path = tuple(key for key in found["loc"] if not (isinstance(key, str) and key[:1] + key[-1:] in ("<>", "[]")))
    error, value = found.get("ctx", {}).get("error"), found["input"]
    if isinstance(error, (Expected, Refused)) and error.key is not None:
        path = (*path, error.key)
    if isinstance(error, Refused):
        text = f"{document.at(*path)}: {error}"
    elif found["type"] == "extra_forbidden":
        keys = _keys_of(_model_at(model, path[:-1]))
        hint = nearest(str(path[-1]), keys) or f": known are {', '.join(key for key in keys if key[0] != '_')}"
        text = f"{document.at(*path)}: there is no such key{hint}"
    else:
        expected = str(error) if isinstance(error, Expected) else _EXPECTED.get(found["type"], found["msg"])
        if found["type"] == "string_type" and isinstance(value, (bool, int, float)):
            expected += ", so put it in quotes"
        value = error.part if isinstance(error, Expected) and error.part is not None else value
        text = f"{document.at(*path)} is {_in_words(value)}: expected {expected}"
    return document._find(path)[1] or 0, text


def _keys_of(model: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items()]


def _model_at(model: type[BaseModel], path: Keypath) -> type[BaseModel]:
    for key in path:
        field = model.model_fields.get(str(key))
        model = next(_models(field.annotation), model) if field is not None else model
    return model


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models(inner)


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


# ------------------------------------------------------------------------------------------------------ values
def whole(low: int, high: int) -> PlainValidator:
    """A whole number from ``low`` to ``high``."""

    def validate(value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            quotes = ", without quotes" if isinstance(value, str) and value.isdigit() else ""
            raise Expected(f"a whole number from {low} to {high}{quotes}")
        return value

    return PlainValidator(validate)


def one_of(*names: str) -> PlainValidator:
    """One of ``names``, in any case."""
    known = {name.casefold(): name for name in names}

    def validate(value: Any) -> str:
        name = known.get(value.casefold()) if isinstance(value, str) else None
        if name is None:
            raise Expected(f"{', '.join(names[:-1])} or {names[-1]}{nearest(str(value), names)}")
        return name

    return PlainValidator(validate)


def refused(why: str) -> PlainValidator:
    """No value at all."""

    def validate(_: Any) -> None:
        raise Refused(why)

    return PlainValidator(validate)


Text = StrictStr
Keys = dict[str, Any]
BY_KIND = Discriminator(lambda value: "<text>" if isinstance(value, str) else "<other>")
TextOrKeys = Annotated[Annotated[Text, Tag("<text>")] | Annotated[Keys, Tag("<other>")], BY_KIND]
TextOrTexts = Annotated[Annotated[Text, Tag("<text>")] | Annotated[dict[Text, Text], Tag("<other>")], BY_KIND]


# -------------------------------------------------------------------------------------------------------- YAML
class _Loader(yaml.SafeLoader):
    """YAML 1.1 as SkyPilot reads it, without what nobody means: ``010`` as 8, ``1:30`` as 90, dates, and tags.

    Keys are text: a variable may be called ``ON`` or ``NO``.
    """

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]  # the stubs say nothing of it
        if getattr(event, "tag", None) not in (None, "!"):
            raise yaml.composer.ComposerError(
                None, None, f"the tag {event.tag}: tags are not supported here; text needs quotes", event.start_mark
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


def read_documents(path: Path, label: str) -> list[tuple[Any, Document]]:
    """The documents of a YAML file that are not empty.

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
                documents.append((value, Document(label, root)))
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
        raise ConfigError(f"{label}{line}: not YAML: a character that is not allowed in text") from None
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
            raise ConfigError(f"{label}:{node.start_mark.line + 1}: these values contain themselves")
        return size
    sizes[id(node)] = 0
    size = 1
    if isinstance(node, yaml.ScalarNode) and (wrong := unsendable(node.value)) is not None:
        raise ConfigError(f"{label}:{node.start_mark.line + 1}: the text contains {wrong}")
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
        raise ConfigError(f"{label}:{node.start_mark.line + 1}: more than {_MOST_VALUES:,} values, aliases expanded")
    sizes[id(node)] = size
    return size
