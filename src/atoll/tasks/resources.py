"""What each node of a task should be: the ``resources`` of a task file, and ``Resources`` in Python."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, PlainValidator, StrictBool, ValidationError, model_validator

from atoll.core.errors import ConfigError, UsageError
from atoll.core.validation import MOST_ACCELERATORS, MOST_MINUTES, MOST_TRIES, nearest
from atoll.providers import registry
from atoll.providers.accelerators import AcceleratorSpec
from atoll.tasks.schema import (
    Document,
    Expected,
    Keys,
    Refused,
    Section,
    Text,
    TextOrTexts,
    check,
    config_error,
    load,
    one_of,
    refused,
    whole,
)
from atoll.tasks.spec import Restarts

_GB = {"": 1.0, "M": 2.0**-10, "G": 1.0, "T": 1024.0}
_MINUTES = {"": 1.0, "s": 1 / 60, "m": 1.0, "h": 60.0, "d": 1440.0, "w": 10080.0}
_AMOUNT = r"(\d{1,12}(?:\.\d+)?)"  # hundreds of digits before the point are infinite as a number
_SIZE = rf"{_AMOUNT}\s*(?:([MGT]?)(?:i?B)?)"


@dataclass(frozen=True, slots=True)
class AcceleratorRequest:
    """Accelerators of one kind for each node; ``count`` may be a fraction of one."""

    name: str
    count: float = 1

    @property
    def num_accelerators(self) -> int:
        """Whole accelerators of a node."""
        return math.ceil(self.count)

    def __str__(self) -> str:
        return f"{self.name}:{_plain(self.count)}"


# ------------------------------------------------------------------------------------------------------ values
def _plain(value: float) -> str:
    return str(int(value)) if value == int(value) else str(value)


def _cpus(value: Any) -> str:
    found = re.fullmatch(rf"{_AMOUNT}(\+?)", _number_text(value))
    if found is None or float(found[1]) == 0:
        raise Expected('a number of CPUs, or a minimum: 4 or "4+"')
    return _plain(float(found[1])) + found[2]


def _memory(value: Any) -> str:
    found = re.fullmatch(rf"{_SIZE}(x?)(\+?)", _number_text(value), re.I)
    if found is None or float(found[1]) == 0 or (found[3] and found[2]):
        raise Expected('GB of memory, a minimum, or GB per CPU: 32, "32+", "32GB" or "4x"')
    return _plain(float(found[1]) * _GB[found[2].upper()]) + found[3].lower() + found[4]


def _disk_size(value: Any) -> int:
    found = re.fullmatch(_SIZE, _number_text(value), re.I)
    size_gb = float(found[1]) * _GB[found[2].upper()] if found else 0
    if size_gb < 1 or size_gb != int(size_gb):
        raise Expected('whole GB: 256 or "1TB"')
    return int(size_gb)


def _number_text(value: Any) -> str:
    """A number or text as text, to be matched; anything else matches nothing."""
    return "" if isinstance(value, bool) or not isinstance(value, (str, int, float)) else str(value).strip()


def _price(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise Expected("a number, 0 or more")
    return value


def _requests(value: Any) -> list[AcceleratorRequest]:
    """All spellings of ``accelerators``: text, a mapping or set of one or several, a list."""
    if isinstance(value, (list, tuple)):
        return [each for item in value for each in _requests(item)]
    if isinstance(value, (set, frozenset)):
        value = dict.fromkeys(sorted(value, key=str))
    if isinstance(value, Mapping):  # {H100:8, H200:8} is read by YAML as two keys without values
        return [_request(key if count is None else (key, count)) for key, count in value.items()]
    return [_request(str(value) if isinstance(value, AcceleratorSpec) else value)]


def _request(said: Any) -> AcceleratorRequest:
    name, count = said if isinstance(said, tuple) else (said, 1)
    if name is said and isinstance(said, str) and ":" in said:
        name, _, digits = said.partition(":")
        count = float(digits) if re.fullmatch(r"\s*\d+(\.\d+)?\s*", digits) else None
    if not isinstance(name, str) or re.fullmatch(r"\s*[A-Za-z][\w .-]*", name) is None:
        raise Expected("an accelerator: L4, L4:2 or {L4: 2}", name)
    shown = said if isinstance(said, str) else count
    if isinstance(count, bool) or not isinstance(count, (int, float)) or not 0 < count < math.inf:
        raise Expected("how many accelerators, more than 0, as in L4:2 or {L4: 2}", shown)
    if count > MOST_ACCELERATORS:
        raise Expected(f"at most {MOST_ACCELERATORS} accelerators per node", shown)
    return AcceleratorRequest(_canonical(name.strip())[0], int(count) if count == int(count) else count)


def _canonical(name: str) -> tuple[str, str | None]:
    """A card's usual spelling, and what is odd about it."""
    try:
        return str(AcceleratorSpec(name)).removesuffix(":1"), None
    except ConfigError as error:  # clouds rent cards that the catalog doesn't list
        end = "" if str(error).endswith("?") else "."
        return name, None if name.lower().startswith("tpu-") else f"{error}{end} It is used as written"


