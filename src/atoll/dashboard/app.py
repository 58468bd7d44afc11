"""The dashboard as a Starlette application. Every request needs the token, which is the first part of the path."""

from __future__ import annotations

import hmac
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, MutableMapping, Sequence
from importlib import resources
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from atoll.core.errors import AtollError
from atoll.dashboard import job_log
from atoll.dashboard.views import Views
from atoll.tasks import api

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_FILES = {"": "index.html", "page.js": "page.js", "style.css": "style.css"}
_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css"}
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_TAIL = 2000  # lines of a log that a page begins with


def pages(views: Views) -> Starlette:
    """The pages, below whatever path they are mounted at; who may ask is for whoever mounts them to check."""
    routes = [Route(f"/{path}", _file(name)) for path, name in _FILES.items()]
    routes += [
        Route("/api/clusters", _json(lambda _: views.clusters())),
        Route("/api/clusters/{cluster}/jobs", _json(lambda path: views.jobs(path["cluster"]))),
        Route("/api/clusters/{cluster}/jobs/{job:int}/log", _log(views)),
        Route("/api/gpus/{infra:path}", _json(lambda path: views.gpus(path["infra"]))),
        Route("/api/runs", _json(lambda _: views.runs())),
        Route("/api/runs/{run}", _json(lambda path: views.curve(path["run"]))),
        Route(
            "/api/clusters/{cluster}/jobs/{job:int}/cancel",
            _json(lambda path: views.cancel(path["cluster"], path["job"])),
            methods=["POST"],
        ),
        Route(
            "/api/clusters/{cluster}/down",
            _json(lambda path: views.down(path["cluster"])),
            methods=["POST"],
        ),
    ]
    return Starlette(routes=routes, exception_handlers={AtollError: _failed, LookupError: _failed, OSError: _failed})


class Guarded:
    """Lets only those requests through whose path begins with the token, and whose ``Host`` is one of ``hosts``.

    Another ``Host`` would be a foreign page whose name was made to resolve to this machine (DNS rebinding).
    """

    def __init__(self, inner: Starlette, token: str, hosts: Sequence[str] = LOOPBACK) -> None:
        self._inner = inner
        self._token = token.encode()
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        why = self._refusal(scope)
        if why is not None:
            await PlainTextResponse(f"403: {why}\n", 403, _HEADERS)(scope, receive, send)
            return
        root = f"/{self._token.decode()}"
        await self._inner({**scope, "root_path": scope.get("root_path", "") + root}, receive, _with_headers(send))

    def _refusal(self, scope: Scope) -> str | None:
        given = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        host = given[0] if len(given) == 1 else ""
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if name.lower() not in self._hosts:
            return f"the dashboard is at {self._hosts[0]}, not at {name!r}" if name else "no Host"
        first = scope["path"].removeprefix("/").partition("/")[0]
        if not hmac.compare_digest(first.encode(errors="replace"), self._token):
            return "open the address that `atoll dashboard` printed: its token is missing or wrong"
        return None


def _with_headers(send: Send) -> Send:
    async def sent(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            kept = list(message.get("headers", ()))
            message["headers"] = [*kept, *((name.lower().encode(), value.encode()) for name, value in _HEADERS.items())]
        await send(message)

    return sent


def _file(name: str) -> Callable[[Request], Response]:
    content = resources.files("atoll.dashboard").joinpath("page", name).read_bytes()

    def answer(_request: Request) -> Response:
        return Response(content, media_type=_TYPES[name.rpartition(".")[2]])

    return answer


def _json(view: Callable[[MutableMapping[str, Any]], Any]) -> Callable[[Request], Response]:
    """What a view gives, as JSON; it is asked in a thread."""

    def answer(request: Request) -> Response:
        return JSONResponse(view(request.path_params))

    return answer


def _log(views: Views) -> Callable[[Request], Awaitable[Response]]:
    """A job's log as lines of JSON, until the job ends or nobody reads."""

    async def answer(request: Request) -> Response:
        cluster, number = request.path_params["cluster"], request.path_params["job"]
        tail = request.query_params.get("tail", "")
        num_lines = int(tail) if re.fullmatch("[0-9]{1,6}", tail) else _TAIL
        messages = job_log.messages(await run_in_threadpool(api.job, cluster, number), num_lines, views.ending)
        return StreamingResponse(_json_lines(messages), media_type="application/x-ndjson")

    return answer


async def _json_lines(messages: Generator[dict[str, Any] | None, None, None]) -> AsyncIterator[bytes]:
    end = object()
    try:
        while (message := await run_in_threadpool(_next, messages, end)) is not end:
            yield json.dumps(message).encode() + b"\n"
    finally:
        await run_in_threadpool(messages.close)


def _next(messages: Generator[Any, None, None], end: object) -> Any:
    try:
        return next(messages, end)
    except (AtollError, OSError) as error:
        return {"error": str(error)}


def _failed(_request: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, 404 if isinstance(error, LookupError) else 502)
