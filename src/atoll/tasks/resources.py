"""What each node of a task should be: the ``resources`` of a task file, and ``Resources`` in Python."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from atoll.core.errors import ConfigError
from atoll.core.validation import MOST_ACCELERATORS, MOST_MINUTES, MOST_TRIES, nearest, suggests_keywords
from atoll.providers.accelerators import AcceleratorSpec
from atoll.tasks.schema import (
    Check,
    Place,
    any_mapping,
    anything,
    list_of,
    mapping_of,
    number,
    one_of,
    section,
    text,
    text_or,
    whole,
    yes_no,
)
from atoll.tasks.spec import Restarts

_CLOUDS = (
    *("local", "ssh", "slurm", "k8s", "kubernetes", "aws", "gcp", "azure", "nebius", "lambda", "runpod", "oci", "ibm"),
    *("cudo", "do", "fluidstack", "hyperbolic", "mithril", "paperspace", "primeintellect", "scp", "seeweb"),
    *("shadeform", "vast", "verda", "vsphere"),
)
_GB = {"": 1.0, "M": 2.0**-10, "G": 1.0, "T": 1024.0}
_MINUTES = {"": 1.0, "s": 1 / 60, "m": 1.0, "h": 60.0, "d": 1440.0, "w": 10080.0}
_IDLE_MINUTES = 5  # of `autostop: true`
_AMOUNT = r"(\d{1,12}(?:\.\d+)?)"  # hundreds of digits before the point are infinite as a number
_SIZE = rf"{_AMOUNT}\s*(?:([MGT]?)(?:i?B)?)"

# Keys of resources that mean nothing on machines that are there already, and why.
_NOT_ON_OWN_MACHINES = {
    "use_spot": "no machine of yours is a spot machine",
    "instance_type": "your machines are what they are",
    "disk_size": "the disk is the machine's own",
    "disk_tier": "the disk is the machine's own",
    "local_disk": "the disk is the machine's own",
    "network_tier": "the network is the machine's own",
    "image_id": "scripts run on the machine's own system, in no image",
    "max_hourly_cost": "your machines have no price",
    "priority": "jobs start in the order in which they came",
    "priority_class": "jobs start in the order in which they came",
    "labels": "nothing is rented that could carry them",
    "accelerator_args": "accelerators are taken as they are",
    "ports": "nothing is opened: what listens is reached as far as the machine's own firewall lets it",
    "volumes": "volumes are a cloud's",
    "hooks": "no cloud stops the machine",
}


@dataclass(frozen=True, slots=True)
class AcceleratorWish:
    """Accelerators of one kind for each node; ``count`` may be a fraction of one."""

    name: str
    count: float = 1

    @property
    def num_accelerators(self) -> int:
        """Whole accelerators of a node."""
        return math.ceil(self.count)

    def __str__(self) -> str:
        return f"{self.name}:{_plain(self.count)}"


@dataclass(frozen=True, slots=True)
class Autostop:
    """When an idle cluster is stopped (``down``: taken down), and what keeps it from being idle."""

    idle_minutes: int
    down: bool = False
    wait_for: str = "jobs"


# ------------------------------------------------------------------------------------------------------ checks
def _plain(value: float) -> str:
    return str(int(value)) if value == int(value) else str(value)


def _cpus(at: Place, value: Any) -> str:
    expected = 'a number of CPUs, or at least so many: 4 or "4+"'
    found = re.fullmatch(rf"{_AMOUNT}(\+?)", _number_text(at, value, expected))
    if found is None or float(found[1]) == 0:
        at.fail(value, expected)
    return _plain(float(found[1])) + found[2]


def _memory(at: Place, value: Any) -> str:
    expected = 'GB of memory, at least so many, or so many for each CPU: 32, "32+", "32GB" or "4x"'
    shown = _number_text(at, value, expected)
    found = re.fullmatch(rf"{_SIZE}(x?)(\+?)", shown, re.I)
    if found is None or float(found[1]) == 0 or (found[3] and found[2]):
        at.fail(value, expected)
    return _plain(float(found[1]) * _GB[found[2].upper()]) + found[3].lower() + found[4]


def _disk_size(at: Place, value: Any) -> int:
    expected = 'whole GB: 256 or "1TB"'
    found = re.fullmatch(_SIZE, _number_text(at, value, expected), re.I)
    size_gb = float(found[1]) * _GB[found[2].upper()] if found else 0
    if size_gb < 1 or size_gb != int(size_gb):
        at.fail(value, expected)
    return int(size_gb)


def _number_text(at: Place, value: Any, expected: str) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        at.fail(value, expected)
    return str(value).strip()


def _wishes(at: Place, value: Any) -> list[AcceleratorWish]:
    """All spellings of ``accelerators``: text, a mapping or set of one or several, a list."""
    if isinstance(value, (list, tuple)):
        return [wish for index, item in enumerate(value) for wish in _wishes(at / index, item)]
    if isinstance(value, (set, frozenset)):
        value = dict.fromkeys(sorted(value, key=str))
    if isinstance(value, Mapping):  # {H100:8, H200:8} is read by YAML as two keys without values
        pairs = [(at / str(key), key if count is None else (key, count)) for key, count in value.items()]
    else:
        pairs = [(at, str(value) if isinstance(value, AcceleratorSpec) else value)]
    return [_wish(place, said) for place, said in pairs]


def _wish(at: Place, said: Any) -> AcceleratorWish:
    name, count = said if isinstance(said, tuple) else (said, 1)
    if name is said and isinstance(said, str) and ":" in said:
        name, _, digits = said.partition(":")
        count = float(digits) if re.fullmatch(r"\s*\d+(\.\d+)?\s*", digits) else None
    if not isinstance(name, str) or re.fullmatch(r"\s*[A-Za-z][\w .-]*", name) is None:
        at.fail(name, "an accelerator: L4, L4:2 or {L4: 2}")
    if isinstance(count, bool) or not isinstance(count, (int, float)) or not 0 < count < math.inf:
        at.fail(said if isinstance(said, str) else count, "how many accelerators, more than 0, as in L4:2 or {L4: 2}")
    if count > MOST_ACCELERATORS:
        at.fail(said if isinstance(said, str) else count, f"at most {MOST_ACCELERATORS} accelerators a node")
    return AcceleratorWish(_canonical(name.strip())[0], int(count) if count == int(count) else count)


def _canonical(name: str) -> tuple[str, str | None]:
    """A card's usual spelling, and what is odd about it."""
    try:
        return str(AcceleratorSpec(name)).removesuffix(":1"), None
    except ConfigError as error:  # clouds rent cards that the catalog doesn't list
        end = "" if str(error).endswith("?") else "."
        return name, None if name.lower().startswith("tpu-") else f"{error}{end} It is taken as it is written"


