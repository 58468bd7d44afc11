"""The model families, one file each, which is all that a family needs: a recipe names the file.

A file here defines ``FAMILY``, a ``models.family.Family``.
"""

from __future__ import annotations

import pkgutil


def names() -> list[str]:
    """The families there are."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))
