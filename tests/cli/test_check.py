"""``atoll check`` and ``atoll gpus`` on this machine, and with hosts that can't be used."""

from __future__ import annotations

import json
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.providers.gpus import gpu_report
from command_here import atoll

__all__ = ["atoll"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A state folder, and a home without ssh's config."""
    state = Path(tempfile.mkdtemp(prefix="ah-"))  # short, as paths of ssh's sockets have to be
    monkeypatch.setenv("ATOLL_HOME", str(state))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NO_COLOR", "1")
    yield state
    shutil.rmtree(state)


def test_this_machine_as_a_table_and_as_json(atoll):
    code, out, _ = atoll("check")
    assert code == 0
    *lines, clouds, slurm, ssh = out.splitlines()
    assert lines[0].startswith("✓ atoll: Atoll ")  # what a bug report needs
    findings = [line for line in lines if not line.startswith("✓ atoll: ")]
    assert all(line.startswith("✓ local: ") for line in findings)
    assert clouds.startswith("clouds, through SkyPilot: `atoll check aws` says what to set up")
    assert slurm.startswith("no Slurm cluster is declared: [slurm.lab]")
    assert ssh.startswith("no ssh hosts are declared: [ssh.lab]")
    code, out, _ = atoll("check", "local", "-o", "json")
    assert code == 0
    found = json.loads(out)
    assert [f"✓ {each['infra']}: {each['text']}" for each in found if each["ok"]] == findings


def test_a_tool_that_is_missing_is_named_with_how_to_get_it(atoll, monkeypatch, tmp_path):
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("bash", "ssh", "unshare", "nsenter", "ip", "tini"):
        if (found := shutil.which(tool)) is not None:
            (tools / tool).symlink_to(found)
    monkeypatch.setenv("PATH", str(tools))
    code, out, _ = atoll("check", "local")
    assert code == 100
    assert "✗ local: git is missing, and a workdir's .gitignore needs it: apt-get install git\n" in out


@pytest.mark.parametrize("command", [["check", "mars"], ["gpus", "--infra", "mars"]])
def test_an_infra_that_nobody_knows(atoll, command):
    code, out, err = atoll(*command)
    assert (code, out) == (2, "")
    assert "mars" in err
    assert "knows local, skypilot[/CLOUD], slurm/NAME, ssh/NAME and clouds such as aws" in err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[ssh.lab]\nhosts = ["a"]\njmup = "b"\n', "config.toml:3: [ssh.lab] has no key 'jmup': did you mean 'jump'?"),
        ('[ssh.lab]\nhosts = "a"\n', "config.toml:2: [ssh.lab] hosts = 'a': expected a list such as"),
        ("[ssh.lab]\npython = 'python3'\n", "[ssh.lab] hosts = None: expected a list such as"),
        ("[ssh.lab\n", "config.toml: Expected ']' at the end of a table declaration (at line 1, column 9)"),
        ('[shh.lab]\nhosts = ["a"]\n', "config.toml: no setting 'shh' is known: did you mean 'ssh'?"),
    ],
)
def test_a_mistake_in_the_config_is_one_line_that_says_where(atoll, home, text, said):
    (home / "config.toml").write_text(text)
    code, out, err = atoll("check")
    assert code == 2
    (line,) = [line for line in (out + err).splitlines() if "config.toml" in line and "no ssh hosts" not in line]
    assert said in line


def test_a_group_that_is_not_declared_names_the_nearest_and_how_to_declare_it(atoll, home):
    (home / "config.toml").write_text('[ssh.lab]\nhosts = ["a"]\n')
    code, out, _ = atoll("check", "ssh/lba")
    assert code == 100
    assert out.startswith("✗ ssh/lba: no group of that name in ")
    assert "did you mean 'lab'?" in out


def test_a_host_that_refuses_is_one_line_and_the_others_are_looked_at(atoll, home):
    with socket.socket() as closed:  # bound, and nobody listens
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        (home / "config.toml").write_text(f'[ssh.lab]\nhosts = ["127.0.0.1:{port}"]\n')
        code, out, _ = atoll("check", "local", "ssh/lab")
        assert code == 100
        assert "✓ local: " in out
        (line,) = [line for line in out.splitlines() if not line.startswith("✓ local: ")]
        assert line.startswith(f"✗ ssh/lab: 127.0.0.1:{port}")
        assert "refused" in line
        code, out, err = atoll("gpus", "--infra", "ssh/lab")
        assert (code, out) == (100, "")
        assert len(err.splitlines()) == 1
        assert f"127.0.0.1:{port}" in err


def test_gpus_of_this_machine(atoll):
    report = gpu_report()
    code, out, _ = atoll("gpus", "-o", "json")
    assert code == 0
    assert [row["name"] for row in json.loads(out)] == [gpu.name for gpu in report.gpus]
    code, out, _ = atoll("gpus")
    assert code == 0
    assert out.startswith("INDEX  NAME" if report.gpus else "no GPU: ")


@pytest.mark.parametrize("command", ["check", "gpus"])
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_teaches_by_examples(atoll, command, flag):
    code, out, _ = atoll(command, flag)
    assert code == 0
    assert f"    atoll {command}\n" in out
    assert "ssh/lab" in out
