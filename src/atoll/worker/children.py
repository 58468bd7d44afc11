"""Children of a rank that are fresh interpreters (spawn, forkserver) get what the rank has of the driver's modules.

``multiprocessing`` has such a child run the module that ``__main__.__spec__`` names, as the child's own ``__main__``.
In a rank and in its children that is this module: the user's script is never run again. The definitions lie in a
memory file that the rank fills when it starts a child; forked children inherit all of it and need nothing.
"""

from __future__ import annotations

import os
import pickle
import sys
from typing import Any

from atoll.core.errors import SerializationError
from atoll.wire.codec import dumps, loads
from atoll.wire.definitions import ScriptModule, script_module

_VARIABLE = "ATOLL_DEFINITIONS"  # the path of the memory file
_MODULE = "atoll.worker.children"


class DefinitionsSpec:
    """The ``__spec__`` of a rank's ``__main__``. Its name is asked for when a fresh interpreter is to be started."""

    loader = origin = cached = submodule_search_locations = None
    parent = ""
    has_location = False

    def __init__(self) -> None:
        self._open()

    def _open(self) -> None:
        self._owner, self._fd = os.getpid(), os.memfd_create("atoll-definitions", os.MFD_CLOEXEC)
        os.environ[_VARIABLE] = f"/proc/{self._owner}/fd/{self._fd}"

    @property
    def name(self) -> str:
        """The module that the child is to run; what it will read is written now."""
        if os.getpid() != self._owner:  # a forked child that starts children of its own
            self._open()
        with open(os.memfd_create("atoll-definitions", os.MFD_CLOEXEC), "wb") as file:
            file.write(_packed())
            file.flush()
            os.dup2(file.fileno(), self._fd, inheritable=False)  # the file that a child is reading stays as it is
        return _MODULE


def _packed() -> bytes:
    found = {
        (module.__name__, name): value
        for module in list(sys.modules.values())
        if isinstance(module, ScriptModule)
        for name, value in vars(module).items()
        if not name.startswith("__")
    }
    try:
        payload = dumps(found)
    except SerializationError:  # the call put something into one of them that can't travel: the child lacks that one
        payload = dumps({key: value for key, value in found.items() if _can_travel(value)})
    return pickle.dumps((payload.head, [bytes(buffer) for buffer in payload.buffers]))


def _can_travel(value: Any) -> bool:
    try:
        dumps(value)
    except SerializationError:
        return False
    return True


def _load() -> dict[str, Any]:
    """Make the modules of the rank in this process; what ``__main__`` has is returned."""
    with open(os.environ[_VARIABLE], "rb") as file:
        content = file.read()
    own = {}
    for (module, name), value in loads(*pickle.loads(content)).items() if content else ():
        if module == "__main__":
            own[name] = value
        else:
            setattr(script_module(module), name, value)
    return own


if __name__ == "__mp_main__":
    globals().update(_load())
