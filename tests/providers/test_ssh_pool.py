"""Pools on hosts of the testbed: calls, failures, lost connections, and nothing left anywhere."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.pools import eventually

import atoll as sky
from atoll.core.errors import ConfigError, NodeLost, ProvisionError, WorkerDied
from atoll.providers.ssh import preflight
from testbed.fixtures import MakeBed
from testbed.hosts import Host, Testbed
from testbed.terminal import interrupted_when

BOTH = ["h1", "h2"]


@pytest.fixture(autouse=True)
def nothing_stays(bed: Testbed) -> Iterator[None]:
    """No process and no temporary file of ours is left on any host that still runs."""
    yield
    for host in bed.hosts:
        if host.pids():
            ended(host, 60)  # a start that was cut short may leave a session that waits half a minute for its driver
            left = "ls -d /tmp/*atoll* /tmp/tmp* 2>/dev/null || true"
            eventually(lambda host=host, left=left: not host.run(left), f"files in /tmp of {host.name} are gone", 20)


def ended(host: Host, within_s: float) -> None:
    """Nothing of ours runs there any more, in time."""
    deadline = time.monotonic() + within_s
    while lines := host.command_lines():
        assert time.monotonic() < deadline, f"after {within_s:g} s {host.name} still runs {lines}"
        time.sleep(0.05)


def slow_python(host: Host, word: str, seconds: float) -> None:
    """From now on its Python starts late, where this word is among its arguments."""
    host.run(
        "real=$(readlink -f /usr/bin/python3); rm /usr/bin/python3; "
        f'printf \'#!/bin/bash\\ncase "$*" in *{word}*) sleep {seconds};; esac\\n'
        'exec -a "$0" %s "$@"\\n\' $real > /usr/bin/python3; chmod 755 /usr/bin/python3'
    )


@sky.compute
def whereabouts(value: int) -> tuple[str, int, int, str]:
    import socket

    print(f"value {value}")
    info = sky.instance_info()
    return socket.gethostname(), info.rank, value, os.environ["MASTER_ADDR"]


@sky.compute
def nap(seconds: float) -> str:
    time.sleep(seconds)
    return "rested"


def test_calls_run_on_every_host_and_what_they_print_return_and_raise_comes_back(bed: Testbed) -> None:
    def fail() -> None:
        raise LookupError("not there")

    (bed.folder / "home" / "sky" / ".bashrc").write_text("echo welcome; printf 'no end of line: '\n")
    lines: list[str] = []
    data = os.urandom(8 << 20)
    with sky.ComputePool(sky.SSH(BOTH), logs=lambda line: lines.append(f"{line.rank}: {line.text}")) as pool:
        assert whereabouts(3) @ pool == [("h1", 0, 3, "10.77.0.11"), ("h2", 1, 3, "10.77.0.11")]
        assert whereabouts(4) >> pool in [("h1", 0, 4, "10.77.0.11"), ("h2", 0, 4, "10.77.0.12")]
        out = pool.log_dir / "rank1.out"
        eventually(lambda: out.exists() and out.read_text().startswith("value 3\n"), "what it printed is here", 30)
        for host in bed.hosts:
            assert host.run("find /tmp /dev/shm -name 'rank*.out'") == "", "it is kept once"
        assert list(pool.map(abs, range(-50, 0))) == list(range(50, 0, -1))
        for _ in range(2):
            assert pool.run(bytes.__add__, data, b"!") == [data + b"!"] * 2
        with pytest.raises(LookupError, match="not there") as caught:
            pool.run(fail)
        assert "in fail" in str(caught.value.__cause__)
        assert pool.run(len, "abc") == [3, 3]
    assert {"0: value 3", "1: value 3"} <= set(lines)


@pytest.mark.long
def test_a_rank_that_is_killed_is_named_and_replaced(bed: Testbed) -> None:
    def die(rank: int) -> None:
        if sky.instance_info().rank == rank:
            print("last words", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    with sky.ComputePool(sky.SSH(BOTH)) as pool:
        with pytest.raises(WorkerDied) as caught:
            pool.run(die, 1)
        assert (caught.value.rank, caught.value.node, caught.value.signal) == (1, 1, signal.SIGKILL)
        assert caught.value.log_tail == ("last words",)
        assert [host for host, *_ in whereabouts(1) @ pool] == BOTH


@pytest.mark.long
def test_torch_trains_over_two_hosts(bed: Testbed) -> None:
    def total() -> float:
        import torch
        import torch.distributed as dist

        tensor = torch.full((1000,), float(dist.get_rank() + 1))
        dist.all_reduce(tensor)
        return float(tensor.sum())

    with sky.ComputePool(sky.SSH(BOTH, python=sys.executable)) as pool:
        assert pool.run(total) == [3000.0, 3000.0]


@pytest.mark.long
@pytest.mark.timeout(400)
def test_jax_and_keras_train_over_two_hosts(bed: Testbed) -> None:
    @sky.integrations.jax
    def total() -> tuple[int, float]:
        import jax
        import jax.numpy as jnp

        value = jnp.full((1,), jax.process_index() + 1.0)
        return jax.device_count(), float(jax.pmap(lambda x: jax.lax.psum(x, "i"), axis_name="i")(value)[0])

    @sky.integrations.keras(backend="jax")
    def train(num: int) -> bytes:
        import keras
        import numpy as np

        x, y = sky.shard(np.linspace(0, 1, num)[:, None], np.linspace(1, 0, num)[:, None])
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        model.fit(x, y, epochs=2, batch_size=8, verbose=0)
        return b"".join(weight.tobytes() for weight in model.get_weights())

    with sky.ComputePool(sky.SSH(BOTH, python=sys.executable)) as pool:
        assert pool.run(total) == [(2, 3.0)] * 2
        assert len(set(pool.run(train, 65))) == 1
        bed.hosts[1].run("sed -i '1i 127.0.1.1 h2' /etc/hosts")
        with pytest.raises(ConfigError, match=r"resolves its own name to 127.0.1.1, .* at the top of its /etc/hosts"):
            pool.run(total)


@pytest.mark.long
def test_modules_of_this_machine_travel_by_value_or_as_included(
    bed: Testbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "src" / "bed_parts"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from bed_parts.numbers import Box, twice\n")
    (package / "numbers.py").write_text(
        "import functools, pickle, typing\nFACTOR = 2\nSize = typing.NewType('Size', int)\n"
        "def twice(value: Size):\n    return FACTOR * value\n\n"
        "@functools.cache\ndef fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n\n"
        "def stored(value):\n    return pickle.loads(pickle.dumps((value, twice, fib)))[0], fib(10)\n\n"
        "class Box:\n    def __init__(self, value):\n        self.value = value\n"
        "    def doubled(self):\n        return Box(twice(self.value))\n"
        "    @functools.cached_property\n    def half(self):\n        return self.value / 2\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "src"))
    import bed_parts  # type: ignore[import-not-found]  # made above

    def imported() -> int:
        import bed_parts

        return int(bed_parts.twice(21))

    with sky.ComputePool(sky.SSH("h1")) as pool:
        assert pool.run(bed_parts.twice, 4) == [8]
        (box,) = pool.run(bed_parts.Box.doubled, bed_parts.Box(5))
        assert isinstance(box, bed_parts.Box)
        assert box.value == 10
        ((again, number),) = pool.run(bed_parts.numbers.stored, bed_parts.Box(6))
        assert isinstance(again, bed_parts.Box)
        assert (again.half, number) == (3, 55)
        with pytest.raises(AttributeError, match=r"has no 'twice' here: Image\(includes=\['bed_parts'\]\)"):
            pool.run(imported)
    with sky.ComputePool(sky.SSH("h1"), image=sky.Image(includes=["bed_parts"], env={"A": 1})) as pool:
        assert pool.run(imported) == [42]
        assert pool.run(os.getenv, "A") == ["1"]
        assert pool.run(os.getenv, "HOME") == ["/home/sky"]


def test_what_can_not_be_had_is_refused_with_what_to_do(bed: Testbed) -> None:
    with pytest.raises(ConfigError, match="accelerator=A100:1 can't be had on h1: it has no GPU; leave"):
        sky.ComputePool(sky.SSH("h1"), accelerator="A100").up()
    with pytest.raises(ProvisionError, match="2 of 2 hosts failed:\n  h1:23: refuses"):
        sky.ComputePool(sky.SSH(["h1:23", "h2:23"])).up()


def test_another_minor_version_of_python_is_refused(bed: Testbed) -> None:
    other = "/root/.pyenv/versions/3.12.1/bin/python3"
    if not os.path.exists(other) or sys.version_info[:2] == (3, 12):
        pytest.skip(f"needs {other}, and another Python here")
    with pytest.raises(ProvisionError, match=r"h1 has Python 3\.12, this process 3\.\d+: .*SSH\(python=.*Image"):
        sky.ComputePool(sky.SSH("h1", python=other)).up()


@pytest.mark.long
def test_a_named_pool_stays_up_for_the_next(bed: Testbed) -> None:
    def pool() -> sky.ComputePool:
        return sky.ComputePool(sky.SSH(BOTH), name="bed", idle=30)

    with pool() as first:
        pids = first.run(os.getpid)
    with pool() as second:
        assert second.run(os.getpid) == pids
        data = os.urandom(1 << 20)
        assert second.run(bytes.__add__, data, b"!") == [data + b"!"] * 2
    second.down()


@pytest.mark.long
def test_hosts_with_homes_of_their_own(make_bed: MakeBed) -> None:
    bed = make_bed(3, shared_home=False)
    with sky.ComputePool(sky.SSH("h[13]")) as pool:
        assert [host for host, *_ in whereabouts(1) @ pool] == ["h1", "h3"]
    assert bed.hosts[2].run("ls /home/sky/.atoll/bundle").endswith(".zip\n")


@pytest.mark.long
def test_a_cut_shorter_than_the_grace_kills_nothing(bed: Testbed) -> None:
    with sky.ComputePool(sky.SSH(BOTH, grace_s=30)) as pool:
        call = pool.submit(nap, 1.0, everywhere=True)
        time.sleep(0.3)
        bed.hosts[1].cut()
        time.sleep(1.5)
        bed.hosts[1].heal()
        assert call.result(60) == ["rested", "rested"]
        assert [host for host, *_ in whereabouts(1) @ pool] == BOTH


@pytest.mark.long
def test_a_cut_that_breaks_the_connection_kills_nothing_either(bed: Testbed, capfd: pytest.CaptureFixture[str]) -> None:
    data = os.urandom(30 << 20)
    with sky.ComputePool(sky.SSH(BOTH, grace_s=60)) as pool:
        bed.hosts[1].slow(50)
        call = pool.submit(bytes.__add__, data, b"!", everywhere=True)  # some of it is on its way when the cable goes
        time.sleep(1.0)
        bed.hosts[1].cut()
        time.sleep(12.0)
        bed.hosts[1].heal()
        assert call.result(60) == [data + b"!"] * 2
        assert [host for host, *_ in whereabouts(1) @ pool] == BOTH
    said = capfd.readouterr().err
    assert "h2 (node 1) has not been heard for" in said
    assert "h2 (node 1) answers again" in said


@pytest.mark.long
def test_a_host_that_loses_power_is_named_in_time(bed: Testbed) -> None:
    lost(bed.hosts[1], Host.power_off)


@pytest.mark.long
def test_a_host_that_freezes_is_named_in_time(bed: Testbed) -> None:
    lost(bed.hosts[1], Host.freeze)
    bed.hosts[1].thaw()


def lost(host: Host, happens: object) -> None:
    with sky.ComputePool(sky.SSH(BOTH, grace_s=2)) as pool:
        call = pool.submit(nap, 60.0, everywhere=True)
        time.sleep(0.5)
        happens(host)  # type: ignore[operator]  # a method of Host
        started = time.monotonic()
        with pytest.raises(NodeLost, match=r"node 1 was lost: no connection to h2 for 2 s"):
            call.result(20)
        assert time.monotonic() - started < 10
        assert pool.submit(os.getpid).result(60) > 0  # the other one still works


@pytest.mark.long
def test_a_driver_that_is_killed_leaves_nothing(bed: Testbed, tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(
        "import atoll as sky, time\n"
        "def sleep():\n    print('up', flush=True)\n    time.sleep(100)\n"
        "with sky.ComputePool(sky.SSH(['h1', 'h2']), logs=lambda line: print(line.text, flush=True)) as pool:\n"
        "    pool.run(sleep)\n"
    )
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(sky.__file__).parents[1])},
    ) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == b"up\n"
        driver.kill()
    for host in bed.hosts:
        ended(host, 20)  # and not only after the grace


@pytest.mark.long
def test_ctrl_c_while_nodes_start_ends_everything(bed: Testbed) -> None:
    slow_python(bed.hosts[1], "agent.session", 17)
    with pytest.raises(KeyboardInterrupt), interrupted_when(lambda: "sleep 17" in bed.hosts[1].command_lines()):
        sky.ComputePool(sky.SSH(BOTH)).up()
    bed.hosts[1].run("pkill -f '^sleep 17$'")  # what waits for it sees then that nobody is there


@pytest.mark.long
def test_a_host_whose_python_starts_late_can_be_reached(bed: Testbed, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head's port stays open for as long as the others may take to ask for it."""
    monkeypatch.setattr(preflight, "_REACH_S", 0.5)
    slow_python(bed.hosts[1], "reach", 1.5)
    with sky.ComputePool(sky.SSH(BOTH)) as pool:
        assert pool.run(len, "ab") == [2, 2]


EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "functions"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("environment_variables.py", "WORLD_SIZE"),
        ("shard.py", "the whole is 500500"),
        ("shard_with_shuffle.py", ""),
        ("set_epoch.py", ""),
        ("distributed_sampler.py", "rank 1: "),
        ("process_group_guard.py", ""),
        ("pytorch_basic.py", ""),
        ("gradient_accumulation.py", ""),
        ("head_node.py", "outputs/functions/head_node.pt: "),
        ("head_node_io.py", "rank 0: is_head True, sees ['checkpoint.pt', 'metrics.jsonl']"),
        ("shard_several_arrays.py", ""),
        ("mixed_precision.py", ""),
        ("nccl_timeout.py", ""),
        ("jax_pmap.py", "rank 1: 2 devices"),
        ("keras_jax.py", "node 1: accuracy 0.9"),
    ],
)
@pytest.mark.long
@pytest.mark.timeout(200)
def test_a_script_of_the_guide_runs_with_only_the_provider_changed(
    name: str, said: str, bed: Testbed, tmp_path: Path
) -> None:
    done = run_over_ssh(name, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "preflight: 2 hosts OK" in done.stderr
    assert said in done.stdout


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("explicit_decorator.py", "backend='nccl' needs a GPU for each of the 1 ranks of this node, and 0 are visible"),
        ("hugging_face_trainer.py", "backend='nccl' needs a GPU for each of the 1 ranks of this node"),
        ("mig.py", "gives whole cards only; leave mig out"),
    ],
)
@pytest.mark.long
@pytest.mark.timeout(200)
def test_a_script_of_the_guide_that_needs_gpus_is_refused_where_hosts_have_none(
    name: str, why: str, bed: Testbed, tmp_path: Path
) -> None:
    done = run_over_ssh(name, tmp_path)
    assert done.returncode != 0
    assert why in done.stderr


