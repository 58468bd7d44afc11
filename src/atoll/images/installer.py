"""Runs pip (or uv where there is no pip): asks what would be installed, then installs just that into a folder."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.core.errors import ImageError
from atoll.core.hints import command_line, redact
from atoll.images.interpreters import find_uv
from atoll.images.requirements import canonical_name

Progress = Callable[[str], None]

# Variables that would send pip elsewhere or have it do something else than it is asked for here.
DROPPED_VARIABLES = frozenset(
    {
        "PIP_DRY_RUN",
        "PIP_EDITABLE",
        "PIP_FORCE_REINSTALL",
        "PIP_IGNORE_INSTALLED",
        "PIP_NO_DEPS",
        "PIP_PREFIX",
        "PIP_PYTHON",
        "PIP_QUIET",
        "PIP_REPORT",
        "PIP_REQUIREMENT",
        "PIP_REQUIRE_VIRTUALENV",
        "PIP_ROOT",
        "PIP_TARGET",
        "PIP_UPGRADE",
        "PIP_USER",
    }
)

# Runs the real command in our process group and ends the whole group, builds of packages included, once the pipe to
# the driver closes: also a driver killed by SIGKILL leaves no installer behind.
_KEEPER = """
import os, signal, sys, threading
child = os.fork()
if child == 0:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.execv(sys.argv[1], sys.argv[1:])
def watch():
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)
threading.Thread(target=watch, daemon=True).start()
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
os._exit(code if code >= 0 else 128 - code)
"""

# Whether an interpreter has pip, and the wheel of pip that comes with it (venvs made without pip have this one).
_FIND_PIP = """
import glob, importlib.util, os, sysconfig
print("module" if importlib.util.find_spec("pip") else "")
folders = [sysconfig.get_config_var("WHEEL_PKG_DIR")]
spec = importlib.util.find_spec("ensurepip")
if spec and spec.origin:
    folders.append(os.path.join(os.path.dirname(spec.origin), "_bundled"))
