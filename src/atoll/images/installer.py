"""Runs pip: asks what would be installed, then installs just that into a folder."""

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
from atoll.core.secrets import redact
from atoll.core.validation import command_line

Progress = Callable[[str], None]

# Variables that would send pip elsewhere or have it do something else than it is asked for here.
_DROPPED = (
    "DRY_RUN EDITABLE FORCE_REINSTALL IGNORE_INSTALLED NO_DEPS PREFIX PYTHON QUIET REPORT REQUIREMENT "
    "REQUIRE_VIRTUALENV ROOT TARGET UPGRADE USER"
)
DROPPED_VARIABLES = frozenset(f"PIP_{name}" for name in _DROPPED.split())

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

# Prints how an interpreter runs pip: as its own module, or from the wheel that Python ships for ensurepip.
_FIND_PIP = """
import glob, importlib.util, os, sysconfig
if importlib.util.find_spec("pip"):
    print("-m pip")
else:
    folders = [sysconfig.get_config_var("WHEEL_PKG_DIR") or ""]
    spec = importlib.util.find_spec("ensurepip")
    if spec and spec.origin:
        folders.append(os.path.join(os.path.dirname(spec.origin), "_bundled"))
    wheels = [wheel for folder in folders for wheel in glob.glob(os.path.join(folder, "pip-*.whl"))]
    print(os.path.join(wheels[-1], "pip") if wheels else "")
"""

_TOLD = re.compile(r"\s*(Collecting|Downloading|Building|Installing|WARNING: Retrying)\b")
_FROM_FILE = re.compile(r" \(from -r \S.*?requirements\.txt \(line \d+\)\)")  # pip says it of each requirement
_TAIL_LINES = 12
_NEXT_STEPS = {
    r"no such option: --(report|dry-run)": (
        "This pip is too old (22.2 or newer is needed): upgrade it with `python -m pip install --upgrade pip`."
    ),
    r"no matching distribution|could not find a version": (
        "Check the name and version, and that it exists for this Python and platform; on a machine without "
        "network, point PIP_INDEX_URL or PIP_FIND_LINKS at an index that has it."
    ),
    "conflict": "Loosen one of the versions in pip= or constraints= (PIP_CONSTRAINT counts too).",
    "": "Try the same requirement with `python -m pip install` to see the whole output.",
}


class IndexUnreachable(ImageError):
    """pip got no answer from its package index."""


@dataclass(frozen=True, slots=True)
class Pin:
    """One package to install: ``spec`` is what pip is told, ``foo==1.2`` or a URL."""

    name: str
    version: str
    spec: str


