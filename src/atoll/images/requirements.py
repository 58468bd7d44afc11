"""Requirements as the driver reads them: checked, merged, without CUDA where there is no GPU."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import unquote

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from atoll.core.errors import ConfigError
from atoll.core.secrets import redact

# Extras that only add CUDA libraries, by project.
_CUDA_EXTRAS = {"jax": re.compile(r"cuda\d*([-_.]local)?|cuda\d*[-_.].*", re.I), "tensorflow": re.compile("and-cuda")}
# Projects that publish the same modules for CPUs under another name.
_CPU_PROJECTS = {"onnxruntime-gpu": "onnxruntime", "tensorflow-gpu": "tensorflow", "faiss-gpu": "faiss-cpu"}


def is_location(requirement: str) -> bool:
    """Whether a requirement is a URL or a path rather than a project's name."""
    text = requirement.split(";", maxsplit=1)[0].strip()
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text):
        return True
    return "@" not in text and (
        "/" in text or text.startswith((".", "~")) or text.endswith((".whl", ".tar.gz", ".zip"))
    )


def is_local(requirement: str) -> bool:
    """Whether a requirement is a path of this machine."""
    return is_location(requirement) and "://" not in requirement


def check_requirement(what: str, text: str) -> str:
    """``text`` as a requirement for pip; local paths become absolute.

    Raises:
        ConfigError: an option, a path that does not exist, or something pip could not read.
    """
    if len(text.splitlines()) > 1:  # it goes into a file of requirements, a line each
        raise ConfigError(f"{what}: {redact(text)!r} has several lines; give each requirement as a string of its own")
    if re.match(r"(-r|--requirement)\b", text):
        raise ConfigError(
            f"{what}: {redact(text)!r} is an option of pip; give the requirements themselves, for example "
            "pip=[line for line in open('requirements.txt') if line[0] not in '#\\n']. A uv.lock becomes such a file "
            "with `uv export --no-hashes --no-emit-project -o requirements.txt`"
        )
    if text.startswith("-"):
        raise ConfigError(
            f"{what}: {redact(text)!r} is an option of pip, not a requirement; set options through the environment "
            "(PIP_INDEX_URL, PIP_FIND_LINKS), pins through constraints=, your own modules through includes="
        )
    if is_location(text):
        if "://" in text:
            return text
        path, bracket, extras = text.partition("[")
        absolute = Path(path).expanduser().absolute()
        if not absolute.exists():
            raise ConfigError(f"{what}: {text!r} reads as a path, and {absolute} does not exist")
        return f"{absolute}{bracket}{extras}"
    try:
        Requirement(text)
    except InvalidRequirement:
        raise ConfigError(
            f"{what}: {redact(text)!r} is not a requirement; expected one like 'torch>=2.4' or 'jax[cuda12]'"
        ) from None
    return text


def project_name(requirement: str) -> str | None:
    """The canonical project a requirement names; None for a URL or a path, whose project only pip can tell."""
    return None if is_location(requirement) else canonicalize_name(Requirement(requirement).name)


def merge(base: Sequence[str], extra: Sequence[str]) -> list[str]:
    """``base`` then ``extra``; a project that ``extra`` names replaces every mention of it in ``base``."""
    replaced = {project_name(text) for text in extra} - {None}
    merged = [text for text in base if project_name(text) not in replaced]
    return list(dict.fromkeys([*merged, *extra]))


def without_cuda(requirements: Iterable[str]) -> tuple[list[str], list[str]]:
    """Requirements for a node without a GPU, and one line for each that changed."""
    kept, lines = [], []
    for text in requirements:
        plain = _cpu_requirement(text)
        kept.append(plain)
        if plain != text:
            lines.append(redact(f"{text} → {plain}: this node has no GPU"))
    return kept, lines


def _cpu_requirement(text: str) -> str:
    if is_location(text) or (requirement := Requirement(text)).url:
        return text
    project = canonicalize_name(requirement.name)
    cuda = _CUDA_EXTRAS.get(project)
    kept = {extra for extra in requirement.extras if cuda is None or not cuda.fullmatch(extra)}
    if project not in _CPU_PROJECTS and kept == requirement.extras:
        return text
    requirement.name, requirement.extras = _CPU_PROJECTS.get(project, requirement.name), kept
    return str(requirement)


def constraint_lines(constraints: str | os.PathLike[str] | Sequence[str] | None) -> list[str]:
    """The lines of a constraints file, or of a list of lines, without comments and blank ones.

    Raises:
        ConfigError: the file cannot be read.
    """
    if constraints is None:
        return []
    if isinstance(constraints, (str, os.PathLike)):
        try:
            lines: Sequence[str] = Path(constraints).expanduser().read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                redact(f"constraints={os.fspath(constraints)!r} cannot be read: {error}; ")
                + "expected the path of a constraints file or a list of lines such as ['numpy<2']"
            ) from error
    else:
        lines = constraints
    stripped = (re.sub(r"(^|\s)#.*$", "", line).strip() for line in lines)
    return [line for line in stripped if line]


def location_stamp(requirement: str) -> list[tuple[str, int, int]]:
    """What tells that a local path changed: name, size and mtime in ns of its files. Empty for all else."""
    _, direct, url = requirement.partition("file://")
    if not direct and not is_local(requirement):
        return []
    path = Path(unquote(re.split(r"[#;\s]", url, maxsplit=1)[0]) if direct else requirement.partition("[")[0])
    stamps = []
    for file in [path] if path.is_file() else path.rglob("*"):
        name = file.relative_to(path.parent)
        built = any(part in (".git", "__pycache__", "build") or part.endswith(".egg-info") for part in name.parts[1:])
        if not built and (file.is_symlink() or file.is_file()):
            status = file.lstat()
            stamps.append((str(name), status.st_size, status.st_mtime_ns))
    return sorted(stamps)
