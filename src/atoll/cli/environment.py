"""What a bug report needs to know of this machine: versions, extras, state folder, hub login."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from pathlib import Path

from atoll import __version__
from atoll.core.paths import atoll_home

# A package of each extra that a recipe, a function or the dashboard may need.
_EXTRAS = {
    "data": "datasets",
    "s3": "s3fs",
    "gguf": "gguf",
    "float8": "torchao",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "transformers": "transformers",
    "dashboard": "starlette",
    "jax": "jax",
    "keras": "keras",
    "tensorflow": "tensorflow",
}


def environment() -> list[str]:
    """Lines on what Atoll runs with here; imports none of it."""
    torch = _version("torch")
    missing = [extra for extra, package in _EXTRAS.items() if importlib.util.find_spec(package) is None]
    there = [extra for extra in _EXTRAS if extra not in missing]
    home = atoll_home()
    hub = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser() / "token"
    login = "logged in" if os.environ.get("HF_TOKEN") or hub.exists() else "no login (HF_TOKEN, or `hf auth login`)"
    return [
        f"Atoll {__version__}, Python {platform.python_version()}, {platform.platform(terse=True)}",
        f"PyTorch {torch}" if torch else 'no PyTorch: atoll train needs the extra "train", the launcher does not',
        f"extras: {', '.join(there) or 'none'}" + (f"; not installed: {', '.join(missing)}" if missing else ""),
        f"ATOLL_HOME {home}, {shutil.disk_usage(home).free / 2**30:.0f} GiB free",
        f"Hugging Face hub: {login}",
    ]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
