"""``atoll run`` as somebody who knows ``torchrun`` expects it, on real local nodes."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cli.test_cluster_commands import contents
from tests.leaks import is_running
from tests.pools import SOURCE_ROOT, descriptors, eventually

from atoll.cli.app import app
from atoll.core.errors import AtollError
from atoll.providers.base import NodeRequest
from atoll.tasks import clusters, lifecycle
from atoll.tasks.placing import decide
from atoll.tasks.spec import ClusterStatus
from command_here import Atoll, atoll

__all__ = ["atoll"]
RUN = "from atoll.cli.main import main; main()"
# What torchrun of 2.11 and 2.13 takes with a value, and what without one.
WITH_VALUE = {
    "--nnodes": "1",
    "--nproc-per-node": "1",
    "--rdzv-backend": "c10d",
    "--rdzv-endpoint": "localhost:0",
    "--rdzv-id": "mine",
    "--rdzv-conf": "a=b",
    "--max-restarts": "0",
    "--monitor-interval": "0.1",
    "--start-method": "spawn",
    "--event-log-handler": "null",
    "--role": "default",
    "--log-dir": "logs",
    "--redirects": "3",
    "--tee": "3",
    "--local-ranks-filter": "0",
    "--duplicate-stdout-filters": "a",
    "--duplicate-stderr-filters": "a",
    "--node-rank": "0",
    "--master-addr": "127.0.0.1",
    "--master-port": "29511",
    "--local-addr": "127.0.0.1",
    "--logs-specs": "default",
    "--numa-binding": "node",
    "--signals-to-handle": "SIGTERM",
    "--shutdown-timeout": "30",
}
WITHOUT_VALUE = ("--standalone", "--no-python", "--module", "--run-path")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A state folder for one test, on a machine without GPUs."""
    monkeypatch.setenv("ATOLL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("PYTHONPATH", SOURCE_ROOT)
    monkeypatch.chdir(tmp_path)
    yield tmp_path / "home"
    for name in clusters.all_names():
        assert clusters.load(name).status is ClusterStatus.DOWN


def start(*arguments: str, **more: Any) -> subprocess.Popen[str]:
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, **more}
    return subprocess.Popen([sys.executable, "-c", RUN, *arguments], text=True, **streams)


def run(*arguments: str, code: int = 0) -> tuple[str, str]:
    """What it wrote to standard output, and to standard error."""
    process = start("run", *arguments)
    out, err = process.communicate(timeout=90)
    assert process.returncode == code, out + err
    assert "Traceback" not in err
    return out, err


def script(text: str, name: str = "script.py") -> str:
    Path(name).write_text(text)
    return name


def values(out: str) -> list[dict[str, Any]]:
    """The JSON objects that ranks printed, by rank."""
    found = [json.loads(line[line.index("{") :]) for line in out.splitlines()]
    return sorted(found, key=lambda each: int(each["RANK"]))


ENVIRON = "import json, os; print(json.dumps(dict(os.environ)), flush=True)\n"


def test_a_script_sums_over_all_ranks_of_two_nodes():
    text = (
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo', init_method='env://')\n"
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))\n"
        "model(torch.full((1, 2), float(dist.get_rank()))).sum().backward()\n"
        "print('grad', model.module.weight.grad.tolist(), 'of', dist.get_world_size(), flush=True)\n"
        "dist.destroy_process_group()\n"
        "os._exit(0)  # DDP keeps Gloo's threads, which race with Python's exit\n"
    )
    out, err = run("--nodes", "2", script(text))
    assert out.count("grad [[0.5, 0.5]] of 2") == 2
    assert "✓ Job finished (status: SUCCEEDED)." in err


