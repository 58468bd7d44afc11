"""The exit codes of the ``atoll`` command: SkyPilot's, and the shell's two."""

from __future__ import annotations

import enum

from atoll.core.errors import AtollError, ConfigError, UsageError


class ExitCode(enum.IntEnum):
    """What a command exits with."""

    OK = 0
    USAGE = 2  # a mistake before anything started
    FAILED = 100  # the job, its setup or its supervisor failed
    NOT_FINISHED = 101  # the job is still running, or training stopped before its last step
    NOT_FOUND = 102  # no such cluster, job or pool
    CANCELLED = 103
    INTERRUPTED = 130  # Ctrl-C before anything started


def exit_code_of(error: AtollError | OSError) -> ExitCode:
    """The exit code of a command that an error ended."""
    if isinstance(error, LookupError):
        return ExitCode.NOT_FOUND
    return ExitCode.USAGE if isinstance(error, (ConfigError, UsageError)) else ExitCode.FAILED
