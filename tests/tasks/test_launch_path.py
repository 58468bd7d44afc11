"""How long the path of a launch over ssh is: which of the command's functions it passes on its way to the hosts.

A function is on the path if it is on the stack, of whatever thread or of the one that waits for that, when the command
starts ssh or writes to one. Helpers that compute something and return before that are not.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.tasks.test_ssh_tasks import atoll, declare, trust

from testbed.hosts import Testbed

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]  # several commands, on a machine that may be busy

PROFILED = """
import json, os, stat, subprocess, sys, threading
import atoll
from atoll.cli.main import main

source = os.path.dirname(atoll.__file__) + os.sep
first, passed, starts = threading.get_ident(), set(), []

def reaches_a_host(frame, event, arg):
    if event == "call":
        is_start = frame.f_code is subprocess.Popen.__init__.__code__
        is_start = is_start and os.path.basename(frame.f_locals["args"][0]) == "ssh"
        starts.extend([1] * is_start)
        return is_start
    is_write = event == "c_call" and arg.__name__ == "write" and hasattr(arg.__self__, "fileno")
    return is_write and arg.__self__.fileno() > 2 and stat.S_ISFIFO(os.fstat(arg.__self__.fileno()).st_mode)

def note(frame, event, arg):
    if not reaches_a_host(frame, event, arg):
        return
    for at in (frame, sys._current_frames()[first]):
        while at is not None:
            if at.f_code.co_filename.startswith(source) and at.f_code.co_name != "<genexpr>":
                passed.add((at.f_code.co_filename.removeprefix(source), at.f_code.co_qualname))
            at = at.f_back

out = sys.argv.pop(1)
threading.setprofile(note)
sys.setprofile(note)
try:
    main()
finally:
    sys.setprofile(None)
    with open(out, "w") as file:
        json.dump([len(starts), sorted(passed)], file)
"""


def test_a_launch_over_ssh_passes_few_functions_of_few_files(bed: Testbed, tmp_path: Path) -> None:
    declare(bed)
    trust(bed)  # the head supervises
    work = tmp_path / "work"
    work.mkdir()
    (work / "file").write_text("first\n")
    words = ["launch", "-c", "c", "--infra", "ssh/lab", "--num-nodes", "2", "--workdir", str(work), "cat file"]
    assert atoll(*words).count(") first\n") == 2
    (work / "file").write_text("second\n")
    out = tmp_path / "path.json"
    program = [sys.executable, "-c", PROFILED, str(out), *words, "-d"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert atoll("logs", "c").count(") second\n") == 2
    atoll("down", "c")
    num_starts, path = json.loads(out.read_text())
    listed = "\n".join(map(":".join, path))
    assert len({file for file, _ in path}) <= 14, listed
    assert len(path) <= 35, listed
    # Each of the two hosts is asked about itself and gets its files, the head's program answers, and all log out.
    assert num_starts <= 6
