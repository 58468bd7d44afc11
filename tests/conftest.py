"""Every test runs under the watch of ``leaks.py``, with its own TMPDIR, ATOLL_HOME and one thread a process."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from tests.pools import home, mode, pool  # noqa: F401 - fixtures for every folder

import leaks

# A shell without job control starts what it puts in the background with Ctrl-C ignored, and children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes tells of the machine. The same examples each time: no commit fails for another's.
settings.register_profile("atoll", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("atoll")

_TMP_ROOT = "ATOLL_TEST_TMPROOT"
_folder = pytest.StashKey[Path]()


def pytest_configure(config: pytest.Config) -> None:
    """Runs in each xdist worker too, before anything is collected."""
    # Folders of a controller, its workers and a nested pytest lie side by side: unix sockets allow 107 bytes of path.
    root = os.environ.setdefault(_TMP_ROOT, tempfile.gettempdir())
    folder = Path(tempfile.mkdtemp(prefix="at-", dir=root))
    config.stash[_folder] = folder
    watch = leaks.start_session(folder)
    os.environ[leaks.TAG] = watch.tag
    os.environ["TMPDIR"] = tempfile.tempdir = str(watch.temporary)
    os.environ["ATOLL_HOME"] = str(watch.home)
    # As in a shell in which the environment of the tests is active: `python` of a job is the first on PATH.
    os.environ["PATH"] = f"{os.path.dirname(sys.executable)}:{os.environ.get('PATH', os.defpath)}"
    os.environ.pop("VIRTUAL_ENV", None)
    # tmp_path stays where pytest always has it: outlives the run where a test failed, and is not watched.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", root)
    # Two cores, several ranks: a second thread in each only slows all of them.
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["MPLBACKEND"] = "Agg"
    # Nothing is fetched from a hub, and nothing read from the developer's own cache.
    os.environ["HF_HOME"] = str(folder / "hf")
    os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"


def pytest_unconfigure(config: pytest.Config) -> None:
    folder = config.stash.get(_folder, None)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def _nothing_left_by_session() -> Iterator[None]:
    if os.path.exists("/dev/nvidiactl"):
        import torch

        torch.cuda.is_available()  # the driver keeps pipes from the first question on, also where it shows no GPU
    yield from _watched("the session's fixtures")


@pytest.fixture(scope="module", autouse=True)
def _nothing_left_by_module(_nothing_left_by_session: None) -> Iterator[None]:
    yield from _watched("the module's fixtures, or its tests together,")


@pytest.fixture(autouse=True)
def _nothing_left_by_test(request: pytest.FixtureRequest, _nothing_left_by_module: None) -> Iterator[None]:
    if request.node.get_closest_marker("leaks_per_module"):
        yield
        return
    yield from _watched("the test")


def _watched(who: str) -> Iterator[None]:
    before = leaks.session().snapshot()
    yield
    left = leaks.session().check(before)
    if left:
        pytest.fail(f"{who} left behind:\n" + "\n".join(f"  {line}" for line in left), pytrace=False)


# ------------------------------------------------------------- what libraries keep for the life of a process
@pytest.fixture(scope="session")
def torch_in_process() -> None:
    """For tests that make a process group in the pytest process itself: torch keeps its first Gloo device for good.

    Making one group here, once, tells that residue from what such a test leaves behind.
    """
    with leaks.keep():
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
        torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def cuda_in_process() -> None:
    """For tests that use GPUs in the pytest process itself: CUDA keeps descriptors and threads for good."""
    with leaks.keep():
        import torch

        for number in range(torch.cuda.device_count()):
            x = torch.ones(8, 8).pin_memory().to(f"cuda:{number}").requires_grad_()
            (x @ x).sum().backward()


@pytest.fixture(scope="session")
def jupyter_in_process() -> None:
    """For tests that run notebooks: ZeroMQ keeps its first context for good."""
    with leaks.keep(), tempfile.TemporaryDirectory() as folder:
        import nbclient
        import nbformat
        from traitlets.config import Config

        config = Config({"KernelManager": {"transport": "ipc", "connection_file": f"{folder}/k.json"}})
        cell = nbformat.v4.new_code_cell("1")
        nbclient.NotebookClient(nbformat.v4.new_notebook(cells=[cell]), config=config).execute()
