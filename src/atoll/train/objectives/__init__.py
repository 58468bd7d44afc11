"""What is minimised, one file for each ``[objective] kind``, which is all that an objective needs.

A file here defines ``OBJECTIVE``, a class of ``objective.Objective``.
"""

from __future__ import annotations

import pkgutil


def names() -> list[str]:
    """The objectives there are."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))
