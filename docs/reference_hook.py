"""mkdocs hook: makes the reference of commands and of recipe keys from the code."""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))
from atoll.cli.app import app
from atoll.train.recipe import schema

COMMANDS = "<!-- every command -->"
_TABLE = re.compile(r"^<!-- keys of \[([\w.]+)\] -->$", re.M)
_BREAK = re.compile(r"^(?:\[.*\]|-- .*)$")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Fill the markers of the two reference pages."""
    if page.file.src_uri == "cli.md":
        return markdown.replace(COMMANDS, "\n".join(_commands(typer.main.get_command(app), "atoll")))
    if page.file.src_uri == "recipe-keys.md":
        return _TABLE.sub(lambda found: "\n".join(keys_of(found[1])), markdown)
    return markdown


# ------------------------------------------------------------------------------------------------------- commands
def _commands(group: Any, before: str) -> Iterator[str]:
    for name, command in sorted(group.commands.items()):
        if command.hidden:
            continue
        whole = f"{before} {name}"
        if hasattr(command, "commands"):
            yield from _commands(command, whole)
            continue
        yield from (f"## {whole}", "", *_help(command.help or ""), "")
        rows = [_row(each) for each in command.params if not getattr(each, "hidden", False)]
        if rows:
            yield from ("| | |", "|---|---|", *rows, "")


def _help(text: str) -> Iterator[str]:
    """The help's paragraphs; those after a ``\\b``, which keep their lines, become code."""
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        lines = [line for line in paragraph.splitlines() if line != "\b"]
        if len(lines) == len(paragraph.splitlines()):
            yield from (*lines, "")
            continue
        code = False
        for line in lines:
            if line.startswith("    ") != code:
                code = not code
                yield from ("", "```text") if code else ("```", "")
            yield line.strip()
        yield "```" if code else ""


def _row(each: Any) -> str:
    typed = "" if getattr(each, "is_flag", False) else each.metavar or ""
    if each.param_type_name == "argument":
        names = f"`{each.metavar or each.name.upper()}`"
    else:
        flags = [*each.opts, *each.secondary_opts]
        names = ", ".join(f"`{flag}`" for flag in flags) + (f" `{typed}`" if typed else "")
    text = (each.help or "").strip()
    default = each.default if each.param_type_name != "argument" and not callable(each.default) else None
    shown = "" if default in (None, False, True, "", ()) or "default" in text else f" Default: `{default}`."
    return f"| {names} | {text}{shown} |".replace("\n", " ")


# ---------------------------------------------------------------------------------------------------- recipe keys
def keys_of(path: str) -> list[str]:
    """The table of a section: each key with its default and its meaning."""
    section, _, inner = path.partition(".")
    model: Any = schema.Recipe.model_fields[section].annotation
    if inner:
        model = next(each for each in _models(model.model_fields[inner].annotation))
    meanings = meanings_of(model)
    lines = [inspect.getdoc(model) or "", "", "| key | default | meaning |", "|---|---|---|"]
    for key, field in model.model_fields.items():
        default = "required" if field.is_required() else "unset" if field.default is None else f"`{_toml(field)}`"
        lines.append(f"| `{key}` | {default} | {meanings[key]} |")
    return [line.replace("``", "`") for line in lines]


def meanings_of(model: type) -> dict[str, str]:
    """The comment of each field: behind it, or above it where it is long."""
    source = inspect.getsource(model)
    lines = source.splitlines()
    found = {}
    for node in ast.parse(source).body[0].body:  # type: ignore[attr-defined]
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            above: list[str] = []
            at = node.lineno - 2
            while lines[at].strip().startswith("#"):
                above.insert(0, lines[at].strip("# "))
                at -= 1
            behind = lines[(node.end_lineno or node.lineno) - 1].partition("  # ")[2]
            found[node.target.id] = behind or " ".join(above)
    return found


def _models(annotation: Any) -> Iterator[type]:
    inner = getattr(annotation, "__args__", ())
    if inner:
        for each in inner:
            yield from _models(each)
    elif hasattr(annotation, "model_fields"):
        yield annotation


def _toml(field: Any) -> str:
    value = list(field.default) if isinstance(field.default, tuple) else field.default
    return json.dumps(value)
