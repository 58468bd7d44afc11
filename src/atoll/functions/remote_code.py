"""Pools on other machines: what of this machine's things has to travel, and what can't be had there."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import platform
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType

from atoll.core.errors import ConfigError, ProvisionError
from atoll.functions.serialize import ByValueModules
from atoll.images.image import Image, check_env
from atoll.images.local_files import include_paths
from atoll.images.remote_build import build
from atoll.providers.base import NodePlan, Plan, Provider
from atoll.providers.bundle import folder_files, pack

_MOST_BYTES = 100 << 20


def prepare(
    provider: Provider,
    plan: Plan,
    image: Image,
    pip: Sequence[str] | None,
    env: Mapping[str, object] | None,
    say: Callable[[str], None],
) -> tuple[Plan, dict[str, str]]:
    """The plan with what the image asks for, built on its nodes; variables of its ranks.

    Args:
        say: called with a line for each thing the user should know, and for each step that takes time.

    Raises:
        ConfigError: the image asks for what can't be had there.
        ImageError: a package can't be installed there.
        ProvisionError: a host's Python is not this one, or something there would make the ranks fail.
    """
    own = ".".join(platform.python_version_tuple()[:2])
    if image.python not in (None, own):
        raise ConfigError(
            f'Image(python="{image.python}"): this process runs Python {own}, and functions travel between equal minor '
            f"versions only. Run this with Python {image.python}, or leave python= out"
        )
    files = included_files(image.includes)
    variables = {**check_env("Image(env=)", image.env), **check_env("env=", env)}
    nodes = list(plan.nodes)
    if image.python is None:
        _refuse_other_python(nodes, own)
    if image.python or image.apt or image.pip or pip:
        nodes = build(provider, nodes, image, pip or (), say)
    if files:
        code = pack(files)
        nodes = [dataclasses.replace(node, bundles=(*node.bundles, code)) for node in nodes]
    return dataclasses.replace(plan, nodes=tuple(nodes)), variables


def _refuse_other_python(nodes: Sequence[NodePlan], own: str) -> None:
    other = [node for node in nodes if node.minor != own]
    if other:
        raise ProvisionError(
            f"{', '.join(f'{node.host} has Python {node.minor}' for node in other)}, this process {own}: functions "
            f"travel between equal minor versions only. Name a Python {own} there with SSH(python=...), let Atoll find "
            f'one with image=Image(python="{own}"), or run this with {other[0].minor}',
            node=other[0].node,
        )


def included_files(includes: Sequence[str | os.PathLike[str]]) -> list[tuple[str, Path]]:
    """Files of ``Image(includes=)`` with the names that they are imported under.

    Raises:
        ConfigError: an entry that is neither a path nor a module, or more than modules usually are.
    """
    include_paths(includes)  # refuses what can't be included
    files = [found for entry in includes for found in _files_of(os.fspath(entry))]
    size = sum(path.stat().st_size for _, path in files)
    if size > _MOST_BYTES:
        raise ConfigError(
            f"Image(includes=) has {size >> 20} MiB in {len(files)} files: name the modules rather than the folder "
            f"they are in; data is passed as an argument, or is already on the hosts"
        )
    return files


def _files_of(entry: str) -> Iterator[tuple[str, Path]]:
    path = Path(entry).expanduser().absolute()
    if not path.exists():
        spec = importlib.util.find_spec(entry.partition(".")[0])
        places = list(spec.submodule_search_locations or []) if spec is not None else []
        path = Path(places[0] if places else (spec.origin or "") if spec is not None else "")
    if path.is_file():
        yield path.name, path
    elif path.is_dir():
        yield from folder_files(path, path.name if (path / "__init__.py").exists() else "")


class LocalModules(ByValueModules):
    """The user's own modules, which no other machine has: what they define travels by value."""

    are_remote = True

    def __init__(self, image: Image) -> None:
        super().__init__()
        tops = {name.partition("/")[0].removesuffix(".py") for name, _ in included_files(image.includes)}
        self._shipped = frozenset(tops) | {"atoll", "cloudpickle", "__main__"}
        places = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
        self._installed = tuple({os.path.realpath(place) + os.sep for place in places})

    def _is_covered(self, name: str, module: ModuleType | None) -> bool:
        file = getattr(module, "__file__", None)
        if file is None or name.partition(".")[0] in self._shipped:
            return False
        parts = Path(file).parts
        installed = "site-packages" in parts or "dist-packages" in parts
        return not installed and not os.path.realpath(file).startswith(self._installed)
