"""What of a workdir travels, and how: real repositories, real files, a pipe where the host would be."""

from __future__ import annotations

import base64
import http.server
import io
import json
import os
import queue
import shutil
import socket
import subprocess
import sys
import tarfile
import threading
import tracemalloc
from pathlib import Path

import pytest

from atoll.core.errors import ConfigError, ProvisionError
from atoll.tasks.sync import receive
from atoll.tasks.sync.git import fetch_git
from atoll.tasks.sync.select import Selection, list_files, select
from atoll.tasks.sync.send import mirror
from atoll.tasks.sync.send import send as send_to

SOURCE = Path(receive.__file__).resolve().parents[3]
PROGRAM = "from atoll.tasks.sync.receive import main; sys.exit(main(sys.argv[1:]))"


@pytest.fixture(autouse=True)
def git_home(tmp_path, monkeypatch):
    """A git that knows who commits and takes submodules from paths, and nothing of the developer's own settings."""
    settings = tmp_path / "gitconfig"
    settings.write_text(
        '[user]\nname = A\nemail = a@example.org\n[protocol "file"]\nallow = always\n[init]\ndefaultBranch = main\n'
    )
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(settings))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def repository(folder: Path, files: dict[str, str], *, commit: bool = True) -> Path:
    write(folder, files)
    git(folder, "init", "-q")
    if commit:
        git(folder, "add", "-A")
        git(folder, "commit", "-q", "-m", "x")
    return folder


def tree(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): f"-> {os.readlink(path)}" if path.is_symlink() else path.read_text()
        for path in sorted(folder.rglob("*"))
        if (path.is_symlink() or path.is_file()) and ".git" not in path.relative_to(folder).parts
    }


def host(*arguments: str | Path, stream: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """The program that runs on a host, without our packages."""
    bare = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(SOURCE)!r}); {PROGRAM}"]
    return subprocess.run([*bare, *map(str, arguments)], input=stream, capture_output=True, timeout=60)


def sent(selection: Selection, dest: Path) -> list[str]:
    """As to an ssh host: two pipes, and at their other end what runs there."""
    read, wrote = os.pipe()
    asked: queue.SimpleQueue[list[str]] = queue.SimpleQueue()

    def host() -> None:
        with open(read, "rb") as stream:
            receive.receive(stream, dest, lambda said: asked.put(json.loads(json.dumps(said))))

    thread = threading.Thread(target=host)
    thread.start()
    with open(wrote, "wb") as stream:
        notes = send_to(selection, stream, lambda: asked.get(timeout=60))
    thread.join(60)
    return notes


def send(source: Path, dest: Path) -> list[str]:
    return sent(select(source), dest)


def copy(source: Path, dest: Path) -> list[str]:
    return mirror(source, dest)


both_ways = pytest.mark.parametrize("carry", [copy, send], ids=["mirror", "tar"])


# ------------------------------------------------------------------------------------------------- what travels
def test_gitignore_as_git_reads_it(tmp_path):
    source = repository(
        tmp_path / "src",
        {
            ".gitignore": "dataset/*\n/build\n!keep.txt\n*.log\n",
            "a.py": "",
            "build/x": "",
            "sub/build/x": "",
            "dataset/big": "",
            "dataset/keep.txt": "",
            "b.log": "",
        },
    )
    write(source, {"new.py": "", "gone.py": ""})
    git(source, "add", "gone.py")
    (source / "gone.py").unlink()
    travels = {".gitignore", "a.py", "sub/build/x", "dataset/keep.txt", "new.py"}
    assert {entry.path for entry in select(source).entries} == travels
    assert set(list_files(source)) == travels | {"gone.py"}  # as git says; there is nothing to copy


def test_a_subfolder_of_a_work_tree(tmp_path):
    source = repository(
        tmp_path / "src", {".gitignore": "/sub/no\n*.log\n", "sub/a": "", "sub/no": "", "sub/b.log": ""}
    )
    assert list_files(source / "sub") == ["a"]


def test_a_folder_that_its_repository_ignores_travels_whole(tmp_path):
    source = repository(tmp_path / "src", {".gitignore": "out/\n", "a": "", "out/x": "", "out/.gitignore": "x\n"})
    assert sorted(list_files(source / "out")) == [".gitignore", "x"]


