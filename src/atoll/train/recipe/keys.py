"""The keys that recipes may have: looked up, suggested, and described as people would say them."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from atoll.core.validation import nearest
from atoll.train.recipe.durations import Duration
from atoll.train.recipe.schema import Recipe

TOP_LEVEL = ("version", "name")

Path = tuple[str, ...]

# Other spellings of keys of [parallel].
AXIS_SPELLINGS = {"dp_replicate": "replicate", "dp_shard": "shard", "tp": "tensor", "pp": "pipeline", "cp": "context"}

# What other trainers call a key that has another meaning here, or other values.
OTHER_NAMES = {
    "batch_size": "train.global_batch",
    "global_batch_size": "train.global_batch",
    "gradient_accumulation_steps": "train.global_batch",
    "micro_batch_size": "train.micro_batch",
    "per_device_train_batch_size": "train.micro_batch",
    "max_steps": "train.steps",
    "num_train_epochs": "train.steps",
    "epochs": "train.steps",
    "max_length": "train.seq_len",
    "block_size": "train.seq_len",
    "gradient_checkpointing": "train.recompute",
    "eval_steps": "train.validate_every",
    "learning_rate": "optimizer.lr",
    "warmup_steps": "schedule.warmup",
    "lr_scheduler_type": "schedule.kind",
    "dataset": "data.path",
    "ddp": "parallel.replicate",
    "fsdp": "parallel.shard",
    "bf16": "precision.compute",
    "torch_compile": "compile.enabled",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "report_to": "metrics.trackers",
}


def flat(tree: Mapping[str, Any], where: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every value of nested tables, with its path."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flat(value, (*where, key))
        else:
            yield (*where, key), value


def sections() -> dict[str, type[BaseModel]]:
    """The model of every section, by name."""
    found = {}
    for name, field in Recipe.model_fields.items():
        if name not in TOP_LEVEL:
            found[name] = _models(field.annotation)[0]
    return found


def axis_name(key: str) -> str:
    """``tensor`` of ``tp``; other keys as they are."""
    return AXIS_SPELLINGS.get(key, key)


def key_names(model: type[BaseModel]) -> list[str]:
    """Keys of a table, other spellings included."""
    names = list(model.model_fields)
    return [*names, *AXIS_SPELLINGS] if "pipeline" in names else names


def field_of(path: Path) -> FieldInfo | None:
    """The field that ``("train", "steps")`` names; None where there is none."""
    model: type[BaseModel] = Recipe
    field = None
    for part in path:
        field = model.model_fields.get(axis_name(part) if field is not None else part)
        if field is None:
            return None
        inner = _models(field.annotation)
        model = inner[0] if inner else BaseModel
    return field


def unknown_keys(tree: Mapping[str, Any]) -> list[tuple[Path, str]]:
    """Each key that no recipe has, and each value that only seems to fit, with a sentence about it."""
    known = sections()
    found: list[tuple[Path, str]] = []
    for section, table in tree.items():
        if section in TOP_LEVEL:
            continue
        if section not in known:
            found.append(((section,), _unknown_section(section, known)))
        elif not isinstance(table, Mapping):
            shown = f"{section} = {table!r}" if not isinstance(table, list) else f"[[{section}]]"
            found.append(((section,), f"{shown}: expected a table, [{section}]"))
        else:
            found += _unknown_in(known[section], table, (section,))
    return found


def _unknown_in(model: type[BaseModel], table: Mapping[str, Any], where: Path) -> Iterator[tuple[Path, str]]:
    for key, value in table.items():
        path = (*where, key)
        if key not in key_names(model):
            yield path, f"unknown key `{'.'.join(path[1:])}` in [{path[0]}]{_where_it_belongs(model, path)}"
            continue
        field = field_of((*where, key)) if len(where) == 1 else model.model_fields[key]
        if field is not None and _is_confused(value, {*_kinds(field.annotation)}):
            shown = str(value).lower() if isinstance(value, bool) else repr(value)
            yield path, f"{title(path)} = {shown}: expected {_described(field.annotation) + _bounds(field.metadata)}"
            continue
        inner = _models(field.annotation) if field is not None else []
        tables = [(path, value)] if not isinstance(value, list) else [(path, item) for item in value]
        for place, item in tables if inner else ():
            if isinstance(item, Mapping):
                yield from _unknown_in(inner[0], item, place)


def _is_confused(value: Any, kinds: set[Any]) -> bool:
    """Is it a truth value where none belongs, or the reverse? Pydantic would turn one into the other."""
    if bool not in kinds:
        return any(isinstance(each, bool) for each in (value if isinstance(value, list) else [value]))
    return kinds <= {bool, types.NoneType} and not isinstance(value, (bool, types.NoneType))


def _unknown_section(section: str, known: Mapping[str, type[BaseModel]]) -> str:
    owners = [name for name, model in known.items() if section in key_names(model)]
    if owners:
        return f"{section} is outside every section: it belongs to {_brackets(owners)}"
    # A key that is nearly right but has no section is more often meant than a section.
    hint = nearest(section, known) or f": the sections are {', '.join(known)}"
    return f"unknown section [{section}]{hint}"


def _where_it_belongs(model: type[BaseModel], path: Path) -> str:
    key = path[-1]
    owners = [name for name, other in sections().items() if name != path[0] and key in key_names(other)]
    if owners:
        return f": {key} belongs to {_brackets(owners)}"
    names = key_names(model)
    section, _, other = OTHER_NAMES.get(key, "").partition(".")
    if section:
        return f": did you mean {other!r}{f' in [{section}]' if section != path[0] else ''}?"
    return nearest(key, names) or f": [{'.'.join(path[:-1])}] has {', '.join(names)}"


def _brackets(names: list[str]) -> str:
    return " or ".join(f"[{name}]" for name in names)


def title(path: Path) -> str:
    """``[train] steps``, ``[model] rope_scaling.factor``."""
    return f"[{path[0]}] {'.'.join(path[1:])}" if len(path) > 1 else path[0]


def _kinds_of(path: Path) -> list[Any]:
    field = field_of(path)
    return [] if field is None else list(_kinds(field.annotation))


def is_text(path: Path) -> bool:
    """Whether a key holds text or a list, so that ``42`` on a command line stays text."""
    kinds = set(_kinds_of(path))
    return str in kinds and not kinds & {int, float, bool}


def may_be_none(path: Path) -> bool:
    """Whether a key may be left open, so that ``none`` on a command line opens it."""
    kinds = _kinds_of(path)
    return types.NoneType in kinds and "none" not in kinds


def choices(path: Path) -> list[str]:
    """The words that a key accepts, where it accepts only some."""
    return [kind for kind in _kinds_of(path) if isinstance(kind, str)]


def expected(path: Path) -> str:
    """What a key accepts, in words."""
    field = field_of(path)
    return "something else" if field is None else _described(field.annotation) + _bounds(field.metadata)


def _kinds(annotation: Any) -> Iterator[Any]:
    """The plain types of an annotation, and the words of its literals."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from _kinds(inner[0])
    elif origin in (Union, types.UnionType):
        for each in inner:
            yield from _kinds(each)
    elif origin is Literal:
        yield from inner
    else:
        yield origin or annotation


