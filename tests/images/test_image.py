"""Images on this machine: what is there is used, what is missing is built once, by real pip from real wheels."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
import zipfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
from tests.wheels import make_wheel

import atoll as sky
from atoll.cli.app import app
from atoll.core.errors import ConfigError, ImageError
from atoll.core.paths import atoll_home, write_atomic
from atoll.images.built_images import built_images, prune_images
from atoll.images.image import Image
from atoll.images.installer import Pip
from atoll.images.interpreters import running_interpreter
from atoll.images.overlay import Environment
from atoll.images.requirements import merge, without_cuda
from atoll.images.resolve import resolve

SRC = Path(__file__).parents[2] / "src"
MINOR = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ATOLL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where installers find packages."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    for name in [name for name in os.environ if name.startswith("PIP_") and name != "PIP_CONFIG_FILE"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("UV_FIND_LINKS", str(folder))
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv-cache"))
    return folder


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Command lines of the processes started since."""
    commands: list[list[str]] = []
    real = subprocess.Popen.__init__

    def note(self: subprocess.Popen[str], args: list[str], *rest: object, **options: object) -> None:
        commands.append([str(arg) for arg in args])
        real(self, args, *rest, **options)  # type: ignore[call-overload]  # passed through unchanged

    monkeypatch.setattr(subprocess.Popen, "__init__", note)
    return commands


def seen_by_ranks(environment: Environment, code: str) -> str:
    """What ``code`` prints in a fresh process started as a rank would be."""
    variables = {**os.environ, **environment.env, "PYTHONPATH": os.pathsep.join(environment.paths)}
    answer = subprocess.run([environment.python, "-c", code], env=variables, capture_output=True, text=True, check=True)
    return answer.stdout.strip()


def leftovers(home: Path) -> list[str]:
    """What a finished or failed build must not leave: half-built folders and temporary files."""
    return [path.name for path in (home / "images").iterdir() if path.name.startswith(".build-") or ".tmp" in path.name]


# ------------------------------------------------------------------------------------------------- what can be said