def _accelerators(value: Any) -> str | list[str] | dict[str, None] | None:
    requests = [str(each) for each in _requests(value)]
    if len(requests) < 2:
        return requests[0] if requests else None
    return requests if isinstance(value, (list, tuple)) else dict.fromkeys(requests)


def _cloud(value: str, key: str | None = None) -> str:
    name = value.strip().lower()
    if name not in (*(known := registry.kinds()), "*"):
        expected = f"local, ssh/NAME, slurm/NAME or a cloud such as aws{nearest(name, known)}"
        raise Expected(expected, value, key)
    return name


def _infra(value: Any) -> str | None:
    cloud, *rest = (value if isinstance(value, str) else "").strip().split("/")
    cloud = _cloud(cloud)
    if not all(rest):
        raise Expected("cloud/region/zone with no part empty; * stands for any")
    if (expected := registry.wrong_form("/".join([cloud, *rest]))) is not None:
        raise Expected(expected)
    parts = [cloud, *rest]
    while parts and parts[-1] == "*":
        parts.pop()
    return "/".join(parts) or None


def _ports(value: Any) -> list[str]:
    ports = []
    for item in value if isinstance(value, (list, tuple)) else [value]:
        first, dash, last = _number_text(item).partition("-")
        ends = [int(end) if re.fullmatch(r"\s*\d{1,5}\s*", end) else 0 for end in ((first, last) if dash else (first,))]
        if not all(1 <= end <= 65535 for end in ends) or ends != sorted(ends):
            raise Expected("a port from 1 to 65535, or a range as in 8000-8010", item)
        ports.append("-".join(map(str, ends)))
    return ports


def _idle_minutes(value: Any) -> int:
    found = re.fullmatch(rf"{_AMOUNT}\s*([smhdw]?)", _number_text(value), re.I)
    if found is None:
        raise Expected('idle minutes, or a time such as "10h"')
    return math.ceil(float(found[1]) * _MINUTES[found[2].lower()])


class Autostop(Section):
    """When an idle cluster is stopped (``down``: taken down), and what keeps it from being idle."""

    idle_minutes: Annotated[int, PlainValidator(_idle_minutes)] = 5
    down: StrictBool = False
    wait_for: Annotated[str, one_of("jobs_and_ssh", "jobs", "none")] = "jobs"


def _autostop_keys(value: Any) -> Any:
    if value is False or value == -1:  # -1 is how SkyPilot's command says never
        return None
    given = value if isinstance(value, Mapping) else {} if value is True else {"idle_minutes": value}
    return {"idle_minutes": 5, **given}


class JobRecovery(Section):
    """When a failed job is started again."""

    strategy: Text | None = None
    max_restarts_on_errors: Annotated[int, whole(0, MOST_TRIES)] = 0
    recover_on_exit_codes: Annotated[
        list[Annotated[int, whole(0, 255)]] | None,
        BeforeValidator(lambda codes: codes if isinstance(codes, (list, tuple)) else [codes]),
    ] = None


class Hook(Section):
    """A script that a cloud runs before it stops a machine."""

    run: Text | None = None
    events: list[Annotated[str, one_of("stop", "preemption", "down")]] | None = None
    timeout: Annotated[int | None, whole(1, MOST_MINUTES * 60)] = None