def test_submodules_and_repositories_inside(tmp_path):
    library = repository(tmp_path / "library", {"lib.py": "", ".gitignore": "*.o\n"})
    source = repository(tmp_path / "src", {"a.py": ""})
    git(source, "submodule", "add", "-q", str(library), "vendored")
    git(source, "commit", "-qm", "sub")
    write(source, {"vendored/x.o": "", "vendored/new.py": ""})
    repository(source / "nested", {"n.py": ""})
    expected = {
        ".gitmodules",
        "a.py",
        "nested/n.py",
        *(f"vendored/{each}" for each in ("lib.py", "new.py", ".gitignore")),
    }
    assert set(list_files(source)) == expected
    bare = tmp_path / "clone"
    git(tmp_path, "clone", "-q", str(source), str(bare))
    notes: list[str] = []
    assert set(list_files(bare, notes.append)) == {".gitmodules", "a.py"}
    assert "git submodule update --init" in notes[0]


def test_an_unmerged_file_is_listed_once(tmp_path):
    source = repository(tmp_path / "src", {"a": "1"})
    git(source, "checkout", "-q", "-b", "other")
    write(source, {"a": "2"})
    git(source, "commit", "-qam", "2")
    git(source, "checkout", "-q", "main")
    write(source, {"a": "3"})
    git(source, "commit", "-qam", "3")
    subprocess.run(["git", "merge", "-q", "other"], cwd=source, capture_output=True)
    assert list_files(source) == ["a"]


def test_a_hook_of_another_repository_is_not_followed(tmp_path, monkeypatch):
    other = repository(tmp_path / "other", {"o": ""})
    source = repository(tmp_path / "src", {"a": ""})
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other / ".git/index"))
    assert list_files(source) == ["a"]


RULES = "/build\ndata/*\n!data/keep.txt\n*.log\n:odd\n"
FILES = {"build/x": "", "sub/build/x": "", "data/big": "", "data/keep.txt": "", "b.log": "", ":odd": "", "a b\nc": ""}


@pytest.mark.parametrize("inside_git", [True, False])
def test_skyignore_replaces_gitignore(tmp_path, inside_git):
    source = write(
        tmp_path / "src", {**FILES, ".gitignore": "*.py\n", ".skyignore": RULES, "a.py": "", "sub/.gitignore": "x"}
    )
    if inside_git:
        repository(source, {})
        repository(source / "nested", {"n.log": "", "build/y": ""})
    more = {"nested/build/y"} if inside_git else set()
    expected = {".gitignore", ".skyignore", "a.py", "sub/build/x", "sub/.gitignore", "data/keep.txt", "a b\nc"}
    assert set(list_files(source)) == expected | more


def test_outside_of_git_environments_stay(tmp_path):
    source = write(
        tmp_path / "src",
        {"a.py": "", ".venv/pyvenv.cfg": "", ".venv/lib/x": "", "pkg/__pycache__/a.pyc": "", ".git/x": ""},
    )
    (source / "empty/inner").mkdir(parents=True)
    notes: list[str] = []
    assert sorted(list_files(source, notes.append)) == ["a.py", "empty/inner/"]
    assert notes == ["not copied; setup recreates them on the node if needed: .venv/, pkg/__pycache__/"]
    mirror(source, tmp_path / "dest")
    assert (tmp_path / "dest/empty/inner").is_dir()


def test_secrets_that_travel_are_named_outside_of_git(tmp_path):
    source = write(tmp_path / "src", {".env": "TOKEN=x", "a/.env": "TOKEN=y", "a/.envrc": "", "b.py": ""})
    notes: list[str] = []
    assert sorted(list_files(source, notes.append)) == [".env", "a/.env", "a/.envrc", "b.py"]
    assert notes == ["copied too: .env, a/.env; list it in .skyignore to keep it here"]
    write(source, {".skyignore": ".env\n"})
    assert sorted(list_files(source, notes.append)) == [".skyignore", "a/.envrc", "b.py"]
    assert len(notes) == 1


