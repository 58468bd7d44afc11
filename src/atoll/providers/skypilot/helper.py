"""The program that has SkyPilot's SDK: ``client`` runs it with the interpreter that has SkyPilot.

On standard input it gets a JSON line for each request, ``{"id": 1, "method": "launch", "arguments": {…}}``, and answers
with ``{"id": 1, "result": …}`` or ``{"id": 1, "error": {"type": …, "message": …}}``, in order. It ends with its input.
What of SkyPilot is not its public SDK, and so belongs to the version that is installed, is used here alone.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import queue
import re
import shlex
import sys
import threading
import traceback
from typing import Any

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_NO_CATALOG = ("kubernetes", "slurm", "ssh")
_UNCHECKED = ("StrictHostKeyChecking", "UserKnownHostsFile", "GlobalKnownHostsFile")  # as it checks no host's key
# What ssh goes through, which has none of our variables: as the server is now, not as it was when a cluster was made.
_PROXY = """{token}=$(cat {folder}/password)
export {token}
python=$1; program=$2; shift 3
exec "$python" "$program" "http://127.0.0.1:$(cat {folder}/port)" "$@"
"""
_NO_NEWS = re.compile(r"[-\s]*$|[A-Z] \d\d-\d\d ")  # parts of a table, and what it logs


def main() -> None:
    """Answer until the input ends."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what SkyPilot prints
    requests: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_answer_all, args=(requests, out), daemon=True).start()
    for line in sys.stdin:
        requests.put(line)
    os._exit(0)  # whatever it waits for: nobody wants to know


def _answer_all(requests: queue.Queue[str], out: io.TextIOBase) -> None:
    from sky.server import common

    while True:
        request = json.loads(requests.get())
        common.get_api_server_status_response.cache_clear()  # else a server that was just ended counts as well for 5 s
        try:
            answer = {"result": _METHODS[request["method"]](**request["arguments"])}
        except BaseException as error:  # noqa: BLE001 - the other side raises it
            traceback.print_exception(error)
            answer = {"error": {"type": type(error).__name__, "message": _plain(str(error))}}
        out.write(json.dumps({"id": request["id"], **answer}) + "\n")


def _plain(text: str) -> str:
    return _ANSI.sub("", text)


# ------------------------------------------------------------------------------------- what can be had, and its price
def offers(resources: dict[str, Any], num_nodes: int) -> list[dict[str, Any]]:
    """What fits a task's resources by the catalogs on disk, the cheapest first; asks no cloud for machines.

    Accelerators that are listed come in their order, as SkyPilot takes them.
    """
    import sky

    task = sky.Task.from_yaml_config({"resources": resources, "num_nodes": num_nodes})
    found, hints = [], []
    for each in task.resources:
        if each.cloud is not None:
            each.cloud.validate_region_zone(each.region, each.zone)  # it names the nearest ones
        for cloud in _clouds(each.cloud):
            some, why = _offers_of(each.copy(cloud=cloud), cloud, num_nodes)
            found += some
            hints += [f"{cloud}: {why}" for _ in (0,) if why]
    if not found:
        raise sky.exceptions.ResourcesUnavailableError("; ".join(dict.fromkeys(hints)) or "no machine fits")
    in_order = isinstance(task.resources, list)
    return sorted(found, key=lambda offer: (bool(offer["missing"]), 0.0 if in_order else _cost(offer)))


def _cost(offer: dict[str, Any]) -> float:
    cost = offer["spot_price" if offer["use_spot"] else "price"]
    return float("inf") if cost is None else float(cost)


def _clouds(cloud: Any) -> list[Any]:
    """The cloud that was named, else those that are set up, else those whose prices are on disk."""
    from sky.utils.registry import CLOUD_REGISTRY

    if cloud is not None:
        return [cloud]
    known = [each for each in CLOUD_REGISTRY.values() if _name(each) not in _NO_CATALOG]
    return [each for each in known if not _missing(each)] or [each for each in known if _has_catalog(each)]


