"""The entry of ``atoll``, which imports next to nothing: a Ctrl-C can come before the command is there."""

import atexit
import os
import signal


def main() -> None:
    """Be the command; exits with its code."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not ignored, as under nohup
        signal.signal(signal.SIGINT, _leave)
    try:
        from atoll.cli.app import run_command

        run_command()
    finally:
        if signal.getsignal(signal.SIGINT) is _leave:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)  # all is said: what is left is Python's own end


def _leave(_number: int, _frame: object) -> None:
    os.write(2, b"\natoll: interrupted before anything started\n")
    os._exit(130)
