"""How long the path of a local call is, in the driver: which of Atoll's functions it passes, in how many files."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import CodeType, FrameType

import pytest

import atoll as sky

SOURCE = str(Path(sky.__file__).parent)


def test_a_warm_local_call_passes_few_functions_of_few_files(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: set[CodeType] = set()
    is_on = False

    def note(frame: FrameType, event: str, _arg: object) -> None:
        if is_on and event == "call" and frame.f_code.co_filename.startswith(SOURCE):
            passed.add(frame.f_code)

    own, others = sys.getprofile(), threading.getprofile()
    threading.setprofile(note)  # the pool's reader, which starts within
    try:
        with sky.ComputePool(nodes=2, logs="quiet") as pool:
            call = sky.compute(lambda: None)  # no rank could import it, as a function of a script
            for _ in range(10):
                call() >> pool
            sys.setprofile(note)
            is_on = True
            for _ in range(5):
                call() >> pool
            is_on = False
    finally:
        sys.setprofile(own)
        threading.setprofile(others)  # type: ignore[arg-type]
    path = sorted((Path(code.co_filename).relative_to(SOURCE).as_posix(), code.co_qualname) for code in passed)
    assert len({file for file, _ in path}) <= 8, path
    assert len(path) <= 25, path