def test_without_git_all_is_copied_and_that_is_said(tmp_path, monkeypatch):
    source = repository(tmp_path / "src", {"a": "", "b": "", ".gitignore": "b\n"}, commit=False)
    ours = tmp_path / "plain"
    shutil.copytree(source, ours, ignore=shutil.ignore_patterns(".git"))
    (ours / ".skyignore").write_text("a")
    monkeypatch.setenv("PATH", str(tmp_path))
    seen = select(source)
    assert [entry.path for entry in seen.entries] == [".gitignore", "a", "b"]
    assert "git is not installed" in seen.notes[0]
    assert ([entry.path for entry in select(ours).entries], select(ours).notes) == (
        [".gitignore", ".skyignore", "b"],
        (),
    )


def test_odd_names_links_and_what_is_no_file(tmp_path):
    source = tmp_path / "src"
    source.mkdir()
    git(source, "init", "-q")
    odd = [b"line\nbreak", b"two  spaces ", b"\xff\xfe", "ü".encode(), b"-rf", b":(top)x"]
    for name in odd:
        Path(os.fsdecode(os.path.join(os.fsencode(source), name))).write_bytes(name)
    (source / "empty").touch()
    for name, target in {"in": "empty", "dangling": "nowhere", "out": "../elsewhere", "root": "/etc"}.items():
        (source / name).symlink_to(target)
    os.mkfifo(source / "fifo")
    here = os.getcwd()
    os.chdir(source)
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind("sock")
    finally:
        os.chdir(here)
    for carry, dest in ((copy, tmp_path / "copied"), (send, tmp_path / "sent")):
        carry(source, dest)
        names = set(os.listdir(os.fsencode(dest)))
        assert names == {*odd, b"empty", b"in", b"dangling", b"out", b"root"}
        assert os.readlink(dest / "dangling") == "nowhere"
        for name in odd:
            assert Path(os.fsdecode(os.path.join(os.fsencode(dest), name))).read_bytes() == name
    notes = " | ".join(select(source).notes)
    assert "links that point out of the folder are copied as links: out -> ../elsewhere, root -> /etc" in notes
    assert "in ->" not in notes
    # git itself lists neither; outside of git they are named.
    shutil.rmtree(source / ".git")
    assert "not copied, neither files nor links: fifo, sock" in select(source).notes


@pytest.mark.parametrize("in_git", [True, False])
def test_atolls_own_folder_does_not_travel(tmp_path, monkeypatch, in_git):
    source = write(tmp_path / "src", {"a": "", ".atoll/clusters/x/home/sky_workdir/a": "", ".atolls": ""})
    if in_git:
        git(source, "init", "-q")
    monkeypatch.setenv("ATOLL_HOME", str(source / ".atoll"))
    assert sorted(entry.path for entry in select(source).entries) == [".atolls", "a"]


def test_what_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="nowhere: No such file"):
        select(tmp_path / "nowhere")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user to whom files can be closed")
