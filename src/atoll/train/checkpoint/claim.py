"""One writer a place: who may write into a folder, or below a URL, and until when."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from atoll.core.errors import ConfigError
from atoll.core.paths import visible_pid
from atoll.train.checkpoint.files import Remote
from atoll.train.checkpoint.team import Team

NAME = ".writer"
BEAT_S = 10.0  # how often the owner of an object says that it is alive; after three without a word it is dead
_PATIENCE_S = 15.0  # an NFS client may go by a cached listing for some seconds


class Claim(Protocol):
    """The right to write somewhere."""

    def check(self) -> None:
        """Raises ``OSError`` where somebody else has taken the place meanwhile."""

    def close(self) -> None:
        """Give it back."""


class FolderClaim:
    """A lock on a file in the folder, which ends with its owner.

    Args:
        run: what is written, for the message of those who come later.
        another: the flag that chooses another place.

    Raises:
        ConfigError: somebody else holds it; the message says who.
        OSError: the folder can't be written to, or its file system has no locks.
    """

    def __init__(self, folder: Path, run: str, another: str, name: str = NAME) -> None:
        self._path = folder / name
        while True:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _same_file(self._file, self._path):
                    break
                os.close(self._file)  # its owner has just removed it
            except BlockingIOError:
                holder = _decoded(os.pread(self._file, 4096, 0))
                os.close(self._file)
                raise ConfigError(_in_use(str(folder), holder, another)) from None
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, json.dumps(_about(run)).encode(), 0)
        os.fsync(self._file)  # where the folder is on a network, others see it from now on

    def check(self) -> None:
        """A lock can't be taken away, but its folder can: raises ``OSError`` where another run has made it anew."""
        if self._path.exists() and not _same_file(self._file, self._path):
            raise OSError(f"{self._path.parent} was removed while this run wrote there, and is another run's now")

    def close(self) -> None:
        """Give it back."""
        with contextlib.suppress(OSError):  # the folder may have gone away, and the lock goes with the file
            self.check()
            self._path.unlink()
        os.close(self._file)


def check_shared(root: str, group: dist.ProcessGroup | None) -> None:
    """Refuse a folder where some rank does not see the claim of rank 0, or can't write. Collective; URLs all see.

    Asked at the start, because the first save is too late to learn it.

    Raises:
        ConfigError: the folder is not shared, or not writable; the message names rank, host and path.
    """
    root = root.removeprefix("file://")
    if "://" in root:
        return
    folder, team = Path(root).absolute(), Team(group)
    held = team.lead(f"reading {folder / NAME}", (folder / NAME).read_bytes)

    def look() -> str | None:
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            with contextlib.suppress(OSError):
                if (folder / NAME).read_bytes() == held:
                    return None if os.access(folder, os.W_OK | os.X_OK) else "can't write to it"
            # A folder that isn't even there is no stale listing.
            if time.monotonic() > deadline or not folder.is_dir():
                return "does not see what rank 0 wrote there"
            time.sleep(0.2)

    verdicts = team.agree(f"looking into {folder}", lambda: (socket.gethostname(), look()))
    wrong = [f"rank {rank} on host {host} {verdict}" for rank, (host, verdict) in enumerate(verdicts) if verdict]
    if wrong:
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        raise ConfigError(
            f"checkpoints need a place that every rank can write, and {folder} is none: {'; '.join(wrong[:3])}{more}. "
            "Use a folder that all hosts mount (NFS, Lustre, …) or an object store: [checkpoint] path = "
            '"s3://bucket/run"'
        )


class ObjectClaim:
    """An object that its owner writes anew every ``BEAT_S``, made by a conditional write where the store knows those.

    An owner is dead when its object has not changed for three beats: that is judged by watching it, so that no two
    clocks are compared. Where two owners meet all the same (a store without conditional writes, an owner that was cut
    off for longer than that), the earlier one learns of it at its next beat, and ``check`` fails: it saves nothing.

    Args:
        root: what messages call the place.
        prefix: of its objects.
        run, another: as ``FolderClaim`` has them.
        say: told where a dead owner's claim has to be waited for.

    Raises:
        ConfigError: somebody else holds it; the message says who.
        OSError: the storage fails.
    """

    def __init__(
        self, remote: Remote, root: str, prefix: str, run: str, another: str, say: Callable[[str], None]
    ) -> None:
        self._remote, self._root, self._path = remote, root, f"{prefix}/{NAME}"
        self._about = {**_about(run), "token": secrets.token_hex(8), "beat_s": BEAT_S, "beat": 0}
        self._lost: str | None = None
        self._over = threading.Event()
        if (found := self._read()) is not None:
            patience_s = 3.0 * float(found.get("beat_s", BEAT_S))
            say(f"{root} has a claim of {_holder(found)}: watching for {patience_s:.0f} s whether it is alive")
            deadline = time.monotonic() + patience_s
            while (now := self._read()) == found and time.monotonic() < deadline:
                time.sleep(patience_s / 15)
            if now not in (found, None):
                raise ConfigError(_in_use(root, now or {}, another))
            with contextlib.suppress(FileNotFoundError):
                remote.rm_file(self._path)
        # An error is that of one who was faster, or of a store that has no such writes: reading tells which.
        with contextlib.suppress(Exception):
            remote.pipe_file(self._path, self._body(), mode="create")
        if self._read() is None:
            remote.put(self._path, self._body())
        if not self._is_ours(found := self._read()):
            raise ConfigError(_in_use(root, found or {}, another))
        self._thread = threading.Thread(target=self._beat, name=f"claim {root}", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Whether it is still ours.

        Raises:
            OSError: it is not, or the storage fails.
        """
        if not self._is_ours(found := self._read()):
            self._lost = _holder(found) if found else "a run that has ended since, or its claim was removed"
        if self._lost is not None:
            raise OSError(f"{self._root} was taken over by {self._lost}, as nothing was heard from here for a while")

    def close(self) -> None:
        """Give it back."""
        self._over.set()
        self._thread.join()
        with contextlib.suppress(OSError):  # then it counts as dead after three beats
            self.check()
            self._remote.rm_file(self._path)

    def _beat(self) -> None:
        while not self._over.wait(BEAT_S) and self._lost is None:
            with contextlib.suppress(OSError):  # the next one may come through
                self.check()
                self._about["beat"] += 1
                self._remote.put(self._path, self._body())

    def _is_ours(self, found: dict[str, Any] | None) -> bool:
        return found is not None and found.get("token") == self._about["token"]

    def _body(self) -> bytes:
        return json.dumps(self._about).encode()

    def _read(self) -> dict[str, Any] | None:
        try:
            return _decoded(self._remote.cat_file(self._path))
        except FileNotFoundError:
            return None


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _about(run: str) -> dict[str, Any]:
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    return {"run": run, "pid": visible_pid(), "host": socket.gethostname(), "since": since}


def _decoded(content: bytes) -> dict[str, Any]:
    """What a claim says; nothing where it is only being written."""
    with contextlib.suppress(ValueError):
        return dict(json.loads(content))
    return {}


def _holder(about: dict[str, Any]) -> str:
    run, pid, host, since = (about.get(key, "?") for key in ("run", "pid", "host", "since"))
    return f"pid {pid} on {host}, since {since} ({run})"


def _in_use(place: str, holder: dict[str, Any], another: str) -> str:
    return (
        f"{place!r} is in use by {_holder(holder)}: two runs can't write one place. Wait for it, stop it, or choose "
        f"another with {another}"
    )
