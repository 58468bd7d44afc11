"""Seeded mutations of what people hand to Atoll: every answer is a result or one of our errors, in time.

Each case has a deadline, runs no code of its input (a canary that no input may touch) and raises nothing but
``AtollError`` or ``LookupError``; a command exits with a documented code and shows no traceback.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import atoll as sky
from atoll.cli.main import main
from atoll.core.errors import AtollError
from atoll.tasks import launches, record
from atoll.tasks.entrypoint import load_tasks
from atoll.tasks.jobs import Job
from atoll.tasks.rows import JobRow
from atoll.tasks.spec import ClusterSpec, JobSpec, JobStatus
from atoll.tasks.variables import read_env_file

DEADLINE_S = 20  # of one case; none takes a tenth of it on an idle machine
CODES = {0, 2, 100, 101, 102, 103}
FEW, MANY = 60, 1500
sizes = pytest.mark.parametrize(
    "num_cases", [FEW, pytest.param(MANY, marks=[pytest.mark.long, pytest.mark.timeout(900)])]
)

VALUES: list[Any] = [
    *(
        5,
        -1,
        0,
        10**9,
        10**30,
        1.5,
        float("nan"),
        float("inf"),
        True,
        None,
        "",
        "x",
        "no",
        "\0",
        "\ud800",
        b"x",
        "~/../..",
        "-x",
    ),
    *(
        [],
        ["a"],
        [1],
        [["a"]],
        [None],
        (),
        set(),
        {},
        {"a": 1},
        {1: 2},
        {"a": {"b": []}},
        object(),
        len,
        "s3://b/c",
        "a" * 10_000,
    ),
]
TASK = """name: train
num_nodes: 2
workdir: .
resources: {cpus: 4+, memory: 32, accelerators: "L4:2", infra: local, ports: [8080, 9000-9010], autostop: 10m,
  any_of: [{accelerators: A100:8}, {accelerators: H100:8}], job_recovery: {max_restarts_on_errors: 3}}
envs: {LR: 0.1, NAME: &a x, FLAG: yes, ZIP: 010, LATER: *a}
secrets: [TOKEN]
file_mounts: {~/data: ., /mnt/x: {source: ".", mode: COPY}}
setup: |
  echo setup
run: |
  torchrun --nnodes 2 train.py
"""
YAML_PIECES = [
    "&a ",
    "*a",
    "<<: *a",
    "!!int ''",
    "!!python/object/apply:os.system [touch canary]",
    "? [a]\n: b",
    "---\n",
    "|",
    ">-",
    "{",
    "[",
    "\t",
    "#",
    "%YAML 9",
    "010",
    "1:30",
    "null",
    "~",
    ".nan",
    "0x",
    "99999999999999999999",
    "'",
    '"',
    "\x00",
    "\x85",
    "é",
    "[" * 200,
    "$(touch canary)",
    "`touch canary`",
]
RECIPE = """name = "r"
[model]
layers = 2
dim = 64
heads = 4
tied = true
[data]
path = "x.txt"
tokenizer = "bytes"
shuffle = true
[train]
steps = "2ep"
seed = 3
[optimizer]
betas = [0.9, 0.95]
lr = 3e-4
[schedule]
warmup = 10
[parallel]
tensor = -1
"""
TOML_PIECES = [
    "true",
    "'yes'",
    "999999999",
    "-1",
    "1e400",
    "nan",
    "[]",
    "{}",
    "[[",
    "= =",
    "1979-05-27",
    '"""',
    "\x00",
    "0x1F",
    "'2ep'",
    "[a.b]\n",
    '"bpe:0"',
    "9" * 5000,
]
COMMANDS = [
    ["launch", "task.yaml", "--dryrun", "-c", "c", "--num-nodes", "2", "--env", "A=1", "--gpus", "L4:1"],
    ["exec", "c", "--dryrun", "echo", "hi"],
    ["status", "-o", "json"],
    ["queue", "c"],
    ["logs", "c", "1", "--tail", "5", "--no-follow"],
    ["cancel", "c", "1"],
    ["autostop", "c", "-i", "5"],
    ["down", "c"],
    ["train", "recipe.toml", "--dryrun", "--gpus", "L4", "--nproc", "1", "--train.steps", "3"],
    ["recipes", "show", "llama3_8b"],
]
WORDS = [
    "--",
    "-",
    "--num-nodes",
    "0",
    "-1",
    "999999999999",
    "nan",
    "",
    " ",
    "\udcff",
    "--env",
    "=",
    "A",
    "--gpus",
    "L4:0",
    "L4:99999",
    "x" * 3000,
    "../../etc",
    "/dev/zero",
    "/dev/null",
    "--infra",
    "ssh/",
    "slurm/x",
    "-o",
    "xml",
    "--cpus",
    "1e9",
    "--sweep",
    "A=1,2",
    "--model.layers",
    "true",
    "--help",
]