wheels = [wheel for folder in folders if folder for wheel in glob.glob(os.path.join(folder, "pip-*.whl"))]
print(wheels[-1] if wheels else "")
"""

_TOLD = re.compile(r"\s*(Collecting|Downloading|Building|Installing|Resolved|Prepared|Installed|WARNING: Retrying)\b")
_FROM_FILE = re.compile(r" \(from -r \S.*?requirements\.txt \(line \d+\)\)")  # pip says it of each requirement
_TAIL_LINES = 12
UNREACHABLE = "The package index could not be reached"


@dataclass(frozen=True, slots=True)
class Pin:
    """One package to install: ``spec`` is what pip is told, ``foo==1.2`` or a URL."""

    name: str
    version: str
    spec: str


@dataclass(frozen=True, slots=True)
class Installer:
    """How packages are installed for one interpreter.

    Attributes:
        command: the start of the command line.
        python: the interpreter that the packages are for.
        uv: whether the command is uv's.
    """

    command: tuple[str, ...]
    python: str
    uv: bool

    @classmethod
    def find(cls, python: str) -> Installer:
        """pip of ``python`` itself, else uv, else the pip that Python ships for ``ensurepip``.

        Raises:
            ImageError: there is none of the three.
        """
        pip = _pip_of(python)
        uv = find_uv()
        if uv and (pip is None or pip[-1] != "pip"):
            return cls((uv, "pip"), python, uv=True)
        if pip:
            return cls(pip, python, uv=False)
        raise ImageError(
            f"{python} has no pip, and there is no uv on PATH; install one: "
            f"`{command_line(python, '-m', 'ensurepip')}`, or uv from https://docs.astral.sh/uv"
        )

    @classmethod
    def find_pip(cls, python: str) -> Installer:
        """pip in any case: for what uv can't do.

        Raises:
            ImageError: there is none.
        """
        found = _pip_of(python)
        if found is None:
            raise ImageError(
                f"{python} has no pip, which gets wheels for other hosts: `{command_line(python, '-m', 'ensurepip')}`"
            )
        return cls(found, python, uv=False)

    def plan(
        self, requirements: Sequence[str], constraints: Sequence[str], work: Path, progress: Progress
    ) -> list[Pin]:
        """What would be newly installed, given what the interpreter has. Needs the package index.

        Raises:
            ImageError: the requirements cannot be met.
        """
        limits = self._constraint_options(constraints, work)
        if self.uv:
            options = ["install", "--dry-run", "--python", self.python, "--break-system-packages", *limits]
            return _read_uv_plan(self._run(options, requirements, work, progress), requirements)
        report = work / "report.json"
        options = ["install", "--dry-run", "--report", str(report), "--no-user", *_PIP_OPTIONS, *limits]
        self._run(options, requirements, work, progress)
        return _read_pip_report(report, requirements)

    def install(
        self, pins: Sequence[Pin], constraints: Sequence[str], target: Path, work: Path, progress: Progress
    ) -> None:
        """Install exactly ``pins`` into the folder ``target``.

        Raises:
            ImageError: a package could not be fetched or built.
        """
        specs = [pin.spec for pin in pins]
        limits = self._constraint_options(constraints, work)
        if self.uv:
            options = ["--python", self.python, "--compile-bytecode"]
        else:
            options = ["--no-user", "--no-warn-script-location", *_PIP_OPTIONS]
        command = ["install", "--no-deps", "--target", str(target), *options, *limits]
        self._run(command, specs, work, progress)

    def wheel(self, location: str, folder: Path, work: Path, progress: Progress) -> None:
        """Put a wheel of a local project, or of a wheel itself, into ``folder``; pip's own only.

        Raises:
            ImageError: it could not be built.
        """
        progress(f"building a wheel of {location}")
        self._run(["wheel", "--no-deps", "-w", str(folder), *_PIP_COMMON], [location], work, progress)

    def download(
        self,
        requirements: Sequence[str],
        constraints: Sequence[str],
        python: str,
        platforms: Sequence[str],
        folder: Path,
        work: Path,
        progress: Progress,
    ) -> None:
        """Put wheels of everything that the requirements need into ``folder``; pip's own only.

        Args:
            python: version of the interpreter they are for, e.g. ``"3.12"``.
            platforms: tags that it can use.

        Raises:
            ImageError: something has no such wheel.
        """
        progress(redact(f"downloading wheels of {', '.join(requirements)}"))
        options = ["--only-binary", ":all:", "--implementation", "cp", "--python-version", python]
        for abi in (f"cp{python.replace('.', '')}", "abi3", "none"):
            options += ["--abi", abi]
        options += [part for platform in platforms for part in ("--platform", platform)]
        limits = self._constraint_options(constraints, work)
        self._run(["download", "-d", str(folder), *_PIP_COMMON, *options, *limits], requirements, work, progress)

    def _constraint_options(self, constraints: Sequence[str], work: Path) -> list[str]:
        options = []
        if constraints:
            options += ["-c", str(_write_private(work / "constraints.txt", constraints))]
        if self.uv:  # pip reads this variable by itself
            options += [part for path in os.environ.get("PIP_CONSTRAINT", "").split() for part in ("-c", path)]
        return options

    def _run(self, arguments: list[str], wanted: Sequence[str], work: Path, progress: Progress) -> list[str]:
        """Run the installer on the requirements ``wanted``; its lines. Whatever ends this, no process of it is left.

        Requirements go through a file: everybody on the machine can read a command line, passwords in URLs included.
        """
        asked = _write_private(work / "requirements.txt", [_as_line(each) for each in wanted])
        scratch = work / "tmp"
        scratch.mkdir(exist_ok=True)
        environment = {name: value for name, value in os.environ.items() if name not in DROPPED_VARIABLES}
        environment |= {"TMPDIR": str(scratch), "NO_COLOR": "1", "PYTHONUNBUFFERED": "1"}
        lines: deque[str] = deque(maxlen=5000)
        process = subprocess.Popen(
            # A session of its own: Ctrl-C reaches the driver only, which then ends the whole group.
            [sys.executable, "-I", "-S", "-c", _KEEPER, *self.command, *arguments, "-r", str(asked)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            text=True,
            encoding="utf-8",
            errors="replace",
        )
        try:
            assert process.stdout is not None
            for raw in process.stdout:
                line = _FROM_FILE.sub("", raw.rstrip())
                lines.append(line)
                if _TOLD.match(line):
                    progress(redact(line.strip()))
            code = process.wait()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        if code != 0:
            raise ImageError(_failure("uv" if self.uv else "pip", code, wanted, lines))
        return list(lines)


def _pip_of(python: str) -> tuple[str, ...] | None:
    """The command line of an interpreter's own pip, else of the one that Python ships for ``ensurepip``."""
    answer = subprocess.run(
        [python, "-P", "-c", _FIND_PIP], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if answer.returncode != 0:
        raise ImageError(f"{python} cannot be run: {answer.stderr.strip()[-500:] or f'exit {answer.returncode}'}")
    module, wheel = answer.stdout.split("\n")[:2]
    if module:
        return python, "-P", "-m", "pip"
    return (python, "-P", f"{wheel}/pip") if wheel else None


def _as_line(requirement: str) -> str:
    """A requirement for a file of them, where spaces, ``#`` and ``$`` of a path would be read as something else."""
    odd = requirement.startswith("/") and "[" not in requirement and re.search(r"[\s#$]", requirement)
    return Path(requirement).as_uri() if odd else requirement


def _write_private(path: Path, lines: Sequence[str]) -> Path:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)
    return path


