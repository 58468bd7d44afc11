"""Every spelling of an accelerator means the same, and this machine's GPUs are read as the driver reports them."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.core.errors import ConfigError
from atoll.providers.accelerators import (
    _CATALOG,
    AMD,
    AWS,
    MIG_PROFILES,
    NVIDIA,
    Accelerator,
    AcceleratorSpec,
    Google,
    Habana,
    canonical_gpu_name,
)
from atoll.providers.gpus import gpu_report, local_gpus


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("A100", AcceleratorSpec("A100")),
        ("a100", AcceleratorSpec("A100")),
        ("A100:2", AcceleratorSpec("A100", 2)),
        (" a100 : 2 ", AcceleratorSpec("A100", 2)),
        ("A100-80GB", AcceleratorSpec("A100", memory_gb=80)),
        ("a100-80gb:4", AcceleratorSpec("A100", 4, memory_gb=80)),
        ({"A100": 2}, AcceleratorSpec("A100", 2)),
        ({"H100:8": None}, AcceleratorSpec("H100", 8)),
        (NVIDIA.A100, AcceleratorSpec("A100")),
        (NVIDIA.A100(count=2), AcceleratorSpec("A100", 2)),
        (NVIDIA.A100(mig="3g.40gb"), AcceleratorSpec("A100", mig="3g.40gb")),
        (NVIDIA.A100(memory="80GB"), AcceleratorSpec("A100", memory_gb=80)),
        (Accelerator.NVIDIA.A100(count=8, mig="3g.40gb"), AcceleratorSpec("A100", 8, mig="3g.40gb")),
        (Accelerator.AMD.MI300X, AcceleratorSpec("MI300X")),
        ("rtx 4090", AcceleratorSpec("RTX4090")),
        ("RTX6000-Ada", AcceleratorSpec("RTX6000-Ada")),
        (None, None),
    ],
)
def test_every_spelling_means_one_spec(value: object, expected: AcceleratorSpec | None) -> None:
    assert AcceleratorSpec.parse(value) == expected


def test_the_text_of_a_spec_reads_back_as_the_same() -> None:
    for spec in (NVIDIA.A100, NVIDIA.A100(count=8, memory=80), NVIDIA.RTX6000_Ada(2), Google.TPUv5e(4)):
        assert AcceleratorSpec.parse(str(spec)) == spec


def test_calling_a_spec_keeps_what_is_not_named() -> None:
    assert NVIDIA.A100(memory="80GB")(count=4) == AcceleratorSpec("A100", 4, memory_gb=80)
    assert AcceleratorSpec("A100") == NVIDIA.A100, "the shared value is not changed by a call"


def test_every_card_of_the_catalog_has_its_attribute() -> None:
    for vendor in (NVIDIA, AMD, AWS, Habana, Google):
        attributes = {spec.name for spec in vars(vendor).values() if isinstance(spec, AcceleratorSpec)}
        assert attributes == set(_CATALOG[vendor.__name__])
        assert all(AcceleratorSpec(name).vendor == vendor.__name__ for name in attributes)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("A1000", "did you mean A100"),
        ("H1000:8", "did you mean H100"),
        ("zzzzzz", "known ones are"),
        ("", "accelerator name ''"),
        ("A100:two", "whole number"),
        ("A100:0", "from 1 to 1024"),
        ({"A100": 0.5}, "count=0.5"),
        ({"A100": True}, "count=True"),
        ({"A100": 1, "H100": 1}, "exactly one kind"),
        ({}, "exactly one kind"),
        (7, "int"),
        ("A100-64GB", "40GB or 80GB"),
    ],
)
def test_what_cannot_work_is_refused_with_what_was_expected(value: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        AcceleratorSpec.parse(value)


def test_an_unknown_attribute_names_the_nearest() -> None:
    with pytest.raises(AttributeError, match="did you mean H100"):
        _ = NVIDIA.H1000
    with pytest.raises(AttributeError, match="did you mean NVIDIA"):
        _ = Accelerator.NVIDA


def test_specs_can_be_copied_and_pickled() -> None:
    spec = NVIDIA.A100(count=2, mig="3g.40gb")
    assert pickle.loads(pickle.dumps(spec)) == copy.deepcopy(spec) == spec
    assert hash(spec) == hash(copy.copy(spec))
    assert pickle.loads(pickle.dumps(NVIDIA)) is NVIDIA


@pytest.mark.parametrize(
    ("spec", "workers"),
    [
        (NVIDIA.A100, 1),
        (NVIDIA.A100(mig="3g.40gb"), 2),
        (NVIDIA.A100(mig="2g.20gb"), 3),
        (NVIDIA.H100(mig="1g.10gb"), 7),
        (NVIDIA.A100(memory=40, mig="1g.5gb"), 7),
        (NVIDIA.A100(mig="3g.20gb"), 2),
        (NVIDIA.B200(memory=180, mig="1g.23gb"), 7),
        (NVIDIA.H100(memory="94GB", mig="3g.47gb"), 2),
        (NVIDIA.A100(mig=["3g.40gb", "2g.20gb", "2g.20gb"]), 3),
    ],
)
def test_a_mig_profile_says_how_many_workers_a_card_holds(spec: AcceleratorSpec, workers: int) -> None:
    assert (len(spec.slices()) or 1) == workers


@pytest.mark.parametrize(("card", "memory_gb"), MIG_PROFILES)
def test_a_card_holds_as_many_slices_as_its_table_says_also_as_a_list(card: str, memory_gb: int) -> None:
    spec = AcceleratorSpec(card, memory_gb=memory_gb)
    for profile, num in MIG_PROFILES[card, memory_gb].items():
        assert len(spec(mig=[profile] * num).slices()) == num
        with pytest.raises(ConfigError, match="slices, and the card has"):
            spec(mig=[profile] * (num + 1))


@pytest.mark.parametrize(
    ("spec", "balanced"),
    [
        (NVIDIA.A100(memory=40), "1g.5gb 1g.5gb 2g.10gb 3g.20gb"),
        (NVIDIA.H100, "1g.10gb 1g.10gb 2g.20gb 3g.40gb"),
        (NVIDIA.H100(memory=94), "1g.12gb 1g.12gb 2g.24gb 3g.47gb"),
        (NVIDIA.H200, "1g.18gb 1g.18gb 2g.35gb 3g.71gb"),
        (NVIDIA.B200(memory=180), "1g.23gb 1g.23gb 2g.45gb 3g.90gb"),
        (NVIDIA.A30, "1g.6gb 1g.6gb 2g.12gb"),
    ],
)
def test_mixed_slices_that_nvidias_mig_parted_comes_with_fit(spec: AcceleratorSpec, balanced: str) -> None:
    assert spec(mig=balanced.split()).slices() == tuple(balanced.split())


def test_a_profile_that_the_card_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"has .*3g\.40gb"):
        NVIDIA.A100(mig="5g.40gb")
    with pytest.raises(ConfigError, match="no such profile"):
        NVIDIA.A100(memory="80GB", mig="1g.5gb")
    with pytest.raises(ConfigError, match="that is 8 compute slices, and the card has 7"):
        NVIDIA.A100(mig=["4g.40gb", "4g.40gb"])
    with pytest.raises(ConfigError, match="that is 12 memory slices, and the card has 8"):
        NVIDIA.A100(mig=["1g.20gb"] * 6)
    with pytest.raises(ConfigError, match=r"expected a profile such as '3g.40gb', a list of some"):
        NVIDIA.A100(mig=[])
    with pytest.raises(ConfigError, match=r"mig=1: expected a profile such as '3g.40gb'"):
        NVIDIA.A100(mig=1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no MIG profiles; cards that do: A100"):
        NVIDIA.T4(mig="1g.10gb")


@pytest.mark.parametrize(
    ("product", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("NVIDIA RTX A6000", "RTXA6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX6000-Ada"),
        ("Quadro RTX 6000", "RTX6000"),
        ("NVIDIA GeForce RTX 2080 SUPER", "RTX-2080-SUPER"),
        ("NVIDIA GeForce RTX 3080 Ti", "RTX3080Ti"),  # not the RTX 3080: another card
        ("NVIDIA GeForce GTX 1080 Ti", "GTX-1080-Ti"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_a_drivers_product_name_becomes_the_canonical_one(product: str, name: str) -> None:
    assert canonical_gpu_name(product) == name


def test_the_module_is_cheap_to_import() -> None:
    heavy = "print(sorted({'torch', 'numpy', 'pydantic', 'rich', 'typer'} & set(sys.modules)))"
    code = f"import sys, atoll.providers.accelerators, atoll.providers.gpus; {heavy}"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# ------------------------------------------------------------------------------------------------------------ GPUs

_FOUR = "\n".join(f"{index}, GPU-{index}{index}ab-{index}, NVIDIA H100 80GB HBM3, 81559" for index in range(4))


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program of that name on PATH which notes each call in ``calls`` and says what stands in ``answer``."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "nvidia-smi"
    (tmp_path / "answer").write_text(_FOUR + "\n")
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\ncat {tmp_path}/answer\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return program


def test_gpus_are_read_once_with_their_canonical_names(nvidia_smi: Path) -> None:
    gpus = local_gpus()
    assert [(gpu.index, gpu.uuid, gpu.name) for gpu in gpus] == [(i, f"GPU-{i}{i}ab-{i}", "H100") for i in range(4)]
    assert gpus[0].memory_gb == 79.6  # of 81559 MiB
    assert local_gpus() is gpus
    calls = (nvidia_smi.parents[1] / "calls").read_text().splitlines()
    assert calls == ["--query-gpu=index,uuid,name,memory.total --format=csv,noheader,nounits"]


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        ("0,1", [0, 1]),
        ("3,1", [3, 1]),
        ("GPU-22ab-2,GPU-0", [2, 0]),
        ("1,-1,2", [1]),
        ("1,9,2", [1]),  # as CUDA does: the first that names nothing ends the list
        ("GPU-", []),  # the beginning of several
        ("1,1", []),
        ("MIG-1234", []),
        ("", []),
        ("-1", []),
        ("02, 1", [2, 1]),
        ("²", []),
        ("1," + "9" * 5000, [1]),
    ],
)
def test_cuda_visible_devices_chooses_and_orders(
    nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch, visible: str, indices: list[int]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    report = gpu_report()
    assert [gpu.index for gpu in report.gpus] == indices
    assert (report.reason is None) == bool(indices)
    assert indices or "CUDA_VISIBLE_DEVICES" in str(report.reason)


def test_a_change_of_cuda_visible_devices_is_seen(nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(local_gpus()) == 4
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    assert [gpu.index for gpu in local_gpus()] == [2]


def test_a_failing_driver_means_no_gpu_and_a_reason(nvidia_smi: Path) -> None:
    nvidia_smi.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed: no driver' >&2\nexit 9\n")
    assert local_gpus() == ()
    assert "exit code 9: NVIDIA-SMI has failed: no driver" in str(gpu_report().reason)


def test_no_devices_means_no_gpu_and_a_reason(nvidia_smi: Path) -> None:
    (nvidia_smi.parents[1] / "answer").write_text("No devices were found\n")
    assert gpu_report().gpus == ()
    assert "No devices were found" in str(gpu_report().reason)


def test_without_nvidia_smi_there_is_no_gpu_and_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert local_gpus() == ()
    assert gpu_report().reason == "nvidia-smi is not on PATH"


def test_memory_the_driver_does_not_tell_is_zero(nvidia_smi: Path) -> None:
    (nvidia_smi.parents[1] / "answer").write_text("0, GPU-1, NVIDIA GB10, [N/A]\n")
    assert [(gpu.name, gpu.memory_gb) for gpu in local_gpus()] == [("GB10", 0.0)]


def test_cards_of_other_makers_have_their_own_names() -> None:
    import atoll as sky

    assert AcceleratorSpec.parse("mi300x") == sky.AMD.MI300X
    assert sky.Habana.Gaudi2(count=8).count == 8
    assert sky.TPU.v5e(count=4) == AcceleratorSpec("tpu-v5e", 4)
    with pytest.raises(AttributeError, match=r"did you mean v5e\?"):
        sky.TPU.v5ee
