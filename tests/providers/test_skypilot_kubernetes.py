"""SkyPilot's real SDK on Kubernetes: the pods that it asks for, of an API server that keeps what it gets, and no more.

It answers as a cluster of two nodes with eight L4 each.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.providers.test_skypilot_slurm import installed, run, wheels

import leaks
from atoll.providers.skypilot import client, environment

__all__ = ["wheels"]

pytestmark = [pytest.mark.long, pytest.mark.serial, pytest.mark.timeout(900)]
ROOM = {"cpu": "64", "memory": "512Gi", "nvidia.com/gpu": "8", "pods": "110"}
NODES = [
    {
        "metadata": {"name": f"node{number}", "labels": {"skypilot.co/accelerator": "l4"}},
        "spec": {},
        "status": {
            "capacity": ROOM,
            "allocatable": ROOM,
            "conditions": [{"type": "Ready", "status": "True"}],
            "addresses": [{"type": "InternalIP", "address": f"10.0.0.{number}"}],
        },
    }
    for number in (1, 2)
]
KUBECONFIG = """apiVersion: v1
kind: Config
current-context: lab
clusters: [{{name: here, cluster: {{server: "http://127.0.0.1:{port}"}}}}]
users: [{{name: me, user: {{token: secret}}}}]
contexts:
- {{name: lab, context: {{cluster: here, user: me, namespace: default}}}}
- {{name: other, context: {{cluster: here, user: me, namespace: default}}}}
"""


class Cluster(BaseHTTPRequestHandler):
    """What a cluster answers; objects are kept by their path."""

    objects: dict[str, dict[str, Any]]
    posted: list[dict[str, Any]]
    seen: list[str]

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        kept = [each for at, each in sorted(self.objects.items()) if at.rpartition("/")[0] == path]
        if path in self.objects:
            self.answer(200, self.objects[path])
        elif path == "/api/v1/nodes":
            self.answer(200, {"kind": "NodeList", "apiVersion": "v1", "metadata": {}, "items": NODES})
        elif re.search(r"/[a-z]+s$", path):
            self.answer(200, {"kind": "List", "apiVersion": "v1", "metadata": {}, "items": kept})
        else:
            self.answer(404, {"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404})

    def do_POST(self) -> None:
        made = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.posted.append(made)
        if made.get("kind") == "Pod":
            made["status"] = {"phase": "Pending", "conditions": []}
            made["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
        self.objects[f"{self.path.partition('?')[0]}/{made['metadata'].get('name', 'x')}"] = made
        self.answer(201, made)

    def do_PATCH(self) -> None:
        self.do_POST()

    def do_DELETE(self) -> None:
        self.objects.pop(self.path.partition("?")[0], None)
        self.answer(200, {"kind": "Status", "status": "Success"})

    def answer(self, code: int, body: dict[str, Any]) -> None:
        self.seen.append(f"{self.command} {self.path} {code}")
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def cluster(home: Path, tmp_path: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Cluster]]:
    """The cluster of the context ``lab``, and of ``other``."""
    kept = type("Kept", (Cluster,), {"objects": {}, "posted": [], "seen": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kept)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".kube").mkdir()
    (tmp_path / ".kube" / "config").write_text(KUBECONFIG.format(port=server.server_port))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "socat").write_text("#!/bin/sh\n")  # SkyPilot asks for it, and needs it where a pod runs
    (tmp_path / "bin" / "socat").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    try:
        with installed(wheels, monkeypatch):
            yield kept
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_pods_are_as_the_task_says(cluster: type[Cluster], tmp_path: Path) -> None:
    task = tmp_path / "task.yaml"
    task.write_text(
        "num_nodes: 2\nrun: echo hi\n"
        "resources: {infra: k8s/lab, accelerators: L4:4, cpus: 8, memory: 64, image_id: docker:ubuntu:24.04}\n"
    )
    # No pod starts, as where all GPUs are in use.
    said = run("launch", "-c", "c", str(task), code=100)
    why = r"^atoll: k8s/lab gave no nodes: SkyPilot: Kubernetes \(lab\) .*Pod status: Pending: try another region"
    assert re.search(why, said, re.M)
    made = [each for each in cluster.posted if each.get("kind") == "Pod"]
    pods = {each["metadata"]["labels"]["ray-node-type"]: each["spec"] for each in made}
    assert [*sorted(pods)] == ["head", "worker"]
    for pod in pods.values():
        (container,) = pod["containers"]
        assert container["image"] == "ubuntu:24.04"
        assert container["resources"]["requests"] == {"cpu": 8.0, "memory": "64.0G", "nvidia.com/gpu": 4}
        (term,) = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
        label = {"key": "skypilot.co/accelerator", "operator": "In", "values": ["l4"]}
        assert term["matchExpressions"] == [label]
    assert [path for path in cluster.objects if "/pods/" in path] == []
    assert list((environment.folder() / "clusters").glob("*.json")) == []


def test_its_server_answers_nobody_else_and_has_one_port(cluster: type[Cluster]) -> None:
    assert client.ask("k8s", "describe", name="nothing") is None  # which starts it
    port = (environment.folder() / "port").read_text()
    ours = [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/environ")
        if f"SKYPILOT_API_SERVER_LOCAL_PORT={port}\0".encode() in read(path)
    ]
    assert {each for pid in ours for each in leaks.listening_ports(pid)} == {int(port)}
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    upgrade |= {"Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="}
    password = {"Authorization": f"Bearer {(environment.folder() / 'password').read_text()}"}
    for wrong in ({}, {"Authorization": "Bearer sky_x"}, {"Authorization": "Basic eDp4"}):
        for path in ("/api/health", "/status", "/dashboard/"):
            assert answer(port, path, wrong) == 401, (path, wrong)
        assert answer(port, "/slurm-job-ssh-proxy?cluster_name=c", wrong | upgrade) == 403
    assert answer(port, "/api/health", password) == 200
    file = environment.folder() / "password"
    assert file.stat().st_mode & 0o777 == 0o600
    file.unlink()  # another process chooses one: the server has to take it, then our helper
    asks = "from atoll.providers.skypilot import client; print(client.ask('k8s', 'describe', name='nothing'))"
    assert subprocess.run([sys.executable, "-c", asks], stdout=subprocess.PIPE, check=True).stdout == b"None\n"
    assert answer(port, "/api/health", password) == 401
    assert client.ask("k8s", "describe", name="nothing") is None


def answer(port: str, path: str, headers: dict[str, str]) -> int:
    """The status that its server answers a request with."""
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=30)
    try:
        connection.request("GET", path, headers=headers)
        return connection.getresponse().status
    finally:
        connection.close()


def read(path: Path) -> bytes:
    """A file of a process, which may end meanwhile."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_a_context_that_there_is_not_is_said_before_anything_is_started(cluster: type[Cluster]) -> None:
    said = run("launch", "--dryrun", "--infra", "k8s/labb", "true", code=2)
    assert "Context labb not found in kubeconfig" in said
    assert "contexts: ['lab', 'other']" in said
    assert "Cluster c on k8s/lab: 1 node" in run("launch", "--dryrun", "-c", "c", "--infra", "k8s/lab", "true")
    assert cluster.posted == []