class _Alternative(Section):
    infra: Annotated[str | None, PlainValidator(_infra)] = None
    instance_type: Text | None = None
    cpus: Annotated[str | None, PlainValidator(_cpus)] = None
    memory: Annotated[str | None, PlainValidator(_memory)] = None
    accelerators: Annotated[Any, PlainValidator(_accelerators)] = None
    accelerator_args: Keys | None = None
    use_spot: StrictBool = False
    job_recovery: Annotated[
        JobRecovery | None, BeforeValidator(lambda said: {"strategy": said} if isinstance(said, str) else said)
    ] = None
    spot_recovery: Annotated[None, refused("this key is called job_recovery now")] = None
    disk_size: Annotated[int | None, PlainValidator(_disk_size)] = None
    disk_tier: Annotated[str | None, one_of("low", "medium", "high", "ultra", "best")] = None
    network_tier: Annotated[str | None, one_of("standard", "best")] = None
    local_disk: Text | None = None
    max_hourly_cost: Annotated[float | None, PlainValidator(_price)] = None
    ports: Annotated[list[str] | None, PlainValidator(_ports)] = None
    labels: dict[Text, Text] | None = None
    image_id: TextOrTexts | None = None
    autostop: Annotated[Autostop | None, BeforeValidator(_autostop_keys)] = None
    priority: Annotated[int | None, whole(-1000, 1000)] = None
    priority_class: Text | None = None
    volumes: Any = None
    hooks: list[Hook] | None = None

    @model_validator(mode="before")
    @classmethod
    def _infra_of_its_parts(cls, value: Any) -> Any:
        """``cloud``, ``region`` and ``zone`` are older words for ``infra``."""
        parts = [(value.get(key) if isinstance(value, Mapping) else None) for key in _PARTS]
        old = [key for key, part in zip(_PARTS, parts, strict=True) if part is not None]
        if not old:
            return value
        if value.get("infra") is not None:
            raise Refused(f"infra={value['infra']!r} says this already: keep one of the two", old[0])
        for key in old:
            if not isinstance(value[key], str):
                raise Expected("text", value[key], key)
        _cloud(parts[0] or "*", "cloud")
        rest = {key: item for key, item in value.items() if key not in _PARTS}
        while len(parts) > 1 and parts[-1] is None:
            parts.pop()
        return {**rest, "infra": "/".join(part or "*" for part in parts)}


_PARTS = ("cloud", "region", "zone")
_APART = ("infra", "cpus", "memory", "accelerators", "autostop", "any_of", "ordered")


