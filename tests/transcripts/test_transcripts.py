"""Commands and calls with all that they print: each ``*.txt`` in the folders beside this file is one scenario.

A scenario begins with what it is about; ``[long]`` at the end of that line leaves it out of ``make test``. Then come
commands of a shell, run in one empty folder with an ``ATOLL_HOME`` of its own, and below each what it did::

    $ atoll run hello.py      a command; its further lines begin with "> "
    | hello                   standard output
    ! ✓ Job finished ...      standard error
    [3]                       exit code, where it isn't 0

``commands`` are of one machine, ``hosts`` of two hosts of the testbed, and ``calls`` are Python scripts.

What differs from run to run is replaced (``REPLACED``, ``JSON_VALUES``). After a change that is meant::

    RECORD=1 python -m pytest tests/transcripts -m "" && git diff tests/transcripts
"""

from __future__ import annotations

import difflib
import getpass
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from testbed.fixtures import bed, make_bed
from testbed.hosts import Testbed

__all__ = ["bed", "make_bed"]

pytestmark = pytest.mark.timeout(600)  # some have many commands, on a machine that may be busy
HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
COMMAND_S = 150

# In this order, in every line but those of a --help.
REPLACED = [
    (r"\d{4}-\d\d-\d\d[ T-]\d\d[:-]\d\d[:-]\d\d(?:[.,-]\d+)?(?:Z|[+-]\d\d:?\d\d)?", "<time>"),
    (r"\b\d\d:\d\d:\d\d(?:\.\d+)?\b", "<time>"),
    (r"\b\d+(?:\.\d+)? (?:ms|s|min)(?: \d+ s)?\b", "# s"),
    (r"\b(?:\d+m )?\d+s\b|\b\d+m(?= ago)", "#s"),
    (r"(SUCCEEDED|FAILED)(  +\d+  +)\d+\.\d+\b", r"\1\2#"),  # the seconds of a sweep's jobs
    (r"\b(pid[ =]|process )\d+", r"\1#"),
    (r"\bstate \w in \w+", "state #"),
    (r"\b(port )\d+", r"\1#"),
    (r"((?:\d{1,3}\.){3}\d{1,3}|localhost):\d{4,5}\b", r"\1:#"),
    (r"\b(run|sky|cluster|train|sweep)-[0-9a-f]{4,}\b", r"\1-<id>"),
    (r"\b(?=[0-9]*[a-f])(?=[a-f]*\d)[0-9a-f]{8,}\b", "<id>"),
    (r"\bPython \d+\.\d+\.\d+|\b\d+ cores", "#"),
    (r"[\d,.]+( [kM])? tokens/s(?: \([\d,.]+ a rank\))?", "# tokens/s"),
    (r" +(?:data wait \d+%|slowest rank \+\d+%|# s left)", ""),  # said only where there is some
    (r"(loss:?|grad norm|→)( +)\d+\.\d+", r"\1\2#"),  # another torch rounds otherwise
    (r"[\d,.]+ [KMG]iB", "# MiB"),
    (r"(\S)  +(?=\S)", r"\1  "),  # columns are as wide as what stands in them
    (r"([─━═])\1+", r"\1\1"),
]
JSON_VALUES = re.compile(r"(^|_)(at|s|seconds|time|pid|port|user)$")
# Before a line of a rank.
LABEL = re.compile(r"\([^)]*\)|\[rank \d+\]")
# Said only where the machine is slow, or by some versions of Python.
SOMETIMES = re.compile(r"^(atoll: )?still waiting |^ *[~^]+$")


