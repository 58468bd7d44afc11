"""``file_mounts``: what is accepted, where it lands, and that it is what the source has."""

from __future__ import annotations

import functools
import http.server
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from atoll.core.errors import ConfigError, ProvisionError
from atoll.providers.base import TARGETS
from atoll.tasks import clusters
from atoll.tasks.requests import Options, task_request
from atoll.tasks.spec import ClusterSpec
from atoll.tasks.sync.mounts import place, resolve_mounts
from atoll.tasks.sync.send import Progress
from atoll.tasks.sync.task_files import check_sources, ship
from atoll.tasks.task import Task


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of the first node of the local cluster ``c``."""
    monkeypatch.setenv("ATOLL_HOME", str(tmp_path / "atoll"))
    home = clusters.node_home("c", 0)
    home.mkdir(parents=True)
    return home


@pytest.fixture
def not_below_tmp() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def bucket() -> Iterator[str]:
    system = fsspec.filesystem("memory")
    system.pipe({"/bucket/data/a.txt": b"1", "/bucket/data/deep/b.txt": b"22", "/bucket/other": b"3"})
    yield "memory://bucket"
    system.rm("/bucket", recursive=True)


def put(target: str, value: object, *, num_nodes: int = 1, progress: Progress | None = None) -> list[str]:
    lines: list[str] = []
    cluster = ClusterSpec("c", num_nodes=num_nodes)
    ship(cluster, None, {target: value}, say=lines.append, progress=progress)
    return lines


# ------------------------------------------------------------------------------------------------ where it goes
@pytest.mark.parametrize(
    ("target", "at", "link"),
    [
        ("~/data", "home/data", None),
        ("~/a/b.txt", "home/a/b.txt", None),
        ("data/x", "home/sky_workdir/data/x", None),
        ("/tmp/x", "home/.atoll-mounts/tmp/x", "/tmp/x"),
        ("/h/home/x", "home/x", None),
        ("/data/x", "home/.atoll-mounts/data/x", "/data/x"),
    ],
)
def test_where_a_target_lies(target, at, link):
    assert place(target, "/h/home", "/h/home/sky_workdir") == (f"/h/{at}", link)


def test_folders_and_files_of_this_machine(tmp_path, home, monkeypatch):
    source = tmp_path / "src"
    (source / "deep").mkdir(parents=True)
    (source / "deep/a").write_text("1")
    (source / "run.sh").write_text("x")
    (source / "run.sh").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    assert put("~/all", "src") == []
    assert put("~/.config/one.sh", str(source / "run.sh")) == []
    assert put("rel", f"file://{source}/deep") == []
    assert put("/tmp/t", "src/deep") == []
    assert (home / "all/deep/a").read_text() == "1"
    assert os.access(home / ".config/one.sh", os.X_OK)
    assert (home / "sky_workdir/rel/a").read_text() == "1"
    assert (home / ".atoll-mounts/tmp/t/a").read_text() == "1"

    (source / "deep/a").unlink()
    (source / "deep/c").write_text("3")
    (home / "all/deep/result").write_text("job")
    put("~/all", "src")
    assert sorted(os.listdir(home / "all/deep")) == ["c", "result"]


def test_a_target_outside_of_home_is_noted_for_the_node(tmp_path, home, not_below_tmp):
    source, outside = tmp_path / "file", not_below_tmp
    source.write_text("1")
    for text in ("1", "22"):
        source.write_text(text)
        assert put(f"{outside}/deep/file", str(source)) == []
    at = home / f".atoll-mounts{outside}/deep/file"
    assert at.read_text() == "22"
    assert json.loads((home.parent / TARGETS).read_text()) == {f"{outside}/deep/file": str(at)}
    assert not any(outside.iterdir())  # of the machine itself nothing is changed


# ----------------------------------------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    ("target", "value", "message"),
    [
        ("~/data/", ".", r"file_mounts.~/data/: a target has no / at its end: write ~/data"),
        ("~/../x", ".", r"file_mounts.~/../x: expected ~/NAME"),
        ("~", ".", r"file_mounts.~: expected ~/NAME"),
        ("~other/x", ".", r"file_mounts.~other/x: expected ~/NAME"),
        ("", ".", r"file_mounts.: expected a path"),
        ("/usr", ".", r"file_mounts./usr: a node can't do without its own /usr: choose a folder in it, or ~/NAME"),
        ("/lib64", ".", r"file_mounts./lib64: a node can't do without its own /lib64"),
        ("/", ".", r"file_mounts./: a target has no / at its end"),
        ("~/sky_workdir", ".", r"that is where the workdir goes"),
        (
            "~/d",
            "no/such/place",
            r"file_mounts.~/d: no/such/place is not on this machine \(looked for /.*no/such/place\)",
        ),
        ("~/d", 3, r"file_mounts.~/d: 3: expected a path of this machine, or a URL"),
        ("~/d", {"source": "no/such"}, r"file_mounts.~/d: no/such is not on this machine"),
    ],
)
def test_what_cannot_be_is_named(target, value, message):
    with pytest.raises(ConfigError, match=message):
        resolve_mounts({target: value}, workdir=True)


def test_the_workdirs_place_is_free_where_there_is_none(tmp_path):
    assert resolve_mounts({"~/sky_workdir": str(tmp_path)})[0].source == str(tmp_path)


def test_a_node_that_cannot_be_written(tmp_path, home):
    (home / "file").touch()
    with pytest.raises(ProvisionError, match="could not be written"):
        put("~/file/x", str(tmp_path))
    with pytest.raises(ProvisionError, match="could not be written"):
        put("~/file/x", {"name": "bucket"})


# --------------------------------------------------------------------------------------------------------- URLs
def test_a_folder_of_a_bucket(home, bucket):
    progress: list[tuple[int, int]] = []
    storage = {"source": f"{bucket}/data", "mode": "COPY"}
    assert put("~/data", storage, progress=lambda *each: progress.append(each)) == []
    assert (home / "data/a.txt").read_text() == "1"
    assert (home / "data/deep/b.txt").read_text() == "22"
    assert progress[-1] == (3, 3)

    inode = (home / "data/a.txt").stat().st_ino
    system = fsspec.filesystem("memory")
    system.rm("/bucket/data/deep/b.txt")
    system.pipe("/bucket/data/c.txt", b"4")
    (home / "data/result").write_text("job")
    put("~/data", storage)
    assert sorted(path.name for path in (home / "data").iterdir()) == ["a.txt", "c.txt", "result"]
    assert (home / "data/a.txt").stat().st_ino == inode
    system.pipe("/bucket/data/a.txt", b"9")
    put("~/data", storage)
    assert (home / "data/a.txt").read_text() == "9"


def test_a_single_object_and_several_sources(home, bucket):
    assert put("~/one.txt", f"{bucket}/other") == []
    assert (home / "one.txt").read_text() == "3"
    put("~/both", {"source": [f"{bucket}/other", f"{bucket}/data"], "mode": "MOUNT_CACHED"})
    assert (home / "both/other").read_text() == "3"
    assert (home / "both/data/a.txt").read_text() == "1"


def test_a_bucket_without_a_source_is_an_empty_folder(home):
    assert put("/tmp/out", {"name": "results", "mode": "MOUNT", "store": "s3"}) == [
        "file_mounts./tmp/out: an empty folder that stays on its node: it has no source"
    ]
    assert (home / ".atoll-mounts/tmp/out").is_dir()


def test_nothing_there_and_schemes_that_nobody_knows(home, bucket):
    with pytest.raises(ConfigError, match=r"file_mounts.~/d: memory://bucket/none: there is nothing at this address"):
        put("~/d", f"{bucket}/none")
    with pytest.raises(ConfigError, match=r"file_mounts.~/d: s33://b: unknown scheme 's33': did you mean 's3'"):
        put("~/d", "s33://b")


def test_a_missing_package_is_named(home):
    with pytest.raises(ConfigError, match=r'gs:// needs a package that is not installed: pip install "atoll\[gcs\]"'):
        put("~/d", "gs://bucket/x")


def test_fetched_once_for_several_nodes(home, bucket, monkeypatch):
    opened: list[str] = []
    system = fsspec.filesystem("memory")
    real = type(system)._open

    def counted(self: object, path: str, *args: object, **how: object) -> object:
        opened.append(path)
        return real(self, path, *args, **how)

    monkeypatch.setattr(type(system), "_open", counted)
    put("~/data", f"{bucket}/data", num_nodes=2)
    for node in range(2):
        assert (clusters.node_home("c", node) / "data/deep/b.txt").read_text() == "22"
    assert sorted(opened) == ["/bucket/data/a.txt", "/bucket/data/deep/b.txt"]


def test_over_http(tmp_path, home):
    (tmp_path / "web").mkdir()
    (tmp_path / "web/f.txt").write_text("hello")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(tmp_path / "web"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            # In a process of its own: fsspec keeps a thread and connections for the life of one.
            code = (
                "import sys\nfrom atoll.tasks.spec import ClusterSpec\nfrom atoll.tasks.sync.task_files import ship\n"
                "try: ship(ClusterSpec('c'), None, {'~/f': sys.argv[1]}, say=print, progress=None)\n"
                "except Exception as error: print(type(error).__name__, error)"
            )
            address = f"http://me:hunter2@127.0.0.1:{server.server_address[1]}"
            outputs = [
                subprocess.run(
                    [sys.executable, "-c", code, f"{address}/{name}"],
                    capture_output=True,
                    text=True,
                    timeout=60,
                ).stdout.strip()
                for name in ("f.txt", "none.txt")
            ]
        finally:
            server.shutdown()
            thread.join()
    assert outputs[0] == ""
    assert (home / "f").read_text() == "hello"
    assert outputs[1].startswith("ConfigError file_mounts.~/f: http://****@127.0.0.1:")
    assert outputs[1].endswith("/none.txt: there is nothing at this address")


def test_variables_in_mounts_are_replaced_once(tmp_path: Path) -> None:
    (tmp_path / "$B").mkdir()
    task = Task(run="true", envs={"A": "$B", "B": "another"}, file_mounts={"~/data": f"{tmp_path}/$A"})
    mounts = task_request(task, Options()).mounts
    assert mounts == {"~/data": f"{tmp_path}/$B"}
    check_sources(None, mounts)  # which is there


def test_a_device_is_no_source_in_a_dry_run_either() -> None:
    with pytest.raises(ConfigError, match=r"file_mounts.~/d: /dev/null is a device, a pipe or a socket"):
        resolve_mounts({"~/d": "/dev/null"})


@pytest.mark.parametrize(
    ("workdir", "mounts", "said"),
    [
        (None, {"~/d": "s4://bucket/x"}, "unknown scheme 's4': expected s3"),
        ({"url": "--upload-pack=x"}, {}, "workdir: url '--upload-pack=x': expected https"),
        ({"url": "https://host/x", "ref": "a b"}, {}, "workdir: ref 'a b': expected a branch"),
    ],
)
def test_a_dry_run_refuses_what_the_run_would(workdir: object, mounts: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_sources(workdir, mounts)  # type: ignore[arg-type]
