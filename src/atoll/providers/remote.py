"""Nodes on other machines: what a pool has to know of them beyond what every node has."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from atoll.providers.base import Node, NodePlan, Provider


@dataclass(frozen=True, slots=True)
class Bundle:
    """A zip file of Python code that goes to hosts; ``digest`` is the SHA-256 of its bytes and names it there."""

    path: Path
    digest: str

    @property
    def name(self) -> str:
        """Its file name."""
        return f"{self.digest[:24]}.zip"


@dataclass(frozen=True, slots=True)
class RemotePlan(NodePlan):
    """A node on another machine. Paths are that machine's.

    Attributes:
        host: what to call it in messages.
        python: its interpreter, and ``python_version`` that one's, e.g. ``(3, 12, 1)``.
        home: where ranks start.
        folder: a folder of the user's that can be written to and stays.
        tmp: where temporary files go.
        cores: that its ranks share.
        base_env: environment of a command there.
        bundles: code that ranks import from, Atoll's first; ``present`` are digests of those that are there.
        packages: folders of packages that its ranks import from before the interpreter's own.
        grace_s: how long a lost connection may last, in seconds.
        seen: what a preflight judges of it, as ``Facts.seen``.
    """

    host: str = ""
    python: str = "python3"
    python_version: tuple[int, ...] = ()
    home: str = "/"
    folder: str = "/tmp"
    tmp: str = "/tmp"
    cores: int = 1
    base_env: Mapping[str, str] = field(default_factory=dict, repr=False)
    bundles: tuple[Bundle, ...] = ()
    present: frozenset[str] = frozenset()
    packages: tuple[str, ...] = ()
    grace_s: float = 30.0
    seen: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def bundle_path(self, bundle: Bundle) -> str:
        """Where a bundle lies there."""
        return posixpath.join(self.folder, "bundle", bundle.name)

    @property
    def minor(self) -> str:
        """``3.12`` of 3.12.1."""
        return ".".join(map(str, self.python_version[:2]))

    @property
    def import_path(self) -> list[str]:
        """What comes first in a rank's ``sys.path``."""
        return [*(self.bundle_path(bundle) for bundle in self.bundles), *self.packages]


Starting = Callable[[Callable[[], None]], None]


class RemoteHandle(Node, Protocol):
    """A started node on another machine."""

    def listen(self, on_silence: Callable[[float, str], object]) -> None:
        """From now on, tell when the host has not been heard for so many seconds (0: it is again), and a line of it."""


class RemoteProvider(Provider, Protocol):
    """A provider of such nodes."""

    def start_remote(self, node: NodePlan, starting: Starting) -> RemoteHandle:
        """Start one node; ``starting`` is given what makes the start fail soon, from another thread."""
