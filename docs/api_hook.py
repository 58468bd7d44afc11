"""mkdocs hook: fills the API pages from `atoll.__all__` and `atoll.train.__all__`: what is public is documented."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))
atoll = importlib.import_module("atoll")
train = importlib.import_module("atoll.train")

MARKER = "<!-- public names -->"
# What a page has, in this order; every public name is on one.
PAGES = {
    "api-functions": "compute gather ComputeFunction Pending Group RankResults CallFuture Stream result instance_info "
    "InstanceInfo report latest_checkpoint shard DistributedSampler",
    "api-pools": "ComputePool Image named_pools LogLine integrations strategy joblib_backend events",
    "api-providers": "Local SSH Slurm SkyPilot AWS GCP Azure Kubernetes Nebius Lambda RunPod Accelerator NVIDIA AMD "
    "Habana TPU",
    "api-tasks": "Task Resources Dag launch exec get stream_and_get Job LaunchedJob RequestId ClusterHandle Record "
    "JobStatus status queue job_status tail_logs download_logs cancel stop start autostop down jobs ClusterStatus "
    "StatusRefreshMode list_accelerators cost_report",
    "api-errors": "AtollError ConfigError UsageError UnknownCluster ClusterNotUp exceptions ProvisionError ImageError "
    "RemoteError RemoteTraceback WorkerDied NodeLost HangError CallTimeout PoolClosed NeverDispatched "
    "SerializationError CheckpointError NonFiniteError",
}
# Members that modules of the package call on each other.
INTERNAL = ("settle", "settle_streams", "submit_call", "place")
# What calls give back: nobody makes one, so there is no constructor to show.
GIVEN = {"CallFuture", "Group", "Pending", "RankResults", "Stream"}


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Put one section for each public name in the place of a page's marker."""
    name = page.file.src_uri.removesuffix(".md")
    if name not in PAGES and name != "api-train":
        return markdown
    if MARKER not in markdown:
        raise ValueError(f"docs/{name}.md has lost its line {MARKER!r}")
    return markdown.replace(MARKER, "\n".join(_training() if name == "api-train" else _sections(PAGES[name].split())))


def _training() -> list[str]:
    lines: list[str] = []
    for name in sorted(train.__all__, key=str.lower):
        lines += [*_block(f"{train._WHERE[name]}.{name}", f"atoll.train.{name}", level=2), ""]
    return lines


def _sections(names: list[str]) -> list[str]:
    left_out = {name for name in atoll.__all__ if not name.startswith("__")} - {*" ".join(PAGES.values()).split()}
    if left_out:
        raise ValueError(f"on no page of docs/api_hook.py: {sorted(left_out)}")
    lines: list[str] = []
    for name in names:
        lines += [*_body(name, getattr(atoll, name)), ""]
    return lines


def _body(name: str, value: object) -> list[str]:
    """The mkdocstrings block of one name; a public module shows its public functions below it."""
    if not isinstance(value, ModuleType):
        return _block(_home(name), f"sky.{name}", level=2)
    lines = [f"## sky.{name}", "", inspect.getdoc(value) or "", ""]
    public = getattr(value, "__all__", None) or [n for n in vars(value) if not n.startswith("_")]
    for member in public:
        if getattr(getattr(value, member), "__module__", "").startswith("atoll"):
            lines += [*_block(f"{value.__name__}.{member}", f"sky.{name}.{member}", level=3), ""]
    return lines


def _block(path: str, heading: str, *, level: int) -> list[str]:
    options: dict[str, object] = {"heading": heading, "toc_label": heading, "heading_level": level}
    options["filters"] = ["!^_", f"!^({'|'.join(INTERNAL)})$"]
    if path.rpartition(".")[2] in GIVEN:
        options["merge_init_into_class"] = "false"
    return [f"::: {path}", "    options:", *(f"      {key}: {value}" for key, value in options.items())]


def _home(name: str) -> str:
    """Full path of the object behind a public name, where its docstring is written."""
    value = getattr(atoll, name)
    if isinstance(value, ModuleType):
        return value.__name__
    module = getattr(value, "__module__", None)
    qualified = getattr(value, "__qualname__", None)
    if module and qualified and re.fullmatch(r"atoll[.\w]*", module) and "<" not in qualified:
        return f"{module}.{qualified}"
    return f"{atoll._WHERE[name]}.{name}"
