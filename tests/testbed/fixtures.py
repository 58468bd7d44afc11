"""Hosts as fixtures: ``from testbed.fixtures import bed, make_bed`` in a test module or its conftest."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from atoll.providers.ssh.connection import connections
from local_cluster import until, wait_until_idle
from testbed.hosts import Testbed, missing

MakeBed = Callable[..., Testbed]


@pytest.fixture
def make_bed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeBed]:
    """Starts hosts, ``make_bed(2, shared_home=False)``; ``ssh`` of this process and its children reaches them."""
    lacking = missing()
    if lacking is not None:
        pytest.skip(lacking)
    home = Path(tempfile.mkdtemp(prefix="ah-"))  # short, as paths of Unix sockets have to be
    monkeypatch.setenv("ATOLL_HOME", str(home))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    with contextlib.ExitStack() as ends:
        ends.callback(until, lambda: _removed(home), f"the end of {home}")

        def let_end() -> None:
            for folder in (home / "clusters").glob("*"):  # after their last job supervisors here still log out
                wait_until_idle(folder)
            connections.close_idle()

        def make(num_hosts: int, *, shared_home: bool = True, delay_ms: float | None = None) -> Testbed:
            folder = tmp_path / f"bed{num_hosts}"
            folder.mkdir()
            bed = ends.enter_context(Testbed.start(num_hosts, folder, shared_home=shared_home, delay_ms=delay_ms))
            ends.callback(let_end)  # before the hosts end
            for name, value in bed.environ.items():
                monkeypatch.setenv(name, value)
            return bed

        yield make
    assert not os.path.exists(tmp_path / "bed2" / "state" / "h1" / "root"), "a mount of a host is seen outside"


def _removed(folder: Path) -> bool:
    """Remove it, beside logins that end by themselves and take their sockets out of it."""
    shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()


@pytest.fixture
def bed(make_bed: MakeBed) -> Testbed:
    """Two hosts, h1 and h2, with a shared home."""
    return make_bed(2)
