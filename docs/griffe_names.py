"""griffe extension: an item `a, b: text` in a docstring's list of arguments or attributes stands for two items.

Docstrings here name values that share a text together; the parser wants one item for each.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

# `    a, b: text`, and the lines below it that are indented deeper.
_SHARED = re.compile(r"^(?P<indent>[ ]+)(?P<names>\w+(?:, \w+)+)(?P<text>: .*(?:\n(?P=indent)[ ]+\S.*)*)", re.M)


class SplitNames(griffe.Extension):
    """Rewrites each docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _SHARED.sub(_one_each, obj.docstring.value)


def _one_each(found: re.Match[str]) -> str:
    return "\n".join(f"{found['indent']}{name}{found['text']}" for name in found["names"].split(", "))
