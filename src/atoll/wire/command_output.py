"""Where a command's own output begins: start files of the login shell there may have printed something before it."""

from __future__ import annotations

import json
from typing import IO, Any

from atoll.core.errors import ProvisionError

MARK = b"atoll-output:\n"  # perhaps behind text that has no end of line
_SHOWN_CHARS = 200


def marked(command: str) -> str:
    """The shell command, which writes the mark before anything of its own; its text does not contain the mark."""
    return f"echo 'atoll''-output:'; {command}"


def own_output(out: bytes) -> bytes | None:
    """What a marked command wrote; None where it never began."""
    _, mark, own = out.partition(MARK)
    return own if mark else None


def skip_login_text(stream: IO[bytes]) -> bytes | None:
    """Read up to a marked command's own output: None, or what came instead where it never began.

    What follows may lie in the stream's buffer by then, where ``communicate`` and who reads its descriptor miss it.
    """
    came = b""
    while line := stream.readline():
        if line.endswith(MARK):
            return None
        came = (came + line)[-4 * _SHOWN_CHARS :]
    return came


def parsed(host: str, answer: bytes) -> Any:
    """The JSON that a command answered with.

    Raises:
        ProvisionError: it is none; the message has what came.
    """
    try:
        return json.loads(answer)
    except ValueError:
        raise unreadable(host, answer) from None


def parsed_object(host: str, answer: bytes) -> dict[str, Any]:
    """The same, of an answer that is an object."""
    said = parsed(host, answer)
    if not isinstance(said, dict):
        raise unreadable(host, answer)
    return said


def unreadable(host: str, answer: bytes) -> ProvisionError:
    """The error for an answer that is not what was asked for."""
    return ProvisionError(f"{host}: its answer can't be read: {_shown(answer) or 'it is empty'}")


def never_began(host: str, came: bytes, said: bytes) -> ProvisionError:
    """The error for a login that ended before it ran the command, having written ``came``, and ``said`` as errors."""
    shown = _shown(came) or _shown(said)
    return ProvisionError(
        f"{host}: a login there ended before it ran a command{f', and printed {shown}' if shown else ''}. May this "
        f"user run commands there, or does a startup file such as ~/.bashrc end the shell?"
    )


def _shown(text: bytes) -> str:
    """The last line that is not empty, quoted."""
    lines = text.decode(errors="replace").strip().splitlines()
    return repr(lines[-1][-_SHOWN_CHARS:]) if lines else ""