# --------------------------------------------------------------------------------------------------- Resources
class Resources(_Alternative):
    """What each node of a task should be. The keywords, and their many spellings, are those of a task file.

    Attributes:
        infra: ``local``, ``ssh/NAME``, ``aws/us-east-1``, …, or None for any.
        cpus: ``4``, or ``4+`` for at least 4.
        memory: GB: ``32``, ``32+`` for at least 32, or ``4x`` for 4 per CPU.
        accelerators: as in a task file; ``requested`` lists them.
        ports: ports to open, ``8080`` or ``8000-8010``.
        autostop: when the idle cluster stops, or None for never.
        any_of, ordered: alternatives, each with the keys that differ.

    Raises:
        ConfigError: an invalid value.
        UsageError: an unknown keyword.
    """

    any_of: list[_Alternative] | None = None
    ordered: list[_Alternative] | None = None

    def __init__(self, cloud: Any = None, /, **keys: Any) -> None:
        if cloud is not None:
            keys["cloud"] = cloud
        for name in keys:
            if name not in (known := [*type(self).model_fields, *_PARTS]):
                hint = nearest(name, known) or f": it takes {', '.join(known)}"
                raise UsageError(f"Resources() has no argument {name!r}{hint}")
        infra = getattr(keys.get("cloud"), "infra", None)  # of sky.AWS(region="us-east-1")
        if isinstance(infra, str):
            keys["cloud"], slash, region = infra.partition("/")
            keys |= {"region": region} if slash else {}
        try:
            super().__init__(**keys)
        except ValidationError as error:
            raise config_error(type(self), error, Document("Resources")) from None

    def __hash__(self) -> int:
        return hash(repr(self.config))

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # sections that hold one do without it

    @model_validator(mode="after")
    def _one_list(self) -> Self:
        if self.any_of is not None and self.ordered is not None:
            raise Refused("give any_of or ordered, not both", "ordered")
        return self

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Resources:
        """From the ``resources`` of a task file."""
        return load(cls, config, Document("Resources"))

    @property
    def config(self) -> dict[str, Any]:
        """The keys that were given, in canonical form, as in a task file."""
        return {key: value for key, value in self.model_dump(exclude_unset=True).items() if value is not None}

    @property
    def others(self) -> dict[str, Any]:
        """``config`` without what a ``NodeRequest`` has apart, as JSON values."""
        return {key: value for key, value in self.config.items() if key not in _APART}

    @property
    def requested(self) -> list[AcceleratorRequest]:
        """The accelerators, of which ``choice`` takes one kind."""
        return _requests(self.accelerators or [])

    @property
    def restarts(self) -> Restarts:
        """When a failed job is started again (``job_recovery``)."""
        said = self.job_recovery or JobRecovery()
        return Restarts(on_errors=said.max_restarts_on_errors, on_exit_codes=tuple(said.recover_on_exit_codes or ()))

    def changed(self, changes: Mapping[str, Any]) -> Resources:
        """A copy with other values (``check_changes``), also in its alternatives; None takes a key away."""
        kept = {key: value for key, value in self.config.items() if key not in changes}
        for key in ("any_of", "ordered"):
            if key in kept:
                kept[key] = [{name: part[name] for name in part if name not in changes} for part in kept[key]]
        return Resources.from_config({**kept, **changes})

    def copy(self, **override: Any) -> Resources:
        """The same with other values of some keys, also in its alternatives."""
        return self.changed(check_changes(override, Document("Resources")))

    def choices(self) -> list[Resources]:
        """Every alternative with one kind of accelerator or none, the preferred first."""
        base = self.config
        parts = base.pop("any_of", None) or base.pop("ordered", None) or [{}]
        base.pop("ordered", None)
        found: list[Resources] = []
        for part in parts:
            whole_part = Resources.from_config({**base, **part})
            each_kind = [whole_part.changed({"accelerators": str(each)}) for each in whole_part.requested]
            found += [each for each in each_kind or [whole_part] if each not in found]
        return found

    def choice(self, infra: str) -> Resources:
        """The first of ``choices`` that may run on ``infra``, else the first of all."""
        choices = self.choices()
        return next((each for each in choices if registry.fits(each.infra, infra)), choices[0])

    def honours(self, infra: str) -> list[str]:
        """One line for each key that ``infra``'s provider can't honour.

        Raises:
            ConfigError: a container image, which holds what the task runs with, where none can be started.
        """
        if not registry.is_known(infra):
            return []
        taken = self.choice(infra)
        given = tuple(key for key, value in taken.config.items() if value is not False)
        images = taken.image_id.values() if isinstance(taken.image_id, dict) else [taken.image_id or ""]
        if any(each.startswith("docker:") for each in images) and registry.lacking(infra, ("image_id",)):
            raise ConfigError(
                f"resources.image_id={taken.image_id!r}: no containers are started on {infra}; `--image-id none` runs "
                f"the task with what is installed there"
            )
        lines = registry.lacking(infra, given)
        if not registry.fits(taken.infra, infra):
            lines.append(f"the task requests {taken.infra} and runs on {infra}")
        if taken.job_recovery is not None and taken.job_recovery.strategy:
            lines.append(f"job_recovery.strategy has no effect on {infra}: a lost node is restarted on the same host")
        if taken.autostop is not None and taken.autostop.wait_for != "jobs":
            lines.append(f"autostop.wait_for={taken.autostop.wait_for} has no effect on {infra}: it waits for jobs")
        odd = [_canonical(each.name)[1] for each in taken.requested]
        lines += [
            f"{each}: a job has whole accelerators, so {each.name}:{each.num_accelerators} of each node"
            for each in taken.requested
            if each.count != each.num_accelerators
        ]
        return lines + [line for line in odd if line]

    def to_yaml_config(self) -> dict[str, Any]:
        """As the ``resources`` of a task file."""
        return self.config

    def __repr_args__(self) -> Any:
        return self.config.items()


def check_changes(changes: Mapping[str, Any], document: Document) -> dict[str, Any]:
    """Changes for ``Resources.changed`` in canonical form; their None stays."""
    return {**dict.fromkeys(changes), **check(Resources, changes, document)}
