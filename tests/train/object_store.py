"""An S3 server on loopback for tests, with a gate before it that can delay, refuse or drop requests.

Clients belong in ranks (``ranks.run(…, env=store.environment)``): fsspec keeps a thread and its connections for the
life of a process.
"""

from __future__ import annotations

import http.client
import threading
import time
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# The server wants to see one, and doesn't check it.
_SIGNED = "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
_HEADERS = {"Authorization": _SIGNED, "Content-Type": "application/octet-stream"}
_HOP = {"connection", "transfer-encoding", "keep-alive", "server", "date", "content-length"}


class ObjectStore:
    """A bucket named ``bucket``.

    Attributes:
        gate: asked for every request, with method and path: None lets it pass, a number delays it by so many seconds,
            ``"503"`` answers that, ``"drop"`` closes the connection.
        requests: method and path of those that came.
    """

    def __init__(self) -> None:
        from moto.server import ThreadedMotoServer

        self.gate: Callable[[str, str], float | str | None] = lambda method, path: None
        self.requests: list[tuple[str, str]] = []
        self._behind = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
        self._behind.start()
        self._front = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self, self._behind.get_host_and_port()))
        self._front.daemon_threads = True
        self._thread = threading.Thread(target=self._front.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        self.put("", b"")

    @property
    def environment(self) -> dict[str, str]:
        """For processes that use the store."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._front.server_address[1]}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def put(self, name: str, data: bytes) -> None:
        """Write an object, past the gate."""
        self._ask("PUT", name, data)

    def get(self, name: str) -> bytes:
        """An object, past the gate."""
        return self._ask("GET", name)

    def delete(self, name: str) -> None:
        """Delete an object, past the gate."""
        self._ask("DELETE", name)

    def names(self, prefix: str = "") -> list[str]:
        """What there is."""
        from moto.backends import get_backend

        backends: Any = get_backend("s3")
        stores = [each for account in backends.values() for each in account.values()]
        keys = [key for each in stores for key in list(each.buckets["bucket"].keys)]  # at once: the server changes them
        return sorted(key.removeprefix(prefix) for key in keys if key.startswith(prefix))

    def clear(self) -> None:
        """Empty it and open the gate."""
        self.gate = lambda method, path: None
        for name in self.names():
            self.delete(name)
        self.requests.clear()

    def close(self) -> None:
        self._front.shutdown()
        self._front.server_close()
        self._thread.join()
        self._behind.stop()
        self._behind._server.server_close()

    def _ask(self, method: str, name: str, data: bytes | None = None) -> bytes:
        host, port = self._behind.get_host_and_port()
        url = f"http://{host}:{port}/bucket/{name}".rstrip("/")
        request = urllib.request.Request(url, data, _HEADERS, method=method)
        with urllib.request.urlopen(request) as answer:
            return answer.read()


def _handler(store: ObjectStore, behind: tuple[str, int]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one_request(self) -> None:
            try:
                super().handle_one_request()
            except ConnectionError:  # a rank that was killed
                self.close_connection = True

        def _pass(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            store.requests.append((self.command, self.path))
            verdict = store.gate(self.command, self.path)
            if isinstance(verdict, float):
                time.sleep(verdict)
            elif verdict == "drop":
                self.close_connection = True
                return
            elif verdict == "503":
                self._answer(503, {}, b"<Error><Code>ServiceUnavailable</Code><Message>busy</Message></Error>")
                return
            connection = http.client.HTTPConnection(*behind)
            try:
                connection.request(self.command, self.path, body, dict(self.headers))
                answer = connection.getresponse()
                self._answer(answer.status, dict(answer.getheaders()), answer.read())
            finally:
                connection.close()

        def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
            self.send_response(status)
            for name, value in headers.items():
                if name.lower() not in _HOP:
                    self.send_header(name, value)
            size = headers.get("Content-Length", "0") if self.command == "HEAD" else str(len(body))
            self.send_header("Content-Length", size)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    for method in ("GET", "PUT", "POST", "DELETE", "HEAD"):
        setattr(Handler, f"do_{method}", Handler._pass)
    return Handler
