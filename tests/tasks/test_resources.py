"""`resources`: every spelling ends in one form, and what a machine can't honour is said."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import ConfigError, UsageError
from atoll.providers.accelerators import NVIDIA
from atoll.tasks.resources import Autostop, Resources


def read(text: str) -> Resources:
    return Resources.from_config(yaml.safe_load(text))


@pytest.mark.parametrize(
    ("said", "wishes"),
    [
        ("L4", ["L4:1"]),
        ("l4:1", ["L4:1"]),
        ("{L4: 1}", ["L4:1"]),
        ("{L4:2}", ["L4:2"]),
        ('{"A40": 2}', ["A40:2"]),
        ("A100-80GB:8", ["A100-80GB:8"]),
        ("L4:0.5", ["L4:0.5"]),
        ("[H100:8, A100:8]", ["H100:8", "A100:8"]),
        ("[{H100: 8}, A100]", ["H100:8", "A100:1"]),
        ("{H100:8, H200:8}", ["H100:8", "H200:8"]),
        ("{H100: 8, H200: 8}", ["H100:8", "H200:8"]),
        ("!!set {L4, A100}", ["A100:1", "L4:1"]),
        ("{L4, A100}", ["L4:1", "A100:1"]),
        ("tpu-v5litepod-8", ["tpu-v5litepod-8:1"]),
        ("[]", []),
    ],
)
def test_accelerators_in_every_spelling(said: str, wishes: list[str]) -> None:
    resources = read(f"accelerators: {said}")
    assert [str(each) for each in resources.requested] == wishes
    assert Resources.from_config(resources.to_yaml_config()) == resources


def test_a_part_of_a_card_counts_as_one() -> None:
    assert Resources(accelerators="L4:0.5").requested[0].num_accelerators == 1
    assert Resources(accelerators=NVIDIA.A100(count=2)).requested[0].num_accelerators == 2


def test_the_order_of_a_list_is_a_preference() -> None:
    assert read("accelerators: [H100, A100]").config["accelerators"] == ["H100:1", "A100:1"]
    assert read("accelerators: {H100:, A100:}").config["accelerators"] == {"H100:1": None, "A100:1": None}


def test_an_unknown_card_is_used_with_a_remark() -> None:
    (line,) = Resources(accelerators="Warp9:8").honours("local")
    assert line.startswith("accelerator 'Warp9' is not known; known ones are ")
    assert line.endswith(" and others. It is used as written")


@pytest.mark.parametrize(
    ("key", "said", "kept"),
    [
        ("cpus", 4, "4"),
        ("cpus", "4+", "4+"),
        ("cpus", 0.5, "0.5"),
        ("memory", 32, "32"),
        ("memory", "32+", "32+"),
        ("memory", "32GB", "32"),
        ("memory", "1TB+", "1024+"),
        ("memory", "512 MiB", "0.5"),
        ("memory", "4x", "4x"),
        ("disk_size", 256, 256),
        ("disk_size", "1024GB", 1024),
        ("disk_size", "1TB", 1024),
        ("disk_tier", "BEST", "best"),
        ("ports", 8080, ["8080"]),
        ("ports", "8080-8090", ["8080-8090"]),
        ("ports", [80, "90", "100-101"], ["80", "90", "100-101"]),
        ("autostop", True, {"idle_minutes": 5}),
        ("autostop", 10, {"idle_minutes": 10}),
        ("autostop", "10h", {"idle_minutes": 600}),
        ("autostop", "90s", {"idle_minutes": 2}),
        ("autostop", {"down": True}, {"idle_minutes": 5, "down": True}),
        ("autostop", {"idle_minutes": 1, "wait_for": "none"}, {"idle_minutes": 1, "wait_for": "none"}),
        ("job_recovery", "FAILOVER", {"strategy": "FAILOVER"}),
        ("job_recovery", {"recover_on_exit_codes": 7}, {"recover_on_exit_codes": [7]}),
        ("image_id", "docker:ubuntu", "docker:ubuntu"),
        ("image_id", {"us-east-1": "ami-1"}, {"us-east-1": "ami-1"}),
        ("infra", "AWS/us-east-1", "aws/us-east-1"),
        ("infra", "k8s/a/b/c", "k8s/a/b/c"),
        ("infra", "ssh/lab", "ssh/lab"),
        ("labels", {"a": "b"}, {"a": "b"}),
        ("priority", -1000, -1000),
        ("max_hourly_cost", 1.5, 1.5),
    ],
)
def test_values_in_one_form(key: str, said: Any, kept: Any) -> None:
    resources = Resources.from_config({key: said})
    assert resources.config == {key: kept}
    assert Resources.from_config(resources.config) == resources


@pytest.mark.parametrize(
    ("key", "said", "expected"),
    [
        ("cpus", "4 +x", "a number of CPUs"),
        ("cpus", True, "is true: expected a number of CPUs"),
        ("cpus", 0, "a number of CPUs"),
        ("memory", "32GBx", "GB of memory"),
        ("memory", "lots", "GB of memory"),
        ("disk_size", "0.5GB", "whole GB"),
        ("ports", 70000, "a port from 1 to 65535"),
        ("ports", "90-80", "a port from 1 to 65535"),
        ("ports", ["80", "x"], "a port from 1 to 65535"),
        ("accelerators", "L4:0", "how many accelerators, more than 0"),
        ("accelerators", "L4:two", "how many accelerators"),
        ("accelerators", {"L4": "2"}, "how many accelerators"),
        ("accelerators", {"L4": True}, "how many accelerators"),
        ("accelerators", ["L4", 3], "an accelerator"),
        ("accelerators", 3, "an accelerator"),
        ("use_spot", "yes", "true or false"),
        ("disk_tier", "hihg", "did you mean 'high'"),
        ("autostop", "soon", "idle minutes"),
        ("autostop", {"idle_minutes": 1, "donw": True}, "did you mean 'down'"),
        ("job_recovery", {"recover_on_exit_codes": [256]}, "a whole number from 0 to 255"),
        ("job_recovery", {"max_restarts_on_error": 1}, "did you mean 'max_restarts_on_errors'"),
        ("infra", "local/x", "local alone"),
        ("infra", "ssh", "ssh/NAME"),
        ("infra", "aws//b", "no part empty"),
        ("infra", "aws/a/b/c", "three parts at most"),
        ("infra", "awss", "did you mean 'aws'"),
        ("priority", 1001, "a whole number from -1000 to 1000"),
        ("max_hourly_cost", float("nan"), "a number, 0 or more"),
        ("labels", {"a": 1}, "put it in quotes"),
        ("any_of", {"cpus": 1}, "a list"),
        ("any_of", [{"cpu": 1}], "any_of[0].cpu: there is no such key: did you mean 'cpus'"),
    ],
)
def test_wrong_values_say_what_was_expected(key: str, said: Any, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Resources.from_config({key: said})
    assert str(caught.value).startswith(f"Resources: {key}")
    assert expected in str(caught.value)


def test_keywords_of_the_constructor() -> None:
    resources = Resources(cpus="4+", memory="2x", ports=[80], use_spot=True, autostop={"idle_minutes": 3, "down": True})
    assert (resources.cpus, resources.memory, resources.ports, resources.use_spot) == ("4+", "2x", ["80"], True)
    assert resources.autostop == Autostop(idle_minutes=3, down=True)
    assert repr(Resources(cpus=4)) == "Resources(cpus='4')"
    with pytest.raises(UsageError, match="did you mean 'accelerators'"):
        Resources(accelerator="L4")


def test_the_old_words_for_infra() -> None:
    assert read("{cloud: aws, region: us-east-1, zone: us-east-1a}").infra == "aws/us-east-1/us-east-1a"
    assert read("{region: us-east-1}").infra == "*/us-east-1"
    assert read("{cloud: ssh, region: lab}").infra == "ssh/lab"
    assert read("infra: '*'").infra is None
    assert read("infra: gcp/*/*").infra == "gcp"
    with pytest.raises(ConfigError, match="infra='aws' says this already"):
        Resources(infra="aws", region="us-east-1")


def test_alternatives() -> None:
    resources = read(
        """
        cpus: 4
        infra: aws
        any_of:
          - {infra: local, accelerators: L4}
          - {region: r2, accelerators: [H100, A100]}
        """
    )
    shown = [(each.infra, str(each.requested[0]), each.cpus) for each in resources.choices()]
    assert shown == [("local", "L4:1", "4"), ("*/r2", "H100:1", "4"), ("*/r2", "A100:1", "4")]
    assert resources.choice("*/r2").requested[0].name == "H100"
    assert resources.choice("gcp").requested[0].name == "L4"
    changed = resources.changed({"accelerators": "T4", "infra": "local", "cpus": None})
    assert changed.config == {"any_of": [{}, {}], "accelerators": "T4:1", "infra": "local"}
    assert [each.config for each in changed.choices()] == [{"accelerators": "T4:1", "infra": "local"}]
    with pytest.raises(ConfigError, match="give any_of or ordered"):
        Resources(any_of=[], ordered=[])


def test_what_own_machines_cannot_honour() -> None:
    resources = Resources(
        infra="aws/us-east-1",
        use_spot=True,
        disk_tier="best",
        ports=80,
        priority=0,
        cpus=4,
        autostop=10,
        job_recovery={"strategy": "FAILOVER"},
    )
    for infra in ("local", "ssh/lab"):
        lines = resources.honours(infra)
        assert len(lines) == 6
        for named in ("use_spot", "disk_tier", "ports", "priority", "job_recovery.strategy", "requests aws/us-east-1"):
            assert sum(named in line for line in lines) == 1
        assert all(infra in line for line in lines)
    assert [line.partition(" ")[0] for line in resources.honours("aws/us-east-1")] == [
        "resources.priority",
        "job_recovery.strategy",
    ]
    (line,) = Resources(autostop={"wait_for": "none"}).honours("local")
    assert line == "autostop.wait_for=none has no effect on local: it waits for jobs"
    assert Resources(use_spot=False, cpus=2, accelerators="L4").honours("local") == []


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "cpus": st.integers(1, 512) | st.integers(1, 512).map("{}+".format),
            "memory": st.floats(0.125, 1e5) | st.integers(1, 9).map("{}x".format),
            "ports": st.lists(st.integers(1, 65535), min_size=1, max_size=3),
            "accelerators": st.lists(st.sampled_from(["L4", "H100:8", "A100-80GB:2", "T4:0.5"]), max_size=3),
            "autostop": st.booleans() | st.integers(0, 1000),
            "use_spot": st.booleans(),
        },
    )
)
def test_the_canonical_form_is_its_own(config: dict[str, Any]) -> None:
    resources = Resources.from_config(config)
    assert Resources.from_config(yaml.safe_load(yaml.safe_dump(resources.to_yaml_config()))) == resources
    assert Resources(**config) == resources


def test_a_container_image_is_refused_where_none_can_be_started() -> None:
    for image in ("docker:ubuntu", {"us-east-1": "docker:ubuntu"}):
        for infra in ("local", "ssh/lab"):
            with pytest.raises(ConfigError, match=f"no containers are started on {infra}; `--image-id none` runs"):
                Resources(image_id=image).honours(infra)
    assert Resources(image_id="ami-1").honours("local")[0].startswith("resources.image_id has no effect on local")
