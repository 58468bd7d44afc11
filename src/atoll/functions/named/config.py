"""What the processes that use one named pool must agree on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from atoll.core.secrets import digest_credentials, shown_variable

IDLE_S = 600.0


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """A pool's settings as text, secrets as digests; ``given`` are those that were not left to their defaults."""

    settings: dict[str, str]
    given: dict[str, str]

    @classmethod
    def of(cls, settings: Mapping[str, object], given: Mapping[str, object]) -> PoolConfig:
        """The config of these settings; one of ``given`` that is None was left to its default."""
        text = {key: digest_credentials(str(value)) for key, value in settings.items()}
        return cls(text, {key: text[key] for key, value in given.items() if value is not None})

    def mismatch(self, running: Mapping[str, str]) -> str:
        """In what a pool with the ``running`` settings differs from what is given; nothing where it does not."""
        differing = [(key, running.get(key), value) for key, value in self.given.items() if running.get(key) != value]
        return "; ".join(f"it has {key}={has}, and {key}={value} is requested" for key, has, value in differing)


def shown_variables(variables: Mapping[str, object]) -> str:
    """Variables as text, secret ones as digests."""
    return ", ".join(f"{key}={shown_variable(key, str(value))}" for key, value in sorted(variables.items()))


def shown_provider(provider: object) -> str:
    """A provider as text, with what it was made from."""
    return repr(provider) if dataclasses.is_dataclass(provider) else str(getattr(provider, "name", provider))
