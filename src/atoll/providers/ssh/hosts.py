"""Which hosts are meant: spellings, patterns over ``~/.ssh/config``, and groups declared in ``config.toml``."""

from __future__ import annotations

import fnmatch
import glob
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.core.errors import ConfigError
from atoll.core.paths import atoll_home, shown_path
from atoll.core.validation import check_seconds, command_line, nearest
from atoll.providers.gpus import Gpu

GRACE_S = 30.0
HERE = "."  # as a host: this machine, without ssh; how a supervisor on a head calls that
_WILD = re.compile(r"[*?\[]")
_PORT = re.compile(r"(.*?):(\d{1,5})")
STEP_OPTIONS = "--overlap --no-kill --cpu-bind=none --mpi=none --chdir=/"  # of every step that we start in a job
KEEPER_FOLDER = "/tmp/atoll-"  # before a job's number: where its keeper listens on each of its nodes
# Of the variables of a job, or of a step of one, srun would take its defaults. -u: what is written comes at once, and
# not line by line. One line, as csh takes no others.
_STEP = (
    r"for name in $(env | sed -n 's/^\(SLURM_[A-Z0-9_]*\)=.*/\1/p'); do [ $name = SLURM_CONF ] || unset $name; done; "
    "unset SSH_CONNECTION SSH_CLIENT SSH_TTY; "
    'ATOLL_KEEPER="$3" exec srun --jobid="$1" --nodelist="$2" --nodes=1 --ntasks=1 '
    f'--quiet --unbuffered {STEP_OPTIONS} /bin/sh -c "$4"'
)
SSH_FAILED = 255  # ssh's own exit code
_STEP_ENDED = re.compile(rb"^(srun|slurmstepd\S*): error", re.M)
_NOISE = "srun: cluster configuration lacks support for cpu binding"  # so none is done, as was asked for
_DEEPEST_INCLUDE = 16  # as ssh has it
_KEYS = ("hosts", "key", "jump", "python", "grace_s", "workdir", "max_restarts_on_lost_nodes")
_RESTARTS = 3


@dataclass(frozen=True, slots=True)
class Target:
    """One host, as ``ssh`` is given it.

    Attributes:
        host: a ``Host`` of the user's config, a name or an address, with ``user@`` before it where given.
        port: or None for what the config says.
        key: path of a private key, or None.
        jump: a jump host, as ``ssh -J`` takes it, or None.
        python: the interpreter there, as its shell finds it, or None for ``python3``.
        config: an ssh config of ours instead of the user's, whose entry for the host says all else; a key of the host
            that is not known yet is believed, and no other one later.
        step: a Slurm job and one of its nodes: what runs there is a step of that job, started from ``host``.
        is_kept: a keeper of ours runs on the nodes of that job: what is to stay is started by it.
    """

    host: str
    port: int | None = None
    key: str | None = None
    jump: str | None = None
    python: str | None = None
    config: str | None = None
    step: tuple[str, str] | None = None
    is_kept: bool = True

    @property
    def options(self) -> tuple[str, ...]:
        """What ``ssh`` needs before the host's name."""
        port = ("-p", str(self.port)) if self.port is not None else ()
        key = ("-i", os.path.expanduser(self.key).replace("%", "%%")) if self.key is not None else ()
        config = ("-F", self.config) if self.config is not None else ()
        return (*config, *port, *key, *(("-J", self.jump) if self.jump is not None else ()))

    @property
    def command(self) -> str:
        """What a person types to log in there."""
        return command_line("ssh", *self.options, self.host)

    def within(self, command: str) -> str:
        """The shell command on ``host`` that runs a shell command there."""
        if self.step is None:
            return command
        job, node = self.step
        keeper = f"{KEEPER_FOLDER}{job}" if self.is_kept else ""
        return "exec " + shlex.join(["/bin/sh", "-c", _STEP, "sh", job, node, keeper, command])

    def is_lost(self, code: int, said: bytes) -> bool:
        """Did the way there break, by the exit code and standard error of what ran through it?"""
        return code == SSH_FAILED or (self.step is not None and _STEP_ENDED.search(said) is not None)

    def is_noise(self, line: str) -> bool:
        """Is it a line that what leads there writes to standard error, and no reason for anything?"""
        return self.step is not None and line.startswith(_NOISE)

    def __str__(self) -> str:
        if self.step is not None:
            return self.step[1]
        return self.host if self.port is None else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Facts:
    """One host as it describes itself.

    Attributes:
        target: how it is reached.
        python: its interpreter's version; ``executable`` its path.
        home, tmp: as there.
        place: a folder of the user's that can be written to, for bundles and logs.
        bundles: digests of those asked for that it has.
        cpus: cores our processes may use.
        gpus: its GPUs that a login may use; ``gpu_problem`` says why none could be listed though there is a driver.
        addr: address that it is reached at, seen from itself.
        env: environment of a command there.
        seen: what a preflight judges: ``skew_s`` (its clock's, against ours), ``shm_bytes`` and ``disk_bytes`` (free),
            ``torch`` (the version that its interpreter has, or None), ``gpus`` (``index``, ``driver``, ``used_mb``).
    """

    target: Target
    python: tuple[int, ...]
    executable: str
    home: str
    tmp: str
    place: str
    bundles: frozenset[str]
    cpus: int
    gpus: tuple[Gpu, ...]
    gpu_problem: str | None
    addr: str
    env: dict[str, str]
    seen: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Group:
    """What ``ssh/NAME`` stands for.

    Attributes:
        name: how it is called.
        targets: its hosts, head first.
        grace_s: how long a lost connection may last before its node counts as lost, in seconds.
        workdir: where a task's workdir goes on the hosts, or None for the usual place.
        max_restarts_on_lost_nodes: how often a job is started again after a host was lost.
    """

    name: str
    targets: tuple[Target, ...]
    grace_s: float = GRACE_S
    workdir: str | None = None
    max_restarts_on_lost_nodes: int = _RESTARTS