def _has_catalog(cloud: Any) -> bool:
    from sky.catalog import common

    return os.path.exists(common.get_catalog_path(f"{_name(cloud)}/vms.csv"))


def _name(cloud: Any) -> str:
    return str(cloud.canonical_name())


def _offers_of(resources: Any, cloud: Any, num_nodes: int) -> tuple[list[dict[str, Any]], str]:
    missing = _missing(cloud)
    place = {"cloud": _name(cloud), "region": resources.region, "zone": resources.zone}
    same = {"use_spot": resources.use_spot, "missing": missing, "accelerators": resources.accelerators or {}}
    if _name(cloud) in _NO_CATALOG:
        return [{**place, **same, "instance_type": "", "price": None, "spot_price": None}], ""
    feasible = cloud.get_feasible_launchable_resources(resources, num_nodes)
    found = []
    for chosen in feasible.resources_list[:4]:
        args = (chosen.instance_type, chosen.accelerators, chosen.use_spot, chosen.region, chosen.zone)
        regions = [region.name for region in cloud.regions_with_offering(*args)]
        priced = [(_price(chosen.copy(region=region), chosen.use_spot), region) for region in regions]
        priced = [each for each in priced if each[0] is not None]
        if not priced:
            continue
        region = min(priced)[1]
        here = chosen.copy(region=region)
        prices = {"price": _price(here, False), "spot_price": _price(here, True)}
        kinds = chosen.accelerators or {}
        same = {**same, "accelerators": kinds}
        found.append({**place, **same, **prices, "region": region, "instance_type": chosen.instance_type})
    near = ", ".join(feasible.fuzzy_candidate_list[:5])
    why = _plain(feasible.hint or (f"it has {near}" if near else "nothing there fits"))
    return found, "" if found else why


def _price(resources: Any, use_spot: bool) -> float | None:
    """Of an hour in US dollars, None where it is not offered."""
    try:
        cost = float(resources.copy(use_spot=use_spot).get_cost(3600))
    except (ValueError, AssertionError, KeyError):
        return None
    return cost if cost == cost else None


def _missing(cloud: Any) -> str:
    """What has to be set up before a cloud can be used; empty where nothing has."""
    from sky.clouds import CloudCapability

    try:
        well, why = cloud.check_credentials(CloudCapability.COMPUTE)
    except Exception as error:  # noqa: BLE001 - of the cloud's own package
        return _first_lines(str(error))
    if isinstance(why, dict):
        return "" if well else _first_lines("; ".join(f"{name}: {said}" for name, said in why.items()))
    return "" if well else _first_lines(why or "it has no credentials here")


def _first_lines(text: str) -> str:
    text = re.split(r"^\s*Details:", _plain(text), maxsplit=1, flags=re.M)[0]  # tracebacks and the like
    lines = [line.strip().lstrip("-* ") for line in text.strip().splitlines()]
    return " ".join(line for line in lines if line)[:300].rstrip(".")


def check(cloud: str) -> str:
    """What has to be set up before a cloud can be used; empty where nothing has."""
    from sky.utils.registry import CLOUD_REGISTRY

    return _missing(CLOUD_REGISTRY.from_str(cloud))


def gpus(cloud: str) -> list[dict[str, Any]]:
    """The accelerators of a cloud by its catalog on disk, each with its cheapest machine."""
    from sky import catalog

    if cloud in _NO_CATALOG:
        return []
    found: dict[tuple[str, float], dict[str, Any]] = {}
    for name, machines in catalog.list_accelerators(gpus_only=True, clouds=cloud).items():
        for each in machines:
            row = {"name": name, "count": _count(each.accelerator_count), "instance_type": each.instance_type}
            row |= {"region": each.region, "price": _number(each.price), "spot_price": _number(each.spot_price)}
            known = found.setdefault((name, each.accelerator_count), row)
            if (row["price"] or float("inf")) < (known["price"] or float("inf")):
                found[name, each.accelerator_count] = row
    return [found[key] for key in sorted(found)]