def test_ranks_have_the_variables_of_torchrun_and_the_callers_own_surroundings(monkeypatch, tmp_path):
    monkeypatch.setenv("MINE", "it's mine")
    monkeypatch.setenv("HOME", str(tmp_path))
    told = "import os; d = dict(os.environ); d['cwd'] = os.getcwd(); d['tmp'] = os.path.exists(d['SEEN'])\n"
    seen = Path("/tmp", f"atoll-test-{os.getpid()}")
    seen.touch()
    try:
        monkeypatch.setenv("SEEN", str(seen))
        out, _ = run(
            "--nodes", "2", "--nproc", "2", "--rdzv-id", "abc", script(told + ENVIRON.replace("dict(os.environ)", "d"))
        )
    finally:
        seen.unlink()
    found = values(out)
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "SKYPILOT_NODE_RANK")
    assert [[each[name] for name in names] for each in found] == [
        ["0", "0", "0", "0", "0"],
        ["1", "1", "0", "1", "0"],
        ["2", "0", "1", "2", "1"],
        ["3", "1", "1", "3", "1"],
    ]
    for each in found:
        assert each["WORLD_SIZE"] == "4"
        assert each["LOCAL_WORLD_SIZE"] == "2"
        assert each["GROUP_WORLD_SIZE"] == "2"
        assert each["TORCHELASTIC_RUN_ID"] == "abc"
        assert each["OMP_NUM_THREADS"] == "1"
        assert each["MASTER_ADDR"] == "127.0.0.1"
        assert each["MASTER_PORT"] == found[0]["MASTER_PORT"]
        assert each["MINE"] == "it's mine"
        assert each["HOME"] == str(tmp_path)
        assert each["cwd"] == str(tmp_path)
        assert each["tmp"]


@pytest.mark.parametrize("spelling", ["-", pytest.param("_", marks=pytest.mark.long)])
def test_every_flag_of_torchrun_is_taken_in_both_spellings(spelling):
    words = [word for flag, value in WITH_VALUE.items() for word in ("--" + flag[2:].replace("-", spelling), value)]
    flags = ["--" + flag[2:].replace("-", spelling) for flag in WITHOUT_VALUE if flag != "--module"]
    out, err = run(*words, *flags, "echo", "hello", "--nnodes", "7")
    assert out == "hello --nnodes 7\n"
    assert "--rdzv-backend c10d is not needed: Atoll gives ranks their rendezvous itself" in err
    assert "No such option" not in err


def test_no_flag_of_the_installed_torchrun_is_unknown():
    from torch.distributed.run import get_args_parser

    flags = {each for action in get_args_parser()._actions for each in action.option_strings if each.startswith("--")}
    known = {*WITH_VALUE, *WITHOUT_VALUE, "--virtual-local-rank", "--help"}
    assert {flag.replace("_", "-") for flag in flags} <= known


def test_a_value_may_stand_in_the_same_word_as_its_flag():
    out, err = run("--nproc_per_node=2", "-t3", "--nnodes=1:1", "-r", "3", "--no-python", "echo", "-m", "--", "x")
    assert sorted(line.partition(") ")[2] for line in out.splitlines()) == ["-m -- x"] * 2
    assert "--tee 3 is not needed" in err
    assert "--redirects 3 is not needed" in err


@pytest.mark.long
def test_a_module_a_program_and_a_command_once_a_node():
    Path("package").mkdir()
    Path("package/work.py").write_text("import sys; print(__name__, __package__, sys.argv[1:])\n")
    assert run("-m", "package.work", "--lr", "1")[0] == "__main__ package ['--lr', '1']\n"
    assert run("--no-python", "sh", "-c", "echo program")[0] == "program\n"
    out, _ = run("--nodes", "2", "--nproc", "3", "--", "sh", "-c", "echo node $SKYPILOT_NODE_RANK of $WORLD_SIZE")
    assert sorted(line.partition(") ")[2] for line in out.splitlines()) == ["node 0 of 2", "node 1 of 2"]


def test_only_what_ranks_print_goes_to_standard_output():
    out, err = run(script("import sys; print('to out'); print('to err', file=sys.stderr)"))
    assert sorted(out.splitlines()) == ["to err", "to out"]
    assert "✓" in err
    assert "Waiting for task resources" in err
    out, err = run("--nproc", "4", "--local-ranks-filter", "1,3", script("import os; print(os.environ['RANK'])"))
    assert sorted(line.partition(") ")[2] for line in out.splitlines()) == ["1", "3"]