def declared_groups() -> list[str]:
    """Names of the groups in ``config.toml``."""
    return list(declared("ssh"))


def find_group(name: str) -> Group:
    """The hosts behind ``ssh/NAME``: a group of ``config.toml``, or Hosts of the user's ssh config.

    Raises:
        ConfigError: there is no such group or Host, or its declaration has a mistake.
    """
    path = atoll_home() / "config.toml"
    groups = declared("ssh")
    if name in groups:
        return _group(name, groups[name], path)
    known = config_hosts()
    if name in known:
        return Group(name, (Target(name),))
    if _WILD.search(name) and fnmatch.filter(known, name):
        return Group(name, targets([name]))
    hint = nearest(name, [*groups, *known])
    raise ConfigError(
        f"ssh/{name}: no group of that name in {path}, and no Host in ~/.ssh/config{hint or '.'} Declare it with\n"
        f'  [ssh.{name}]\n  hosts = ["user@gpu-1", "gpu-2:2222"]\n'
        f"in {path}, or add `Host {name}` to ~/.ssh/config"
    )


def targets(
    hosts: Sequence[str], *, key: str | None = None, jump: str | None = None, python: str | None = None
) -> tuple[Target, ...]:
    """Hosts in any spelling: ``gpu-1``, ``user@a``, ``b:2222``, ``[::1]:22``, and ``gpu-*`` for Hosts of the config.

    Raises:
        ConfigError: one that can't be a host, or a pattern that no Host of the config fits.
    """
    found: list[Target] = []
    for spelling in hosts:
        user, host, port = _split(spelling)
        names = [host]
        if _WILD.search(host) and not host.startswith("["):
            known = config_hosts()
            names = fnmatch.filter(known, host)
            if not names:
                have = f"it has {', '.join(known[:8])}" if known else "it has no Host, or is not there"
                raise ConfigError(f"{spelling!r} matches no Host of ~/.ssh/config{nearest(host, known)}: {have}")
        found += [Target(user + each.strip("[]"), port, key, jump, python) for each in names]
    twice = next((each for each in found if found.count(each) > 1), None)
    if twice is not None:
        raise ConfigError(f"hosts: {twice} is named twice, and a host runs one node; leave one of them out")
    return tuple(found)


def _split(spelling: object) -> tuple[str, str, int | None]:
    """``user@`` (or nothing), host, port."""
    if not isinstance(spelling, str) or not re.fullmatch(r"[^\s-]\S*", spelling):
        raise ConfigError(f"hosts: {spelling!r} is not a host; expected 'gpu-1', 'user@gpu-1', 'gpu-1:2222' or 'gpu-*'")
    user, at, host = spelling.removeprefix("ssh://").rpartition("@")
    port: int | None = None
    found = _PORT.fullmatch(host)
    if found and (":" not in found[1] or found[1].endswith("]")):  # an IPv6 address without brackets has no port
        host, port = found[1], int(found[2])
    if not host.strip("[]") or host.startswith("-") or (port is not None and not 0 < port < 65536):
        raise ConfigError(f"hosts: {spelling!r} is not a host; expected 'gpu-1', 'user@gpu-1' or 'gpu-1:2222'")
    return user + at, host, port


# -- config.toml ----------------------------------------------------------------------------------------------------


_EXAMPLES = {"ssh": "[ssh.lab]", "slurm": "[slurm.lab]"}


