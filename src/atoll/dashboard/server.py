"""Serves the dashboard on this machine's loopback address until it is interrupted."""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from atoll.core.errors import ConfigError
from atoll.dashboard.app import Guarded, pages
from atoll.dashboard.views import Views

_ADDRESS = "127.0.0.1"
_END_S = 2  # for answers that are under way, once it is interrupted


def serve(views: Views, port: int, say: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        port: to listen on; 0 is any free one.
        say: is told the address, with its token.

    Raises:
        ConfigError: the port is taken.
    """
    token = secrets.token_urlsafe(18)
    with contextlib.closing(_listen(port)) as listener:
        config = uvicorn.Config(
            Guarded(pages(views), token),
            lifespan="off",
            ws="none",
            proxy_headers=False,
            access_log=False,
            log_level="warning",
            server_header=False,
            timeout_graceful_shutdown=_END_S,
        )
        say(f"http://{_ADDRESS}:{listener.getsockname()[1]}/{token}/")
        with contextlib.suppress(KeyboardInterrupt):  # which uvicorn raises once it has ended
            _Server(config, views).run(sockets=[listener])


class _Server(uvicorn.Server):
    """Ends logs that are followed, and what waits for hosts, when it is interrupted."""

    def __init__(self, config: uvicorn.Config, views: Views) -> None:
        super().__init__(config)
        self._views = views

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Takes SIGINT and SIGTERM."""
        self._views.ending.set()
        super().handle_exit(sig, frame)


def _listen(port: int) -> socket.socket:
    listener = socket.socket()
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((_ADDRESS, port))
        listener.listen(128)  # before anybody is told the address
    except OSError as error:
        listener.close()
        raise ConfigError(f"--port {port}: {error.strerror}; give another one, or leave --port out") from None
    return listener
