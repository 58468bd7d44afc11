"""The clouds by name: each is ``SkyPilot`` with its cloud said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from atoll.core.validation import suggests_fields
from atoll.providers.skypilot import KINDS
from atoll.providers.skypilot.machines import SkyPilot


@suggests_fields
@dataclass(frozen=True, slots=True)
class AWS(SkyPilot):
    """Amazon's machines; see ``SkyPilot``."""

    kind: ClassVar[str] = "aws"


@suggests_fields
@dataclass(frozen=True, slots=True)
class GCP(SkyPilot):
    """Google's machines; see ``SkyPilot``."""

    kind: ClassVar[str] = "gcp"


@suggests_fields
@dataclass(frozen=True, slots=True)
class Azure(SkyPilot):
    """Microsoft's machines; see ``SkyPilot``."""

    kind: ClassVar[str] = "azure"


@suggests_fields
@dataclass(frozen=True, slots=True)
class Kubernetes(SkyPilot):
    """Pods of a Kubernetes cluster; ``region`` is its context; see ``SkyPilot``."""

    kind: ClassVar[str] = "k8s"


@suggests_fields
@dataclass(frozen=True, slots=True)
class Nebius(SkyPilot):
    """Nebius's machines; see ``SkyPilot``."""

    kind: ClassVar[str] = "nebius"


@suggests_fields
@dataclass(frozen=True, slots=True)
class Lambda(SkyPilot):
    """Lambda's machines; see ``SkyPilot``."""

    kind: ClassVar[str] = "lambda"


@suggests_fields
@dataclass(frozen=True, slots=True)
class RunPod(SkyPilot):
    """RunPod's machines; see ``SkyPilot``."""

    kind: ClassVar[str] = "runpod"


PROVIDER = SkyPilot
_WRITTEN = {each.kind: each for each in (AWS, GCP, Azure, Kubernetes, Nebius, Lambda, RunPod)}
PROVIDERS: Mapping[str, type[SkyPilot]] = {
    kind: _WRITTEN.get(kind) or type(kind.capitalize(), (SkyPilot,), {"kind": kind, "__doc__": SkyPilot.__doc__})
    for kind in KINDS
}
for _kind, _provider in PROVIDERS.items():
    _provider.form, _provider.undeclared = f"{_kind}[/REGION[/ZONE]]", ""
    _provider.expected = "cloud/region/zone, three parts at most"
    if _kind in ("k8s", "kubernetes"):
        _provider.form, _provider.expected = f"{_kind}[/CONTEXT]", f"{_kind}/CONTEXT, with a context of ~/.kube/config"