def declared(kind: str) -> dict[str, Any]:
    """The sections ``[KIND.NAME]`` of ``config.toml``, by name.

    Raises:
        ConfigError: the file has a mistake.
    """
    path = atoll_home() / "config.toml"
    try:
        text = path.read_text()
    except FileNotFoundError:
        return {}
    import tomllib

    try:
        config = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{shown_path(str(path))}: {error}") from None
    for section in config:
        if section not in _EXAMPLES:
            hint = nearest(section, _EXAMPLES) or f": it has sections such as {' and '.join(_EXAMPLES.values())}"
            raise ConfigError(f"{shown_path(str(path))}: no setting {section!r} is known{hint}")
    found = config.get(kind, {})
    if not isinstance(found, dict):
        raise ConfigError(f"{shown_path(str(path))}: {kind} = {found!r}: expected sections such as {_EXAMPLES[kind]}")
    return found


def check_keys(section: str, given: object, known: Sequence[str], what: str = "") -> Mapping[str, Any]:
    """What ``config.toml`` has as ``[section]``, which is a section with keys that are known.

    Raises:
        ConfigError: it is not; the message says ``what`` is expected in one.
    """
    path = atoll_home() / "config.toml"
    if not isinstance(given, Mapping):
        raise ConfigError(f"{path}: {section} = {given!r}: expected a section [{section}]{what}")
    for key in given:
        if key not in known:
            hint = nearest(key, known) or f": it takes {', '.join(known)}"
            raise ConfigError(f"{path}{_line_of(path, section, key)}: [{section}] has no key {key!r}{hint}")
    return given


def _group(name: str, section: object, path: Path) -> Group:
    given = check_keys(f"ssh.{name}", section, _KEYS, " with hosts = [...]")

    def wrong(key: str, expected: str) -> ConfigError:
        line = _line_of(path, f"ssh.{name}", key)
        return ConfigError(f"{path}{line}: [ssh.{name}] {key} = {given.get(key)!r}: expected {expected}")

    hosts = given.get("hosts")
    if not isinstance(hosts, list) or not hosts or not all(isinstance(host, str) for host in hosts):
        raise wrong("hosts", 'a list such as ["user@gpu-1", "gpu-2:2222"]')
    texts: dict[str, str | None] = {}
    for key in ("key", "jump", "python", "workdir"):
        texts[key] = given.get(key)
        if texts[key] is not None and not isinstance(texts[key], str):
            raise wrong(key, "text")
    try:
        grace_s = check_seconds("grace_s", given.get("grace_s", GRACE_S))
    except ConfigError:
        raise wrong("grace_s", "seconds, more than 0") from None
    restarts = given.get("max_restarts_on_lost_nodes", _RESTARTS)
    if isinstance(restarts, bool) or not isinstance(restarts, int) or restarts < 0:
        raise wrong("max_restarts_on_lost_nodes", "a number, 0 or more")
    found = targets(hosts, key=texts["key"], jump=texts["jump"], python=texts["python"])
    return Group(name, found, grace_s or GRACE_S, texts["workdir"], restarts)


def _line_of(path: Path, section: str, key: str) -> str:
    """``:12`` for the line where a section has a key; nothing where it is written in another way."""
    inside = False
    kind, _, name = section.partition(".")
    for number, line in enumerate(path.read_text().splitlines(), 1):
        text = line.strip()
        if text.startswith("["):
            inside = re.fullmatch(rf"""\[\s*{kind}\s*\.\s*["']?{re.escape(name)}["']?\s*\].*""", text) is not None
        elif inside and re.match(rf"""["']?{re.escape(key)}["']?\s*=""", text):
            return f":{number}"
    return ""


# -- ~/.ssh/config --------------------------------------------------------------------------------------------------


def config_hosts() -> list[str]:
    """Every ``Host`` of the user's ssh config that is a name rather than a pattern, in the order it stands there."""
    path = Path("~/.ssh/config").expanduser()
    return list(dict.fromkeys(_hosts_in(path, path.parent, _DEEPEST_INCLUDE)))


def _hosts_in(path: Path, folder: Path, depth: int) -> Iterator[str]:
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:  # not there, or not for us: ssh itself will say so
        return
    for line in lines:
        keyword, _, rest = re.sub(r"^\s*(\w+)\s*(=|\s)\s*", r"\1 ", line).partition(" ")
        try:
            words = shlex.split(rest, comments=True)
        except ValueError:  # an open quote: ssh will refuse the file
            continue
        if keyword.lower() == "host":
            yield from (word for word in words if not _WILD.search(word) and not word.startswith("!"))
        elif keyword.lower() == "include" and depth:
            for word in words:
                for found in sorted(glob.glob(os.path.join(folder, os.path.expanduser(word)))):
                    yield from _hosts_in(Path(found), folder, depth - 1)
