"""Which provider an infra means: ``local``, ``ssh/NAME``, and any other whose file lies beside this one.

A provider is a module of this package, or a file ``ATOLL_HOME/providers/KIND.py``, that has a ``Provider`` in
``PROVIDER``; of a package it is the module ``provider``. A package whose infras begin with other words, too, lists
those in ``KINDS``, and its module ``provider`` has a provider for each in ``PROVIDERS``. Nothing else names an infra.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Iterator
from typing import Any

from atoll.core.errors import AtollError, ConfigError, ProvisionError
from atoll.core.paths import atoll_home
from atoll.core.validation import nearest
from atoll.providers.base import DEFAULT, GONE, Allocation, Provider

_FEW = 7  # of clouds, in a message
ANY = "*"  # in the place of a kind: any of those that one package reaches
_registered: dict[str, type[Provider]] = {}


def register(provider: type[Provider]) -> None:
    """Have a provider found by its ``kind`` in this process."""
    _registered[provider.kind] = provider


def resolve(infra: str) -> Provider:
    """The provider that an infra means.

    Raises:
        ConfigError: there is none; the message names the nearest one.
    """
    kind, _, name = infra.partition("/")
    if (provider := _find(kind)) is None:
        raise ConfigError(unknown(infra))
    return provider.resolve(infra if kind == ANY else name)


def unknown(infra: str) -> str:
    """What is said of an infra that is none."""
    meant = [each for each in declared() if each.partition("/")[2] == infra]
    hint = f": did you mean {meant[0]}?" if meant else nearest(infra, [*declared(), *kinds()])
    hint = hint or nearest(infra.partition("/")[0].lower(), kinds())
    return f"{infra}: no such infra{hint or f'; this version knows {_forms()}'}"


def of(allocation: Allocation) -> Provider:
    """The provider that has given an allocation.

    Raises:
        ConfigError: it is not known here.
    """
    if (provider := _find(allocation.infra.partition("/")[0])) is None:
        raise ConfigError(unknown(allocation.infra))
    return provider.of(allocation)


def is_known(infra: str) -> bool:
    """Is it an infra of a kind that this version knows?"""
    return _find(infra.partition("/")[0]) is not None


def is_here(infra: str) -> bool:
    """Are its nodes on this machine, where the caller's files and environment are?

    Raises:
        ConfigError: it is of no kind that this version knows.
    """
    if (provider := _find(infra.partition("/")[0])) is None:
        raise ConfigError(unknown(infra))
    return not provider.is_elsewhere


def fits(stated: str | None, infra: str) -> bool:
    """Is an infra the stated one? A part that is ``*`` or left out, and None, mean any."""
    parts = [] if stated is None else stated.split("/")
    actual = infra.split("/")
    if parts and actual[0] in _beside().get(parts[0], ()):  # `skypilot`, and it is one of the places behind that
        del parts[0]
    return len(parts) <= len(actual) and all(part in ("*", other) for part, other in zip(parts, actual, strict=False))


def wrong_form(infra: str) -> str | None:
    """What is expected instead of an infra of a known kind that is not written as those are, if it is none."""
    kind, _, name = infra.partition("/")
    provider = _find(kind)
    return None if provider is None or provider.has_form(name) else provider.expected


def lacking(infra: str, settings: tuple[str, ...]) -> list[str]:
    """One line for each setting of a task's resources that has no effect on an infra."""
    lacks = _known(infra.partition("/")[0]).lacks
    return [f"resources.{key} has no effect on {infra}: {lacks[key]}" for key in lacks if key in settings]


def declared() -> list[str]:
    """Every infra that the user can name without further ado: ``local``, and groups of ``config.toml``."""
    return [infra for kind in kinds() for infra in _known(kind).declared()]


def examine(infra: str) -> list[tuple[bool, str]]:
    """What ``atoll check`` says of an infra, line by line, and whether it is well."""
    if not is_known(infra):
        raise ConfigError(unknown(infra))
    try:
        provider = resolve(infra)
    except ConfigError as error:
        if infra in declared():  # with a mistake
            raise
        return [(False, str(error).removeprefix(f"{infra}: "))]
    return list(provider.examine())


def undeclared() -> list[str]:
    """How to declare an infra of each kind of which none is."""
    return [line for kind in kinds() if (line := _known(kind).undeclared) and not _known(kind).declared()]


def kept(*, stay: bool = False) -> contextlib.AbstractContextManager[None]:
    """While this lasts, machines are logged in to once and asked about themselves once, whoever wants to know.

    ``stay``: logins stay for who needs them next, unless it fails.
    """
    from atoll.providers.ssh.connection import connections

    return connections.kept(stay=stay)


@contextlib.contextmanager
def given_back_on_failure(provider: Provider, allocation: Allocation) -> Iterator[None]:
    """Release an allocation that nobody would know of if this failed.

    Raises:
        ProvisionError: why it ended meanwhile, where that is what made this fail.
    """
    try:
        yield
    except BaseException as error:
        now = allocation
        if isinstance(error, ProvisionError):
            with contextlib.suppress(AtollError, OSError):
                now = provider.poll(allocation)
        provider.release(allocation, keep_disks=False)
        is_over = now.state in GONE
        if is_over and now.reason not in str(error):  # an empty one says nothing
            raise ProvisionError(now.reason) from error
        raise


def close_idle() -> None:
    """Log out of machines that nobody uses."""
    if (module := sys.modules.get("atoll.providers.ssh.connection")) is not None:
        module.connections.close_idle()


def _forms() -> str:
    also = [kind for words in _beside().values() for kind in words]
    forms = ", ".join(_known(kind).form for kind in kinds() if kind not in also)
    return f"{forms} and clouds such as {', '.join(also[:_FEW])}"


def kinds() -> list[str]:
    """What an infra can begin with."""
    own = [path.stem for path in sorted((atoll_home() / "providers").glob("*.py"))]
    also = [kind for words in _beside().values() for kind in words]
    return list(dict.fromkeys([DEFAULT, *_beside(), *own, *_registered, *also]))


@functools.cache
def _beside() -> dict[str, tuple[str, ...]]:
    """The providers of this package, and of each the further words that its infras begin with."""
    import atoll.providers as package

    found = {}
    for each in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{each.name}")
        if each.ispkg or hasattr(module, "PROVIDER"):
            found[each.name] = getattr(module, "KINDS", ())
    return found


def _known(kind: str) -> type[Provider]:
    provider = _find(kind)
    assert provider is not None
    return provider


def _find(kind: str) -> type[Provider] | None:
    if kind in _registered:
        return _registered[kind]
    if kind == ANY:
        kind = next(name for name, words in _beside().items() if words)
    elif not kind.isidentifier():
        return None
    for name in (f"atoll.providers.{kind}", f"atoll.providers.{kind}.provider"):
        try:
            module: Any = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise
            break
        if hasattr(module, "PROVIDER"):
            provider: type[Provider] = module.PROVIDER
            return provider
    package = next((name for name, words in _beside().items() if kind in words), None)
    if package is not None:
        found: type[Provider] = importlib.import_module(f"atoll.providers.{package}.provider").PROVIDERS[kind]
        return found
    return _own(kind)


def _own(kind: str) -> type[Provider] | None:
    """The user's own, of ``ATOLL_HOME/providers``."""
    path = next((path for path in (atoll_home() / "providers").glob("*.py") if path.stem == kind), None)
    if path is None:
        return None
    spec = importlib.util.spec_from_file_location(f"atoll_provider_{kind}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses of it look there
    spec.loader.exec_module(module)
    provider: type[Provider] = module.PROVIDER
    register(provider)
    return provider