def _count(value: float) -> float:
    return int(value) if value == int(value) else value  # parts of a GPU are rented, too


def _number(value: Any) -> float | None:
    return None if value is None or value != value else float(value)


# ---------------------------------------------------------------------------------------------------------- clusters
_waiting: dict[str, _Request] = {}


class _Request:
    """A request of SkyPilot's server that somebody waits for."""

    def __init__(self, request_id: str) -> None:
        self.said = io.StringIO()
        self.error: BaseException | None = None
        self._id = request_id
        self.thread = threading.Thread(target=self._wait, daemon=True)
        self.thread.start()

    def _wait(self) -> None:
        import sky

        try:
            sky.stream_and_get(self._id, output_stream=self.said)
        except BaseException as error:  # noqa: BLE001 - whoever asks raises it
            self.error = error


def launch(name: str, resources: dict[str, Any], num_nodes: int, idle_minutes: int) -> dict[str, Any]:
    """Begin to make a cluster that runs nothing; its request's id, and what happens after so many idle minutes."""
    import sky

    task = sky.Task.from_yaml_config({"resources": resources, "num_nodes": num_nodes})
    guard = _guard(task)
    return {"request": sky.launch(task, cluster_name=name, **_ends(guard, idle_minutes)), "guard": guard}


def start(name: str, guard: str, idle_minutes: int) -> dict[str, Any]:
    """Begin to start a cluster that was stopped."""
    import sky

    return {"request": sky.start(name, **_ends(guard, idle_minutes)), "guard": guard}


def _ends(guard: str, idle_minutes: int) -> dict[str, Any]:
    """How machines end themselves so many minutes from now, as SkyPilot's calls take it.

    Whatever runs there: by default its autostop waits for terminals to be closed, as those of a machine that has lost
    its power are not for hours.
    """
    from sky.skylet.autostop_lib import AutostopWaitFor

    if not guard:
        return {}
    return {"idle_minutes_to_autostop": idle_minutes, "wait_for": AutostopWaitFor.NONE, "down": guard == "down"}


def _guard(task: Any) -> str:
    """How the machines of a task can end themselves: ``stop``, ``down``, or not at all."""
    from sky.clouds import CloudImplementationFeatures as Features

    able = {"stop", "down"}
    for each in task.resources:
        if each.cloud is not None:
            lacking = type(each.cloud)._unsupported_features_for_resources(each)
            stops = Features.STOP in lacking or Features.AUTOSTOP in lacking or each.use_spot
            able -= {"stop"} if stops else set()
            able -= {"down"} if Features.AUTODOWN in lacking else set()
        else:
            able -= {"stop"}
    return "stop" if "stop" in able else "down" if "down" in able else ""


def request(request_id: str) -> dict[str, Any]:
    """How far a request is; raises what it ended with."""
    waiting = _waiting.get(request_id)
    if waiting is None:
        waiting = _waiting[request_id] = _Request(request_id)
    waiting.thread.join(0.5)
    if waiting.thread.is_alive():
        lines = [line.strip("└├─ ") for line in _plain(waiting.said.getvalue()).splitlines()]
        return {"done": False, "line": next((line for line in reversed(lines) if not _NO_NEWS.match(line)), "")}
    del _waiting[request_id]
    if waiting.error is not None:
        raise waiting.error
    return {"done": True, "line": ""}


def describe(name: str, folder: str = "", refresh: bool = False) -> dict[str, Any] | None:
    """A cluster as it is, None where there is none; writes how ssh reaches its nodes into ``folder``."""
    import sky

    mode = sky.StatusRefreshMode.FORCE if refresh else sky.StatusRefreshMode.NONE
    records = sky.get(sky.status([name], refresh=mode, _include_credentials=bool(folder)))
    if not records:
        return None
    (record,) = records
    handle, status = record["handle"], record["status"].value
    found = {"status": status, "reason": record.get("init_status_reason") or ""}
    if status != "UP" or handle is None:
        return found
    resources = handle.launched_resources
    found |= {
        "infra": [part for part in (_name(resources.cloud), resources.region, resources.zone) if part],
        "instance_type": resources.instance_type or "",
        "hourly_cost": None if _name(resources.cloud) in _NO_CATALOG else _price(resources, resources.use_spot),
        "use_spot": resources.use_spot,
        "addresses": [inside for inside, _ in handle.stable_internal_external_ips or []],
    }
    if folder:
        found["hosts"] = _write_entries(handle, record["credentials"], folder)
    return found


