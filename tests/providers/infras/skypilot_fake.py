"""A cloud of hosts of the testbed that misbehaves as ``fake.json`` in ATOLL_HOME says: SkyPilot's process, without it.

``hosts``, ``key``: addresses of the machines, and how to log in. ``polls``: so often a request is not done yet;
``error``: how it ends, ``[type, message]``. ``missing``: what is to be set up. ``price``: of a machine. ``guard``: how
machines end themselves. ``status``: of the cluster instead of what it is. ``says``: what it ends with at its start.
Each call is a line of ``calls.jsonl`` beside it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

HOME = Path(os.environ["ATOLL_HOME"])
CLUSTERS = HOME / "fake-clusters"
polls: dict[str, int] = {}


def script() -> dict[str, Any]:
    return dict(json.loads((HOME / "fake.json").read_text()))


class CloudError(Exception):
    """``[type, message]``."""


def offers(resources: dict[str, Any], num_nodes: int) -> list[dict[str, Any]]:
    how = script()
    if how.get("no_offers"):
        raise CloudError(*how["no_offers"])
    cloud, _, region = (resources["infra"] or "").partition("/")
    kinds = resources.get("accelerators") or []
    if "H100:8" in kinds:
        raise CloudError("ResourcesUnavailableError", f"{cloud}: nothing there fits")
    name, _, count = (kinds if isinstance(kinds, str) else next(iter(kinds), "")).partition(":")
    price = how.get("price", 0.8) * (2 if cloud == "gcp" else 1)
    offer = {"cloud": cloud, "region": region or "us-east-1", "zone": None, "instance_type": "g6.xlarge"}
    offer |= {"use_spot": bool(resources.get("use_spot")), "missing": how.get("missing", "")}
    return [{**offer, "price": price, "spot_price": price / 2, "accelerators": {name: int(count)} if name else {}}]


def check(cloud: str) -> str:
    return str(script().get("missing", ""))


def gpus(cloud: str) -> list[dict[str, Any]]:
    machine = {"name": "L4", "count": 1, "instance_type": "g6.xlarge", "region": "us-east-1"}
    return [{**machine, "price": 0.8, "spot_price": 0.4}]


def launch(name: str, resources: dict[str, Any], num_nodes: int, idle_minutes: int) -> dict[str, Any]:
    return _begin(name, {"num_nodes": num_nodes, "infra": resources["infra"]})


def start(name: str, guard: str, idle_minutes: int) -> dict[str, Any]:
    return _begin(name, json.loads((CLUSTERS / name).read_text()))


def _begin(name: str, cluster: dict[str, Any]) -> dict[str, Any]:
    CLUSTERS.mkdir(exist_ok=True)
    (CLUSTERS / name).write_text(json.dumps({**cluster, "status": "UP"}))
    return {"request": f"request-of-{name}", "guard": script().get("guard", "stop")}


def request(request_id: str) -> dict[str, Any]:
    how = script()
    polls[request_id] = polls.get(request_id, 0) + 1
    if not (CLUSTERS / request_id.removeprefix("request-of-")).exists():
        raise CloudError("RequestCancelled", "the request was cancelled")
    if polls[request_id] <= how.get("polls", 0):
        return {"done": False, "line": "Instances are being made."}
    if how.get("error"):
        raise CloudError(*how["error"])
    return {"done": True, "line": ""}


def describe(name: str, folder: str = "", refresh: bool = False) -> dict[str, Any] | None:
    how = script()
    if not (CLUSTERS / name).exists():
        return None
    cluster = {**json.loads((CLUSTERS / name).read_text()), **({"status": how["status"]} if "status" in how else {})}
    hosts = [name, *(f"{name}-worker{node}" for node in range(1, cluster["num_nodes"]))]
    addresses = how["hosts"][: cluster["num_nodes"]]
    if folder:
        lines = [
            f"Host {host}\n  HostName {address}\n  User sky\n  IdentityFile {how['key']}\n  HostKeyAlias {host}\n"
            f'  UserKnownHostsFile "{folder}/{name}.known"\n  GlobalKnownHostsFile /dev/null\n'
            for host, address in zip(hosts, addresses, strict=True)
        ]
        Path(folder, f"{name}.conf").write_text("".join(lines))
    cloud, _, region = cluster["infra"].partition("/")
    found = {"status": cluster["status"], "reason": "", "infra": [cloud, region or "us-east-1"], "hosts": hosts}
    return {**found, "hourly_cost": how.get("price", 0.8), "addresses": addresses}


def renew(name: str, guard: str, idle_minutes: int) -> None:
    pass


def stop(name: str) -> None:
    cluster = json.loads((CLUSTERS / name).read_text())
    (CLUSTERS / name).write_text(json.dumps({**cluster, "status": "STOPPED"}))


def end_server() -> None:
    pass


def down(name: str, request_id: str = "") -> bool:
    there = (CLUSTERS / name).exists()
    (CLUSTERS / name).unlink(missing_ok=True)
    return there


if "says" in script():
    sys.exit(script()["says"])
for line in sys.stdin:
    asked = json.loads(line)
    with open(HOME / "calls.jsonl", "a") as log:
        log.write(json.dumps([asked["method"], asked["arguments"]]) + "\n")
    try:
        answer = {"result": globals()[asked["method"]](**asked["arguments"])}
    except CloudError as error:
        answer = {"error": {"type": error.args[0], "message": error.args[1]}}
    print(json.dumps({"id": asked["id"], **answer}), flush=True)
