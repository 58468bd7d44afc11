"""Logging in to real sshds, and every way in which that fails: one line each, with what to do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.pools import command, eventually

import leaks
from atoll.core.errors import ProvisionError
from atoll.providers.base import Bundle, NodePlan
from atoll.providers.bundle import atoll_bundle
from atoll.providers.ssh import facts
from atoll.providers.ssh.connection import Connection, connections, on_each
from atoll.providers.ssh.hosts import Facts, targets
from atoll.providers.ssh.remote import put
from atoll.wire import command_output
from testbed.hosts import Host, Testbed, make_key
from testbed.terminal import interrupted_when, log_out, only_by_password, talk

PYENV = Path("/root/.pyenv/versions")


@pytest.fixture
def connect(bed: Testbed) -> Iterator[Callable[..., Connection]]:
    """A connection to a host of the testbed, closed at the end."""
    made: list[Connection] = []

    def make(host: str = "h1", **options: str) -> Connection:
        made.append(Connection(targets([host], **options)[0]))
        return made[-1]

    yield make
    for each in made:
        each.close()


Connect = Callable[..., Connection]


def refusal(connection: Connection, limit_s: float = 15.0) -> str:
    """What the user is told."""
    with pytest.raises(ProvisionError) as caught:
        connection.run("true", limit_s=limit_s)
    return str(caught.value)


def ask(connection: Connection) -> Facts:
    return facts.ask(connection, [])


def test_one_login_serves_many_commands_and_ends_when_closed(bed: Testbed, connect: Connect) -> None:
    h1 = connect()
    assert h1.run("cat; hostname; exit 3", b"given\n").stdout == b"given\nh1\n"
    before = bed.hosts[0].run("pgrep -c sshd")
    assert h1.run("exit 3").returncode == 3
    assert bed.hosts[0].run("pgrep -c sshd") == before
    masters = [pid for pid in leaks.descendants() if "[mux]" in " ".join(command(pid))]
    assert len(masters) == 1
    h1.close()
    eventually(lambda: not leaks.is_running(masters[0]), "the login ends", 4)  # sooner than it would by itself


def test_what_takes_long_to_send_arrives_whole(bed: Testbed, connect: Connect) -> None:
    bed.hosts[0].slow(20)
    assert connect("h1").run("wc -c", bytes(2 << 20), limit_s=60).stdout.split() == [b"2097152"]


@pytest.mark.long
def test_the_last_user_of_a_login_ends_it(connect: Connect) -> None:
    one, two = connect(), connect()
    assert one.run("hostname").stdout == two.run("hostname").stdout == b"h1\n"
    (login,) = (path for path in Path(os.environ["ATOLL_HOME"], "ssh").iterdir() if path.is_socket())
    one.close()
    assert login.exists()
    two.close()
    assert not login.exists()


def test_a_login_with_a_long_home_finds_a_short_path(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ATOLL_HOME", str(tmp_path / ("long" * 25)))
    h1 = connect()
    assert h1.run("hostname").stdout == b"h1\n"
    assert f"atoll-{os.getuid()}-ssh" in str(h1._socket)
    h1.close()
    h1._socket.with_name(h1._socket.name + ".lock").unlink()
    h1._socket.parent.rmdir()


def test_an_unknown_host_key_is_refused_with_its_fingerprint(bed: Testbed, connect: Connect) -> None:
    known = bed.home / ".ssh" / "known_hosts"
    known.write_text("")
    said = refusal(connect())
    key = bed.folder / "keys" / "h1" / "ssh_host_ed25519_key.pub"
    printed = subprocess.run(["ssh-keygen", "-lf", str(key)], capture_output=True, text=True).stdout
    assert "its host key is not known" in said
    assert printed.split()[1] in said
    assert "`ssh h1` once" in said
    assert f"`ssh-keyscan -p 22 10.77.0.11 >> {known}`" in said
    assert known.read_text() == ""  # nothing is written for the user


def test_a_changed_host_key_is_refused_with_both_steps(bed: Testbed, connect: Connect, tmp_path: Path) -> None:
    make_key(tmp_path / "other")
    known = bed.home / ".ssh" / "known_hosts"
    known.write_text(f"10.77.0.11 {(tmp_path / 'other.pub').read_text()}")
    said = refusal(connect())
    assert "its host key has CHANGED" in said
    assert f"{known}:1" in said
    assert "SHA256:" in said
    assert "`ssh-keygen -R 10.77.0.11`, then `ssh h1` once" in said


def test_a_key_that_is_not_taken(connect: Connect, tmp_path: Path, bed: Testbed) -> None:
    config = bed.home / ".ssh" / "config"
    config.write_text(config.read_text().replace("IdentityFile", "IdentitiesOnly yes\n    #"))
    make_key(tmp_path / "mine")
    said = refusal(connect("h1", key=str(tmp_path / "mine")))
    assert "h1: does not let sky in with the keys" in said
    assert str(tmp_path / "mine") in said
    assert "`ssh-copy-id h1`" in said


def test_a_name_nobody_knows(connect: Connect, bed: Testbed) -> None:
    assert "h11: unknown host: did you mean 'h1'?" in refusal(connect("h11"))
    with (bed.home / ".ssh" / "config").open("a") as config:
        config.write("\nHost ghost\n")
    assert "ghost: unknown host. Is it spelt right" in refusal(connect("ghost"))


def test_a_port_where_nobody_listens(connect: Connect) -> None:
    said = refusal(connect("h1:23"))
    assert "h1:23: refuses connections" in said
    assert "port 23: Connection refused" in said


def test_an_address_that_nobody_has(connect: Connect) -> None:
    assert "can't be reached: is it up" in refusal(connect("10.77.0.99"))


@pytest.mark.long
def test_a_frozen_host_hangs_at_login(bed: Testbed, connect: Connect) -> None:
    bed.hosts[0].freeze()
    started = time.monotonic()
    assert "h1: hangs at login" in refusal(connect(), limit_s=3.0)
    assert time.monotonic() - started < 10
    bed.hosts[0].thaw()


def test_a_command_that_does_not_end_is_not_the_login(connect: Connect) -> None:
    with pytest.raises(ProvisionError, match="h1: a command that began there did not end within 2 s"):
        connect().run("echo begun; sleep 60", limit_s=2.0)


@pytest.mark.parametrize("version", ["2.7.18", "3.9.18"])
def test_a_python_that_is_too_old_is_named(connect: Connect, version: str) -> None:
    python = PYENV / version / "bin" / "python"
    if not python.exists():
        pytest.skip(f"this machine has no Python {version} under {PYENV}")
    with pytest.raises(ProvisionError, match=f"h1: has Python {version} as {python}, and Atoll needs 3.11 or newer"):
        ask(connect("h1", python=str(python)))


def test_no_python_at_all(connect: Connect) -> None:
    with pytest.raises(ProvisionError, match=r"h1: has no nothere .*not found.*: install one \(`uv python"):
        ask(connect("h1", python="nothere"))


def start_file(bed: Testbed, text: str) -> None:
    (bed.folder / "home" / "sky" / ".bashrc").write_text(text)


def test_what_a_login_shell_prints_first_is_no_output(bed: Testbed, connect: Connect) -> None:
    start_file(bed, "echo atoll-output; echo '{}'; printf 'no end of line: '\n")
    h1 = connect()
    assert h1.run("cat; exit 3", b"given").stdout == b"given"
    assert h1.run("true").stdout == b""
    assert ask(h1).home == "/home/sky"
    process = h1.open("echo one; cat; exit 4")
    assert process.stdin is not None
    assert process.stdout is not None
    assert command_output.skip_login_text(process.stdout) is None
    assert process.stderr is not None
    with process.stdin, process.stdout, process.stderr:
        process.stdin.write(b"two")
        process.stdin.close()
        assert process.stdout.read() == b"one\ntwo"
    assert process.wait() == 4


def test_a_login_or_a_python_that_fails_is_told_with_what_it_printed(bed: Testbed, connect: Connect) -> None:
    start_file(bed, "echo This account is not available.; exit 1\n")
    with pytest.raises(ProvisionError, match=r"^h1: a login there ended before it ran a .* 'This account is not avail"):
        ask(connect())
    start_file(bed, "echo loaded Python 2.7 >&2\n")
    python = bed.folder / "home" / "sky" / "python"
    for answer, told in (("echo broken >&2; exit 1", "failed: broken"), ("echo 17", "failed: 17")):
        python.write_text(f'#!/bin/sh\n[ "$1" = -V ] && exec echo Python 3.12.1\n{answer}\n')
        python.chmod(0o755)
        with pytest.raises(ProvisionError, match=rf"^h1: .*{told}$"):
            ask(connect(python="~/python"))


def test_facts_survive_noise_of_login_scripts(bed: Testbed, connect: Connect) -> None:
    start_file(bed, "echo welcome; echo oops >&2\n")
    said = ask(connect())
    assert (said.addr, said.home) == ("10.77.0.11", "/home/sky")
    assert said.place == "/home/sky/.atoll"
    assert not any(name.startswith("SSH_") for name in said.env)
    assert said.gpus == ()
    assert abs(said.seen["skew_s"]) < 20  # the way to here counts too
    assert (said.seen["torch"], said.seen["gpus"]) == (None, [])
    assert min(said.seen["disk_bytes"], said.seen["shm_bytes"]) > 0
    assert ask(connect("h2", python=sys.executable)).seen["torch"].startswith("2.")


def test_gpus_are_listed_as_nvidia_smi_says_them(bed: Testbed, connect: Connect) -> None:
    card = "NVIDIA H100 80GB HBM3, 81559"
    answer = f"0, GPU-aa, {card}, 3, 580.65.06\\n1, GPU-bb, {card}, [N/A], 580.65.06\\n"
    bed.hosts[0].run(
        f"printf '#!/bin/sh\\nprintf \"{answer}\"\\n' > /usr/local/bin/nvidia-smi; chmod 755 /usr/local/bin/nvidia-smi"
    )
    said = ask(connect())
    assert [(gpu.name, gpu.uuid) for gpu in said.gpus] == [("H100", "GPU-aa"), ("H100", "GPU-bb")]
    assert [gpu["used_mb"] for gpu in said.seen["gpus"]] == [3.0, 0.0]
    assert said.seen["gpus"][0]["driver"] == "580.65.06"
    bed.hosts[0].run("printf '#!/bin/sh\\necho driver broken; exit 9\\n' > /usr/local/bin/nvidia-smi")
    said = ask(connect())
    assert said.gpus == ()
    assert "nvidia-smi failed" in str(said.gpu_problem)


def test_a_home_that_is_read_only_leaves_the_next_place(bed: Testbed, connect: Connect) -> None:
    bed.hosts[0].run("mount --bind /home/sky /home/sky && mount -o remount,ro,bind /home/sky")
    assert ask(connect()).place == "/tmp/atoll-2000"


def _plan(said: Facts, code: Bundle) -> NodePlan:
    return NodePlan(0, said.addr, 1, folder=said.place, python=said.executable, bundles=(code,), present=said.bundles)


def test_the_bundle_goes_to_a_shared_home_once_when_all_hosts_get_it_together(bed: Testbed, connect: Connect) -> None:
    code = atoll_bundle()
    both = [connect("h1"), connect("h2")]
    wanted = [(code.digest, code.name)]
    said = on_each(both, lambda each: facts.ask(each, wanted))
    assert [each.bundles for each in said] == [frozenset(), frozenset()]
    # A name that leads nowhere is what the other host's unfinished file is for who listed the folder before its end.
    bed.hosts[0].run("ln -s nowhere /home/sky/.atoll/bundle/unfinished")
    on_each(both, lambda each: put(each, _plan(said[0], code), code))
    assert bed.hosts[0].run("ls /home/sky/.atoll/bundle").split() == [code.name, "unfinished"]
    said = on_each(both, lambda each: facts.ask(each, wanted))
    assert [each.bundles for each in said] == [frozenset([code.digest])] * 2
    run = facts.python_command("python3", "import sys; sys.path.insert(0, sys.argv[1]); import atoll.agent.session")
    assert both[1].run(f"{run} {_plan(said[0], code).bundle_path(code)}").returncode == 0


def test_a_disk_that_is_full_is_said(bed: Testbed, connect: Connect) -> None:
    bed.hosts[0].run("mkdir -p /home/sky/.atoll && mount -t tmpfs -o size=100k,uid=2000,mode=700 x /home/sky/.atoll")
    code = atoll_bundle()
    said = ask(connect())
    with pytest.raises(ProvisionError, match=rf"h1: could not write \S+{code.name} there: .*No space left"):
        put(connect(), _plan(said, code), code)


def test_a_jump_host(bed: Testbed, connect: Connect) -> None:
    assert connect("h2", jump="h1").run("echo $SSH_CONNECTION").stdout.startswith(b"10.77.0.11 ")
    said = refusal(connect("h2", jump="h1:23"))
    assert "h2: its jump host can't be used: h1:23: refuses connections" in said
    known = bed.home / ".ssh" / "known_hosts"
    known.write_text("".join(known.read_text().splitlines(keepends=True)[1:]))
    connections.close_idle()
    said = refusal(connect("h2", jump="sky@10.77.0.11"))
    assert "h2: its jump host can't be used: sky@10.77.0.11: its host key is not known" in said
    assert "`ssh sky@10.77.0.11` once" in said


@pytest.mark.long
def test_several_hosts_that_fail_are_all_named(bed: Testbed) -> None:
    some = targets(["h1", "h2:23", "nobody"])
    with pytest.raises(ProvisionError) as caught, connections.used(some) as logins:
        on_each(logins, ask)
    assert "2 of 3 hosts failed:\n  h2:23: refuses" in str(caught.value)
    assert "\n  nobody: unknown host" in str(caught.value)


def test_ctrl_c_ends_what_runs_on_every_host(bed: Testbed) -> None:
    with connections.used(targets(["h1", "h2"])) as logins:
        on_each(logins, lambda each: each.run("true"))
        with pytest.raises(KeyboardInterrupt), interrupted_when(lambda: all(map(_sleeps, bed.hosts))):
            on_each(logins, lambda each: each.run("sleep 60", limit_s=60))


def test_a_pool_that_ends_does_not_log_out_whoever_asks_a_host_meanwhile(bed: Testbed) -> None:
    (target,) = targets(["h1"])
    with ThreadPoolExecutor(1) as threads, connections.used([target]) as (login,):
        asked = threads.submit(login.run, "sleep 1; echo yes")
        eventually(lambda: any("sleep 1" in line for line in bed.hosts[0].command_lines()), "it asks", 30)
        connections.hold(target)
        connections.release(target)
        assert asked.result(30).stdout == b"yes\n"


@pytest.mark.long
def test_a_login_that_is_over_holds_up_nobody_where_a_child_was_forked_meanwhile(
    bed: Testbed, connect: Callable[..., Connection]
) -> None:
    first = connect()
    first.run("true")
    child = os.fork()
    if not child:
        time.sleep(600)
    try:
        first.close()
        with ThreadPoolExecutor(1) as threads:
            try:
                assert threads.submit(connect).result(20).run("echo yes").stdout == b"yes\n"
            finally:
                os.kill(child, signal.SIGKILL)
    finally:
        os.waitpid(child, 0)


def _sleeps(host: Host) -> bool:
    return "sleep 60" in host.command_lines()


TWICE = (
    "from atoll.providers.ssh.connection import Connection\nfrom atoll.providers.ssh.hosts import targets\n"
    "c = Connection(targets(['h1'])[0])\nprint(c.run('hostname').stdout, c.run('hostname').stdout)\nc.close()\n"
)


@pytest.mark.parametrize(
    "asked", [pytest.param("Enter passphrase for key", marks=pytest.mark.long), "sky@10.77.0.11's password:"]
)
def test_a_terminal_is_asked_once_when_no_key_is_taken(bed: Testbed, connect: Connect, asked: str) -> None:
    """Both commands go through the login that it was typed for, and so does a later program."""
    if asked.startswith("Enter"):
        key = bed.home / ".ssh" / "id_ed25519"
        subprocess.run(["ssh-keygen", "-q", "-p", "-P", "", "-N", "open sesame", "-f", str(key)], check=True)
    else:
        only_by_password(bed.hosts[0], "open sesame")
        said = refusal(connect())
        assert "h1: does not let sky in with the keys" in said
        assert said.endswith("; or run this in a terminal, where ssh asks for the password or code")
    said = talk([sys.executable, "-c", TWICE], {asked: "open sesame\n"})
    assert said.count("b'h1") == 2
    assert said.count(asked) == 1
    h1 = connect()
    assert h1.run("hostname").stdout == b"h1\n"
    h1.close()
    assert connect().run("hostname").stdout == b"h1\n"
    log_out(Path(os.environ["ATOLL_HOME"]))
