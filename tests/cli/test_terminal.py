"""What commands show on a terminal only: a spinner while they wait, and tables."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys

from atoll.cli import app

WAITS = """
import os, signal, sys, time
from atoll.cli import output
output.watch()
try:
    with output.spinner("waiting", until_output=True), output.spinner("launching", interrupted="nothing was started"):
        time.sleep(0.5)
        print("a line")
        time.sleep(0.3)
        sys.stdout.write("half")
        sys.stdout.flush()
        time.sleep(0.3)
        print(" a line")
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(9)
except KeyboardInterrupt:
    print("end")
"""


def on_terminal(*command: str, **env: str) -> str:
    """What a command writes to a terminal of 100 columns."""
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0) as reader:
        process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "COLUMNS": "100", **env}
        )
        os.close(theirs)
        data = b""
        try:
            while piece := reader.read(65536):
                data += piece
        except OSError:  # how a terminal ends
            pass
        process.wait(30)
    return data.decode().replace("\r\n", "\n")


def test_a_spinner_makes_room_for_what_is_printed():
    shown = on_terminal(sys.executable, "-c", WAITS, TERM="xterm")
    first, rest = shown.split("a line", 1)
    assert re.search(r"\r\x1b\[K\S launching$", first.removesuffix("\r\x1b[K"))
    assert first.endswith("\r\x1b[K"), "it is gone before the line"
    again, end = rest.split("half", 1)
    assert "launching" in again
    assert end.startswith(" a line\n"), "nothing comes between the halves of a line"
    assert "atoll: interrupted: nothing was started\n" in end
    assert end.endswith("end\n")


def test_nothing_moves_where_there_is_no_terminal():
    done = subprocess.run([sys.executable, "-c", WAITS], capture_output=True, text=True)
    assert done.stdout == "a line\nhalf a line\nend\n"
    assert done.stderr == "\natoll: interrupted: nothing was started\n"
    assert on_terminal(sys.executable, "-c", WAITS, TERM="dumb").startswith("a line\nhalf a line\n")


def test_a_table_on_a_terminal_is_as_wide_as_it():
    shown = on_terminal("atoll", "recipes", "ls", NO_COLOR="1", TERM="xterm")
    shown = re.sub(r"\r\x1b\[K[^\n\r]*(?=\r)", "", shown)
    lines = [line for line in re.sub(r"\x1b\[[0-9;]*[mK]|\r", "", shown).splitlines() if "recipes show" not in line]
    assert any(line.split() == ["NAME", "PARAMS", "CPU", "SEQ_LEN", "LAYOUT", "NOTE"] for line in lines)
    assert any(set(line) <= {"─", " "} and line.strip() for line in lines), "a rule below the titles"
    assert max(map(len, lines)) <= 100


def test_only_the_last_column_of_a_table_is_cut():
    row = ("12", "a-name", "RUNNING", "rank 0 on head exited with code 127 and more than fits on a line of it")
    code = f"from atoll.cli.shown import print_table as p; p(('ID', 'NAME', 'STATUS', ''), [{row}], cut=True)"
    for columns, ends in (("60", "…"), ("30", "…"), ("200", "of it")):
        shown = on_terminal(sys.executable, "-c", code, NO_COLOR="1", TERM="xterm", COLUMNS=columns)
        title, rule, cells = re.sub(r"\x1b\[[0-9;]*m", "", shown).splitlines()
        assert title.split() == ["ID", "NAME", "STATUS"]
        assert re.match(r"12  a-name  RUNNING  rank 0", cells), cells
        assert cells.rstrip().endswith(ends)
        assert len(rule) <= max(int(columns), 33)


def test_ctrl_c_on_a_terminal_says_something_too(tmp_path):
    (tmp_path / "torch.py").write_text(
        "import os, signal, time\ntime.sleep(1)\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)\n"
    )
    shown = on_terminal("atoll", "generate", str(tmp_path), "Once", PYTHONPATH=str(tmp_path), TERM="xterm")
    assert "⠋ atoll generate" in shown
    assert shown.endswith("\natoll: interrupted\n")


def test_ctrl_c_says_something_once(tmp_path):
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    command = [sys.executable, "-m", "atoll", "generate", str(tmp_path), "Once"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\natoll: interrupted\n")


def test_every_command_is_in_one_panel_of_the_help():
    named = [name for names in app._PANELS.values() for name in names]
    groups = [group.name for group in app.app.registered_groups]
    visible = [each.name or each.callback.__name__ for each in app.app.registered_commands if not each.hidden]
    assert sorted(named) == sorted([*groups, *visible])