def test_the_failing_rank_is_named_with_its_last_words():
    text = (
        "import os, time\n"
        "if os.environ['RANK'] == '2':\n    raise ValueError('no such optimizer: adm')\n"
        "time.sleep(300)\n"
    )
    process = start("run", "--nodes", "2", "--nproc", "2", script(text))
    _out, err = process.communicate(timeout=60)
    assert process.returncode == 100
    assert "rank 2 on worker1 exited with code 1" in err
    assert "    ValueError: no such optimizer: adm" in err
    name = err.rsplit("atoll logs ", 1)[1].strip()
    with start("logs", name) as again:
        assert "ValueError: no such optimizer: adm" in again.communicate(timeout=60)[0]
    assert again.returncode == 100


@pytest.mark.long
def test_all_ranks_start_again_together_after_a_failure():
    text = (
        "import os, time\n"
        "count, rank = os.environ['TORCHELASTIC_RESTART_COUNT'], os.environ['RANK']\n"
        "print('began', rank, count, flush=True)\n"
        "open(f'began-{rank}', 'w').close()\n"
        "if count != '1':\n"
        "    while not os.path.exists('began-0'):\n        time.sleep(0.02)\n"
        "    exit(9) if rank == '1' else time.sleep(300)\n"
        "print('checkpoint', open('checkpoint').read() if rank == '1' else '', flush=True)\n"
    )
    Path("checkpoint").write_text("of before")
    out, _err = run("--nodes", "2", "--max-restarts", "1", script(text))
    for rank in ("0", "1"):
        assert [line.split()[-1] for line in out.splitlines() if f"began {rank}" in line] == ["0", "1"]
    assert "checkpoint of before" in out
    assert run("--max-restarts", "1", script("exit(3)"), code=100)[1].count("exited with code 3") >= 2


def test_secrets_reach_the_ranks_and_nobody_else(monkeypatch, home):
    monkeypatch.setenv("API_TOKEN", "tk_9fQ2xZ71bLw3")
    text = "import os; print(*(str(len(os.environ[n])) + os.environ[n] for n in ('WORD', 'HIDDEN', 'API_TOKEN')))"
    out, _ = run("--env", "WORD=shown", "--secret", "HIDDEN=swordfish", script(text))
    assert out == "5shown 9**** 15****\n"
    for path, held in contents(home).items():
        assert b"swordfish" not in held, path
        assert b"tk_9fQ2xZ71bLw3" not in held, path


SLEEPY = (
    "import os, signal, sys, time\n"
    "if 'stubborn' in sys.argv[1]:\n    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "print('pid', open('/proc/self/stat').read().split()[0], flush=True)\n"
    "open('up' + os.environ['RANK'], 'w').close()\n"
    "time.sleep(300)\n"
)


def tagged(word: str) -> list[int]:
    """Processes, outside of all namespaces, that have a word on their command line."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if word.encode() in Path("/proc", name, "cmdline").read_bytes() and is_running(int(name)):
                found.append(int(name))
    return found


def begin(word: str, **more: Any) -> subprocess.Popen[str]:
    process = start("run", "--nproc", "2", script(SLEEPY), word, **more)
    eventually(lambda: Path("up0").exists() and Path("up1").exists(), "both ranks run", 60)
    eventually(lambda: any(each.startswith("socket:") for each in descriptors(process.pid)), "the log is followed", 30)
    return process


@pytest.mark.parametrize(
    ("number", "kind"), [(signal.SIGINT, "stubborn"), (signal.SIGTERM, "plain"), (signal.SIGHUP, "plain")]
)
def test_a_signal_ends_the_ranks(number, kind):
    word = f"{kind}-{os.getpid()}-{number}"
    process = begin(word)
    process.send_signal(number)
    began = time.monotonic()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 103
    assert not tagged(word)
    assert time.monotonic() - began < 15  # 5 s on a machine that does nothing else
    assert "was cancelled" in err
    assert out.count(") pid ") == 2


SAVES = """import multiprocessing as mp, os, signal, sys, time
from pathlib import Path
rank, slow_s = os.environ["RANK"], float(sys.argv[2])
worker = mp.get_context("fork").Process(target=time.sleep, args=(1000,), daemon=True)  # as of a data loader
worker.start()
def save(number, frame):
    time.sleep(slow_s)
    print("saved on", signal.Signals(number).name, "worker alive", worker.is_alive(), flush=True)
    sys.exit(0)
for name in ("SIGTERM", "SIGUSR1"):
    signal.signal(getattr(signal, name), save)