def scenarios(folder: str) -> list[Any]:
    found = []
    for path in sorted(HERE.glob(f"{folder}/*.txt")):
        is_long = path.read_text().partition("\n")[0].endswith("[long]")
        found.append(pytest.param(path, id=path.stem, marks=[pytest.mark.long] if is_long else []))
    return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the commands of a scenario are typed. Clusters that a failed one leaves up are taken down."""
    place = tmp_path / "here"
    place.mkdir()
    for name, value in {
        "ATOLL_HOME": str(tmp_path / "home"),
        "HOME": str(tmp_path),
        "CUDA_VISIBLE_DEVICES": "",
        "NO_COLOR": "1",
        "COLUMNS": "100",
        "LC_ALL": "C.UTF-8",
        "TZ": "UTC",
        "PYTHONPATH": str(HERE),
    }.items():
        monkeypatch.setenv(name, value)
    yield place
    subprocess.run(["atoll", "down", "--all", "--yes"], cwd=place, capture_output=True)


@pytest.mark.parametrize("path", scenarios("commands"))
def test_commands_print_what_they_printed(path: Path, folder: Path) -> None:
    compare(path, folder)


@pytest.mark.parametrize("path", scenarios("calls"))
def test_calls_do_what_they_did(path: Path, folder: Path) -> None:
    compare(path, folder)


@pytest.mark.long
@pytest.mark.parametrize("path", scenarios("hosts"))
def test_commands_on_hosts_print_what_they_printed(
    path: Path, bed: Testbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"NO_COLOR": "1", "COLUMNS": "100", "LC_ALL": "C.UTF-8", "TZ": "UTC"}.items():
        monkeypatch.setenv(name, value)
    hosts = json.dumps([host.name for host in bed.hosts])
    config = f"[ssh.lab]\nhosts = {hosts}\npython = {json.dumps(os.path.realpath(sys.executable))}\n"
    Path(os.environ["ATOLL_HOME"], "config.toml").write_text(config)
    place = tmp_path / "here"
    place.mkdir()
    compare(path, place)


def compare(path: Path, folder: Path) -> None:
    """Run a scenario: is all that it prints, and how its commands end, as it was recorded?"""
    recorded = path.read_text()
    lines = []
    for command in commands(recorded):
        lines += command
        if command[0].startswith("$ "):
            script = "\n".join(line[2:] for line in command)
            lines += run(script, folder)
    now = "\n".join(lines) + "\n"
    if os.environ.get("RECORD"):
        path.write_text(now)
    elif now != recorded:
        changed = difflib.unified_diff(recorded.splitlines(), now.splitlines(), "recorded", "now", n=6, lineterm="")
        pytest.fail(f"{path.name}\n" + "\n".join(changed), pytrace=False)


def commands(text: str) -> Iterator[list[str]]:
    """The parts of a scenario that are written by hand: a command's lines, or a line that is none."""
    lines: list[str] = []
    for line in text.splitlines():
        if lines and line.startswith(">"):
            lines.append(line)
            continue
        if lines:
            yield lines
            lines = []
        if line.startswith("$ "):
            lines = [line]
        elif not line.startswith(("|", "!", "[")):
            yield [line]
    if lines:
        yield lines


def run(script: str, folder: Path) -> list[str]:
    """Run a command in the folder; what it printed and how it ended, as a scenario has it."""
    # Not pipes: what a command leaves running may hold them open.
    out, err = folder.parent / "out", folder.parent / "err"
    with out.open("wb") as out_file, err.open("wb") as err_file:
        command = ["timeout", "-k", "5", str(COMMAND_S), "bash", "-c", script]
        code = subprocess.call(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=out_file, stderr=err_file)
    lines = []
    for mark, path in (("|", out), ("!", err)):
        text = path.read_text(errors="replace")
        if "\nOptions:" not in text:
            text = without_differences(as_json(text) or text, folder)
        lines += [f"{mark} {line}".rstrip() for line in text.splitlines()]
    if code:
        lines.append(f"[{code}]")
    return lines


def as_json(text: str) -> str | None:
    """JSON one value a line, so that it can be compared; nothing where it isn't any."""
    if not text.startswith(("[", "{")):
        return None
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return json.dumps(stable(value), indent=1, ensure_ascii=False)


def stable(value: Any, key: str = "") -> Any:
    """JSON in which the values that differ are named by their type."""
    if isinstance(value, dict):
        return {each: stable(inner, each) for each, inner in value.items()}
    if isinstance(value, list):
        return [stable(inner) for inner in value]
    if value is not None and JSON_VALUES.search(key):
        return f"<{type(value).__name__}>"
    return value


def without_differences(text: str, folder: Path) -> str:
    """The text with what differs between runs, users and machines replaced."""
    places = {
        str(folder): "<here>",
        os.environ["ATOLL_HOME"]: "<home>",
        os.environ["TMPDIR"]: "<tmp>",
        str(folder.parent): "~",
        sys.prefix: "<venv>",
        str(REPOSITORY): "<repository>",
        os.path.realpath(sys.executable): "<python>",
    }
    for place, name in places.items():
        text = text.replace(place, name)
    text = re.sub(rf"\b{re.escape(platform.node())}\b", "<host>", text)
    text = re.sub(rf"\b{re.escape(getpass.getuser())}@", "<user>@", text)
    for pattern, name in REPLACED:
        text = re.sub(pattern, name, text, flags=re.MULTILINE)
    lines = [line for line in text.splitlines() if not SOMETIMES.match(line)]
    return "\n".join(by_rank(lines))


def by_rank(lines: list[str]) -> list[str]:
    """Ranks print side by side: of lines that ranks printed one after the other, those of each rank together."""
    found: list[str] = []
    for is_label, group in groupby([(LABEL.match(line), line) for line in lines], key=lambda each: bool(each[0])):
        together = list(group)
        if is_label:
            together.sort(key=lambda each: each[0].group() if each[0] else "")
        found += [line for _, line in together]
    return found
