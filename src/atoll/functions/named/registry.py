"""Named pools of this machine: their names, their folders, and the servers that answer there."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from atoll.core.errors import AtollError, ConfigError
from atoll.core.paths import atoll_home, short_path
from atoll.wire import frames
from atoll.wire.frames import pack, send_all

SOCKET = "sock"
END_S = 15.0  # a server ends, with all its ranks, in this time
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def check_name(name: object) -> str:
    """A pool's name, or ``ConfigError``."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"name={name!r}: expected letters, digits, '.', '_' and '-', at most 64, as in 'my-pool'")
    return name


def folder_of(name: str) -> Path:
    """Where a named pool's socket is."""
    return atoll_home() / "pools" / check_name(name)


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """One process at a time starts a pool of this name, or clears away what a killed one left.

    The file stays: removing one that another process waits on would let two in.
    """
    folder = atoll_home() / "locks"
    folder.mkdir(exist_ok=True, mode=0o700)
    with open(folder / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def named_pools() -> list[dict[str, Any]]:
    """What is known of each named pool that is up; what a killed one left is cleared away."""
    found = []
    folder = atoll_home() / "pools"
    for name in sorted(os.listdir(folder)) if folder.is_dir() else ():
        if not _NAME.fullmatch(name):
            continue
        sock = connect(name)
        if sock is None:
            with locked(name):  # not one that is just being started
                sock = connect(name)
                if sock is None:
                    shutil.rmtree(folder / name, ignore_errors=True)
        if sock is not None:
            sock.close()
            with contextlib.suppress(OSError, ValueError):
                found.append(json.loads((folder / name / "pool.json").read_text()))
    return found


def connect(name: str) -> socket.socket | None:
    """A connection to the pool's server, or None where there is none."""
    folder = folder_of(name)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with short_path(folder, SOCKET) as path:
            sock.connect(path)
    except OSError:
        sock.close()
        return None
    return sock


def end_pool(name: str) -> bool:
    """End a named pool for everybody, and wait until its ranks are gone; False where there is none."""
    sock = connect(name)
    if sock is None:
        return False
    with sock:
        sock.settimeout(END_S)
        try:
            send_all(sock, pack(frames.DOWN))
            while sock.recv(1 << 16):
                pass
        except TimeoutError:
            server = process_of(name)
            raise AtollError(f"pool {name!r} did not end within {END_S:g} s; its server is {server}") from None
        except OSError:  # it hung up
            pass
    return True


def process_of(name: str) -> str:
    """What to call the process that keeps a pool."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        return f"process {json.loads((folder_of(name) / 'pool.json').read_text())['pid']}"
    return "a process that could not be found"
