"""What of a folder travels to the nodes.

What git would commit travels (``git ls-files -co --exclude-standard``, submodules too), or what ``.skyignore`` leaves,
or outside of git everything but environments and caches. Paths are relative, with ``/``; bytes that are not UTF-8
are surrogates.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.core.errors import ConfigError
from atoll.core.paths import atoll_home
from atoll.tasks.sync.git import GitError, run_git
from atoll.tasks.sync.receive import SELF, Entry, below, entry_of

Note = Callable[[str], None]  # gets a line for the user
_NUM_NAMED = 3  # paths that a note spells out
_SKYIGNORE = ".skyignore"


@dataclass(frozen=True, slots=True)
class Survey:
    """What of a folder, or which single file, travels.

    Attributes:
        root: the folder or file.
        entries: its files, links and empty folders.
        notes: one line for each thing the user should know.
    """

    root: Path
    entries: tuple[Entry, ...]
    notes: tuple[str, ...] = ()

    @property
    def num_files(self) -> int:
        """Files and links."""
        return sum(entry.kind != "folder" for entry in self.entries)

    @property
    def num_bytes(self) -> int:
        """Sum of the sizes of the files."""
        return sum(entry.size for entry in self.entries)


# ------------------------------------------------------------------------------------------------- what travels


def _silent(line: str) -> None:
    """The notes of a caller that wants none."""


def listing(folder: Path, note: Note = _silent) -> list[str]:
    """Paths of the files and links of ``folder`` that travel; empty folders, which git has not, end in ``/``.

    Args:
        note: called with a line for each thing the user should know.

    Raises:
        ConfigError: a folder in it cannot be read.
    """
    if (folder / _SKYIGNORE).is_file():
        try:
            with _SkyIgnore(folder / _SKYIGNORE) as ignore:
                return _walk(folder, note, ignore)
        except FileNotFoundError:
            note(f"git is not installed, so {_SKYIGNORE} could not be read: all of {folder} is copied")
        return _walk(folder, note)
    try:
        paths = _git_listing(folder, note)
    except FileNotFoundError:
        if any((parent / ".git").exists() for parent in (folder, *folder.resolve().parents)):
            note(f"git is not installed, so .gitignore could not be read: all of {folder} is copied")
        paths = None
    except GitError as refusal:
        note(f"git does not list {folder} ({refusal}): all of it is copied")
        paths = None
    return _walk(folder, note) if paths is None else paths


def survey(root: Path) -> Survey:
    """Look at a folder, or at a single file, that is going to travel.

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
        return Survey(Path(os.path.realpath(root)), (single,))
    notes: list[str] = []
    entries: list[Entry] = []
    special: list[str] = []
    leaving: list[str] = []
    own = os.path.relpath(atoll_home(), os.path.realpath(root))  # where the nodes' copies lie: never copied itself
    for path in listing(root, notes.append):
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
        if entry.kind == "link" and _leaves(entry):
            leaving.append(f"{path} -> {entry.target}")
        entries.append(entry)
    if special:
        notes.append(f"not copied, neither files nor links: {_some(special)}")
    if leaving:
        notes.append(f"links that point out of the folder are copied as links: {_some(leaving)}")
    return Survey(root, tuple(entries), tuple(notes))


def _leaves(link: Entry) -> bool:
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
    """What to tell about a file or folder of the source that cannot be opened."""
    return ConfigError(
        f"{printable(path)} may not be read by this user: make it readable (chmod u+r), or list it in .gitignore"
    )


# ---------------------------------------------------------------------------------------------------------- git


def _git_listing(folder: Path, note: Note) -> list[str] | None:
    """What git lists in ``folder``, submodules and repositories inside included; None outside of a work tree."""
    inside = run_git(folder, "rev-parse", "--is-inside-work-tree")
    if inside.returncode != 0 and b"not a git repository" not in inside.stderr:
        raise GitError(inside)
    # A folder that its repository ignores, such as build/, is no part of it, though it may well be a workdir.
    if inside.stdout.strip() != b"true" or run_git(folder, "check-ignore", "-q", ".").returncode == 0:
        return None
    listed = run_git(folder, "ls-files", "-co", "--exclude-standard", "-z")
    _check_readable(folder, listed.stderr)
    if listed.returncode != 0:
        raise GitError(listed)
    found: dict[str, None] = {}  # an unmerged file is listed once a side
    for path in os.fsdecode(listed.stdout).split("\0"):
        name = path.rstrip("/")
        at = folder / name
        if not name or at.is_symlink() or not at.is_dir():
            found.update({name: None} if name else {})
        elif (at / ".git").exists():  # a submodule, or an untracked repository
            found.update(dict.fromkeys(f"{name}/{inner}" for inner in _git_listing(at, note) or ()))
        else:
            note(f"submodule {at} is empty here: git submodule update --init --recursive")
    return list(found)