print("pid", os.getpid(), flush=True)
Path("up" + rank).touch()
while True:
    if os.path.exists("fail") and rank == "1":
        sys.exit(3)
    time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("number", "code", "slow_s"),
    [
        (signal.SIGUSR1, 103, "5"),
        pytest.param(signal.SIGINT, 103, "5", marks=pytest.mark.long),
        pytest.param(None, 100, "2.5", marks=pytest.mark.long),
    ],
)
def test_ranks_have_the_time_to_save_that_torchruns_flags_give_them(number, code, slow_s):
    flags = ("--nproc", "2", "--shutdown-timeout", "60", "--signals_to_handle=SIGUSR1")
    process = start("run", *flags, script(SAVES), f"saves-{os.getpid()}-{number}", slow_s)
    eventually(lambda: Path("up0").exists() and Path("up1").exists(), "both ranks run", 60)
    if number is None:
        Path("fail").touch()
    else:
        eventually(lambda: any(each.startswith("socket:") for each in descriptors(process.pid)), "the log is followed")
        process.send_signal(number)
    out, err = process.communicate(timeout=100)
    assert process.returncode == code, err
    name = "SIGUSR1" if number == signal.SIGUSR1 else "SIGTERM"
    assert out.count(f"saved on {name} worker alive True") == (1 if number is None else 2), out + err
    assert not tagged(f"saves-{os.getpid()}-{number}")


def test_ranks_that_do_not_end_in_the_time_given_are_killed(monkeypatch):
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "1")
    process = start("run", script(SAVES), f"late-{os.getpid()}", "1000")
    eventually(Path("up0").exists, "the rank runs", 60)
    eventually(lambda: any(each.startswith("socket:") for each in descriptors(process.pid)), "the log is followed", 30)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 103
    assert "saved" not in out


def test_nodes_that_do_not_end_are_told_of_and_the_exit_code_is_the_jobs(monkeypatch, capfd):
    def refuses(name: str, on_line: Any) -> None:
        raise AtollError(f"cluster {name}: not even SIGKILL ends 17")

    with monkeypatch.context() as stuck:
        stuck.setattr(lifecycle, "down", refuses)
        with pytest.raises(SystemExit) as ended:
            app(["run", "--no-python", "false"])
    assert ended.value.code == 100
    (name,) = clusters.all_names()
    said = capfd.readouterr().err
    assert f"atoll: cluster {name}: not even SIGKILL ends 17; `atoll down {name}` tries again" in said
    lifecycle.down(name)


def test_a_reader_that_has_seen_enough_ends_the_ranks():
    word = f"talkative-{os.getpid()}"
    talk = "import time\nwhile True:\n    print('line', flush=True)\n    time.sleep(0.01)\n"
    process = start("run", "--nproc", "2", script(talk), word)
    process.stdout.readline()
    process.stdout.close()
    with process.stderr as stderr:
        assert "atoll: standard output is closed: ending the ranks" in stderr.read()
    assert process.wait(60) == 141
    assert not tagged(word)


def test_nothing_survives_a_client_that_is_killed():
    word = f"orphan-{os.getpid()}"
    process = begin(word)
    process.kill()
    process.communicate(timeout=60)
    eventually(lambda: not tagged(word), "its ranks end")
    name = clusters.all_names()[0]
    eventually(lambda: not clusters.unfinished(clusters.load(name)), "the job ends")
    with start("status") as status:
        assert "no cluster is up" in status.communicate(timeout=60)[0]


def test_nothing_survives_a_terminal_that_is_closed():
    word = f"terminal-{os.getpid()}"
    ours, theirs = pty.openpty()
    process = begin(word, stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=_own_terminal)
    os.close(theirs)
    os.close(ours)
    assert process.wait(60) != 0
    eventually(lambda: not tagged(word), "its ranks end")


