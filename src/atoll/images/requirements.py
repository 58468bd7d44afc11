"""Requirements: what they say, which of them an environment already satisfies, what they become without a GPU."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from atoll.core.errors import ConfigError
from atoll.core.hints import redact

if TYPE_CHECKING:
    from importlib.metadata import Distribution

_NAMED = re.compile(
    r"(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)\s*(?:\[(?P<extras>[^\]]*)\])?\s*(?P<rest>.*)"
)

# Extras that only add CUDA libraries, by project.
_CUDA_EXTRAS = {"jax": re.compile(r"cuda\d*([-_.]local)?|cuda\d*[-_.].*", re.I), "tensorflow": re.compile("and-cuda")}
# Projects that publish the same modules for CPUs under another name.
_CPU_PROJECTS = {"onnxruntime-gpu": "onnxruntime", "tensorflow-gpu": "tensorflow", "faiss-gpu": "faiss-cpu"}


def canonical_name(name: str) -> str:
    """A project's name as indexes compare it: ``Foo.Bar`` is ``foo-bar``."""
    return re.sub(r"[-_.]+", "-", name).lower()


def project_name(requirement: str) -> str | None:
    """The canonical project a requirement names; None for a URL or a path, whose project only pip can tell."""
    if is_location(requirement):
        return None
    found = _NAMED.fullmatch(requirement.strip())
    return canonical_name(found["name"]) if found else None


def is_location(requirement: str) -> bool:
    """Whether a requirement is a URL or a path rather than a project's name."""
    text = requirement.split(";", maxsplit=1)[0].strip()
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text):
        return True
    return "@" not in text and (
        "/" in text or text.startswith((".", "~")) or text.endswith((".whl", ".tar.gz", ".zip"))
    )


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
    found = _NAMED.fullmatch(text)
    if found is None or (found["rest"] and found["rest"][0] not in "<>=!~;@("):
        raise ConfigError(
            f"{what}: {redact(text)!r} is no requirement; expected one like 'torch>=2.4' or 'jax[cuda12]'"
        )
    return text


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
    found = None if is_location(text) else _NAMED.fullmatch(text)
    if found is None or found["rest"].startswith("@"):
        return text
    project = canonical_name(found["name"])
    extras = [extra.strip() for extra in (found["extras"] or "").split(",") if extra.strip()]
    cuda = _CUDA_EXTRAS.get(project)
    kept = [extra for extra in extras if cuda is None or not cuda.fullmatch(extra)]
    name = _CPU_PROJECTS.get(project, found["name"])
    if name == found["name"] and kept == extras:
        return text
    return name + (f"[{','.join(kept)}]" if kept else "") + found["rest"]


class Installed:
    """The distributions under some folders, and whether they satisfy requirements."""

    def __init__(self, folders: Sequence[str]) -> None:
        self._folders = list(folders)
        self._found: dict[str, Distribution | None] = {}

    def version(self, project: str) -> str | None:
        """The version of a project that an import would find, or None."""
        found = self._find(canonical_name(project))
        return None if found is None else found.version

    def satisfy(self, requirements: Sequence[str], constraints: Sequence[str] = ()) -> bool:
        """Whether nothing would have to be installed: versions, extras and all their dependencies are there.

        False also where it cannot be told here (URLs, paths, included constraint files): then pip decides.
        """
        parser = _parser()
        if parser is None or any(is_location(text) for text in requirements):
            return False
        try:
            limits: dict[str, list[Any]] = {}
            for line in constraints:
                limit = parser.Requirement(line)
                if limit.url:
                    return False
                if limit.marker is None or limit.marker.evaluate():
                    limits.setdefault(canonical_name(limit.name), []).append(limit.specifier)
            seen: set[tuple[str, str]] = set()
            return all(self._has(parser, parser.Requirement(text), "", limits, seen) for text in requirements)
        except parser.InvalidRequirement:
            return False

    def _has(
        self, parser: Any, requirement: Any, extra: str, limits: dict[str, list[Any]], seen: set[tuple[str, str]]
    ) -> bool:
        """Whether ``requirement``, read with ``extra`` switched on, is there with all that it needs."""
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            return True
        project = canonical_name(requirement.name)
        found = self._find(project)
        if found is None or requirement.url:
            return False
        specifiers = [requirement.specifier, *limits.get(project, [])]
        # An installed prerelease counts, as it does for pip.
        if not all(specifier.contains(found.version, prereleases=True) for specifier in specifiers):
            return False
        for wanted in ["", *sorted(requirement.extras)]:
            if (project, wanted) in seen:
                continue
            seen.add((project, wanted))
            needs = [parser.Requirement(text) for text in found.requires or []]
            if wanted:  # the unconditional needs were looked at with the empty extra
                needs = [need for need in needs if need.marker is not None and not need.marker.evaluate({"extra": ""})]
            if not all(self._has(parser, need, wanted, limits, seen) for need in needs):
                return False
        return True

    def _find(self, project: str) -> Distribution | None:
        if project not in self._found:
            from importlib.metadata import Distribution  # as slow to import as all of this package's own modules

            # Half-removed packages leave metadata without a version behind.
            found = Distribution.discover(name=project, path=self._folders)
            self._found[project] = next((each for each in found if each.metadata["Version"]), None)
        return self._found[project]


def _parser() -> Any:
    """The ``packaging`` library, pip's copy of it, or None. Imported late: it takes longer than all else here."""
    for name in ("packaging.requirements", "pip._vendor.packaging.requirements"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None


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
    if direct:
        path = Path(unquote(re.split(r"[#;\s]", url, maxsplit=1)[0]))
    elif is_location(requirement) and "://" not in requirement:
        path = Path(requirement.partition("[")[0])
    else:
        return []
    if path.is_file():
        return [_stamp(path, path.parent)]
    stamps = []
    for folder, folders, files in os.walk(path):
        folders[:] = [
            name for name in folders if name not in (".git", "__pycache__", "build") and not name.endswith(".egg-info")
        ]
        stamps += [_stamp(Path(folder, name), path) for name in files]
    return sorted(stamps)


def _stamp(path: Path, root: Path) -> tuple[str, int, int]:
    status = path.lstat()
    return (str(path.relative_to(root)), status.st_size, status.st_mtime_ns)
