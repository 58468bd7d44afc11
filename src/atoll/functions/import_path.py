"""What ranks on this machine can import from: what this process can, as it is at each call."""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
from collections.abc import Iterable

from atoll.gang.members import SOURCE_ROOT


class ImportPath:
    """The import path of ranks under an interpreter. ``extra``, from an image, comes first."""

    def __init__(self, python: str = sys.executable, extra: Iterable[str] = ()) -> None:
        self.extra = (*extra,)
        self._is_own = os.path.realpath(python) == os.path.realpath(sys.executable)
        self._cache: tuple[tuple[list[str], str], tuple[str, ...]] | None = None
        self.seen: list[str] | None = None  # a sys.path without an entry for "here", and
        self.current: tuple[str, ...] = ()  # what that comes to

    def now(self) -> tuple[str, ...]:
        """Its entries."""
        # Asked at every call, changes hardly ever: only an entry that means "here" needs looking up each time.
        key = (list(sys.path), _here() if "" in sys.path else "")
        if self._cache is None or self._cache[0] != key:
            self._cache = (key, self._resolved(key[1]))
            self.current = self._cache[1]
            self.seen = key[0] if "" not in key[0] else None
        return self._cache[1]

    def _resolved(self, here: str) -> tuple[str, ...]:
        path = absolute(here)
        if not self._is_own:
            installed = tuple(os.path.realpath(sysconfig.get_path(n)) for n in ("stdlib", "purelib", "platlib"))
            return (*self.extra, *(p for p in path if not os.path.realpath(p).startswith(installed)))
        return (*self.extra, *path, *(() if SOURCE_ROOT in path else (SOURCE_ROOT,)))


def _here() -> str:
    """The current folder, or nothing where it was removed: no import can come from there then."""
    with contextlib.suppress(FileNotFoundError):
        return os.getcwd()
    return ""


def absolute(here: str) -> tuple[str, ...]:
    """``sys.path`` with absolute entries, ``here`` for the empty one; what is no path is skipped, as imports do."""
    given: list[object] = [*sys.path]
    entries = [os.fspath(entry) for entry in given if isinstance(entry, (str, os.PathLike))]
    with contextlib.suppress(FileNotFoundError):  # a relative entry where the current folder was removed
        return tuple(os.path.abspath(entry) if entry else here for entry in entries if entry or here)
    return tuple(entry for entry in entries if os.path.isabs(entry))
