"""Accelerators by name: every spelling of one becomes an ``AcceleratorSpec``.

``"A100"``, ``"a100:2"``, ``"A100-80GB"``, ``{"A100": 2}``, ``NVIDIA.A100``, ``NVIDIA.A100(count=2)`` and
``Accelerator.NVIDIA.A100(count=8, mig="3g.40gb")`` are the spellings.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, cast

from atoll.core.errors import ConfigError
from atoll.core.validation import MOST_ACCELERATORS, check_whole

# Vendor: names, each with the memory sizes in GB that the card is sold with (the first is the usual one).
_CARDS = {
    "NVIDIA": """
        T4:16 T4g:16 L2:24 L4:24 L20:48 L40:48 L40S:48 K80:12 M60:8 P4:8 P40:24 P100:16,12 V100:16,32
        A2:16 A10:24 A10G:24 A16:16 A30:24 A40:48 A100:40,80 A800:80,40 H20:96,141 H100:80,94,96 H200:141 H800:80
        GH200:96,144 B100:192 B200:180,192 B300:288 GB200:186,192 GB300:288
        RTX2080Ti:11 RTX3060:12 RTX3070:8 RTX3080:10,12 RTX3080Ti:12 RTX3090:24 RTX3090Ti:24 RTX4060:8 RTX4060Ti:16,8
        RTX4070:12 RTX4070Ti:12 RTX4080:16 RTX4090:24 RTX5070:12 RTX5070Ti:16 RTX5080:16 RTX5090:32
        RTX4000:8 RTX5000:16 RTX6000:24 RTX2000-Ada:16 RTX4000-Ada:20 RTX4500-Ada:24 RTX5000-Ada:32 RTX6000-Ada:48
        RTXA2000:12,6 RTXA4000:16 RTXA4500:20 RTXA5000:24 RTXA5500:24 RTXA6000:48 RTXPRO6000:96
    """,
    "AMD": "MI50:32,16 MI100:32 MI210:64 MI250:128 MI250X:128 MI300A:128 MI300X:192 MI325X:256 MI350X:288 MI355X:288",
    "AWS": "Inferentia:8 Inferentia2:32 Trainium:32 Trainium2:96",
    "Habana": "Gaudi:32 Gaudi2:96 Gaudi3:128",
    "Google": "tpu-v2:8 tpu-v3:16 tpu-v4:32 tpu-v5e:16 tpu-v5p:95 tpu-v6e:32",
}
_CATALOG: dict[str, dict[str, tuple[int, ...]]] = {
    vendor: {name: tuple(map(int, sizes.split(","))) for name, sizes in (card.split(":") for card in text.split())}
    for vendor, text in _CARDS.items()
}

# MIG profile -> slices of it that one card holds, by card and memory in GB: NVIDIA's MIG user guide, and the layouts
# that its mig-parted comes with (deployments/systemd/config-default.yaml). The last one of a card is all of it.
_MIG_80: dict[str, int] = {"1g.10gb": 7, "1g.20gb": 4, "2g.20gb": 3, "3g.40gb": 2, "4g.40gb": 1, "7g.80gb": 1}
MIG_PROFILES: dict[tuple[str, int], dict[str, int]] = {
    ("A30", 24): {"1g.6gb": 4, "2g.12gb": 2, "4g.24gb": 1},
    ("A100", 80): _MIG_80,
    ("A100", 40): {"1g.5gb": 7, "1g.10gb": 4, "2g.10gb": 3, "3g.20gb": 2, "4g.20gb": 1, "7g.40gb": 1},
    ("H100", 80): _MIG_80,
    ("H100", 94): {"1g.12gb": 7, "1g.24gb": 4, "2g.24gb": 3, "3g.47gb": 2, "4g.47gb": 1, "7g.94gb": 1},
    ("H100", 96): {"1g.12gb": 7, "1g.24gb": 4, "2g.24gb": 3, "3g.48gb": 2, "4g.48gb": 1, "7g.96gb": 1},
    ("B200", 180): {"1g.23gb": 7, "1g.45gb": 4, "2g.45gb": 3, "3g.90gb": 2, "4g.90gb": 1, "7g.180gb": 1},
    ("H200", 141): {"1g.18gb": 7, "1g.35gb": 4, "2g.35gb": 3, "3g.71gb": 2, "4g.71gb": 1, "7g.141gb": 1},
}

_NEAR = 0.7  # how much of a name is right where another one was meant
_FORMS = '"A100", "A100:2", {"A100": 2} or sky.NVIDIA.A100(count=2)'


def _key(name: str) -> str:
    """What two spellings of one card have in common."""
    return re.sub(r"[\s_-]", "", name).casefold()


_NAMES: dict[str, str] = {_key(name): name for cards in _CATALOG.values() for name in cards}
_MEMORY: dict[str, tuple[int, ...]] = {name: sizes for cards in _CATALOG.values() for name, sizes in cards.items()}


@dataclass(frozen=True, slots=True)
class AcceleratorSpec:
    """Accelerators of one kind, for each node.

    A spec can be called for another count: ``NVIDIA.A100(count=2)``.

    Attributes:
        name: canonical name, e.g. ``"A100"``.
        count: accelerators of each node, at least 1.
        memory_gb: memory of one card in GB if it was given, otherwise None.
        mig: MIG profile that every card is split into, e.g. ``"3g.40gb"``; or the profiles of its slices, as in
            ``("3g.40gb", "2g.20gb", "2g.20gb")``; or None.

    Raises:
        ConfigError: a name, count, memory size or profile that does not exist.
    """

    name: str
    count: int = 1
    memory_gb: int | None = None
    mig: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        name, memory_gb = _split_memory(self.name)
        object.__setattr__(self, "name", _known_name(name))
        if self.memory_gb is None:
            object.__setattr__(self, "memory_gb", memory_gb)
        check_whole(f"{self.name} count", self.count, 1, MOST_ACCELERATORS)
        if isinstance(self.mig, (list, tuple)) and self.mig and all(isinstance(each, str) for each in self.mig):
            object.__setattr__(self, "mig", tuple(self.mig))
        elif not (self.mig is None or isinstance(self.mig, str)):
            raise ConfigError(f"mig={self.mig!r}: expected a profile such as '3g.40gb', a list of some, or None")
        if self.memory_gb is not None and self.memory_gb not in _MEMORY[self.name]:
            sizes = " or ".join(f"{size}GB" for size in _MEMORY[self.name])
            raise ConfigError(f"{self.name} memory {self.memory_gb}GB: this card comes with {sizes}")
        if self.mig is not None:
            self.slices()

    def __call__(
        self,
        count: int | None = None,
        memory: str | int | None = None,
        mig: str | Sequence[str] | None = None,
    ) -> AcceleratorSpec:
        """The same card with another count, memory size (``"80GB"`` or 80) or MIG profile."""
        return replace(
            self,
            count=self.count if count is None else count,
            memory_gb=self.memory_gb if memory is None else _parse_memory(self.name, memory),
            mig=self.mig if mig is None else cast("Any", mig),
        )

    def __str__(self) -> str:
        memory = f"-{self.memory_gb}GB" if self.memory_gb is not None else ""
        profiles = ", ".join((self.mig,) if isinstance(self.mig, str) else self.mig or ())
        return f"{self.name}{memory}:{self.count}" + (f" (mig {profiles})" if profiles else "")

    @property
    def vendor(self) -> str:
        """``"NVIDIA"``, ``"AMD"``, ``"AWS"``, ``"Google"`` or ``"Habana"``."""
        return next(vendor for vendor, cards in _CATALOG.items() if self.name in cards)

    def slices(self) -> tuple[str, ...]:
        """Profiles of the slices of one card: two of ``3g.40gb`` for ``A100(mig="3g.40gb")``; none without MIG.

        Raises:
            ConfigError: a card that can't be split, a profile that it lacks, or more than it holds.
        """
        if self.mig is None:
            return ()
        # The larger card first: where the memory was left open, a profile both have means the newer one.
        tables = [
            table
            for (name, memory_gb), table in sorted(MIG_PROFILES.items(), key=lambda item: -item[0][1])
            if name == self.name and self.memory_gb in (None, memory_gb)
        ]
        if not tables:
            splittable = ", ".join(sorted({name for name, _ in MIG_PROFILES}))
            raise ConfigError(
                f"{self.name} mig={self.mig!r}: this card has no MIG profiles; cards that do: {splittable}"
            )
        wanted = (self.mig,) if isinstance(self.mig, str) else self.mig
        table = next((each for each in tables if each.keys() >= {*wanted}), None)
        if table is None:
            profiles = dict.fromkeys(profile for each in tables for profile in each)
            raise ConfigError(f"{self.name} mig={self.mig!r}: no such profile; this card has {', '.join(profiles)}")
        if isinstance(self.mig, str):
            return (self.mig,) * table[self.mig]
        most, memory_gb = _size(list(table)[-1])
        computing = sum(_size(each)[0] for each in wanted)
        memory = sum(round(_size(each)[1] * 8 / memory_gb) for each in wanted)  # of eight parts; names round them
        for asked, there, what in ((computing, most, "compute"), (memory, 8, "memory")):
            if asked > there:
                raise ConfigError(
                    f"{self.name} mig={self.mig!r}: that is {asked} {what} slices, and the card has {there}"
                )
        return wanted

    @classmethod
    def parse(cls, value: object) -> AcceleratorSpec | None:
        """The spec that any accepted spelling stands for; None for None.

        Raises:
            ConfigError: an unknown accelerator; the message names the nearest one.
        """
        if value is None or isinstance(value, AcceleratorSpec):
            return value
        if isinstance(value, str):
            return _parse_text(value)
        if isinstance(value, Mapping):
            return _parse_mapping(value)
        raise ConfigError(f"accelerator={value!r} ({type(value).__name__}): expected {_FORMS}")


def _size(profile: str) -> tuple[int, int]:
    """Compute slices and GB of a MIG profile."""
    computing, _, memory = profile.partition("g.")
    return int(computing), int(memory.removesuffix("gb"))


def canonical_gpu_name(product: str) -> str:
    """The name used here for a driver's product name: ``"NVIDIA H100 80GB HBM3"`` is ``"H100"``.

    A card that is not in the catalog keeps its product name, without the maker and without spaces.
    """
    words = re.sub(r"\b(NVIDIA|AMD|Tesla|GeForce|Quadro|Instinct|Graphics|Generation)\b", " ", product, flags=re.I)
    parts = [part for part in re.split(r"[\s-]+", words) if part]
    # The longest run of leading words that names a card: "RTX 6000 Ada" before "RTX 6000". A Ti, SUPER, D or laptop
    # model that the catalog lacks is another card than its namesake.
    for length in range(min(len(parts), 4), 0, -1):
        known = _NAMES.get(_key("".join(parts[:length])))
        if known is not None and not {"ti", "super", "d", "laptop"} & {part.casefold() for part in parts[length:]}:
            return known
    return "-".join(parts) or product


def _parse_text(text: str) -> AcceleratorSpec:
    name, colon, count = text.strip().partition(":")
    if colon and not re.fullmatch(r"\s*\d+\s*", count):
        raise ConfigError(f"accelerator={text!r}: after the colon stands a whole number of accelerators, as in A100:2")
    return AcceleratorSpec(name.strip(), int(count) if colon else 1)


def _parse_mapping(value: Mapping[Any, Any]) -> AcceleratorSpec:
    if len(value) != 1:
        raise ConfigError(f"accelerator={dict(value)!r}: expected exactly one kind of accelerator, as in {_FORMS}")
    ((name, count),) = value.items()
    if not isinstance(name, str):
        raise ConfigError(f"accelerator={dict(value)!r}: expected a name as the key, as in {_FORMS}")
    if count is None:  # YAML reads {A100:2} as the key "A100:2" without a value
        return _parse_text(name)
    return AcceleratorSpec(name, count)


def _split_memory(name: object) -> tuple[str, int | None]:
    if not isinstance(name, str) or not name.strip():
        raise ConfigError(f"accelerator name {name!r}: expected {_FORMS}")
    found = re.fullmatch(r"(.+?)[-_\s](\d+)\s*GB?", name.strip(), flags=re.I)
    return (found[1], int(found[2])) if found else (name.strip(), None)


def _parse_memory(name: str, memory: str | int) -> int:
    found = re.fullmatch(r"(\d+)\s*(GB?)?", str(memory).strip(), flags=re.I)
    if found is None or isinstance(memory, bool):
        raise ConfigError(f'{name} memory={memory!r}: expected gigabytes, as in memory="80GB"')
    return int(found[1])


def _known_name(name: str) -> str:
    known = _NAMES.get(_key(name))
    if known is None:
        raise ConfigError(f"accelerator {name!r} is not known{_nearest(name, list(_NAMES.values()))}")
    return known


def refuse_misspelt(names: Iterable[str]) -> None:
    """Refuse names that no machine has and that are near a known one.

    Raises:
        ConfigError: the message has the known one.
    """
    if said := misspelt(names):
        raise ConfigError(said)


def misspelt(names: Iterable[str]) -> str:
    """What is said of the first name that is unknown and near a known one; empty where none is."""
    for name in names:
        near = [] if _key(name) in _NAMES else get_close_matches(_key(name), _NAMES, n=1, cutoff=_NEAR)
        if near and not name.lower().startswith("tpu-"):  # clouds rent TPUs of many sizes
            return f"accelerator {name!r} is not known: did you mean {_NAMES[near[0]]}?"
    return ""


def _nearest(name: str, names: list[str]) -> str:
    by_key = {_key(known): known for known in names}
    near = get_close_matches(_key(name), by_key, n=1, cutoff=_NEAR)
    if near:
        return f"; did you mean {by_key[near[0]]}?"
    likest = get_close_matches(_key(name), by_key, n=5, cutoff=0)
    return f"; known ones are {', '.join(by_key[key] for key in likest)} and others"


class _Vendor(type):
    """Has a spec for each card that the catalog lists of it, and says which one was meant by another name."""

    def __new__(mcs, name: str, bases: tuple[type, ...], members: dict[str, object]) -> _Vendor:
        cards = {
            card.replace("tpu-", "TPU").replace("-", "_"): AcceleratorSpec(card) for card in _CATALOG.get(name, ())
        }
        return super().__new__(mcs, name, bases, {**members, **cards})

    def __getattr__(cls, name: str) -> AcceleratorSpec:
        known = [attribute for attribute in vars(cls) if not attribute.startswith("_")]
        if name.startswith("_"):  # copy, pickle and inspect probe for these
            raise AttributeError(name)
        raise AttributeError(f"{cls.__name__} has no accelerator {name!r}{_nearest(name, known)}")


class NVIDIA(metaclass=_Vendor):
    """NVIDIA's GPUs. Each is a value and can be called: ``NVIDIA.A100``, ``NVIDIA.A100(count=2, mig="3g.40gb")``."""


class AMD(metaclass=_Vendor):
    """AMD's accelerators."""


class AWS(metaclass=_Vendor):
    """Amazon's accelerators."""


class Habana(metaclass=_Vendor):
    """Intel's Gaudi accelerators."""


class Google(metaclass=_Vendor):
    """Google's TPUs."""


class TPU(metaclass=_Vendor):
    """Google's TPUs by generation: ``TPU.v5e``, ``TPU.v5p(count=4)``."""


for _card in _CATALOG["Google"]:
    setattr(TPU, _card.removeprefix("tpu-"), AcceleratorSpec(_card))


class Accelerator(metaclass=_Vendor):
    """All accelerators by maker: ``Accelerator.NVIDIA.A100(count=8)``, ``Accelerator.AMD.MI300X``."""

    NVIDIA = NVIDIA
    AMD = AMD
    AWS = AWS
    Habana = Habana
    Google = Google