class Late(BaseException):
    """A case took longer than its deadline."""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A state folder and a current folder, in which no case may leave a canary."""
    monkeypatch.setenv("ATOLL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")

    def late(*_: object) -> None:
        raise Late

    before = signal.signal(signal.SIGALRM, late)
    yield tmp_path
    signal.signal(signal.SIGALRM, before)
    assert not list(tmp_path.rglob("canary")), "code of an input ran"


def checked(what: object, call: Callable[[], object]) -> None:
    """Calls it; fails where it raises something else than our errors, or is late."""
    signal.alarm(DEADLINE_S)
    try:
        call()
    except (AtollError, LookupError) as error:
        if type(error) in (KeyError, IndexError):
            raise AssertionError(f"{type(error).__name__}: {what!r}") from error
        if not str(error):
            raise AssertionError(f"an error without words: {what!r}") from error
    except (Late, Exception, RecursionError) as error:
        raise AssertionError(f"{type(error).__name__}: {error}: {what!r:.3000}") from error
    finally:
        signal.alarm(0)


def mutated(text: str, pieces: list[str], chance: random.Random) -> str:
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(text) + 1)
        upto = min(len(text), at + chance.choice([0, 0, 1, 3, 12]))
        lines = text.splitlines(keepends=True)
        match chance.randrange(4):
            case 0:
                text = text[:at] + chance.choice(pieces) + text[upto:]
            case 1 if lines:
                line = chance.randrange(len(lines))
                key, sep, _ = lines[line].partition(chance.choice([":", "="]))
                lines[line] = f"{key}{sep} {chance.choice(pieces)}\n"
                text = "".join(lines)
            case 2 if lines:
                line = chance.randrange(len(lines))
                text = "".join(lines[:line] + [lines[line]] * chance.randint(0, 3) + lines[line + 1 :])
            case _:
                text = text[:at] + text[upto:]
    return text


@sizes
def test_task_files(place: Path, num_cases: int) -> None:
    chance = random.Random(1)
    for _ in range(num_cases):
        text = mutated(TASK, YAML_PIECES, chance)
        Path("task.yaml").write_bytes(text.encode(errors="surrogateescape"))
        checked(text, lambda: load_tasks(Path("task.yaml"), {}))


@sizes
def test_env_files(place: Path, num_cases: int) -> None:
    chance = random.Random(2)
    for _ in range(num_cases):
        text = mutated(
            "A=1\nexport B='two'\n# c\nC=\"x\\n$A\"\n",
            ["=", "'", '"', "\\", "\x00", "$(touch canary)", "é", "1A=2\n"],
            chance,
        )
        Path(".env").write_text(text)
        checked(text, lambda: read_env_file(".env"))


@sizes
def test_recipes(place: Path, num_cases: int) -> None:
    from atoll.train.recipe.load import load_recipe

    chance = random.Random(3)
    for _ in range(num_cases):
        text = mutated(RECIPE, TOML_PIECES, chance)
        Path("recipe.toml").write_text(text)
        checked(text, lambda: load_recipe("recipe.toml"))


@sizes
def test_state_folders(place: Path, num_cases: int) -> None:
    chance = random.Random(4)
    folder = place / "home" / "clusters" / "c"
    folder.mkdir(parents=True)
    cluster = ClusterSpec("c", created_s=1.0).to_json()
    job = JobRow(1, "n", "t", "u", JobSpec(run="true"), JobStatus.PENDING, "", None, 1.0).to_json()
    plain = [
        each
        for each in VALUES
        if not isinstance(each, (bytes, set, tuple)) and type(each) is not object and not callable(each)
    ]
    for _ in range(num_cases):
        broken = dict(cluster)
        for key in chance.sample(list(broken), chance.randint(1, 3)):
            broken[key] = chance.choice(plain)
        text = json.dumps(broken, default=str)
        (folder / record.RECORD).write_text(text if chance.random() < 0.9 else text[: chance.randrange(len(text))])
        checked(text, lambda: record.load(folder))
        checked(text, lambda: sky.status("c"))
        spec = {**job["spec"], chance.choice(list(job["spec"])): chance.choice(plain)}
        with contextlib.suppress(TypeError, AttributeError, ValueError):  # which the store tells as damaged
            row = JobRow.from_json({**job, "spec": spec})
            assert 1 <= row.spec.num_nodes <= 4096


@sizes
def test_python_calls(place: Path, num_cases: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "launch", lambda *_, **__: [Job("c", 1)])
    task = sky.Task(run="true")
    targets: list[tuple[Any, dict[str, Any]]] = [
        *(
            (each, {})
            for each in (sky.Task, sky.Resources, sky.Local, sky.Image, sky.ComputePool, sky.compute, sky.gather)
        ),
        *((each, {"task": task, "cluster_name": "c"}) for each in (sky.launch, sky.exec)),
        *(
            (each, {"cluster_name": "c"})
            for each in (sky.queue, sky.cancel, sky.stop, sky.start, sky.down, sky.tail_logs)
        ),
        (sky.autostop, {"cluster_name": "c", "idle_minutes": 1}),
        (sky.SSH, {"hosts": ["a"]}),
        (sky.status, {}),
        (sky.result, {"job_id": "x"}),
        (sky.report, {"metrics": {}}),
        (sky.shard, {}),
        (sky.DistributedSampler, {"dataset": [1, 2]}),
        (sky.NVIDIA.A100, {}),
        (sky.Task.from_yaml, {"path": "none.yaml"}),
        (sky.Task.from_yaml_config, {"config": {}}),
        (task.set_resources, {}),
        (task.update_envs, {}),
        (task.update_secrets, {}),
    ]
    cases = [
        (function, base, each, value)
        for function, base in targets
        for each in inspect.signature(function).parameters.values()
        for value in VALUES
        if each.kind is not each.VAR_KEYWORD
    ]
    for function, base, each, value in random.Random(5).sample(cases, min(num_cases * 4, len(cases))):
        by_place = each.kind in (each.VAR_POSITIONAL, each.POSITIONAL_ONLY)
        args, kwargs = ((value,), base) if by_place else ((), {**base, each.name: value})
        checked((function, each.name, value), lambda f=function, a=args, k=kwargs: f(*a, **k))


@sizes
def test_command_lines(place: Path, num_cases: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import atoll.train.dryrun  # noqa: F401 - torch takes seconds once, of nobody's deadline

    chance = random.Random(6)
    Path("task.yaml").write_text("run: true\n")
    Path("recipe.toml").write_text(RECIPE)
    for _ in range(num_cases // 3):
        words = list(chance.choice(COMMANDS))
        for _ in range(chance.randint(1, 3)):
            at = chance.randrange(1, len(words) + 1)
            words[at : at + chance.randint(0, 1)] = [chance.choice(WORDS)]
        if words[0] in ("launch", "exec", "train") and "--dryrun" not in words:
            words.insert(1, "--dryrun")  # nothing is started
        if "--" in words[: words.index("--dryrun") if "--dryrun" in words else 0]:
            continue
        monkeypatch.setattr(sys, "argv", ["atoll", *words])
        out, err = io.StringIO(), io.StringIO()

        def run(words: list[str] = words, out: io.StringIO = out, err: io.StringIO = err) -> None:
            try:
                with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                    main()
                code: object = 0
            except SystemExit as end:
                code = end.code or 0
            assert code in CODES, (code, err.getvalue())
            assert "Traceback" not in out.getvalue() + err.getvalue()

        checked(words, run)
    assert not list((place / "home").glob("clusters/*/jobs*")), "something was started"