def _accelerators(at: Place, value: Any) -> str | list[str] | dict[str, None] | None:
    wishes = [str(wish) for wish in _wishes(at, value)]
    if len(wishes) < 2:
        return wishes[0] if wishes else None
    return wishes if isinstance(value, (list, tuple)) else dict.fromkeys(wishes)


def _cloud(at: Place, value: Any) -> str:
    name = text(at, value).strip().lower()
    if name not in (*_CLOUDS, "*"):
        at.fail(value, f"local, ssh/NAME, slurm/CLUSTER or a cloud such as aws{nearest(name, _CLOUDS)}")
    return name


def _infra(at: Place, value: Any) -> str:
    cloud, *rest = text(at, value).strip().split("/")
    cloud = _cloud(at, cloud)
    if not all(rest):
        at.fail(value, "cloud/region/zone with no part empty; * stands for any")
    if cloud == "local" and rest:
        at.fail(value, "local alone: it is this machine")
    if cloud == "ssh" and not rest:
        at.fail(value, "ssh/NAME, with a NAME of ~/.ssh/config or of [ssh.NAME] in config.toml")
    if cloud not in ("ssh", "k8s", "kubernetes") and len(rest) > 2:
        at.fail(value, "cloud/region/zone, three parts at most")
    return "/".join([cloud, *rest])


