"""``atoll run`` and ``atoll check`` on hosts of the testbed, with only the infra changed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.pools import SOURCE_ROOT, eventually

from testbed.fixtures import bed, make_bed  # noqa: F401  # fixtures
from testbed.hosts import Testbed

RUN = "from atoll.cli.main import main; main()"
PYTHON = os.path.realpath(sys.executable)  # not of an environment that has torch, which a preflight would try


@pytest.fixture
def lab(bed: Testbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Testbed]:  # noqa: F811
    """Two hosts, declared as ``ssh/lab``, a folder to work in, and nothing of ours left running on any of them."""
    declare(f'python = "{PYTHON}"')
    monkeypatch.setenv("PYTHONPATH", SOURCE_ROOT)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    yield bed
    for host in bed.hosts:
        eventually(lambda host=host: not host.command_lines(), f"nothing runs on {host.name}", 20)


def declare(*lines: str, hosts: str = '["h1", "h2"]') -> None:
    text = "\n".join(["[ssh.lab]", f"hosts = {hosts}", *lines, ""])
    Path(os.environ["ATOLL_HOME"], "config.toml").write_text(text)


def start(*words: str) -> subprocess.Popen[str]:
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    return subprocess.Popen([sys.executable, "-c", RUN, *words], text=True, **streams)  # type: ignore[call-overload]


def atoll(*words: str, code: int = 0) -> tuple[str, str]:
    process = start(*words)
    out, err = process.communicate(timeout=90)
    assert process.returncode == code, out + err
    assert "Traceback" not in err
    return out, err


@pytest.mark.long
def test_a_script_is_copied_runs_on_both_hosts_and_finds_its_files_again(lab):
    declare(f'python = "{sys.executable}"')
    Path("data.txt").write_text("from here")
    Path("train.py").write_text(
        "import os, pathlib, socket, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "x = torch.ones(1); dist.all_reduce(x)\n"
        "print(socket.gethostname(), int(x), open('data.txt').read(), os.environ['WORD'],\n"
        "      os.environ['OMP_NUM_THREADS'], os.environ['SECRET_WORD'], flush=True)\n"
        "pathlib.Path('checkpoint').touch()\n"
        "dist.destroy_process_group()\n"
    )
    words = ("run", "--infra", "ssh/lab", "--nodes", "2")
    given = ("--nproc", "2", "--env", "WORD=yes", "--secret", "SECRET_WORD=swordfish")
    out, err = atoll(*words, *given, "train.py")
    for host in ("h1", "h2"):
        assert out.count(f"{host} 4 from here yes 1 ****") == 2
    assert "preflight: 2 hosts OK" in err
    assert "✓ Job finished" in err
    assert "supervisor runs" not in err
    out, _ = atoll(*words, "--", "ls")
    assert out.count("checkpoint") == 2
    assert "no cluster is up" in atoll("status")[0]


@pytest.mark.long
def test_a_mistake_is_told_before_anything_is_copied(lab):
    Path("train.py").touch()
    words = ("run", "--infra", "ssh/lab", "--nodes", "2")
    assert "--nproc-per-node gpu: ssh/lab has no GPU" in atoll(*words, "--nproc", "gpu", "train.py", code=2)[1]
    assert "trian.py: no such script" in atoll(*words, "trian.py", code=2)[1]
    assert "ssh/lab has 2 hosts" in atoll("run", "--infra", "ssh/lab", "--nodes", "3", "train.py", code=2)[1]
    asked = ("launch", "--infra", "ssh/lab", "--gpus", "L4:2", "true")
    lacking = "atoll: L4:2 can't be had on h1: it has no GPU; --gpus none requests none\n"
    assert atoll(*asked, code=2)[1] == lacking
    assert "no cluster is up" in atoll("status", "-a")[0]


@pytest.mark.long
def test_a_command_runs_once_a_host_in_the_folder_named_with_its_own_python(lab):
    Path("inner").mkdir()
    Path("inner", "only.txt").touch()
    declare()
    out, _ = atoll(
        "run", "--infra", "ssh/lab", "--nodes", "2", "--workdir", "inner", "--", "sh", "-c", "ls; which python3"
    )
    assert out.count("only.txt") == 2
    Path("inner", "which.py").write_text("import sys; print(sys.executable)")
    (python,) = {line.split()[-1] for line in out.splitlines() if "python3" in line}
    assert atoll("run", "--infra", "ssh/lab", "--workdir", "inner", "which.py")[0].strip() == python


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGKILL])
def test_nothing_survives_on_hosts_the_end_of_the_client(lab, number):
    Path("sleep.py").write_text("import time; print('up', flush=True); time.sleep(300)")
    process = start("run", "--infra", "ssh/lab", "--nodes", "2", "sleep.py")
    assert process.stdout is not None
    seen = [process.stdout.readline() for _ in range(2)]
    assert all("up" in line for line in seen)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == (103 if number == signal.SIGINT else -number)
    for host in lab.hosts:
        eventually(lambda host=host: not any("sleep.py" in line for line in host.command_lines()), "the ranks end")
    eventually(lambda: "no cluster is up" in atoll("status")[0], "its cluster is gone", 40)


@pytest.mark.long
def test_a_rank_for_each_gpu_of_the_hosts(lab):
    rows = "0, GPU-aa, NVIDIA L4, 23034\\n1, GPU-bb, NVIDIA L4, 23034\\n"
    for host in lab.hosts:
        tool = "/usr/local/bin/nvidia-smi"
        host.run(f"printf '#!/bin/sh\\nprintf \"{rows}\"\\n' > {tool}; chmod 755 {tool}")
    found = json.loads(atoll("gpus", "--infra", "ssh/lab", "-o", "json")[0])
    assert [(each["host"], each["name"], each["uuid"]) for each in found] == [
        (host, "L4", uuid) for host in ("h1", "h2") for uuid in ("GPU-aa", "GPU-bb")
    ]
    told = "echo $(hostname) $LOCAL_RANK of $WORLD_SIZE, $SKYPILOT_NUM_GPUS_PER_NODE: $CUDA_VISIBLE_DEVICES"
    out, _ = atoll("run", "--infra", "ssh/lab", "--nodes", "2", "--nproc", "gpu", "--no-python", "sh", "-c", told)
    for host in ("h1", "h2"):
        for rank in (0, 1):
            assert f"{host} {rank} of 4, 2: GPU-aa,GPU-bb" in out


def test_check_and_gpus_say_what_hosts_have_and_which_cannot_be_used(lab):
    out, _ = atoll("check", "ssh/lab")
    lines = out.splitlines()
    assert [line[:17] for line in lines[:2]] == ["✓ ssh/lab: h1: Py", "✓ ssh/lab: h2: Py"]
    assert "cores, no GPU, reached at" in lines[0]
    assert lines[-1].startswith("✓ ssh/lab: preflight: 2 hosts OK")
    out, err = atoll("gpus", "--infra", "ssh/lab", "-o", "json")
    assert json.loads(out) == []
    assert "h1: no GPU" in err
    declare(hosts='["h1", "h2:2299"]')
    out, err = atoll("check", "ssh/lab", "-o", "json", code=100)
    found = json.loads(out)
    assert [each["ok"] for each in found] == [True, False]
    assert "h2:2299" in found[1]["text"]
    assert "refused" in found[1]["text"]
    assert "\n" not in found[1]["text"].strip()
    out, err = atoll("gpus", "--infra", "ssh/lab", code=100)
    assert "h2:2299" in err