def test_an_image_takes_lists_strings_and_plain_values() -> None:
    image = Image(pip="torch", apt=["ffmpeg"], env={"A": 1, "B": True, "C": False, "D": 0.5}, constraints=["numpy<3 "])
    assert image.pip == ("torch",)
    assert image.env == {"A": "1", "B": "1", "C": "0", "D": "0.5"}
    assert image.constraints == ("numpy<3",)
    assert Image(python="auto") == Image()
    assert hash(image) == hash(dataclasses.replace(image))
    assert pickle.loads(pickle.dumps(image)) == image


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Image(pip=["torch numpy"]), "torch numpy"),
        (lambda: Image(pip=["-r requirements.txt"]), "option of pip"),
        (lambda: Image(pip=["./no/such/folder"]), "does not exist"),
        (lambda: Image(pip=[""]), "non-empty"),
        (lambda: Image(pip=[3]), "got 3"),  # type: ignore[list-item]  # the mistake under test
        (lambda: Image(pip={"torch": 1}), "list of strings"),  # type: ignore[arg-type]  # the mistake under test
        (lambda: Image(python="3"), "in quotes"),
        (lambda: Image(python=3.12), "in quotes"),  # type: ignore[arg-type]  # the mistake under test
        (lambda: Image(python="3.8"), "3.11 or newer"),
        (lambda: Image(env={"A=B": "1"}), "A=B"),
        (lambda: Image(env={"A": None}), "NoneType"),  # type: ignore[dict-item]  # the mistake under test
        (lambda: Image(env=["A"]), "dict"),  # type: ignore[arg-type]  # the mistake under test
        (lambda: Image(apt=["No Package"]), "No Package"),
    ],
)
def test_a_value_that_cannot_work_is_refused_by_name(make: Callable[[], Image], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make()


def test_a_refused_variable_does_not_show_its_value() -> None:
    with pytest.raises(ConfigError) as caught:
        Image(env={"MY_TOKEN": ["hunter2"]})  # type: ignore[dict-item]  # the mistake under test
    assert "hunter2" not in str(caught.value)


# ------------------------------------------------------------------------------------------- nothing to be installed


def test_an_empty_image_is_the_running_interpreter(home: Path, started: list[list[str]]) -> None:
    environment = resolve(Image(), has_gpu=False)
    assert environment == Environment(sys.executable, (), {}, ())
    assert not started
    assert not home.exists(), "no state is made for nothing"


def test_what_the_environment_satisfies_is_not_installed(home: Path, started: list[list[str]]) -> None:
    wanted = ["pytest>=7", "cloudpickle", "pytest", "nosuchthing; sys_platform == 'win32'"]
    assert resolve(Image(pip=wanted), has_gpu=True) == Environment(sys.executable, (), {}, ())
    started.clear()
    assert resolve(Image(pip=wanted), has_gpu=True) == Environment(sys.executable, (), {}, ())
    assert not started, "pip is asked once"
    assert not built_images()


def test_variables_of_the_pool_win(home: Path) -> None:
    environment = resolve(Image(env={"A": "image", "B": 1}), env={"A": "pool", "C": True}, has_gpu=False)
    assert environment.env == {"A": "pool", "B": "1", "C": "1"}


def test_a_pool_requirement_replaces_the_images_of_that_project() -> None:
    assert merge(["Foo.Bar>=1", "foo-bar<3", "baz"], ["foo_bar[x]==2"]) == ["baz", "foo_bar[x]==2"]


# --------------------------------------------------------------------------------------------- what is missing is built


def test_a_missing_package_is_built_once_with_its_dependencies(
    home: Path, wheels: Path, started: list[list[str]]
) -> None:
    make_wheel(wheels, "atoll_t_top", "1.0", requires=["atoll_t_leaf>=1", "cloudpickle"])
    make_wheel(wheels, "atoll_t_leaf", "1.2")
    told: list[str] = []
    first = resolve(Image(pip=["atoll-t-top"]), has_gpu=False, progress=told.append)
    code = "import atoll_t_top, atoll_t_leaf; print(atoll_t_top.__version__, atoll_t_leaf.__version__)"
    assert seen_by_ranks(first, code) == "1.0 1.2"
    assert first.python == sys.executable
    assert first.lines == ()
    assert any("installing atoll-t-leaf 1.2, atoll-t-top 1.0" in line for line in told)
    (packages,) = map(Path, first.paths)
    assert home in packages.parents
    assert not list(packages.glob("cloudpickle*")), "what the environment has is not installed again"

    started.clear()
    told.clear()
    assert resolve(Image(pip=["atoll-t-top"]), has_gpu=False, progress=told.append) == first
    assert not started
    assert not told
    assert leftovers(home) == []
    # Another wording of the same packages is the same folder.
    assert resolve(Image(), pip=["atoll-t-top==1.0"], has_gpu=False).paths == first.paths


def test_an_extra_that_is_missing_is_added_and_its_package_is_not(home: Path, wheels: Path) -> None:
    own = version("cloudpickle")
    make_wheel(wheels, "cloudpickle", own, requires=["atoll_t_extra; extra == 'more'"], extras=["more"])
    make_wheel(wheels, "atoll_t_user", "1.0", requires=["atoll_t_extra; extra == 'more'"], extras=["more"])
    make_wheel(wheels, "atoll_t_extra", "3.0")
    environment = resolve(Image(pip=["atoll_t_user[more]", f"cloudpickle=={own}"]), has_gpu=False)
    assert sorted(path.name for path in Path(environment.paths[0]).glob("*.py")) == [
        "atoll_t_extra.py",
        "atoll_t_user.py",
    ]


def test_another_version_than_the_environments_hides_it_and_says_so(home: Path, wheels: Path) -> None:
    make_wheel(wheels, "cloudpickle", "99.0")
    environment = resolve(Image(pip=["cloudpickle>=99"]), has_gpu=False)
    assert seen_by_ranks(environment, "import cloudpickle; print(cloudpickle.__version__)") == "99.0"
    own = version("cloudpickle")
    assert environment.lines == (
        f"ranks see other versions than {sys.executable} has: cloudpickle 99.0 (installed: {own})",
    )
    assert resolve(Image(pip=["cloudpickle>=99"]), has_gpu=False) == environment, "the line comes each time"


@pytest.mark.parametrize("how", ["lines", "file", "variable"])
@pytest.mark.long
def test_constraints_hold(home: Path, wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    for number in ("1.0", "2.0"):
        make_wheel(wheels, "atoll_t_pin", number)
    limits = tmp_path / "limits.txt"
    limits.write_text("# what the lab agreed on\natoll_t_pin<2  # for now\n")
    image = Image(pip=["atoll_t_pin"], constraints={"lines": ["atoll_t_pin<2"], "file": limits, "variable": None}[how])
    if how == "variable":
        monkeypatch.setenv("PIP_CONSTRAINT", str(limits))
    held = resolve(image, has_gpu=False)
    assert seen_by_ranks(held, "import atoll_t_pin; print(atoll_t_pin.__version__)") == "1.0"
    if how != "lines":  # the content counts, not the name of the file
        limits.write_text("atoll_t_pin>1\n")
        freed = resolve(image, has_gpu=False)
        assert seen_by_ranks(freed, "import atoll_t_pin; print(atoll_t_pin.__version__)") == "2.0"


def test_a_constraint_that_the_environment_breaks_counts(home: Path, wheels: Path) -> None:
    make_wheel(wheels, "cloudpickle", "1.0")
    environment = resolve(Image(pip=["cloudpickle"], constraints=["cloudpickle<2"]), has_gpu=False)
    assert seen_by_ranks(environment, "import cloudpickle; print(cloudpickle.__version__)") == "1.0"


def test_a_constraints_file_that_is_not_there_is_named(home: Path) -> None:
    with pytest.raises(ConfigError, match=r"no-such\.txt"):
        resolve(Image(pip=["pytest"], constraints="no-such.txt"), has_gpu=False)


@pytest.mark.long
def test_a_changed_local_package_is_built_again(home: Path, wheels: Path, tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    wheel = make_wheel(folder, "atoll_t_local", "1.0")
    first = resolve(Image(pip=[str(wheel)]), has_gpu=False)
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("atoll_t_added.py", "")
    second = resolve(Image(pip=[str(wheel)]), has_gpu=False)
    assert first.paths != second.paths
    seen_by_ranks(second, "import atoll_t_local, atoll_t_added")


@pytest.mark.long
def test_a_repository_is_built_at_the_commit_that_was_found(
    home: Path, wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "repository"
    (repository / "sub").mkdir(parents=True)
    wheel = make_wheel(repository / "sub", "atoll_t_repo", "1.0")
    (repository / "sub" / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    (repository / "sub" / "backend.py").write_text(
        f"import shutil\nname = {wheel.name!r}\n"
        "def build_wheel(folder, *rest):\n    shutil.copy(name, folder)\n    return name\n"
    )
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)  # it may sign commits, or have hooks
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    git = ["git", "-C", str(repository), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "one"]):
        subprocess.run([*git, *command], check=True)
    asked = f"git+file://{repository}#subdirectory=sub"
    environment = resolve(Image(pip=[asked]), has_gpu=False)
    assert seen_by_ranks(environment, "import atoll_t_repo; print(atoll_t_repo.__version__)") == "1.0"


@pytest.mark.long
def test_images_go_when_nobody_uses_them(home: Path, wheels: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = {}
    for name in ("atoll_t_old", "atoll_t_new", "atoll_t_held"):
        make_wheel(wheels, name, "1.0")
        folders[name] = Path(resolve(Image(pip=[name]), has_gpu=False).paths[0]).parent
    for age_days, name in ((40, "atoll_t_old"), (40, "atoll_t_held"), (1, "atoll_t_new")):
        os.utime(folders[name] / "image.json", (time.time() - age_days * 86400,) * 2)
    assert app(["images", "ls"], standalone_mode=False) is None
    listed = capsys.readouterr().out
    assert all(f"{name.replace('_', '-')}==1.0" in listed for name in folders), listed
    with open(folders["atoll_t_held"] / "image.json", "rb+") as marker:
        fcntl.flock(marker, fcntl.LOCK_SH)  # as a rank does
        make_wheel(wheels, "atoll_t_more", "1.0")
        resolve(Image(pip=["atoll_t_more"]), has_gpu=False)  # a build clears up
        assert not folders["atoll_t_old"].exists()
        assert folders["atoll_t_held"].exists()
    seen = built_images()
    assert app(["images", "prune"], standalone_mode=False) is None
    assert [each for each in seen if each.in_use and not each.folder.exists()] == [], "somebody else pruned meanwhile"
    assert "removed 2 images" in capsys.readouterr().out, "not the one that was built just now"
    assert len(list((home / "images").glob("*/image.json"))) == 1


def test_a_rank_holds_its_image(home: Path, wheels: Path) -> None:
    make_wheel(wheels, "atoll_t_held", "1.0")
    with sky.ComputePool(image=Image(pip=["atoll_t_held"]), logs="quiet") as pool:
        pool.run_one(int)
        (image,) = built_images()
        os.utime(image.folder / "image.json", (0, 0))
        assert built_images()[0].in_use
        assert prune_images(0.0) == []
    assert [each.folder for each in prune_images(0.0)] == [image.folder]


@pytest.mark.long
def test_variables_that_send_pip_elsewhere_are_ignored(
    home: Path, wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_wheel(wheels, "atoll_t_env", "1.0")
    monkeypatch.setenv("PIP_TARGET", str(tmp_path / "wrong"))
    monkeypatch.setenv("PIP_USER", "1")
    environment = resolve(Image(pip=["atoll_t_env"]), has_gpu=False)
    assert seen_by_ranks(environment, "import atoll_t_env; print(atoll_t_env.__version__)") == "1.0"
    assert not (tmp_path / "wrong").exists()


# ------------------------------------------------------------------------------------------------------------ failures


def test_a_package_that_does_not_exist_is_named_with_what_pip_said(home: Path, wheels: Path) -> None:
    make_wheel(wheels, "atoll_t_good", "1.0")
    with pytest.raises(ImageError) as caught:
        resolve(Image(pip=["atoll_t_good", "atoll-t-absent==9"]), has_gpu=False)
    message = str(caught.value)
    assert message.startswith("pip could not install 'atoll-t-absent==9' (exit code 1)")
    assert "No matching distribution found for atoll-t-absent==9" in message
    assert "PIP_INDEX_URL or PIP_FIND_LINKS" in message
    assert leftovers(home) == []
    make_wheel(wheels, "atoll_t_absent", "9")  # the failure was not remembered
    assert resolve(Image(pip=["atoll_t_good", "atoll-t-absent==9"]), has_gpu=False).paths


def test_a_network_that_is_not_there_is_said(home: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9")  # nothing listens on the discard port
    monkeypatch.setenv("PIP_RETRIES", "1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with pytest.raises(ImageError, match="package index could not be reached"):
        resolve(Image(pip=["atoll-t-far"]), has_gpu=False)


@pytest.mark.long
def test_a_build_that_fails_halfway_leaves_nothing(home: Path, wheels: Path) -> None:
    wheel = make_wheel(wheels, "atoll_t_torn", "1.0")
    told: list[str] = []

    def tear(line: str) -> None:
        told.append(line)
        if line.startswith("installing "):  # planned; now the package vanishes from the index
            wheel.unlink()

    with pytest.raises(ImageError, match=r"atoll_t_torn==1\.0"):
        resolve(Image(pip=["atoll_t_torn"]), has_gpu=False, progress=tear)
    assert leftovers(home) == []
    assert not list((home / "images").glob("*/site-packages"))
    make_wheel(wheels, "atoll_t_torn", "1.0")
    assert resolve(Image(pip=["atoll_t_torn"]), has_gpu=False).paths


def _slow_sdist(wheels: Path, name: str, started: Path) -> None:
    """A source package whose build says that it has begun and then takes for ever."""
    import tarfile

    root = wheels.parent / f"{name}-1.0"
    root.mkdir()
    (root / "PKG-INFO").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (root / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        f'[project]\nname = "{name}"\nversion = "1.0"\n'
    )
    (root / "backend.py").write_text(
        f"import os, time\ndef build_wheel(*args):\n    open({str(started)!r}, 'w').write(str(os.getpid()))\n"
        "    time.sleep(600)\n"
    )
    with tarfile.open(wheels / f"{name}-1.0.tar.gz", "w:gz") as archive:
        archive.add(root, arcname=root.name)


def _driver(code: str) -> subprocess.Popen[str]:
    variables = {**os.environ, "PYTHONPATH": str(SRC)}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], env=variables, text=True, stdout=subprocess.PIPE
    )


def _wait_for(what: Callable[[], bool], why: str) -> None:
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline, why
        time.sleep(0.02)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


_RESOLVE_SLOW = """
    from atoll.images.image import Image
    from atoll.images.resolve import resolve
    try:
        resolve(Image(pip=["atoll_t_slow"]), has_gpu=False)
    except KeyboardInterrupt:
        print("interrupted")
"""


@pytest.mark.long
def test_ctrl_c_during_a_build_ends_it_and_leaves_nothing(home: Path, wheels: Path, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    _slow_sdist(wheels, "atoll_t_slow", begun)
    with _driver(_RESOLVE_SLOW) as driver:
        _wait_for(lambda: begun.exists() and begun.read_text() != "", "the build has not begun")
        driver.send_signal(signal.SIGINT)
        assert driver.communicate(timeout=60)[0] == "interrupted\n"
    _wait_for(lambda: not _alive(int(begun.read_text())), "the package's build still runs")
    assert leftovers(home) == []


@pytest.mark.long
def test_a_killed_driver_takes_its_installer_along_and_the_next_build_clears_up(
    home: Path, wheels: Path, tmp_path: Path
) -> None:
    begun = tmp_path / "begun"
    _slow_sdist(wheels, "atoll_t_slow", begun)
    with _driver(_RESOLVE_SLOW) as driver:
        _wait_for(lambda: begun.exists() and begun.read_text() != "", "the build has not begun")
        build = int(begun.read_text())
        pip = int(Path(f"/proc/{build}/stat").read_text().rpartition(")")[2].split()[1])
        driver.kill()
    _wait_for(lambda: not _alive(pip), "pip outlived its driver")
    _wait_for(lambda: not _alive(build), "the package's build outlived the driver")
    assert len(leftovers(home)) == 1
    make_wheel(wheels, "atoll_t_next", "1.0")
    assert resolve(Image(pip=["atoll_t_next"]), has_gpu=False).paths
    assert leftovers(home) == []


def test_two_processes_that_need_the_same_build_it_once(home: Path, wheels: Path) -> None:
    make_wheel(wheels, "atoll_t_shared", "1.0")
    code = """
        from atoll.images.image import Image
        from atoll.images.resolve import resolve
        told = []
        environment = resolve(Image(pip=["atoll_t_shared"]), has_gpu=False, progress=told.append)
        print(environment.paths[0], any(line.startswith("installing ") for line in told),
              any("building an image" in line for line in told))
    """
    drivers = [_driver(code) for _ in range(2)]
    answers = [driver.communicate(timeout=100)[0].split() for driver in drivers]
    assert [driver.returncode for driver in drivers] == [0, 0]
    assert answers[0][0] == answers[1][0]
    assert sorted(answer[1] for answer in answers) == ["False", "True"], "one builds"
    assert leftovers(home) == []


@pytest.mark.long
def test_a_second_builder_waits_and_says_so(home: Path, wheels: Path) -> None:
    make_wheel(wheels, "atoll_t_wait", "1.0")
    waiting = threading.Event()
    told: list[str] = []

    def second() -> None:
        def note(line: str) -> None:
            told.append(line)
            waiting.set()

        resolve(Image(pip=["atoll_t_wait"]), has_gpu=False, progress=note)

    other = threading.Thread(target=second)

    def hold(line: str) -> None:  # in the middle of the first build
        if other.ident is None:
            other.start()
            assert waiting.wait(60)

    first = resolve(Image(pip=["atoll_t_wait"]), has_gpu=False, progress=hold)
    other.join(60)
    assert told[0] == f"process {os.getpid()} is building an image: waiting for it"
    assert first.paths


# --------------------------------------------------------------------------------------------------------------- CUDA


@pytest.mark.parametrize(
    ("asked", "becomes"),
    [
        ("jax[cuda12]", "jax"),
        ("jax[cuda13]>=0.6", "jax>=0.6"),
        ("jax[cuda12-local]", "jax"),
        ("jax[cuda12_pip,k8s]==0.7; python_version > '3'", 'jax[k8s]==0.7; python_version > "3"'),
        ("tensorflow[and-cuda]", "tensorflow"),
        ("onnxruntime-gpu>=1.20", "onnxruntime>=1.20"),
        ("jax[k8s]", "jax[k8s]"),
        ("cupy-cuda12x", "cupy-cuda12x"),  # there is no CPU package of it
        ("torch", "torch"),
        ("https://example.org/jax.whl", "https://example.org/jax.whl"),
    ],
)
def test_without_a_gpu_a_cuda_extra_becomes_the_cpu_package(asked: str, becomes: str) -> None:
    lines = [] if asked == becomes else [f"{asked} → {becomes}: this node has no GPU"]
    assert without_cuda([asked]) == ([becomes], lines)


@pytest.mark.long
def test_the_cuda_extra_is_installed_where_there_is_a_gpu_and_not_elsewhere(home: Path, wheels: Path) -> None:
    make_wheel(wheels, "jax", "99.0", requires=["atoll_t_cuda; extra == 'cuda12'"], extras=["cuda12"])
    make_wheel(wheels, "atoll_t_cuda", "1.0")
    code = "import importlib.util, jax; print(jax.__version__, bool(importlib.util.find_spec('atoll_t_cuda')))"
    plain = resolve(Image(pip=["jax[cuda12]>=99"]), has_gpu=False)
    assert seen_by_ranks(plain, code) == "99.0 False"
    assert plain.lines[0] == "jax[cuda12]>=99 → jax>=99: this node has no GPU"
    full = resolve(Image(pip=["jax[cuda12]>=99"]), has_gpu=True)
    assert seen_by_ranks(full, code) == "99.0 True"
    assert "this node has no GPU" not in " ".join(full.lines)


# ----------------------------------------------------------------------------------------------- installers and Pythons


@pytest.mark.long
def test_an_interpreter_without_pip_uses_the_one_that_python_ships(wheels: Path, tmp_path: Path) -> None:
    make_wheel(wheels, "atoll_t_bare", "1.0", requires=["atoll_t_dep; extra == 'x'"], extras=["x"])
    for number in ("1.0", "2.0"):
        make_wheel(wheels, "atoll_t_dep", number)
    python = str(tmp_path / "venv" / "bin" / "python")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    pip = Pip(python, tmp_path, lambda line: None, ["atoll_t_dep<2"])
    pins = pip.plan(["atoll_t_bare[x]"])
    assert [(pin.name, pin.version) for pin in pins] == [("atoll-t-bare", "1.0"), ("atoll-t-dep", "1.0")]
    pip.install(pins, tmp_path / "site-packages")
    code = "import atoll_t_bare, atoll_t_dep; print(atoll_t_dep.__version__)"
    assert seen_by_ranks(Environment(python, (str(tmp_path / "site-packages"),), {}, ()), code) == "1.0"


def test_a_python_without_any_pip_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho\n")  # as Debian's, which comes without pip and ensurepip
    python.chmod(0o755)
    with pytest.raises(ImageError, match=r"has no pip\. Install it with .*-m ensurepip"):
        Pip(str(python), tmp_path, lambda line: None)


def test_a_python_that_belongs_to_the_system_is_only_read(tmp_path: Path) -> None:
    """Debian's pip 23.0.1 refuses a dry run too, though only folders of ours are written to."""
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\ncase $2 in -c) echo '-m pip';; *) echo Collecting $PIP_BREAK_SYSTEM_PACKAGES;; esac\n"
    )
    python.chmod(0o755)
    said: list[str] = []
    Pip(str(python), tmp_path, said.append).run([], ["x"])
    assert said == ["Collecting 1"]


def test_the_running_python_by_its_version_is_the_running_interpreter(home: Path) -> None:
    assert resolve(Image(python=MINOR), has_gpu=False).python == sys.executable


@pytest.mark.long
def test_another_python_gets_an_environment_with_cloudpickle_and_the_packages(
    home: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another version is hardly ever at hand in CI: this interpreter stands for one by being asked for in its place."""
    make_wheel(wheels, "atoll_t_other", "1.0")
    make_wheel(wheels, "cloudpickle", version("cloudpickle"))
    own = running_interpreter()
    for user in ("overlay", "resolve"):
        other = dataclasses.replace(own, version="3.99.0")
        monkeypatch.setattr(f"atoll.images.{user}.running_interpreter", lambda other=other: other)
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "no-pyenv"))
    programs = tmp_path / "programs"
    programs.mkdir()
    broken = programs / f"python{MINOR}"  # such as a pyenv shim of a version that is not switched on
    broken.write_text("#!/bin/sh\nexit 127\n")
    broken.chmod(0o755)
    real = tmp_path / "real"
    real.mkdir()
    (real / f"python{MINOR}").symlink_to(os.path.realpath(sys.executable))
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{real}{os.pathsep}/usr/bin:/bin")
    environment = resolve(Image(python=MINOR, pip=["atoll_t_other"]), has_gpu=False)
    assert home in Path(environment.python).parents
    assert seen_by_ranks(environment, "import atoll_t_other, cloudpickle; print(cloudpickle.__version__)") == version(
        "cloudpickle"
    )
    code = "import importlib.util; print(importlib.util.find_spec('pytest'))"
    assert seen_by_ranks(environment, code) == "None", "it has nothing of the driver's environment"
    assert resolve(Image(python=MINOR, pip=["atoll_t_other"]), has_gpu=False) == environment
    assert leftovers(home) == []


def test_a_python_that_is_nowhere_is_an_error_that_says_how_to_get_it(home: Path) -> None:
    with pytest.raises(ImageError, match=r"no Python 3\.97 .*uv python install 3\.97"):
        resolve(Image(python="3.97"), has_gpu=False)


# ------------------------------------------------------------------------------------------------- apt= and includes=


@pytest.fixture
def dpkg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ``dpkg-query`` that knows two packages, so that the tests hold on systems other than Debian too."""
    folder = tmp_path / "dpkg"
    folder.mkdir()
    program = folder / "dpkg-query"
    program.write_text(
        "#!/bin/sh\nprintf 'installed bash 5.2-1\\ninstalled libc6:amd64 2.36\\nnot-installed gone \\n'\nexit 1\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.usefixtures("dpkg")
def test_debian_packages_that_are_there_are_fine(home: Path) -> None:
    assert resolve(Image(apt=["bash", "libc6", "bash=5.2-1"]), has_gpu=False).python == sys.executable


@pytest.mark.usefixtures("dpkg")
def test_debian_packages_that_are_missing_are_named_with_the_line_to_run(home: Path) -> None:
    with pytest.raises(ImageError, match=r"apt-get install ffmpeg gone bash=4$"):
        resolve(Image(apt=["bash", "ffmpeg", "gone", "bash=4"]), has_gpu=False)


def test_includes_become_importable(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "atoll_t_single.py").write_text("")
    (tmp_path / "two" / "atoll_t_package").mkdir(parents=True)
    (tmp_path / "two" / "atoll_t_package" / "__init__.py").write_text("")
    (tmp_path / "three").mkdir()
    (tmp_path / "three" / "atoll_t_named.py").write_text("")
    (tmp_path / "four").mkdir()
    (tmp_path / "four" / "atoll_t_within.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "three"))
    includes = [
        "one/atoll_t_single.py",
        tmp_path / "two" / "atoll_t_package",
        "atoll_t_named",
        "four",
        "json",
        "pytest",
    ]
    environment = resolve(Image(includes=includes), has_gpu=False)
    assert list(environment.paths) == [str(tmp_path / name) for name in ("one", "two", "three", "four")]
    seen_by_ranks(environment, "import atoll_t_single, atoll_t_package, atoll_t_named, atoll_t_within")


@pytest.mark.parametrize("entry", ["atoll_t_nowhere", "no/such/folder", "data.csv"])
def test_an_include_that_is_not_there_is_named(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.csv").write_text("")
    with pytest.raises(ConfigError, match=entry):
        resolve(Image(includes=[entry]), has_gpu=False)


# -------------------------------------------------------------------------------------------------------- core/paths.py


def test_the_state_folder_is_private(home: Path) -> None:
    assert atoll_home() == home
    assert home.stat().st_mode & 0o777 == 0o700


def test_an_atomic_write_replaces_the_whole_and_leaves_no_temporary(tmp_path: Path) -> None:
    target = tmp_path / "state.json"
    write_atomic(target, b"old")
    write_atomic(str(target), b"new", mode=0o644)
    assert target.read_bytes() == b"new"
    assert target.stat().st_mode & 0o777 == 0o644
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        write_atomic(tmp_path / "folder", b"cannot replace a folder")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "state.json"]
