"""Which hosts a spelling, a pattern or a group stands for, and what is said to those that stand for none."""

from __future__ import annotations

from pathlib import Path

import pytest

import atoll as sky
from atoll.core.errors import ConfigError, UsageError
from atoll.providers.ssh.hosts import Target, config_hosts, find_group, targets


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with a small ssh config, and an ATOLL_HOME in it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("ATOLL_HOME", str(tmp_path / ".atoll"))
    (tmp_path / ".ssh" / "more").mkdir(parents=True)
    (tmp_path / ".atoll").mkdir()
    (tmp_path / ".ssh" / "config").write_text(
        "# Host commented\nInclude more/*.conf\nHost gpu-1 gpu-2\n  User ann\nhost=login\n"
        "Host *.lab !x gpu-?9\nHost *\n"
    )
    (tmp_path / ".ssh" / "more" / "a.conf").write_text('HOST "gpu-3"\n\tPort 2222\nInclude ../config\n')
    return tmp_path


def test_hosts_of_the_config_come_in_order_with_includes_followed_and_no_patterns() -> None:
    assert config_hosts() == ["gpu-3", "gpu-1", "gpu-2", "login"]


@pytest.mark.parametrize(
    ("spelling", "target"),
    [
        ("gpu-1", Target("gpu-1")),
        ("ann@a.example", Target("ann@a.example")),
        ("b:2222", Target("b", 2222)),
        ("ann@b:2222", Target("ann@b", 2222)),
        ("[::1]:22", Target("::1", 22)),
        ("fe80::1", Target("fe80::1")),
        ("ssh://ann@c:22", Target("ann@c", 22)),
    ],
)
def test_spellings(spelling: str, target: Target) -> None:
    assert targets([spelling]) == (target,)


def test_a_pattern_stands_for_the_hosts_it_fits() -> None:
    assert [target.host for target in targets(["gpu-*"])] == ["gpu-3", "gpu-1", "gpu-2"]
    assert [str(target) for target in targets(["bob@gpu-[12]:23"])] == ["bob@gpu-1:23", "bob@gpu-2:23"]


@pytest.mark.parametrize("spelling", ["", "-oProxyCommand=x", "a b", "a:0", "a:99999", "@", "ann@-x", 3])
def test_what_is_no_host_is_refused(spelling: object) -> None:
    with pytest.raises(ConfigError, match="is not a host; expected"):
        targets([spelling])  # type: ignore[list-item]  # on purpose


def test_a_pattern_that_fits_nothing_names_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"'tpu-\*' matches no Host .* it has gpu-3, gpu-1, gpu-2, login"):
        targets(["tpu-*"])


def test_options_of_a_target_are_what_a_person_types() -> None:
    target = targets(["ann@b:2222"], key="/k", jump="login")[0]
    assert target.command == "ssh -p 2222 -i /k -J login ann@b"


def test_a_group_of_the_config_file(home: Path) -> None:
    (home / ".atoll" / "config.toml").write_text(
        '[ssh.lab]\nhosts = ["ann@a", "gpu-[12]"]\nkey = "~/k"\npython = "/opt/py"\ngrace_s = 5\nworkdir = "/scratch"\n'
        "max_restarts_on_lost_nodes = 0\n"
    )
    group = find_group("lab")
    assert [target.host for target in group.targets] == ["ann@a", "gpu-1", "gpu-2"]
    assert {(target.key, target.python) for target in group.targets} == {("~/k", "/opt/py")}
    assert (group.grace_s, group.workdir, group.max_restarts_on_lost_nodes) == (5.0, "/scratch", 0)


def test_hosts_and_patterns_of_the_ssh_config_are_groups_too() -> None:
    assert find_group("login").targets == (Target("login"),)
    assert [target.host for target in find_group("gpu-*").targets] == ["gpu-3", "gpu-1", "gpu-2"]


def test_an_unknown_name_names_the_nearest_and_how_to_declare_it(home: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        find_group("gpu1")
    assert "did you mean 'gpu-1'?" in str(caught.value)
    assert "[ssh.gpu1]\n  hosts = [" in str(caught.value)
    assert str(home / ".atoll" / "config.toml") in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '[ssh.lab]\nhosts = ["a"]\nhost = "b"\n',
            r"config\.toml:3: \[ssh\.lab\] has no key 'host': did you mean 'hosts'",
        ),
        ("[ssh.lab]\nhosts = []\n", r"config\.toml:2: \[ssh\.lab\] hosts = \[\]: expected a list"),
        ("[ssh.lab]\nkey = 'k'\n", r"\[ssh\.lab\] hosts = None: expected a list"),
        ('[ssh.lab]\nhosts = ["a"]\n\ngrace_s = "x"\n', r"config\.toml:4: .*grace_s = 'x': expected seconds"),
        (
            '[ssh.lab]\nhosts = ["a"]\nmax_restarts_on_lost_nodes = -1\n',
            r"config\.toml:3: .*max_restarts_on_lost_nodes = -1: expected a number, 0 or more",
        ),
        ('[ssh.lab]\nhosts = ["a"]\nkey = 3\n', r"config\.toml:3: .*key = 3: expected text"),
        ("[ssh]\nlab = 3\n", r"ssh\.lab = 3: expected a section"),
        ("[ssh.lab\n", r"config\.toml: .*line 1"),
        ("ssh = 3\n", r"ssh = 3: expected sections"),
    ],
)
def test_mistakes_in_the_config_file_are_named_with_their_line(home: Path, text: str, message: str) -> None:
    (home / ".atoll" / "config.toml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        find_group("lab")


def test_the_provider_checks_what_it_is_given() -> None:
    assert sky.SSH("gpu-*").num_nodes == 3
    with pytest.raises(ConfigError, match="at least one host"):
        sky.SSH([])
    with pytest.raises(ConfigError, match=r"SSH\(key=3\)"):
        sky.SSH(["a"], key=3)  # type: ignore[arg-type]  # on purpose
    with pytest.raises(ConfigError, match="grace_s"):
        sky.SSH(["a"], grace_s=-1)
    with pytest.raises(UsageError, match="did you mean 'hosts'"):
        sky.SSH(host=["a"])  # type: ignore[call-arg]  # on purpose
    with pytest.raises(ConfigError, match=r"nodes=3: SSH\(hosts=\['a', 'b'\]\) has 2"):
        sky.ComputePool(sky.SSH(["a", "b"]), nodes=3).plan()


def test_a_host_named_twice_is_refused():
    with pytest.raises(ConfigError, match="h1 is named twice"):
        targets(["h1", "h2", "h1"])