def _check_readable(folder: Path, complaints: bytes) -> None:
    for line in os.fsdecode(complaints).splitlines():
        name = line.partition("could not open directory '")[2].partition("'")[0]
        if name and "Permission denied" in line:
            raise unreadable(below(folder, name.rstrip("/")))


# ------------------------------------------------------------------------------------------------- outside of git


def _walk(folder: Path, note: Note, ignore: _SkyIgnore | None = None) -> list[str]:
    """Every file, link and empty folder but ``.git``, ``__pycache__`` and virtual environments."""
    found: list[str] = []
    left_out: list[str] = []
    level = [""]
    while level:  # a level at a time, so that git is asked once a level
        names: dict[str, bool] = {}
        for parent in level:
            inner = _scan(folder, parent)
            names.update(inner)
            if not inner and parent:
                found.append(parent)
        for path in ignore.ignored(names) if ignore is not None else ():
            del names[path]
        level = []
        for path, is_folder in names.items():
            if not is_folder:
                found.append(path)
            elif path.endswith("/__pycache__/") or path == "__pycache__/" or _is_environment(folder / path):
                left_out.append(path)
            else:
                level.append(path)
    if left_out:
        note(f"not copied, made again on the node by setup where needed: {_some(left_out)}")
    secret = [path for path in found if path.rpartition("/")[2] == ".env"]
    if secret:
        note(f"copied too: {_some(secret)}; list it in {_SKYIGNORE} to keep it here")
    return found


def _scan(folder: Path, parent: str) -> dict[str, bool]:
    """What lies in ``parent`` (empty or ending in ``/``): paths, folders with a ``/``, and which are folders."""
    try:
        with os.scandir(folder / parent) as entries:
            kinds = {each.name: each.is_dir(follow_symlinks=False) for each in entries if each.name != ".git"}
    except PermissionError:
        raise unreadable(below(folder, parent.rstrip("/"))) from None
    except FileNotFoundError:
        return {}  # removed meanwhile
    return {f"{parent}{name}{'/' if is_folder else ''}": is_folder for name, is_folder in sorted(kinds.items())}


def _is_environment(folder: Path) -> bool:
    # os.path answers no where it may not look, which reading the folder then tells.
    return os.path.isfile(folder / "pyvenv.cfg") or os.path.isdir(folder / "conda-meta")


class _SkyIgnore:
    """Asks git which paths a ``.skyignore`` leaves out, in an empty repository: no other rule has a say.

    Raises:
        FileNotFoundError: git is not installed.
    """

    def __init__(self, rules: Path) -> None:
        self._rules = rules.read_bytes()
        self._scratch = tempfile.TemporaryDirectory(prefix="atoll-ignore-")

    def __enter__(self) -> _SkyIgnore:
        root = Path(self._scratch.name)
        try:
            run_git(root, "init", "-q", "--bare", "--template=", "git")
            (root / "git/info").mkdir(exist_ok=True)
            (root / "git/info/exclude").write_bytes(self._rules)
            (root / "tree").mkdir()
        except BaseException:
            self._scratch.cleanup()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._scratch.cleanup()

    def ignored(self, paths: Iterable[str]) -> list[str]:
        """Those of ``paths`` that the rules leave out; folders end in ``/``, and are asked before what is in them."""
        root = Path(self._scratch.name)
        names = {path.rstrip("/"): path for path in paths}
        for name, path in names.items():
            if name != path:  # git looks what is a folder
                os.mkdir(root / "tree" / name)
        asked = run_git(
            root / "tree",
            *(f"--git-dir={root}/git", f"--work-tree={root}/tree", "-c", f"core.excludesFile={os.devnull}"),
            *("check-ignore", "--no-index", "-z", "--stdin"),
            # With ./ in front, a name that begins with a colon is a name.
            stdin=b"".join(b"./" + os.fsencode(name) + b"\0" for name in names),
        )
        if asked.returncode not in (0, 1):  # 1: none is ignored
            raise ConfigError(f"{_SKYIGNORE} could not be read: {GitError(asked)}")
        return [names[name.removeprefix("./")] for name in os.fsdecode(asked.stdout).split("\0") if name]