def _write_entries(handle: Any, credentials: dict[str, Any], folder: str) -> list[str]:
    """Have SkyPilot write the entries for ssh into a folder of ours; the names that they are for, head first."""
    from sky.client.cli import command
    from sky.skylet.constants import SERVICE_ACCOUNT_TOKEN_ENV_VAR
    from sky.utils.cluster_utils import SSHConfigHelper

    os.makedirs(folder, 0o700, exist_ok=True)
    SSHConfigHelper.ssh_conf_path = os.path.join(folder, "unused")  # it would change the user's
    SSHConfigHelper.ssh_cluster_path = os.path.join(folder, "{}.sky")
    SSHConfigHelper.ssh_cluster_key_path = os.path.join(folder, "{}.key")
    aside = os.path.join(folder, f"{handle.cluster_name}.proxy")
    with open(aside, "w") as file:
        file.write(_PROXY.format(folder=shlex.quote(os.path.dirname(folder)), token=SERVICE_ACCOUNT_TOKEN_ENV_VAR))
    os.replace(aside, os.path.join(folder, "proxy"))  # others go through it
    proxy = f"/bin/sh {shlex.quote(folder)}/proxy {command._get_ws_proxy_command()}"
    command._write_ssh_config_for_cluster(handle, credentials, proxy)
    name = handle.cluster_name
    entries = os.path.join(folder, f"{name}.sky")
    with open(entries) as file:
        lines = file.read().splitlines()
    os.unlink(entries)
    hosts, kept = [], []
    for line in lines:
        key, _, value = line.strip().replace("=", " ", 1).partition(" ")
        if key not in _UNCHECKED:
            kept.append(line)
        if key == "Host":
            hosts.append(value)
            known = os.path.join(folder, f"{name}.known")
            kept += [f'  UserKnownHostsFile "{known}"', "  GlobalKnownHostsFile /dev/null", f"  HostKeyAlias {value}"]
    aside = os.path.join(folder, f"{name}.new")
    with open(aside, "w") as file:
        file.write("\n".join(kept) + "\n")
    os.replace(aside, os.path.join(folder, f"{name}.conf"))
    return hosts


def renew(name: str, guard: str, idle_minutes: int) -> None:
    """Count the minutes until a cluster ends itself from now."""
    import sky

    how = _ends(guard, idle_minutes)
    sky.get(sky.autostop(name, how.pop("idle_minutes_to_autostop"), **how))


def stop(name: str) -> None:
    """Stop a cluster; its disks stay."""
    import sky

    sky.get(sky.stop(name))


def down(name: str, request_id: str = "") -> bool:
    """Take a cluster down, also one that is being made by a request; False where there is none."""
    import requests
    import sky

    if request_id:
        with contextlib.suppress(requests.exceptions.ConnectionError):  # the request has ended with its server
            sky.get(sky.api_cancel([request_id], silent=True))
    try:
        sky.get(sky.down(name))
    except sky.exceptions.ClusterDoesNotExist:
        return False
    return True


def end_server() -> None:
    """End SkyPilot's server, which the next request starts again."""
    import sky

    sky.api_stop()


_METHODS = {
    each.__name__: each
    for each in (offers, check, gpus, launch, start, request, describe, renew, stop, down, end_server)
}

if __name__ == "__main__":
    import sky as _sky

    if _sky.__version__ != sys.argv[1]:
        sys.exit(f"it has SkyPilot {_sky.__version__}, and {sys.argv[1]} is needed")
    main()
