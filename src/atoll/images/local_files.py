"""The parts of an image that a local node already has or has not: Debian packages and the user's own modules."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from atoll.core.errors import ConfigError, ImageError


def check_apt(packages: Sequence[str]) -> None:
    """Nothing where every package is installed (``name=version``: in that version).

    Raises:
        ImageError: some are not, or this system has no Debian packages. Nothing is installed here: on the user's own
            machine that is for them to do, and the message holds the line.
    """
    if not packages:
        return
    if shutil.which("dpkg-query") is None:
        raise ImageError(
            f"Image(apt={list(packages)!r}): this machine has no dpkg-query, so it is not Debian or Ubuntu; "
            "leave apt= out for local nodes and install these yourself"
        )
    names = [package.partition("=")[0] for package in packages]
    answer = subprocess.run(
        ["dpkg-query", "-W", "-f", "${db:Status-Status} ${Package}:${Architecture} ${Version}\\n", *names],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,  # it fails where one of them is unknown, and still prints the others
    )
    installed = set()
    for status, name, version in (line.split(" ", 2) for line in answer.stdout.splitlines()):
        if status == "installed":
            for known in (name, name.partition(":")[0]):
                installed |= {known, f"{known}={version}"}
    missing = [package for package in packages if package not in installed]
    if missing:
        sudo = "" if os.geteuid() == 0 else "sudo "
        raise ImageError(
            f"Image(apt=): not installed on this machine: {', '.join(missing)}. Atoll installs no system packages "
            f"on your own machine; run: {sudo}apt-get install {' '.join(missing)}"
        )


def include_paths(includes: Sequence[str | os.PathLike[str]]) -> list[str]:
    """Folders to import from so that every entry of ``includes`` can be imported.

    A ``.py`` file or a package folder (one with ``__init__.py``) gives the folder it is in; any other folder gives
    itself; a module's name gives the folder that it is imported from here.

    Raises:
        ConfigError: an entry that is neither a path nor a module.
    """
    found = (_include_path(os.fspath(entry)) for entry in includes)
    return list(dict.fromkeys(path for path in found if path is not None))


def _include_path(entry: str) -> str | None:
    path = Path(entry).expanduser().absolute()
    if path.is_file():
        if path.suffix != ".py":
            raise ConfigError(
                f"Image(includes=): {entry!r} is not a .py file; pass data as an argument of the function"
            )
        return str(path.parent)
    if path.is_dir():
        return str(path.parent if (path / "__init__.py").exists() else path)
    module = entry.partition(".")[0]
    spec = importlib.util.find_spec(module) if module.isidentifier() else None
    if spec is None:
        raise ConfigError(
            f"Image(includes=): {entry!r} is neither a path (looked at {path}) nor a module that can be imported here"
        )
    places = list(spec.submodule_search_locations or []) or ([spec.origin] if spec.has_location and spec.origin else [])
    if not places:  # built into the interpreter
        return None
    folder = str(Path(places[0]).absolute().parent)
    # The ranks' interpreter has its own packages on its path anyway.
    own = os.path.basename(folder) in ("site-packages", "dist-packages") or folder == os.path.dirname(os.__file__)
    return None if own and folder in sys.path else folder
