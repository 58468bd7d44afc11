"""Files of a Hugging Face hub: fetched once a node however many ranks ask, and every refusal told with what to do.

``HF_TOKEN``, ``HF_ENDPOINT``, ``HF_HUB_OFFLINE``, ``HF_HOME`` and ``HF_HUB_CACHE`` are read by ``huggingface_hub``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import constants, errors

from atoll.core.errors import ConfigError

Progress = Callable[[float, float | None], None]  # bytes done, bytes in all where known

INDEX = "model.safetensors.index.json"
WEIGHTS = ["*.safetensors", INDEX, "config.json", "generation_config.json"]
TOKENIZER = ["tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "*.jinja"]


def is_hub_name(spec: str) -> bool:
    """Whether ``spec`` reads as ``owner/name`` or ``owner/name@revision``, and no ``owner`` is a folder here."""
    return reads_as_name(spec) and not os.path.isdir(spec.partition("/")[0])


def reads_as_name(spec: str) -> bool:
    """Whether ``spec`` has the form ``owner/name`` or ``owner/name@revision``, whatever there is here."""
    parts = spec.partition("@")[0].split("/")
    if len(parts) != 2 or not all(parts) or spec.startswith((".", "~")):
        return False
    return not spec.endswith((".safetensors", ".gguf", ".json"))


def fetch(name: str, *, patterns: list[str], progress: Progress | None = None) -> Path:
    """The files of a repository, in a local folder.

    What is already here is not transferred again, and files that are complete outlive an interrupted transfer. Where
    several processes of a node ask at once the library's locks let one of them transfer a file, and the others wait.

    Args:
        name: ``owner/name``, or ``owner/name@revision``: a branch, tag or commit, the main branch by default.
        patterns: globs of the files that are wanted.
        progress: called with bytes done and bytes in all.

    Raises:
        ConfigError: there is no such repository or revision, it asks for a licence or a token, none of its files
            matches, the hub cannot be reached, or this machine is offline and has no copy; says what to do.
    """
    name, _, revision = name.partition("@")
    with _explained(name, revision):
        folder = huggingface_hub.snapshot_download(
            name, revision=revision or None, allow_patterns=patterns, tqdm_class=_bar(progress)
        )
    found = Path(folder)
    if not any(any(found.glob(pattern)) for pattern in patterns):
        raise ConfigError(
            f"{name} at {constants.ENDPOINT} has no file like {', '.join(patterns)}: is it a model of another format?"
        )
    return found


def push(folder: Path, name: str, *, private: bool = False) -> str:
    """Upload a folder as a model, made where it does not exist yet; gives its address.

    Raises:
        ConfigError: there is no token, it may not write there, or the hub cannot be reached; says what to do.
    """
    if not reads_as_name(name):
        raise ConfigError(f"--push {name}: expected owner/name")
    with _explained(name):
        api = huggingface_hub.HfApi()
        api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Export from Atoll")
    return f"{constants.ENDPOINT}/{name}"


@contextmanager
def _explained(name: str, revision: str = "") -> Iterator[None]:
    """Turn what a transfer can raise into a ``ConfigError`` that says what to do.

    That is OSError; RuntimeError, from Xet, and around what went wrong with one file; and the root of the errors of the
    HTTP library, which differs between versions of huggingface_hub.
    """
    roots = tuple(each for each in errors.HfHubHTTPError.__mro__ if each.__name__ == "HTTPError")
    failures: tuple[type[Exception], ...] = (OSError, RuntimeError, errors.HFValidationError, *roots)
    try:
        yield
    except failures as error:
        raise ConfigError(_reason(name, revision, error)) from None


def _reason(name: str, revision: str, error: Exception) -> str:
    hub = constants.ENDPOINT
    at = f"{name}@{revision}" if revision else name
    if isinstance(error, errors.GatedRepoError):
        return (
            f"{name} is gated: accept its licence at {hub}/{name}, and set HF_TOKEN to a token of the account that did"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{name} has no revision {revision!r} at {hub}: see {hub}/{name}"
    refused = getattr(getattr(error, "response", None), "status_code", None) in (401, 403)
    if refused or isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"{hub} has no model {name}, or not for this HF_TOKEN: check the spelling, or set HF_TOKEN to a token that "
            "may read it (to push: that may write)"
        )
    if constants.HF_HUB_OFFLINE:
        return (
            f"HF_HUB_OFFLINE is set, and {at} is not complete in {constants.HF_HUB_CACHE}: unset it once to reach "
            f"{hub}, or give a local folder"
        )
    cause = error.__cause__ or error
    what = f"{type(cause).__name__}: {str(cause).strip()}".splitlines()[0]
    return f"{at} could not be transferred with {hub}: {what}. What is complete is kept: run the same again"


def _bar(progress: Progress | None) -> Any:
    """A stand-in for tqdm that shows nothing and tells ``progress`` of bytes; files are counted elsewhere."""
    from huggingface_hub.utils.tqdm import tqdm

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.in_bytes = kwargs.get("unit") == "B" and "transfer" not in str(kwargs.get("name"))
            self.done = float(kwargs.get("initial") or 0)
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]  # it has no types

        def update(self, n: float | None = 1) -> None:
            self.done += n or 0
            if self.in_bytes and progress is not None:
                progress(self.done, self.total or None)

    return Bar
