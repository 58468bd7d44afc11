"""Every error of the tree survives pickle: a process pool, joblib or Celery around Atoll hands them on."""

from __future__ import annotations

import importlib
import pickle
import pkgutil
from collections.abc import Iterator

import pytest

import atoll as sky
from atoll.core import errors
from atoll.providers.base import AcceleratorsLacking

# What the classes with an `__init__` of their own are made with; all others take a message.
MADE: dict[str, BaseException] = {
    "ProvisionError": errors.ProvisionError("no room", node=2),
    "RemoteTraceback": errors.RemoteTraceback("Traceback ...", 1, 0),
    "RemoteError": errors.RemoteError("own.Error", "why", rank=1, node=0, remote_traceback="Traceback ..."),
    "WorkerDied": errors.WorkerDied(rank=3, node=1, signal=9, oom=True, log_tail=["a", "b"]),
    "NodeLost": errors.NodeLost(1, "its agent ended"),
    "CallTimeout": errors.CallTimeout(2.5, [0, 2]),
    "HangError": errors.HangError(60.0, [1], [0], {0: "stack"}),
    "AcceleratorsLacking": AcceleratorsLacking("none there", "this host has none"),
}


def classes(root: type[BaseException]) -> Iterator[type[BaseException]]:
    yield root
    for each in root.__subclasses__():
        yield from classes(each)


def tree() -> list[type[BaseException]]:
    for module in pkgutil.walk_packages(sky.__path__, "atoll."):
        if module.name.endswith("__main__") or "worker.children" in module.name:
            continue
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if error.name != "triton":  # which comes with torch's builds for GPUs alone; kernels define no error
                raise
    found = {each for each in classes(errors.AtollError) if each.__module__.startswith("atoll.")}
    return sorted({*found, errors.RemoteTraceback, errors.NeverDispatched}, key=lambda each: each.__qualname__)


@pytest.mark.parametrize("kind", tree(), ids=lambda kind: kind.__qualname__)
def test_an_error_survives_pickle(kind: type[BaseException]) -> None:
    error = MADE[kind.__name__] if kind.__name__ in MADE else kind("what happened")
    error.add_note("a note")
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        back = pickle.loads(pickle.dumps(error, protocol))
        assert type(back) is kind
        assert (str(back), back.args, vars(back)) == (str(error), error.args, vars(error))
