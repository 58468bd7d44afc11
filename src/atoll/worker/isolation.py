"""Keeps one call's settings from reaching the next: environment, cwd, path, seeds, default devices, signals."""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.util
import os
import signal
import sys
import sysconfig
from typing import Any

_SIGNALS = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP),
    *(signal.SIGCHLD, signal.SIGPIPE, signal.SIGPROF, signal.SIGVTALRM),
)
# Looked at after every call, so without what `os.environ` and `signal` put around them: decoding, enums.
_environ: dict[bytes, bytes] = vars(os.environ)["_data"]
_signal = importlib.import_module("_signal")
_getsignal, _setmask, _settimer = _signal.getsignal, _signal.pthread_sigmask, _signal.setitimer
_SETMASK = int(signal.SIG_SETMASK)
_TIMERS = (int(signal.ITIMER_REAL), int(signal.ITIMER_VIRTUAL), int(signal.ITIMER_PROF))


class Isolation:
    """Restores what a call may change. Made once, when the rank starts; ``restore`` runs after every call."""

    def __init__(self) -> None:
        self.refresh()
        self._modules = UserModules()

    def refresh(self) -> None:
        """Take the present state as the one to come back to."""
        self._env = dict(_environ)
        self._cwd = os.getcwd()
        self._path = list(sys.path)
        self._argv = list(sys.argv)
        self._recursion_limit = sys.getrecursionlimit()
        self._umask = os.umask(0o022)
        os.umask(self._umask)
        self._handlers = {number: _getsignal(number) for number in _SIGNALS}

    def set_variables(self, **variables: str) -> None:
        """Set environment variables that stay between calls."""
        os.environ.update(variables)
        self._env = dict(_environ)

    def moved(self) -> None:
        """Another process calls, with a path of its own: take it as the one to come back to."""
        self.refresh()
        self._modules.forget_moved()

    def before_call(self) -> None:
        """Forget modules of the user whose files were edited since they were imported."""
        self._modules.forget_edited()

    def before_result(self) -> None:
        """Note what was imported, before the driver hears of it: a file that it edits then has to look edited."""
        self._modules.note_new()

    def restore(self) -> None:
        """Put everything back, and give the next call random numbers of its own."""
        if _environ != self._env:
            for key in _environ.keys() - self._env.keys():
                del os.environ[os.fsdecode(key)]
            for key, value in self._env.items():
                if _environ.get(key) != value:
                    os.environ[os.fsdecode(key)] = os.fsdecode(value)
        try:
            os.chdir(self._cwd)
        except OSError:  # it was removed
            pass
        sys.path[:] = self._path
        sys.argv[:] = self._argv
        os.umask(self._umask)
        for number, handler in self._handlers.items():
            if handler is not None and _getsignal(number) is not handler:
                signal.signal(number, handler)
        for timer in _TIMERS:
            _settimer(timer, 0)
        _setmask(_SETMASK, ())
        sys.setrecursionlimit(self._recursion_limit)
        if "random" in sys.modules:  # 16 bytes say as much as the 2,500 that seed() itself would ask the system for
            sys.modules["random"].seed(int.from_bytes(os.urandom(16), "big"))
        if "numpy.random" in sys.modules:
            sys.modules["numpy.random"].seed()
        torch = sys.modules.get("torch")
        if torch is not None and hasattr(torch, "seed"):
            restore_torch(torch)


_torch_threads: list[int] = []


def note_torch(torch: Any) -> None:
    """Remember torch's settings as they are before any call changes them; run right after its import."""
    _torch_threads[:] = [torch.get_num_threads()]


def restore_torch(torch: Any) -> None:
    """torch's process-wide settings, back to how it starts."""
    torch.seed()
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.autograd.set_detect_anomaly(False)
    if _torch_threads and torch.get_num_threads() != _torch_threads[0]:
        torch.set_num_threads(_torch_threads[0])


class UserModules:
    """Modules that are the user's own files, with the state those files had when they were imported."""

    def __init__(self) -> None:
        paths = sysconfig.get_paths()
        names = ("stdlib", "platstdlib", "purelib", "platlib")
        ours = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        self._not_users = tuple({os.path.realpath(paths[n]) + os.sep for n in names} | {ours + os.sep})
        self._seen: set[str] = set()
        self._files: dict[str, tuple[str, tuple[int, int] | None]] = {}  # by module: path, mtime and size

    def note_new(self) -> None:
        """Look at what was imported since the last time."""
        if len(sys.modules) == len(self._seen):
            return
        for name in sys.modules.keys() - self._seen:
            path = getattr(sys.modules[name], "__file__", None)
            if path and path.endswith(".py") and name != "__main__" and self._is_users(path):
                self._files[name] = path, _state_of(path)
        self._seen = set(sys.modules)

    def forget_edited(self) -> None:
        """If any of the user's files changed, import all of the user's modules anew: they may hold each other."""
        self.note_new()
        if any(_state_of(path) != state for path, state in self._files.values()):
            self._forget()

    def forget_moved(self) -> None:
        """The path changed: if any of the user's modules is another file now, import all of them anew."""
        self.note_new()
        importlib.invalidate_caches()
        if any(self._moved(name, path) for name, (path, _) in self._files.items() if "." not in name):
            self._forget()

    @staticmethod
    def _moved(name: str, path: str) -> bool:
        spec = importlib.machinery.PathFinder.find_spec(name)
        return spec is not None and spec.origin is not None and os.path.realpath(spec.origin) != os.path.realpath(path)

    def _forget(self) -> None:
        for name, (path, _) in self._files.items():
            if sys.modules.pop(name, None) is not None:
                with contextlib.suppress(OSError):  # Python would take it for that of a file edited within a second
                    os.unlink(importlib.util.cache_from_source(path))
        self._files.clear()
        self._seen = set(sys.modules)
        importlib.invalidate_caches()

    def _is_users(self, path: str) -> bool:
        if path.startswith(self._not_users) or f"{os.sep}site-packages{os.sep}" in path:
            return False
        real = os.path.realpath(path)
        return not real.startswith(self._not_users) and f"{os.sep}site-packages{os.sep}" not in real


def _state_of(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
