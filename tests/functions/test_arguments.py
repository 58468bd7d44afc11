"""What people give wrong: each is refused where it is written, with what was expected and the next step."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import atoll as sky
from atoll.core.paths import current_folder
from atoll.core.secrets import digest_credentials, is_secret, redact, shown_variable
from atoll.core.validation import check_seconds
from atoll.images.installer import Pip, _location
from atoll.images.requirements import check_requirement
from atoll.images.resolve import resolve

pytestmark = pytest.mark.leaks_per_module
SOURCE_ROOT = str(Path(sky.__file__).resolve().parents[1])


@sky.compute
def f(value: Any = None) -> Any:
    return value


# -- a pool's arguments ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"provider": 2}, ["provider=2", "sky.Local()", "nodes=2"]),
        ({"provider": True}, ["provider=True", "sky.Local()"]),
        ({"provider": "cloud"}, ["provider='cloud'", "sky.Local()"]),
        ({"provider": sky.Local}, ["provider=Local", "call it", "sky.Local()"]),
        ({"image": "torch"}, ["image='torch'", "sky.Image(pip=['torch'])"]),
        ({"image": ["torch", "numpy"]}, ["sky.Image(pip=['torch', 'numpy'])"]),
        ({"image": 3}, ["image=3", "sky.Image(pip=['torch'])"]),
        ({"image": sky.Image}, ["call it", "sky.Image("]),
        ({"pip": 5}, ["pip=", "list of strings", "5"]),
        ({"env": "A=1"}, ["env=", "{'A': '1'}", "str"]),
        ({"env": 5}, ["env=", "{'A': '1'}", "5"]),
        ({"env": [1]}, ["env=", "{'A': '1'}", "list"]),
        ({"env": {"A": None}}, ["env=", "A is None", "leave it out"]),
        ({"on_event": 5}, ["on_event=5", "function"]),
        ({"logs": 5}, ["logs=5", "'quiet'", "callable"]),
        ({"workers_per_node": [2]}, ["workers_per_node=[2]", "'auto'"]),
    ],
    ids=str,
)
def test_a_wrong_value_is_refused_where_it_is_written(arguments: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(sky.ConfigError) as refused:
        sky.ComputePool(**arguments)
    assert [word for word in words if word not in str(refused.value)] == []


def test_a_number_in_the_place_of_the_provider_is_taken_for_nodes() -> None:
    with pytest.raises(sky.ConfigError, match="nodes are given as nodes=2"):
        sky.ComputePool(2)


def test_a_variable_that_may_be_secret_is_not_in_the_message() -> None:
    with pytest.raises(sky.ConfigError) as refused:
        sky.ComputePool(env="TOKEN=hunter2")
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("name", ["timeout", "ttl", "hang_timeout", "idle"])
@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e18, 10**400, 0, -1, True, "5"], ids=str)
def test_seconds_are_finite(name: str, value: Any) -> None:
    with pytest.raises(sky.ConfigError, match=f"{name}=.*at most 10 years"):
        sky.ComputePool(name="p", **{name: value})
    assert check_seconds(name, 10 * 365 * 86400) == 315360000.0
    assert check_seconds(name, None) is None


@pytest.mark.parametrize("value", ["no", 0, None], ids=str)
def test_text_is_no_truth_value(value: Any, pool: sky.ComputePool) -> None:
    for name, use in {
        "simulate": lambda: sky.Local(simulate=value),
        "everywhere": lambda: pool.submit(plain, 1, everywhere=value),
        "detach": lambda: pool.submit(plain, 1, detach=value),
        "ordered": lambda: pool.map(plain, [1], ordered=value),
        "sharded": lambda: sky.report({}, sharded=value),
    }.items():
        with pytest.raises(sky.ConfigError, match=f"{name}=.*True or False"):
            use()


@pytest.mark.parametrize("value", [float("inf"), "x", 0], ids=str)
def test_the_timeouts_of_decorators_are_checked_too(value: Any) -> None:
    with pytest.raises(sky.ConfigError, match="timeout="):
        sky.compute(timeout=value)
    with pytest.raises(sky.ConfigError, match="timeout="):
        sky.integrations.torch(timeout=value)


def run(code: str, cwd: Path) -> str:
    """What a process of its own prints, run in a folder that it can remove."""
    env = {**os.environ, "PYTHONPATH": SOURCE_ROOT}
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_folder_that_is_gone_is_said(tmp_path: Path) -> None:
    code = (
        "import os, atoll as sky\n"
        "os.rmdir(os.getcwd())\n"
        "try:\n    sky.ComputePool().up()\n"
        "except sky.ConfigError as error:\n    print(error)\n"
    )
    folder = tmp_path / "gone"
    folder.mkdir()
    said = run(code, folder)
    assert "the current folder is gone" in said
    assert "os.chdir" in said
    assert current_folder() == os.getcwd()


def test_odd_entries_of_the_import_path_break_no_call(pool: sky.ComputePool, monkeypatch: pytest.MonkeyPatch) -> None:
    odd: list[Any] = [7, None, Path("/odd/entry")]
    monkeypatch.setattr(sys, "path", [*sys.path, *odd])
    for used in (pool, sky.ComputePool(logs="quiet")):  # one that is up before, and one that starts with them
        with used if used is not pool else contextlib.nullcontext():
            path = used.run_one(lambda: list(sys.path))
            assert "/odd/entry" in path
            assert all(isinstance(entry, str) for entry in path)


def test_a_folder_that_goes_away_later_is_left_out_of_the_import_path(tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "from atoll.functions.import_path import _here, absolute\n"
        "sys.path[:1] = ['', 'relative']\n"  # -c has put '' there
        "before = absolute(_here())\n"
        "assert before[:2] == (os.getcwd(), os.path.abspath('relative'))\n"
        "os.rmdir(os.getcwd())\n"
        "print(absolute(_here()) == before[2:])\n"
    )
    folder = tmp_path / "gone"
    folder.mkdir()
    assert run(code, folder).strip() == "True"


# -- unknown keyword arguments -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sky.ComputePool(gpu="L4"), r"ComputePool\(\) has no argument 'gpu': did you mean 'gpus'\?"),
        (lambda: sky.ComputePool(node=2), r"ComputePool\(\) has no argument 'node': did you mean 'nodes'\?"),
        (lambda: sky.compute(retry=2), r"compute\(\) has no argument 'retry': did you mean 'retries'\?"),
        (lambda: sky.gather(streams=True), r"gather\(\) has no argument 'streams': did you mean 'stream'\?"),
        (lambda: sky.shard([1], shufle=True), r"shard\(\) has no argument 'shufle': did you mean 'shuffle'\?"),
        (
            lambda: sky.DistributedSampler([1], seeds=1),
            r"DistributedSampler\(\) has no .*'seeds': did you mean 'seed'\?",
        ),
        (lambda: sky.integrations.torch(backends="gloo"), r"torch\(\) has no .*did you mean 'backend'\?"),
        (lambda: sky.integrations.transformers(backends="gloo"), r"transformers\(\) has no .*did you mean 'backend'\?"),
        (lambda: sky.Image(pips=["x"]), r"Image\(\) has no argument 'pips': did you mean 'pip'\?"),
        (lambda: sky.Local(simulated=True), r"Local\(\) has no argument 'simulated': did you mean 'simulate'\?"),
        (lambda: sky.Local(zzz=1), r"Local\(\) has no argument 'zzz': it takes simulate"),
        (lambda: sky.compute(function=print), r"compute\(\) has no argument 'function': it takes retries, timeout"),
    ],
)
def test_an_unknown_argument_suggests_the_nearest(call: Callable[[], object], message: str) -> None:
    with pytest.raises(sky.UsageError, match=message):
        call()
    with pytest.raises(TypeError):  # what Python raises for it, so that code that expects that goes on to work
        call()


def test_signatures_stay_as_they_are() -> None:
    import inspect

    assert list(inspect.signature(sky.ComputePool).parameters)[:2] == ["provider", "nodes"]
    assert list(inspect.signature(sky.Local).parameters) == ["simulate", "make_slices"]
    assert pickle.loads(pickle.dumps(sky.Image(pip=["a"]))) == sky.Image(pip=["a"])


# -- integrations ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "meant"), [("pytorch", "torch"), ("jaxx", "jax"), ("transformer", "transformers")])
def test_an_integration_that_is_not_there_is_explained(name: str, meant: str) -> None:
    with pytest.raises(AttributeError, match=f"did you mean '{meant}'"):
        getattr(sky.integrations, name)
    assert not hasattr(sky.integrations, "__wrapped__")


@pytest.mark.parametrize(
    ("backend", "hint"),
    [
        ("nxcl", "did you mean 'nccl'"),
        ("x", "not known"),
        ("cpu:glo,cuda:nccl", "'gloo'"),
        ("gloo,nccl", "cpu:gloo"),
        (5, "'nccl'"),
    ],
)
def test_a_backend_is_checked_where_it_is_written(backend: Any, hint: str) -> None:
    with pytest.raises(sky.ConfigError, match=hint) as refused:
        sky.integrations.torch(backend=backend)
    assert f"backend={backend!r}" in str(refused.value)


@pytest.mark.parametrize(("backend", "hint"), [("jacks", "'jax'"), ("numpy", "trains over several"), (5, "'jax'")])
def test_a_backend_of_keras_is_checked_too(backend: Any, hint: str) -> None:
    with pytest.raises(sky.ConfigError, match=hint) as refused:
        sky.integrations.keras(backend=backend)
    assert f"backend={backend!r}" in str(refused.value)
    with pytest.raises(sky.UsageError, match="name of the argument"):
        sky.integrations.keras("jax")
    assert sky.integrations.keras(plain)(3) == sky.integrations.tensorflow()(plain)(3) == 3


@pytest.mark.parametrize("backend", ["nccl", "gloo", "mpi", "ucc", "xccl", "GLOO", "cpu:gloo,cuda:nccl", None])
def test_a_backend_that_torch_knows_is_taken(backend: str | None) -> None:
    assert sky.integrations.torch(backend=backend)(plain)(3) == 3


def plain(value: Any) -> Any:
    return value


# -- pending calls; warnings are errors here, so one on top of a refusal would fail ------------------------------------
POOL = sky.ComputePool()


@pytest.mark.parametrize(
    "misuse",
    [
        lambda: f(1) | POOL,
        lambda: f(1) << POOL,
        lambda: f(1) > POOL,
        lambda: f(1) < POOL,
        lambda: f(1) >= POOL,
        lambda: f(1) <= POOL,
        lambda: POOL << f(1),
        lambda: POOL | f(1),
        lambda: POOL > f(1),  # noqa: SIM300 - this side is the mistake
        lambda: (f(1) & f(2)) | POOL,
        lambda: POOL << (f(1) & f(2)),
    ],
)
def test_an_operator_that_dispatches_nothing_shows_the_right_ones(misuse: Callable[[], object]) -> None:
    with pytest.raises(sky.UsageError) as refused:
        misuse()
    assert ">> pool` for one rank" in str(refused.value)
    assert "@ pool` for every rank" in str(refused.value)


@pytest.mark.parametrize(
    ("misuse", "words"),
    [
        (lambda: f(2).local, "f.local(...) runs it here"),
        (lambda: f(2).result(), "f(...) >> pool"),
        (lambda: f(2).shape, "dispatch it first: `f(...) >> pool`"),
    ],
)
def test_an_attribute_of_the_result_says_that_there_is_none_yet(misuse: Callable[[], object], words: str) -> None:
    with pytest.raises(AttributeError) as refused:
        misuse()
    assert "f(...) is a pending call" in str(refused.value)
    assert words in str(refused.value)


def test_what_looks_at_any_object_can_look_at_a_pending_call() -> None:
    import inspect
    import pprint

    call = f(2)
    assert not hasattr(call, "__len__")
    assert not hasattr(call, "_repr_html_")
    assert not inspect.isroutine(call)
    assert pprint.pformat(call) == "f(...)"
    assert inspect.getmembers(call, inspect.ismethod)
    assert not hasattr(type(call).__new__(type(call)), "function")  # half made, as copy and pickle have it
    twin = copy.copy(call)
    assert (twin.args, twin.kwargs) == ((2,), {})
    for each in (call, twin):
        each._mark_used()


def test_looking_at_a_pending_call_is_no_use_of_it() -> None:
    call = f(2)
    hasattr(call, "__array__")
    with pytest.warns(sky.NeverDispatched):
        del call


# -- map, samplers, images ---------------------------------------------------------------------------------------------
def test_map_refuses_what_it_cannot_spread(pool: sky.ComputePool) -> None:
    wrong: list[Any] = ["x", 1.5, 0, True, 10**30]
    for chunksize in wrong:
        with pytest.raises(sky.ConfigError, match=r"chunksize=.*whole number"):
            pool.map(plain, [1], chunksize=chunksize)
    with pytest.raises(sky.UsageError, match=r"5 is int: write pool\.map\(plain, \[5\]\)"):
        pool.map(plain, 5)
    with pytest.raises(sky.UsageError, match="has not run yet"):
        pool.map(plain, f(1))
    results = pool.map(plain, range(3))
    assert repr(results) == "<results of map over plain: iterate over it>"
    assert list(results) == [0, 1, 2]


@pytest.mark.parametrize("epoch", ["x", 1.5, None], ids=str)
def test_an_epoch_is_a_whole_number(epoch: Any) -> None:
    sampler = sky.DistributedSampler([1, 2, 3])
    with pytest.raises(sky.ConfigError, match=r"set_epoch\(.*whole number"):
        sampler.set_epoch(epoch)
    assert sampler.epoch == 0


def test_constraints_that_cannot_be_read_never_pass_in_silence() -> None:
    with pytest.raises(sky.ConfigError, match=r"/nonexistent.*cannot be read"):
        resolve(sky.Image(constraints="/nonexistent"), has_gpu=False)  # with nothing to install


def test_one_debian_package_may_be_a_bare_string() -> None:
    assert sky.Image(apt="curl").apt == ("curl",)


# -- secrets -----------------------------------------------------------------------------------------------------------
SECRET = "hunter2"
URL = f"https://user:{SECRET}@127.0.0.1:9/atoll_t_far-1-py3-none-any.whl"


@pytest.mark.parametrize(
    ("text", "becomes"),
    [
        (f"see {URL} there", "see https://****@127.0.0.1:9/atoll_t_far-1-py3-none-any.whl there"),
        ("a://u@h/ and b://u:p@ss@h", "a://****@h/ and b://****@h"),
        ("https://host/a@b mail x@y", "https://host/a@b mail x@y"),
    ],
)
def test_credentials_in_urls_are_redacted(text: str, becomes: str) -> None:
    assert redact(text) == becomes


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "my_password_2", "DB_PASSWD", "GOOGLE_APPLICATION_CREDENTIALS"]
)
def test_secret_variables_are_shown_as_digests(name: str) -> None:
    assert shown_variable(name, SECRET).startswith("<secret ")
    assert shown_variable(name, SECRET) == shown_variable(name, SECRET) != shown_variable(name, "other")


def test_urls_with_passwords_are_shown_as_digests_whatever_the_name() -> None:
    assert SECRET not in shown_variable("DATABASE", URL)
    assert shown_variable("PLACE", "https://host/") == "https://host/"
    assert digest_credentials(URL) != digest_credentials(URL.replace(SECRET, "other"))
    assert SECRET not in digest_credentials(URL)
    assert SECRET not in str(sky.ComputePool(name="p", pip=[URL], image=sky.Image(pip=[URL]))._config)


@pytest.mark.parametrize("text", [f"--index-url={URL}", f"foo bar {URL}", f"{URL}\nfoo"])
def test_a_refused_requirement_is_shown_without_its_password(text: str) -> None:
    with pytest.raises(sky.ConfigError) as refused:
        check_requirement("pip=", text)
    assert SECRET not in str(refused.value)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ATOLL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return tmp_path / "home"


def command_lines() -> str:
    """What `ps` would show of every process."""
    shown = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            shown.append(entry.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:  # it ended meanwhile
            continue
    return "\n".join(shown)


def test_a_password_is_in_no_line_no_error_and_no_command_line(home: Path) -> None:
    told: list[str] = []
    seen: list[str] = []
    modes: set[int] = set()
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
            seen.append(command_lines())
            with contextlib.suppress(OSError):  # it is removed meanwhile
                modes.update(path.stat().st_mode & 0o777 for path in home.glob("images/.build-*/requirements.txt"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with pytest.raises(sky.ImageError) as refused:
            resolve(sky.Image(pip=[f"atoll-t-far @ {URL}"]), has_gpu=False, progress=told.append)
    finally:
        over.set()
        watcher.join()
    assert told
    assert "atoll-t-far" in str(refused.value)
    assert "requirements.txt" not in str(refused.value)
    assert SECRET not in "\n".join([*told, str(refused.value), *seen])
    assert any("requirements.txt" in lines for lines in seen)
    assert modes == {0o600}


def test_what_a_plan_installs_keeps_the_password_that_fetching_needs() -> None:
    bare = "https://127.0.0.1:9/atoll_t_far-1-py3-none-any.whl"
    assert _location({"url": bare}, [URL]) == URL
    assert _location({"url": bare}, ["https://u:p@elsewhere/x.whl"]) == bare


def test_the_line_of_the_requirements_file_is_left_out(tmp_path: Path) -> None:
    python = tmp_path / "python"  # says that it has pip, and is a pip that collects what it is asked for
    line = "Collecting x>=1 (from -r /a folder/.build-h/requirements.txt (line 1))"
    python.write_text(f"#!/bin/sh\ncase $2 in -c) echo '-m pip';; *) echo '{line}';; esac\n")
    python.chmod(0o755)
    said: list[str] = []
    pip = Pip(str(python), tmp_path, said.append)
    pip.run([], ["x>=1"])
    assert said == ["Collecting x>=1"]
    assert (tmp_path / "requirements.txt").read_text() == "x>=1\n"
    pip.run([], ["/a -b #c/x.whl", "https://h/x#y"])
    assert (tmp_path / "requirements.txt").read_text() == "file:///a%20-b%20%23c/x.whl\nhttps://h/x#y\n"


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        ("HF_TOKEN", "x", True),
        ("WANDB_API_KEY", "x", True),
        ("db_password", "x", True),
        ("AWS_SECRET", "x", True),
        ("DATABASE_URL", "postgres://ada:pw@host/db", True),
        ("TOKENIZERS_PARALLELISM", "false", False),
        ("HOMEPAGE", "https://host/path", False),
        ("KEYBOARD", "x", False),
        ("SECRETS", "x", True),
        ("API_KEY_2", "x", True),
        ("SSH_KEY_PATH", "x", False),
        ("GIT_URL", "ssh://git@host/path", False),
    ],
)
def test_which_variables_are_secret(name: str, value: str, secret: bool) -> None:
    assert is_secret(name, value) is secret


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"gpus": "L4:2"}, {"accelerator": "L4:2"}),
        ({"accelerators": "L4:2"}, {"accelerator": "L4:2"}),
        ({"nproc": 2}, {"workers_per_node": 2}),
        ({"nproc_per_node": 2}, {"workers_per_node": 2}),
        ({"num_nodes": 2}, {"nodes": 2}),
        ({"infra": "local"}, {"provider": sky.Local()}),
    ],
)
def test_names_of_the_command_line_are_accepted(given: dict[str, Any], expected: dict[str, Any]) -> None:
    (name,) = expected
    assert getattr(sky.ComputePool(**given), name) == getattr(sky.ComputePool(**expected), name)
    with pytest.raises(sky.ConfigError, match="two names of one setting"):
        sky.ComputePool(**given, **{name: "another"})


def test_hosts_of_an_infra_are_those_of_its_group(home: Path) -> None:
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text('[ssh.lab]\nhosts = ["a", "b:22"]\ngrace_s = 5\n')
    pool = sky.ComputePool(infra="ssh/lab")
    assert (pool.nodes, pool.provider.grace_s) == (2, 5)  # type: ignore[attr-defined]
    with pytest.raises(sky.ConfigError, match=r"ssh/none: no group of that name"):
        sky.ComputePool(infra="ssh/none")


def test_a_mistake_shows_the_line_of_the_caller_and_one_of_ours() -> None:
    with pytest.raises(sky.ConfigError) as refused:
        sky.ComputePool(gpus="H10:8")
    assert len(refused.traceback) == 2
