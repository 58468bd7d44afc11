"""Files of a Hugging Face hub: fetched once a node however many ranks ask, and every refusal told with what to do.

``HF_TOKEN``, ``HF_ENDPOINT``, ``HF_HUB_OFFLINE``, ``HF_HOME`` and ``HF_HUB_CACHE`` are read at each call.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from atoll.core.errors import ConfigError

Progress = Callable[[float, float | None], None]  # bytes done, bytes in all where known

INDEX = "model.safetensors.index.json"
WEIGHTS = ["*.safetensors", INDEX, "config.json", "generation_config.json"]
TOKENIZER = ["tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "*.jinja"]

_DEFAULT_ENDPOINT = "https://huggingface.co"


def is_hub_name(spec: str) -> bool:
    """Whether ``spec`` reads as ``owner/name`` or ``owner/name@revision``, and no ``owner`` is a folder here."""
    return reads_as_name(spec) and not os.path.isdir(spec.partition("/")[0])


def reads_as_name(spec: str) -> bool:
    """Whether ``spec`` has the form ``owner/name`` or ``owner/name@revision``, whatever there is here."""
    parts = spec.partition("@")[0].split("/")
    if len(parts) != 2 or not all(parts) or spec.startswith((".", "~")):
        return False
    return not spec.endswith((".safetensors", ".gguf", ".json"))


def endpoint() -> str:
    """The hub's address: ``HF_ENDPOINT``, else the public one."""
    return (os.environ.get("HF_ENDPOINT") or _DEFAULT_ENDPOINT).rstrip("/")


def is_offline() -> bool:
    """Whether ``HF_HUB_OFFLINE`` asks to use what is on this machine only."""
    return (os.environ.get("HF_HUB_OFFLINE") or "").upper() in ("1", "ON", "YES", "TRUE")


def token() -> str | None:
    """``HF_TOKEN``, else what ``hf auth login`` stored; None where there is neither."""
    if given := os.environ.get("HF_TOKEN"):
        return given.strip()
    stored = Path(os.environ.get("HF_TOKEN_PATH") or _home() / "token")
    return stored.read_text().strip() or None if stored.is_file() else None


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
    at = f"revision {revision!r} of " if revision else ""
    with _explained(name, at):
        folder = _library(name).snapshot_download(
            name,
            revision=revision or None,
            cache_dir=_cache(),
            allow_patterns=patterns,
            endpoint=endpoint(),
            token=token() or False,
            local_files_only=is_offline(),
            tqdm_class=_bar(progress),
        )
    found = Path(folder)
    if not any(any(found.glob(pattern)) for pattern in patterns):
        raise ConfigError(
            f"{at}{name} at {endpoint()} has no file like {', '.join(patterns)}: is it a model of another format?"
        )
    return found


def push(folder: Path, name: str, *, private: bool = False) -> str:
    """Upload a folder as a model, made where it does not exist yet; gives its address.

    Raises:
        ConfigError: there is no token, it may not write there, or the hub cannot be reached; says what to do.
    """
    if not reads_as_name(name):
        raise ConfigError(f"--push {name}: expected owner/name")
    if is_offline():
        raise ConfigError(f"HF_HUB_OFFLINE is set, and pushing to {name} needs {endpoint()}: unset it")
    if token() is None:
        raise ConfigError(f"pushing to {name} needs a token that may write: set HF_TOKEN")
    with _explained(name, pushed=folder), _without_bars():
        api = _library(name).HfApi(endpoint=endpoint(), token=token())
        api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Export from Atoll")
    return f"{endpoint()}/{name}"


# --------------------------------------------------------------------------------------------------- transfer
@contextmanager
def _without_bars() -> Iterator[None]:
    """No bars of the library's own: who calls shows what there is to show."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _library(name: str) -> Any:
    try:
        import huggingface_hub
    except ImportError:
        raise ConfigError(
            f"{name} is a name on a hub, which needs huggingface_hub: pip install huggingface_hub"
        ) from None
    return huggingface_hub


@contextmanager
def _explained(name: str, at: str = "", *, pushed: Path | None = None) -> Iterator[None]:
    """Turn what a transfer can raise into a ``ConfigError`` that says what to do.

    That is OSError; RuntimeError, from Xet, and around what went wrong with one file; and the root of the errors of the
    HTTP library, which differs between versions of huggingface_hub.
    """
    _library(name)
    from huggingface_hub import errors

    roots = tuple(each for each in errors.HfHubHTTPError.__mro__ if each.__name__ == "HTTPError")
    failures: tuple[type[Exception], ...] = (OSError, RuntimeError, errors.HFValidationError, *roots)
    try:
        yield
    except failures as error:
        raise ConfigError(_reason(name, at, pushed, error)) from None


def _reason(name: str, at: str, pushed: Path | None, error: Exception) -> str:
    from huggingface_hub import errors

    page, status = f"{endpoint()}/{name}", getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.HFValidationError):
        return f"{name!r} is not a valid model name: {error}"
    if pushed is not None and status in (401, 403):
        return f"{endpoint()} refuses to write {name}: is HF_TOKEN valid, and may it write?"
    if isinstance(error, errors.GatedRepoError):
        if token() is None:
            return f"{name} is gated: accept its licence at {page}, make a token there, and set HF_TOKEN to it"
        return f"{name} is gated, and the account of this HF_TOKEN has no access: accept its licence at {page}"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{name} has no {at.removesuffix(' of ')} at {endpoint()}: see {page}"
    if isinstance(error, errors.RepositoryNotFoundError):
        hint = "HF_TOKEN is not allowed to see it" if token() else "it is private: set HF_TOKEN"
        return f"there is no model {name} at {endpoint()}: check the spelling, or {hint}"
    if status in (401, 403):
        hint = "HF_TOKEN is not valid there, or has no access" if token() else "set HF_TOKEN"
        return f"{endpoint()} refuses {name}: {hint}; see {page}"
    if isinstance(error, errors.LocalEntryNotFoundError) and is_offline():
        return (
            f"HF_HUB_OFFLINE is set, and {at}{name} is not complete in {_cache()}: unset it once to fetch it, or give "
            "a local folder instead"
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EACCES, errno.EPERM, errno.EROFS):
        return f"cannot write to {_cache()} ({error.strerror}): free space, or set HF_HOME to a folder elsewhere"
    cause = error.__cause__ or error
    what = f"{type(cause).__name__}: {str(cause).strip()}".splitlines()[0]
    if isinstance(error, errors.LocalEntryNotFoundError):
        how = f"could not reach {endpoint()} for {name}"
    else:
        how = f"fetching {name} from {endpoint()} failed" if pushed is None else f"pushing {pushed} to {page} failed"
    return f"{how}: {what}. What is complete is kept: run the same again when the network is back"


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


# ----------------------------------------------------------------------------------------------------- folders
def _home() -> Path:
    base = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(base).expanduser()


def _cache() -> Path:
    return Path(os.environ.get("HF_HUB_CACHE") or _home() / "hub").expanduser()