@pytest.mark.parametrize("closed", ["secret.txt", "folder"])
@pytest.mark.parametrize("in_git", [True, False])
def test_what_may_not_be_read_is_named(tmp_path, closed, in_git):
    source = write(tmp_path / "src", {"a": "", "secret.txt": "", "folder/x": ""})
    if in_git:
        git(source, "init", "-q")
    for folder, _, files in os.walk(source):
        for name in (folder, *(os.path.join(folder, each) for each in files)):
            os.chown(name, 65534, 65534)
    (source / closed).chmod(0)
    (tmp_path / "dest").mkdir()
    os.chown(tmp_path / "dest", 65534, 65534)
    code = (
        "import os, sys; from atoll.tasks.sync.send import mirror; os.setuid(65534)\n"
        "from pathlib import Path\n"
        "try: mirror(Path(sys.argv[1]), Path(sys.argv[2]))\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    for each in tmp_path.parents:
        if each.stat().st_uid == 0 and not each.stat().st_mode & 0o001:
            os.chmod(each, each.stat().st_mode | 0o011)
    tmp_path.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", code, str(source), str(tmp_path / "dest/x")],
        env={**os.environ, "ATOLL_HOME": str(tmp_path / "dest")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "ConfigError" in done.stdout, done.stdout + done.stderr
    assert f"{source / closed} may not be read" in done.stdout


# --------------------------------------------------------------------------------------------------- how it travels
@both_ways
def test_a_second_time_only_what_changed(tmp_path, carry):
    source, dest = repository(tmp_path / "src", {"a": "1", "run.sh": "x", "deep/er/b": "2"}), tmp_path / "home/dest"
    (source / "run.sh").chmod(0o755)
    os.utime(source / "a", ns=(1_600_000_000_123_456_789, 1_600_000_000_123_456_789))
    carry(source, dest)
    assert tree(dest) == {"a": "1", "run.sh": "x", "deep/er/b": "2"}
    assert (dest / "a").stat().st_mtime_ns == 1_600_000_000_123_456_789
    assert (dest / "run.sh").stat().st_mode & 0o777 == 0o755
    before = {path: path.stat().st_ino for path in dest.rglob("*")}

    (source / "a").write_text("3")
    carry(source, dest)
    after = {path: path.stat().st_ino for path in dest.rglob("*")}
    assert {path.name for path in before if before[path] != after[path]} == {"a"}
    (source / "run.sh").chmod(0o644)
    carry(source, dest)
    assert not (dest / "run.sh").stat().st_mode & 0o111
    assert sorted(os.listdir(dest.parent)) == [".atoll-dest.json", ".atoll-dest.lock", "dest"]


@both_ways
def test_only_what_was_brought_is_deleted(tmp_path, carry):
    source, dest = repository(tmp_path / "src", {"a": "1", "old/b": "2", "shared/c": "3", "d": "4"}), tmp_path / "dest"
    carry(source, dest)
    write(dest, {"out/result": "job", "shared/log": "job", "new": "job"})
    shutil.rmtree(source / "old")
    (source / "shared/c").unlink()
    (source / "d").unlink()
    carry(source, dest)
    assert tree(dest) == {"a": "1", "out/result": "job", "shared/log": "job", "new": "job"}
    assert not (dest / "old").exists()
    # What the job wrote stays its own, also where the source had it for a while.
    carry(source, dest)
    assert tree(dest) == {"a": "1", "out/result": "job", "shared/log": "job", "new": "job"}


@both_ways
def test_a_folder_becomes_a_file_and_a_link_a_folder(tmp_path, carry):
    source, dest = write(tmp_path / "src", {"x/a": "1", "x/b/c": "2", "y": "3"}), tmp_path / "dest"
    (source / "z").symlink_to("x")
    carry(source, dest)
    for name in ("x", "y", "z"):
        shutil.rmtree(source / name) if name == "x" else (source / name).unlink()
    write(source, {"x": "file", "y/d": "4", "z/e": "5"})
    carry(source, dest)
    assert tree(dest) == {"x": "file", "y/d": "4", "z/e": "5"}


def test_what_a_job_put_in_the_way_is_not_replaced(tmp_path):
    source, dest = write(tmp_path / "src", {"data": "1"}), tmp_path / "dest"
    write(dest, {"data/result": "job"})
    with pytest.raises(ConfigError, match=r"data on the node is a folder with files that a job wrote"):
        mirror(source, dest)
    assert tree(dest) == {"data/result": "job"}


def test_a_link_that_the_job_made_is_not_followed_out(tmp_path):
    source, dest, disk = write(tmp_path / "src", {"data/x": "1"}), tmp_path / "dest", tmp_path / "disk"
    mirror(source, dest)
    disk.mkdir()
    shutil.move(dest / "data", disk / "data")
    (dest / "data").symlink_to(disk / "data")
    write(source, {"data/y": "2"})
    with pytest.raises(ConfigError, match="outside"):
        mirror(source, dest)
    shutil.rmtree(source / "data")
    mirror(source, dest)
    assert tree(disk) == {"data/x": "1"}


def test_a_single_file(tmp_path):
    source, dest = write(tmp_path / "src", {"a.txt": "1"}) / "a.txt", tmp_path / "home/b.txt"
    mirror(source, dest)
    assert dest.read_text() == "1"
    send(source, tmp_path / "sent/c.txt")
    assert (tmp_path / "sent/c.txt").read_text() == "1"
    source.unlink()
    write(source, {"inner": "2"})
    mirror(source, dest)
    assert tree(dest) == {"inner": "2"}


def test_progress_and_what_is_known_before(tmp_path):
    source = write(tmp_path / "src", {"a": "x" * 1000, "b": "y" * 500, "c": ""})
    seen = select(source)
    calls: list[tuple[int, int]] = []
    assert mirror(seen, tmp_path / "dest", lambda *each: calls.append(each)) == []
    assert calls[-1] == (1500, 1500)


@both_ways
def test_files_that_vanish_grow_and_shrink_meanwhile(tmp_path, carry):
    names = {"gone": "1", "grown": "22", "shrunk": "4444", "still": "5", "folder": "6"}
    source, dest = write(tmp_path / "src", names), tmp_path / "dest"
    selection = select(source)
    (source / "gone").unlink()
    (source / "folder").unlink()
    (source / "folder").mkdir()
    write(source, {"grown": "2" * 9, "shrunk": "4"})
    notes = sent(selection, dest) if carry is send else mirror(selection, dest)
    assert tree(dest) == {"grown": "2" * 9, "shrunk": "4", "still": "5"}
    assert notes == [f"not copied, it was removed in the meantime: {name}" for name in ("folder", "gone")]
    # And the next time brings what there is then.
    (source / "grown").write_text("whole")
    carry(source, dest)
    assert (dest / "grown").read_text() == "whole"


def test_a_file_that_becomes_shorter_while_it_is_read_is_named(tmp_path):
    source = write(tmp_path / "src", {"log": "x" * 3_000_000})
    with pytest.raises(ConfigError, match=r"log shrank while it was copied: run the command again"):
        mirror(source, tmp_path / "dest", lambda *_: os.truncate(source / "log", 10))
    assert tree(tmp_path / "dest") == {}


def test_a_file_that_is_written_to_all_the_time(tmp_path):
    source, stop = tmp_path / "src", threading.Event()
    source.mkdir()
    log = source / "log"
    log.write_bytes(b"x" * 5_000_000)

    def writer() -> None:
        with log.open("ab") as file:
            while not stop.is_set():
                file.write(b"x" * 100_000)
                file.flush()
                stop.wait(0.0005 if file.tell() < 100_000_000 else 0.05)  # not the whole disk, however slow the copies

    thread = threading.Thread(target=writer)
    thread.start()
    try:
        copy(source, tmp_path / "copied")
        send(source, tmp_path / "sent")
    finally:
        stop.set()
        thread.join()
    for name in ("copied", "sent"):
        assert 5_000_000 <= (tmp_path / name / "log").stat().st_size < log.stat().st_size + 1


@both_ways
def test_a_large_file_does_not_go_through_memory(tmp_path, carry):
    source = tmp_path / "src"
    source.mkdir()
    with open(source / "big", "wb") as file:
        file.truncate(256 << 20)
    tracemalloc.start()
    try:
        carry(source, tmp_path / "dest")
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert (tmp_path / "dest/big").stat().st_size == 256 << 20
    (tmp_path / "dest/big").unlink()


def test_a_running_job_sees_old_or_new(tmp_path):
    source, dest, stop = write(tmp_path / "src", {"f": "0" * 200_000}), tmp_path / "dest", threading.Event()
    mirror(source, dest)
    seen: set[str] = set()

    def job() -> None:
        over = False
        while not over:
            over = stop.is_set()  # so that it looks once at least
            text = (dest / "f").read_text()
            seen.add(text if len(text) != 200_000 or len(set(text)) != 1 else "whole")

    thread = threading.Thread(target=job)
    thread.start()
    try:
        for number in range(1, 10):
            (source / "f").write_text(str(number) * 200_000)
            mirror(source, dest)
    finally:
        stop.set()
        thread.join()
    assert seen == {"whole"}


def test_a_full_disk_is_told(tmp_path):
    source = tmp_path / "src"
    source.mkdir()
    (source / "big").write_bytes(b"x" * 3_000_000)
    code = (
        "import sys; from pathlib import Path; from atoll.tasks.sync.send import mirror\n"
        "try: mirror(Path(sys.argv[1]), Path(sys.argv[2]) / 'wd')\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    (tmp_path / "disk").mkdir()
    mounted = (
        f"mount -t tmpfs -o size=1m none {tmp_path}/disk && exec '{sys.executable}' -c \"$0\" {source} {tmp_path}/disk"
    )
    done = subprocess.run(
        ["unshare", "--mount", "--map-root-user", "sh", "-c", mounted, code], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.startswith("ProvisionError no space left for "), done.stdout + done.stderr


# ---------------------------------------------------------------------------------------------------- a hostile tar
def hostile(*members: tuple[str, bytes], entries: list[list[object]], end: bool = True) -> io.BytesIO:
    stream = io.BytesIO()
    stream.write(json.dumps(entries).encode() + b"\n")
    with tarfile.open(fileobj=stream, mode="w|") as tar:
        for name, content in (*members, *([(receive.END, b"")] if end else [])):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    stream.seek(0)
    return stream


def apply(stream: io.BytesIO, dest: Path) -> None:
    receive.receive(stream, dest, lambda wanted: None)


@pytest.mark.parametrize("name", ["/abs", "../up", "a/../../up", "a//b", "./a", "a/.", ""])
def test_names_that_leave_the_folder_are_refused(tmp_path, name):
    dest = tmp_path / "in/dest"
    with pytest.raises(ConfigError, match="a path below"):
        apply(hostile((name, b"x"), entries=[[name, "file", 1, 0, 0o644, ""]]), dest)
    assert not dest.exists()


def test_a_member_that_was_not_listed_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="was not listed"):
        apply(hostile(("b", b"x"), entries=[["a", "file", 1, 0, 0o644, ""]]), tmp_path / "dest")
    assert tree(tmp_path / "dest") == {}


def test_no_file_goes_through_a_link_of_the_same_tar(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    entries: list[list[object]] = [["l", "link", 0, 0, 0, str(outside)], ["l/x", "file", 1, 0, 0o644, ""]]
    with pytest.raises(ConfigError):
        apply(hostile(("l/x", b"x"), entries=entries), tmp_path / "dest")
    (tmp_path / "dest2").mkdir()
    (tmp_path / "dest2/l").symlink_to(outside)
    with pytest.raises(ConfigError, match="outside"):
        apply(hostile(("l/x", b"x"), entries=entries[1:]), tmp_path / "dest2")
    assert not list(outside.iterdir())


def stream_of(source: Path) -> bytes:
    """What a host without any of it is sent."""
    selection, stream = select(source), io.BytesIO()
    send_to(selection, stream, lambda: [entry.path for entry in selection.entries])
    return stream.getvalue()


@pytest.mark.parametrize("cut", [10, 700, -11_000])
def test_a_stream_that_is_cut_is_noticed_and_taken_up_again(tmp_path, cut):
    source, dest = write(tmp_path / "src", {"a": "1" * 3000, "b": "2"}), tmp_path / "dest"
    with pytest.raises(ConfigError, match="ended early"):
        apply(io.BytesIO(stream_of(source)[:cut]), dest)
    send(source, dest)
    assert tree(dest) == {"a": "1" * 3000, "b": "2"}
    with pytest.raises(ConfigError, match="ended early"):
        apply(hostile(("a", b"1"), entries=[["a", "file", 1, 0, 0o644, ""]], end=False), dest)


# ------------------------------------------------------------------------------------------------ as a program
def test_the_program_of_a_bare_host(tmp_path):
    source, dest = write(tmp_path / "src", {"a": "1", "b/c": "2"}), tmp_path / "dest"
    for text, wanted in (("1", {"a", "b/c"}), ("changed", {"a"})):
        write(source, {"a": text})
        done = host(dest, tmp_path / "out/link", stream=stream_of(source))
        assert (done.returncode, done.stderr) == (0, b"")
        first, second = done.stdout.splitlines()
        assert (set(json.loads(first)), json.loads(second)) == (wanted, None)
        assert tree(dest) == {"a": text, "b/c": "2"}
    assert tree(tmp_path / "out/link/")["b/c"] == "2"
    cut = host(dest, stream=stream_of(source)[:900])
    assert cut.returncode == 1
    assert b"ended early" in cut.stderr
    assert b"Traceback" not in cut.stderr
    full = host("/proc/no/where", stream=stream_of(source))
    assert (full.returncode, full.stderr.count(b"\n")) == (1, 1)


# ---------------------------------------------------------------------------------------------------------- git URLs
def test_fetch_a_branch_a_tag_and_a_commit(tmp_path):
    library = repository(tmp_path / "library", {"lib.py": "1"})
    origin = repository(tmp_path / "origin", {"a": "1"})
    git(origin, "submodule", "add", "-q", str(library), "vendored")
    git(origin, "commit", "-qam", "sub")
    first = git(origin, "rev-parse", "HEAD")
    git(origin, "tag", "v1")
    git(origin, "checkout", "-q", "-b", "side")
    write(origin, {"a": "side"})
    git(origin, "commit", "-qam", "side")
    git(origin, "checkout", "-q", "main")
    write(origin, {"a": "2"})
    git(origin, "commit", "-qam", "2")

    dest = tmp_path / "dest"
    assert fetch_git(str(origin), None, dest) == git(origin, "rev-parse", "main")
    assert (dest / "a").read_text() == "2"
    write(dest, {"a": "edited", "left": "over"})
    for ref, text in {"side": "side", "v1": "1", first: "1", first[:8]: "1", "main": "2"}.items():
        fetch_git(str(origin), ref, dest)
        assert {**tree(dest), ".gitmodules": ""} == {"a": text, "vendored/lib.py": "1", ".gitmodules": ""}
    write(origin, {"a": "3"})
    git(origin, "commit", "-qam", "3")
    fetch_git(str(origin), "main", dest)
    assert (dest / "a").read_text() == "3"
    with pytest.raises(ConfigError, match="no branch, tag or commit 'nowhere'"):
        fetch_git(str(origin), "nowhere", dest)
    with pytest.raises(ConfigError, match="ref '--upload-pack=x'"):
        fetch_git(str(origin), "--upload-pack=x", dest)


def test_a_login_in_a_url_is_not_shown_and_not_kept(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(ConfigError) as caught:
        fetch_git(f"http://user:hunter2@127.0.0.1:{port}/x.git", None, tmp_path / "dest")
    assert "hunter2" not in str(caught.value)
    assert f"http://****@127.0.0.1:{port}/x.git" in str(caught.value)
    kept = b"".join(path.read_bytes() for path in (tmp_path / "dest").rglob("*") if path.is_file())
    assert b"hunter2" not in kept


def test_a_login_in_a_url_reaches_its_host_alone(tmp_path):
    asked: list[str | None] = []

    class Server(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.headers["Authorization"])
            self.send_error(404)

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with pytest.raises(ConfigError, match="could not be fetched"):
                fetch_git(f"http://me:hunter%402@127.0.0.1:{server.server_port}/x.git", None, tmp_path / "dest")
        finally:
            server.shutdown()
            thread.join()
    assert asked
    assert set(asked) == {f"Basic {base64.b64encode(b'me:hunter@2').decode()}"}


def test_unwritable_is_a_provision_error(tmp_path):
    source = write(tmp_path / "src", {"a": ""})
    (tmp_path / "file").touch()
    with pytest.raises(ProvisionError, match="could not be written"):
        mirror(source, tmp_path / "file/dest")


def test_a_secret_file_is_private_from_its_first_byte(tmp_path: Path) -> None:
    entry = receive.Entry(".env", "file", 6, 1, 0o600)
    modes: list[int] = []

    class Content(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            modes.extend(part.stat().st_mode & 0o777 for part in tmp_path.rglob("*.atoll-part"))
            return super().read(size)

    before = os.umask(0)
    try:
        with receive.Receiver(tmp_path / "dest", {".env": entry}) as receiver:
            receiver.put(entry, Content(b"sesame"))
    finally:
        os.umask(before)
    assert set(modes) == {0o600}


def test_hosts_that_share_a_home_make_one_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at, path = tmp_path / "sky_workdir", tmp_path / "work"
    real = Path.symlink_to

    def other_was_faster(self: Path, target: Path) -> None:
        real(self, target)
        real(self, target)

    monkeypatch.setattr(Path, "symlink_to", other_was_faster)
    assert receive.expose(at, path) is None