def _models(annotation: Any) -> list[type[BaseModel]]:
    """Tables inside an annotation, those in lists included."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for each in get_args(annotation) for model in _models(each)]


def _described(annotation: Any) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        bounds = [each for extra in inner[1:] for each in getattr(extra, "metadata", [])]
        return _described(inner[0]) + _bounds(bounds)
    if origin in (Union, types.UnionType):
        return " or ".join(_described(each) for each in inner if each is not types.NoneType)
    if origin is Literal:
        words = [repr(word) for word in inner]
        return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
    if origin is tuple:
        return f"a list of {len(inner)}, each {_described(inner[0])}"
    if origin is list:
        (item,) = inner
        return f"a list of {_described(item)}" if item is not str else "a list of texts"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"{{{', '.join(annotation.model_fields)}}}"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return "100, '500step', '2ep' or '1e9tok'" if annotation is Duration else names.get(annotation, str(annotation))


def _bounds(metadata: list[Any]) -> str:
    parts = []
    for bound in metadata:
        for name, words in (("gt", "more than {}"), ("ge", "{} or more"), ("lt", "less than {}"), ("le", "at most {}")):
            value = getattr(bound, name, None)
            if value is not None:
                parts.append(words.format(value))
    return f", {', '.join(parts)}" if parts else ""
