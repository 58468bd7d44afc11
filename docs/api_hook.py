"""mkdocs hook: fills the API page from `atoll.__all__` and `atoll.train.__all__`: what is public is documented."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))
atoll = importlib.import_module("atoll")
train = importlib.import_module("atoll.train")

MARKER = "<!-- every public name -->"
TRAIN_MARKER = "<!-- every public name of atoll.train -->"
# Members that modules of the package call on each other.
INTERNAL = ("settle", "settle_streams", "submit_call", "place")
# What calls give back: nobody makes one, so there is no constructor to show.
GIVEN = {"CallFuture", "Group", "Pending", "RankResults", "Stream"}


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Replace the markers on the API page by one section for each public name, grouped by what it is."""
    if page.file.src_uri != "api-reference.md":
        return markdown
    for marker, lines in ((MARKER, _sections()), (TRAIN_MARKER, _training())):
        if marker not in markdown:
            raise ValueError(f"docs/api-reference.md has lost its line {marker!r}")
        markdown = markdown.replace(marker, "\n".join(lines))
    return markdown


def _training() -> list[str]:
    lines: list[str] = []
    for name in sorted(train.__all__, key=str.lower):
        lines += [*_block(f"{train._WHERE[name]}.{name}", f"atoll.train.{name}", level=3), ""]
    return lines


def _sections() -> list[str]:
    groups: dict[str, list[str]] = {
        "Calls and data": [],
        "Pools, images and providers": [],
        "Tasks and clusters": [],
        "Errors": [],
    }
    for name in sorted((n for n in atoll.__all__ if not n.startswith("__")), key=str.lower):
        value = getattr(atoll, name)
        if inspect.isclass(value) and issubclass(value, BaseException):
            groups["Errors"].append(name)
        elif _home(name).startswith("atoll.functions"):
            groups["Calls and data"].append(name)
        elif _home(name).startswith("atoll.tasks"):
            groups["Tasks and clusters"].append(name)
        else:
            groups["Pools, images and providers"].append(name)
    lines: list[str] = []
    for title, names in groups.items():
        lines += [f"## {title}", ""]
        for name in names:
            lines += [*_body(name, getattr(atoll, name)), ""]
    return lines


def _body(name: str, value: object) -> list[str]:
    """The mkdocstrings block of one name; a public module shows its public functions below it."""
    if not isinstance(value, ModuleType):
        return _block(_home(name), f"sky.{name}", level=3)
    lines = [f"### sky.{name}", "", inspect.getdoc(value) or "", ""]
    public = getattr(value, "__all__", None) or [n for n in vars(value) if not n.startswith("_")]
    for member in public:
        if getattr(getattr(value, member), "__module__", "").startswith("atoll"):
            lines += [*_block(f"{value.__name__}.{member}", f"sky.{name}.{member}", level=4), ""]
    return lines


def _block(path: str, heading: str, *, level: int) -> list[str]:
    options: dict[str, object] = {"heading": heading, "toc_label": heading, "heading_level": level}
    options["filters"] = ["!^_", f"!^({'|'.join(INTERNAL)})$"]
    if path.rpartition(".")[2] in GIVEN:
        options["merge_init_into_class"] = "false"
    return [f"::: {path}", "    options:", *(f"      {key}: {value}" for key, value in options.items())]


def _home(name: str) -> str:
    """Full path of the object behind a public name, where its docstring is written."""
    value = getattr(atoll, name)
    if isinstance(value, ModuleType):
        return value.__name__
    module = getattr(value, "__module__", None)
    qualified = getattr(value, "__qualname__", None)
    if module and qualified and re.fullmatch(r"atoll[.\w]*", module) and "<" not in qualified:
        return f"{module}.{qualified}"
    return f"{atoll._WHERE[name]}.{name}"
