"""What is written aside is seen whole or not at all, and is swept once its owner is dead."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from atoll.core.paths import sweep_temporary, temporary_beside, write_atomic


def left(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


@pytest.mark.parametrize("folder", [False, True], ids=["file", "folder"])
@pytest.mark.parametrize("name", ["target", "with [brackets] and *"])
def test_what_a_dead_owner_left_is_swept_and_what_a_living_one_writes_is_not(
    tmp_path: Path, folder: bool, name: str
) -> None:
    target = tmp_path / name
    child = os.fork()
    if not child:
        with temporary_beside(target, folder=folder):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert len(left(tmp_path)) == 1
    with temporary_beside(target, folder=folder) as place:
        sweep_temporary(target)
        assert left(tmp_path) == [place.name]
        sweep_temporary(tmp_path / "*")
        assert left(tmp_path) == [place.name]
    assert left(tmp_path) == []


def test_a_write_that_fails_leaves_the_old_content_and_nothing_aside(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        write_atomic(tmp_path / "folder", b"cannot replace a folder")
    write_atomic(tmp_path / "file", b"one")
    write_atomic(tmp_path / "file", b"two", mode=0o640)
    assert (tmp_path / "file").read_bytes() == b"two"
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640
    assert left(tmp_path) == ["file", "folder"]


def test_a_folder_that_is_swept_before_it_is_locked_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where another process clears what it finds in a cache at that moment."""
    mkdir, swept = Path.mkdir, []

    def make(place: Path) -> None:
        mkdir(place)
        if not swept:
            sweep_temporary(tmp_path / "*")
            swept.append(place)

    monkeypatch.setattr(Path, "mkdir", make)
    with temporary_beside(tmp_path / "target", folder=True) as place:
        assert left(tmp_path) == [place.name]
    assert not swept[0].exists()