class Pip:
    """pip of one interpreter, working in a folder ``work`` that its caller removes.

    Every method raises ImageError where pip fails, and IndexUnreachable where that is for want of a network.
    """

    def __init__(self, python: str, work: Path, progress: Progress, constraints: Sequence[str] = ()) -> None:
        """Looks for pip in the environment of ``python``, else for the one that Python ships.

        Raises:
            ImageError: there is neither.
        """
        self._command = _pip_command(python)
        self._work = work
        self._progress = progress
        self._limits = ["-c", str(_write_private(work / "constraints.txt", constraints))] if constraints else []

    def plan(self, requirements: Sequence[str]) -> list[Pin]:
        """What would be newly installed, given what the interpreter has."""
        report = self._work / "report.json"
        self.run(["install", "--dry-run", "--report", str(report), *_INSTALL, *self._limits], requirements)
        pins = []
        for item in json.loads(report.read_text(encoding="utf-8"))["install"]:
            name, version = item["metadata"]["name"], item["metadata"]["version"]
            spec = _location(item["download_info"], requirements) if item["is_direct"] else f"{name}=={version}"
            pins.append(Pin(re.sub(r"[-_.]+", "-", name).lower(), version, spec))
        return sorted(pins, key=lambda pin: pin.name)

    def install(self, pins: Sequence[Pin], target: Path) -> None:
        """Install exactly ``pins`` into the folder ``target``."""
        options = ["--no-deps", "--target", str(target), "--no-warn-script-location", *_INSTALL, *self._limits]
        self.run(["install", *options], [pin.spec for pin in pins])

    def wheel(self, location: str, folder: Path) -> None:
        """Put a wheel of a local project, or of a wheel itself, into ``folder``."""
        self._progress(f"building a wheel of {location}")
        self.run(["wheel", "--no-deps", "-w", str(folder), *_COMMON], [location])

    def download(self, requirements: Sequence[str], python: str, platforms: Sequence[str], folder: Path) -> None:
        """Put wheels of everything that the requirements need into ``folder``.

        Args:
            python: version of the interpreter they are for, e.g. ``"3.12"``.
            platforms: tags that it can use.
        """
        self._progress(redact(f"downloading wheels of {', '.join(requirements)}"))
        options = ["--only-binary", ":all:", "--implementation", "cp", "--python-version", python]
        for abi in (f"cp{python.replace('.', '')}", "abi3", "none"):
            options += ["--abi", abi]
        options += [part for platform in platforms for part in ("--platform", platform)]
        self.run(["download", "-d", str(folder), *_COMMON, *options, *self._limits], requirements)

    def run(self, arguments: list[str], requirements: Sequence[str]) -> None:
        """Run pip on the requirements. Whatever ends this, no process of it is left.

        Requirements go through a file: everybody on the machine can read a command line, passwords in URLs included.
        """
        asked = _write_private(self._work / "requirements.txt", [_as_line(each) for each in requirements])
        scratch = self._work / "tmp"
        scratch.mkdir(exist_ok=True)
        environment = {name: value for name, value in os.environ.items() if name not in DROPPED_VARIABLES}
        environment |= {"TMPDIR": str(scratch), "NO_COLOR": "1", "PYTHONUNBUFFERED": "1"}
        environment["PIP_BREAK_SYSTEM_PACKAGES"] = "1"  # nothing goes there, and older pips refuse even a dry run
        lines: deque[str] = deque(maxlen=1000)
        process = subprocess.Popen(
            # A session of its own: Ctrl-C reaches the driver only, which then ends the whole group.
            [sys.executable, "-I", "-S", "-c", _KEEPER, *self._command, *arguments, "-r", str(asked)],
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
                    self._progress(redact(line.strip()))
            code = process.wait()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        if code != 0:
            raise pip_failure(code, requirements, lines)


def _pip_command(python: str) -> list[str]:
    answer = subprocess.run(
        [python, "-P", "-c", _FIND_PIP], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if answer.returncode != 0:
        raise ImageError(f"{python} cannot be run: {answer.stderr.strip()[-500:] or f'exit {answer.returncode}'}")
    found = answer.stdout.strip()
    if not found:
        raise ImageError(
            f"{python} has no pip. Install it with `{command_line(python, '-m', 'ensurepip')}`, in an environment of "
            f"uv with `uv pip install pip`, on Debian and Ubuntu with `apt-get install python3-pip`"
        )
    return [python, "-P", *(found.split() if found == "-m pip" else [found])]


def _as_line(requirement: str) -> str:
    """A requirement for a file of them, where spaces, ``#`` and ``$`` of a path would be read as something else."""
    odd = requirement.startswith("/") and "[" not in requirement and re.search(r"[\s#$]", requirement)
    return Path(requirement).as_uri() if odd else requirement


def _write_private(path: Path, lines: Sequence[str]) -> Path:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)
    return path


_COMMON = ["--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
_INSTALL = ["--no-user", *_COMMON, "--root-user-action", "ignore"]


def _location(download: dict[str, Any], requirements: Sequence[str]) -> str:
    """A URL for pip from what its report says of a download (PEP 610: a repository is named by its commit).

    User and password, which the report leaves out, are those of the requirement with the same host.
    """
    scheme, _, place = download["url"].partition("://")
    host = place.partition("/")[0]
    for user, known in re.findall(r"://([^/\s]+)@([^/@\s]+)", " ".join(requirements)):
        if host == known:
            place = f"{user}@{place}"
            break
    url = f"{scheme}://{place}"
    if "vcs_info" in download:
        url = f"{download['vcs_info']['vcs']}+{url}@{download['vcs_info']['commit_id']}"
    return f"{url}#subdirectory={download['subdirectory']}" if "subdirectory" in download else url


def pip_failure(code: int, requirements: Sequence[str], lines: Sequence[str]) -> ImageError:
    """The error of a pip that failed: what it complained of, its last lines, and what to do."""
    said = [line for line in lines if line.strip() and not line.startswith("[notice]")]
    # The requirement that pip complains about, where it names one.
    complaints = "\n".join(line for line in said if re.search("error|could not|no matching|conflict", line, re.I))
    blamed = [each for each in requirements if re.split(r"[\s\[<>=!~;@(]", each)[0].casefold() in complaints.casefold()]
    named = ", ".join(repr(each) for each in blamed or requirements)
    tail = "\n".join(f"  {line}" for line in said[-_TAIL_LINES:]) or "  (nothing)"
    kind: type[ImageError] = ImageError
    text = "\n".join(said)
    step = next(step for pattern, step in _NEXT_STEPS.items() if re.search(pattern, text, re.I))
    if re.search(r"connection|name resolution|timed out|unreachable|name or service", text, re.I):
        kind = IndexUnreachable
        step = (
            "The package index could not be reached: check the network and proxy, or point PIP_INDEX_URL or "
            "PIP_FIND_LINKS at one that can be."
        )
    return kind(redact(f"pip could not install {named} (exit code {code}). Its last lines:\n{tail}\n{step}"))
