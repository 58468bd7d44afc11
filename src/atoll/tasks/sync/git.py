"""git, as a workdir needs it: asked about a folder on this machine, or told to fetch what a task names by URL."""

from __future__ import annotations

import base64
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

from atoll.core.errors import ConfigError
from atoll.core.secrets import redact

# A hook that calls us must not turn git to its own repository.
_HOOKS = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR")
_QUIET = {"LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}


class GitError(Exception):
    """git runs, and ended with an error; its text is git's own reason, without credentials."""

    def __init__(self, done: subprocess.CompletedProcess[bytes]) -> None:
        lines = [line for line in os.fsdecode(done.stderr).splitlines() if line.strip()]
        # Its reason is the line that says so; before it stands progress, after it advice.
        reasons = [line for line in lines if line.startswith(("fatal: ", "error: "))] or lines[-1:]
        text = reasons[0].partition(": ")[2] if reasons and ": " in reasons[0] else "".join(reasons)
        super().__init__(redact(text) or f"git ended with code {done.returncode}")


def run_git(
    folder: Path, *arguments: str, stdin: bytes = b"", env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run git in ``folder``, with ``env`` in its environment; it never asks for anything.

    Raises:
        FileNotFoundError: git is not installed.
    """
    clean = {name: value for name, value in os.environ.items() if name not in _HOOKS}
    return subprocess.run(
        # A file system monitor is a program that a repository's own settings may name; a server may fall silent.
        ["git", "-c", "core.fsmonitor=false", "-c", "http.lowSpeedLimit=1", "-c", "http.lowSpeedTime=60", *arguments],
        cwd=folder,
        env={**clean, **_QUIET, **(env or {})},
        input=stdin,
        capture_output=True,
    )


def check_git(url: str, ref: str | None) -> None:
    """Refuse what can be no repository or ref; asks nobody.

    Raises:
        ConfigError: it can't be one.
    """
    if ref is not None and (not ref or ref.startswith("-") or any(each.isspace() for each in ref)):
        raise ConfigError(f"workdir: ref {ref!r}: expected a branch, a tag or a commit")
    if not url.strip() or url.startswith("-"):
        raise ConfigError(f"workdir: url {url!r}: expected https://…, ssh://…, user@host:path or a path")


def fetch_git(url: str, ref: str | None, dest: Path) -> str:
    """Make ``dest`` a work tree of the repository at ``url``, submodules included; the commit it is at.

    What an earlier call fetched is used again. A login in the URL goes to git through its environment and is kept
    nowhere.

    Args:
        ref: branch, tag or commit; the remote's own branch where None.
        dest: a folder that this function alone writes.

    Raises:
        ConfigError: git is missing, the repository cannot be read, or it has no such ref.
    """
    check_git(url, ref)
    plain, login = _split_login(url)
    dest.mkdir(parents=True, exist_ok=True)
    try:
        if not (dest / ".git").exists():
            _must(dest, "init", "-q")
        _must(dest, "config", "remote.origin.url", plain)
        _must(dest, "config", "remote.origin.fetch", "+refs/heads/*:refs/remotes/origin/*")
        _must(dest, "fetch", "-q", "--prune", "--force", "--tags", "--no-recurse-submodules", "origin", env=login)
        commit = _resolve(dest, ref, login)
        _must(dest, "checkout", "-q", "--force", "--detach", commit)
        _must(dest, "clean", "-q", "-ffdx")
        _must(dest, "submodule", "--quiet", "sync", "--recursive")
        _must(dest, "submodule", "--quiet", "update", "--init", "--recursive", "--force", env=login)
    except FileNotFoundError:
        raise ConfigError("workdir: a git URL needs git on this machine: apt-get install git") from None
    except GitError as error:
        raise ConfigError(
            f"workdir: {redact(url)} could not be fetched: {error}. "
            "Check the URL, and that `git ls-remote` of it works in this shell without a prompt"
        ) from None
    return commit


def _resolve(dest: Path, ref: str | None, login: Mapping[str, str]) -> str:
    if ref is None:
        _must(dest, "remote", "set-head", "origin", "--auto", env=login)
        names = ["refs/remotes/origin/HEAD"]
    else:
        names = [f"refs/remotes/origin/{ref}", f"refs/tags/{ref}", ref]
    for name in names:
        found = run_git(dest, "rev-parse", "--verify", "-q", f"{name}^{{commit}}")
        if found.returncode == 0:
            return found.stdout.decode().strip()
    # A commit that no branch holds, such as a pull request's: some servers give it when asked by name.
    if ref is not None and run_git(dest, "fetch", "-q", "origin", ref, env=login).returncode == 0:
        return _must(dest, "rev-parse", "FETCH_HEAD^{commit}").decode().strip()
    raise ConfigError(f"workdir: the repository has no branch, tag or commit {ref!r}: `git ls-remote` lists them")


def _must(folder: Path, *arguments: str, env: Mapping[str, str] | None = None) -> bytes:
    done = run_git(folder, *arguments, env=env)
    if done.returncode != 0:
        raise GitError(done)
    return done.stdout


def _split_login(url: str) -> tuple[str, dict[str, str]]:
    """The URL without a login, and variables that give git the login: git shows URLs to `ps` and keeps them on disk."""
    parts = urlsplit(url)
    login, at, host = parts.netloc.rpartition("@")
    if parts.scheme not in ("http", "https") or not at:
        return url, {}
    user, _, password = login.partition(":")
    basic = base64.b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode()
    count = int(os.environ.get("GIT_CONFIG_COUNT", "0"))
    return urlunsplit(parts._replace(netloc=host)), {
        "GIT_CONFIG_COUNT": str(count + 1),
        # For this scheme and host alone: a submodule elsewhere must not be given the login.
        f"GIT_CONFIG_KEY_{count}": f"http.{parts.scheme}://{host}/.extraHeader",
        f"GIT_CONFIG_VALUE_{count}": f"Authorization: Basic {basic}",
    }
