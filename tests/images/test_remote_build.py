"""Images on hosts of the testbed: built once by the host's own pip, with wheels from here where it has no index."""

from __future__ import annotations

import os
import sys
import zipfile
from pathlib import Path

import pytest
from tests.wheels import make_wheel

import atoll as sky
from atoll.core.errors import ConfigError, ImageError
from testbed.fixtures import MakeBed, bed, make_bed
from testbed.hosts import Testbed

__all__ = ["bed", "make_bed"]
BOTH = ["h1", "h2"]


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where pip of this machine finds packages; hosts don't see it."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def own_index(bed: Testbed) -> Path:
    """A folder that pip of the hosts takes for its index; their home is shared."""
    home = bed.folder / "home" / "sky"
    (home / ".config/pip").mkdir(parents=True)
    (home / ".config/pip/pip.conf").write_text("[global]\nno-index = true\nfind-links = /home/sky/index\n")
    (home / "index").mkdir()
    return home / "index"


def version_of(name: str) -> tuple[str, str]:
    import importlib
    import socket

    module = importlib.import_module(name)
    return socket.gethostname(), module.__version__


def test_packages_come_from_the_index_of_the_hosts_and_once(bed: Testbed, capfd: pytest.CaptureFixture[str]) -> None:
    there = own_index(bed)
    make_wheel(there, "atoll_r_top", "1.5", requires=["atoll_r_below"])
    make_wheel(there, "atoll_r_below", "2.0")
    image = sky.Image(pip=["atoll_r_top"], constraints=["atoll_r_below<3"], env={"WORD": "here"})
    with sky.ComputePool(sky.SSH(BOTH), image=image) as pool:
        assert pool.run(version_of, "atoll_r_top") == [("h1", "1.5"), ("h2", "1.5")]
        assert pool.run(version_of, "atoll_r_below") == [("h1", "2.0"), ("h2", "2.0")]
        assert pool.run(os.getenv, "WORD") == ["here"] * 2
    said = capfd.readouterr().err
    assert "installing atoll-r-below 2.0, atoll-r-top 1.5" in said
    assert said.count("installed 2 packages in") == 1  # their home is shared: one builds, the other waits
    assert "preflight: 2 hosts OK" in said
    for gone in there.iterdir():
        gone.unlink()
    with sky.ComputePool(sky.SSH(BOTH), image=image) as pool:
        assert pool.run(version_of, "atoll_r_top") == [("h1", "1.5"), ("h2", "1.5")]
    assert capfd.readouterr().err == ""
    left = [path.name for path in (bed.folder / "home/sky/.atoll/images").iterdir() if path.name.startswith(".")]
    assert left == [".lock"]


@pytest.mark.long
def test_wheels_are_sent_to_hosts_without_a_network(
    make_bed: MakeBed, index: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    make_bed(2, shared_home=False)
    make_wheel(index, "atoll_r_sent", "3.1", requires=["atoll_r_deep"])
    make_wheel(index, "atoll_r_deep", "0.4")
    for _ in range(2):
        with sky.ComputePool(sky.SSH(BOTH), pip=["atoll_r_sent"]) as pool:
            assert pool.run(version_of, "atoll_r_sent") == [("h1", "3.1"), ("h2", "3.1")]
            assert pool.run(version_of, "atoll_r_deep") == [("h1", "0.4"), ("h2", "0.4")]
    said = capfd.readouterr().err
    assert said.count("here: downloading wheels of atoll_r_sent") == 1
    for host in BOTH:
        assert said.count(f"{host}: no package index can be reached from there: wheels are sent") == 1


@pytest.mark.long
def test_a_wheel_of_this_machine_is_sent_and_again_when_it_changed(bed: Testbed, index: Path, tmp_path: Path) -> None:
    own_index(bed)
    path = make_wheel(tmp_path, "atoll_r_mine", "1.0")
    with sky.ComputePool(sky.SSH(BOTH), pip=[str(path)]) as pool:
        assert pool.run(version_of, "atoll_r_mine") == [("h1", "1.0"), ("h2", "1.0")]
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("atoll_r_more.py", "__version__ = 'more'\n")
    with sky.ComputePool(sky.SSH("h1"), pip=[str(path)]) as pool:
        assert pool.run(version_of, "atoll_r_more") == [("h1", "more")]


@pytest.mark.long
def test_what_can_not_be_installed_is_told_with_the_host(bed: Testbed, index: Path) -> None:
    own_index(bed)
    with pytest.raises(ImageError, match=r"(?s)^h1, h2: pip could not install 'atoll_r_none'.*Check the name"):
        sky.ComputePool(sky.SSH(BOTH), pip=["atoll_r_none"]).up()
    with pytest.raises(ImageError, match=r"h1: .*not installed on this machine: no-such-tool"):
        sky.ComputePool(sky.SSH("h1"), image=sky.Image(apt=["no-such-tool"])).up()
    with pytest.raises(ConfigError, match=r"-r requirements.txt.*uv export"):
        sky.ComputePool(sky.SSH("h1"), pip=["-r requirements.txt"])
    with pytest.raises(ConfigError, match=r'Image\(python="3.19"\): this process runs Python 3'):
        sky.ComputePool(sky.SSH("h1"), image=sky.Image(python="3.19")).up()


@pytest.mark.long
def test_the_python_of_this_process_is_looked_for_on_hosts_with_another(bed: Testbed) -> None:
    other = "/root/.pyenv/versions/3.12.1/bin/python3"
    if not os.path.exists(other) or sys.version_info[:2] == (3, 12):
        pytest.skip(f"needs {other}, and another Python here")
    there = own_index(bed)
    import cloudpickle  # as the driver has it

    make_wheel(there, "cloudpickle", cloudpickle.__version__)
    own = f"{sys.version_info.major}.{sys.version_info.minor}"

    def whoami() -> tuple[int, ...]:
        return tuple(sys.version_info[:2])

    with sky.ComputePool(sky.SSH("h1", python=other), image=sky.Image(python=own)) as pool:
        assert pool.run(whoami) == [sys.version_info[:2]]