def _own_terminal() -> None:
    import fcntl
    import termios

    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_logs_of_twenty_runs_are_kept_and_no_cluster_stays(monkeypatch):
    monkeypatch.setattr("sys.argv", ["atoll"])
    for number in range(24):
        name = f"run-{number:06x}"
        with clusters.locked(name, "launch", print):
            made = decide(name, None, NodeRequest()).cluster
            clusters.save(type(made).from_json({**made.to_json(), "created_s": number, "status": "DOWN"}))
    run("--no-python", "true")
    left = clusters.all_names()
    assert len(left) == 20
    assert "run-000004" not in left
    assert "run-000005" in left
    with start("status") as status:
        assert "no cluster is up" in status.communicate(timeout=60)[0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "name a script"),
        (("trian.py",), "trian.py: no such script: did you mean 'train.py'?"),
        (("--nodes", "0", "train.py"), "'--nodes': '0' is not a number from 1 to 4096"),
        (("--nodes", "²", "train.py"), "'--nodes': '²' is not a number from 1 to 4096"),
        (("--nproc", "9" * 20, "train.py"), "expected a number up to 4096"),
        (("--nproc", "many", "train.py"), "--nproc-per-node many: expected a number"),
        (("--nproc", "gpu", "train.py"), "local has no GPU; give a number, or --gpus L4:2 to simulate two"),
        (("--local-ranks-filter", "0,2", "--nproc", "2", "train.py"), "expected numbers from 0 to 1"),
        (("--virtual-local-rank", "train.py"), "LOCAL_RANK is theirs"),
        (("--nporc", "2", "train.py"), "unknown option --nporc: did you mean '--nproc'?"),
        (("--numnodes", "2", "train.py"), "did you mean '--num-nodes'?"),
        (("task.yaml",), "atoll: task.yaml is a task file: atoll launch task.yaml"),
        (("my.toml",), "atoll: my.toml is a recipe: atoll train my.toml"),
        (("folder",), "folder is a folder: name a script in it, such as folder/train.py"),
        (("--signals-to-handle", "SIGKILL", "train.py"), "expected names such as SIGTERM,SIGUSR1"),
        (("--shutdown-timeout", "-1", "train.py"), "--shutdown-timeout"),
        (("--workdir", "nowhere", "train.py"), "--workdir nowhere: no such folder"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line_and_exit_code_2(words, said, atoll: Atoll):
    script("", "train.py")
    Path("task.yaml").write_text("run: echo hi\n")
    Path("my.toml").write_text("base = 'llama3_debug'\n")
    Path("folder").mkdir()
    code, out, err = atoll("run", *words)
    assert code == 2
    assert said in " ".join(err.split())
    assert out == ""


def test_an_infra_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    Path("work").mkdir()
    monkeypatch.chdir("work")
    script("", "train.py")
    assert "mars: no such infra" in run("--infra", "mars", "train.py", code=2)[1]
    assert "[ssh.lab]" in run("--infra", "ssh/lab", "train.py", code=2)[1]
    assert not clusters.all_names()


def test_simulated_gpus_give_ranks_and_may_be_refused():
    out, err = run(
        "--gpus", "L4:2", script("import os; print(os.environ['WORLD_SIZE'], os.environ['ATOLL_SIMULATED'])")
    )
    assert [line.endswith("2 1") for line in out.splitlines()] == [True, True]
    assert "simulated on CPU" in err
    assert "can't be had" in run("--gpus", "L4:2", "--no-simulate", "script.py", code=2)[1]


def test_a_rank_for_each_gpu_that_the_nodes_share(monkeypatch, tmp_path):
    rows = "\n".join(f"{index}, GPU-{index}, NVIDIA L4, 23034" for index in range(4))
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\ncat <<END\n{rows}\nEND\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    names = ("LOCAL_WORLD_SIZE", "SKYPILOT_NUM_GPUS_PER_NODE", "CUDA_VISIBLE_DEVICES")
    for words in (("--nproc", "gpu"), ()):
        found = values(run("--nodes", "2", *words, script(ENVIRON))[0])
        shares = ["GPU-0,GPU-1"] * 2 + ["GPU-2,GPU-3"] * 2
        assert [[each[name] for name in names] for each in found] == [["2", "2", share] for share in shares]


def test_help_teaches_by_examples():
    for words in (("run", "-h"), ("run", "--help")):
        out = start(*words).communicate(timeout=60)[0]
        assert "atoll run --nodes 2 --nproc 2 train.py --lr 0.1" in out
        assert "103 after Ctrl-C" in out
        assert "--num_nodes" not in out
    assert app.info.help is not None
    assert app.info.help.index("atoll run") < app.info.help.index("atoll launch")
