"""A plugin of SkyPilot's server: it answers who knows the password, and has no other port.

SkyPilot itself asks for none on the loopback interface, where other users of the machine are, too, and takes requests
between its own processes from a port whose password is in its source. Here its one process needs no such port.
"""

from __future__ import annotations

import hmac
import os
from typing import Any


def __getattr__(name: str) -> Any:
    """``Password``, by whose name SkyPilot finds the plugin; its package is there, and not where ours is."""
    if name != "Password":
        raise AttributeError(name)
    from sky.server import plugins

    return type("Password", (plugins.BasePlugin,), {"install": lambda plugin, context: _install(context)})


def _install(context: Any) -> None:
    """In each of the server's processes; SkyPilot's SDK sends the variable's value with each request."""
    from sky.server.requests.queues import base
    from sky.skylet.constants import SERVICE_ACCOUNT_TOKEN_ENV_VAR

    context.register_queue_backend_factory(base.LocalQueueFactory())
    if context.app is not None:
        context.app.add_middleware(_Asked, wanted=os.environ[SERVICE_ACCOUNT_TOKEN_ENV_VAR])


class _Asked:
    """Outside of all else that looks at a request; what is inside sees no password."""

    def __init__(self, app: Any, wanted: str) -> None:
        self._app, self._wanted = app, f"Bearer {wanted}".encode()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] in ("http", "websocket"):
            said = [value for name, value in scope["headers"] if name == b"authorization"]
            if len(said) != 1 or not hmac.compare_digest(said[0], self._wanted):
                await _refuse(scope["type"], send)
                return
            scope = {**scope, "headers": [each for each in scope["headers"] if each[0] != b"authorization"]}
        await self._app(scope, receive, send)


async def _refuse(kind: str, send: Any) -> None:
    if kind == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})
