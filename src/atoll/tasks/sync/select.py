"""What of a folder is sent to the nodes.

What git would commit (``git ls-files -co --exclude-standard``, submodules too), or what ``.skyignore`` leaves, or
outside of git everything but environments and caches. Paths are relative, with ``/``; bytes that are not UTF-8 are
surrogates.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.core.errors import ConfigError
from atoll.core.paths import atoll_home
from atoll.tasks.sync.git import GitError, run_git
from atoll.tasks.sync.receive import SELF, Entry, below, entry_of

Note = Callable[[str], object]  # gets a line for the user
_NUM_NAMED = 3  # paths that a note spells out
_SKYIGNORE = ".skyignore"


@dataclass(frozen=True, slots=True)
class Selection:
    """What of a folder, or which single file, is sent.

    Attributes:
        root: the folder or file.
        entries: its files, links and empty folders.
        notes: one line for each thing the user should know.
    """

    root: Path
    entries: tuple[Entry, ...]
    notes: tuple[str, ...] = ()


def select(root: Path) -> Selection:
    """Select what is sent of a folder, or a single file.

    Raises:
        ConfigError: there is nothing there, or a folder in it cannot be read.
    """
    if not root.is_dir():
        try:
            single = entry_of(SELF, os.path.realpath(root, strict=True))
        except OSError as error:
            raise ConfigError(f"{root}: {error.strerror}; expected a folder or a file") from None
        if single is None:
            raise ConfigError(f"{root} is neither a folder nor a file")
        return Selection(Path(os.path.realpath(root)), (single,))
    notes: list[str] = []
    entries: list[Entry] = []
    special: list[str] = []
    leaving: list[str] = []
    own = os.path.relpath(atoll_home(), os.path.realpath(root))  # where the nodes' copies lie: never copied itself
    for path in list_files(root, notes.append):
        if path.startswith(f"{own}/"):
            continue
        try:
            entry = entry_of(path.rstrip("/"), below(root, path))
        except (FileNotFoundError, NotADirectoryError):
            continue  # git still lists what was deleted but not committed
        except PermissionError:
            raise unreadable(below(root, path)) from None
        if entry is None:
            special.append(path)
            continue
        if entry.kind == "link" and _points_out(entry):
            leaving.append(f"{path} -> {entry.target}")
        entries.append(entry)
    if special:
        notes.append(f"not copied, neither files nor links: {_some(special)}")
    if leaving:
        notes.append(f"links that point out of the folder are copied as links: {_some(leaving)}")
    return Selection(root, tuple(entries), tuple(notes))


def list_files(folder: Path, note: Note = lambda line: None) -> list[str]:
    """List the files and links of ``folder`` that are sent; empty folders, which git has not, end in ``/``.

    Args:
        note: called with a line for each thing the user should know.

    Raises:
        ConfigError: a folder in it cannot be read.
    """
    if (folder / _SKYIGNORE).is_file():
        from pathspec import GitIgnoreSpec

        rules = os.fsdecode((folder / _SKYIGNORE).read_bytes()).splitlines()
        try:
            return _walk(folder, note, GitIgnoreSpec.from_lines(rules).match_file)
        except ValueError as error:  # a rule that is no pattern
            raise ConfigError(f"{folder / _SKYIGNORE}: {error}") from None
    try:
        paths = _list_by_git(folder, note)
    except FileNotFoundError:
        if any((parent / ".git").exists() for parent in (folder, *folder.resolve().parents)):
            note(f"git is not installed, so .gitignore could not be read: all of {folder} is copied")
        paths = None
    except GitError as refusal:
        note(f"git does not list {folder} ({refusal}): all of it is copied")
        paths = None
    return _walk(folder, note) if paths is None else paths


def _points_out(link: Entry) -> bool:
    ends_at = os.path.normpath(os.path.join(os.path.dirname(link.path), link.target))
    return ends_at.startswith("/") or ends_at.split("/")[0] == ".."


def _some(paths: Sequence[str]) -> str:
    shown = ", ".join(printable(path) for path in paths[:_NUM_NAMED])
    more = len(paths) - _NUM_NAMED
    return f"{shown} and {more} more" if more > 0 else shown


def printable(path: str) -> str:
    """A path for a message, on one line whatever is in it."""
    return path if path.isprintable() else ascii(path)


def unreadable(path: str) -> ConfigError:
    """The error for a file or folder of the source that cannot be opened."""
    return ConfigError(
        f"{printable(path)} may not be read by this user: make it readable (chmod u+r), or list it in .gitignore"
    )


def _list_by_git(folder: Path, note: Note) -> list[str] | None:
    """What git lists in ``folder``, submodules and repositories inside included; None outside of a work tree."""
    inside = run_git(folder, "rev-parse", "--is-inside-work-tree")
    if inside.returncode != 0 and b"not a git repository" not in inside.stderr:
        raise GitError(inside)
    # A folder that its repository ignores, such as build/, is no part of it, though it may well be a workdir.
    if inside.stdout.strip() != b"true" or run_git(folder, "check-ignore", "-q", ".").returncode == 0:
        return None
    listed = run_git(folder, "ls-files", "-co", "--exclude-standard", "-z")
    for line in os.fsdecode(listed.stderr).splitlines():
        name = line.partition("could not open directory '")[2].partition("'")[0]
        if name and "Permission denied" in line:
            raise unreadable(below(folder, name.rstrip("/")))
    if listed.returncode != 0:
        raise GitError(listed)
    found: dict[str, None] = {}  # an unmerged file is listed once a side
    for path in os.fsdecode(listed.stdout).split("\0"):
        name = path.rstrip("/")
        at = folder / name
        if not name or at.is_symlink() or not at.is_dir():
            found.update({name: None} if name else {})
        elif (at / ".git").exists():  # a submodule, or an untracked repository
            found.update(dict.fromkeys(f"{name}/{inner}" for inner in _list_by_git(at, note) or ()))
        else:
            note(f"submodule {at} is empty here: git submodule update --init --recursive")
    return list(found)


def _walk(folder: Path, note: Note, is_ignored: Callable[[str], bool] = lambda path: False) -> list[str]:
    """Every file, link and empty folder but ``.git``, ``__pycache__``, virtual environments and what is ignored."""
    found: list[str] = []
    left_out: list[str] = []
    parents = [""]  # empty, or ending in "/"
    for parent in parents:
        try:
            with os.scandir(folder / parent) as entries:
                kinds = {each.name: each.is_dir(follow_symlinks=False) for each in entries if each.name != ".git"}
        except PermissionError:
            raise unreadable(below(folder, parent.rstrip("/"))) from None
        except FileNotFoundError:
            continue  # removed meanwhile
        if not kinds and parent:
            found.append(parent)
        for name, is_folder in sorted(kinds.items()):
            path = f"{parent}{name}{'/' if is_folder else ''}"
            if is_ignored(path):
                continue
            if not is_folder:
                found.append(path)
            elif name == "__pycache__" or _is_environment(folder / path):
                left_out.append(path)
            else:
                parents.append(path)
    if left_out:
        note(f"not copied; setup recreates them on the node if needed: {_some(left_out)}")
    secret = [path for path in found if path.rpartition("/")[2] == ".env"]
    if secret:
        note(f"copied too: {_some(secret)}; list it in {_SKYIGNORE} to keep it here")
    return found


def _is_environment(folder: Path) -> bool:
    # os.path answers no where it may not look, which reading the folder then tells.
    return os.path.isfile(folder / "pyvenv.cfg") or os.path.isdir(folder / "conda-meta")
