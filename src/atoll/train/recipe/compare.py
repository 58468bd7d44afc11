"""A recipe as TOML, and what changed between two."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from atoll.train.recipe.durations import Duration
from atoll.train.recipe.keys import Path, flat, title
from atoll.train.recipe.schema import Recipe

# A run resumes under another value of these as if nothing had happened: any layout and any batch that a rank handles
# at a time, and what is shown, kept and waited for. The length is not among them, since schedules depend on it; but
# whoever gives a larger one wants that.
HARMLESS: frozenset[str] = frozenset(
    {
        "version",
        "name",
        "metrics.*",
        "parallel.*",
        "compile.*",
        "checkpoint.every",
        "checkpoint.keep",
        "checkpoint.keep_every",
        "checkpoint.keep_best",
        "checkpoint.asynchronous",
        "checkpoint.at_end",
        "data.workers",
        "data.cache",
        "objective.chunk_tokens",
        "train.output_dir",
        "train.micro_batch",
        "train.recompute",
        "train.validate_every",
        "train.validate_batches",
        "train.deterministic",
        "train.hang_timeout_s",
        "train.grace_s",
    }
)


def resolved_toml(recipe: Recipe) -> str:
    """The whole recipe as TOML, defaults included, so that reading it gives the same recipe. Open keys are left out."""
    return "\n".join(_table((), recipe.model_dump(mode="json", exclude_none=True))) + "\n"


def diff(old: Recipe, new: Recipe) -> list[str]:
    """A line for every key that differs: ``[train] steps: 100 -> 200``."""
    return [f"{title(path)}: {before} -> {after}" for path, before, after in _changes(old, new)]


def harmful(old: Recipe, new: Recipe) -> list[str]:
    """Those lines of ``diff`` whose change would make a run resume differently from how it began."""
    harmless = HARMLESS | ({"train.steps", "train.tokens"} if _is_longer(old.train.length, new.train.length) else set())
    return [
        f"{title(path)}: {before} -> {after}"
        for path, before, after in _changes(old, new)
        if not {path[0], f"{path[0]}.*", ".".join(path)} & harmless
    ]


def _is_longer(old: Duration | None, new: Duration | None) -> bool:
    return old is not None and new is not None and old.unit == new.unit and new.value > old.value


def _changes(old: Recipe, new: Recipe) -> Iterator[tuple[Path, str, str]]:
    before, after = dict(flat(old.model_dump(mode="json"))), dict(flat(new.model_dump(mode="json")))
    for path in before | after:
        # Beside a nested table that is only in one of the two, the other has the key without a value.
        was, now = _toml(before.get(path)), _toml(after.get(path))
        if was != now:
            yield path, was, now


def _table(where: Path, table: Mapping[str, Any]) -> Iterator[str]:
    if where:
        yield from ("", f"[{'.'.join(where)}]")
    yield from (f"{key} = {_toml(value)}" for key, value in table.items() if not isinstance(value, dict))
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _table((*where, key), value)


def _toml(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {_toml(item)}' for key, item in value.items())}}}"
    # A value of JSON is one of TOML, except for DEL in a text, which has to be escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