_PIP_COMMON = ["--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
_PIP_OPTIONS = [*_PIP_COMMON, "--root-user-action", "ignore"]


def _read_pip_report(report: Path, requirements: Sequence[str]) -> list[Pin]:
    pins = []
    for item in json.loads(report.read_text(encoding="utf-8"))["install"]:
        name, version = item["metadata"]["name"], item["metadata"]["version"]
        spec = _location(item["download_info"], requirements) if item["is_direct"] else f"{name}=={version}"
        pins.append(Pin(canonical_name(name), version, spec))
    return sorted(pins, key=lambda pin: pin.name)


def _location(download: dict[str, Any], requirements: Sequence[str]) -> str:
    """A URL for pip from what its report says of a download (PEP 610: a repository is named by its commit)."""
    url = with_credentials(download["url"], requirements)
    if "vcs_info" in download:
        url = f"{download['vcs_info']['vcs']}+{url}@{download['vcs_info']['commit_id']}"
    return f"{url}#subdirectory={download['subdirectory']}" if "subdirectory" in download else url


def with_credentials(url: str, requirements: Sequence[str]) -> str:
    """``url`` with user and password as in ``requirements``: pip leaves them out of its report, uv masks them."""
    scheme, _, place = url.partition("://")
    shown, _, host = place.split("/", maxsplit=1)[0].rpartition("@")
    if not shown or "****" in shown:
        for user, known in re.findall(r"://([^/\s]+)@([^/@\s]+)", " ".join(requirements)):
            if host == known:
                return f"{scheme}://{user}@{place.removeprefix(f'{shown}@')}"
    return url


def _read_uv_plan(lines: Sequence[str], requirements: Sequence[str]) -> list[Pin]:
    pins = []
    for line in lines:
        found = re.fullmatch(r"\s*\+ ([A-Za-z0-9._-]+)==(\S+)(?: \(from (.+)\))?\s*", line)
        if found:
            name, version, url = found.groups()
            spec = with_credentials(url, requirements) if url else f"{name}=={version}"
            pins.append(Pin(canonical_name(name), version, spec))
    return sorted(pins, key=lambda pin: pin.name)


def _failure(tool: str, code: int, wanted: Sequence[str], lines: Sequence[str]) -> str:
    said = [line for line in lines if line.strip() and not line.startswith("[notice]")]
    text = "\n".join(said)
    # The requirement that the installer complains about, where it names one.
    complaints = "\n".join(
        line for line in said if re.search("error|could not|no matching|conflict|unsatisf", line, re.I)
    )
    blamed = [each for each in wanted if re.split(r"[\s\[<>=!~;@(]", each)[0].casefold() in complaints.casefold()]
    named = ", ".join(repr(each) for each in blamed or wanted)
    tail = "\n".join(f"  {line}" for line in said[-_TAIL_LINES:]) or "  (nothing)"
    return redact(f"{tool} could not install {named} (exit code {code}). Its last lines:\n{tail}\n{_next_step(text)}")


def _next_step(text: str) -> str:
    if re.search(r"no such option: --(report|dry-run)", text):
        return "This pip is too old (22.2 or newer is needed): upgrade it with `python -m pip install --upgrade pip`."
    if re.search(
        r"connection|name resolution|timed out|unreachable|name or service|dns error|connect error", text, re.I
    ):
        return (
            f"{UNREACHABLE}: check the network and proxy, or point PIP_INDEX_URL or "
            "PIP_FIND_LINKS (UV_INDEX_URL, UV_FIND_LINKS for uv) at one that can be."
        )
    if re.search(r"no matching distribution|could not find a version|not found in the package registry", text, re.I):
        return (
            "Check the name and version, and that it exists for this Python and platform; on a machine without "
            "network, point PIP_INDEX_URL or PIP_FIND_LINKS at an index that has it."
        )
    if re.search(r"conflict|unsatisfiable", text, re.I):
        return "Loosen one of the versions in pip= or constraints= (PIP_CONSTRAINT counts too)."
    return "Try the same requirement with `python -m pip install` to see the whole output."