def _ports(at: Place, value: Any) -> list[str]:
    expected = "a port from 1 to 65535, or a range as in 8000-8010"
    ports = []
    for item in value if isinstance(value, (list, tuple)) else [value]:
        first, dash, last = _number_text(at, item, expected).partition("-")
        ends = [int(end) if re.fullmatch(r"\s*\d{1,5}\s*", end) else 0 for end in ((first, last) if dash else (first,))]
        if not all(1 <= end <= 65535 for end in ends) or ends != sorted(ends):
            at.fail(item, expected)
        ports.append("-".join(map(str, ends)))
    return ports


def _idle_minutes(at: Place, value: Any) -> int:
    expected = 'idle minutes, or a time such as "10h"'
    found = re.fullmatch(rf"{_AMOUNT}\s*([smhdw]?)", _number_text(at, value, expected), re.I)
    if found is None:
        at.fail(value, expected)
    return math.ceil(float(found[1]) * _MINUTES[found[2].lower()])


_AUTOSTOP = section({"idle_minutes": _idle_minutes, "down": yes_no, "wait_for": one_of("jobs_and_ssh", "jobs", "none")})


def _autostop(at: Place, value: Any) -> bool | dict[str, Any]:
    if value is False or value == -1:  # -1 is how SkyPilot's command says never
        return False
    given = value if isinstance(value, Mapping) else {} if value is True else {"idle_minutes": _idle_minutes(at, value)}
    return {"idle_minutes": _IDLE_MINUTES, **_AUTOSTOP(at, given)}


def _exit_codes(at: Place, value: Any) -> list[int]:
    code = whole(0, 255)
    return list_of(code)(at, value) if isinstance(value, (list, tuple)) else [code(at, value)]


def _job_recovery(at: Place, value: Any) -> Any:
    fields = {"strategy": text, "max_restarts_on_errors": whole(0, MOST_TRIES), "recover_on_exit_codes": _exit_codes}
    return section(fields)(at, {"strategy": value} if isinstance(value, str) else value)


def _renamed(at: Place, _: Any) -> None:
    at.refuse("this key is called job_recovery now")


HOOKS = list_of(
    section(
        {"run": text, "events": list_of(one_of("stop", "preemption", "down")), "timeout": whole(1, MOST_MINUTES * 60)}
    ),
)

_FIELDS: dict[str, Check] = {
    "infra": _infra,
    "cloud": _cloud,
    "region": text,
    "zone": text,
    "instance_type": text,
    "cpus": _cpus,
    "memory": _memory,
    "accelerators": _accelerators,
    "accelerator_args": any_mapping,
    "use_spot": yes_no,
    "job_recovery": _job_recovery,
    "spot_recovery": _renamed,
    "disk_size": _disk_size,
    "disk_tier": one_of("low", "medium", "high", "ultra", "best"),
    "network_tier": one_of("standard", "best"),
    "local_disk": text,
    "max_hourly_cost": number(0),
    "ports": _ports,
    "labels": mapping_of(text),
    "image_id": text_or(mapping_of(text)),
    "autostop": _autostop,
    "priority": whole(-1000, 1000),
    "priority_class": text,
    "volumes": anything,
    "hooks": HOOKS,
}
_HERE = Place("Resources")
_PLACES = ("infra", "cloud", "region", "zone")