def run_over_ssh(name: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A script with another provider in its ``where.py``."""
    (folder / "functions").mkdir()
    (folder / "austen").symlink_to(EXAMPLES.parent / "austen")
    for needed in (name, "stand_ins.py"):
        shutil.copy(EXAMPLES / needed, folder / "functions")
    where = (EXAMPLES / "where.py").read_text()
    python = "" if name in ("shard.py", "environment_variables.py") else f", python={sys.executable!r}"  # has torch
    provider = f"provider = sky.SSH(hosts={BOTH!r}{python})"
    changed = where.replace("provider = sky.Local()", provider).replace("str = _arguments.accelerator", "object = None")
    assert changed.count(provider) == changed.count("object = None") == 1  # hosts have no GPUs, and simulate none
    (folder / "functions" / "where.py").write_text(changed)
    command = [sys.executable, f"functions/{name}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=190, cwd=folder)


@pytest.mark.long
def test_gather_streams_and_calls_that_are_tried_again(bed: Testbed) -> None:
    @sky.compute
    def count(num: int) -> Iterator[int]:
        yield from range(num)

    @sky.compute
    def die_once(mark: str) -> str:
        if sky.instance_info().rank == 1 and not os.path.exists(mark):
            Path(mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return "survived"

    with sky.ComputePool(sky.SSH(BOTH), retries=1) as pool:
        both = sky.gather(whereabouts(1), whereabouts(2)) >> pool
        assert sorted((value, rank) for _host, rank, value, _addr in both) == [(1, 0), (2, 0)]
        assert list(count(100) >> pool) == list(range(100))
        assert die_once("/home/sky/died") @ pool == ["survived"] * 2


def test_a_pool_says_what_is_wrong_with_its_hosts_before_anything_starts(
    bed: Testbed, capfd: pytest.CaptureFixture[str]
) -> None:
    with sky.ComputePool(sky.SSH(BOTH), logs="quiet") as pool:
        assert pool.run(len, "ab") == [2, 2]
    assert capfd.readouterr().err == ""
    with sky.ComputePool(sky.SSH("h1")) as pool:
        assert pool.run(len, "ab") == [2]
    assert "preflight: " in capfd.readouterr().err
    with sky.ComputePool(sky.SSH("h1")) as pool:
        assert pool.run(len, "ab") == [2]
    assert "preflight: " not in capfd.readouterr().err  # it was well just now
