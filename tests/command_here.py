"""The command ``atoll`` in the process of the test, as a fixture: ``from command_here import Atoll, atoll``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from atoll.cli.main import main

Atoll = Callable[..., tuple[int, str, str]]


@pytest.fixture
def atoll(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> Atoll:
    """Runs the command in this process; gives exit code, output and errors."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["atoll", *arguments])
        capfdbinary.readouterr()
        code: Any = 0
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0
        sys.stdout.flush()
        out, err = capfdbinary.readouterr()
        assert b"Traceback" not in out + err
        return code, out.decode(), err.decode()

    return run