def check_resources(at: Place, value: Any) -> dict[str, Any]:
    """The keys of ``resources`` in their canonical forms."""
    alternative = section(_FIELDS)
    found: dict[str, Any] = section({**_FIELDS, "any_of": list_of(alternative), "ordered": list_of(alternative)})(
        at, value
    )
    if "any_of" in found and "ordered" in found:
        (at / "ordered").refuse("give any_of or ordered, not both")
    for part in (found, *found.get("any_of", ()), *found.get("ordered", ())):
        old = [key for key in _PLACES[1:] if key in part]
        if "infra" in part and old:
            (at / old[0]).refuse(f"infra={part['infra']!r} says this already: keep one of the two")
    return {key: item for key, item in found.items() if item is not None}


# --------------------------------------------------------------------------------------------------- Resources
class Resources:
    """What each node of a task should be. The keywords, and their many spellings, are those of a task file.

    Attributes:
        config: the keys that were given, in canonical form, as in a task file.
        accelerators: what was wished for; of several, ``choice`` takes one.

    Raises:
        ConfigError: a value that cannot be.
        UsageError: a keyword that there is not.
    """

    @suggests_keywords
    def __init__(
        self,
        cloud: str | None = None,
        instance_type: str | None = None,
        cpus: float | str | None = None,
        memory: float | str | None = None,
        accelerators: Any = None,
        accelerator_args: Mapping[str, Any] | None = None,
        infra: str | None = None,
        use_spot: bool | None = None,
        job_recovery: str | Mapping[str, Any] | None = None,
        region: str | None = None,
        zone: str | None = None,
        image_id: str | Mapping[str, str] | None = None,
        disk_size: int | str | None = None,
        disk_tier: str | None = None,
        network_tier: str | None = None,
        local_disk: str | None = None,
        max_hourly_cost: float | None = None,
        ports: Any = None,
        labels: Mapping[str, str] | None = None,
        autostop: Any = None,
        hooks: Any = None,
        priority: int | None = None,
        priority_class: str | None = None,
        volumes: Any = None,
        any_of: Any = None,
        ordered: Any = None,
    ) -> None:
        given = {key: value for key, value in locals().items() if key != "self" and value is not None}
        self._fill(check_resources(_HERE, given))

    @classmethod
    def from_config(cls, config: Mapping[str, Any], at: Place | None = None) -> Resources:
        """From the ``resources`` of a task file, which stand at ``at``."""
        made = cls.__new__(cls)
        made._fill(check_resources(at or _HERE, config))
        return made

    def _fill(self, config: dict[str, Any]) -> None:
        self.config = config
        said = config.get("accelerators")
        self.accelerators = [] if said is None else _wishes(_HERE, said)

    @property
    def infra(self) -> str | None:
        """``local``, ``ssh/NAME``, ``aws/us-east-1``, …, or None where any will do."""
        parts = str(self.config["infra"]).split("/") if "infra" in self.config else []
        parts = parts or [str(self.config.get(key, "*")) for key in _PLACES[1:]]
        while parts and parts[-1] == "*":
            parts.pop()
        return "/".join(parts) or None

    @property
    def cpus(self) -> str | None:
        """``4``, or ``4+`` for at least 4."""
        return self.config.get("cpus")

    @property
    def memory(self) -> str | None:
        """GB: ``32``, ``32+`` for at least 32, or ``4x`` for 4 a CPU."""
        return self.config.get("memory")

    @property
    def use_spot(self) -> bool:
        """Were spot machines asked for?"""
        return bool(self.config.get("use_spot"))

    @property
    def ports(self) -> tuple[str, ...]:
        """Ports to open, ``8080`` or ``8000-8010``."""
        return tuple(self.config.get("ports", ()))

    @property
    def autostop(self) -> Autostop | None:
        """When the idle cluster stops, or None for never."""
        said = self.config.get("autostop")
        return Autostop(**said) if said else None

    @property
    def restarts(self) -> Restarts:
        """When a failed job is started again (``job_recovery``)."""
        said = self.config.get("job_recovery", {})
        return Restarts(
            on_errors=said.get("max_restarts_on_errors", 0), on_exit_codes=tuple(said.get("recover_on_exit_codes", ()))
        )

    def changed(self, changes: Mapping[str, Any], at: Place | None = None) -> Resources:
        """A copy with other values, also in its alternatives; None takes a key away."""
        changes = check_changes(changes, at or _HERE)
        gone = {*changes, *(_PLACES if changes.keys() & set(_PLACES) else ())}

        def without(part: Mapping[str, Any]) -> dict[str, Any]:
            return {key: value for key, value in part.items() if key not in gone}

        kept = without(self.config)
        for key in ("any_of", "ordered"):
            if key in kept:
                kept[key] = [without(part) for part in kept[key]]
        return Resources.from_config({**kept, **{key: value for key, value in changes.items() if value is not None}})

    def choices(self) -> list[Resources]:
        """Every alternative with one kind of accelerator or none, the preferred first."""
        base = {key: value for key, value in self.config.items() if key not in ("any_of", "ordered")}
        found: list[dict[str, Any]] = []
        for part in self.config.get("any_of") or self.config.get("ordered") or [{}]:
            gone = _PLACES if "infra" in part else ("infra",) if part.keys() & set(_PLACES) else ()
            whole_part = {**{key: value for key, value in base.items() if key not in gone}, **part}
            wishes = _wishes(_HERE, whole_part.get("accelerators", ()))
            for each in [{**whole_part, "accelerators": str(wish)} for wish in wishes] or [whole_part]:
                if each not in found:
                    found.append(each)
        return [Resources.from_config(each) for each in found]

    def choice(self, infra: str) -> Resources:
        """The first of ``choices`` that may run on ``infra``, else the first of all."""
        choices = self.choices()
        return next((each for each in choices if each.infra in (None, infra)), choices[0])

    def honours(self, infra: str) -> list[str]:
        """One line for each wish that ``infra`` can't honour; of machines that are there already (local, ssh)."""
        if not is_own(infra):
            return []
        taken = self.choice(infra)
        lines = [
            f"resources.{key} has no effect on {infra}: {why}"
            for key, why in _NOT_ON_OWN_MACHINES.items()
            if taken.config.get(key, False) is not False
        ]
        if taken.infra not in (None, infra):
            lines.append(f"the task asks for {taken.infra} and runs on {infra}")
        if (taken.config.get("job_recovery") or {}).get("strategy"):
            lines.append(f"job_recovery.strategy has no effect on {infra}: a lost node is started anew where it was")
        if taken.autostop is not None and taken.autostop.wait_for != "jobs":
            lines.append(f"autostop.wait_for={taken.autostop.wait_for} has no effect on {infra}: it waits for jobs")
        odd = [_canonical(wish.name)[1] for wish in taken.accelerators]
        lines += [
            f"{wish}: a job has whole accelerators, so {wish.name}:{wish.num_accelerators} of each node"
            for wish in taken.accelerators
            if wish.count != wish.num_accelerators
        ]
        return lines + [line for line in odd if line]

    def to_yaml_config(self) -> dict[str, Any]:
        """As the ``resources`` of a task file."""
        return dict(self.config)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Resources) and self.config == other.config

    def __repr__(self) -> str:
        return f"Resources({', '.join(f'{key}={value!r}' for key, value in self.config.items())})"


def is_none(accelerators: str | None) -> bool:
    """Does ``--gpus`` ask for none?"""
    return accelerators is not None and accelerators.strip().lower() in ("", "0", "none")


def is_own(infra: str) -> bool:
    """Are these machines that are there already, of the user's own?"""
    return infra == "local" or infra.startswith("ssh/")


def check_changes(changes: Mapping[str, Any], at: Place) -> dict[str, Any]:
    """Changes for ``Resources.changed`` in canonical form; their None stays."""
    return {**dict.fromkeys(changes), **check_resources(at, changes)}
