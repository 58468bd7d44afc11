"""A hub on loopback: the part of the Hugging Face HTTP API that downloads and uploads of models use.

Real files over real HTTP, with tokens, gates, ranges, and connections that break on request.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import importlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import huggingface_hub.constants
import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Repository:
    """Files of one model; ``gated`` ones give them to ``allowed`` tokens only, ``private`` ones hide altogether."""

    files: dict[str, bytes]
    gated: bool = False
    private: bool = False
    allowed: tuple[str, ...] = ()


@dataclass
class Hub:
    """What the server has, and what it was asked."""

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    asked: int = 0  # how often somebody wanted to know what a model consists of
    transfers: list[str] = field(default_factory=list)  # "name/file", one for each GET of a file
    ranges: list[str] = field(default_factory=list)  # the Range headers of those that had one
    break_after: dict[str, int] = field(default_factory=dict)  # file -> bytes, once; -1 for "at once, for ever"
    readers: tuple[str, ...] = ()  # tokens that may not write
    hold: threading.Event | None = None  # transfers wait for it
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, name: str, folder: Path, **kwargs: Any) -> Repository:
        """Serve the files of a folder as model ``name``."""
        files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        self.repositories[name] = repository = Repository(files, **kwargs)
        return repository


@contextlib.contextmanager
def used(home: Path) -> Iterator[Hub]:
    """A running hub that huggingface_hub uses, which reads its settings when it is imported."""
    with serve() as hub, pytest.MonkeyPatch.context() as patch:
        for name in ("HF_HUB_OFFLINE", "HF_TOKEN", "HF_HUB_CACHE"):
            patch.delenv(name, raising=False)
        # Large files go over LFS: Xet is a service of its own.
        for name, value in {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}.items():
            patch.setenv(name, value)
        importlib.reload(huggingface_hub.constants)
        yield hub
        huggingface_hub.close_session()
    importlib.reload(huggingface_hub.constants)


@contextlib.contextmanager
def serve() -> Iterator[Hub]:
    """A running hub; stopped and joined on the way out."""
    hub = Hub()

    class Bound(_Handler):
        pass

    Bound.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Bound)
    server.daemon_threads = False
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, name="hub")
    thread.start()
    try:
        yield hub
    finally:
        if hub.hold is not None:
            hub.hold.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"
    timeout = 20  # of a client that has stopped reading or asking

    def log_message(self, *_: Any) -> None:
        """Nothing on stderr."""

    # ---------------------------------------------------------------------------------------------- requests
    def do_HEAD(self) -> None:
        self._get(body=False)

    def do_GET(self) -> None:
        self._get(body=True)

    def _get(self, *, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        if found := re.fullmatch(r"/api/models/((?:[^/]+/)?[^/]+)(?:/revision/([^/]+))?", path):
            self._about(found[1], found[2] or "main")
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)(/.*)?", path):
            self._tree(found[1], found[2])
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._file(found[1], found[2], found[3], body=body)
        else:
            self._refuse(404, "EntryNotFound", path)

    def do_POST(self) -> None:
        path = unquote(urlsplit(self.path).path)
        data = self._body()
        if path == "/api/repos/create":
            self._create(json.loads(data))
        elif path == "/api/validate-yaml":
            self._json({"errors": [], "warnings": []})
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/([^/]+)", path):
            asked = json.loads(data)["files"]
            modes = [
                {"path": each["path"], "uploadMode": "lfs" if each["path"].endswith(".safetensors") else "regular"}
                for each in asked
            ]
            self._json({"files": [{**each, "shouldIgnore": False} for each in modes]})
        elif found := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            self._batch(found[1], json.loads(data))
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/([^/]+)", path):
            self._commit(found[1], data)
        else:
            self._refuse(404, "EntryNotFound", path)

    def do_PUT(self) -> None:
        """The upload of one large file."""
        query = parse_qs(urlsplit(self.path).query)
        data = self._body()
        assert hashlib.sha256(data).hexdigest() == query["oid"][0]
        self.hub.repositories[query["name"][0]].files[f".lfs/{query['oid'][0]}"] = data
        self._json({})

    # --------------------------------------------------------------------------------------------- downloads
    def _about(self, name: str, revision: str) -> None:
        with self.hub.lock:
            self.hub.asked += 1
        repository = self._visible(name, revision)
        if repository is None:
            return
        self._json(
            {
                "_id": "1",
                "id": name,
                "modelId": name,
                "sha": COMMIT,
                "private": repository.private,
                "gated": "manual" if repository.gated else False,
                "tags": [],
                "downloads": 0,
                "likes": 0,
                "siblings": [{"rfilename": file} for file in repository.files],
            }
        )

    def _tree(self, name: str, revision: str) -> None:
        repository = self._visible(name, revision)
        if repository is None:
            return
        self._json(
            [
                {"type": "file", "path": file, "size": len(data), "oid": _digest(data)}
                for file, data in repository.files.items()
            ]
        )

    def _file(self, name: str, revision: str, file: str, *, body: bool) -> None:
        repository = self._visible(name, revision)
        if repository is None:
            return
        if repository.gated and self._token() not in repository.allowed:
            self._refuse(401 if self._token() is None else 403, "GatedRepo", "Access to this model is restricted")
            return
        if file not in repository.files:
            self._refuse(404, "EntryNotFound", file)
            return
        data = repository.files[file]
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        start = int(asked[1]) if asked else 0
        if body:
            with self.hub.lock:
                self.hub.transfers.append(f"{name}/{file}")
                if asked:
                    self.hub.ranges.append(asked[0])
        self.send_response(206 if asked else 200)
        self.send_header("ETag", f'"{_digest(data)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(data) - start))
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if body:
            self._send(file, data[start:])

    def _send(self, file: str, data: bytes) -> None:
        if self.hub.hold is not None:
            self.hub.hold.wait(60)
        limit = self.hub.break_after.get(file)
        if limit is None:
            self.wfile.write(data)
            return
        if limit >= 0:
            del self.hub.break_after[file]
        self.wfile.write(data[: max(limit, 0)])
        self.wfile.flush()
        self.close_connection = True

    # ----------------------------------------------------------------------------------------------- uploads
    def _create(self, wanted: dict[str, Any]) -> None:
        if self._token() is None or self._token() in self.hub.readers:
            self._refuse(401 if self._token() is None else 403, "", "You don't have the rights to create a model")
            return
        name = f"{wanted['organization']}/{wanted['name']}"
        self.hub.repositories.setdefault(name, Repository({}))
        self._json({"url": f"{self.hub.url}/{name}", "name": name, "id": "1"})

    def _batch(self, name: str, wanted: dict[str, Any]) -> None:
        objects = [
            {**each, "actions": {"upload": {"href": f"{self.hub.url}/upload?name={name}&oid={each['oid']}"}}}
            for each in wanted["objects"]
        ]
        self._json({"transfer": "basic", "objects": objects}, kind="application/vnd.git-lfs+json")

    def _commit(self, name: str, data: bytes) -> None:
        files = self.hub.repositories[name].files
        for line in data.decode().splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = files.pop(f".lfs/{value['oid']}")
        self._json({"commitUrl": f"{self.hub.url}/{name}/commit/{COMMIT}", "commitOid": COMMIT, "success": True})

    # ------------------------------------------------------------------------------------------------- parts
    def _visible(self, name: str, revision: str) -> Repository | None:
        repository = self.hub.repositories.get(name)
        if repository is None or (repository.private and self._token() not in repository.allowed):
            self._refuse(404 if self._token() else 401, "RepoNotFound", "Repository not found")
            return None
        if revision not in ("main", COMMIT):
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return None
        return repository

    def _token(self) -> str | None:
        return (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def _json(self, value: Any, kind: str = "application/json") -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _refuse(self, status: int, code: str, message: str) -> None:
        data = json.dumps({"error": message}).encode()
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", message)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _digest(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
