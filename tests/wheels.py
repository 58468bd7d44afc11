"""Wheels that tests install."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Sequence
from pathlib import Path


def make_wheel(
    folder: Path, name: str, number: str, *, requires: Sequence[str] = (), extras: Sequence[str] = ()
) -> Path:
    """A pure wheel of one module that knows its version."""
    info = f"{name}-{number}.dist-info"
    headers = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {number}"]
    headers += [f"Provides-Extra: {extra}" for extra in extras] + [f"Requires-Dist: {need}" for need in requires]
    files = {
        f"{name}.py": f"__version__ = {number!r}\n",
        f"{info}/METADATA": "\n".join(headers) + "\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(text.encode())}\n"
    files[f"{info}/RECORD"] = record + f"{info}/RECORD,,\n"
    wheel = folder / f"{name}-{number}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return wheel
